"""Run each test that failed once more, alone: what then passes is FLAKY, which a run may have in at most three files.

pytest keeps the ids of failed tests in its cache over the suites of one run of `.ci/run`, which empties it first. A
flaky test is a defect whose cause has to be found; the second run only keeps it from hiding the other results.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FAILED = ROOT / ".pytest_cache" / "v" / "cache" / "lastfailed"
MOST_RERUN = 20
MOST_FLAKY_FILES = 3
"""Tests of one file share what they set up: one cause can fail all of them."""


def passes_alone(test_id: str) -> bool:
    # Without the cache: what is recorded there is what failed in its suite.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test_id]
    return subprocess.run(command, cwd=ROOT, check=False).returncode == 0


def main() -> int:
    test_ids = sorted(json.loads(FAILED.read_text(encoding="utf-8"))) if FAILED.exists() else []
    if len(test_ids) > MOST_RERUN:
        print(f"{len(test_ids)} tests failed: too many to be flaky, none is run again")
        return 1
    flaky = [test_id for test_id in test_ids if passes_alone(test_id)]
    for test_id in test_ids:
        print(f"{'FLAKY ' if test_id in flaky else 'FAILED'} {test_id}")
    flaky_files = {test_id.partition("::")[0] for test_id in flaky}
    if len(flaky_files) > MOST_FLAKY_FILES:
        print(f"flaky tests in {len(flaky_files)} files, at most {MOST_FLAKY_FILES} are tolerated")
    return int(len(flaky) < len(test_ids) or len(flaky_files) > MOST_FLAKY_FILES)


if __name__ == "__main__":
    sys.exit(main())
