"""Classifies how a child ended: the cause and the message that the agent reports to the hub."""

from __future__ import annotations

import re
import signal
from typing import Any, Final

from strata.fleet.agent.state import AttemptOutcome, StopOrder
from strata.fleet.agent.supervised import ChildExit, SupervisorLost
from strata.fleet.core.job import Cause

ERROR_BYTES: Final = 8192
GIB: Final = 1024**3
_KILL: Final = 9
"""SIGKILL as a number: Windows has no such name."""
_OUT_OF_MEMORY: Final = re.compile(
    r"CUDA out of memory|CUDA error: out of memory|OutOfMemoryError|HIP out of memory|^MemoryError\b"
    r"|Cannot allocate memory|std::bad_alloc|CUBLAS_STATUS_ALLOC_FAILED",
    re.MULTILINE,
)
_OUT_OF_VRAM: Final = re.compile(
    r"CUDA out of memory|CUDA error: out of memory|HIP out of memory|CUBLAS_STATUS_ALLOC_FAILED"
    r"|torch\.(cuda\.)?OutOfMemoryError"
)
"""The trainer's word: nobody else sees how a card's memory ended."""

_TRACEBACK: Final = "Traceback (most recent call last):"
_IMPORT: Final = re.compile(r"(?:ModuleNotFoundError|ImportError): ")


def classify_exit(
    status: ChildExit | SupervisorLost, tail: str, *, stop: StopOrder | None, timeout_s: float
) -> AttemptOutcome:
    """`tail` is the end of the child's output, `stop` this agent's order to stop, if there was one."""
    if isinstance(status, SupervisorLost):
        message = "the supervisor of the child was killed, or the host restarted"
        return _stopped(stop, {}) if stop is not None else AttemptOutcome(cause=Cause.INFRA, error=message)
    facts = _facts(status, tail)
    if stop is not None and (status.stopped or stop.drop):
        return _stopped(stop, facts)
    cause, message = _cause(status, tail, timeout_s)
    if status.started and cause in (Cause.TIMEOUT, Cause.OOM, Cause.USER_ERROR, Cause.SETUP_ERROR):
        message = _with_tail(message, tail)
    return AttemptOutcome(cause=cause, error=message, facts=facts)


def _stopped(stop: StopOrder, facts: dict[str, Any]) -> AttemptOutcome:
    return AttemptOutcome(cause=stop.cause, error=stop.reason, facts=facts, drop=stop.drop)


def _cause(child: ChildExit, tail: str, timeout_s: float) -> tuple[Cause | None, str]:
    ended = describe_exit_status(child.status)
    rules: tuple[tuple[bool, Cause | None, str], ...] = (
        (not child.started, Cause.SETUP_ERROR if child.setup else Cause.INFRA, child.error),
        (child.exceeded == "disk", Cause.USER_ERROR, _exceeded(child)),
        (child.exceeded == "memory", Cause.OOM, _exceeded(child)),
        (child.timed_out, Cause.TIMEOUT, f"ran longer than timeout_s = {timeout_s:g}"),
        # SIGTERM reached the supervisor without the agent's request: the system is going down.
        (child.stopped, Cause.PREEMPTED, "the host is stopping"),
        (child.status == 0, None, ""),
        (_out_of_memory(child, tail), Cause.OOM, f"out of memory: {ended}"),
        (_import_failed(child, tail), Cause.SETUP_ERROR, f"a module is missing: {ended}"),
        (True, Cause.USER_ERROR, ended),
    )
    return next((cause, message) for applies, cause, message in rules if applies)


def _exceeded(child: ChildExit) -> str:
    if child.exceeded_bytes < 0:
        return "the folders of the attempt are nested too deeply for its limit of disk to be checked"
    return f"took more {child.exceeded} than this host gives to a job: {child.exceeded_bytes / GIB:.2f} GiB"


def _import_failed(child: ChildExit, tail: str) -> bool:
    """Python ended with the traceback of a failed import as its last output: on this host it will do so again."""
    last = tail.rstrip().rpartition("\n")[2]
    return child.status == 1 and _TRACEBACK in tail and _IMPORT.match(last) is not None


def describe_exit_status(status: int) -> str:
    if status >= 0:
        return f"exit code {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


def _out_of_memory(child: ChildExit, tail: str) -> bool:
    # Neither agent nor supervisor killed it, so SIGKILL came from the OOM killer; a shell turns it into 128 + 9.
    killed = child.status in (-_KILL, 128 + _KILL)
    return killed or child.oom_kills > 0 or _OUT_OF_MEMORY.search(tail) is not None


def _with_tail(message: str, tail: str) -> str:
    last = tail[-ERROR_BYTES:].strip()
    return f"{message}\n{last}" if last else message


def _facts(child: ChildExit, tail: str) -> dict[str, Any]:
    facts: dict[str, Any] = {"ran_s": round(child.ran_s, 3), "max_rss_bytes": child.max_rss_bytes}
    if child.started:
        facts["exit"] = child.status
    if child.oom_kills:
        # The kernel's word: it had more memory than the host, or its limit there.
        facts |= {"oom_kills": child.oom_kills, "out_of_memory": "host"}
    elif child.status != 0 and _OUT_OF_VRAM.search(tail):
        facts["out_of_memory"] = "gpu"
    if child.left_out:
        facts["log_left_out_bytes"] = child.left_out
    return facts
