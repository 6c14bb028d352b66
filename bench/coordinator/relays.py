"""What a coordinator gets to do when the workers of a host send their heartbeats together: 1,000 workers on 125 hosts.

Both sides are our own coordinator. "Bare" is each worker sending its heartbeats itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from bench.coordinator.orders import Hosts, Join
from bench.coordinator.processes import Process, clients, ours
from bench.interleave import Better, Comparison
from bench.load_process import Clients
from bench.report import Report

HOSTS: Final = 125
WORKERS: Final = 1_000
CHANNELS: Final = 125
JOB: Final = "hosts"
INTERVAL_S: Final = 5.0
"""As by default."""


async def run(report: Report, folder: Path, rounds: int) -> None:
    figures: dict[bool, list[list[float]]] = {True: [], False: []}
    async with clients() as load, ours(f"sqlite:{folder / 'hosts.db'}", INTERVAL_S) as server:
        await load.carry_out(Join(server.address, JOB, WORKERS, CHANNELS))
        for _ in range(rounds):
            for relayed in (True, False):
                report.progress(f"heartbeats of {HOSTS} hosts, {'relayed' if relayed else 'each by itself'}")
                figures[relayed].append(await _measure(load, server, relayed=relayed))
    note = f"{WORKERS:,} workers on {HOSTS} hosts, every {INTERVAL_S:g} s"
    for index, (case, unit) in enumerate((("heartbeats", "1/s"), ("calls", "1/s"), ("cpu", "ms/s"))):
        better: Better = "higher" if case == "heartbeats" else "lower"
        together, alone = ([each[index] for each in figures[side]] for side in (True, False))
        report.add(f"relay.{case}", unit, Comparison(together, alone, better), note=note)


async def _measure(load: Clients, server: Process, *, relayed: bool) -> list[float]:
    order = Hosts(server.address, JOB, HOSTS, WORKERS, INTERVAL_S, server.pid, relayed)
    return await load.carry_out(order)
