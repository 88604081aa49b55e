"""Gloo with one thread per group, for this process, or for a script: `python -m tests.one_thread SCRIPT ...`."""

from __future__ import annotations

import os
import runpy
import sys
from datetime import timedelta
from pathlib import Path

from torch import distributed


class OneThread(distributed.ProcessGroupGloo):
    """Gloo with one thread per group. By default it has two threads, which write the name of the last collective to one
    string without a lock (PyTorch 2.13, `ProcessGroupGloo::runLoop`). With several collectives in flight, a process
    occasionally dies of a double free."""

    def __init__(self, store: distributed.Store, rank: int, size: int, timeout: timedelta, **settings: bool):
        options = self._Options()
        options._devices, options._timeout, options._threads = [self.create_default_device()], timeout, 1
        for name, value in settings.items():  # `enable_reconfigure` from PyTorch 2.14 on
            setattr(options, name, value)
        super().__init__(store, rank, size, options)


def main() -> None:
    """Run a script, or a module after -m, as Python does. A script that succeeds ends without Python's finalisation,
    because a thread of gloo that then waits for the GIL occasionally aborts the process (PyTorch 2.13, Python 3.11)."""
    distributed.distributed_c10d.ProcessGroupGloo = OneThread
    sys.argv = sys.argv[1:]
    try:
        if sys.argv[0] == "-m":
            sys.argv = sys.argv[1:]
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as leave:
        if leave.code:
            raise
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
