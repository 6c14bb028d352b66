"""Agents at work on a hub whose PostgreSQL is hurt: they repeat what was not answered, and keep books of what was."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Final, TypeVar

from strata.base.clock import SystemClock
from strata.base.errors import Code, StrataError
from strata.fleet.core.capability import Capability
from strata.fleet.records import AttemptKey, HostRow, JobCompletion, Renewal
from strata.fleet.service.fleet import Fleet
from strata.fleet.service.state import FleetSettings
from strata.fleet.store.store import FleetStore

T = TypeVar("T")
LEASE_S: Final = 3.0
TICK_S: Final = 0.1


@dataclass
class Hub:
    """The fleet of one hub, its loop and its agents, all in this process; the database is not."""

    store: FleetStore
    fleet: Fleet = field(init=False)
    confirmed: dict[str, str] = field(default_factory=dict)
    """Completions that were answered, by job."""
    answered_at_s: float = 0.0
    stopping: bool = False
    _names: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def __post_init__(self) -> None:
        self.fleet = Fleet(self.store, SystemClock(), FleetSettings(stale_after_s=LEASE_S))

    async def register(self, host_id: str) -> None:
        capability = Capability(hostname=host_id, slots=2)
        await self.fleet.hosts.register(
            HostRow(id=host_id, name=host_id, capability=capability, registered_at_s=self.fleet.now_s()), "test"
        )

    async def until_answered(self, call: Callable[[], Awaitable[T]]) -> T:
        """The same call again until it is answered, as an agent does."""
        while True:
            try:
                answer = await call()
            except StrataError as error:
                if error.code is not Code.UNAVAILABLE:
                    raise
                await asyncio.sleep(0.02)
            else:
                self.answered_at_s = monotonic()
                return answer

    async def tick(self) -> None:
        while not self.stopping:
            with suppress(StrataError):
                await self.fleet.leases.tick()
            await asyncio.sleep(TICK_S)

    async def work(self, host_id: str) -> None:
        """Claim and complete, one job after the other."""
        while not self.stopping:
            claim_id = f"c{next(self._names)}"
            leases = await self.until_answered(lambda claim_id=claim_id: self.fleet.claims.claim(host_id, claim_id))  # type: ignore[misc]
            for lease in leases:
                hold, done = (
                    AttemptKey(host_id, lease.job_id, lease.epoch),
                    JobCompletion(artifact=f"{host_id}.{claim_id}"),
                )
                row = await self.until_answered(lambda hold=hold, done=done: self.fleet.leases.complete(hold, done))  # type: ignore[misc]
                self.confirmed[row.id] = done.artifact
            if not leases:
                await asyncio.sleep(TICK_S)

    async def hold(self, host_id: str, epoch_of: dict[str, int]) -> None:
        """Renew what is held, as a host that trains for hours."""
        renewals = [Renewal(job_id=job_id, epoch=epoch, running=True) for job_id, epoch in epoch_of.items()]
        while not self.stopping:
            renewed = await self.until_answered(lambda: self.fleet.leases.renew(host_id, renewals))
            assert {each.verdict for each in renewed} == {"held"}
            await asyncio.sleep(LEASE_S / 5)
