"""Carries out what the detection of stragglers finds: how often workers are judged (1 s) and probed for hangs, how long
their reports are awaited, the smallest share of data of a slow worker, commands, and eviction of one that ignores a
stop. Thresholds are in `straggler_detection`.

`straggler_detection` finds slow and hung workers. This module selects the workers that are compared, and turns a
finding into facts: a smaller share of the data, a command, and for a worker that ignores a stop command its eviction.
Levels and shares are facts; the samples are soft state, so a new leader collects new ones and continues at the same
level.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import islice
from typing import Any, Final

from strata.coord.core.facts import IF_HUNG, KILL, CommandIssued, Fact, StragglerFinding, WorkerJudged, parts_of
from strata.coord.core.hang_diagnosis import HangDiagnosis, HangProbe, HangReport, find_suspects
from strata.coord.core.job_config import EscalationLevel
from strata.coord.core.state import JobState, SoftState, StragglerState
from strata.coord.core.step_samples import add_report, pause
from strata.coord.core.straggler_detection import (
    COMMAND,
    StragglerIncident,
    StragglerLimits,
    StragglerStanding,
    judge,
    standstill,
)

JUDGE_S: Final = 1.0
FOLDED_AT_ONCE: Final = 500
"""Heartbeats that one tick adds to the samples; more of them take several ticks."""
JUDGED_PER_S: Final = 2_500
"""Workers judged in a second at most: a large job is evaluated less often, so that its heartbeats are not late."""
CONFIRM_S: Final = 2.0
"""The least time between two probes; half of the time that counts as a hang, if that is more."""
REPORT_S: Final = 10.0
REPORT_BEATS: Final = 3
"""Workers that have not reported by then cannot: nobody is found by probes."""
FLOOR_BEATS: Final = 4
"""A step counts as standing still only after so many heartbeats have reported it."""
LEAST_SHARE: Final = 0.01


def evaluate(
    job: JobState,
    soft: SoftState,
    interval_s: float,
    now_s: float,
    *,
    silent: Callable[[SoftState, float], Iterable[str]],
) -> None:
    """Add the reports since the last tick to the samples and, when it is due, judge them; called by `observe`.

    `silent` finds workers that send no heartbeats and live: whether they hang is judged as if the last one came again.
    """
    stragglers = soft.stragglers
    stragglers.incidents = ()
    if stragglers.generation != job.generation:
        stragglers.generation = job.generation
        reset(soft)
    _add_reports(job, stragglers)
    if not stragglers.samples or not _is_due(job, stragglers, now_s):
        return
    stragglers.judged_s = now_s
    _repeat_reports(soft, silent(soft, now_s), now_s)
    _pause(stragglers, _waiting_for_others(soft), now_s)
    limits = StragglerLimits(
        slow_until=job.config.slow_until,
        hang_floor_s=max(job.config.hang_floor_s, FLOOR_BEATS * interval_s),
        alive_s=job.config.missed_beats * interval_s,
    )
    if _waits_for_busy(job, soft):
        stragglers.probe = None
        diagnosis = HangDiagnosis(pending=True)
        # Else they hang in the moment in which it ends the phase.
        for worker_id, sample in stragglers.samples.items():
            stragglers.samples[worker_id] = replace(pause(sample, now_s), busy=sample.busy)
    else:
        diagnosis = _diagnose(job, stragglers, limits, interval_s, now_s)
    verdicts = judge(stragglers.samples, _standings(job, stragglers), now_s, limits, diagnosis)
    stragglers.standings, stragglers.incidents = verdicts.standings, verdicts.incidents


def forget(soft: SoftState, worker_id: str) -> None:
    stragglers = soft.stragglers
    by_workers: tuple[dict[str, Any], ...] = (stragglers.progress, stragglers.samples, stragglers.standings)
    for by_worker in (*by_workers, stragglers.stopping_s, stragglers.stopped_at):
        by_worker.pop(worker_id, None)
    stragglers.idle.discard(worker_id)


def reset(soft: SoftState) -> None:
    """Earlier samples say nothing about what comes: a new generation began, or this process did not run for a while."""
    soft.stragglers.progress.clear()
    soft.stragglers.samples.clear()
    soft.stragglers.idle.clear()
    soft.stragglers.probe = None


def start_stop_timers(job: JobState, soft: SoftState, now_s: float) -> None:
    stragglers = soft.stragglers
    for worker_id in job.stopping:
        if worker_id not in stragglers.stopping_s:
            stragglers.stopping_s[worker_id] = now_s
            standing, sample = stragglers.standings.get(worker_id), stragglers.samples.get(worker_id)
            if sample is not None and standing is not None and standing.finding is StragglerFinding.HUNG:
                stragglers.stopped_at[worker_id] = sample.step


def ignored_stops(job: JobState, soft: SoftState, timeout_s: float, now_s: float) -> dict[str, str]:
    """The workers that got a stop command long ago and are still members, and why they should have stopped."""
    since_s = soft.stragglers.stopping_s
    return {
        worker_id: reason
        for worker_id, reason in job.stopping.items()
        if now_s - since_s.get(worker_id, now_s) >= timeout_s and not _moves_again(soft.stragglers, worker_id)
    }


def _moves_again(stragglers: StragglerState, worker_id: str) -> bool:
    """A worker that was found to hang makes steps: it sees the stop command itself."""
    sample, stopped_at = stragglers.samples.get(worker_id), stragglers.stopped_at.get(worker_id)
    return sample is not None and stopped_at is not None and sample.step != stopped_at


# Probes to a generation that stands still


def record_report(soft: SoftState, worker_id: str, number: int, report: HangReport) -> None:
    """A member has reported a probe. Of several reports the first one counts; called by `observe`."""
    probe = soft.stragglers.probe
    if probe is not None and probe.number == number and not probe.closed:
        # A stack is needed only of workers that may be the cause: of ten thousand all but a few wait.
        kept = report._replace(frames=report.frames[:1]) if report.waits else report
        probe.reports.setdefault(worker_id, kept)


def open_probe(soft: SoftState) -> int:
    """The number of the probe that members are to report; 0: none."""
    probe = soft.stragglers.probe
    return 0 if probe is None or probe.closed else probe.number


def _diagnose(
    job: JobState, stragglers: StragglerState, limits: StragglerLimits, interval_s: float, now_s: float
) -> HangDiagnosis:
    """Ask all members twice, and see who is the cause."""
    timeout_s, is_near = None, False
    if _steps_in_lockstep(job, stragglers):
        timeout_s, is_near = standstill(stragglers.samples, now_s, limits)
    probe = stragglers.probe
    if timeout_s is None:
        stragglers.probe = None
        return HangDiagnosis(pending=is_near)
    if probe is None or (probe.closed and now_s - probe.sent_s >= timeout_s):
        return _send_probe(stragglers, None, now_s)
    all_reported = len(probe.reports) == len(job.ranks)
    if probe.closed:
        return HangDiagnosis(pending=probe.found, reported=probe.before is not None and all_reported)
    waited_s = now_s - probe.sent_s
    if not all_reported:
        probe.closed = waited_s >= max(REPORT_S, REPORT_BEATS * interval_s)
    elif probe.before is not None:
        suspects = find_suspects(probe.before, probe.reports)
        probe.closed, probe.found = True, bool(suspects)
        return HangDiagnosis(pending=probe.found, reported=True, suspects=suspects)
    elif waited_s >= max(CONFIRM_S, timeout_s / 2):
        return _send_probe(stragglers, probe.reports, now_s)
    return HangDiagnosis(pending=not probe.closed)


def _waits_for_busy(job: JobState, soft: SoftState) -> bool:
    """Says whether the ranks may wait for one that has announced a phase without steps: none of them goes on
    meanwhile."""
    samples = soft.stragglers.samples
    if not _steps_in_lockstep(job, soft.stragglers):
        return False
    steps = [sample.step for sample in samples.values()]
    if max(steps) - min(steps) > 1:
        return False
    waiting = set(_waiting_for_others(soft))
    return any(
        (report := soft.progress.get(worker_id)) is not None and report.busy and worker_id not in waiting
        for worker_id in samples
    )


def _steps_in_lockstep(job: JobState, stragglers: StragglerState) -> bool:
    """Says whether ranks may wait for each other: there are several, each counts its steps, and none is elastic."""
    if len(job.ranks) == 1 or stragglers.samples.keys() != job.ranks.keys():
        return False
    return not any(job.members[worker_id].worker.elastic for worker_id in job.ranks)


def _send_probe(stragglers: StragglerState, before: dict[str, HangReport] | None, now_s: float) -> HangDiagnosis:
    stragglers.probes += 1
    stragglers.probe = HangProbe(stragglers.probes, now_s, before=before)
    return HangDiagnosis(pending=True)


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
                before, progress.step, progress.step_time_s, at_s, busy=progress.busy, compute_s=progress.compute_s
            )


def _repeat_reports(soft: SoftState, workers: Iterable[str], now_s: float) -> None:
    samples = soft.stragglers.samples
    for worker_id in workers:
        sample, report = samples.get(worker_id), soft.progress.get(worker_id)
        if sample is not None and report is not None:
            sample = pause(sample, now_s) if report.busy else replace(sample, busy=False)
            samples[worker_id] = replace(sample, heard_s=now_s)


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
            stragglers.samples[worker_id] = pause(sample, now_s)


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
    told: dict[tuple[EscalationLevel, bool], list[StragglerIncident]] = {}
    for each in incidents:
        member = job.members[each.worker_id]
        # The speed of a hung worker is unknown: its share stays.
        share = member.share if each.finding is StragglerFinding.HUNG else max(LEAST_SHARE, each.weight)
        facts.append(
            WorkerJudged(
                job.job,
                each.worker_id,
                each.finding,
                each.level,
                share,
                each.reason,
                ends_itself=each.blocks_others,
            )
        )
        if each.level in COMMAND:
            told.setdefault((each.level, each.blocks_others), []).append(each)
    command_id = job.last_command
    for (level, blocks_others), some in told.items():
        # One command for all of them: each heartbeat looks at every open command.
        command_id += 1
        more = f" (and {len(some) - 1} more)" if len(some) > 1 else ""
        arguments = {IF_HUNG: KILL} if blocks_others else {}
        facts += [
            CommandIssued(job.job, command_id, COMMAND[level], names, some[0].reason + more, arguments)
            for names in parts_of([each.worker_id for each in some])
        ]
    return facts
