"""Scripts rely on the exit status: the numbers are fixed and every code has one."""

from __future__ import annotations

import re
from pathlib import Path

from strata.base.errors import Code
from strata.cli.exit_codes import EXIT_CODE_OF, ExitCode

PAGE = Path(__file__).parents[3] / "docs" / "commands.md"


def test_every_code_has_an_exit_status_that_is_not_success() -> None:
    assert EXIT_CODE_OF.keys() == set(Code)
    assert ExitCode.OK not in EXIT_CODE_OF.values()


def test_the_numbers_are_those_of_the_documents() -> None:
    table = re.findall(r"^\| `(\d+)` \| (\w+) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert {name: int(number) for number, name in table} == {code.name.lower(): code.value for code in ExitCode}


def test_the_numbers_never_change() -> None:
    assert [(code.name, code.value) for code in ExitCode] == [
        ("OK", 0),
        ("USAGE", 2),
        ("UNREACHABLE", 3),
        ("AUTH", 4),
        ("STALE", 5),
        ("UNSCHEDULABLE", 6),
        ("INTERNAL", 70),
        ("FAILED", 100),
        ("UNFINISHED", 101),
        ("NOT_FOUND", 102),
        ("CANCELLED", 103),
        ("INTERRUPTED", 130),
        ("BROKEN_PIPE", 141),
    ]
