"""When an operation was where, as its client is told."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from strata.train.core.status import Timeline


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
