"""Counts cases on a CUDA device that does not exist, and says what is worse than in the table, or writes it again:
`python -m tests.cuda_lane.record [--record] [CASE …]`.
"""

from __future__ import annotations

import argparse
import sys

from tests.cuda_lane import environment
from tests.cuda_lane.cases import CASES
from tests.cuda_lane.table import TABLE, read_table, worse, write_table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="as in the table; all if none is named")
    parser.add_argument("--record", action="store_true", help="write what was counted into the table")
    options = parser.parse_args()
    counted = environment.run(environment.prepare(), options.cases or list(CASES))
    recorded = read_table() if TABLE.exists() else {}
    if options.record:
        write_table({name: each for name, each in {**recorded, **counted}.items() if name in CASES})
        return 0
    problems = {
        name: worse(recorded[name], each) if name in recorded else ["not recorded"] for name, each in counted.items()
    }
    for name, found in problems.items():
        print(f"{name}: {'; '.join(found) or 'no more than recorded'}")
    return int(any(problems.values()))


if __name__ == "__main__":
    sys.exit(main())
