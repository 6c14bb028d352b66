"""`torchrun … -m strata.train.runner --settings FILE`: one rank, which ends when its torchrun ends."""

from __future__ import annotations

import signal
import sys

from strata.base.parent import end_with_parent

if __name__ == "__main__":
    # A rank whose torchrun was killed would keep the socket for ever. Before the engine is imported: that takes
    # seconds, in which torchrun can be killed too.
    end_with_parent(signal.SIGKILL)
    from strata.train.runner.runner_dispatcher import main

    sys.exit(main())
