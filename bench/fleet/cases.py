"""Claims and renewals at the store port and over HTTP beside the bare databases: `python -m bench fleet`.

A claim is the end of a place in the queue, the move of the job, a lease, an attempt and an event, committed together
and flushed to disk before anybody hears of it. What it is held against, always in turns with ours, in one run, on a
database of its own with the same pending jobs and the same durability:

- PostgreSQL, `.claim` and `.claim.one`: the bare SKIP LOCKED statement, which takes a row out of the queue and puts one
  into the table of leases. It is prepared, commits by itself, and does less than a claim has to.
- PostgreSQL, the cases that end in `.records`: one such statement that also writes all of a claim's rows, for as many
  hosts under as many names.
- SQLite: the statements of a claim with all its rows, in the caller's thread, one commit for each claim; `.batch` has
  one commit for as many claims as ours.

In `.claim` so many hosts ask at once as a fleet has; ours go through the queue in which the hub coalesces them, theirs
each make a statement of their own, on as many connections as ours may use. In `.one` one host asks after the
other, so it is a matter of latency. Neither looks at what ours must: whether the host may take anything, and whether
this claim was answered before.

What a claim costs must not depend on how many jobs wait, nor on how many classes there are, nor on how rare those are
that a host may take. The databases lie under the system's temporary directory; point TMPDIR at the disk that is to be
measured.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Final

import uvloop

from bench.fleet import hub_http
from bench.fleet.rows import CLAIMANTS, FLEET, HOSTS, RARE, BarePostgres, BareSqlite, postgres_store, sqlite_store
from bench.interleave import Comparison, Measure, interleave
from bench.percentiles import percentile
from bench.report import Report
from strata.base.clock import SystemClock
from strata.fleet.core.amounts import Amounts, Capacity
from strata.fleet.ports import Store
from strata.fleet.records import Claim, JobLease, Renewal
from strata.fleet.service.claims import ClaimQueue
from strata.fleet.service.fleet import Fleet
from tests.support.postgres import PostgresServer

GOAL: Final = 0.8
FLAT: Final = 0.5
"""The slowest in a hundred claims may take twice as long among many jobs as among few."""
FEW: Final = 10_000
BATCH: Final = 64
CONNECTIONS: Final = 8
CLASSES: Final = 300
LEASE_S: Final = 45.0
OWNERS: Final = 50
OWNED: Final = 100_000
OWNERS_MS: Final = 10.0
"""The slowest of a hundred claims, among so many jobs of so many owners."""
CAPACITY: Final = Capacity(slots=256)
ONE_SLOT: Final = Amounts()
Call = Callable[[], Awaitable[object]]
loop_factory: Final = uvloop.new_event_loop
"""The hub's."""


@dataclass(frozen=True)
class Turns:
    many: dict[str, int]
    """How many jobs are pending in the larger case, by database."""
    rounds: int
    claims: int
    """Of one client in one turn."""
    http: hub_http.Turns


QUICK: Final = Turns(
    {"sqlite": 100_000, "postgres": 100_000}, rounds=8, claims=60, http=hub_http.Turns(4, 0.7, jobs=100_000)
)
LONG: Final = Turns(
    {"sqlite": 1_000_000, "postgres": 10_000_000}, rounds=20, claims=100, http=hub_http.Turns(10, 2.0, jobs=400_000)
)


