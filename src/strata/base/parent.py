"""Makes a process end with its parent (PR_SET_PDEATHSIG), makes it adopt orphans, and names processes.

`python -m strata.base.parent COMMAND…` becomes COMMAND, killed with its parent: for a parent that is not our own code.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Final

TIED_COMMAND: Final = (sys.executable, "-P", "-m", "strata.base.parent")
"""Stands in front of a command that another program starts. No module of the folder it starts in takes the place of
ours."""
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15
_PR_SET_CHILD_SUBREAPER: Final = 36
# Not when it is needed: that is between fork and exec, where a lock of another thread may be held for ever.
_LIBC: Final = ctypes.CDLL(None) if sys.platform == "linux" else None


def end_with_parent(number: signal.Signals = signal.SIGTERM, *, parent: int | None = None) -> None:
    """The kernel sends this process the signal when its parent ends; nothing else would stop it then. Linux only.

    `parent` is the process that started this one: if it has ended already, no signal comes, and this one exits.
    """
    if _LIBC is None:
        return
    _LIBC.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os._exit(128 + number)


def adopt_orphans() -> None:
    """Makes this process the parent of every descendant whose own parent ends (PR_SET_CHILD_SUBREAPER): also one in a
    session of its own stays below it. Linux only."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def name_process(name: str) -> None:
    """Give this process a name of at most 15 characters for `ps` and `/proc/PID/comm`: a forked one shows the command
    line of its parent. Linux only."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


if __name__ == "__main__":
    end_with_parent(signal.SIGKILL, parent=os.getppid())
    os.execv(sys.argv[1], sys.argv[1:])  # noqa: S606 - the command is the caller's
