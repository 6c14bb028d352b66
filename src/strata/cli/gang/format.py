"""The texts about a gang: ages, summary line, alerts (what counts as long, 30 s, or recent, 10 min), and changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from strata.coord.view import BarrierView, CheckpointView, IncidentView, JobView

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


class GangChanges:
    """Words what a person waits for since the last view: who takes part, what is committed, what went wrong."""

    def __init__(self) -> None:
        self._generation = 0
        self._step = -1
        self._incidents: frozenset[IncidentView] = frozenset()

    def lines(self, job: JobView) -> Iterator[str]:
        if job.generation != self._generation:
            self._generation = job.generation
            yield f"generation {job.generation}, workers: {job.world_size}"
        committed = [each.manifest.step for each in job.checkpoints if each.committed]
        if max(committed, default=-1) > self._step:
            self._step = max(committed)
            yield f"the checkpoint of step {self._step} is committed"
        incidents = frozenset(job.incidents)
        for each in sorted(incidents - self._incidents, key=lambda each: (each.at_unix_ms, each.worker_id)):
            yield f"{each.kind} {each.worker_id} {each.message}".replace("  ", " ")
        self._incidents = incidents
