"""Signs of life: who was heard of when, how often workers should say something, and how long silence may last."""

from __future__ import annotations

from math import ceil

from strata.coord.core import pace
from strata.coord.core.inputs import CallClosed, Caller, CallOpened
from strata.coord.core.state import CoordState, JobState, SoftState


def interval_s(state: CoordState, job: JobState) -> float:
    """What workers are told: as configured, or longer so that all workers of this coordinator do not say too much."""
    return max(job.config.heartbeat_interval_s, ceil(state.fleet / state.heartbeats_per_s))


def timeout_s(state: CoordState, job: JobState, live: SoftState, now_s: float) -> float:
    """How long a worker may be silent. When the interval gets shorter, some know only the longer one for a while."""
    told_s = interval_s(state, job)
    if told_s < live.interval_s:
        longer_s = max(live.interval_s, live.old_interval[0] if now_s < live.old_interval[1] else 0.0)
        live.old_interval = (longer_s, now_s + longer_s * job.config.missed_beats)
    live.interval_s = told_s
    longest_s = max(told_s, live.old_interval[0]) if now_s < live.old_interval[1] else told_s
    return longest_s * job.config.missed_beats


def touch_caller(state: CoordState, caller: Caller, now_s: float) -> None:
    """A call is a sign of life, whatever becomes of it. It does not mend a broken presence: it may be older."""
    if _is_current(state, caller):
        touch(state.soft_of(caller.job), caller.worker_id, now_s)


def call_opened(state: CoordState, request: CallOpened) -> None:
    if _is_current(state, request.caller):
        live = state.soft_of(request.caller.job)
        key = (request.caller.worker_id, request.caller.incarnation)
        live.open_calls[key] = live.open_calls.get(key, 0) + 1


def call_closed(state: CoordState, request: CallClosed, now_s: float) -> None:
    live = state.soft_of(request.caller.job)
    key = (request.caller.worker_id, request.caller.incarnation)
    left = live.open_calls.pop(key, 0) - 1
    if left > 0:
        live.open_calls[key] = left
    if _is_current(state, request.caller):
        touch(live, request.caller.worker_id, now_s)


def _is_current(state: CoordState, caller: Caller) -> bool:
    job = state.jobs.get(caller.job)
    member = job.members.get(caller.worker_id) if job else None
    return member is not None and caller.incarnation in ("", member.worker.incarnation)


def expired(job: JobState, live: SoftState, since_s: float, now_s: float) -> list[str]:
    """Who has said nothing since then, and waits for no answer of ours either."""
    found: list[str] = []
    there: list[str] = []
    for worker_id, seen_s in live.seen_s.items():
        if worker_id in live.not_yet_seen:
            continue
        if seen_s > since_s:
            # Longest silent first: the others spoke later still.
            break
        member = job.members.get(worker_id)
        if member is not None and (worker_id, member.worker.incarnation) in live.open_calls:
            there.append(worker_id)
        else:
            found.append(worker_id)
    for worker_id in there:
        touch(live, worker_id, now_s)
    # Amnesty ends for all of them together.
    first = next(iter(live.not_yet_seen), None)
    if first is not None and live.seen_s[first] <= since_s:
        found += live.not_yet_seen
    return found


def extend_deadlines(live: SoftState, blind_s: float, now_s: float) -> None:
    """This process was not looking for a while: nobody is silent because of that."""
    for worker_id, seen_s in live.seen_s.items():
        forgiven_s = seen_s + blind_s
        # Who was heard of meanwhile gets no time in advance, else the order of silence would be lost.
        live.seen_s[worker_id] = forgiven_s if worker_id in live.not_yet_seen else min(forgiven_s, now_s)
    for worker_id in live.disconnected_at_s:
        live.disconnected_at_s[worker_id] += blind_s
    for barrier in live.barriers.values():
        barrier.deadline_s += blind_s
    pace.start_over(live)


def touch_presence(live: SoftState, worker_id: str, now_s: float) -> None:
    """With every heartbeat, so what `touch` does is done here once more instead of called."""
    live.seen_s[worker_id] = now_s
    live.seen_s.move_to_end(worker_id)
    if live.not_yet_seen:
        live.not_yet_seen.pop(worker_id, None)
    if live.disconnected_at_s:
        live.disconnected_at_s.pop(worker_id, None)


def touch(live: SoftState, worker_id: str, now_s: float) -> None:
    live.seen_s[worker_id] = now_s
    live.seen_s.move_to_end(worker_id)
    live.not_yet_seen.pop(worker_id, None)


def forget(live: SoftState, worker_id: str) -> None:
    """Look out for it no longer."""
    pace.forget(live, worker_id)
    live.read_until.pop(worker_id, None)
    live.seen_s.pop(worker_id, None)
    live.disconnected_at_s.pop(worker_id, None)
    live.not_yet_seen.pop(worker_id, None)
