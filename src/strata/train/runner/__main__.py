"""`torchrun … -m strata.train.runner --settings FILE`: one rank, which ends when its torchrun ends."""

from __future__ import annotations

import ctypes
import signal
import sys
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def end_with_parent() -> None:
    """A rank whose torchrun was killed would never be ended by another process, and would keep the socket for ever."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


if __name__ == "__main__":
    # Before the engine is imported: that takes seconds, in which torchrun can be killed too.
    end_with_parent()
    from strata.train.runner.runner_dispatcher import main

    sys.exit(main())
