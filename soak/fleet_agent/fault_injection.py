"""Runs `strata …` with a failpoint at which the process freezes until SIGCONT.

python -m soak.fleet_agent.fault_injection FAILPOINT SKIP ARGUMENT…
"""

from __future__ import annotations

import os
import signal
import sys

from strata.base.failpoint import arm
from strata.cli.main import main


def freeze(name: str) -> None:
    """Stop this process until SIGCONT."""
    del name
    os.kill(os.getpid(), signal.SIGSTOP)


if __name__ == "__main__":
    arm(sys.argv[1], freeze, skip=int(sys.argv[2]))
    sys.argv[:] = ["strata", *sys.argv[3:]]
    main()
