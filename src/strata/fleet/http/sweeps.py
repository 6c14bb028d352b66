"""Routes of sweeps: summaries with the best trial so far, one with its trials, axes and metrics, stop and resume."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any, Final, Literal, NamedTuple

from strata.base.errors import Code, StrataError
from strata.fleet.core.job import HELD, JobStatus
from strata.fleet.core.jobspec import JobSpec
from strata.fleet.core.objective import (
    MetricObjective,
    best_index,
    choose_objective,
    direction_of,
    flatten,
    varied_names,
)
from strata.fleet.core.report import MetricsReport, parse_lines
from strata.fleet.core.search import PRUNED, STOPPED, Direction, SearchSweep
from strata.fleet.core.sweep_points import SEED_AXIS
from strata.fleet.http.context import HubCall, HubContext, submitter_of
from strata.fleet.records import JobFilter, JobRow, StoredSweep, SweepRow, TrialRow
from strata.fleet.wire.sweeps import (
    SweepBest,
    SweepQuery,
    SweepReply,
    SweepsQuery,
    SweepsReply,
    SweepSummary,
    SweepTrial,
)

_TAIL_BYTES: Final = 16 * 1024
"""Bytes of the metrics of a trial that has not completed: enough for the last report of each metric, as a rule."""


async def listed(call: HubCall, query: SweepsQuery) -> SweepsReply:
    """All sweeps with their best trial so far, the one that changed last first."""
    context = call.context
    declared = await _declared(context)
    rows = {(row.project, row.name): row for row in await context.fleet.store.jobs.sweeps()}
    for place in {place for place, stored in declared.items() if stored.sweep is not None} - rows.keys():
        rows[place] = SweepRow(project=place[0], name=place[1], by_status={}, changed_at_s=0.0)
    search = query.search.casefold()
    matches = [
        row
        for place, row in rows.items()
        if query.project in ("", place[0]) and any(search in each.casefold() for each in place)
    ]
    matches.sort(key=lambda row: (-row.changed_at_s, row.project, row.name))
    sweeps = []
    for row in matches[query.offset : query.offset + query.limit]:
        trials = await context.fleet.store.jobs.trials(row.project, row.name)
        stored = declared.get((row.project, row.name))
        plan = None if stored is None else stored.sweep
        comparison = _compare(trials, _objective(plan, [each.metrics for each in trials]))
        best = None
        if comparison.best is not None:
            ids = _sample_ids(trials, comparison.best)
            specs = {
                job.id: job.spec for job in await context.fleet.store.jobs.select(JobFilter(ids=ids, limit=len(ids)))
            }
            best = _best(comparison, specs, plan)
        sweeps.append(_summary(row, stored, comparison, best))
    return SweepsReply(sweeps=tuple(sweeps), total=len(matches))


async def show(call: HubCall, query: SweepQuery) -> SweepReply:
    """One sweep: its trials with their parameters and metrics, and the best so far."""
    context = call.context
    project, name = call.path["project"], call.path["name"]
    trials = await context.fleet.store.jobs.trials(project, name)
    stored = (await _declared(context)).get((project, name))
    plan = None if stored is None else stored.sweep
    if not trials and plan is None:
        raise StrataError(Code.NOT_FOUND, f"there is no sweep {name[:100]!r} in the project {project[:100]!r}")
    objective = _objective(plan, [each.metrics for each in trials])
    if query.metric:
        lowest = direction_of(query.metric) == "minimize" if query.lowest is None else query.lowest
        direction: Direction = "minimize" if lowest else "maximize"
        declared = plan is not None and plan.search.objective.get(query.metric) == direction
        objective = MetricObjective(query.metric, direction, declared)
    comparison = _compare(trials, objective)
    shown = _shown(comparison, query.limit)
    jobs: dict[str, JobRow] = {}
    if shown:
        wanted = JobFilter(ids=[each.job_id for each in shown], limit=len(shown))
        jobs = {job.id: job for job in await context.fleet.store.jobs.select(wanted)}
    replies = [await _trial(context, each, jobs[each.job_id]) for each in shown if each.job_id in jobs]
    if objective is None:
        # Before the first result the trials that run tell what there will be to compare.
        objective = _objective(plan, [each.metrics for each in replies])
        comparison = comparison._replace(objective=objective)
    specs = {job_id: job.spec for job_id, job in jobs.items()}
    points = [each.parameters for each in replies]
    reported = Counter(metric for each in replies for metric in each.metrics)
    row = SweepRow(
        project=project,
        name=name,
        by_status=Counter(each.status for each in trials),
        changed_at_s=max((each.changed_at_s for each in trials), default=0.0),
    )
    return SweepReply(
        sweep=_summary(row, stored, comparison, _best(comparison, specs, plan)),
        axes=_axes(plan, points),
        metrics=tuple(sorted(reported, key=lambda metric: (-reported[metric], metric))),
        trials=tuple(replies),
    )


async def stop(call: HubCall) -> SweepReply:
    """Make no more trials of a sweep, and cancel those that wait for a host. A researcher: only of her own."""
    await call.context.sweeps.stop(call.path["project"], call.path["name"], call.actor, submitter_of(call))
    return await show(call, SweepQuery(limit=1))


async def resume(call: HubCall) -> SweepReply:
    """Make trials of a stopped sweep again, and requeue those that were cancelled. A researcher: only of her own."""
    await call.context.sweeps.resume(call.path["project"], call.path["name"], call.actor, submitter_of(call))
    return await show(call, SweepQuery(limit=1))


class _Comparison(NamedTuple):
    trials: Sequence[TrialRow]
    objective: MetricObjective | None
    best: TrialRow | None


async def _declared(context: HubContext) -> Mapping[tuple[str, str], StoredSweep]:
    """The sweeps of manifests, by project and name."""
    return {(stored.project, stored.name): stored for stored in await context.sweeps.listed()}


def _objective(plan: SearchSweep | None, reported: Sequence[Mapping[str, float]]) -> MetricObjective | None:
    """The first metric of the search, or else the one that the hub chooses."""
    if plan is not None:
        metric, direction = next(iter(plan.search.objective.items()))
        return MetricObjective(metric, direction, declared=True)
    return choose_objective(reported)


def _compare(trials: Sequence[TrialRow], objective: MetricObjective | None) -> _Comparison:
    if objective is None:
        return _Comparison(trials, None, None)
    best = best_index(objective, [each.metrics for each in trials])
    return _Comparison(trials, objective, None if best is None else trials[best])


def _sample_ids(trials: Sequence[TrialRow], best: TrialRow) -> list[str]:
    """The best trial and some others: from these it shows which parameters are varied."""
    some = [each.job_id for each in trials[:: max(1, len(trials) // 8)]]
    return list(dict.fromkeys([best.job_id, *some]))


def _shown(comparison: _Comparison, limit: int) -> Sequence[TrialRow]:
    """All trials, or the best ones if there are too many, in the order in which they were queued."""
    trials, objective = comparison.trials, comparison.objective
    if len(trials) <= limit:
        return trials
    sign = 1.0 if objective is None or objective.direction == "minimize" else -1.0
    metric = "" if objective is None else objective.metric

    def rank(index: int) -> tuple[bool, float]:
        value = trials[index].metrics.get(metric)
        return value is None, 0.0 if value is None else sign * value

    return [trials[index] for index in sorted(sorted(range(len(trials)), key=rank)[:limit])]


def _best(comparison: _Comparison, specs: Mapping[str, JobSpec], plan: SearchSweep | None) -> SweepBest | None:
    best, objective = comparison.best, comparison.objective
    if best is None or objective is None or best.job_id not in specs:
        return None
    points = {job_id: _parameters(spec) for job_id, spec in specs.items()}
    axes = _axes(plan, list(points.values()))
    own = points[best.job_id]
    return SweepBest(
        job_id=best.job_id,
        label=specs[best.job_id].label,
        value=best.metrics[objective.metric],
        metrics=dict(best.metrics),
        parameters={axis: own[axis] for axis in axes if axis in own},
    )


def _axes(plan: SearchSweep | None, points: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    return varied_names(points) if plan is None else tuple(plan.search.space)


def _parameters(spec: JobSpec) -> dict[str, Any]:
    return {**flatten(spec.hyper), SEED_AXIS: spec.seed}


def _summary(
    row: SweepRow, stored: StoredSweep | None, comparison: _Comparison, best: SweepBest | None
) -> SweepSummary:
    trials = comparison.trials
    plan = None if stored is None else stored.sweep
    pruned = sum(map(_is_pruned, trials))
    by_status = dict(row.by_status)
    planned = None if plan is None else plan.search.trials
    state: Literal["running", "waiting", "ended", "stopped"] = "ended"
    if stored is not None and stored.stopped:
        state = "stopped"
    elif any(by_status.get(status) for status in HELD):
        state = "running"
    elif by_status.get(JobStatus.PENDING) or (planned is not None and len(trials) < planned):
        state = "waiting"
    return SweepSummary(
        project=row.project,
        name=row.name,
        owner=trials[0].owner if trials else "",
        method="" if plan is None else plan.search.method,
        source="" if stored is None else stored.source,
        state=state,
        objective=comparison.objective,
        trials=len(trials),
        planned=planned,
        by_status={str(status): count for status, count in by_status.items()},
        pruned=pruned,
        skipped=sum(each.status is JobStatus.CANCELLED and each.reason == STOPPED for each in trials),
        changed_at_s=row.changed_at_s,
        best=best,
    )


def _is_pruned(trial: TrialRow) -> bool:
    return trial.status is JobStatus.CANCELLED and trial.reason.startswith(PRUNED)


async def _trial(context: HubContext, trial: TrialRow, job: JobRow) -> SweepTrial:
    metrics = trial.metrics
    if trial.status is not JobStatus.COMPLETED and job.attempt:
        metrics = await _last_reported(context, job)
    return SweepTrial(
        job_id=job.id,
        label=job.spec.label,
        status=job.status,
        pruned=_is_pruned(trial),
        parameters=_parameters(job.spec),
        metrics={name: value for name, value in metrics.items() if isfinite(value)},
        reason=job.reason,
        host_id=job.host_id,
        attempt=job.attempt,
        created_at_s=job.created_at_s,
        changed_at_s=job.changed_at_s,
    )


async def _last_reported(context: HubContext, job: JobRow) -> Mapping[str, float]:
    size = await context.streams.size(job.id, job.epoch, "metrics")
    content = await context.streams.read(job.id, job.epoch, "metrics", max(0, size - _TAIL_BYTES))
    last: dict[str, float] = {}
    for report in parse_lines(content.splitlines())[0]:
        if isinstance(report, MetricsReport):
            last |= {name: value for name, value in report.values.items() if isinstance(value, float)}
    return last
