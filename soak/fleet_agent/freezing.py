"""`strata …`, but at a failpoint the process freezes: `python -m soak.fleet_agent.freezing FAILPOINT SKIP ARGUMENT…`.

It goes on behind the failpoint when it is woken up.
"""

from __future__ import annotations

import os
import signal
import sys

from strata.base.failpoint import arm
from strata.cli.main import main


def freeze(name: str) -> None:
    """Nothing happens in this process from here on, until somebody sends SIGCONT."""
    del name
    os.kill(os.getpid(), signal.SIGSTOP)


if __name__ == "__main__":
    arm(sys.argv[1], freeze, skip=int(sys.argv[2]))
    sys.argv[:] = ["strata", *sys.argv[3:]]
    main()
