"""The coordinator beside a bare gRPC server: `python -m bench coordinator`.

Three processes, as in production: the server, the bare server and the clients of both. Databases lie under the system's
temporary directory; point TMPDIR at the disk that is to be measured.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Final

from bench.against import OLDER_GOAL
from bench.coordinator import barriers, calls, placement, relays, watching
from bench.coordinator.processes import both, clients, ours
from bench.report import Report
from tests.support.postgres import PostgresServer

QUICK: Final = (
    calls.Turns(rounds=6, seconds=0.6, offered_s=1.2),
    barriers.Turns(rounds={100: 12, 1_000: 8, 10_000: 2}, joins=1),
)
LONG: Final = (
    calls.Turns(rounds=20, seconds=2.0, offered_s=5.0),
    barriers.Turns(rounds={100: 100, 1_000: 40, 10_000: 6}, joins=3),
)

AGAINST_S: Final = 3.0
"""Of a turn beside an older commit: what commits differ by is small."""


async def run_against(report: Report, program: str, *, quick: bool) -> None:
    """The coordinator of an older commit in the place of the bare server: the same clients call both by turns."""
    turns, barrier_turns = QUICK if quick else LONG
    turns = replace(turns, seconds=max(turns.seconds, AGAINST_S))
    with tempfile.TemporaryDirectory(prefix="strata-bench-") as folder, PostgresServer() as postgres:
        new, old = (f"sqlite:{Path(folder) / name}.db" for name in ("new", "old"))
        async with clients() as load, ours(new) as newer, ours(old, program=program) as older:
            bench = calls.Calls(report, load, newer, older, turns, is_older=True)
            await bench.heartbeats()
            await bench.shards("shards.ack")
            for workers, rounds in barrier_turns.rounds.items():
                report.progress(f"{workers:,} workers meet")
                for server in (newer, older):
                    await barriers.join(load, server, workers)
                await barriers.meet(report, load, (newer, older), workers, rounds, goal=OLDER_GOAL)
        new, old = postgres.create_database(), postgres.create_database()
        async with clients() as load, ours(new) as newer, ours(old, program=program) as older:
            await calls.Calls(report, load, newer, older, turns, is_older=True).shards("shards.ack.postgres")


async def run(report: Report, *, quick: bool) -> None:
    call_turns, barrier_turns = QUICK if quick else LONG
    placement.run(report)
    with tempfile.TemporaryDirectory(prefix="strata-bench-") as folder:
        async with clients() as load, both(f"sqlite:{Path(folder) / 'calls.db'}") as (coordinator, bare):
            bench = calls.Calls(report, load, coordinator, bare, call_turns)
            await bench.heartbeats()
            await bench.shards("shards.ack")
        with PostgresServer() as server:
            async with clients() as load, both(server.create_database()) as (coordinator, bare):
                fewer = replace(call_turns, rounds=max(3, call_turns.rounds // 2))
                bench = calls.Calls(report, load, coordinator, bare, fewer)
                await bench.shards("shards.ack.postgres")
        await relays.run(report, Path(folder), rounds=1 if quick else 3)
        await watching.run(report, Path(folder), rounds=2 if quick else 6, seconds=5.0 if quick else 12.0)
        await barriers.run(report, Path(folder), barrier_turns)
