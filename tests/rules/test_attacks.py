"""The attack suite keeps at least the attacks that an outside review tried."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
FEWEST: Final = 188


def test_the_attack_suite_has_not_become_smaller() -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests/abuse"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=100)
    attacks = [line for line in listed.stdout.splitlines() if "::" in line]
    assert len(attacks) >= FEWEST
