"""torchrun, but quiet about a failed rank or a signal: the ranks say themselves what happened (see launch.py).

How each failed rank left goes into a file for the launcher: a rank that exits by itself says nothing.
"""

from __future__ import annotations

import functools
import logging
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any

from mdapo.errors import EXIT_INTERRUPTED
from mdapo.trainer.launch import write_exits
from mdapo.trainer.signals import exit_on_signal


def loopback_store(make: Callable[..., Any], host: str, port: int, *given: Any, **more: Any) -> Any:
    """The store where ranks meet. Torch's listens on every address, and asks nobody who he is; the ranks of ``mdapo
    train`` are on this machine, and so it listens on the loopback's alone."""
    listening = socket.create_server((host, port))
    return make(host, port, *given, **more, master_listen_fd=listening.detach())


def main(arguments: Sequence[str]) -> int:
    """0, 1 for ranks that failed, ``EXIT_INTERRUPTED`` for a signal."""
    exit_on_signal(lambda: None)  # torch takes seconds to import; its own handlers come with the ranks
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import static_tcp_rendezvous
    from torch.distributed.run import main as torchrun

    make = functools.partial(loopback_store, static_tcp_rendezvous.TCPStore)
    static_tcp_rendezvous.TCPStore = make  # pyrefly: ignore
    logging.disable(logging.WARNING)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        torchrun(list(arguments))
    except ChildFailedError as error:
        write_exits({rank: failure.exitcode for rank, failure in error.failures.items()})
        return 1
    except SignalException:
        return EXIT_INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