class Claimer:
    """Claims under ever new names, for one host of the fleet after the other.

    A name that was used before would be answered with the job it was given then, which costs nothing: so every claimer
    of a store has a prefix of its own, and a job that comes a second time ends the bench.
    """

    def __init__(self, store: Store, classes: Iterable[int] = (1,), prefix: str = "c", hosts: int = FLEET) -> None:
        self._store = store
        self._hosts = hosts
        self._classes = dict.fromkeys(classes, ONE_SLOT)
        self._prefix = prefix
        self._names: Iterator[int] = itertools.count(1)
        self._given: set[str] = set()
        self._holding: set[str] = set()
        self._queue = ClaimQueue(store.leases, LEASE_S, lambda: 1.0)

    def _claim(self, host: int | None = None) -> Claim:
        number = next(self._names)
        host_id = f"host_{number % self._hosts if host is None else host}"
        idle = host_id not in self._holding
        self._holding.add(host_id)
        return Claim(
            host_id=host_id, claim_id=f"{self._prefix}{number}", classes=self._classes, capacity=CAPACITY, idle=idle
        )

    async def one(self, host: int | None = None) -> list[JobLease]:
        (leases,) = await self._store.leases.claim([self._claim(host)], LEASE_S, 1.0)
        self._check([leases])
        return list(leases)

    async def queued(self, client: int) -> None:
        del client
        self._check([await self._queue.submit(self._claim())])

    async def batch(self) -> None:
        given = await self._store.leases.claim([self._claim() for _ in range(BATCH)], LEASE_S, 1.0)
        self._check(given)

    def _check(self, given: Sequence[Sequence[JobLease]]) -> None:
        assert all(len(leases) == 1 for leases in given), "the bench ran out of jobs"
        jobs = {leases[0].job_id for leases in given}
        assert len(jobs) == len(given), "a job was given to two claims"
        assert not jobs & self._given, "an old claim was answered again: nothing was measured"
        assert all(leases[0].epoch == 1 for leases in given), "a job was claimed before"
        self._given |= jobs


class FleetClaimer:
    """Claims as the hub's route does: with the hosts, the classes and the shares of owners, read when they are due."""

    def __init__(self, store: Store) -> None:
        self._fleet = Fleet(store, SystemClock())
        self._names: Iterator[int] = itertools.count(1)

    async def one(self) -> None:
        number = next(self._names)
        leases = await self._fleet.claims.claim(f"host_{number % FLEET}", f"f{number}")
        assert len(leases) == 1, "the bench ran out of jobs"


async def run(report: Report, *, quick: bool) -> None:
    await measure(report, QUICK if quick else LONG)


async def run_against(report: Report, program: str, *, quick: bool) -> None:
    """The hub of an older commit in the place of the empty route."""
    turns = (QUICK if quick else LONG).http
    with tempfile.TemporaryDirectory(prefix="strata-bench-") as name, PostgresServer() as server:
        folder = Path(name)
        files = (f"sqlite:{folder / 'new.db'}", f"sqlite:{folder / 'old.db'}")
        await hub_http.run_against(report, "sqlite", folder, files, program, turns)
        databases = (server.create_database(), server.create_database())
        await hub_http.run_against(report, "postgres", folder, databases, program, turns)


async def measure(report: Report, turns: Turns) -> None:
    with tempfile.TemporaryDirectory(prefix="strata-bench-") as name:
        folder = Path(name)
        report.progress("claims from SQLite")
        await _sqlite(report, folder, turns)
        report.progress("a hub on SQLite")
        await hub_http.run(report, "sqlite", folder, f"sqlite:{folder / 'hub.db'}", turns.http)
        with PostgresServer() as server:
            report.progress("a hub on PostgreSQL")
            await hub_http.run(report, "postgres", folder, server.create_database(), turns.http)
            report.progress("claims from PostgreSQL")
            await _postgres(report, server, turns)


