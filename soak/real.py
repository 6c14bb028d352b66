"""Run a campaign against real processes, with a database of its own, and record it after every trial."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path

import click

from soak.campaigns import REAL, quiet
from soak.record import TRIALS, Trials, next_number
from soak.trials import CampaignRequest, CampaignResult, Database, OnProgress
from tests.support.postgres import PostgresServer


def run(campaign: str, times: int | None, workers: int | None, database: Database, record: Path | None) -> int:
    """The number of violations."""
    quiet()
    chosen = REAL[campaign]
    times, workers = times or chosen.times, workers or chosen.workers
    rows = TRIALS.read(record) if record else []
    more = f' ARGS="--on {database}"' if database != "sqlite" else ""
    if chosen.own_server:
        database, more = "postgres", ""
    name = f"{campaign} ({database})"
    first = next_number(rows, name)
    command = f"make soak CAMPAIGN={campaign} KILLS={times}{more}"

    def tell(result: CampaignResult) -> None:
        click.echo(f"{result.times}/{times}, {len(result.problems)} violations; {result.figures}", err=True)
        if record:
            today = datetime.now(UTC).date().isoformat()
            figures = f"{result.figures}; {_load()}"
            row = Trials(name, today, command, first, result.times, len(result.problems), figures)
            TRIALS.put(record, row)

    folder = Path(tempfile.mkdtemp(prefix="strata-soak-"))
    # Not uvloop: it starts processes by fork, and gRPC in such a child crashed before the child became a coordinator.
    needed = nullcontext("") if chosen.own_server else _database(database, folder)
    with needed as url, asyncio.Runner() as runner:
        ask = CampaignRequest(first=first, times=times, workers=workers, database=database, url=url, folder=folder)
        result = runner.run(_run(campaign, ask, tell))
    tell(result)
    for problem in result.problems:
        click.echo(problem)
    so_far = sum(row.times for row in rows if row.campaign == name) + result.times
    click.echo(f"{name}: {result.times} times, {so_far} with those on record; {result.figures}; logs in {folder}")
    return len(result.problems)


def _load() -> str:
    """Times mean little without it: other things may have run on the machine."""
    return f"load average {os.getloadavg()[1]:.1f} on {os.cpu_count()} cores"


async def _run(campaign: str, ask: CampaignRequest, tell: OnProgress) -> CampaignResult:
    running = asyncio.current_task()
    assert running is not None
    # Cut off, a campaign must not leave its coordinators behind.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
    return await REAL[campaign].run(ask, tell)


@contextmanager
def _database(kind: Database, folder: Path) -> Iterator[str]:
    if kind == "sqlite":
        yield f"sqlite:{folder}/coord.db"
    else:
        with PostgresServer() as server:
            yield server.create_database()
