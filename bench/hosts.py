"""Memory of a hub on SQLite with 2,000 hosts: `python -m bench hosts`.

The hub is the one of the command line. The hosts are in another process, each with two connections as an agent has
them: a claim that waits for a job, and heartbeats that renew two leases. No job is left, so every claim waits and polls
the database again and again, which is what idle hosts cost. Bare is the same hub before the first host.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Final

import psutil  # type: ignore[import-untyped]
import uvloop

from bench.fleet.hub_http import enrol, serving
from bench.fleet.load import Hold, Stay
from bench.fleet.rows import fill
from bench.interleave import Comparison
from bench.load_process import STRATA, Clients, started
from bench.report import Report
from strata.hub.settings import SOCKET

HOSTS: Final = 2_000
LEASES: Final = 2
MAX_MB: Final = 150.0
POLL_S: Final = 25.0
BEAT_S: Final = 10.0
SAMPLE_S: Final = 0.5
loop_factory: Final = uvloop.new_event_loop
"""The hub's."""


async def run(report: Report, *, quick: bool) -> None:
    with tempfile.TemporaryDirectory(prefix="strata-bench-") as name:
        data = Path(name) / "hub"
        database = f"sqlite:{Path(name) / 'hub.db'}"
        await fill(database, HOSTS * LEASES)
        async with serving(STRATA, "hub", "--data", str(data), "--database", database, "--listen") as (_, pid):
            before_mb = _rss_mb(pid)
            address = str(data / SOCKET)
            report.progress(f"{HOSTS} hosts join")
            hosts = await enrol(address, data, HOSTS)
            async with started(sys.executable, "-m", "bench.fleet.load", settings={}) as process:
                load = Clients(process)
                await load.carry_out(Hold(address, hosts, LEASES))
                report.progress(f"{HOSTS} hosts wait for jobs and send heartbeats")
                seconds = 40.0 if quick else 180.0
                order = load.carry_out(Stay(address, hosts, POLL_S, BEAT_S, seconds))
                (polls, beats, slowest_ms), samples = await _while_it_runs(asyncio.ensure_future(order), pid)
    note = (
        f"most of {len(samples)} samples; {HOSTS:,} hosts with two connections and {LEASES} leases each;"
        f" {polls:.0f} polls/s, {beats:.0f} heartbeats/s, slowest {slowest_ms:.0f} ms; bare: the hub before them"
    )
    report.add("sqlite.rss", "MB", Comparison([max(samples)], [before_mb], "lower"), limit=MAX_MB, note=note)


async def _while_it_runs(order: asyncio.Future[list[float]], pid: int) -> tuple[list[float], list[float]]:
    """The figures of the order, and the memory of the process meanwhile."""
    samples = [_rss_mb(pid)]
    while not order.done():
        await asyncio.wait([order], timeout=SAMPLE_S)
        samples.append(_rss_mb(pid))
    return order.result(), samples


def _rss_mb(pid: int) -> float:
    return float(psutil.Process(pid).memory_info().rss) / 1e6
