"""Renewal and end of leases, and the tick (every 1 s) that expires them, frees backoffs and records silent hosts; with
the grace after an outage of the hub.

Leases may expire only after the hub could receive renewals for one full lease term (`core.lease.may_expire_leases`); an
outage of the database or a frozen hub restarts that grace period.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import msgspec

from strata.base import log
from strata.base.failpoint import failpoint
from strata.fleet.core.amounts import MemoryLimits, more_memory
from strata.fleet.core.job import Cause
from strata.fleet.core.lease import SUSPECT_S, may_expire_leases
from strata.fleet.core.match import eligible
from strata.fleet.records import AttemptKey, HostRow, JobCompletion, JobFailure, JobRow, Renewal, RenewalResult
from strata.fleet.service.claims import ClaimService
from strata.fleet.service.hosts import HostService
from strata.fleet.service.state import FleetState

TICK_S: Final = 1.0
LOST_S: Final = 5.0
"""How often hosts are looked for that are silent."""
_log = log.get(__name__)


class LeaseService:
    def __init__(
        self,
        state: FleetState,
        hosts: HostService,
        claims: ClaimService,
        *,
        chance: Callable[[], float],
        on_expired: Callable[[int], None],
    ) -> None:
        self._state = state
        self._store = state.store
        self._hosts = hosts
        self._claims = claims
        self._chance = chance
        self._on_expired = on_expired
        self._lost_at_s = float("-inf")
        self._observing_since_s = self._ticked_at_s = state.now_s()

    async def renew(self, host_id: str, renewals: Sequence[Renewal]) -> Sequence[RenewalResult]:
        self._hosts.touch(host_id)
        self._claims.note_holding(host_id, holds=bool(renewals))
        if not renewals:
            return []
        renewed = await self._store.leases.renew(host_id, renewals, self._state.lease_s, self._state.now_s())
        failpoint("fleet.renew.committed")
        return renewed

    async def record_checkpoint(self, attempt: AttemptKey, artifact: str) -> None:
        self._hosts.touch(attempt.host_id)
        await self._store.leases.record_checkpoint(attempt, artifact, self._state.now_s())
        failpoint("fleet.checkpoint.committed")

    async def complete(self, attempt: AttemptKey, completion: JobCompletion) -> JobRow:
        self._hosts.touch(attempt.host_id)
        row = await self._store.leases.complete(attempt, completion, self._state.now_s())
        failpoint("fleet.complete.committed")
        # Jobs that depend on it may be ready now.
        self._state.changes.notify()
        return row

    async def fail(self, attempt: AttemptKey, failure: JobFailure) -> JobRow:
        self._hosts.touch(attempt.host_id)
        takers: Sequence[str] = ()
        if failure.cause is Cause.SETUP_ERROR:
            class_id = (await self._store.jobs.get(attempt.job_id)).class_id
            takers = (await self._hosts.eligible([class_id]))[class_id]
        elif failure.cause is Cause.OOM:
            failure, takers = await self._with_more_memory(attempt, failure)
        row = await self._store.leases.fail(
            attempt, failure, self._state.now_s(), chance=self._chance(), eligible=takers
        )
        failpoint("fleet.fail.committed")
        if failure.cause is Cause.INFRA:
            await self._hosts.quarantine_if_faulty(attempt.host_id)
        elif failure.cause is Cause.SETUP_ERROR:
            self._state.roster.invalidate()
        self._state.changes.notify()
        return row

    async def _with_more_memory(self, attempt: AttemptKey, failure: JobFailure) -> tuple[JobFailure, Sequence[str]]:
        """Returns what the next attempt needs if this one really ran out of memory, and the hosts that have it."""
        kind = failure.facts.get("out_of_memory")
        row = await self._store.jobs.get(attempt.job_id)
        tried = [each for each in await self._store.jobs.attempts(attempt.job_id) if each.epoch == attempt.epoch]
        self._state.roster.invalidate()
        roster = await self._state.refresh_roster()
        hosts = {host.id: host for host in roster.hosts() if host.state != "left"}
        if kind not in ("host", "gpu") or not tried or attempt.host_id not in hosts:
            return failure, ()
        requirement, taken = roster.requirement(row.class_id), tried[0].taken
        profiles = {host.id: roster.profile(host) for host in hosts.values()}
        own = profiles[attempt.host_id]
        fitting = [each.job_ram_gib for each in profiles.values() if eligible(requirement, each).eligible]
        given_gib = own.job_ram_gib if taken.whole or not taken.ram_gib else taken.ram_gib
        reported = failure.facts.get("memory_limit_gib")
        applied_gib = reported if isinstance(reported, float) and 0 < reported < given_gib else given_gib
        limits = MemoryLimits(applied_gib, own.job_ram_gib, max(fitting, default=0.0))
        memory = more_memory(kind, requirement.needs, taken, own.capacity, limits)
        if memory is None:
            return failure, ()
        raised = msgspec.structs.replace(requirement, needs=memory.needs)
        larger = [host_id for host_id, each in profiles.items() if eligible(raised, each).eligible]
        return replace(failure, memory=memory), larger

    async def hosts_to_forget(self) -> Sequence[HostRow]:
        """The ephemeral hosts that have been silent for too long; none while hosts could not reach this hub."""
        now_s = self._state.now_s()
        if self._was_blind(now_s) or not self._may_expire(now_s):
            return []
        return await self._hosts.silent()

    def _was_blind(self, now_s: float) -> bool:
        # How late the tick is, without its interval: a lease may be not much longer than that.
        return now_s - self._ticked_at_s - TICK_S > self._state.lease_s / 3

    def _may_expire(self, now_s: float) -> bool:
        return may_expire_leases(now_s=now_s, observing_since_s=self._observing_since_s, lease_s=self._state.lease_s)

    async def tick(self) -> None:
        """Once a second: write heartbeats, release backoffs, and expire leases if the grace period is over."""
        now_s = self._state.now_s()
        if self._was_blind(now_s):
            # The hub was frozen or had no database: no host could renew its leases meanwhile.
            _log.warning(
                "lease_expiry_suspended",
                blind_s=round(now_s - self._ticked_at_s, 1),
                grace_s=self._state.lease_s,
            )
            self._observing_since_s = now_s
        await self._hosts.flush_heartbeats()
        released = await self._store.leases.release_backoffs(now_s)
        if released:
            failpoint("fleet.ripen.committed")
        expired: Sequence[JobRow] = ()
        if self._may_expire(now_s):
            expired = await self._store.leases.expire(now_s)
            if expired:
                failpoint("fleet.sweep.committed")
                self._on_expired(len(expired))
            if now_s - self._lost_at_s >= LOST_S:
                self._lost_at_s = now_s
                await self._store.hosts.record_lost(now_s - max(SUSPECT_S, self._state.lease_s), now_s)
        # The time at which this tick began: while it waited for the database, so did every renewal.
        self._ticked_at_s = now_s
        if released or expired:
            self._state.changes.notify()
