"""Liveness of workers: how often they send heartbeats, after which silence a member is suspect or evicted, and the
grace period after a restart or a change of leader.

A member with an open presence stream lives although it sends nothing: the gRPC threads of its process answer pings,
also while its Python threads wait for the GIL, and a frozen process breaks the stream. Its steps tell whether it hangs.

The functions under "Writers" are called by the machine's `observe`; the others only read.
"""

from __future__ import annotations

from math import ceil
from typing import Final

from strata.base.errors import Code, StrataError
from strata.coord.core import straggler_reaction
from strata.coord.core.facts import CommandAcked, Fact, ShardAcked, WorkerLost
from strata.coord.core.inputs import Caller, Heartbeat, HeartbeatReply
from strata.coord.core.state import CoordState, JobState, PendingCommand, SoftState, StepProgress

GRACE_BEATS: Final = 2
"""Intervals beyond the timeout that members known from the journal get when a process begins to lead."""

SILENT_FLOORS: Final = 5
MOST_SILENT_S: Final = 600.0
"""A member that is attached may be silent for so many times `hang_floor_s`, and for so long: a proxy may answer pings
for a process that is gone, and one that has reported no step is never found to hang."""


def interval_s(state: CoordState, job: JobState) -> float:
    """The heartbeat interval that replies name: as configured, or longer to bound the load of all workers together."""
    return max(job.config.heartbeat_interval_s, ceil(state.fleet / state.heartbeats_per_s))


def timeout_s(state: CoordState, job: JobState, soft: SoftState, now_s: float) -> float:
    """Returns how long a member may be silent. After the interval got shorter, some workers use the longer one for a
    while."""
    longest_s = interval_s(state, job)
    if now_s < soft.old_interval[1]:
        longest_s = max(longest_s, soft.old_interval[0])
    return longest_s * job.config.missed_beats


def is_current(state: CoordState, caller: Caller) -> bool:
    """Says whether the caller is the current incarnation of a member."""
    job = state.jobs.get(caller.job)
    member = job.members.get(caller.worker_id) if job else None
    return member is not None and caller.incarnation in ("", member.worker.incarnation)


def heartbeat(state: CoordState, request: Heartbeat) -> tuple[list[Fact], HeartbeatReply]:
    worker_id = request.caller.worker_id
    job = _job_of_member(state, request.caller)
    facts: list[Fact] = [
        CommandAcked(job.job, command_id, worker_id)
        for command_id in dict.fromkeys(request.acked_commands)
        if _waits_for(job.commands.get(command_id), worker_id)
    ]
    commands = tuple(
        command
        for command in job.commands.values()
        if _waits_for(command, worker_id) and command.command_id not in request.acked_commands
    )
    if request.failed:
        facts += evict(job, state.soft_of(job.job), worker_id, "error")
    return facts, HeartbeatReply(job.generation, commands)


def _job_of_member(state: CoordState, caller: Caller) -> JobState:
    """Unlike other calls, a heartbeat of an unknown worker means that this coordinator lost it: it has to rejoin."""
    job = state.jobs.get(caller.job)
    member = job.members.get(caller.worker_id) if job else None
    if job is not None and member is not None:
        if caller.incarnation not in ("", member.worker.incarnation):
            raise replaced(caller.worker_id)
        return job
    if job is not None and caller.worker_id in job.evicted:
        raise evicted(job, caller.worker_id)
    raise StrataError(
        Code.NOT_FOUND, f"worker {caller.worker_id!r} is unknown", hint="register again", reason="unknown-worker"
    )


def _waits_for(command: PendingCommand | None, worker_id: str) -> bool:
    return command is not None and worker_id in command.waiting


def evicted(job: JobState, worker_id: str) -> StrataError:
    return StrataError(
        Code.NOT_FOUND,
        f"worker {worker_id!r} was evicted from job {job.job!r}",
        hint="register again",
        reason="evicted",
    )


def replaced(worker_id: str) -> StrataError:
    return StrataError(
        Code.STALE,
        f"this incarnation of worker {worker_id!r} is over: another one has registered",
        hint="stop; only one process may use a worker id",
        reason="stale-incarnation",
    )


# Eviction


