"""Puts the parts of one hub's fleet together (`Fleet`), and has the counts that all read."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from strata.base.clock import Clock
from strata.fleet.ports import Store
from strata.fleet.records import FleetCounts
from strata.fleet.service.claims import ClaimService
from strata.fleet.service.hosts import HostService
from strata.fleet.service.jobs import JobService
from strata.fleet.service.leases import LeaseService
from strata.fleet.service.samples import SampleService
from strata.fleet.service.servers import ServerService
from strata.fleet.service.state import FleetSettings, FleetState


class Fleet:
    def __init__(
        self,
        store: Store,
        clock: Clock,
        settings: FleetSettings | None = None,
        *,
        chance: Callable[[], float] = random.random,
        on_expired: Callable[[int], None] = lambda _: None,
    ) -> None:
        """`on_expired` is called with the number of leases that expired."""
        self._state = state = FleetState(store, clock, settings or FleetSettings())
        self.store = store
        self.settings = state.settings
        self.now_s = state.now_s
        self.hosts = HostService(state)
        self.claims = ClaimService(state, self.hosts)
        self.leases = LeaseService(state, self.hosts, self.claims, chance=chance, on_expired=on_expired)
        self.jobs = JobService(state, self.hosts, self.claims)
        self.servers = ServerService(state, self.hosts)
        self.samples = SampleService(state)

    async def counts(self) -> FleetCounts:
        """Counts for the metrics jobs and hosts by state, and what the GPUs of hosts that are online do."""
        counts, roster, now_s = await self.store.statistics.counts(), await self._state.refresh_roster(), self.now_s()
        hosts, uses = Counter[str](), list[float]()
        for host in roster.hosts():
            online = roster.online(host, now_s)
            if host.ephemeral and not online:
                continue
            hosts[("online" if online else "offline") if host.state == "active" else host.state] += 1
            if online:
                uses += [use for name, use in self.samples.newest(host.id).items() if name.endswith("/use")]
        return FleetCounts(
            jobs=counts.by_status,
            ready=counts.ready,
            hosts=hosts,
            reservations=len(self.claims.reservations),
            gpus=len(uses),
            gpu_use=sum(uses) / len(uses) if uses else 0.0,
        )
