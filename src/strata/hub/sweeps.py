"""Sweeps at the hub: declare, stop, resume, and the runner that queues trials, prunes them and ends a search; with
retries and events.

The runner queues the next trial when a place is free, and ends trials that fall behind. Everything is computed from
the jobs, their attempts and their metrics, so nothing is lost with the process. Of several hubs on one database one
runs the sweeps, under a lease; a number of a trial is claimed before its job is queued, so a hub that was frozen while
another took over queues no trial a second time. A trial is ended by cancelling its job: its host is told so in the
reply to the next heartbeat.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Final

import msgspec

from strata.base import log
from strata.base.errors import Code, StrataError
from strata.database import event_kinds
from strata.database.events import EventRecord
from strata.fleet.core.job import TERMINAL, JobStatus
from strata.fleet.core.jobspec import JobSpec
from strata.fleet.core.ownership import Submitter, check_owners
from strata.fleet.core.plan import ApplyPlan
from strata.fleet.core.report import MetricsReport, parse_lines
from strata.fleet.core.search import (
    PRUNED,
    STOPPED,
    Direction,
    Halving,
    SearchSweep,
    Trial,
    pruning_reason,
    rung_values,
    trial_number,
    trial_point,
    trial_spec,
)
from strata.fleet.core.sweep_points import Point
from strata.fleet.http.context import HubContext
from strata.fleet.records import JobFilter, JobRow, StoredSweep
from strata.fleet.service.fleet import Fleet
from strata.hub.cursor_store import LEASE_S
from strata.hub.search_study import propose, require_optuna
from strata.hub.sweep_store import SweepChanges, SweepStore
from strata.hub.tables import Tables
from strata.identity.authenticate import is_valid_actor

TRIES: Final = 16
"""Proposals of points that were all tried before, until the space counts as exhausted."""
_PAGE: Final = 1000
LEASE: Final = "sweeps"
RENEW_S: Final = LEASE_S / 3
SETTLED_S: Final = 60.0
"""How often the trials of a sweep that has ended are read."""
_log = log.get(__name__)


class DeclaredSweeps:
    """What manifests declare, and people stop and resume. A sweep that nobody names stays as it is."""

    def __init__(self, store: SweepStore, fleet: Fleet) -> None:
        self._store = store
        self._fleet = fleet

    async def check(
        self, sweeps: Sequence[StoredSweep], plan: ApplyPlan, source: str, *, take_over: bool
    ) -> Sequence[str]:
        if any(each.sweep is not None for each in sweeps):
            await asyncio.to_thread(require_optuna)
        there = {each.name: each for each in await self._store.sweeps() if each.project == plan.project}
        _check_sweeps(there, sweeps, take_over=take_over)
        _check_trials(there, plan, source, take_over=take_over)
        return [each.name for each in sweeps if each.name in there and there[each.name].stopped]

    async def declare(self, sweeps: Sequence[StoredSweep], *, take_over: bool) -> None:
        if not sweeps:
            return
        now_s = self._fleet.now_s()

        def decide(there: Mapping[str, StoredSweep]) -> SweepChanges:
            _check_sweeps(there, sweeps, take_over=take_over)
            puts = [_changed(there.get(each.name), each) for each in sweeps]
            puts = [each for each in puts if each != there.get(each.name)]
            events = (_event(each, event_kinds.SWEEP_DECLARED, now_s, file=each.source) for each in puts)
            return SweepChanges(puts, [dataclasses.replace(event, actor=sweeps[0].actor) for event in events])

        await self._store.change(sweeps[0].project, decide)

    async def listed(self) -> Sequence[StoredSweep]:
        return await self._store.sweeps()

    async def stop(self, project: str, name: str, actor: str, submitter: Submitter) -> None:
        rows = await _jobs(self._fleet, project, name)
        has_ended = all(row.status in TERMINAL for row in rows)

        def check(stored: StoredSweep) -> None:
            planned = 0 if stored.sweep is None else stored.sweep.search.trials
            if has_ended and len(rows) >= planned:
                raise StrataError(Code.PRECONDITION, f"the sweep {name} has ended: there is nothing to stop")

        await self._set_stopped(project, name, actor, submitter, check)
        for row in await _jobs(self._fleet, project, name):
            if row.status is JobStatus.PENDING:
                await self._fleet.jobs.cancel(row.id, STOPPED, actor)

    async def resume(self, project: str, name: str, actor: str, submitter: Submitter) -> None:
        await self._set_stopped(project, name, actor, submitter)
        for row in await _jobs(self._fleet, project, name):
            if row.status is JobStatus.CANCELLED and row.reason == STOPPED:
                await self._fleet.jobs.requeue(row.id, actor, submitter)

    async def _set_stopped(
        self,
        project: str,
        name: str,
        actor: str,
        submitter: Submitter,
        check: Callable[[StoredSweep], None] | None = None,
    ) -> None:
        """Stop a sweep that passes the check; resume one without a check."""
        now_s, stopped = self._fleet.now_s(), check is not None

        def decide(there: Mapping[str, StoredSweep]) -> SweepChanges:
            if name not in there:
                raise StrataError(Code.NOT_FOUND, f"no manifest has a sweep {name[:64]!r} in project {project[:64]!r}")
            check_owners(submitter, [(f"the sweep {name}", there[name].submitter.owner)])
            if there[name].stopped == stopped:
                return SweepChanges()
            if check is not None:
                check(there[name])
            put = msgspec.structs.replace(there[name], stopped=stopped)
            event = _event(put, event_kinds.SWEEP_STOPPED if stopped else event_kinds.SWEEP_RESUMED, now_s)
            return SweepChanges([put], [dataclasses.replace(event, actor=actor)])

        await self._store.change(project, decide)


def _check_sweeps(there: Mapping[str, StoredSweep], sweeps: Sequence[StoredSweep], *, take_over: bool) -> None:
    for each in sweeps:
        if each.name in there:
            # Its trials are queued for its first owner, with that owner's secrets.
            check_owners(each.submitter, [(f"the sweep {each.name}", there[each.name].submitter.owner)])
    problems = [
        f"{each.source}: the sweep {each.name} belongs to {there[each.name].source}"
        for each in sweeps
        if each.name in there and there[each.name].source not in ("", each.source)
    ]
    if problems and not take_over:
        hint = "choose another name, or take the sweep over, which changes it: strata apply --take-over"
        raise StrataError(Code.CONFLICT, "\n".join(problems), hint=hint, problems=tuple(problems))


def _check_trials(there: Mapping[str, StoredSweep], plan: ApplyPlan, source: str, *, take_over: bool) -> None:
    """A job is one trial: a manifest with an equal one would take it away from the sweep of another file."""
    problems = [
        f"{source}: {job_id} is a trial of the sweep {name}, which belongs to {there[name].source}"
        for job_id, name in plan.leaving.items()
        if name in there and there[name].source not in ("", source)
    ]
    if problems and not take_over:
        hint = "give the trials another model, mode or seed, or take them over: strata apply --take-over"
        raise StrataError(Code.CONFLICT, "\n".join(problems), hint=hint, problems=tuple(problems))


def _changed(before: StoredSweep | None, wanted: StoredSweep) -> StoredSweep:
    """A sweep that was stopped stays so. An operator changes what the sweep of another owner does, not whose it is."""
    if before is None:
        return wanted
    if before.submitter.owner != wanted.submitter.owner:
        wanted = msgspec.structs.replace(wanted, actor=before.actor, submitter=before.submitter)
    return msgspec.structs.replace(wanted, stopped=before.stopped)


def _event(sweep: StoredSweep, kind: str, now_s: float, **body: str) -> EventRecord:
    return EventRecord(now_s, sweep.actor, kind, sweep.name, {"project": sweep.project, **body})


async def _jobs(fleet: Fleet, project: str, name: str) -> list[JobRow]:
    """All jobs of a sweep, the oldest first."""
    rows: list[JobRow] = []
    wanted = JobFilter(sweep=name, project=project, limit=_PAGE)
    while page := await fleet.store.jobs.select(wanted):
        rows += page
        wanted = dataclasses.replace(wanted, after=page[-1].id)
    return rows


class SweepRunner:
    def __init__(self, tables: Tables, context: HubContext, holder: str) -> None:
        self._store = tables.sweeps
        self._cursors = tables.cursors
        self._holder = holder
        self._clock = context.clock
        self._leased_at_s = float("-inf")
        self._failures: dict[tuple[str, str], str] = {}
        """The reason that was recorded last of each sweep that does not go on."""
        self._fleet = context.fleet
        self._streams = context.streams
        self._identity = context.identity
        self._require_sandbox = context.require_sandbox
        self._values: dict[tuple[str, int, tuple[str, ...]], tuple[float, ...]] = {}
        """Values of completed trials, by job, epoch and metrics: read once."""
        self._exhausted: set[tuple[str, str]] = set()
        self._settled: dict[tuple[str, str], tuple[StoredSweep, float]] = {}
        """Sweeps whose trials have all ended, and when that was seen."""
        self._readers: dict[tuple[str, str], _ReportReader] = {}
        self._judged: dict[str, tuple[int, int]] = {}
        """The epoch of each trial, and how many rungs of that attempt were judged."""

    async def run_once(self) -> None:
        sweeps = await self._store.sweeps()
        if not sweeps or not await self._acquire():
            return
        for stored in sweeps:
            if stored.sweep is None or stored.stopped or self._is_settled(stored):
                continue
            if not await is_valid_actor(self._identity, stored.actor, self._fleet.now_s()):
                continue
            try:
                await self._advance(stored, stored.sweep)
            except Exception as error:  # noqa: BLE001 - the outermost handler of a sweep: it does not hold up the others
                reason = error.message if isinstance(error, StrataError) else f"{type(error).__name__}: {error}"
                await self._record_failure(stored, reason)
            else:
                self._failures.pop((stored.project, stored.name), None)

    def _is_settled(self, stored: StoredSweep) -> bool:
        """Says whether all trials of the sweep had ended a short while ago: somebody may have requeued one since."""
        settled = self._settled.get((stored.project, stored.name))
        return settled is not None and settled[0] == stored and self._clock.monotonic_s() - settled[1] < SETTLED_S

    async def _acquire(self) -> bool:
        """Says whether this hub runs the sweeps."""
        now_s = self._clock.monotonic_s()
        if now_s - self._leased_at_s >= RENEW_S:
            if not await self._cursors.acquire(LEASE, self._holder, LEASE_S):
                return False
            self._leased_at_s = now_s
        return True

    async def _record_failure(self, stored: StoredSweep, reason: str) -> None:
        place = stored.project, stored.name
        if self._failures.get(place) != reason:
            _log.exception("sweep_failed", project=place[0], sweep=place[1], reason=reason)
            await self._record_event(stored, reason)
            self._failures[place] = reason

    async def _record_event(self, stored: StoredSweep, reason: str) -> None:
        event = _event(stored, event_kinds.SWEEP_FAILED, self._fleet.now_s(), reason=reason)
        await self._store.record(dataclasses.replace(event, actor="hub"))

    async def _advance(self, stored: StoredSweep, sweep: SearchSweep) -> None:
        """End the trials that fall behind, then queue trials while there are free places."""
        rows = await _jobs(self._fleet, stored.project, stored.name)
        rows.sort(key=lambda row: trial_number(sweep, row.spec) or 0)
        trials = [trial for row in rows if (trial := await self._trial(sweep, row)) is not None]
        if sweep.search.halving is not None and await self._prune(sweep, sweep.search.halving, rows):
            return
        taken = [number for row in rows if (number := trial_number(sweep, row.spec)) is not None]
        following = max(taken, default=-1) + 1
        while len(trials) < sweep.search.trials:
            if sum(not trial.state for trial in trials) >= sweep.search.parallel:
                return
            trial = await self._queue(stored, sweep, trials, following)
            if trial is None:
                return
            trials.append(trial)
            following = trial.number + 1
        if all(row.status in TERMINAL for row in rows) and all(trial.state for trial in trials):
            self._settled[stored.project, stored.name] = stored, self._clock.monotonic_s()

    async def _trial(self, sweep: SearchSweep, row: JobRow) -> Trial | None:
        number = trial_number(sweep, row.spec)
        point = None if number is None else trial_point(sweep, number, row.spec)
        if number is None or point is None:
            return None
        if row.status not in TERMINAL:
            return Trial(number=number, point=point)
        if row.status is JobStatus.COMPLETED:
            values = await self._objective(sweep, row)
            return Trial(number=number, point=point, state="completed" if values else "failed", values=values)
        halving = sweep.search.halving
        if halving is not None and row.status is JobStatus.CANCELLED and row.reason.startswith(PRUNED):
            reports = await self._rungs(sweep, halving, row)
            return Trial(number=number, point=point, state="pruned", reports=reports)
        return Trial(number=number, point=point, state="failed")

    async def _objective(self, sweep: SearchSweep, row: JobRow) -> tuple[float, ...]:
        """The metrics of a completed trial; empty if one is missing or is no number."""
        key = row.id, row.epoch, tuple(sweep.search.objective)
        if key not in self._values:
            attempts = await self._fleet.store.jobs.attempts(row.id)
            completed = next((each.facts for each in attempts if each.outcome == "completed"), {})
            metrics: Mapping[str, float] = completed.get("metrics", {})
            values = tuple(float(metrics[name]) for name in sweep.search.objective if name in metrics)
            complete = len(values) == len(sweep.search.objective) and all(map(isfinite, values))
            self._values[key] = values if complete else ()
        return self._values[key]

    async def _queue(
        self, stored: StoredSweep, sweep: SearchSweep, trials: Sequence[Trial], number: int
    ) -> Trial | None:
        """The new trial, of this number or a later one; None if only points are proposed that were tried before, or if
        the sweep was stopped meanwhile."""
        place = stored.project, stored.name
        for tries in range(TRIES):
            point = await asyncio.to_thread(propose, sweep.search, trials, number, tries)
            if await self._fleet.jobs.find(self._spec(sweep, number, point).id) is not None:
                continue
            point = await self._store.claim_trial(sweep, number, point)
            spec = self._spec(sweep, number, point)
            there = await self._fleet.jobs.find(spec.id)
            if there is not None and trial_number(sweep, there.spec) != number:
                # The number was claimed by a hub that died, and since then the point became a job in another way.
                number += 1
                continue
            if there is None:
                plan = ApplyPlan(project=spec.project, new={spec.id: spec}, pinned=stored.trainer)
                await self._fleet.jobs.apply(
                    plan, stored.actor, source=f"sweep {spec.sweep}", declared=False, submitter=stored.submitter
                )
                self._judged[spec.id] = (0, 0)
                if await self._is_stopped(stored):
                    await self._fleet.jobs.cancel(spec.id, STOPPED, "hub")
                    return None
            self._exhausted.discard(place)
            return Trial(number=number, point=point)
        if place not in self._exhausted:
            self._exhausted.add(place)
            _log.warning("sweep_exhausted", project=place[0], sweep=place[1], trials=len(trials))
            tried = f"{len(trials)} of {sweep.search.trials} trials: every further point was tried before"
            await self._record_event(stored, tried)
        return None

    async def _is_stopped(self, stored: StoredSweep) -> bool:
        place = stored.project, stored.name
        return any(each.stopped for each in await self._store.sweeps() if (each.project, each.name) == place)

    def _spec(self, sweep: SearchSweep, number: int, point: Point) -> JobSpec:
        return trial_spec(sweep, number, point).with_sandbox(self._require_sandbox)

    async def _prune(self, sweep: SearchSweep, halving: Halving, rows: Sequence[JobRow]) -> bool:
        """Says whether a trial was ended."""
        if all(row.status is not JobStatus.RUNNING for row in rows):
            return False
        reached = {row.id: await self._rungs(sweep, halving, row) for row in rows}
        (direction,) = sweep.search.objective.values()
        pruned = False
        for row in rows:
            if row.status is not JobStatus.RUNNING:
                continue
            others = [rungs for job_id, rungs in reached.items() if job_id != row.id]
            new = self._take_new_rungs(row, reached[row.id])
            reason = pruning_reason(new, others, halving, direction)
            if reason:
                await self._fleet.jobs.cancel(row.id, reason, "hub")
                pruned = True
        return pruned

    def _take_new_rungs(self, row: JobRow, rungs: Sequence[tuple[int, float]]) -> Sequence[tuple[int, float]]:
        """Those that were not judged yet: a trial is judged once at each rung, by what is known then.

        What a trial had reached before this process knew of it counts as judged.
        """
        epoch, judged = self._judged.get(row.id, (row.epoch, len(rungs)))
        self._judged[row.id] = row.epoch, len(rungs)
        return rungs[judged if epoch == row.epoch else 0 :]

    async def _rungs(self, sweep: SearchSweep, halving: Halving, row: JobRow) -> tuple[tuple[int, float], ...]:
        """Returns what the last attempt of a trial reported at the rungs that it reached."""
        (metric,) = sweep.search.objective
        if not row.attempt:
            return ()
        reader = self._readers.get((row.id, metric))
        if reader is None or reader.epoch != row.epoch:
            reader = self._readers[row.id, metric] = _ReportReader(epoch=row.epoch)
        while not reader.whole and (content := await self._streams.read(row.id, row.epoch, "metrics", reader.offset)):
            if not reader.take(content, metric, sweep.search.objective[metric]):
                break
        reader.whole = row.status in TERMINAL
        return rung_values(reader.reports, halving)


@dataclass
class _ReportReader:
    """Reads the metrics of an attempt once, as they grow."""

    epoch: int
    offset: int = 0
    reports: list[tuple[int, float]] = field(default_factory=list)
    whole: bool = False

    def take(self, content: bytes, metric: str, direction: Direction) -> bool:
        """Says whether there was a whole line. A trial that diverged has the worst value there is."""
        worst = inf if direction == "minimize" else -inf
        end = content.rfind(b"\n") + 1
        for each in parse_lines(content[:end].splitlines())[0]:
            value = each.values.get(metric) if isinstance(each, MetricsReport) else None
            if isinstance(each, MetricsReport) and each.step is not None and value is not None:
                self.reports.append((each.step, value if isinstance(value, float) else worst))
        self.offset += end
        return end > 0
