"""Partitions of jobs over journal streams: which partition a job is in, how leases decide who leads each, and when a
process takes or gives one away to balance.

A process takes free partitions, and gives one away when another process has fewer. Leases in the journal decide who
leads; the holder of a lease is named with its address, so the journal also says where to forward a call.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

import msgspec

from strata.base import log
from strata.base.clock import Clock
from strata.base.errors import Code, StrataError
from strata.base.ids import Ids
from strata.base.loop import every
from strata.coord.core.state import CoordState
from strata.coord.metrics import CoordinatorMetrics
from strata.coord.server.service import CoordinatorService, OnChange
from strata.coord.settings import CoordinatorSettings
from strata.journal.port import Journal, Lead, StreamStatus

ROUNDS: Final = 4
"""Times that a process looks at the leases, in the time of one."""
FREE_LEASES: Final = 3.0
"""The number of leases after which a free partition is taken by any process, also by one with more than its share."""
SHARED_LEASES: Final = 2.0
"""So long another process may seem to live at the address of one that starts: it may be the same one, restarted."""
BALANCED_ROUNDS: Final = 4
"""Rounds without a change between two moves."""

_log = log.get(__name__)


def partition_of(job: str, partitions: int) -> int:
    """A stable hash of the job's id: the first 8 bytes of BLAKE2b, big-endian, modulo the number of partitions."""
    return int.from_bytes(blake2b(job.encode(), digest_size=8).digest(), "big") % partitions


class PartitionCount(msgspec.Struct, frozen=True, tag="PartitionCount"):
    """The only fact of the stream that bears the installation's name, if there is more than one partition.

    No coordinator with one partition can read it, so none, of whatever version, leads such an installation.
    """

    partitions: int


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(PartitionCount).decode


async def check_partitions(journal: Journal, stream: str, partitions: int, *, lease_s: float, clock: Clock) -> None:
    """Store the number of partitions if the installation is new; INVALID if it has another number."""
    holder, until_s = Ids(clock).new("installation"), clock.monotonic_s() + 2 * lease_s
    while True:
        stored = await _stored_partitions(journal, stream)
        if stored == partitions or (stored is None and partitions == 1):
            return
        if stored is not None:
            raise StrataError(
                Code.INVALID,
                f"{stream!r} in this database has {_count(stored)}, not {partitions}",
                hint=f"start all coordinators with --partitions {stored}, or use another database",
            )
        try:
            lead = await journal.lead(stream, holder, lease_s)
        except StrataError as error:
            if error.code is not Code.CONFLICT:
                raise
            if clock.monotonic_s() > until_s:
                raise StrataError(
                    Code.INVALID,
                    f"a coordinator with one partition leads {stream!r} in this database, not {partitions}",
                    hint="stop it first, or use another database",
                ) from error
            await clock.sleep(lease_s / ROUNDS)
            continue
        if lead.head == 0:
            await journal.append(stream, lead.epoch, 0, [_encode(PartitionCount(partitions))])
        await journal.resign(stream, lead.epoch)


def _count(partitions: int) -> str:
    return "one partition" if partitions == 1 else f"{partitions} partitions"


async def _stored_partitions(journal: Journal, stream: str) -> int | None:
    """None: of an installation that has no facts yet."""
    status = next((each for each in await journal.streams() if each.stream == stream), None)
    if status is None or status.head == 0:
        return None
    if status.head > 1:
        return 1
    try:
        return _decode((await journal.read(stream, 0))[0].facts[0]).partitions
    except msgspec.DecodeError:
        # The first fact of a job.
        return 1
    except StrataError as error:
        # Truncated.
        if error.code is not Code.GONE:
            raise
        return 1


@dataclass(frozen=True)
class LeadershipPlan:
    """What one process does next."""

    take: tuple[int, ...] = ()
    give: int | None = None


def plan_leadership(
    holder: str, leaders: Sequence[str | None], live: Collection[str], overdue: Collection[int] = ()
) -> LeadershipPlan:
    """Each free partition falls to the process with the fewest; if none is free, the one with the most gives one away.

    `leaders` has the holder of each partition, None if it is free. All processes that see the same decide the same, so
    they rarely compete; if they do, the journal decides. `overdue` partitions have been free for long: take them.
    """
    loads = Counter(dict.fromkeys(live, 0))
    loads.update(each for each in leaders if each is not None and each in loads)
    take = []
    free = [number for number, leader in enumerate(leaders) if leader is None]
    for number in free:
        heir = min(loads, key=lambda each: (loads[each], each), default=None)
        if heir is not None:
            loads[heir] += 1
        if heir == holder or number in overdue:
            take.append(number)
    if free or holder not in loads:
        return LeadershipPlan(take=tuple(take))
    most = max(loads, key=lambda each: (loads[each], each))
    if most != holder or loads[holder] - min(loads.values()) < 2:
        return LeadershipPlan()
    return LeadershipPlan(give=max(number for number, leader in enumerate(leaders) if leader == holder))


