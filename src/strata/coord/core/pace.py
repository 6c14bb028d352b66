"""The pace of a job: what heartbeats say of steps is remembered, judged now and then, and what follows becomes facts.

`stragglers` says who is slow or hangs. Here is who may be asked at all, and what a finding leads to: a smaller share of
the data, a command, and for one that was told to stop and does not, its loss. The rungs and shares are facts; what was
observed is this process's own, so a new leader begins to observe and goes on where the ladder stood.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from typing import Final

from strata.coord.core.facts import CommandIssued, EscalationLevel, Fact, StragglerFinding, WorkerJudged, parts_of
from strata.coord.core.state import JobState, SoftState, StepProgress, StragglerState
from strata.coord.core.stragglers import COMMAND, StragglerIncident, StragglerLimits, StragglerStanding, observed
from strata.coord.core.stragglers import judge as judge_samples

JUDGE_S: Final = 1.0
FOLDED_AT_ONCE: Final = 500
"""Beats that one tick looks into; a herd of them takes several."""
JUDGED_PER_S: Final = 2_500
"""Workers judged in a second at most: a large job is looked at less often, so that its heartbeats are not late."""
FLOOR_BEATS: Final = 4
"""A step is not known to stand still before so many heartbeats have said so."""
LEAST_SHARE: Final = 0.01


def take_in(live: SoftState, worker_id: str, progress: StepProgress, now_s: float) -> None:
    """With every heartbeat, so nothing is made of it here."""
    live.pace.progress[worker_id] = (progress, now_s)


def forget(live: SoftState, worker_id: str) -> None:
    pace = live.pace
    for known in (pace.progress, pace.samples, pace.standings, pace.stopping_s):
        known.pop(worker_id, None)
    pace.idle.discard(worker_id)


def start_over(live: SoftState) -> None:
    """What was observed so far says nothing about what comes: a new generation, or a process that was not looking."""
    live.pace.progress.clear()
    live.pace.samples.clear()
    live.pace.idle.clear()


def judge(job: JobState, live: SoftState, interval_s: float, now_s: float) -> list[Fact]:
    pace = live.pace
    if pace.generation != job.generation:
        pace.generation = job.generation
        start_over(live)
    _fold(job, pace)
    if not pace.samples or not _is_due(job, pace, now_s):
        return []
    pace.judged_s = now_s
    _pause(pace, _resting(live), now_s)
    limits = StragglerLimits(
        slow_until=job.config.slow_until,
        hang_floor_s=max(job.config.hang_floor_s, FLOOR_BEATS * interval_s),
        alive_s=job.config.missed_beats * interval_s,
    )
    found = judge_samples(pace.samples, _standings(job, pace), now_s, limits)
    pace.standings = found.standings
    return _consequences(job, found.incidents)


def overdue(job: JobState, live: SoftState, patience_s: float, now_s: float) -> dict[str, str]:
    """Who was told to stop long ago and is still there, and why it should have gone."""
    since_s = live.pace.stopping_s
    return {
        worker_id: reason
        for worker_id, reason in job.stopping.items()
        if now_s - since_s.setdefault(worker_id, now_s) >= patience_s
    }


def _is_due(job: JobState, pace: StragglerState, now_s: float) -> bool:
    return pace.judged_s is None or now_s - pace.judged_s >= max(JUDGE_S, len(job.ranks) / JUDGED_PER_S)


def _fold(job: JobState, pace: StragglerState) -> None:
    for worker_id in list(islice(pace.progress, FOLDED_AT_ONCE)):
        progress, at_s = pace.progress.pop(worker_id)
        # Who still works in another generation says nothing about this one.
        if worker_id in job.ranks and progress.generation in (0, job.generation):
            before = pace.samples.get(worker_id)
            if before is not None and progress.step != before.step:
                pace.idle.discard(worker_id)
            pace.samples[worker_id] = observed(before, progress.step, progress.step_time_s, at_s, busy=progress.busy)


def _resting(live: SoftState) -> Iterable[str]:
    """Who waits for others and not for itself: at a barrier, or for data."""
    yield from live.pace.idle
    for barrier in live.barriers.values():
        yield from barrier.arrived


def _pause(pace: StragglerState, workers: Iterable[str], now_s: float) -> None:
    for worker_id in workers:
        sample = pace.samples.get(worker_id)
        if sample is not None:
            # The next heartbeat says whether it is busy with something else still.
            pace.samples[worker_id] = replace(sample, busy=True, moved_s=now_s)


def _standings(job: JobState, pace: StragglerState) -> dict[str, StragglerStanding]:
    """The rung is what the facts say: another process, or another life of the worker, may have left it elsewhere."""
    found: dict[str, StragglerStanding] = {}
    for worker_id in pace.samples:
        rung = job.members[worker_id].rung
        standing = pace.standings.get(worker_id)
        found[worker_id] = standing if standing is not None and standing.rung is rung else StragglerStanding(rung)
    return found


def _consequences(job: JobState, incidents: Iterable[StragglerIncident]) -> list[Fact]:
    facts: list[Fact] = []
    told: dict[EscalationLevel, list[StragglerIncident]] = {}
    for each in incidents:
        member = job.members[each.worker_id]
        # How fast one is that hangs nobody knows: its share stays.
        share = member.share if each.finding is StragglerFinding.HUNG else max(LEAST_SHARE, each.weight)
        facts.append(WorkerJudged(job.job, each.worker_id, each.finding, each.rung, share, each.reason))
        if each.rung in COMMAND:
            told.setdefault(each.rung, []).append(each)
    command_id = job.last_command
    for rung, some in told.items():
        # One command for all of them: each beat looks at every open command.
        command_id += 1
        more = f" (and {len(some) - 1} more)" if len(some) > 1 else ""
        facts += [
            CommandIssued(job.job, command_id, COMMAND[rung], names, some[0].reason + more)
            for names in parts_of([each.worker_id for each in some])
        ]
    return facts
