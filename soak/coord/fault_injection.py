"""Run `strata coordinator` with a failpoint that kills it: `-m soak.coord.fault_injection FAILPOINT SKIP ARGUMENT…`."""

from __future__ import annotations

import sys

from strata.base.failpoint import arm, kill
from strata.cli.main import main

if __name__ == "__main__":
    arm(sys.argv[1], kill, skip=int(sys.argv[2]))
    sys.argv[:] = ["strata", *sys.argv[3:]]
    main()
