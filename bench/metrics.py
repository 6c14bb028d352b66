"""What metrics and traces cost a call of coordinator and hub: `python -m bench metrics`.

Each figure is the processor time of the server for one call, because that is what counting adds; how long a call takes
depends on what else the machine does. The clients are a process of their own.

- `coordinator.…` and `hub.…`: one server (`bench.switched`) that counts in one turn and not in the next. Turns are
  short and many, so that what disturbs the machine disturbs both alike.
- `….traced`: a hub that traces and exports every request, beside one that does not trace. Two processes, so this one is
  not as exact.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.coordinator.orders import Batches, Heartbeats, Join
from bench.coordinator.processes import clients, listening
from bench.fleet import hub_http
from bench.fleet.load import Beats, Claims, Hold, Host
from bench.fleet.rows import fill
from bench.interleave import Measure, interleave
from bench.load_process import STRATA, Clients, started
from bench.processor import cpu_s
from bench.report import Report
from bench.switched import OFF, ON
from strata.hub.settings import SOCKET

GOAL: Final = 0.98
WORKERS: Final = 512
CHANNELS: Final = 64
BATCH: Final = 64
JOB: Final = "bench"
SWITCHED: Final = (sys.executable, "-m", "bench.switched")
Run = Callable[[], Awaitable[float]]
"""Runs one turn, and returns how many calls there were."""


@dataclass(frozen=True)
class Turns:
    rounds: int
    seconds: float
    jobs: int


QUICK: Final = Turns(rounds=60, seconds=0.3, jobs=80_000)
LONG: Final = Turns(rounds=200, seconds=0.5, jobs=400_000)


async def run(report: Report, *, quick: bool) -> None:
    turns = QUICK if quick else LONG
    with tempfile.TemporaryDirectory(prefix="strata-bench-") as name:
        report.progress("a coordinator with and without metrics")
        await _coordinator(report, Path(name), turns)
        report.progress("a hub with and without metrics")
        await _hub_calls(report, Path(name), turns)
        report.progress("hubs with and without traces")
        async with _collector() as url:
            await _traced(report, Path(name), turns, url)


def _cost(pid: int, calls: Run, switch: int = 0) -> Measure:
    """Microseconds of the server's processor time for each call."""

    async def turn() -> float:
        if switch:
            os.kill(pid, switch)
        before_s = cpu_s(pid)
        count = await calls()
        return (cpu_s(pid) - before_s) * 1e6 / count

    return turn


async def _switched(report: Report, case: str, pid: int, calls: Run, turns: Turns, note: str) -> None:
    found = await interleave(_cost(pid, calls, ON), _cost(pid, calls, OFF), turns.rounds, better="lower")
    os.kill(pid, ON)
    report.add(case, "µs", found, goal=GOAL, note=f"processor time of a call; {note}; bare: nothing is counted")


async def _coordinator(report: Report, folder: Path, turns: Turns) -> None:
    settings = {"STRATA_COORDINATOR_JOB_HEARTBEAT_INTERVAL_S": "600", "STRATA_COORDINATOR_LOG_LEVEL": "error"}
    command = (*SWITCHED, "coordinator", "--database", f"sqlite:{folder / 'coord.db'}", "--listen")
    async with clients() as load, listening(command, settings) as server:
        await load.carry_out(Join(server.address, JOB, WORKERS, CHANNELS))

        async def beats() -> float:
            (rate,) = await load.carry_out(Heartbeats(server.address, JOB, turns.seconds))
            return rate * turns.seconds

        async def batches() -> float:
            (rate,) = await load.carry_out(Batches(server.address, JOB, turns.seconds, BATCH))
            return rate * turns.seconds / BATCH

        await _switched(report, "coordinator.heartbeat", server.pid, beats, turns, "one heartbeat in a call")
        await _switched(report, "coordinator.batch", server.pid, batches, turns, f"{BATCH} heartbeats in a call")


@dataclass(frozen=True)
class HubUnderTest:
    address: str
    pid: int
    hosts: list[Host]
    load: Clients

    def heartbeats(self, turns: Turns) -> Run:
        async def calls() -> float:
            rate, _, _ = await self.load.carry_out(Beats(self.address, self.hosts[: hub_http.HOSTS], turns.seconds))
            return rate * turns.seconds

        return calls

    def claims(self, turns: Turns) -> Run:
        async def calls() -> float:
            order = Claims(self.address, self.hosts[hub_http.HOSTS :], hub_http.HOSTS, turns.seconds)
            rate, _, _ = await self.load.carry_out(order)
            return rate * turns.seconds

        return calls


@asynccontextmanager
async def _hub(
    words: tuple[str, ...], data: Path, jobs: int, settings: dict[str, str] | None = None
) -> AsyncIterator[HubUnderTest]:
    database = f"sqlite:{data}.db"
    await fill(database, jobs)
    command = (*words, "hub", "--data", str(data), "--database", database, "--listen")
    # The jobs of the bench are as old as the epoch, and what is held is renewed in its own turns only.
    own = {"STRATA_HUB_RESERVE_AFTER_S": "1e12", "STRATA_HUB_STALE_AFTER_S": "3600", **(settings or {})}
    async with (
        hub_http.serving(*command, settings=own) as (_, pid),
        started(sys.executable, "-m", "bench.fleet.load", settings={}) as process,
    ):
        address, load = str(data / SOCKET), Clients(process)
        hosts = await hub_http.enrol(address, data, hub_http.HOSTS + hub_http.FLEET // 2)
        await load.carry_out(Hold(address, hosts[: hub_http.HOSTS], hub_http.LEASES))
        yield HubUnderTest(address, pid, hosts, load)


async def _hub_calls(report: Report, folder: Path, turns: Turns) -> None:
    async with _hub(SWITCHED, folder / "hub", turns.jobs) as hub:
        beats, claims = hub.heartbeats(turns), hub.claims(turns)
        await _switched(report, "hub.heartbeat", hub.pid, beats, turns, f"{hub_http.LEASES} leases in a call")
        await _switched(report, "hub.claim", hub.pid, claims, turns, "a claim that gets a job")


async def _traced(report: Report, folder: Path, turns: Turns, url: str) -> None:
    """Every request has a span of its own, which is more than a sampler of production lets through."""
    async with AsyncExitStack() as stack:
        traced = {"OTEL_EXPORTER_OTLP_ENDPOINT": url}
        ours = await stack.enter_async_context(_hub((STRATA,), folder / "traced", 10_000, traced))
        bare = await stack.enter_async_context(_hub((STRATA,), folder / "untraced", 10_000))
        measures = _cost(ours.pid, ours.heartbeats(turns)), _cost(bare.pid, bare.heartbeats(turns))
        found = await interleave(*measures, turns.rounds // 2, better="lower")
        note = "processor time of a call; each is traced and exported; bare: traces are off"
        report.add("hub.heartbeat.traced", "µs", found, note=note)


@asynccontextmanager
async def _collector() -> AsyncIterator[str]:
    """Takes spans and forgets them."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.lower().split(b"\r\n")
                await reader.readexactly(next(int(each[15:]) for each in lines if each.startswith(b"content-length:")))
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