async def _sqlite(report: Report, folder: Path, turns: Turns) -> None:
    many, each = turns.many["sqlite"], turns.claims
    few, lots = (
        await sqlite_store(folder / "few.db", FEW),
        await sqlite_store(folder / "many.db", many, hosts=CLAIMANTS),
    )
    bare = await BareSqlite.open(folder / "bare.db", many)

    async def bare_claim(client: int = 0) -> None:
        del client
        bare.claim()

    async def bare_batch() -> None:
        bare.claim(BATCH)

    claims, of_few = Claimer(lots, hosts=CLAIMANTS), Claimer(few)
    few_each = max(2, each // 10)
    found = await interleave(_at_once(claims.queued, few_each), _at_once(bare_claim, few_each), turns.rounds)
    note = f"{many:,} pending, {HOSTS} hosts at once; bare: the same writes, a commit each"
    report.add("sqlite.claim", "claims/s", found, goal=GOAL, note=note)
    found = await interleave(_rate(claims.one, each), _rate(bare_claim, each), turns.rounds)
    report.add(
        "sqlite.claim.one", "claims/s", found, goal=GOAL, note="one host at a time; bare: the same writes, no thread"
    )
    found = await interleave(
        _rate(claims.batch, few_each, BATCH), _rate(bare_batch, few_each, BATCH), turns.rounds, better="higher"
    )
    note = f"{BATCH} hosts in one transaction; bare: the same writes, no thread"
    report.add("sqlite.claim.batch", "claims/s", found, goal=GOAL, note=note)
    await _flat(report, "sqlite", (claims.one, of_few.one), many, turns)
    jobs = [(await claims.one(0))[0].job_id for _ in range(BATCH)]
    bare_jobs = bare.leased(BATCH)

    async def bare_renew() -> None:
        bare.renew(bare_jobs)

    await _renewals(report, "sqlite", lots, jobs, bare_renew, turns)
    await _classes(report, "sqlite", await sqlite_store(folder / "classes.db", FEW, CLASSES), of_few.one, turns)
    await _rare(report, "sqlite", await sqlite_store(folder / "rare.db", many, RARE), of_few.one, turns)
    await _owners(report, "sqlite", await sqlite_store(folder / "owners.db", OWNED, owners=OWNERS), few, turns)
    bare.close()
    await few.close()
    await lots.close()


async def _postgres(report: Report, server: PostgresServer, turns: Turns) -> None:
    many, each = turns.many["postgres"], turns.claims
    lots = await postgres_store(server.create_database(), many, hosts=CLAIMANTS)
    bare = await BarePostgres.open(server.create_database(), many, CONNECTIONS, queue_only=True)
    records = await BarePostgres.open(server.create_database(), min(many, 20 * FEW), CONNECTIONS)
    few = await postgres_store(server.create_database(), FEW)
    claims, of_few = Claimer(lots, hosts=CLAIMANTS), Claimer(few)

    async def compare(case: str, ours: Measure, theirs: Measure, note: str, *, goal: float | None = GOAL) -> None:
        report.add(case, "claims/s", await interleave(ours, theirs, turns.rounds), goal=goal, note=note)

    few_each = max(2, each // 10)
    queued, one = _at_once(claims.queued, few_each), _rate(claims.one, each)
    note = (
        f"{many:,} pending, {HOSTS} hosts at once; bare: {CONNECTIONS} connections, SKIP LOCKED, delete, insert a lease"
    )
    await compare("postgres.claim", queued, _at_once(lambda _: bare.claim(), few_each), note)
    theirs = _at_once(lambda _: records.claim_with_records(), few_each)
    await compare("postgres.claim.records", queued, theirs, "bare: also job, attempt and event")
    await compare(
        "postgres.claim.one",
        one,
        _rate(bare.claim, each),
        "one host at a time; bare: SKIP LOCKED, delete, insert a lease",
    )
    theirs = _rate(records.claim_with_records, each)
    await compare("postgres.claim.one.records", one, theirs, "bare: also job, attempt and event")
    held = await postgres_store(server.create_database(), FEW)
    holding = _rate(Claimer(held, hosts=8).one, each)
    note = "8 hosts with leases, one claim at a time; bare: also job, attempt and event"
    await compare("postgres.claim.one.holding", holding, theirs, note, goal=None)
    await held.close()
    await _flat(report, "postgres", (claims.one, of_few.one), many, turns)
    batch = _rate(claims.batch, few_each, BATCH)
    theirs = _rate(lambda: bare.claim(BATCH), few_each, BATCH)
    note = f"{BATCH} hosts in one transaction; bare: delete, insert leases"
    await compare("postgres.claim.batch", batch, theirs, note, goal=None)
    theirs = _rate(lambda: records.claim_with_records(BATCH), few_each, BATCH)
    await compare("postgres.claim.batch.records", batch, theirs, "bare: also job, attempt and event")
    jobs = [(await claims.one(0))[0].job_id for _ in range(BATCH)]
    await _renewals(report, "postgres", lots, jobs, lambda: bare.renew(jobs), turns)
    await _classes(report, "postgres", await postgres_store(server.create_database(), FEW, CLASSES), of_few.one, turns)
    rare = await postgres_store(server.create_database(), min(many, 10**6), RARE)
    await _rare(report, "postgres", rare, of_few.one, turns)
    owned = await postgres_store(server.create_database(), OWNED, owners=OWNERS)
    await _owners(report, "postgres", owned, few, turns)
    await bare.close()
    await records.close()
    await few.close()
    await lots.close()


def _rate(call: Call, times: int, each: int = 1) -> Measure:
    async def turn() -> float:
        started_s = perf_counter()
        for _ in range(times):
            await call()
        return times * each / (perf_counter() - started_s)

    return turn


def _at_once(call: Callable[[int], Awaitable[object]], times: int) -> Measure:
    async def client(number: int) -> None:
        for _ in range(times):
            await call(number)

    async def turn() -> float:
        started_s = perf_counter()
        await asyncio.gather(*(client(number) for number in range(HOSTS)))
        return times * HOSTS / (perf_counter() - started_s)

    return turn


async def _times_ms(call: Call, times: int) -> list[float]:
    taken = []
    for _ in range(times):
        started_s = perf_counter()
        await call()
        taken.append((perf_counter() - started_s) * 1000)
    return taken


async def _flat(report: Report, name: str, sides: tuple[Call, Call], many: int, turns: Turns) -> None:
    """The slowest claims among many jobs beside those among few, in turns."""
    taken: tuple[list[float], list[float]] = ([], [])
    for _ in range(turns.rounds):
        for side in (0, 1):
            taken[side].extend(await _times_ms(sides[side], turns.claims))
    p99 = [percentile(side, 99) for side in taken]
    found = Comparison([p99[0]], [p99[1]], "lower")
    note = f"p99 of {len(taken[0])} among {many:,} pending; bare: ours among {FEW:,}"
    report.add(f"{name}.claim.p99", "ms", found, goal=FLAT, note=note)


async def _renewals(report: Report, name: str, store: Store, jobs: list[str], bare: Call, turns: Turns) -> None:
    renewals = [Renewal(job_id=job_id, epoch=1) for job_id in jobs]

    async def renew() -> None:
        renewed = await store.leases.renew("host_0", renewals, LEASE_S, 2.0)
        assert {each.verdict for each in renewed} == {"held"}

    found = await interleave(
        _rate(renew, turns.claims // 4, BATCH), _rate(bare, turns.claims // 4, BATCH), turns.rounds
    )
    report.add(f"{name}.renew", "leases/s", found, note=f"a host with {BATCH} leases in one call; bare: the update")


async def _classes(report: Report, name: str, store: Store, plain: Call, turns: Turns) -> None:
    """A host that may take one class of many, and one that may take all."""
    for case, classes in (("alone", [CLASSES]), ("many", range(1, CLASSES + 1))):
        what = "one class" if case == "alone" else "all classes"
        # The one class has few jobs of the whole.
        found = await _medians(Claimer(store, classes, f"{case}.").one, plain, turns, 3)
        note = f"median; {what} of {CLASSES}; bare: ours with 1 class"
        report.add(f"{name}.claim.{case}", "ms", found, note=note)
    await store.close()


async def _rare(report: Report, name: str, store: Store, plain: Call, turns: Turns) -> None:
    """The worst host: without a GPU, while nearly all jobs need one and are ahead of the few it may take."""
    found = await _medians(Claimer(store, [RARE]).one, plain, turns, 10)
    note = "median; a host without GPU, 99 of 100 jobs need one; bare: ours with 1 class"
    report.add(f"{name}.claim.cpu_only", "ms", found, goal=FLAT, note=note)
    await store.close()


async def _owners(report: Report, name: str, store: Store, few: Store, turns: Turns) -> None:
    """The slowest claims of a hub with many owners, beside those of one with a single owner, in turns."""
    taken: tuple[list[float], list[float]] = ([], [])
    sides = FleetClaimer(store).one, FleetClaimer(few).one
    for _ in range(turns.rounds):
        for side in (0, 1):
            taken[side].extend(await _times_ms(sides[side], 2 * turns.claims))
    found = Comparison([percentile(taken[0], 99)], [percentile(taken[1], 99)], "lower")
    note = f"p99 of {len(taken[0])}, {OWNED:,} pending of {OWNERS} owners, {FLEET} hosts; bare: one owner, {FEW:,}"
    report.add(f"{name}.claim.owners", "ms", found, limit=OWNERS_MS, note=note)
    await store.close()


async def _medians(ours: Call, plain: Call, turns: Turns, times: int) -> Comparison:
    """Beside a store with one class and few jobs, call by call: a disk that is busy for a moment is so for both."""
    taken: tuple[list[float], list[float]] = ([], [])
    for _ in range(turns.rounds * times):
        taken[0].extend(await _times_ms(ours, 1))
        taken[1].extend(await _times_ms(plain, 1))
    return Comparison([percentile(taken[0], 50)], [percentile(taken[1], 50)], "lower")
