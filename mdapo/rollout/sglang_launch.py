"""Runs SGLang's own server in this process, with an API key that is nowhere to be read.

Started by ``sglang_guard.py`` with the interpreter of SGLang's environment, in which there is no mdapo: standard
library only. The key is the first line of standard input; SGLang itself takes it from the command line, which everybody
on the machine can read, and writes all its options to its log.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from typing import Any

HIDDEN = "<redacted>"


class HiddenKey(str):
    """Compares as the key, which is all that the server's check needs; shown, or sent to another process, it is not."""

    __slots__ = ()

    def __repr__(self) -> str:
        return repr(HIDDEN)

    def __deepcopy__(self, _memo: dict[int, Any]) -> HiddenKey:
        return self

    def __reduce_ex__(self, _protocol: Any) -> tuple[type[str], tuple[str]]:
        return str, (HIDDEN,)  # the scheduler and the detokenizer get all options, and have no use for it


def main() -> None:
    sys.path.pop(0)  # this file's folder, whose modules are mdapo's
    key = sys.stdin.readline().strip()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # nobody after this reads what may follow
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    # "--hos" for "--host" would get round what mdapo looks for in rollout.engine_args
    parser = argparse.ArgumentParser
    parser.__init__ = functools.partialmethod(parser.__init__, allow_abbrev=False)  # type: ignore[method-assign]
    options = prepare_server_args(sys.argv[1:])
    options.api_key = HiddenKey(key)
    try:
        run_server(options)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":  # not where multiprocessing imports this file again, in SGLang's own processes
    main()
