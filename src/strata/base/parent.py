"""A process that ends when the one that started it has ended: a supervisor that is killed leaves nothing behind."""

from __future__ import annotations

import ctypes
import signal
import sys
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def end_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """The kernel sends this process the signal when its parent ends; nothing else would stop it then. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
