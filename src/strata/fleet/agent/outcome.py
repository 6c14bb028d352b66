"""From how a child ended to what is reported: one function, and the words people will read."""

from __future__ import annotations

import re
import signal
from typing import Any, Final

from strata.fleet.agent.child import Exit, Lost
from strata.fleet.agent.state import Outcome, Stop
from strata.fleet.core.job import Cause

ERROR_BYTES: Final = 8192
_KILL: Final = 9
"""SIGKILL; the number, because Windows has no such name."""
_OUT_OF_MEMORY: Final = re.compile(
    r"CUDA out of memory|CUDA error: out of memory|OutOfMemoryError|HIP out of memory|^MemoryError\b"
    r"|Cannot allocate memory|std::bad_alloc|CUBLAS_STATUS_ALLOC_FAILED",
    re.MULTILINE,
)

_TRACEBACK: Final = "Traceback (most recent call last):"
_IMPORT: Final = re.compile(r"(?:ModuleNotFoundError|ImportError): ")


def outcome_of(seen: Exit | Lost, tail: str, *, stop: Stop | None, timeout_s: float) -> Outcome:
    """`tail` is the end of the child's output, `stop` what this agent asked for, if anything."""
    if isinstance(seen, Lost):
        lost = "the process that watched the child was killed, or the host restarted"
        return _stopped(stop, {}) if stop is not None else Outcome(cause=Cause.INFRA, error=lost)
    facts = _facts(seen)
    if stop is not None and (seen.stopped or stop.drop):
        return _stopped(stop, facts)
    cause, words = _cause(seen, tail, timeout_s)
    if seen.started and cause in (Cause.TIMEOUT, Cause.OOM, Cause.USER_ERROR, Cause.SETUP_ERROR):
        words = _with_tail(words, tail)
    return Outcome(cause=cause, error=words, facts=facts)


def _stopped(stop: Stop, facts: dict[str, Any]) -> Outcome:
    return Outcome(cause=stop.cause, error=stop.reason, facts=facts, drop=stop.drop)


def _cause(seen: Exit, tail: str, timeout_s: float) -> tuple[Cause | None, str]:
    ended = spell(seen.status)
    judged: tuple[tuple[bool, Cause | None, str], ...] = (
        (not seen.started, Cause.SETUP_ERROR if seen.setup else Cause.INFRA, seen.error),
        (seen.timed_out, Cause.TIMEOUT, f"ran longer than timeout_s = {timeout_s:g}"),
        # Somebody told the waiter and not the agent: the system is going down.
        (seen.stopped, Cause.PREEMPTED, "the host is stopping"),
        (seen.status == 0, None, ""),
        (_out_of_memory(seen, tail), Cause.OOM, f"out of memory: {ended}"),
        (_import_failed(seen, tail), Cause.SETUP_ERROR, f"a module is missing: {ended}"),
        (True, Cause.USER_ERROR, ended),
    )
    return next((cause, words) for applies, cause, words in judged if applies)


def _import_failed(seen: Exit, tail: str) -> bool:
    """Python ended with a traceback of a failed import, as its very last words: on this host it will do so again."""
    last = tail.rstrip().rpartition("\n")[2]
    return seen.status == 1 and _TRACEBACK in tail and _IMPORT.match(last) is not None


def spell(status: int) -> str:
    if status >= 0:
        return f"exit code {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


def _out_of_memory(seen: Exit, tail: str) -> bool:
    # Nobody of ours killed it, so SIGKILL is the kernel's way to say that memory ran out; a shell makes 128 + 9 of it.
    killed = seen.status in (-_KILL, 128 + _KILL)
    return killed or seen.oom_kills > 0 or _OUT_OF_MEMORY.search(tail) is not None


def _with_tail(words: str, tail: str) -> str:
    last = tail[-ERROR_BYTES:].strip()
    return f"{words}\n{last}" if last else words


def _facts(seen: Exit) -> dict[str, Any]:
    facts: dict[str, Any] = {"ran_s": round(seen.ran_s, 3), "max_rss_bytes": seen.max_rss_bytes}
    if seen.started:
        facts["exit"] = seen.status
    if seen.oom_kills:
        facts["oom_kills"] = seen.oom_kills
    if seen.left_out:
        facts["log_left_out_bytes"] = seen.left_out
    return facts
