"""Computes the overview of a fleet, its attention list and the goodput of jobs: how often (5, 15, 60 s), over how many
attempts and events, and how many items are shown.

The overview is computed every few seconds for all who look at it. Its figures are sampled like those of a host, so that
they have a history.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, get_args

import msgspec

from strata.base import log
from strata.base.loop import MAX_PACED_S
from strata.database import event_kinds
from strata.database.events import NEWEST, EventFilter
from strata.fleet.core import attention
from strata.fleet.core.attention import AttentionItem, FailedJob, HubBackups, HubDisk, SilentHost
from strata.fleet.core.goodput import (
    PARTS,
    AttemptTimes,
    GoodputPart,
    JobGoodput,
    JobInterruption,
    JobTimes,
    LedgerEvent,
    goodput,
    share,
)
from strata.fleet.core.host_status import Presence
from strata.fleet.core.job import TERMINAL, JobStatus
from strata.fleet.core.quota import OwnerUsage
from strata.fleet.core.samples import FLEET, SamplePoint, average
from strata.fleet.core.why import Why
from strata.fleet.metric_history import MetricHistory
from strata.fleet.records import AttemptRow, HostRow, JobFilter, JobLedger, JobRow, OwnerUsages, WaitingClass
from strata.fleet.service.fleet import Fleet
from strata.fleet.wire.overview import HistoryFigure, OverviewReply

_log = log.get(__name__)
OVERVIEW_S: Final = 5.0
SAMPLE_S: Final = 15.0
GOODPUT_S: Final = 60.0
FEW_JOBS: Final = 100
"""How long the goodput of many jobs is used before it is computed again; that of a few always is."""
COUNTS_S: Final = 1.0
MAX_ATTEMPTS: Final = 2000
"""The attempts of which the goodput of many jobs is computed."""
MANY_ATTEMPTS: Final = 10_000
"""The attempts whose usage takes longer to add up than a person waits for."""
MAX_EVENTS: Final = 20_000
"""The events of one job that count for its goodput."""
DAY_S: Final = 86_400.0
_STEP_S: Final = 900
_TURN: Final = 100
"""Jobs that are computed between two requests of hosts."""
_MAX_FAILED: Final = 100
_MAX_UNSERVABLE: Final = 3
_MAX_SHOWN: Final = 20
_MAX_CACHED: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetGoodput:
    seconds: Mapping[GoodputPart, float]
    interruptions: Sequence[tuple[str, JobInterruption]]
    """Interruptions with their jobs; the most expensive first."""
    jobs: int
    whole: bool


class FleetHistory:
    def __init__(
        self,
        fleet: Fleet,
        metrics: MetricHistory,
        disk: Callable[[], HubDisk],
        backups: Callable[[], HubBackups | None],
    ) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._disk = disk
        self._backups = backups
        self._latest: OverviewReply | None = None
        self._computing = asyncio.Lock()
        self._counting = asyncio.Lock()
        self._sampled_at_s = self._cards_at_s = float("-inf")
        self._busy_cards = 0.0
        self._counts: dict[str, tuple[float, Mapping[str, int]]] = {}
        self._why: dict[str, tuple[float, Why]] = {}
        """The reason of each job for which no host can take it."""
        self._goodput: dict[tuple[str, float], tuple[float, FleetGoodput]] = {}
        self._usages: dict[float, tuple[float, OwnerUsages]] = {}
        self._reading: asyncio.Task[tuple[float, OwnerUsages]] | None = None

    # One job

    async def job(self, row: JobRow, attempts: Sequence[AttemptRow]) -> tuple[JobGoodput, Sequence[LedgerEvent]]:
        """The goodput of a job, and the events that it follows from."""
        events = await self._events(row.id)
        times = [await self._times(row, each) for each in attempts]
        ended = row.status in TERMINAL
        job = JobTimes(
            created_at_s=row.created_at_s,
            until_s=_ended_at(row, attempts, events) if ended else self._fleet.now_s(),
            ended=ended,
            attempts=times,
            events=events,
            server=row.spec.kind == "server",
        )
        return goodput(job), events

    async def _events(self, job_id: str) -> list[LedgerEvent]:
        found: list[LedgerEvent] = []
        cursor = ""
        while len(found) < MAX_EVENTS:
            page = await self._fleet.store.events.read(cursor, 1000, subject=job_id)
            if not page:
                break
            cursor = page[-1].cursor
            found += [
                LedgerEvent(each.event.at_s, each.event.kind, epoch, each.event.body.get("seen_at_s"))
                for each in page
                if isinstance(epoch := each.event.body.get("epoch", 0), int)
            ]
        return found

    async def _times(self, row: JobRow, attempt: AttemptRow) -> AttemptTimes:
        ran_s = attempt.facts.get("ran_s")
        started = attempt.started_at_s is not None
        return AttemptTimes(
            number=attempt.attempt,
            epoch=attempt.epoch,
            host_id=attempt.host_id,
            claimed_at_s=attempt.claimed_at_s,
            started_at_s=attempt.started_at_s,
            ended_at_s=attempt.ended_at_s,
            outcome=attempt.outcome,
            cause=attempt.cause or "",
            ran_s=ran_s if isinstance(ran_s, int | float) else None,
            checkpoint_s=(await self._metrics.attempt(row.id, attempt.epoch)).checkpoint_s if started else 0.0,
        )

    # Many jobs

    async def goodput(self, project: str, span_s: float) -> FleetGoodput:
        """Returns the goodput of the jobs that a host had in the last `span_s`, within that time."""
        now_s, key = self._fleet.now_s(), (project, span_s)
        known = self._goodput.get(key)
        if known is not None and known[1].jobs > FEW_JOBS and now_s - known[0] < GOODPUT_S:
            return known[1]
        ledger = await self._fleet.store.statistics.ledger(now_s - span_s, project, MAX_ATTEMPTS)
        computed = await _add_up(ledger, now_s - span_s, now_s)
        if len(self._goodput) >= _MAX_CACHED:
            self._goodput.clear()
        self._goodput[key] = (now_s, computed)
        return computed

    async def usages(self, window_s: float) -> Mapping[str, OwnerUsage]:
        """Returns what owners have in use; of many attempts as it was a minute ago, and computed again meanwhile."""
        now_s, known = self._fleet.now_s(), self._usages.get(window_s)
        if known is None or known[1].attempts < MANY_ATTEMPTS:
            known = await self._read_usages(window_s)
        elif now_s - known[0] > GOODPUT_S and self._reading is None:
            self._reading = asyncio.create_task(self._read_usages(window_s))
            self._reading.add_done_callback(self._on_usages)
        return known[1].by_owner

    async def _read_usages(self, window_s: float) -> tuple[float, OwnerUsages]:
        now_s = self._fleet.now_s()
        if len(self._usages) >= _MAX_CACHED:
            self._usages.clear()
        known = self._usages[window_s] = now_s, await self._fleet.store.owners.usages(window_s, now_s)
        return known

    def _on_usages(self, task: asyncio.Task[tuple[float, OwnerUsages]]) -> None:
        self._reading = None
        if not task.cancelled() and task.exception() is not None:
            _log.warning("usage_not_read", reason=str(task.exception()))

    async def counts(self, project: str) -> Mapping[str, int]:
        """Returns how many jobs are in each status, a second ago at most: pages of a list ask again and again."""
        # One reader at a time: the parts of a page ask at the same moment.
        async with self._counting:
            now_s, known = self._fleet.now_s(), self._counts.get(project)
            if known is None or now_s - known[0] > COUNTS_S:
                if len(self._counts) >= _MAX_CACHED:
                    self._counts.clear()
                known = self._counts[project] = (now_s, (await self._fleet.store.statistics.counts(project)).by_status)
        return known[1]

    # The overview

    async def run_once(self) -> None:
        self._latest = latest = await self._compute()
        if latest.at_s - self._sampled_at_s >= SAMPLE_S:
            self._sampled_at_s = latest.at_s
            figures = {"running": latest.running, "waiting": latest.waiting, "busy_cards": latest.busy_cards}
            values = {name: each.value for name, each in (figures | {"goodput": latest.goodput}).items()}
            self._fleet.samples.add_fleet({name: value for name, value in values.items() if value is not None})

    async def overview(self, project: str = "") -> OverviewReply:
        async with self._computing:
            if self._latest is None or self._fleet.now_s() - self._latest.at_s > OVERVIEW_S + MAX_PACED_S:
                self._latest = await self._compute()
            latest = self._latest
        return await self._of_project(latest, project) if project else latest

    async def _of_project(self, latest: OverviewReply, project: str) -> OverviewReply:
        """Disk, hosts, cards and goodput are those of all projects."""
        waiting = await self._fleet.store.statistics.waiting_classes(project)
        first, longest_wait_s = _longest(waiting, latest.at_s)
        failed = await self._failed(latest.at_s, project)
        of_jobs = [*await self._check_unservable(waiting), *attention.check_failed(failed)]
        by_status = dict(await self.counts(project))
        return msgspec.structs.replace(
            latest,
            attention=(*(each for each in latest.attention if each.kind in attention.OF_FLEET), *of_jobs),
            by_status=by_status,
            running=_figure("running", by_status.get(JobStatus.RUNNING, 0)),
            waiting=_figure("waiting", by_status.get(JobStatus.PENDING, 0)),
            busy_cards=_figure("busy_cards", latest.busy_cards.value),
            goodput=_figure("goodput", latest.goodput.value),
            longest_wait_s=longest_wait_s,
            longest_waiting=first,
        )

    async def _compute(self) -> OverviewReply:
        fleet, now_s = self._fleet, self._fleet.now_s()
        counts = await fleet.store.statistics.counts()
        waiting = await fleet.store.statistics.waiting_classes()
        first, longest_wait_s = _longest(waiting, now_s)
        hosts = [view for view in await fleet.hosts.views() if view.row.state != "left"]
        minutes = await fleet.store.samples.read(FLEET, 60, now_s - DAY_S)
        by_presence: dict[str, list[HostRow]] = {name: [] for name in get_args(Presence)}
        for view in hosts:
            by_presence[view.presence].append(view.row)
        queue = [(point.at_s, point.values["waiting"]) for point in minutes if "waiting" in point.values]
        pending = counts.by_status.get(JobStatus.PENDING, 0)
        found = [
            *attention.check_disk(self._disk(), now_s),
            *attention.check_backups(await asyncio.to_thread(self._backups), now_s),
            *await self._check_hosts([view.row for view in hosts], by_presence["offline"]),
            *await self._check_unservable(waiting),
            *attention.check_failed(await self._failed(now_s)),
            *attention.check_backlog(queue, pending, longest_wait_s, now_s),
        ]
        history = average(minutes, _STEP_S)
        return OverviewReply(
            at_s=now_s,
            attention=tuple(found),
            running=_figure("running", counts.by_status.get(JobStatus.RUNNING, 0), history),
            waiting=_figure("waiting", pending, history),
            longest_wait_s=longest_wait_s,
            longest_waiting=first,
            busy_cards=_figure("busy_cards", await self._count_busy_cards(now_s), history),
            cards=fleet.hosts.totals.cards,
            goodput=_figure("goodput", share((await self.goodput("", 3600.0)).seconds), history),
            hosts={name: len(rows) for name, rows in by_presence.items()},
            by_status=dict(counts.by_status),
        )

    async def _count_busy_cards(self, now_s: float) -> float:
        """All leases are read for it: as often as it is sampled."""
        if now_s - self._cards_at_s >= SAMPLE_S:
            self._cards_at_s = now_s
            self._busy_cards = await self._fleet.store.statistics.held_cards()
        return self._busy_cards

    async def _check_hosts(self, hosts: Iterable[HostRow], offline: Sequence[HostRow]) -> list[AttentionItem]:
        silent = [SilentHost(host.id, host.name, host.seen_at_s) for host in offline]
        found = list(attention.check_silent(silent))
        for host in [each for each in hosts if each.state == "quarantined"][: attention.SHOWN]:
            wanted = EventFilter(subject=host.id, kinds=(event_kinds.HOST_STATE_SET["quarantined"],))
            page = await self._fleet.store.events.read_before(NEWEST, 1, wanted)
            since_s = page.events[0].event.at_s if page.events else host.registered_at_s
            found.append(attention.check_quarantined(host.id, host.name, host.state_reason, since_s))
        return found

    async def _check_unservable(self, waiting: Sequence[WaitingClass]) -> list[AttentionItem]:
        unserved = await self._fleet.hosts.unserved_classes([each.class_id for each in waiting])
        found = []
        for each in [each for each in waiting if each.class_id in unserved][:_MAX_UNSERVABLE]:
            why = await self._why_unservable(each.first_job)
            row = await self._fleet.store.jobs.get(each.first_job)
            fix = "; ".join(why.nearest_fix)
            found.append(attention.check_unservable(row.id, row.spec.label, each.jobs, each.since_s, why.headline, fix))
        return found

    async def _why_unservable(self, job_id: str) -> Why:
        """It changes with hosts and manifests, and all hosts are looked at for it."""
        now_s, known = self._fleet.now_s(), self._why.get(job_id)
        if known is None or now_s - known[0] > GOODPUT_S:
            if len(self._why) >= _MAX_CACHED:
                self._why.clear()
            known = self._why[job_id] = (now_s, await self._fleet.jobs.why(job_id))
        return known[1]

    async def _failed(self, now_s: float, project: str = "") -> list[FailedJob]:
        wanted = JobFilter(status=(JobStatus.FAILED,), project=project, hidden=False, order="ended", limit=_MAX_FAILED)
        rows = await self._fleet.store.jobs.select(wanted)
        return [
            FailedJob(row.id, row.spec.label, row.changed_at_s, row.reason)
            for row in rows
            if row.changed_at_s >= now_s - DAY_S
        ]


def _figure(name: str, value: float | None, history: Sequence[SamplePoint] = ()) -> HistoryFigure:
    points = [point for point in history if name in point.values]
    at_s, values = tuple(point.at_s for point in points), tuple(point.values[name] for point in points)
    return HistoryFigure(value=value, at_s=at_s, values=values)


def _longest(waiting: Iterable[WaitingClass], now_s: float) -> tuple[str, float]:
    """The job that has waited longest, and for how long."""
    first = min(waiting, key=lambda each: each.since_s, default=None)
    return ("", 0.0) if first is None else (first.first_job, max(0.0, now_s - first.since_s))


def _ended_at(row: JobRow, attempts: Sequence[AttemptRow], events: Iterable[LedgerEvent]) -> float:
    """Returns when a job that has ended did so. Its row changes later too, when a manifest changes it."""
    ends = [each.at_s for each in events if each.kind in event_kinds.ENDED]
    ends += [each.ended_at_s for each in attempts if each.ended_at_s is not None]
    return max(ends, default=row.changed_at_s)


async def _add_up(ledger: JobLedger, from_s: float, to_s: float) -> FleetGoodput:
    attempts: dict[str, list[AttemptTimes]] = {}
    events: dict[str, list[LedgerEvent]] = {}
    for job_id, attempt in ledger.attempts:
        attempts.setdefault(job_id, []).append(attempt)
    for job_id, event in ledger.events:
        events.setdefault(job_id, []).append(event)
    seconds: dict[GoodputPart, float] = dict.fromkeys(PARTS, 0.0)
    interruptions: list[tuple[str, JobInterruption]] = []
    for turn, (job_id, job) in enumerate(ledger.jobs.items()):
        if turn % _TURN == 0:
            await asyncio.sleep(0)
        own = attempts[job_id]
        told = sorted(events.get(job_id, ()), key=lambda each: each.at_s)
        until_s = max(job.changed_at_s, own[-1].ended_at_s or 0.0) if job.ended else to_s
        times = JobTimes(
            created_at_s=_queued_at(job.created_at_s, own[0], told),
            until_s=until_s,
            ended=job.ended,
            attempts=own,
            events=told,
            server=job.server,
        )
        computed = goodput(times)
        for part, part_s in computed.seconds(from_s, to_s).items():
            seconds[part] += part_s
        interruptions += [(job_id, each) for each in computed.interruptions if each.at_s >= from_s]
    interruptions.sort(key=lambda each: -each[1].cost_s)
    return FleetGoodput(
        seconds=seconds, interruptions=interruptions[:_MAX_SHOWN], jobs=len(ledger.jobs), whole=ledger.whole
    )


def _queued_at(created_at_s: float, first: AttemptTimes, events: Iterable[LedgerEvent]) -> float:
    """Returns since when the first of these attempts was waited for. What was before an earlier one is not known
    here."""
    if first.number == 1:
        return created_at_s
    requeued = [
        each.at_s for each in events if each.kind == event_kinds.JOB_REQUEUED and each.at_s <= first.claimed_at_s
    ]
    return max(requeued, default=first.claimed_at_s)
