"""Gangs as the hub's API shows them: read from their coordinator, as an operator of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Final

from strata.base.clock import Clock
from strata.base.settings import Secret
from strata.coord.core.facts import nodes_job
from strata.coord.operator import Operator, OperatorSettings, WorkerPage
from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.server.tokens import ALL_JOBS, Claims, TokenRole, Tokens
from strata.coord.view import GangEventView, GoodputView, JobPageView, JobSummaryView, WorkerView
from strata.coord.worker.settings import Tls
from strata.fleet.wire.gangs import (
    GangBarrier,
    GangCheckpoint,
    GangCount,
    GangDataset,
    GangEpoch,
    GangEventRow,
    GangEventsQuery,
    GangEventsReply,
    GangGoodput,
    GangQuery,
    GangReply,
    GangRow,
    GangSpan,
    GangsReply,
    GangWorker,
)
from strata.hub.settings import GangCoordinatorSettings

OPERATORS_KEPT: Final = 32
TOKEN_S: Final = 3_600.0
"""How long a token is good that the hub signs for itself. A connection is used for half of that."""
MISSING_NAMED: Final = 16
INCIDENTS: Final = 20
INCIDENT_KINDS: Final = (
    "worker_lost", "worker_replaced", "straggler", "hang", "shard_quarantined", "barrier_slow", "barrier_timed_out",
    "checkpoint_bad", "recovery", "failover",
)  # fmt: skip
_STATUSES: Final[Mapping[int, str]] = {
    number: name.removeprefix("WORKER_STATUS_").lower() for name, number in pb.WorkerStatus.items()
}


def open_gangs(settings: GangCoordinatorSettings, clock: Clock) -> CoordinatorGangs:
    """Reads the hub's coordinator with tokens that the hub signs for itself."""
    tokens = None if settings.token_secret is None else Tokens(settings.token_secret)

    def sign() -> str:
        assert tokens is not None
        expires_s = round(clock.wall_s() + TOKEN_S)
        return tokens.issue(Claims(job=ALL_JOBS, role=TokenRole.OPERATOR, expires_s=expires_s, id="hub"))

    tls = None if settings.ca is None else Tls(ca=settings.ca.expanduser())
    return CoordinatorGangs(settings.address, clock, tls=tls, sign=None if tokens is None else sign)


class CoordinatorGangs:
    """Implements `strata.fleet.http.context.Gangs`. Connections to the coordinator are kept, one for each job."""

    def __init__(
        self, address: str, clock: Clock, *, tls: Tls | None = None, sign: Callable[[], str] | None = None
    ) -> None:
        """`sign`: a fresh token of an operator of all jobs."""
        self._address = address
        self._clock = clock
        self._tls = tls
        self._sign = sign
        self._operators: dict[str, tuple[Operator, float]] = {}
        """By job, and when each was made; the one used last comes last."""
        self._closing: set[asyncio.Task[None]] = set()

    async def listed(self) -> GangsReply:
        jobs = await self._operator("").jobs()
        names = {each.job_id for each in jobs}
        # The launchers of a job's workers are a job of the coordinator too.
        shown = [each for each in jobs if each.job_id not in {nodes_job(name) for name in names}]
        return GangsReply(gangs=tuple(map(_row, shown)), coordinator=self._address)

    async def described(self, gang_id: str, query: GangQuery) -> GangReply:
        operator = self._operator(gang_id)
        page = WorkerPage(limit=query.limit, offset=query.offset, search=query.search, attention_first=True, lanes=True)
        found, incidents = await asyncio.gather(
            operator.page(page), operator.events(kinds=INCIDENT_KINDS, limit=INCIDENTS)
        )
        return _reply(found, tuple(map(_event, incidents.events)))

    async def events(self, gang_id: str, query: GangEventsQuery) -> GangEventsReply:
        found = await self._operator(gang_id).events(query.kind, query.search, query.before, query.limit)
        return GangEventsReply(events=tuple(map(_event, found.events)), next_before=found.next_before)

    async def close(self) -> None:
        for job in list(self._operators):
            self._discard(job)
        if self._closing:
            await asyncio.wait(self._closing)

    def _operator(self, job: str) -> Operator:
        now_s = self._clock.monotonic_s()
        operator, made_s = self._operators.pop(job, (None, now_s))
        if operator is not None and self._sign is not None and now_s - made_s >= TOKEN_S / 2:
            self._operators[job] = operator, made_s
            self._discard(job)
            operator = None
        if operator is None:
            token = None if self._sign is None else Secret(self._sign())
            operator = Operator(
                OperatorSettings(address=self._address, job=job, token=token, tls=self._tls), self._clock
            )
            made_s = now_s
        self._operators[job] = operator, made_s
        if len(self._operators) > OPERATORS_KEPT:
            self._discard(next(iter(self._operators)))
        return operator

    def _discard(self, job: str) -> None:
        operator, _ = self._operators.pop(job)
        task = asyncio.create_task(operator.__aexit__(None, None, None))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


