"""Claims and renewals at the store port beside the bare databases: `python -m bench fleet`.

Each side has a database of its own with the same pending jobs. What a claim costs must not depend on how many wait, nor
on how many classes there are. The databases lie under the system's temporary directory; point TMPDIR at the disk that
is to be measured.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Final

from bench.fleet_rows import HOSTS, BarePostgres, BareSqlite, postgres_store, sqlite_store
from bench.interleave import Comparison, Measure, interleave
from bench.percentiles import percentile
from bench.report import Report
from strata.fleet.ports import Claim, Lease, Renewal, Store
from strata.testing.postgres import PostgresServer

GOAL: Final = 0.8
FLAT: Final = 0.5
"""The slowest in a hundred claims may take twice as long among many jobs as among few."""
FEW: Final = 10_000
BATCH: Final = 64
CLIENTS: Final = 8
CLASSES: Final = 300
Call = Callable[[], Awaitable[object]]


@dataclass(frozen=True)
class Turns:
    many: dict[str, int]
    """How many jobs are pending in the larger case, by database."""
    rounds: int
    claims: int
    """Of one client in one turn."""


QUICK: Final = Turns({"sqlite": 100_000, "postgres": 100_000}, rounds=8, claims=60)
LONG: Final = Turns({"sqlite": 1_000_000, "postgres": 10_000_000}, rounds=20, claims=100)


class Claimer:
    """Claims under ever new names, for one host after the other.

    A name that was used before would be answered with the job it was given then, which costs nothing: so every claimer
    of a store has a prefix of its own, and a job that comes a second time ends the bench.
    """

    def __init__(self, store: Store, classes: dict[int, int], prefix: str = "c") -> None:
        self._store = store
        self._classes = classes
        self._prefix = prefix
        self._names: Iterator[int] = itertools.count(1)
        self._given: set[str] = set()

    def _claim(self, client: int) -> Claim:
        name = f"{self._prefix}{next(self._names)}"
        return Claim(host_id=f"host_{client % HOSTS}", claim_id=name, classes=self._classes, slots=1)

    async def one(self, client: int = 0) -> list[Lease]:
        (leases,) = await self._store.claim([self._claim(client)], 45.0, 1.0)
        self._check([leases])
        return list(leases)

    async def batch(self) -> None:
        given = await self._store.claim([self._claim(number) for number in range(BATCH)], 45.0, 1.0)
        self._check(given)

    def _check(self, given: Sequence[Sequence[Lease]]) -> None:
        assert all(len(leases) == 1 for leases in given), "the bench ran out of jobs"
        jobs = {leases[0].job_id for leases in given}
        assert len(jobs) == len(given), "a job was given to two claims"
        assert not jobs & self._given, "an old claim was answered again: nothing was measured"
        assert all(leases[0].epoch == 1 for leases in given), "a job was claimed before"
        self._given |= jobs


async def run(report: Report, *, quick: bool) -> None:
    turns = QUICK if quick else LONG
    with tempfile.TemporaryDirectory(prefix="strata-bench-") as folder:
        report.progress("claims from SQLite")
        await _sqlite(report, Path(folder), turns)
    with PostgresServer() as server:
        report.progress("claims from PostgreSQL")
        await _postgres(report, server, turns)


async def _sqlite(report: Report, folder: Path, turns: Turns) -> None:
    many = turns.many["sqlite"]
    few, lots = await sqlite_store(folder / "few.db", FEW, 1), await sqlite_store(folder / "many.db", many, 1)
    bare = await BareSqlite.open(folder / "bare.db", many)

    async def bare_claim() -> None:
        bare.claim()

    async def bare_batch() -> None:
        bare.claim(BATCH)

    claims, of_few = Claimer(lots, {1: 1}), Claimer(few, {1: 1})
    found = await interleave(_rate(claims.one, turns.claims), _rate(bare_claim, turns.claims), turns.rounds)
    note = f"{many:,} pending, one client; bare: the same writes, no thread"
    report.add("sqlite.claim", "claims/s", found, goal=GOAL, note=note)
    await _flat(report, "sqlite", (claims.one, of_few.one), many, turns)
    batches = max(2, turns.claims // 10)
    found = await interleave(
        _rate(claims.batch, batches, BATCH), _rate(bare_batch, batches, BATCH), turns.rounds, better="higher"
    )
    report.add("sqlite.claim.batch", "claims/s", found, goal=GOAL, note=f"{BATCH} hosts in one transaction")
    jobs = [(await claims.one())[0].job_id for _ in range(BATCH)]
    bare_jobs = bare.leased(BATCH)

    async def bare_renew() -> None:
        bare.renew(bare_jobs)

    await _renewals(report, "sqlite", lots, jobs, bare_renew, turns)
    await _classes(report, "sqlite", await sqlite_store(folder / "classes.db", FEW, CLASSES), of_few.one, turns)
    bare.close()
    await few.close()
    await lots.close()


async def _postgres(report: Report, server: PostgresServer, turns: Turns) -> None:
    many = turns.many["postgres"]
    lots = await postgres_store(server.create_database(), many, 1)
    bare = await BarePostgres.open(server.create_database(), many, CLIENTS)
    records = await BarePostgres.open(server.create_database(), FEW * 3, CLIENTS)
    few = await postgres_store(server.create_database(), FEW, 1)
    claims, of_few = Claimer(lots, {1: 1}), Claimer(few, {1: 1})
    each = turns.claims

    found = await interleave(_rate(claims.one, each), _rate(lambda: bare.claim(0), each), turns.rounds)
    note = f"{many:,} pending, one client; bare: SKIP LOCKED, delete, insert a lease"
    report.add("postgres.claim", "claims/s", found, goal=GOAL, note=note)
    found = await interleave(_rate(claims.one, each), _rate(lambda: records.claim_with_records(0), each), turns.rounds)
    report.add("postgres.claim.records", "claims/s", found, goal=GOAL, note="bare: also job, attempt and event")
    found = await interleave(
        _at_once(claims.one, each // 2), _at_once(records.claim_with_records, each // 2), turns.rounds
    )
    report.add("postgres.claim.clients", "claims/s", found, note=f"{CLIENTS} clients at once; bare: with records")
    await _flat(report, "postgres", (claims.one, of_few.one), many, turns)
    batches = max(2, turns.claims // 10)
    found = await interleave(
        _rate(claims.batch, batches, BATCH), _rate(lambda: bare.claim(0, BATCH), batches, BATCH), turns.rounds
    )
    note = f"{BATCH} hosts in one transaction; bare: delete, insert leases"
    report.add("postgres.claim.batch", "claims/s", found, note=note)
    found = await interleave(
        _rate(claims.batch, batches, BATCH),
        _rate(lambda: records.claim_with_records(0, BATCH), batches, BATCH),
        turns.rounds,
    )
    report.add("postgres.claim.batch.records", "claims/s", found, goal=GOAL, note="bare: also job, attempt and event")
    jobs = [(await claims.one())[0].job_id for _ in range(BATCH)]
    await _renewals(report, "postgres", lots, jobs, lambda: bare.renew(jobs), turns)
    await _classes(report, "postgres", await postgres_store(server.create_database(), FEW, CLASSES), of_few.one, turns)
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
        await asyncio.gather(*(client(number) for number in range(CLIENTS)))
        return times * CLIENTS / (perf_counter() - started_s)

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
        renewed = await store.renew("host_0", renewals, 45.0, 2.0)
        assert {each.verdict for each in renewed} == {"held"}

    found = await interleave(
        _rate(renew, turns.claims // 4, BATCH), _rate(bare, turns.claims // 4, BATCH), turns.rounds
    )
    report.add(f"{name}.renew", "leases/s", found, note=f"a host with {BATCH} leases in one call; bare: the update")


async def _classes(report: Report, name: str, store: Store, plain: Call, turns: Turns) -> None:
    """A host that may take one class of many, and one that may take all; beside a store with one class."""
    for case, classes in (("alone", {CLASSES: 1}), ("many", dict.fromkeys(range(1, CLASSES + 1), 1))):
        taken: tuple[list[float], list[float]] = ([], [])
        claimer = Claimer(store, classes, f"{case}.")
        for _ in range(turns.rounds):
            # The one class has few jobs of the whole.
            taken[0].extend(await _times_ms(claimer.one, 3))
            taken[1].extend(await _times_ms(plain, 3))
        found = Comparison([percentile(taken[0], 50)], [percentile(taken[1], 50)], "lower")
        what = "one class" if case == "alone" else "all classes"
        report.add(f"{name}.claim.{case}", "ms", found, note=f"median; {what} of {CLASSES}; bare: ours with 1 class")
    await store.close()
