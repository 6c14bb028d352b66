"""A process that ends when the one that started it has ended: a supervisor that is killed leaves nothing behind."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
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