def address_of(holder: str) -> str:
    """The address in the name of a holder; empty if it has none."""
    return holder.partition("@")[2]


class Partitions:
    """All partitions of an installation as one process sees them; it leads some."""

    def __init__(self, journal: Journal, clock: Clock, settings: CoordinatorSettings) -> None:
        self.metrics = CoordinatorMetrics()
        self.services: Final = tuple(
            CoordinatorService(
                journal, clock, msgspec.structs.replace(settings, stream=f"{settings.stream}/{number}"), self.metrics
            )
            for number in range(settings.partitions)
        )
        self.address = ""
        """Where the other processes reach this one; set before `run`."""
        self.clock = clock
        self._journal = journal
        self._stream = settings.stream
        self._lease_s = settings.lease_s
        self._id = Ids(clock).new("coordinator")
        self._seat: Lead | None = None
        self._leaders: list[StreamStatus | None] = [None] * settings.partitions
        self._live: frozenset[str] = frozenset()
        self._leading: dict[int, asyncio.Task[None]] = {}
        self._giving: asyncio.Task[None] | None = None
        self._given: int | None = None
        """The partition that is being given away, or was the last one."""
        self._free_since_s: dict[int, float] = {}
        self._retry_at_s: dict[int, float] = {}
        self._unchanged = 0
        self._rounds = 0
        self._shared_since_s: float | None = None
        self._failure: StrataError | None = None
        self._draining = asyncio.Event()
        self._on_change: OnChange | None = None

    @property
    def leads(self) -> bool:
        """Says whether this process serves calls: it leads or knows who does."""
        return self._rounds > 0 and not self._draining.is_set()

    @property
    def states_led(self) -> dict[int, CoordState]:
        """Returns the state of each partition that this process leads."""
        found = ((number, service.state_if_leading) for number, service in enumerate(self.services))
        return {number: state for number, state in found if state is not None}

    @property
    def holder(self) -> str:
        return f"{self._id}@{self.address}"

    def find(self, job: str) -> int:
        return partition_of(job, len(self.services))

    def leader_address(self, partition: int) -> str | None:
        """Returns the address of another process that leads the partition, as far as known."""
        status = self._leaders[partition]
        address = address_of(status.holder) if status is not None and status.led else ""
        return address if address and address != self.address else None

    def is_process(self, address: str) -> bool:
        """Says whether a live process of this installation has this address, or had it a moment ago."""
        known = (*self._live, *(each.holder for each in self._leaders if each is not None))
        return address in map(address_of, known)

    async def run(self, on_change: OnChange) -> None:
        """Run until drained or cancelled; INVALID if another live process has the same address. INVALID if another live
        process has the same address."""
        self._on_change = on_change
        interval_s = self._lease_s / ROUNDS
        rounds = asyncio.create_task(
            every(interval_s, self._run_round, clock=self.clock, max_backoff_s=interval_s), name="partitions"
        )
        draining = asyncio.create_task(self._draining.wait())
        try:
            await asyncio.wait([rounds, draining], return_when=asyncio.FIRST_COMPLETED)
        finally:
            rounds.cancel()
            draining.cancel()
            tasks = [rounds, draining, *self._leading.values()]
            if not self._draining.is_set():
                for task in tasks:
                    task.cancel()
            await asyncio.wait(tasks)
        if self._failure is not None:
            raise self._failure

    async def drain(self) -> None:
        """Give all partitions away, so that the others take them at once."""
        self._draining.set()
        if self._seat is not None:
            try:
                await self._journal.resign(self._seat.stream, self._seat.epoch)
            except StrataError as error:
                _log.warning("resign_failed", stream=self._seat.stream, reason=str(error))
        await asyncio.gather(*(service.drain() for service in self.services))
        if self._giving is not None:
            await asyncio.wait([self._giving])

    async def _run_round(self) -> None:
        try:
            await self.run_once()
        except StrataError as error:
            if error.detail.get("went_back"):
                await self._refuse(error)
                return
            # What is led stays led as long as its own leases can be renewed.
            if error.code is not Code.UNAVAILABLE:
                raise
            _log.warning("partitions_unknown", reason=str(error))

    async def _refuse(self, reason: StrataError) -> None:
        """Serve nothing until the right database is back, or a person restarts this process."""
        for service in self.services:
            service.refuse(reason)
        self._rounds = 0
        await self._changed()

    async def run_once(self) -> None:
        """Look at all leases; then take what is free and due to this process, or give one partition away."""
        self._reap()
        await self._keep_seat()
        statuses = {each.stream: each for each in await self._journal.streams()}
        self._read(statuses)
        if self._rounds == 0 and self._shares_address():
            return
        self._rounds += 1
        if self._rounds == 1:
            for service in self.services:
                service.accept()
            # Processes that start together share the partitions out before anything has to move.
            await self._changed()
            return
        plan = plan_leadership(self.holder, self._holders(), self._live, self._overdue())
        now_s = self.clock.monotonic_s()
        is_given = self._giving is None or self._giving.done()
        for number in plan.take:
            if number == self._given and not is_given:
                continue
            if number not in self._leading and now_s >= self._retry_at_s.get(number, 0.0):
                self._leading[number] = asyncio.create_task(self._lead(number), name=f"partition {number}")
        is_settled = self._unchanged >= BALANCED_ROUNDS and is_given
        if plan.give is not None and is_settled and not self._draining.is_set():
            self._unchanged = 0
            _log.info("partition_given_away", partition=plan.give, processes=len(self._live))
            self._given = plan.give
            self._giving = asyncio.create_task(self.services[plan.give].give_away())

    def _shares_address(self) -> bool:
        """Says whether this process cannot begin because of another one that lives, or lived a moment ago, at its
        address.

        Each of the two would take the calls that the other one leads for its own.
        """
        leading = (each.holder for each in self._leaders if each is not None and each.led)
        others = [each for each in {*self._live, *leading} - {self.holder} if address_of(each) == self.address]
        now_s = self.clock.monotonic_s()
        self._shared_since_s = (self._shared_since_s or now_s) if others else None
        if self._shared_since_s is not None and now_s - self._shared_since_s > SHARED_LEASES * self._lease_s:
            self._failure = StrataError(
                Code.INVALID,
                f"another coordinator of this installation advertises {self.address} and is alive ({others[0]})",
                hint="give each process an address of its own with coordinator.advertise",
            )
            self._draining.set()
        return bool(others)

    async def _keep_seat(self) -> None:
        """Hold one of as many leases as there are partitions: those that are held tell how many processes live."""
        if self._seat is not None:
            try:
                await self._journal.renew(self._seat.stream, self._seat.epoch, self._lease_s)
            except StrataError as error:
                if error.code is not Code.STALE:
                    raise
                self._seat = None
            else:
                return
        taken = {each.stream for each in await self._journal.streams() if each.led}
        for number in range(len(self.services)):
            stream = self._seat_stream(number)
            if stream in taken:
                continue
            try:
                self._seat = await self._journal.lead(stream, self.holder, self._lease_s)
            except StrataError as error:
                if error.code is not Code.CONFLICT:
                    raise
            else:
                return

    def _seat_stream(self, number: int) -> str:
        return f"{self._stream}/process/{number}"

    def _read(self, statuses: Mapping[str, StreamStatus]) -> None:
        leaders = [statuses.get(service.settings.stream) for service in self.services]
        seats = (statuses.get(self._seat_stream(number)) for number in range(len(self.services)))
        live = frozenset(each.holder for each in seats if each is not None and each.led)
        is_same = live == self._live and [_lead_of(each) for each in leaders] == [
            _lead_of(each) for each in self._leaders
        ]
        self._unchanged = self._unchanged + 1 if is_same else 0
        self._leaders, self._live = leaders, live

    def _holders(self) -> list[str | None]:
        """Returns the holder of each partition; a lease of this process without a leader in it is free."""
        found: list[str | None] = []
        for number, status in enumerate(self._leaders):
            if number in self._leading:
                found.append(self.holder)
            elif status is None or not status.led or status.holder == self.holder:
                found.append(None)
            else:
                found.append(status.holder)
        return found

    def _overdue(self) -> set[int]:
        now_s = self.clock.monotonic_s()
        free = {number for number, holder in enumerate(self._holders()) if holder is None}
        self._free_since_s = {number: self._free_since_s.get(number, now_s) for number in free}
        limit_s = FREE_LEASES * self._lease_s
        return {number for number, since_s in self._free_since_s.items() if now_s - since_s >= limit_s}

    async def _lead(self, number: int) -> None:
        try:
            await self.services[number].lead(self.holder, self._changed)
        except StrataError as error:
            # Another process was faster, or the database is away. Anything else a person has to see to, and the other
            # partitions go on.
            if error.detail.get("went_back"):
                self.services[number].refuse(error)
            elif error.code not in (Code.CONFLICT, Code.STALE, Code.UNAVAILABLE):
                _log.error("partition_failed", partition=number, code=error.code.value, reason=str(error))
        finally:
            self._retry_at_s[number] = self.clock.monotonic_s() + self._lease_s

    def _reap(self) -> None:
        """Forget the partitions that are led no more. An error that is none of ours is raised, to be logged."""
        ended = {number: task for number, task in self._leading.items() if task.done()}
        for number in ended:
            del self._leading[number]
        for task in ended.values():
            task.result()

    async def _changed(self) -> None:
        if self._on_change is not None:
            await self._on_change()


def _lead_of(status: StreamStatus | None) -> tuple[int, bool] | None:
    return None if status is None else (status.epoch, status.led)
