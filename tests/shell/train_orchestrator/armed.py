"""An orchestrator that kills itself when it comes to a failpoint: `… armed NAME SKIP --settings FILE …`."""

from __future__ import annotations

import sys

from strata.base import failpoint
from strata.train.orchestrator.__main__ import main

if __name__ == "__main__":
    name, skip, *arguments = sys.argv[1:]
    failpoint.arm(name, failpoint.kill, skip=int(skip))
    sys.exit(main(arguments))
