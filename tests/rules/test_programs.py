"""Tests that need a program of the system name it, and a machine without it is told so in one line."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.programs import PACKAGES, ROOT, find_missing, needs_of, require_programs

TESTS = Path(__file__).parents[1]
SUITES = ("abuse", "e2e", "shell")


def item(name: str, *needs: str) -> Any:
    return SimpleNamespace(path=Path(name), module=SimpleNamespace(NEEDS=needs))


def test_what_is_missing_is_one_line_with_the_files_and_what_to_do() -> None:
    items = [item("test_sandbox.py", ROOT, "bwrap", "nft")] * 29 + [item("test_exec.py", "bwrap"), item("test_a.py")]
    require_programs(items, lambda program: True)
    with pytest.raises(pytest.UsageError) as raised:
        require_programs(items, lambda program: program == ROOT)
    assert str(raised.value) == ("test_exec.py, test_sandbox.py cannot run here: apt-get install bubblewrap nftables")
    with pytest.raises(pytest.UsageError, match=r"test_sandbox.py cannot run here: run as root$"):
        require_programs(items, lambda program: program != ROOT)


@pytest.mark.parametrize("suite", SUITES)
def test_a_module_that_runs_such_a_program_names_it(suite: str) -> None:
    runs = re.compile(r'"(bwrap|nft|ip)"[,\]]|run\("(nft) |sandbox_mode="(required)"|mode="(required)"')
    for path in sorted((TESTS / suite).rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        named = set(needs_of(path))
        found = {"bwrap" if word == "required" else word for words in runs.findall(text) for word in words if word}
        assert found <= named, f"{path.relative_to(TESTS)} runs {sorted(found - named)}: name it in NEEDS"
        assert named <= {*PACKAGES, ROOT}


def test_what_a_run_of_many_files_misses_is_one_line() -> None:
    needs = {"a.py": ("bwrap", "nft"), "b.py": (), "c.py": (ROOT, "ip"), "d.py": ("ip",)}
    assert find_missing(needs, lambda program: True)[0] == []
    assert find_missing(needs, lambda program: program in ("ip", ROOT)) == (
        ["a.py"],
        "a.py cannot run here: apt-get install bubblewrap nftables",
    )
    assert find_missing(needs, lambda program: program != ROOT) == (["c.py"], "c.py cannot run here: run as root")
