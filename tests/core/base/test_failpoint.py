from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from strata.base.errors import Code, StrataError
from strata.base.failpoint import arm, disarm_all, fail, failpoint


@pytest.fixture(autouse=True)
def _nothing_armed() -> Iterator[None]:
    disarm_all()
    yield
    disarm_all()


def calls_made_by(name: str) -> list[str]:
    """Every call, of Python or of C, between entering `failpoint` and leaving it."""
    calls: list[str] = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            calls.append(frame.f_code.co_name)
        elif event == "c_call":
            calls.append(argument.__qualname__)

    sys.setprofile(note)
    failpoint(name)
    sys.setprofile(None)
    return [call for call in calls if call != "setprofile"]


def test_with_nothing_armed_a_failpoint_calls_nothing_and_looks_nothing_up() -> None:
    assert calls_made_by("test.place") == ["failpoint"]
    assert {"get", "_hit"}.isdisjoint(calls_made_by("test.place"))
    arm("test.other", fail)
    assert calls_made_by("test.place") == ["failpoint", "_hit", "dict.get"]


def test_an_armed_failpoint_acts_once() -> None:
    hits: list[str] = []
    arm("test.place", hits.append)
    for _ in range(3):
        failpoint("test.place")
    assert hits == ["test.place"]


def test_skipped_hits_pass_before_it_acts() -> None:
    hits: list[int] = []
    arm("test.place", lambda _name: hits.append(turn), skip=2)
    for turn in range(5):  # noqa: B007 - the lambda reads it
        failpoint("test.place")
    assert hits == [2]


def test_other_failpoints_pass() -> None:
    arm("test.place", fail)
    failpoint("test.elsewhere")
    with pytest.raises(StrataError, match=r"failpoint test\.place fired") as caught:
        failpoint("test.place")
    assert caught.value.code is Code.UNAVAILABLE
    failpoint("test.place")


def test_disarming_forgets_everything() -> None:
    arm("test.place", fail)
    disarm_all()
    failpoint("test.place")


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL is POSIX")
def test_kill_ends_the_process_without_flushing_or_cleaning_up() -> None:
    program = """
import atexit
from strata.base.failpoint import arm, failpoint, kill
atexit.register(print, "cleaned up", flush=True)
arm("test.place", kill)
print("before", flush=True)
print("unflushed", end="")
try:
    failpoint("test.place")
finally:
    print("after", flush=True)
"""
    ended = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert ended.stdout == "before\n"
