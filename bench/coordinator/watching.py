"""What watching costs: heartbeats of 6,000 workers with three watchers of their job and without, turn by turn.

Both sides are our own coordinator. "Bare" is the one without watchers.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

from bench.coordinator.orders import Beats, Join, Watch
from bench.coordinator.processes import Process, clients, ours
from bench.interleave import Comparison, turns
from bench.load_process import Clients
from bench.report import Report

WORKERS: Final = 6_000
CHANNELS: Final = 64
WATCHERS: Final = 3
RATE: Final = 250.0
"""Heartbeats a second that are measured, each a call of its own: few enough that the clients do not queue."""
FIRST_RATE: Final = 1_000.0
"""Of the first heartbeats, one of each worker, which bring the telemetry that watchers see."""
SETTLE_S: Final = 4.0
"""Watchers get the whole job first. That is once for a watch, and not measured."""
JOB: Final = "watched"


async def run(report: Report, folder: Path, rounds: int, seconds: float) -> None:
    watched: list[list[float]] = []
    alone: list[list[float]] = []
    received: list[float] = []
    async with clients() as load, clients() as people, ours(f"sqlite:{folder / 'watched.db'}") as server:
        await load.carry_out(Join(server.address, JOB, WORKERS, CHANNELS))
        await _beat(load, server, WORKERS / FIRST_RATE + 1, FIRST_RATE)
        for side in turns(rounds):
            report.progress(f"heartbeats of {WORKERS:,} workers, {WATCHERS if side == 'ours' else 'no'} watchers")
            if side == "bare":
                alone.append(await _beat(load, server, seconds))
                continue
            watch = Watch(server.address, JOB, WATCHERS, SETTLE_S + seconds + 1, deltas=True)
            watching = asyncio.create_task(people.carry_out(watch))
            await asyncio.sleep(SETTLE_S)
            watched.append(await _beat(load, server, seconds))
            received += (await watching)[1:]
    sent = f"{WATCHERS} watchers of {WORKERS:,} workers, {max(received):.2f} MiB/s"
    p50 = Comparison([each[0] for each in watched], [each[0] for each in alone], "lower")
    report.add("watch.heartbeat.p50", "ms", p50, goal=0.9, note=sent)
    p99 = Comparison([each[1] for each in watched], [each[1] for each in alone], "lower")
    report.add("watch.heartbeat.p99", "ms", p99, note=sent)
    cpu = Comparison([each[2] for each in watched], [each[2] for each in alone], "lower")
    added = cpu.ours_more
    report.add("watch.cpu", "%", cpu, note=f"{added:+.1f} points (goal: below 5)")


async def _beat(load: Clients, server: Process, seconds: float, rate: float = RATE) -> list[float]:
    return await load.carry_out(Beats(server.address, JOB, WORKERS, CHANNELS, rate, seconds, server.pid))
