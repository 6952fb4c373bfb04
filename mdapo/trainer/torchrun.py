"""torchrun, but quiet about a failed rank or a signal: the ranks say themselves what happened (see launch.py)."""

from __future__ import annotations

import logging
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

if __name__ == "__main__":
    logging.disable(logging.WARNING)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        main(sys.argv[1:])
    except (ChildFailedError, SignalException):
        sys.exit(1)
