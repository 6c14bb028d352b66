"""`strata coordinator`, but it kills itself at a failpoint: `python -m soak.coord.armed FAILPOINT SKIP ARGUMENT…`."""

from __future__ import annotations

import sys

from strata.base.failpoint import arm, kill
from strata.cli.main import main

if __name__ == "__main__":
    arm(sys.argv[1], kill, skip=int(sys.argv[2]))
    sys.argv[:] = ["strata", *sys.argv[3:]]
    main()
