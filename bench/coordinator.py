"""The coordinator beside a bare gRPC server: `python -m bench coordinator`.

Three processes, as in production: the server, the bare server and the clients of both. Databases lie under the system's
temporary directory; point TMPDIR at the disk that is to be measured.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Final

from bench import coordinator_barriers, coordinator_calls, coordinator_placement
from bench.coordinator_processes import both, clients
from bench.report import Report
from strata.testing.postgres import PostgresServer

QUICK: Final = (
    coordinator_calls.Turns(rounds=6, seconds=0.6, offered_s=1.2),
    coordinator_barriers.Turns(rounds={100: 12, 1_000: 8, 10_000: 2}, joins=1),
)
LONG: Final = (
    coordinator_calls.Turns(rounds=20, seconds=2.0, offered_s=5.0),
    coordinator_barriers.Turns(rounds={100: 100, 1_000: 40, 10_000: 6}, joins=3),
)


async def run(report: Report, *, quick: bool) -> None:
    calls, barriers = QUICK if quick else LONG
    coordinator_placement.run(report)
    with tempfile.TemporaryDirectory(prefix="strata-bench-") as folder:
        async with clients() as load, both(f"sqlite:{Path(folder) / 'calls.db'}") as (ours, bare):
            bench = coordinator_calls.Calls(report, load, ours, bare, calls)
            await bench.heartbeats()
            await bench.shards("shards.ack")
        with PostgresServer() as server:
            async with clients() as load, both(server.create_database()) as (ours, bare):
                fewer = replace(calls, rounds=max(3, calls.rounds // 2))
                bench = coordinator_calls.Calls(report, load, ours, bare, fewer)
                await bench.shards("shards.ack.postgres")
        await coordinator_barriers.run(report, Path(folder), barriers)
