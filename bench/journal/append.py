"""How fast facts become durable: in batches, from many callers at once, and one alone."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any, Final

from bench.interleave import Comparison, Measure, interleave
from bench.journal.bare import BarePostgres, BareSqlite
from bench.report import Report
from strata.base.clock import SystemClock
from strata.journal.group_commit import Writer
from strata.journal.port import Journal
from strata.journal.postgres import PostgresJournal
from strata.journal.replay import replay
from strata.journal.sqlite import SqliteJournal

FACT_BYTES: Final = 200
BATCH_GOAL: Final = 0.8
LONE_GOAL: Final = 0.77
"""One append alone may take 1.3 times as long as the bare statement."""
BATCHES: Final = {"append.batch": 64, "append.batch512": 512}
CALLERS: Final = 256
PEAK_CALLERS: Final = 16
PEAK_BATCH: Final = 256

Append = Callable[[Sequence[bytes]], Awaitable[Any]]


@dataclass(frozen=True)
class Turns:
    rounds: int
    facts: int
    lone_appends: int


def make_facts(count: int) -> list[bytes]:
    noise = os.urandom(FACT_BYTES + count)
    return [noise[start : start + FACT_BYTES] for start in range(count)]


async def sqlite(report: Report, folder: Path, turns: Turns) -> None:
    async with await SqliteJournal.open(folder / "appends.db", SystemClock()) as journal:
        bare = BareSqlite(folder / "bare-appends.db")
        writer = await open_writer(journal)
        for name, size in BATCHES.items():
            batches = [make_facts(size)] * (turns.facts // size)
            found = await interleave(
                _one_by_one(writer.append, batches), _without_a_loop(bare.append, batches), turns.rounds
            )
            report.add(f"sqlite.{name}", "facts/s", found, goal=BATCH_GOAL)

        async def at_once(facts: Sequence[bytes]) -> None:
            bare.append_one(facts[0])

        async def in_a_thread(facts: Sequence[bytes]) -> None:
            await asyncio.to_thread(bare.append_one, facts[0])

        await _lone(report, "sqlite.append.single", (writer.append, at_once), turns, goal=LONE_GOAL)
        # What a server would otherwise write, since a commit on the loop stops everybody else: a yardstick, not a goal.
        await _lone(report, "sqlite.append.single.threaded", (writer.append, in_a_thread), turns)
        bare.close()


async def postgres(report: Report, url: str, turns: Turns) -> None:
    async with AsyncExitStack() as opened:
        journal = await opened.enter_async_context(await PostgresJournal.open(url, SystemClock()))
        bare = await BarePostgres.open(url)
        opened.push_async_callback(bare.close)
        writer = await open_writer(journal)
        for name, size in BATCHES.items():
            batches = [make_facts(size)] * (turns.facts // size)
            found = await interleave(
                _one_by_one(writer.append, batches), _one_by_one(bare.append, batches), turns.rounds
            )
            report.add(f"postgres.{name}", "facts/s", found, goal=BATCH_GOAL)
        for case, callers, size in (("concurrent", CALLERS, 1), ("peak", PEAK_CALLERS, PEAK_BATCH)):
            found, group = await _grouped(journal, bare, callers, size, turns)
            goal = BATCH_GOAL if case == "concurrent" else None
            note = f"{callers} callers, {size} at a time; commits of {group} facts on average"
            report.add(f"postgres.append.{case}", "facts/s", found, goal=goal, note=note)
        await _lone(report, "postgres.append.single", (writer.append, bare.append), turns, goal=LONE_GOAL)


async def open_writer(journal: Journal, stream: str = "bench") -> Writer:
    return Writer(journal, await journal.lead(stream, "bench", 3600.0), SystemClock())


async def _grouped(
    journal: PostgresJournal, bare: BarePostgres, callers: int, size: int, turns: Turns
) -> tuple[Comparison, int]:
    """Many callers of one writer against bare batches as large as the commits that the writer made of their facts."""
    writer = await open_writer(journal, f"grouped-{callers}")
    each = make_facts(size)
    repeats = max(turns.facts * 2 // (callers * size), 8)

    async def caller() -> None:
        for _ in range(repeats):
            await writer.append(each)

    async def ours() -> float:
        started_s = perf_counter()
        await asyncio.gather(*(caller() for _ in range(callers)))
        return callers * repeats * size / (perf_counter() - started_s)

    await ours()
    before = writer.durable
    await ours()
    commits = [len(batch.facts) async for batch in replay(journal, writer.lead.stream, before)]
    group = round(sum(commits) / len(commits))
    batches = [make_facts(group)] * (callers * repeats * size // group)
    return await interleave(ours, _one_by_one(bare.append, batches), turns.rounds), group


def _one_by_one(append: Append, batches: Sequence[Sequence[bytes]]) -> Measure:
    async def turn() -> float:
        started_s = perf_counter()
        for batch in batches:
            await append(batch)
        return _rate(batches, started_s)

    return turn


def _without_a_loop(append: Callable[[Sequence[bytes]], None], batches: Sequence[Sequence[bytes]]) -> Measure:
    async def turn() -> float:
        started_s = perf_counter()
        for batch in batches:
            append(batch)
        return _rate(batches, started_s)

    return turn


async def _lone(
    report: Report, case: str, sides: tuple[Append, Append], turns: Turns, *, goal: float | None = None
) -> None:
    """One fact at a time, each waited for: what a caller sees when nobody else is there to share the commit."""
    facts = make_facts(64)
    ours_ms: list[float] = []
    bare_ms: list[float] = []

    def latency(append: Append, durations_ms: list[float]) -> Measure:
        async def turn() -> float:
            for number in range(turns.lone_appends):
                fact = [facts[number % len(facts)]]
                started_s = perf_counter()
                await append(fact)
                durations_ms.append((perf_counter() - started_s) * 1e3)
            return median(durations_ms[-turns.lone_appends :])

        return turn

    ours, bare = sides
    found = await interleave(latency(ours, ours_ms), latency(bare, bare_ms), turns.rounds * 2, better="lower")
    added_ms = median(found.ours) - median(found.bare)
    report.add(case, "ms", found, goal=goal, note=f"median; {added_ms:.2f} ms added")
    slow = Comparison([_p99(ours_ms)], [_p99(bare_ms)], "lower")
    report.add(f"{case}.p99", "ms", slow, note=f"of {len(ours_ms):,} appends")


def _p99(values: list[float]) -> float:
    return quantiles(values, n=100)[98]


def _rate(batches: Sequence[Sequence[bytes]], started_s: float) -> float:
    return sum(map(len, batches)) / (perf_counter() - started_s)
