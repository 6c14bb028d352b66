"""Classifies how a child ended (out of memory, VRAM, import error, limit, signal, timeout): the cause, and the message
with the last 8 KiB of its log.
"""

from __future__ import annotations

import re
import signal
from typing import Any, Final

from strata.fleet.agent.state import AttemptOutcome, StopOrder
from strata.fleet.agent.supervised import ChildExit, LimitsSpec, SupervisorLost
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
    status: ChildExit | SupervisorLost,
    tail: str,
    *,
    stop: StopOrder | None,
    timeout_s: float,
    limits: LimitsSpec | None = None,
) -> AttemptOutcome:
    """`tail` is the end of the child's output, `stop` this agent's order to stop, if there was one, and `limits` those
    that the child had."""
    limits = limits or LimitsSpec()
    if isinstance(status, SupervisorLost):
        message = "the supervisor of the child was killed, or the host restarted"
        return _stopped(stop, {}) if stop is not None else AttemptOutcome(cause=Cause.INFRA, error=message)
    facts = _facts(status, tail, limits)
    if stop is not None and (status.stopped or stop.drop):
        return _stopped(stop, facts)
    cause, message = _cause(status, tail, timeout_s, limits)
    if status.started and cause in (Cause.TIMEOUT, Cause.OOM, Cause.USER_ERROR, Cause.SETUP_ERROR):
        message = _with_tail(message, tail)
    return AttemptOutcome(cause=cause, error=message, facts=facts)


def _stopped(stop: StopOrder, facts: dict[str, Any]) -> AttemptOutcome:
    return AttemptOutcome(cause=stop.cause, error=stop.reason, facts=facts, drop=stop.drop)


def _cause(child: ChildExit, tail: str, timeout_s: float, limits: LimitsSpec) -> tuple[Cause | None, str]:
    ended = describe_exit_status(child.status)
    rules: tuple[tuple[bool, Cause | None, str], ...] = (
        (not child.started, Cause.SETUP_ERROR if child.setup else Cause.INFRA, child.error),
        (child.exceeded == "memory", Cause.OOM, _exceeded(child, limits)),
        (child.exceeded != "", Cause.USER_ERROR, _exceeded(child, limits)),
        (child.timed_out, Cause.TIMEOUT, f"ran longer than timeout_s = {timeout_s:g}"),
        # SIGTERM reached the supervisor without the agent's request: the system is going down.
        (child.stopped, Cause.PREEMPTED, "the host is stopping"),
        (child.status == 0, None, ""),
        (child.oom_kills > 0, Cause.OOM, f"out of memory: {ended}; {_memory_limit(limits)}"),
        (_OUT_OF_MEMORY.search(tail) is not None, Cause.OOM, f"it reports that it is out of memory: {ended}"),
        (_was_killed(child), Cause.OOM, f"{ended}, perhaps because the host is out of memory; the kernel counted none"),
        (_import_failed(child, tail), Cause.SETUP_ERROR, f"a module is missing: {ended}"),
        (True, Cause.USER_ERROR, ended),
    )
    return next((cause, message) for applies, cause, message in rules if applies)


def _exceeded(child: ChildExit, limits: LimitsSpec) -> str:
    """Returns what it took, and the limit that it had."""
    if child.exceeded_bytes < 0:
        return "the folders of the attempt are nested too deeply for its limit of disk to be checked"
    if child.exceeded == "memory":
        return f"out of memory: it took {child.exceeded_bytes / GIB:.2f} GiB; {_memory_limit(limits)}"
    if child.exceeded == "processes":
        limit = f"its limit is {limits.processes} (sandbox.processes of the host)"
        return f"it had {child.exceeded_count:g} processes and threads; {limit}"
    if child.exceeded == "cpu":
        return f"it used {child.exceeded_count:.2f} cores; its limit is {limits.cores:g} (min_cores of the job)"
    return f"took more disk than this host gives to a job: {child.exceeded_bytes / GIB:.2f} GiB"


def _memory_limit(limits: LimitsSpec) -> str:
    if not limits.memory_bytes:
        return "the host was out of memory, for the job has no limit there"
    return f"its limit is {limits.memory_bytes / GIB:.3g} GiB ({limits.memory_set_by or 'of the host'})"


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


def _was_killed(child: ChildExit) -> bool:
    """Neither the agent nor the supervisor did it: who remains is a guess. A shell turns SIGKILL into 128 + 9."""
    return child.status in (-_KILL, 128 + _KILL)


def _with_tail(message: str, tail: str) -> str:
    last = tail[-ERROR_BYTES:].strip()
    return f"{message}\n{last}" if last else message


def _facts(child: ChildExit, tail: str, limits: LimitsSpec) -> dict[str, Any]:
    facts: dict[str, Any] = {"ran_s": round(child.ran_s, 3), "max_rss_bytes": child.max_rss_bytes}
    if child.started:
        facts["exit"] = child.status
    if child.oom_kills:
        # The kernel's word: it had more memory than the host, or its limit there.
        facts |= {"oom_kills": child.oom_kills, "out_of_memory": "host"}
        if limits.memory_bytes:
            facts["memory_limit_gib"] = limits.memory_bytes / GIB
    elif child.status != 0 and _OUT_OF_VRAM.search(tail):
        facts["out_of_memory"] = "gpu"
    if child.left_out:
        facts["log_left_out_bytes"] = child.left_out
    return facts
