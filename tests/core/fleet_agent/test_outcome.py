"""Every way a child can end has one cause, and words for it."""

from __future__ import annotations

import pytest

from strata.fleet.agent.outcome import ERROR_BYTES, classify_exit, describe_exit_status
from strata.fleet.agent.state import StopOrder
from strata.fleet.agent.supervised import ChildExit, LimitsSpec, SupervisorLost
from strata.fleet.core.job import Cause

PREEMPTED = StopOrder(cause=Cause.PREEMPTED, reason="the agent was stopped")
STALE = StopOrder(cause=Cause.CANCELLED, reason="another attempt has begun", drop=True)
NO_TORCH = """\
Traceback (most recent call last):
  File "train.py", line 1, in <module>
    import torch
ModuleNotFoundError: No module named 'torch'
"""
CUDA = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"


@pytest.mark.parametrize(
    ("seen", "tail", "stop", "cause"),
    [
        (ChildExit(started=True, status=0), "", None, None),
        (ChildExit(started=True, status=1), "ValueError: no", None, Cause.USER_ERROR),
        (ChildExit(started=True, status=-11), "", None, Cause.USER_ERROR),
        (ChildExit(started=True, status=-9), "", None, Cause.OOM),
        (ChildExit(started=True, status=137), "", None, Cause.OOM),
        (ChildExit(started=True, status=1, oom_kills=1), "a worker died", None, Cause.OOM),
        (ChildExit(started=True, status=1), CUDA, None, Cause.OOM),
        (ChildExit(started=True, status=1), "MemoryError\n", None, Cause.OOM),
        (ChildExit(started=True, status=1), "x = MemoryErrors()", None, Cause.USER_ERROR),
        (ChildExit(started=True, status=0), CUDA, None, None),
        (ChildExit(started=False, error="no such file", setup=True), "", None, Cause.SETUP_ERROR),
        (ChildExit(started=False, error="cannot allocate memory"), "", None, Cause.INFRA),
        (ChildExit(started=True, status=1), NO_TORCH, None, Cause.SETUP_ERROR),
        (ChildExit(started=True, status=1), f"{NO_TORCH}Retrying\n", None, Cause.USER_ERROR),
        (ChildExit(started=True, status=2), NO_TORCH, None, Cause.USER_ERROR),
        (ChildExit(started=True, status=1), NO_TORCH.splitlines()[-1], None, Cause.USER_ERROR),
        (ChildExit(started=True, status=-9, timed_out=True), "", None, Cause.TIMEOUT),
        (ChildExit(started=True, status=-15, stopped=True), "", PREEMPTED, Cause.PREEMPTED),
        (ChildExit(started=True, status=0, stopped=True), "", PREEMPTED, Cause.PREEMPTED),
        (ChildExit(started=True, status=-15, stopped=True), "", None, Cause.PREEMPTED),
        # It was over before the agent's wish reached it.
        (ChildExit(started=True, status=0), "", PREEMPTED, None),
        (ChildExit(started=True, status=1), "", PREEMPTED, Cause.USER_ERROR),
        (SupervisorLost(), "", None, Cause.INFRA),
        (SupervisorLost(), "", PREEMPTED, Cause.PREEMPTED),
    ],
)
def test_how_a_child_ends_decides_the_cause(
    seen: ChildExit | SupervisorLost, tail: str, stop: StopOrder | None, cause: Cause | None
) -> None:
    assert classify_exit(seen, tail, stop=stop, timeout_s=0).cause is cause


def test_an_attempt_that_nobody_wants_is_dropped_however_it_ended() -> None:
    for seen in (ChildExit(started=True, status=0), ChildExit(started=True, status=-9, stopped=True), SupervisorLost()):
        assert classify_exit(seen, "", stop=STALE, timeout_s=0).drop


def test_the_error_has_the_last_lines_of_the_output_and_not_all_of_it() -> None:
    tail = "early\n" + "x" * ERROR_BYTES + "\nValueError: the end"
    error = classify_exit(ChildExit(started=True, status=3), tail, stop=None, timeout_s=0).error
    assert error.startswith("exit code 3\n")
    assert error.endswith("ValueError: the end")
    assert "early" not in error


def test_signals_are_spelled_by_name() -> None:
    assert [describe_exit_status(status) for status in (2, -9, -250)] == [
        "exit code 2",
        "killed by SIGKILL",
        "killed by signal 250",
    ]


def test_memory_that_ran_out_is_told_as_the_hosts_by_the_kernel_and_as_a_cards_by_the_trainer() -> None:
    def told(child: ChildExit, tail: str = "") -> object:
        return classify_exit(child, tail, stop=None, timeout_s=0).facts.get("out_of_memory")

    assert told(ChildExit(started=True, status=137, oom_kills=1)) == "host"
    assert told(ChildExit(started=True, status=1), "torch.OutOfMemoryError: CUDA out of memory. Tried") == "gpu"
    assert told(ChildExit(started=True, status=137)) is None, "somebody killed it, perhaps not for memory"
    assert told(ChildExit(started=True, status=1), "MemoryError") is None
    assert told(ChildExit(started=True, status=0), "CUDA out of memory, smaller batch") is None


GIB = 1 << 30
DECLARED = LimitsSpec(memory_bytes=GIB, memory_set_by="min_ram_gib of the job", processes=60, cores=1)


@pytest.mark.parametrize(
    ("seen", "tail", "limits", "error"),
    [
        (
            ChildExit(started=True, status=-9, oom_kills=1),
            "",
            DECLARED,
            "out of memory: killed by SIGKILL; its limit is 1 GiB (min_ram_gib of the job)",
        ),
        (
            ChildExit(started=True, status=-9, oom_kills=1),
            "",
            LimitsSpec(memory_bytes=2 * GIB, memory_set_by="sandbox.memory_gib of the host"),
            "out of memory: killed by SIGKILL; its limit is 2 GiB (sandbox.memory_gib of the host)",
        ),
        (
            ChildExit(started=True, status=-9, oom_kills=1),
            "",
            LimitsSpec(),
            "out of memory: killed by SIGKILL; the host was out of memory, for the job has no limit there",
        ),
        (
            ChildExit(started=True, status=-9, oom_kills=1, exceeded="memory", exceeded_bytes=GIB * 5 // 4),
            "",
            DECLARED,
            "out of memory: it took 1.25 GiB; its limit is 1 GiB (min_ram_gib of the job)",
        ),
        (
            ChildExit(started=True, status=-9, exceeded="processes", exceeded_count=93),
            "",
            DECLARED,
            "it had 93 processes and threads; its limit is 60 (sandbox.processes of the host)",
        ),
        (
            ChildExit(started=True, status=-9, exceeded="cpu", exceeded_count=1.97),
            "",
            DECLARED,
            "it used 1.97 cores; its limit is 1 (min_cores of the job)",
        ),
        (
            ChildExit(started=True, status=-9),
            "",
            DECLARED,
            "killed by SIGKILL, perhaps because the host is out of memory; the kernel counted none",
        ),
        (
            ChildExit(started=True, status=1),
            "MemoryError",
            DECLARED,
            "it reports that it is out of memory: exit code 1\nMemoryError",
        ),
    ],
)
def test_a_limit_is_told_with_what_was_taken_and_who_set_it(
    seen: ChildExit, tail: str, limits: LimitsSpec, error: str
) -> None:
    assert classify_exit(seen, tail, stop=None, timeout_s=0, limits=limits).error == error
