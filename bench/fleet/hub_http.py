"""Claims and heartbeats over HTTP beside an empty route: the hub as its command line starts it, the hosts elsewhere.

Three processes: the hub with all it does beside (ticks, its feed of events), an empty route under the same uvicorn
settings that takes and gives as many bytes, and the hosts. The two servers are asked in turns by the same hosts.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx
import msgspec
import psutil  # type: ignore[import-untyped]

from bench.fleet.load import Beats, Claims, Hold, Host
from bench.fleet.rows import fill
from bench.interleave import Comparison, Measure, interleave
from bench.load_process import STRATA, Clients, started
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


async def run(report: Report, name: str, folder: Path, database: str, turns: Turns) -> None:
    """`name` is that of the database, which is filled here and then served by a hub."""
    await fill(database, turns.jobs)
    data = folder / f"hub-{name}"
    async with serving(STRATA, "hub", "--data", str(data), "--database", database, "--listen") as (_, pid):
        # The hosts of this machine use its Unix socket, and so do those of the empty route.
        address = str(data / SOCKET)
        hosts = await enrol(address, data, HOSTS + FLEET)
        async with started(sys.executable, "-m", "bench.fleet.load", settings=_QUIET) as process:
            load = Clients(process)
            await load.carry_out(Hold(address, hosts[:HOSTS], LEASES))
            claim_size = (await load.carry_out(Claims(address, hosts[HOSTS:], HOSTS, 0.2)))[1]
            beat_size = (await load.carry_out(Beats(address, hosts[:1], 0.2)))[1]
            bare = str(folder / f"bare-{name}.sock")
            sizes = (bare, f"/v1/job/claim={claim_size:.0f}", f"/v1/heartbeats={beat_size:.0f}")
            async with serving(sys.executable, "-m", "bench.fleet.bare", last=sizes) as (_, bare_pid):
                await _compare(report, name, load, (address, bare), hosts, turns)
                found = Comparison([_rss_mib(pid)], [_rss_mib(bare_pid)], "lower")
                note = f"after all this; {HOSTS} hosts; bare: the process of the empty route"
                report.add(f"http.{name}.rss", "MiB", found, note=note)


def _rss_mib(pid: int) -> float:
    return float(psutil.Process(pid).memory_info().rss) / 2**20


async def _compare(
    report: Report, name: str, load: Clients, sides: tuple[str, str], hosts: list[Host], turns: Turns
) -> None:
    def claims(address: str, *, checked: bool) -> Measure:
        async def turn() -> float:
            rate, _, wrong = await load.carry_out(Claims(address, hosts[HOSTS:], HOSTS, turns.seconds))
            assert not (checked and wrong), "a claim was answered with nothing, or with the job of another"
            return rate

        return turn

    def beats(address: str, *, checked: bool) -> Measure:
        async def turn() -> float:
            calls, _, held = await load.carry_out(Beats(address, hosts[:HOSTS], turns.seconds))
            assert not checked or held == calls * LEASES, "a lease was lost"
            return calls * LEASES

        return turn

    ours, bare = sides
    same = "bare: an empty route, same bytes"
    found = await interleave(claims(ours, checked=True), claims(bare, checked=False), turns.rounds)
    report.add(f"http.{name}.claim", "claims/s", found, goal=GOAL, note=f"{HOSTS} hosts, a connection each; {same}")
    found = await interleave(beats(ours, checked=True), beats(bare, checked=False), turns.rounds)
    report.add(f"http.{name}.heartbeats", "beats/s", found, note=f"{LEASES} in a call; {same}")


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
