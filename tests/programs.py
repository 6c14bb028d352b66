"""Programs of the system that tests need: a suite without one of them says so in one line, before its first test.

A module of tests names them in `NEEDS`; the `conftest` of a suite calls `require_programs` when all is collected. The
pool of `tests.tiers` reads them in the source with `needs_of`, before it starts a process.
"""

from __future__ import annotations

import ast
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

import pytest

from strata.fleet.bubblewrap import PROGRAMS

ROOT: Final = "root"
"""Not a program: only root can become another user."""
PACKAGES: Final = {"bwrap": "bubblewrap", "ip": "iproute2", "nft": "nftables", "slurmd": "slurm-wlm"}


def _is_there(program: str) -> bool:
    return os.geteuid() == 0 if program == ROOT else shutil.which(program, path=PROGRAMS) is not None


def require_programs(items: Iterable[pytest.Item], is_there: Callable[[str], bool] = _is_there) -> None:
    needs = {item.path.name: tuple(getattr(getattr(item, "module", None), "NEEDS", ())) for item in items}
    files, line = find_missing(needs, is_there)
    if files:
        raise pytest.UsageError(line)


def find_missing(
    needs: Mapping[str, Iterable[str]], is_there: Callable[[str], bool] = _is_there
) -> tuple[list[str], str]:
    """Which of the files cannot run, by what each needs, and a line that says so and what to do."""
    missing = sorted({program for programs in needs.values() for program in programs if not is_there(program)})
    files = sorted(name for name, programs in needs.items() if set(programs) & set(missing))
    packages = [PACKAGES[program] for program in missing if program != ROOT]
    todo = ["run as root"] * (ROOT in missing) + [f"apt-get install {' '.join(packages)}"] * bool(packages)
    return files, f"{', '.join(files)} cannot run here: {', and '.join(todo)}"


def needs_of(path: Path) -> tuple[str, ...]:
    """`NEEDS` of a file of tests, by its source."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(node, ast.Assign | ast.AnnAssign) and any(
            isinstance(target, ast.Name) and target.id == "NEEDS" for target in targets
        ):
            assert node.value is not None
            return tuple(ast.literal_eval(node.value))
    return ()
