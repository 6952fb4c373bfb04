"""torchrun, but quiet about a failed rank or a signal: the ranks say themselves what happened (see launch.py).

How each failed rank left goes into a file for the launcher: a rank that exits by itself says nothing.
"""

from __future__ import annotations

import logging
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

from mdapo.trainer.launch import write_exits

if __name__ == "__main__":
    logging.disable(logging.WARNING)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        main(sys.argv[1:])
    except ChildFailedError as error:
        write_exits({rank: failure.exitcode for rank, failure in error.failures.items()})
        sys.exit(1)
    except SignalException:
        sys.exit(1)
