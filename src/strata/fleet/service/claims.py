"""Claims of hosts: long polls of at most 60 s, batches of 64 in one transaction, who goes first, how long fair shares
are cached, and when reservations are planned (every 2 s).

Many long polls share one transaction at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Final, Generic, TypeVar

from strata.base.errors import Code, StrataError
from strata.base.failpoint import failpoint
from strata.fleet.core.amounts import Taken
from strata.fleet.core.fair_share import OwnerShares
from strata.fleet.core.reservation import Reservation, ReservationPlanner
from strata.fleet.ports import LeaseStore
from strata.fleet.records import Claim, JobLease
from strata.fleet.service.hosts import HostService
from strata.fleet.service.roster import Shape
from strata.fleet.service.state import FleetState

T = TypeVar("T")
ReadShares = Callable[[], Awaitable[OwnerShares | None]]
BATCH: Final = 64
"""Claims per transaction at most; claims that arrive while it runs share the next one."""
KEPT_S: Final = 1.0
MAX_KEPT_S: Final = 10.0
"""How long what was read of all leases is used before it is read again: the longer, the longer it takes to read."""
READ_SHARE: Final = 0.05
"""The share of the time that reading it may take."""
POLL_S: Final = 2.0
"""How often a waiting claim polls the database: another hub may have queued a job for it."""
MAX_WAIT_S: Final = 60.0
RESERVE_S: Final = 2.0
"""How often reservations are planned."""


class _KeptRead(Generic[T]):
    """What was read last, for as long as it may be used."""

    def __init__(self, value: T, read: Callable[[], Awaitable[T]], now_s: Callable[[], float]) -> None:
        self.value = value
        self._read = read
        self._now_s = now_s
        self._read_at_s = float("-inf")
        self._kept_s = KEPT_S

    def invalidate(self) -> None:
        self._read_at_s = float("-inf")

    async def get(self) -> T:
        now_s = self._now_s()
        if not 0 <= now_s - self._read_at_s < self._kept_s:
            # Before it is read: others need not read it too. If that fails, the next one does.
            self._read_at_s, self._kept_s = now_s, KEPT_S
            self.value = await self._read()
            took_s = self._now_s() - now_s
            self._kept_s = min(max(KEPT_S, took_s / READ_SHARE), MAX_KEPT_S)
        return self.value


class ClaimService:
    def __init__(self, state: FleetState, hosts: HostService) -> None:
        self._state = state
        self._store = state.store
        self._hosts = hosts
        self._shares = _KeptRead[OwnerShares | None](None, self._read_shares, state.now_s)
        """What owners hold of the fleet; None while one owner alone has jobs."""
        self._queue = ClaimQueue(state.store.leases, state.lease_s, state.now_s, self._shares.get)
        self._owners: Collection[str] = ()
        """Those with jobs that have not ended, when the shares were read."""
        self._held = _KeptRead[dict[str, Sequence[Taken]]]({}, self._read_held, state.now_s)
        """What hosts held when a claim read it last, and what this hub gave them since."""
        self._waiting: dict[Shape, dict[str, None]] = {}
        """The hosts whose claims wait at this hub, by their shapes."""
        self._holding: set[str] = set()
        """Hosts that held leases when they spoke last: a guess, for `Claim.idle`."""
        self.reservations: Sequence[Reservation] = ()
        """Reservations as this hub planned them last: claims that wait are tried again when they change."""
        self._stuck: frozenset[int] = frozenset()

    async def claim(self, host_id: str, claim_id: str, *, count: int = 1, wait_s: float = 0.0) -> Sequence[JobLease]:
        """Leases on jobs that this host may take and that fit on it.

        At once, or when there are some, at most `wait_s` later.
        """
        self._hosts.touch(host_id)
        roster = await self._state.refresh_roster()
        # A host has one claim at a time; of two, the end of the first one makes it a moment less visible.
        waiting = self._waiting.setdefault(roster.shape(host_id), {})
        waiting[host_id] = None
        try:
            return await self._claim(host_id, claim_id, count, self._state.now_s() + min(wait_s, MAX_WAIT_S))
        finally:
            waiting.pop(host_id, None)

    async def _claim(self, host_id: str, claim_id: str, count: int, until_s: float) -> Sequence[JobLease]:
        while True:
            changed = self._state.changes.next()
            roster = await self._state.refresh_roster()
            better_fits = await self._free_better_fits(host_id)
            options = roster.claim_options(host_id, self._state.now_s(), better_fits)
            wanted = Claim(
                host_id=host_id,
                claim_id=claim_id,
                classes=options.classes,
                capacity=options.capacity,
                count=count,
                held_back=options.held_back,
                refusing=options.refusing,
                idle=host_id not in self._holding,
            )
            leases = await self._queue.submit(wanted)
            if leases:
                self._holding.add(host_id)
                held = self._held.value
                held[host_id] = (*held.get(host_id, ()), *(lease.taken for lease in leases))
            left_s = until_s - self._state.now_s()
            if leases or left_s <= 0:
                return leases
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, POLL_S)):
                    await changed.wait()

    def note_holding(self, host_id: str, *, holds: bool) -> None:
        """Records what a heartbeat says: whether the host holds leases."""
        if holds:
            self._holding.add(host_id)
        else:
            self._holding.discard(host_id)

    async def _free_better_fits(self, host_id: str) -> Mapping[int, Collection[str]]:
        """The classes that this host leaves to others for a moment: each has a host that waits, is free, and fits it
        better. What hosts hold is read at most once a second; a wrong guess costs a job `BEST_FIT_S`."""
        roster = self._state.roster
        found = roster.better_fits(host_id, self._waiting, self._holding) if len(self._waiting) > 1 else {}
        if not found:
            return found
        held = await self._held.get()
        free = {
            class_id: [each for each in others if roster.fits(each, class_id, held.get(each, ()))]
            for class_id, others in found.items()
        }
        return {class_id: others for class_id, others in free.items() if others}

    async def _read_held(self) -> dict[str, Sequence[Taken]]:
        return dict(await self._store.hosts.held())

    async def _read_shares(self) -> OwnerShares | None:
        self._owners = owners = await self._store.owners.active()
        if len(owners) < 2:
            return None
        return OwnerShares(self._state.roster.totals, owners, await self._store.owners.held())

    def on_queued(self, owner: str) -> None:
        """Lets the shares be read again for jobs of an owner who had none."""
        if owner not in self._owners:
            self._shares.invalidate()

    async def plan_reservations(self) -> None:
        """Reserve hosts for jobs that are too large for what comes free, and for gangs."""
        shares = await self._shares.get()
        roster = await self._state.refresh_roster()
        now_s, settings = self._state.now_s(), self._state.settings
        planner = ReservationPlanner(
            hosts=roster.offers(now_s),
            classes=roster.class_ids(),
            owners=tuple(self._owners),
            shares=shares,
            reserve_after_s=settings.reserve_after_s,
            preempt=settings.preempt == "lower-priority",
            seen=self._stuck,
        )
        plan = await self._store.leases.reserve(planner, now_s)
        if plan.reservations != self.reservations or plan.returned:
            failpoint("fleet.reserve.committed")
            self._state.changes.notify()
        self.reservations, self._stuck = plan.reservations, plan.stuck


class ClaimQueue:
    def __init__(
        self, store: LeaseStore, lease_s: float, now_s: Callable[[], float], shares: ReadShares | None = None
    ) -> None:
        self._store = store
        self._read_shares = shares
        self._lease_s = lease_s
        self._now_s = now_s
        self._pending: list[tuple[Claim, asyncio.Future[Sequence[JobLease]]]] = []
        self._worker: asyncio.Task[None] | None = None

    async def submit(self, claim: Claim) -> Sequence[JobLease]:
        reply: asyncio.Future[Sequence[JobLease]] = asyncio.get_running_loop().create_future()
        self._pending.append((claim, reply))
        if self._worker is None or self._worker.done():
            self._start_worker()
        return await reply

    def _start_worker(self) -> None:
        self._worker = asyncio.create_task(self._run())
        self._worker.add_done_callback(self._on_worker_done)

    def _on_worker_done(self, task: asyncio.Task[None]) -> None:
        """A defect ends the worker task with its batch; another worker serves the pending claims."""
        if self._pending and task is self._worker and not task.cancelled():
            self._start_worker()

    async def _run(self) -> None:
        while self._pending:
            # Yield to the event loop once: requests that arrived together share a batch.
            await asyncio.sleep(0)
            batch = [(claim, reply) for claim, reply in self._pending[:BATCH] if not reply.done()]
            del self._pending[:BATCH]
            if batch:
                await self._claim_batch(batch)

    async def _claim_batch(self, batch: list[tuple[Claim, asyncio.Future[Sequence[JobLease]]]]) -> None:
        failure = StrataError(Code.INTERNAL, "the claim was not answered")
        try:
            shares = None if self._read_shares is None else await self._read_shares()
            granted = await self._store.claim([claim for claim, _ in batch], self._lease_s, self._now_s(), shares)
            if any(granted):
                failpoint("fleet.claim.committed")
            # A client that has disconnected meanwhile repeats its claim_id and gets the same leases.
            for (_, reply), leases in zip(batch, granted, strict=True):
                if not reply.done():
                    reply.set_result(leases)
        except StrataError as error:
            failure = error
        finally:
            # No claim stays without a reply, whatever failed.
            for _, reply in batch:
                if not reply.done():
                    reply.set_exception(failure)
