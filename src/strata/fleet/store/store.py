"""Puts the stores of the fleet together on either database (`FleetStore`): leases, events and all tables. Only claims
and tables differ between the two.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from strata.base.errors import StrataError
from strata.database import events
from strata.database.events import EventFilter, EventPage, StoredEvent
from strata.database.transaction import Database
from strata.fleet.core.fair_share import OwnerShares
from strata.fleet.core.reservation import Reservation, ReservationPlan, ReservationPlanner
from strata.fleet.ports import Store
from strata.fleet.records import (
    AttemptKey,
    Claim,
    JobCompletion,
    JobFailure,
    JobLease,
    JobRow,
    RefusedJob,
    Renewal,
    RenewalResult,
)
from strata.fleet.store import leases, queue
from strata.fleet.store.hosts import HostTable
from strata.fleet.store.jobs import JobTable
from strata.fleet.store.lists import SearchIndexes
from strata.fleet.store.owners import OwnerTable
from strata.fleet.store.plan import PlanTable
from strata.fleet.store.reservations import apply_reservations, read_reservations
from strata.fleet.store.samples import SampleTable
from strata.fleet.store.statistics import StatisticsTable

ClaimJobs = Callable[[Sequence[Claim], float, float, OwnerShares | None], Awaitable[Sequence[Sequence[JobLease]]]]
"""Claims, seconds of a lease, the time, and the shares of owners: each database has its own."""


class LeaseTable:
    def __init__(self, database: Database, claim_jobs: ClaimJobs) -> None:
        self._database = database
        self._claim_jobs = claim_jobs

    async def claim(
        self, claims: Sequence[Claim], lease_s: float, now_s: float, shares: OwnerShares | None = None
    ) -> Sequence[Sequence[JobLease]]:
        return await self._claim_jobs(claims, lease_s, now_s, shares)

    async def reserve(self, planner: ReservationPlanner, now_s: float) -> ReservationPlan:
        return await self._database.run(lambda tx: apply_reservations(tx, planner, now_s))

    async def reservations(self) -> Sequence[Reservation]:
        return await self._database.read(read_reservations)

    async def renew(
        self, host_id: str, renewals: Sequence[Renewal], lease_s: float, now_s: float
    ) -> Sequence[RenewalResult]:
        return await leases.renew(self._database, host_id, renewals, lease_s, now_s)

    async def complete(self, attempt: AttemptKey, completion: JobCompletion, now_s: float) -> JobRow:
        result = await self._database.run(lambda tx: leases.complete(tx, attempt, completion, now_s))
        if isinstance(result, StrataError):
            raise result
        return result

    async def fail(
        self, attempt: AttemptKey, failure: JobFailure, now_s: float, *, chance: float, eligible: Collection[str] = ()
    ) -> JobRow:
        return await self._database.run(lambda tx: leases.fail(tx, attempt, failure, now_s, chance, eligible))

    async def record_checkpoint(self, attempt: AttemptKey, artifact: str, now_s: float) -> None:
        await self._database.run(lambda tx: leases.record_checkpoint(tx, attempt, artifact, now_s))

    async def expire(self, now_s: float, limit: int = 1000) -> Sequence[JobRow]:
        return await leases.expire_leases(self._database, now_s, limit)

    async def release_backoffs(self, now_s: float, limit: int = 1000) -> int:
        return await self._database.run(lambda tx: queue.release_backoffs(tx, now_s, limit))

    async def refused_jobs(self) -> Sequence[RefusedJob]:
        return await self._database.read(leases.read_refused_jobs)

    async def fail_refused(self, eligible: Mapping[str, Collection[str]], now_s: float) -> Sequence[JobRow]:
        return await self._database.run(lambda tx: leases.fail_refused(tx, eligible, now_s))


class EventTable:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def read(self, after: str, limit: int, *, subject: str = "") -> Sequence[StoredEvent]:
        return await events.read(self._database, after, limit, subject=subject)

    async def read_before(self, before: str, limit: int, wanted: EventFilter) -> EventPage:
        return await events.read_before(self._database, before, limit, wanted)

    async def drop(self, before_s: float, limit: int = 10_000) -> int:
        return await events.drop(self._database, before_s, limit)


@dataclass(frozen=True, kw_only=True)
class FleetStore(Store):
    database: Database


def build_store(
    database: Database, claim_jobs: ClaimJobs, indexes: SearchIndexes, close: Callable[[], Awaitable[None]]
) -> FleetStore:
    return FleetStore(
        plans=PlanTable(database),
        owners=OwnerTable(database),
        hosts=HostTable(database),
        leases=LeaseTable(database, claim_jobs),
        jobs=JobTable(database, indexes),
        statistics=StatisticsTable(database),
        samples=SampleTable(database),
        events=EventTable(database),
        close=close,
        database=database,
    )
