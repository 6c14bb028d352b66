"""What follows from slow and hung workers: their step times are recorded, evaluated now and then, and acted upon.

`straggler_detection` finds slow and hung workers. This module selects the workers that are compared, and turns a
finding into facts: a smaller share of the data, a command, and for a worker that ignores a stop command its eviction.
Levels and shares are facts; the samples are soft state, so a new leader collects new ones and continues at the same
level.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from typing import Final

from strata.coord.core.facts import CommandIssued, EscalationLevel, Fact, StragglerFinding, WorkerJudged, parts_of
from strata.coord.core.state import JobState, SoftState, StragglerState
from strata.coord.core.straggler_detection import (
    COMMAND,
    StragglerIncident,
    StragglerLimits,
    StragglerStanding,
    add_report,
    judge,
)

JUDGE_S: Final = 1.0
FOLDED_AT_ONCE: Final = 500
"""Heartbeats that one tick adds to the samples; more of them take several ticks."""
JUDGED_PER_S: Final = 2_500
"""Workers judged in a second at most: a large job is evaluated less often, so that its heartbeats are not late."""
FLOOR_BEATS: Final = 4
"""A step counts as standing still only after so many heartbeats have reported it."""
LEAST_SHARE: Final = 0.01


def evaluate(job: JobState, soft: SoftState, interval_s: float, now_s: float) -> None:
    """Add the reports since the last tick to the samples and, when it is due, judge them; called by `observe`."""
    stragglers = soft.stragglers
    stragglers.incidents = ()
    if stragglers.generation != job.generation:
        stragglers.generation = job.generation
        reset(soft)
    _add_reports(job, stragglers)
    if not stragglers.samples or not _is_due(job, stragglers, now_s):
        return
    stragglers.judged_s = now_s
    _pause(stragglers, _waiting_for_others(soft), now_s)
    limits = StragglerLimits(
        slow_until=job.config.slow_until,
        hang_floor_s=max(job.config.hang_floor_s, FLOOR_BEATS * interval_s),
        alive_s=job.config.missed_beats * interval_s,
    )
    verdicts = judge(stragglers.samples, _standings(job, stragglers), now_s, limits)
    stragglers.standings, stragglers.incidents = verdicts.standings, verdicts.incidents


def forget(soft: SoftState, worker_id: str) -> None:
    stragglers = soft.stragglers
    for by_worker in (stragglers.progress, stragglers.samples, stragglers.standings, stragglers.stopping_s):
        by_worker.pop(worker_id, None)
    stragglers.idle.discard(worker_id)


def reset(soft: SoftState) -> None:
    """Earlier samples say nothing about what comes: a new generation began, or this process did not run for a while."""
    soft.stragglers.progress.clear()
    soft.stragglers.samples.clear()
    soft.stragglers.idle.clear()


def start_stop_timers(job: JobState, soft: SoftState, now_s: float) -> None:
    for worker_id in job.stopping:
        soft.stragglers.stopping_s.setdefault(worker_id, now_s)


def ignored_stops(job: JobState, soft: SoftState, timeout_s: float, now_s: float) -> dict[str, str]:
    """The workers that got a stop command long ago and are still members, and why they should have stopped."""
    since_s = soft.stragglers.stopping_s
    return {
        worker_id: reason
        for worker_id, reason in job.stopping.items()
        if now_s - since_s.get(worker_id, now_s) >= timeout_s
    }


def _is_due(job: JobState, stragglers: StragglerState, now_s: float) -> bool:
    return stragglers.judged_s is None or now_s - stragglers.judged_s >= max(JUDGE_S, len(job.ranks) / JUDGED_PER_S)


def _add_reports(job: JobState, stragglers: StragglerState) -> None:
    for worker_id in list(islice(stragglers.progress, FOLDED_AT_ONCE)):
        progress, at_s = stragglers.progress.pop(worker_id)
        # A worker that is still in another generation says nothing about this one.
        if worker_id in job.ranks and progress.generation in (0, job.generation):
            before = stragglers.samples.get(worker_id)
            if before is not None and progress.step != before.step:
                stragglers.idle.discard(worker_id)
            stragglers.samples[worker_id] = add_report(
                before, progress.step, progress.step_time_s, at_s, busy=progress.busy
            )


def _waiting_for_others(soft: SoftState) -> Iterable[str]:
    """Workers that wait at a barrier or for data: they are not the cause."""
    yield from soft.stragglers.idle
    for barrier in soft.barriers.values():
        yield from barrier.arrived


def _pause(stragglers: StragglerState, workers: Iterable[str], now_s: float) -> None:
    for worker_id in workers:
        sample = stragglers.samples.get(worker_id)
        if sample is not None:
            # The next heartbeat says whether it is busy with something else still.
            stragglers.samples[worker_id] = replace(sample, busy=True, moved_s=now_s)


def _standings(job: JobState, stragglers: StragglerState) -> dict[str, StragglerStanding]:
    """The level is the one of the facts: another leader or another incarnation may have changed it."""
    found: dict[str, StragglerStanding] = {}
    for worker_id in stragglers.samples:
        level = job.members[worker_id].level
        standing = stragglers.standings.get(worker_id)
        found[worker_id] = standing if standing is not None and standing.level is level else StragglerStanding(level)
    return found


def escalate(job: JobState, incidents: Iterable[StragglerIncident]) -> list[Fact]:
    facts: list[Fact] = []
    told: dict[EscalationLevel, list[StragglerIncident]] = {}
    for each in incidents:
        member = job.members[each.worker_id]
        # The speed of a hung worker is unknown: its share stays.
        share = member.share if each.finding is StragglerFinding.HUNG else max(LEAST_SHARE, each.weight)
        facts.append(WorkerJudged(job.job, each.worker_id, each.finding, each.level, share, each.reason))
        if each.level in COMMAND:
            told.setdefault(each.level, []).append(each)
    command_id = job.last_command
    for level, some in told.items():
        # One command for all of them: each heartbeat looks at every open command.
        command_id += 1
        more = f" (and {len(some) - 1} more)" if len(some) > 1 else ""
        facts += [
            CommandIssued(job.job, command_id, COMMAND[level], names, some[0].reason + more)
            for names in parts_of([each.worker_id for each in some])
        ]
    return facts