def _row(job: JobSummaryView) -> GangRow:
    return GangRow(
        id=job.job_id,
        status=(job.status or "created").lower(),
        run=job.run,
        generation=job.generation,
        workers=job.workers,
        min_workers=job.min_workers,
        max_workers=job.max_workers,
        checkpoint_step=job.checkpoint_step,
    )


def _reply(page: JobPageView, incidents: tuple[GangEventRow, ...]) -> GangReply:
    job = page.job
    times = [ms / 1000 for ms in page.lane_times_unix_ms]
    lanes = {each.worker_id: _spans(times, each.states) for each in page.lanes}
    committed = next((each.manifest.step for each in job.checkpoints if each.committed), None)
    return GangReply(
        gang=GangRow(
            id=job.job_id,
            status=(job.status or "created").lower(),
            run=job.run,
            generation=job.generation,
            workers=sum(each.count for each in page.worker_counts),
            min_workers=0,
            max_workers=0,
            checkpoint_step=committed,
        ),
        observed_at_s=job.observed_at_unix_ms / 1000,
        counts=tuple(
            GangCount(
                status=(each.status or "unknown").lower(), liveness=(each.liveness or "").lower(), count=each.count
            )
            for each in page.worker_counts
        ),
        workers=tuple(_worker(each, lanes.get(each.worker_id, ())) for each in job.workers),
        workers_total=page.workers_total,
        lanes_start_s=times[0] if times else None,
        barriers=tuple(
            GangBarrier(
                id=each.barrier_id,
                step=each.step,
                arrived=each.arrived,
                expected=each.expected,
                missing=each.missing[:MISSING_NAMED],
                open_s=each.open_ms / 1000,
            )
            for each in job.barriers
        ),
        datasets=tuple(
            GangDataset(
                id=each.dataset_id,
                mode=(each.mode or "leased").lower(),
                samples=each.num_samples,
                shards=each.num_shards,
                epochs=tuple(
                    GangEpoch(
                        epoch=epoch.epoch,
                        done=epoch.done_shards,
                        leased=epoch.leased_shards,
                        waiting=epoch.waiting_shards,
                        quarantined=epoch.quarantined_shards,
                    )
                    for epoch in each.open_epochs
                ),
                finished=len(each.finished_epochs),
            )
            for each in job.datasets
        ),
        checkpoints=tuple(
            GangCheckpoint(
                id=each.manifest.checkpoint_id,
                step=each.manifest.step,
                committed=each.committed,
                parts=len(each.manifest.parts),
                missing=len(each.missing_ranks),
                size=sum(part.size_bytes for part in each.manifest.parts),
                at_s=each.manifest.committed_at_unix_ms / 1000 or None,
            )
            for each in job.checkpoints
        ),
        goodput=None if page.goodput is None else _goodput(page.goodput),
        incidents=incidents,
    )


def _worker(worker: WorkerView, lane: tuple[GangSpan, ...]) -> GangWorker:
    return GangWorker(
        id=worker.worker_id,
        status=(worker.status or "unknown").lower(),
        liveness=(worker.liveness or "").lower(),
        reason=worker.liveness_reason,
        rank=worker.rank,
        hostname=worker.hostname,
        gpus=worker.gpu_count,
        silent_s=worker.silent_ms / 1000,
        step=worker.step,
        step_time_s=None if worker.step_time_ms is None else worker.step_time_ms / 1000,
        slowdown=worker.slowdown,
        leased_shards=worker.leased_shards,
        compute_time_s=None if worker.compute_time_ms is None else worker.compute_time_ms / 1000,
        finding=(worker.finding or "").lower(),
        finding_reason=worker.finding_reason,
        lane=lane,
    )


def _spans(times: Sequence[float], states: bytes) -> tuple[GangSpan, ...]:
    """Samples with the same state in a row are one span, which lasts until the next one begins."""
    found: list[GangSpan] = []
    for state, group in groupby(range(len(states)), key=states.__getitem__):
        places = list(group)
        if state:
            start_s, after = times[places[0]], places[-1] + 1
            end_s = times[after] if after < len(times) else times[-1]
            found.append(GangSpan(status=_STATUSES.get(state, "unknown"), start_s=start_s, end_s=end_s))
    return tuple(found)


def _goodput(found: GoodputView) -> GangGoodput:
    return GangGoodput(
        useful_s=found.useful_ms / 1000,
        waiting_s=found.waiting_ms / 1000,
        checkpoint_s=found.checkpoint_ms / 1000,
        detect_s=found.detect_ms / 1000,
        restart_s=found.restart_ms / 1000,
        rolled_back_s=found.rolled_back_ms / 1000,
        phase=found.phase.lower(),
        share=found.share,
    )


def _event(event: GangEventView) -> GangEventRow:
    return GangEventRow(
        number=event.number,
        kind=(event.kind or "unknown").lower(),
        at_s=event.at_unix_ms / 1000,
        generation=event.generation,
        workers=event.workers,
        worker_count=event.worker_count,
        message=event.message,
        detect_s=event.detect_ms / 1000,
        restart_s=event.restart_ms / 1000,
        rolled_back_s=event.rolled_back_ms / 1000,
    )
