"""Scripts rely on the exit status: the numbers are fixed and every code has one."""

from __future__ import annotations

from strata.base.errors import Code
from strata.cli.exit_codes import EXIT_CODE_OF, ExitCode


def test_every_code_has_an_exit_status_that_is_not_success() -> None:
    assert EXIT_CODE_OF.keys() == set(Code)
    assert ExitCode.OK not in EXIT_CODE_OF.values()


def test_the_numbers_are_those_of_the_documents() -> None:
    assert {status.name.lower(): status.value for status in ExitCode} == {
        "ok": 0,
        "usage": 2,
        "unreachable": 3,
        "auth": 4,
        "stale": 5,
        "unschedulable": 6,
        "internal": 70,
        "failed": 100,
        "unfinished": 101,
        "not_found": 102,
        "cancelled": 103,
        "interrupted": 130,
        "broken_pipe": 141,
    }
