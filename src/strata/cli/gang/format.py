"""A job as text: ages and times, the summary line, the alerts, and the changes between two views."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from strata.coord.view import BarrierView, CheckpointView, DatasetView, IncidentView, JobView, WorkerView

LONG_MS: Final = 30_000
"""A barrier that is open, or a command that is unanswered, for longer than this is worth a look."""
RECENT_MS: Final = 600_000
"""A loss is news for this long."""
NAMED: Final = 8
"""So many names in a list, then a number."""
FEW: Final = 3
"""The same where it has to be one glance."""


def age(ms: float) -> str:
    """`0.4s`, `12s`, `5m`, `3h`, `2d`."""
    seconds = ms / 1000
    if seconds < 10:
        return f"{seconds:.1f}s"
    for limit, unit, per in ((100, "s", 1), (6_000, "m", 60), (172_800, "h", 3_600)):
        if seconds < limit:
            return f"{seconds / per:.0f}{unit}"
    return f"{seconds / 86_400:.0f}d"


def took(seconds: float) -> str:
    """`0.4ms`, `35ms`, `1.2s`, `5m`."""
    if seconds < 0.0095:
        return f"{seconds * 1000:.1f}ms"
    return f"{seconds * 1000:.0f}ms" if seconds < 0.9995 else age(seconds * 1000)


def clock(unix_ms: int, now_ms: int) -> str:
    """The time of day here, with the date unless it is today."""
    at = datetime.fromtimestamp(unix_ms / 1000, UTC).astimezone()
    today = datetime.fromtimestamp(now_ms / 1000, UTC).astimezone().date()
    return f"{at:%H:%M:%S}" if at.date() == today else f"{at:%Y-%m-%d %H:%M:%S}"


def names(some: Sequence[str], most: int | None = NAMED) -> str:
    if most is None or len(some) <= most:
        return ", ".join(some)
    return f"{', '.join(some[:most])} and {len(some) - most} more"


def summary(job: JobView) -> str:
    """The line that a person who knows nothing yet reads first."""
    alive = sum(each.liveness == "ALIVE" for each in job.members)
    parts = [
        "" if job.status in (None, "RUNNING") else job.status.lower(),
        f"run {job.run}" if job.run > 1 else "",
        f"generation {job.generation}" if job.generation else "no generation yet",
        f"{alive} of {len(job.members)} workers alive",
        _step_range(job),
        _newest_checkpoint(job),
    ]
    return f"{job.job_id}: {', '.join(filter(None, parts))}"


def _step_range(job: JobView) -> str:
    steps = {each.step for each in job.members if each.step is not None}
    if not steps:
        return ""
    return f"step {max(steps)}" if len(steps) == 1 else f"steps {min(steps)} to {max(steps)}"


def _newest_checkpoint(job: JobView) -> str:
    committed = next((each for each in job.checkpoints if each.committed), None)
    return "no checkpoint" if committed is None else f"checkpoint at step {committed.manifest.step}"


def alerts(job: JobView) -> list[str]:
    """Returns what an operator may have to act on, the most urgent first."""
    found = [
        *_finding_alerts(job, "HANG"),
        *_suspect_alerts(job),
        *_loss_alerts(job),
        *_finding_alerts(job, "STRAGGLER"),
    ]
    if not job.members:
        found.append("nobody takes part")
    waiting = [each.worker_id for each in job.members if each.rank is None]
    if waiting:
        found.append(f"waiting for a generation: {names(waiting, FEW)}")
    found += [_barrier_alert(each) for each in job.barriers if each.open_ms >= LONG_MS]
    found += [
        f"{len(each.quarantined)} shards of {each.dataset_id} failed too often and are put aside"
        for each in job.datasets
        if each.quarantined
    ]
    return [*found, *_command_alerts(job)]


FOUND: Final = {"HANG": ("hangs", "hang"), "STRAGGLER": ("slow", "are slow")}
"""What one worker is, and what several of them do, by finding."""


def _finding_alerts(job: JobView, finding: str) -> list[str]:
    workers = [each for each in job.members if each.finding == finding]
    if len(workers) > FEW:
        return [f"{len(workers)} workers {FOUND[finding][1]}: {names([each.worker_id for each in workers], FEW)}"]
    return [each.finding_reason for each in workers]


def _suspect_alerts(job: JobView) -> list[str]:
    suspects = [each for each in job.members if each.liveness == "SUSPECT"]
    if len(suspects) > FEW:
        return [f"{len(suspects)} workers may be gone: {names([each.worker_id for each in suspects], FEW)}"]
    return [f"{each.worker_id} may be gone: {each.liveness_reason}" for each in suspects]


def _loss_alerts(job: JobView) -> list[str]:
    losses = list(_recent_losses(job))
    if len(losses) > FEW:
        lost = names([each.worker_id for each in losses], FEW)
        return [f"{len(losses)} workers were lost in the last {age(RECENT_MS)}: {lost}"]
    return [
        f"{each.worker_id} was lost {age(job.observed_at_unix_ms - each.at_unix_ms)} ago: {each.message}"
        for each in losses
    ]


def _recent_losses(job: JobView) -> Iterator[IncidentView]:
    """The last loss of each worker that has not come back."""
    told: set[str] = set()
    for each in job.incidents:
        worker = job.worker(each.worker_id)
        if (
            each.kind == "WORKER_LOST"
            and each.worker_id not in told
            and (worker is None or worker.is_gone)
            and job.observed_at_unix_ms - each.at_unix_ms < RECENT_MS
        ):
            told.add(each.worker_id)
            yield each


def _barrier_alert(barrier: BarrierView) -> str:
    return (
        f"barrier {barrier.barrier_id} has waited {age(barrier.open_ms)} for {names(barrier.missing, FEW)}"
        f" ({barrier.arrived} of {barrier.expected} are there)"
    )


def _command_alerts(job: JobView) -> list[str]:
    return [
        f"command {each.command.command_id} {each.command.kind} is not acknowledged by {names(each.waiting_for, FEW)}"
        for each in job.commands
        if each.issued_at_unix_ms and job.observed_at_unix_ms - each.issued_at_unix_ms >= LONG_MS
    ]


def missing_parts(job: JobView, checkpoint: CheckpointView, most: int | None = NAMED) -> str:
    """Returns who has not reported, by name."""
    return names([job.at_rank(rank) for rank in checkpoint.missing_ranks], most)


def changes(before: JobView, after: JobView) -> list[str]:
    """A sentence for each difference that a person would follow; steps and shards go on all the time and are none."""
    return [
        *_leader_changes(before, after),
        *_worker_changes(before, after),
        *_generation_changes(before, after),
        *_barrier_changes(before, after),
        *_checkpoint_changes(before, after),
        *_dataset_changes(before, after),
        *_command_changes(before, after),
        *_incidents(before, after),
    ]


def _leader_changes(before: JobView, after: JobView) -> Iterator[str]:
    if after.leader_epoch != before.leader_epoch:
        yield f"another coordinator leads: epoch {before.leader_epoch} -> {after.leader_epoch}"


def _worker_changes(before: JobView, after: JobView) -> Iterator[str]:
    known = {each.worker_id: each for each in before.workers}
    for each in after.workers:
        was = known.get(each.worker_id)
        presence = _presence_change(was, each)
        if presence:
            yield f"{each.worker_id} {presence}"
        if each.status is not None and each.status != (was.status if was else None):
            yield f"{each.worker_id} is {each.status}"


def _presence_change(was: WorkerView | None, now: WorkerView) -> str:
    """Empty if the same process is as alive as before."""
    if not now.is_gone and (was is None or was.is_gone):
        return f"joined on {now.hostname}" if now.hostname else "joined"
    if was is None or now.liveness != was.liveness:
        return f"{_LIVENESS.get(now.liveness or '', 'is unknown')}: {now.liveness_reason}"
    return "was replaced by a new process" if now.incarnation != was.incarnation else ""


_LIVENESS: Final = {"ALIVE": "is back", "SUSPECT": "may be gone", "LOST": "was lost", "LEFT": "left"}


def _generation_changes(before: JobView, after: JobView) -> Iterator[str]:
    if after.generation != before.generation:
        yield f"generation {before.generation} -> {after.generation}, {after.world_size} members"


def _barrier_changes(before: JobView, after: JobView) -> Iterator[str]:
    known = {(each.generation, each.barrier_id): each for each in before.barriers}
    for each in after.barriers:
        was = known.pop((each.generation, each.barrier_id), None)
        if was is None or was.arrived != each.arrived:
            yield f"barrier {each.barrier_id}: {each.arrived} of {each.expected}, missing {names(each.missing)}"
    for gone in known.values():
        yield f"barrier {gone.barrier_id}: over"


def _checkpoint_changes(before: JobView, after: JobView) -> Iterator[str]:
    known = {(each.manifest.checkpoint_id, each.manifest.generation): each for each in before.checkpoints}
    for each in reversed(after.checkpoints):
        was = known.get((each.manifest.checkpoint_id, each.manifest.generation))
        if each.committed and (was is None or not was.committed):
            yield f"checkpoint at step {each.manifest.step} committed, {len(each.manifest.parts)} parts"
        elif not each.committed and (was is None or was.missing_ranks != each.missing_ranks):
            done = len(each.manifest.parts)
            total = done + len(each.missing_ranks)
            yield f"checkpoint at step {each.manifest.step}: {done} of {total}, missing {missing_parts(after, each)}"


def _dataset_changes(before: JobView, after: JobView) -> Iterator[str]:
    known = {each.dataset_id: each for each in before.datasets}
    for each in after.datasets:
        was = known.get(each.dataset_id)
        if was is None:
            yield f"dataset {each.dataset_id}: {each.num_samples} samples, {each.num_shards} shards"
        yield from _epoch_changes(was, each)


def _epoch_changes(was: DatasetView | None, now: DatasetView) -> Iterator[str]:
    begun = {each.epoch for each in was.open_epochs} | set(was.finished_epochs) if was else set()
    finished = set(was.finished_epochs) if was else set()
    for each in now.open_epochs:
        if each.epoch not in begun:
            yield f"dataset {now.dataset_id}: epoch {each.epoch} begins"
        elif each.epoch in finished:
            yield f"dataset {now.dataset_id}: back in epoch {each.epoch}"
    for epoch in now.finished_epochs:
        if epoch not in finished:
            yield f"dataset {now.dataset_id}: epoch {epoch} finished"


def _command_changes(before: JobView, after: JobView) -> Iterator[str]:
    known = {each.command.command_id: each for each in before.commands}
    for each in after.commands:
        was = known.pop(each.command.command_id, None)
        if was is None or was.waiting_for != each.waiting_for:
            yield f"command {each.command.command_id} {each.command.kind}: waiting for {names(each.waiting_for)}"
    for over in known.values():
        yield f"command {over.command.command_id} {over.command.kind}: nobody is waited for any more"


def _incidents(before: JobView, after: JobView) -> Iterator[str]:
    known = set(before.incidents)
    for each in reversed(after.incidents):
        worker = after.worker(each.worker_id)
        # A loss that shows in the list of workers was told of there.
        if each not in known and not (each.kind == "WORKER_LOST" and worker is not None and worker.is_gone):
            yield f"incident {each.kind}{f' {each.worker_id}' if each.worker_id else ''}: {each.message}"
