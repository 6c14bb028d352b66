"""Herds: ten thousand workers register at once, and all of them wait for the last one at a barrier."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.coordinator.calls import BATCH
from bench.coordinator.orders import Define, Join, Meet, Teach
from bench.coordinator.processes import Process, both, clients
from bench.interleave import Comparison, Measure, interleave
from bench.load_process import Clients
from bench.percentiles import percentile
from bench.report import Report

CHANNELS: Final = 100
HERD: Final = 10_000
REGISTER_LIMIT_S: Final = 10.0
P99_LIMIT_MS: Final = {1_000: 100.0}
TAUGHT: Final = "taught"


@dataclass(frozen=True)
class Turns:
    rounds: Mapping[int, int]
    """By the size of the barrier, how often it is met on each side."""
    joins: int
    """How often the herd registers, each time with a server that has seen nobody."""


async def run(report: Report, folder: Path, turns: Turns) -> None:
    took_s = Comparison([], [], "lower")
    kib: list[float] = []
    for number in range(turns.joins):
        async with clients() as load, both(f"sqlite:{folder / f'herd-{number}.db'}") as (ours, bare):
            report.progress(f"{HERD:,} workers register")
            ours_s, bare_s, each_kib = await _register(load, ours, bare)
            took_s = Comparison([*took_s.ours, ours_s], [*took_s.bare, bare_s], "lower")
            kib.append(each_kib)
            if number + 1 < turns.joins:
                continue
            note = f"{percentile(kib, 50):.1f} KiB of memory for each worker"
            report.add(f"register.{HERD}", "s", took_s, limit=REGISTER_LIMIT_S, note=note)
            for workers, rounds in turns.rounds.items():
                report.progress(f"{workers:,} workers meet")
                if workers != HERD:
                    await join(load, ours, workers)
                await meet(report, load, (ours, bare), workers, rounds, goal=1.0)


async def join(load: Clients, server: Process, workers: int) -> None:
    """The workers of a barrier."""
    await load.carry_out(Join(server.address, _job(workers), workers, CHANNELS))


async def _register(load: Clients, ours: Process, bare: Process) -> tuple[float, float, float]:
    """Seconds on both sides, and the memory that each worker took of ours."""
    await load.carry_out(Join(ours.address, TAUGHT, BATCH, CHANNELS))
    await load.carry_out(Define(ours.address, TAUGHT, BATCH))
    await load.carry_out(Teach(ours.address, bare.address, TAUGHT, BATCH))
    before = ours.rss_bytes()
    ours_s, _ = await load.carry_out(Join(ours.address, _job(HERD), HERD, CHANNELS))
    after = ours.rss_bytes()
    bare_s, _ = await load.carry_out(Join(bare.address, _job(HERD), HERD, CHANNELS))
    return ours_s, bare_s, (after - before) / HERD / 1024


async def meet(
    report: Report, load: Clients, servers: tuple[Process, Process], workers: int, rounds: int, *, goal: float
) -> None:
    slow: dict[int, list[float]] = {server.pid: [] for server in servers}

    def meeting(server: Process) -> Measure:
        async def turn() -> float:
            order = Meet(server.address, _job(workers), workers, min(CHANNELS, workers))
            _, _, last_ms = await load.carry_out(order)
            slow[server.pid].append(last_ms)
            return last_ms

        return turn

    ours, bare = servers
    found = await interleave(meeting(ours), meeting(bare), rounds, better="lower")
    note = f"from the last arrival to the last release, over {CHANNELS} connections"
    report.add(f"barrier.{workers}", "ms", found, goal=goal, note=note)
    tail = Comparison([percentile(slow[ours.pid][1:], 99)], [percentile(slow[bare.pid][1:], 99)], "lower")
    report.add(
        f"barrier.{workers}.p99", "ms", tail, limit=P99_LIMIT_MS.get(workers), note=f"of {rounds} barriers on each side"
    )


def _job(workers: int) -> str:
    return f"herd-{workers}"
