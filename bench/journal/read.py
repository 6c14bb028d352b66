"""How fast a million facts come back: replayed from each adapter, and applied to a state machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Final

from bench.interleave import Comparison, Measure, interleave
from bench.journal.append import make_facts, open_writer
from bench.journal.bare import BarePostgres, BareSqlite
from bench.report import Report
from strata.base.clock import SystemClock
from strata.journal.port import Journal
from strata.journal.postgres import PostgresJournal
from strata.journal.replay import replay
from strata.journal.replica import Machine, Replica
from strata.journal.sqlite import SqliteJournal
from tests.support.memory_journal import MemoryJournal

STREAM: Final = "replay"
BATCH: Final = 256
"""Facts per commit: what a busy group commit makes of them. A stream of lone facts replays more slowly."""
BULK: Final = 4096
"""Rows per INSERT when the bare tables are filled, which is not measured."""


@dataclass(frozen=True)
class Turns:
    rounds: int
    facts: int


class Counting(Machine[int, bytes, None]):
    """The least a machine can do: its state is how many facts it has seen."""

    def initial(self) -> int:
        return 0

    def decide(self, state: int, given: bytes, now_s: float) -> tuple[Sequence[bytes], None]:  # noqa: ARG002
        return (given,), None

    def apply(self, state: int, fact: bytes) -> int:  # noqa: ARG002
        return state + 1

    def save(self, state: int) -> bytes:
        return b"%d" % state

    def load(self, saved: bytes) -> int:
        return int(saved)


async def sqlite(report: Report, folder: Path, turns: Turns) -> None:
    async with await SqliteJournal.open(folder / "replay.db", SystemClock()) as journal:
        bare = BareSqlite(folder / "bare-replay.db")
        await _fill(journal, turns.facts)
        for facts in _portions(turns.facts, BULK):
            bare.append(facts)

        async def select() -> float:
            started_s = perf_counter()
            return _rate(turns.facts, started_s, bare.read_all())

        found = await interleave(_replayed(journal, turns.facts), select, turns.rounds)
        report.add("sqlite.replay", "facts/s", found, note=_duration(found))
        bare.close()
        await _restore(report, journal, turns)


async def postgres(report: Report, url: str, turns: Turns) -> None:
    async with await PostgresJournal.open(url, SystemClock()) as journal:
        bare = await BarePostgres.open(url)
        await _fill(journal, turns.facts)
        for facts in _portions(turns.facts, BULK):
            await bare.append(facts)

        async def select() -> float:
            started_s = perf_counter()
            return _rate(turns.facts, started_s, await bare.read_all())

        found = await interleave(_replayed(journal, turns.facts), select, turns.rounds)
        report.add("postgres.replay", "facts/s", found, note=_duration(found))
        await bare.close()


async def memory(report: Report, turns: Turns) -> None:
    """There is no engine below it: the bare side is a loop over a list."""
    journal = MemoryJournal(SystemClock())
    await _fill(journal, turns.facts)
    listed = [fact for portion in _portions(turns.facts, BULK) for fact in portion]

    async def loop() -> float:
        started_s = perf_counter()
        count = 0
        for _ in listed:
            count += 1
        return _rate(turns.facts, started_s, count)

    found = await interleave(_replayed(journal, turns.facts), loop, turns.rounds)
    report.add("memory.replay", "facts/s", found, note=_duration(found))


async def _restore(report: Report, journal: Journal, turns: Turns) -> None:
    machine = Counting()
    listed = [fact for portion in _portions(turns.facts, BULK) for fact in portion]

    async def restored() -> float:
        started_s = perf_counter()
        replica = Replica(journal, STREAM, machine, SystemClock())
        await replica.catch_up()
        return _rate(turns.facts, started_s, replica.state)

    async def applied() -> float:
        started_s = perf_counter()
        state = machine.initial()
        for fact in listed:
            state = machine.apply(state, fact)
        return _rate(turns.facts, started_s, state)

    found = await interleave(restored, applied, turns.rounds)
    report.add("replica.restore", "facts/s", found, note=f"from SQLite; {_duration(found)}")


def _replayed(journal: Journal, facts: int) -> Measure:
    async def turn() -> float:
        started_s = perf_counter()
        count = 0
        async for batch in replay(journal, STREAM):
            for _ in batch.facts:
                count += 1
        return _rate(facts, started_s, count)

    return turn


async def _fill(journal: Journal, facts: int) -> None:
    writer = await open_writer(journal, STREAM)
    for portion in _portions(facts, BATCH):
        await writer.append(portion)


def _portions(facts: int, size: int) -> Iterator[list[bytes]]:
    pool = make_facts(size)
    for start in range(0, facts, size):
        yield pool[: min(size, facts - start)]


def _rate(expected: int, started_s: float, counted: int) -> float:
    elapsed_s = perf_counter() - started_s
    if counted != expected:
        raise RuntimeError(f"{counted:,} facts came back instead of {expected:,}")
    return counted / elapsed_s


def _duration(found: Comparison) -> str:
    ours_s, bare_s = 1e6 / median(found.ours), 1e6 / median(found.bare)
    return f"a million in {ours_s:.2f} s, bare {bare_s:.2f} s"
