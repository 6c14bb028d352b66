"""Timelines as a trace in the JSON form that Chrome began, and that Perfetto opens.

One process is the ranks, which do one dispatch after the other. Another is the operations, with a track per tenant,
each from its acceptance to its end: any number of them are under way at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from strata.train.core.status import Timeline

RANKS: Final = 1
OPERATIONS: Final = 2


def chrome_trace(timelines: Iterable[Timeline]) -> dict[str, Any]:
    lines = list(timelines)
    tenants = {tenant: place for place, tenant in enumerate(sorted({each.tenant for each in lines}), 1)}
    events = [_named("process_name", RANKS, 0, "ranks"), _named("process_name", OPERATIONS, 0, "operations")]
    events += [_named("thread_name", OPERATIONS, place, tenant) for tenant, place in tenants.items()]
    seen: set[int] = set()
    for line in lines:
        if line.number not in seen and line.kind != "sample":
            seen.add(line.number)
            events += _at_the_ranks(line)
        events += _under_way(line, tenants[line.tenant])
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def _at_the_ranks(line: Timeline) -> Iterator[dict[str, Any]]:
    if line.begun_at_s is None or line.answered_at_s is None:
        return
    spent = line.spent
    args = {"dispatch": line.number, "tokens": spent.tokens}
    yield _span(line.kind, line.begun_at_s, line.answered_at_s - line.begun_at_s, args)
    # Rows are gone over one by one, forward and backward: where each was is not known, how long all took is.
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


def _under_way(line: Timeline, thread: int) -> Iterator[dict[str, Any]]:
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
