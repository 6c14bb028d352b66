"""The journal beside the bare drivers: `python -m bench journal`.

All databases lie under the system's temporary directory; point TMPDIR at the disk that is to be measured. The server is
a throwaway one with fsync and synchronous_commit on.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Final

from bench.journal import append, read
from bench.report import Report
from tests.support.postgres import PostgresServer

QUICK: Final = (
    append.Turns(rounds=16, facts=12_800, lone_appends=50),
    read.Turns(rounds=2, facts=1_000_000),
)
LONG: Final = (
    append.Turns(rounds=40, facts=51_200, lone_appends=200),
    read.Turns(rounds=10, facts=1_000_000),
)


async def run(report: Report, *, quick: bool) -> None:
    appends, replays = QUICK if quick else LONG
    with tempfile.TemporaryDirectory(prefix="strata-bench-") as folder:
        report.progress("appends to SQLite")
        await append.sqlite(report, Path(folder), appends)
        report.progress("replay from SQLite and memory")
        await read.sqlite(report, Path(folder), replays)
        await read.memory(report, replays)
    with PostgresServer() as server:
        report.progress("appends to PostgreSQL")
        await append.postgres(report, server.create_database(), appends)
        report.progress("replay from PostgreSQL")
        await read.postgres(report, server.create_database(), replays)
