"""Signs of life: who was heard of when, how often workers should say something, and how long silence may last."""

from __future__ import annotations

from math import ceil

from strata.coord.core import pace
from strata.coord.core.inputs import Caller, Waits, WaitsNoLonger
from strata.coord.core.state import CoordState, JobState, Live


def interval_s(state: CoordState, job: JobState) -> float:
    """What workers are told: as configured, or longer so that all workers of this coordinator do not say too much."""
    return max(job.config.heartbeat_interval_s, ceil(state.fleet / state.beats_per_s))


def patience_s(state: CoordState, job: JobState, live: Live, now_s: float) -> float:
    """How long a worker may be silent. When the interval gets shorter, some know only the longer one for a while."""
    told_s = interval_s(state, job)
    if told_s < live.interval_s:
        longer_s = max(live.interval_s, live.lenient[0] if now_s < live.lenient[1] else 0.0)
        live.lenient = (longer_s, now_s + longer_s * job.config.missed_beats)
    live.interval_s = told_s
    longest_s = max(told_s, live.lenient[0]) if now_s < live.lenient[1] else told_s
    return longest_s * job.config.missed_beats


def notice(state: CoordState, caller: Caller, now_s: float) -> None:
    """A call is a sign of life, whatever becomes of it. It does not mend a broken presence: it may be older."""
    if _is_current(state, caller):
        hear(state.live_of(caller.job), caller.worker_id, now_s)


def wait(state: CoordState, given: Waits) -> None:
    if _is_current(state, given.caller):
        live = state.live_of(given.caller.job)
        key = (given.caller.worker_id, given.caller.incarnation)
        live.waiting[key] = live.waiting.get(key, 0) + 1


def wait_no_longer(state: CoordState, given: WaitsNoLonger, now_s: float) -> None:
    live = state.live_of(given.caller.job)
    key = (given.caller.worker_id, given.caller.incarnation)
    left = live.waiting.pop(key, 0) - 1
    if left > 0:
        live.waiting[key] = left
    if _is_current(state, given.caller):
        hear(live, given.caller.worker_id, now_s)


def _is_current(state: CoordState, caller: Caller) -> bool:
    job = state.jobs.get(caller.job)
    member = job.members.get(caller.worker_id) if job else None
    return member is not None and caller.incarnation in ("", member.worker.incarnation)


def silent(job: JobState, live: Live, since_s: float, now_s: float) -> list[str]:
    """Who has said nothing since then, and waits for no answer of ours either."""
    found: list[str] = []
    there: list[str] = []
    for worker_id, seen_s in live.seen_s.items():
        if worker_id in live.unheard:
            continue
        if seen_s > since_s:
            # Longest silent first: the others spoke later still.
            break
        member = job.members.get(worker_id)
        if member is not None and (worker_id, member.worker.incarnation) in live.waiting:
            there.append(worker_id)
        else:
            found.append(worker_id)
    for worker_id in there:
        hear(live, worker_id, now_s)
    # Amnesty ends for all of them together.
    first = next(iter(live.unheard), None)
    if first is not None and live.seen_s[first] <= since_s:
        found += live.unheard
    return found


def forgive(live: Live, blind_s: float, now_s: float) -> None:
    """This process was not looking for a while: nobody is silent because of that."""
    for worker_id, seen_s in live.seen_s.items():
        forgiven_s = seen_s + blind_s
        # Who was heard of meanwhile gets no time in advance, else the order of silence would be lost.
        live.seen_s[worker_id] = forgiven_s if worker_id in live.unheard else min(forgiven_s, now_s)
    for worker_id in live.suspect_s:
        live.suspect_s[worker_id] += blind_s
    for barrier in live.barriers.values():
        barrier.deadline_s += blind_s
    pace.start_over(live)


def see(live: Live, worker_id: str, now_s: float) -> None:
    """With every heartbeat, so what `hear` does is done here once more instead of called."""
    live.seen_s[worker_id] = now_s
    live.seen_s.move_to_end(worker_id)
    if live.unheard:
        live.unheard.pop(worker_id, None)
    if live.suspect_s:
        live.suspect_s.pop(worker_id, None)


def hear(live: Live, worker_id: str, now_s: float) -> None:
    live.seen_s[worker_id] = now_s
    live.seen_s.move_to_end(worker_id)
    live.unheard.pop(worker_id, None)


def overlook(live: Live, worker_id: str) -> None:
    """Look out for it no longer."""
    pace.forget(live, worker_id)
    live.read_until.pop(worker_id, None)
    live.seen_s.pop(worker_id, None)
    live.suspect_s.pop(worker_id, None)
    live.unheard.pop(worker_id, None)