def expired(job: JobState, soft: SoftState, timeout_s: float, now_s: float) -> dict[str, str]:
    """Says why each worker is to be evicted: a broken presence stream, silence, or a stop command that it ignores."""
    grace_s = job.config.reconnect_grace_s
    broken = [worker for worker, since_s in soft.disconnected_at_s.items() if now_s - since_s >= grace_s]
    causes = dict.fromkeys(broken, "connection lost")
    attached_timeout_s = max(timeout_s, min(SILENT_FLOORS * job.config.hang_floor_s, MOST_SILENT_S))
    for worker_id in _timed_out(job, soft, now_s - timeout_s):
        limit_s = attached_timeout_s if worker_id in soft.attached else timeout_s
        if now_s - soft.seen_s[worker_id] >= limit_s:
            causes.setdefault(worker_id, f"silent for {limit_s:g} s")
    for worker_id, reason in straggler_reaction.ignored_stops(job, soft, timeout_s, now_s).items():
        causes.setdefault(worker_id, f"did not stop when told to: {reason}")
    return causes


def evict_expired(job: JobState, soft: SoftState, timeout_s: float, now_s: float) -> list[Fact]:
    return [
        fact
        for worker_id, cause in expired(job, soft, timeout_s, now_s).items()
        if worker_id in job.members
        for fact in evict(job, soft, worker_id, cause)
    ]


def _timed_out(job: JobState, soft: SoftState, since_s: float) -> list[str]:
    """The members that were not heard from since then and have no call open."""
    found = [worker_id for worker_id in _silent(soft, since_s) if not _has_open_call(job, soft, worker_id)]
    # The grace period ends for all of them together.
    first = next(iter(soft.not_yet_seen), None)
    if first is not None and soft.seen_s[first] <= since_s:
        found += soft.not_yet_seen
    return found


def silent_but_attached(soft: SoftState, now_s: float) -> list[str]:
    """Members that send nothing at the moment and yet live."""
    return [worker_id for worker_id in _silent(soft, now_s - soft.interval_s) if worker_id in soft.attached]


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


def evict(job: JobState, soft: SoftState, worker_id: str, cause: str) -> list[Fact]:
    """Returns what the worker last reported as read is consumed: only the rest of its leases is handed out again."""
    facts = _ack_progress(job, worker_id, dict(soft.read_until.get(worker_id, ())))
    return [*facts, lost(job, worker_id, cause)]


def lost(job: JobState, worker_id: str, cause: str) -> WorkerLost:
    return WorkerLost(job.job, worker_id, job.members[worker_id].worker.incarnation, cause)


def _ack_progress(job: JobState, worker_id: str, read_until: dict[int, int]) -> list[Fact]:
    if not read_until:
        return []
    return [
        ShardAcked(job.job, dataset_id, epoch, lease_id, until)
        for dataset_id, dataset in job.datasets.items()
        for epoch, ledger in dataset.epochs.items()
        for lease_id in ledger.held.get(worker_id, ())
        if ledger.leases[lease_id].until < (until := read_until.get(lease_id, 0)) <= ledger.leases[lease_id].end
    ]


# Writers


def observe_plain_heartbeat(  # noqa: PLR0913, PLR0917 - an object for each heartbeat would cost as much as the rest
    state: CoordState,
    job_id: str,
    worker_id: str,
    incarnation: str,
    progress: StepProgress | None,
    read_until: tuple[tuple[int, int], ...] | None,
    now_s: float,
) -> bool:
    """Record the heartbeat of a current member whose job has no open command; False, and nothing recorded: any other.

    Nearly every heartbeat is such a one. `decide` would find nothing to do, so the reply needs no decision.
    """
    job = state.jobs.get(job_id)
    member = job.members.get(worker_id) if job else None
    if job is None or member is None or job.commands or incarnation not in ("", member.worker.incarnation):
        return False
    observe_heartbeat(state.writable_soft(job_id), worker_id, progress, read_until, now_s)
    return True


def observe_heartbeat(
    soft: SoftState,
    worker_id: str,
    progress: StepProgress | None,
    read_until: tuple[tuple[int, int], ...] | None,
    now_s: float,
) -> None:
    if progress is not None:
        soft.stragglers.progress[worker_id] = (progress, now_s)
        soft.progress[worker_id] = progress
    if read_until is not None:
        soft.read_until[worker_id] = read_until
    touch_presence(soft, worker_id, now_s)


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
    soft.attached.discard(worker_id)
    soft.read_until.pop(worker_id, None)
    soft.progress.pop(worker_id, None)
    soft.seen_s.pop(worker_id, None)
    soft.disconnected_at_s.pop(worker_id, None)
    soft.not_yet_seen.pop(worker_id, None)
