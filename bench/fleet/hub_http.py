"""Claims and heartbeats over HTTP beside an empty route: the hub as its command line starts it, the hosts elsewhere.

Three processes: the hub with all it does beside (ticks, its feed of events), an empty route under the same uvicorn
settings that takes and gives as many bytes, and the hosts. The two servers are asked in turns by the same hosts.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx
import msgspec
import psutil  # type: ignore[import-untyped]

from bench.against import OLDER_GOAL
from bench.fleet.load import Beats, Claims, Hold, Host
from bench.fleet.rows import fill
from bench.interleave import Comparison, Measure, interleave
from bench.load_process import STRATA, Clients, started
from bench.processor import cpu_s
from bench.report import Report
from strata.fleet.wire.identities import LocalHostReply
from strata.hub.compose import TOKEN_FILE
from strata.hub.settings import SOCKET
from tests.support.ports import port_of, reserve_port

GOAL: Final = 0.7
HOSTS: Final = 64
"""At once."""
FLEET: Final = 1024
"""Hosts that claim in turn, so that each holds few leases."""
LEASES: Final = 64
START_S: Final = 30.0
_QUIET: Final = {"STRATA_HUB_LOG_LEVEL": "error"}


@dataclass(frozen=True)
class Turns:
    rounds: int
    seconds: float
    jobs: int


@dataclass(frozen=True)
class Server:
    """A hub, or the empty route: where it listens, its process, and the hosts that call it."""

    address: str
    pid: int
    hosts: Sequence[Host]
    is_hub: bool = True


async def run(report: Report, name: str, folder: Path, database: str, turns: Turns) -> None:
    """`name` is that of the database, which is filled here and then served by a hub."""
    await fill(database, turns.jobs)
    async with _clients() as load, _hub(load, folder / f"hub-{name}", database) as hub:
        claim_size = (await load.carry_out(Claims(hub.address, hub.hosts[HOSTS:], HOSTS, 0.2)))[1]
        beat_size = (await load.carry_out(Beats(hub.address, hub.hosts[:1], 0.2)))[1]
        bare = str(folder / f"bare-{name}.sock")
        sizes = (bare, f"/v1/job/claim={claim_size:.0f}", f"/v1/heartbeats={beat_size:.0f}")
        async with serving(sys.executable, "-m", "bench.fleet.bare", last=sizes) as (_, bare_pid):
            empty = Server(bare, bare_pid, hub.hosts, is_hub=False)
            await _compare(report, name, load, (hub, empty), turns, goal=GOAL, note="bare: an empty route, same bytes")
            found = Comparison([_rss_mib(hub.pid)], [_rss_mib(bare_pid)], "lower")
            note = f"after all this; {HOSTS} hosts; bare: the process of the empty route"
            report.add(f"http.{name}.rss", "MiB", found, note=note)


async def run_against(
    report: Report, name: str, folder: Path, databases: tuple[str, str], program: str, turns: Turns
) -> None:
    """A hub of this commit and one of an older commit, each on a database that its own commit has filled."""
    ours, theirs = databases
    await fill(ours, turns.jobs)
    await _fill_by(program, theirs, turns.jobs)
    async with (
        _clients() as load,
        _hub(load, folder / f"new-{name}", ours) as newer,
        _hub(load, folder / f"old-{name}", theirs, program) as older,
    ):
        await _compare(report, name, load, (newer, older), turns, goal=OLDER_GOAL, note="bare: the older commit")


async def _fill_by(program: str, database: str, jobs: int) -> None:
    """Tables of an older commit are made by its own code."""
    code = f"import asyncio; from bench.fleet.rows import fill; asyncio.run(fill({database!r}, {jobs}))"
    process = await asyncio.create_subprocess_exec(
        str(Path(program).with_name("python")), "-c", code, cwd=Path(program).parents[2]
    )
    if await process.wait():
        raise RuntimeError("the older commit did not fill its database")


@asynccontextmanager
async def _clients() -> AsyncIterator[Clients]:
    async with started(sys.executable, "-m", "bench.fleet.load", settings=_QUIET) as process:
        yield Clients(process)


@asynccontextmanager
async def _hub(load: Clients, data: Path, database: str, program: str = STRATA) -> AsyncIterator[Server]:
    """As its command line starts it, with hosts of which the first ones hold leases."""
    async with serving(program, "hub", "--data", str(data), "--database", database, "--listen") as (_, pid):
        # The hosts of this machine use its Unix socket, and so do those of the empty route.
        address = str(data / SOCKET)
        hosts = await enrol(address, data, HOSTS + FLEET)
        await load.carry_out(Hold(address, hosts[:HOSTS], LEASES))
        yield Server(address, pid, hosts)


def _rss_mib(pid: int) -> float:
    return float(psutil.Process(pid).memory_info().rss) / 2**20


async def _compare(
    report: Report,
    name: str,
    load: Clients,
    servers: tuple[Server, Server],
    turns: Turns,
    *,
    goal: float,
    note: str,
) -> None:
    """Both sides at full load. The processor time of the server says what a call costs, whatever held it up."""
    cpu_us: dict[tuple[str, int], list[float]] = {}

    def measured(case: str, server: Server, turn: Callable[[Server], Awaitable[float]]) -> Measure:
        async def measure() -> float:
            before_s = cpu_s(server.pid)
            rate = await turn(server)
            spent_us = (cpu_s(server.pid) - before_s) * 1e6
            cpu_us.setdefault((case, server.pid), []).append(spent_us / (rate * turns.seconds))
            return rate

        return measure

    async def claims(server: Server) -> float:
        order = Claims(server.address, server.hosts[HOSTS:], HOSTS, turns.seconds)
        rate, _, wrong = await load.carry_out(order)
        assert not (server.is_hub and wrong), "a claim was answered with nothing, or with the job of another"
        return rate

    async def beats(server: Server) -> float:
        calls, _, held = await load.carry_out(Beats(server.address, server.hosts[:HOSTS], turns.seconds))
        assert not server.is_hub or held == calls * LEASES, "a lease was lost"
        return calls * LEASES

    ours, bare = servers
    for case, turn, unit, what in (
        # First what renews leases: those that were granted above end otherwise.
        ("heartbeats", beats, "beats/s", f"{LEASES} in a call"),
        ("claim", claims, "claims/s", f"{HOSTS} hosts, a connection each"),
    ):
        found = await interleave(measured(case, ours, turn), measured(case, bare, turn), turns.rounds)
        judged = goal if case == "claim" or bare.is_hub else None
        report.add(f"http.{name}.{case}", unit, found, goal=judged, note=f"{what}; {note}")
        cost = Comparison(cpu_us[case, ours.pid][1:], cpu_us[case, bare.pid][1:], "lower")
        judged = goal if bare.is_hub else None
        report.add(f"http.{name}.{case}.cpu", "µs", cost, goal=judged, note="processor time of the server for each")


async def enrol(address: str, data: Path, count: int) -> list[Host]:
    token = (data / TOKEN_FILE).read_text().strip()
    hosts = []
    transport = httpx.AsyncHTTPTransport(uds=address)
    async with httpx.AsyncClient(base_url="http://hub", timeout=START_S, transport=transport) as client:
        for number in range(count):
            made = await client.post(
                "/v1/hosts/local", json={"name": f"host-{number}"}, headers={"X-Operator-Token": token}
            )
            reply = msgspec.json.decode(made.raise_for_status().content, type=LocalHostReply)
            known = {"Authorization": f"Bearer {reply.secret}"}
            body = {"capability": {"hostname": f"host-{number}", "slots": 256}}
            (await client.post("/v1/host/register", json=body, headers=known)).raise_for_status()
            hosts.append(Host(reply.host_id, reply.secret))
    return hosts


@asynccontextmanager
async def serving(
    *command: str, last: tuple[str, ...] = (), settings: Mapping[str, str] | None = None
) -> AsyncIterator[tuple[str, int]]:
    """A server that is told where to listen, once it answers anything at all."""
    with reserve_port() as guard:
        address = f"127.0.0.1:{port_of(guard)}"
        async with started(*command, address, *last, settings={**_QUIET, **(settings or {})}) as process:
            async with asyncio.timeout(START_S), httpx.AsyncClient() as client:
                while not await _answers(client, address):
                    if process.returncode is not None:
                        raise RuntimeError(f"{command[0]} ended before it served")
                    await asyncio.sleep(0.02)
            yield address, process.pid


async def _answers(client: httpx.AsyncClient, address: str) -> bool:
    try:
        await client.get(f"http://{address}/v1/health")
    except httpx.TransportError:
        return False
    return True
