"""torchrun, but quiet about a failed rank: the ranks say themselves what went wrong (see launch.py)."""

from __future__ import annotations

import logging
import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

if __name__ == "__main__":
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        main(sys.argv[1:])
    except ChildFailedError:
        sys.exit(1)
