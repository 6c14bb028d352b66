"""Timelines of operations as JSON replies, and as a Chrome trace for Perfetto: names of tracks, spans and events.

In a trace one process is the ranks, which do one dispatch after the other. Another is the operations, with a track for
each tenant; an operation lasts from its acceptance to its end, and any number of them overlap.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec

from strata.train.status.reports import Timeline

RANKS: Final = 1
OPERATIONS: Final = 2


class TimelineReply(msgspec.Struct, frozen=True, kw_only=True):
    """Moments are seconds since 1970 on the server, null until they have come; phases are seconds."""

    request_id: str
    model_id: str
    kind: str
    tokens: int
    outcome: str
    """Empty while it is under way."""
    dispatch: int
    """0 before it was dispatched. Operations with the same number shared a pass, and its phases are of all of them."""
    accepted_at: float
    ready_at: float | None
    dispatched_at: float | None
    sent_at: float | None
    begun_at: float | None
    answered_at: float | None
    ended_at: float | None
    phases: Mapping[str, float]


def timeline_reply(line: Timeline) -> TimelineReply:
    return TimelineReply(
        request_id=line.future_id,
        model_id=line.model_id,
        kind=line.kind,
        tokens=line.tokens,
        outcome=line.outcome,
        dispatch=line.number,
        accepted_at=line.accepted_at_s,
        ready_at=line.ready_at_s,
        dispatched_at=line.dispatched_at_s,
        sent_at=line.sent_at_s,
        begun_at=line.begun_at_s,
        answered_at=line.answered_at_s,
        ended_at=line.ended_at_s,
        phases=line.phases(),
    )


def chrome_trace(timelines: Iterable[Timeline], *, shared: bool = True) -> dict[str, Any]:
    """`shared`: also how many tokens a dispatch had, of which some may be of other tenants."""
    lines = list(timelines)
    threads = {tenant: thread for thread, tenant in enumerate(sorted({each.tenant for each in lines}), 1)}
    events = [
        _metadata_event("process_name", RANKS, 0, "ranks"),
        _metadata_event("process_name", OPERATIONS, 0, "operations"),
    ]
    events += [_metadata_event("thread_name", OPERATIONS, thread, tenant) for tenant, thread in threads.items()]
    dispatches: set[int] = set()
    for line in lines:
        if line.number not in dispatches and line.kind != "sample":
            dispatches.add(line.number)
            events += _rank_events(line, shared=shared)
        events += _operation_events(line, threads[line.tenant])
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _metadata_event(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def _rank_events(line: Timeline, *, shared: bool) -> Iterator[dict[str, Any]]:
    if line.begun_at_s is None or line.answered_at_s is None:
        return
    spent = line.spent
    args = {"dispatch": line.number, "tokens": spent.tokens if shared else line.tokens}
    yield _span(line.kind, line.begun_at_s, line.answered_at_s - line.begun_at_s, args)
    # Rows alternate between forward and backward: only the sum of each phase is known, so they are drawn in turn.
    at_s = line.begun_at_s
    phases = ("forward", spent.forward_s), ("backward", spent.backward_s)
    for name, seconds in (*phases, ("optimizer", spent.optimizer_s), ("publish", spent.publish_s)):
        if seconds > 0:
            yield _span(name, at_s, seconds, {})
            at_s += seconds


def _span(name: str, at_s: float, seconds: float, args: dict[str, Any]) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": "ranks",
        "pid": RANKS,
        "tid": 1,
        "ts": at_s * 1e6,
        "dur": max(seconds, 0.0) * 1e6,
        "args": args,
    }


def _operation_events(line: Timeline, thread: int) -> Iterator[dict[str, Any]]:
    moments = (
        ("held", line.accepted_at_s, line.ready_at_s),
        ("queue", line.ready_at_s, line.dispatched_at_s),
        ("pack", line.dispatched_at_s, line.sent_at_s),
        ("behind", line.sent_at_s, line.begun_at_s),
        ("ranks", line.begun_at_s, line.answered_at_s),
    )
    name = f"{line.kind} {line.future_id}"
    yield _edge("b", name, line, line.accepted_at_s, thread)
    for phase, first_s, then_s in moments:
        if first_s is not None and then_s is not None and then_s > first_s:
            yield _edge("b", phase, line, first_s, thread)
            yield _edge("e", phase, line, then_s, thread)
    if line.ended_at_s is not None:
        yield _edge("e", name, line, line.ended_at_s, thread)


def _edge(kind: str, name: str, line: Timeline, at_s: float, thread: int) -> dict[str, Any]:
    args = {"outcome": line.outcome, "tokens": line.tokens, "dispatch": line.number}
    return {
        "ph": kind,
        "name": name,
        "cat": "operation",
        "id": line.future_id,
        "pid": OPERATIONS,
        "tid": thread,
        "ts": at_s * 1e6,
        "args": args,
    }
