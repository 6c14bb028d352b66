"""Programs of the system that tests need: a suite without one of them says so in one line, before its first test.

A module of tests names them in `NEEDS`; the `conftest` of a suite calls `require_programs` when all is collected.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from typing import Final

import pytest

from strata.fleet.agent.sandbox import PROGRAMS

ROOT: Final = "root"
"""Not a program: only root can become another user."""
PACKAGES: Final = {"bwrap": "bubblewrap", "ip": "iproute2", "nft": "nftables"}


def _is_there(program: str) -> bool:
    return os.geteuid() == 0 if program == ROOT else shutil.which(program, path=PROGRAMS) is not None


def require_programs(items: Iterable[pytest.Item], is_there: Callable[[str], bool] = _is_there) -> None:
    needing: dict[str, set[str]] = {}
    for item in items:
        for program in getattr(getattr(item, "module", None), "NEEDS", ()):
            needing.setdefault(program, set()).add(item.path.name)
    missing = sorted(program for program in needing if not is_there(program))
    if not missing:
        return
    files = sorted(set().union(*(needing[program] for program in missing)))
    packages = [PACKAGES[program] for program in missing if program != ROOT]
    todo = ["run as root"] * (ROOT in missing) + [f"apt-get install {' '.join(packages)}"] * bool(packages)
    raise pytest.UsageError(f"{', '.join(files)} cannot run here: {', and '.join(todo)}")
