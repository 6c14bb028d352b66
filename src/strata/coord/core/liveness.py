"""Liveness: when each member was last heard from, the heartbeat interval, and the timeout after which a member expires.

The functions that write are called by `observe`; the others only read.
"""

from __future__ import annotations

from math import ceil
from typing import Final

from strata.coord.core.inputs import Caller
from strata.coord.core.state import CoordState, JobState, SoftState

GRACE_BEATS: Final = 2
"""Intervals beyond the timeout that members known from the journal get when a process begins to lead."""


def interval_s(state: CoordState, job: JobState) -> float:
    """The heartbeat interval that replies name: as configured, or longer to bound the load of all workers together."""
    return max(job.config.heartbeat_interval_s, ceil(state.fleet / state.heartbeats_per_s))


def timeout_s(state: CoordState, job: JobState, soft: SoftState, now_s: float) -> float:
    """How long a member may be silent. After the interval got shorter, some workers use the longer one for a while."""
    longest_s = interval_s(state, job)
    if now_s < soft.old_interval[1]:
        longest_s = max(longest_s, soft.old_interval[0])
    return longest_s * job.config.missed_beats


def is_current(state: CoordState, caller: Caller) -> bool:
    """Whether the caller is the current incarnation of a member."""
    job = state.jobs.get(caller.job)
    member = job.members.get(caller.worker_id) if job else None
    return member is not None and caller.incarnation in ("", member.worker.incarnation)


def expired(job: JobState, soft: SoftState, since_s: float) -> list[str]:
    """The members that were not heard from since then and have no call open."""
    found = [worker_id for worker_id in _silent(soft, since_s) if not _has_open_call(job, soft, worker_id)]
    # The grace period ends for all of them together.
    first = next(iter(soft.not_yet_seen), None)
    if first is not None and soft.seen_s[first] <= since_s:
        found += soft.not_yet_seen
    return found


def _silent(soft: SoftState, since_s: float) -> list[str]:
    found: list[str] = []
    for worker_id, seen_s in soft.seen_s.items():
        if worker_id in soft.not_yet_seen:
            continue
        if seen_s > since_s:
            # Longest silent first: the others were heard from later still.
            break
        found.append(worker_id)
    return found


def _has_open_call(job: JobState, soft: SoftState, worker_id: str) -> bool:
    member = job.members.get(worker_id)
    return member is not None and (worker_id, member.worker.incarnation) in soft.open_calls


# Writers


def touch(soft: SoftState, worker_id: str, now_s: float) -> None:
    """A call of a worker arrived. It does not mend a broken presence stream: the call may be older than the break."""
    soft.seen_s[worker_id] = now_s
    soft.seen_s.move_to_end(worker_id)
    if soft.not_yet_seen:
        soft.not_yet_seen.pop(worker_id, None)


def touch_presence(soft: SoftState, worker_id: str, now_s: float) -> None:
    """A heartbeat, a registration or a presence stream arrived: the worker is connected."""
    touch(soft, worker_id, now_s)
    if soft.disconnected_at_s:
        soft.disconnected_at_s.pop(worker_id, None)


def touch_open_calls(job: JobState, soft: SoftState, since_s: float, now_s: float) -> None:
    """A worker that waits here for a reply is alive, even if it sends nothing."""
    for worker_id in _silent(soft, since_s):
        if _has_open_call(job, soft, worker_id):
            touch(soft, worker_id, now_s)


def call_opened(soft: SoftState, caller: Caller) -> None:
    key = (caller.worker_id, caller.incarnation)
    soft.open_calls[key] = soft.open_calls.get(key, 0) + 1


def call_closed(soft: SoftState, caller: Caller) -> None:
    key = (caller.worker_id, caller.incarnation)
    left = soft.open_calls.pop(key, 0) - 1
    if left > 0:
        soft.open_calls[key] = left


def update_interval(state: CoordState, job: JobState, soft: SoftState, now_s: float) -> None:
    """Remember a longer interval that workers were told before, for as long as they may still use it."""
    current_s = interval_s(state, job)
    if current_s < soft.interval_s:
        longer_s = max(soft.interval_s, soft.old_interval[0] if now_s < soft.old_interval[1] else 0.0)
        soft.old_interval = (longer_s, now_s + longer_s * job.config.missed_beats)
    soft.interval_s = current_s


def grant_grace(job: JobState, soft: SoftState, limit_s: float, now_s: float) -> None:
    """Members known from the journal get a grace period, once, for their first heartbeat to this process."""
    if soft.grace_granted:
        return
    soft.grace_granted = True
    soft.not_yet_seen = {worker_id: None for worker_id in job.members if worker_id not in soft.seen_s}
    grace_until_s = now_s + GRACE_BEATS * limit_s / job.config.missed_beats
    soft.seen_s.update(dict.fromkeys(soft.not_yet_seen, grace_until_s))


def extend_deadlines(soft: SoftState, blind_s: float, now_s: float) -> None:
    """This process did not run for a while: no member expires and no barrier times out because of that."""
    for worker_id, seen_s in soft.seen_s.items():
        extended_s = seen_s + blind_s
        # A worker that was heard from meanwhile gets no time in advance, which would break the order of `seen_s`.
        soft.seen_s[worker_id] = extended_s if worker_id in soft.not_yet_seen else min(extended_s, now_s)
    for worker_id in soft.disconnected_at_s:
        soft.disconnected_at_s[worker_id] += blind_s
    for barrier in soft.barriers.values():
        barrier.deadline_s += blind_s


def forget(soft: SoftState, worker_id: str) -> None:
    soft.read_until.pop(worker_id, None)
    soft.seen_s.pop(worker_id, None)
    soft.disconnected_at_s.pop(worker_id, None)
    soft.not_yet_seen.pop(worker_id, None)
