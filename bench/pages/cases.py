"""The dashboard of a fleet with 100,000 jobs and 10,000 hosts: `python -m bench pages`.

The hub is the one of the command line, on each database. Nothing comes from its cache of rendered pages: a round over
all pages takes longer than content is kept.

- `sqlite.…` and `postgres.…`: how long a page takes on the server until its last byte is there, p95. Bare is the login
  page of the same hub, which reads nothing. The note has the processor time of hub and database for one page, which
  does not depend on what else the machine does.
- `….idle`: what the hub's loops take of a processor while nobody looks.
- `paint.…`: until Chromium shows the first content of a page, from its request on.
- `….viewers`: what 50 open pages add to the hub's processor while hosts renew leases in batches and jobs change. Each
  viewer does what a browser does: it waits for topics, and fetches its page again when one of them has changed.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from statistics import median
from typing import Final

import httpx
import msgspec
import psycopg
import uvloop
from playwright.async_api import Browser, async_playwright

from bench.coordinator import watching
from bench.coordinator.orders import Beats, Join
from bench.coordinator.processes import clients, ours
from bench.fleet.hub_http import enrol, serving
from bench.fleet.load import Hold, Host, Stay
from bench.interleave import Comparison, turns
from bench.load_process import STRATA, Clients, started
from bench.pages.rows import STALE_S, FleetSize, artifact_id, fill, host_id, job_id
from bench.pages.viewers import Viewer
from bench.percentiles import percentile
from bench.processor import cpu_s
from bench.report import Report
from strata.fleet.wire.identities import HubKeyReply
from strata.hub.compose import TOKEN_FILE
from strata.hub.settings import SOCKET
from strata.web.page import FRESH_S
from tests.support.postgres import PostgresServer

LIMIT_MS: Final = 200.0
PAINT_MS: Final = 1000.0
PATIENCE_MS: Final = 300_000
"""A page that is slow is a result: on a machine that others keep busy one took more than the 30 s of Playwright."""
POINTS: Final = 5.0
VIEWERS: Final = 50
RENEWERS: Final = 30
LEASES: Final = 64
"""Of each host that renews; in one request."""
RENEWALS: Final = 20_000.0
"""A second, of all hosts together."""
CHANGES_S: Final = 0.5
"""A job changes so often while people look."""
SETTLE_S: Final = 3.0
SIZE: Final = FleetSize(jobs=100_000, hosts=10_000)
CHROMIUM: Final = "/usr/bin/chromium"
WATCHED: Final = ("/", "/jobs", "/hosts", "/events")
"""What the viewers have open, in turn."""
GANG: Final = "gang"
loop_factory: Final = uvloop.new_event_loop
"""The hub's."""


@dataclass(frozen=True)
class Turns:
    rounds: int
    paints: int
    seconds: float
    """Of one turn with or without viewers."""
    watched: int


QUICK: Final = Turns(rounds=20, paints=2, seconds=8.0, watched=2)
LONG: Final = Turns(rounds=60, paints=5, seconds=20.0, watched=4)


def pages(size: FleetSize) -> dict[str, str]:
    """By the name of the case: what to open."""
    return {
        "overview": "/",
        "overview.project": "/?project=vision",
        "jobs": "/jobs",
        "jobs.failed": "/jobs?status=failed",
        "jobs.running": "/jobs?status=running",
        "jobs.ended": "/jobs?order=ended",
        "jobs.project": "/jobs?project=vision",
        "jobs.owner": "/jobs?owner=owner-7",
        "jobs.search": "/jobs?q=sweep-0123",
        "jobs.search.none": "/jobs?q=nothing-is-called-so",
        "job.completed": f"/jobs/{job_id(size.ended - 7)}",
        "job.retried": f"/jobs/{job_id(size.ended // 10 * 10)}",
        "job.running": f"/jobs/{job_id(size.ended + 101)}",
        "job.waiting": f"/jobs/{job_id(size.jobs)}",
        "sweeps": "/sweeps",
        "sweep": "/sweeps/default/wide",
        "hosts": "/hosts",
        "hosts.table": "/hosts?view=table&sort=load",
        "hosts.search": "/hosts?q=node-0999",
        "host": f"/hosts/{host_id(size.hosts // 2)}",
        "training": "/training",
        "artifacts": "/artifacts",
        "artifacts.metric": "/artifacts?metric=val_loss",
        "artifact": f"/artifacts/{artifact_id(size.ended - 7)}",
        "events": "/events",
        "events.jobs": "/events?kind=job.*",
        "events.search": "/events?q=node-0999",
        "people": "/people",
        "search": "/search?q=train-99",
    }


async def run(report: Report, *, quick: bool) -> None:
    chosen = QUICK if quick else LONG
    with tempfile.TemporaryDirectory(prefix="strata-bench-") as name, PostgresServer() as server:
        folder = Path(name)
        for kind, database in (("sqlite", f"sqlite:{folder / 'hub.db'}"), ("postgres", server.create_database())):
            report.progress(f"{SIZE.jobs:,} jobs and {SIZE.hosts:,} hosts in {kind}")
            await fill(database, SIZE, time.time())
            async with serve_hub(folder / kind, database) as hub:
                await measure_pages(report, kind, hub, pages(SIZE), chosen)
                if kind == "sqlite":
                    report.progress("first paint in Chromium")
                    await measure_paint(report, hub, pages(SIZE), chosen)
                report.progress(f"{VIEWERS} viewers on {kind}")
                await measure_viewers(report, kind, hub, chosen)
        await _gang(report, folder, chosen)


@dataclass(frozen=True)
class ServedHub:
    url: str
    data: Path
    pid: int
    database: str
    beside: Sequence[int] = ()
    """Other processes that it reads from."""

    @property
    def socket(self) -> str:
        return str(self.data / SOCKET)

    @asynccontextmanager
    async def operator(self) -> AsyncIterator[httpx.AsyncClient]:
        token = (self.data / TOKEN_FILE).read_text().strip()
        transport = httpx.AsyncHTTPTransport(uds=self.socket)
        headers = {"X-Operator-Token": token}
        async with httpx.AsyncClient(base_url="http://hub", transport=transport, headers=headers, timeout=60) as client:
            yield client

    @asynccontextmanager
    async def browse(self, name: str) -> AsyncIterator[httpx.AsyncClient]:
        """A browser without scripts, in which a viewer has logged in."""
        async with self.operator() as operator:
            made = await operator.post("/v1/keys", json={"name": name, "role": "viewer"})
        secret = msgspec.json.decode(made.raise_for_status().content, type=HubKeyReply).secret
        async with httpx.AsyncClient(base_url=self.url, headers={"Accept": "text/html"}, timeout=60) as client:
            reply = await client.post("/login", data={"key": secret}, headers={"Sec-Fetch-Site": "same-origin"})
            assert reply.status_code == 303, reply.text
            yield client

    async def processes(self) -> list[int]:
        """The hub, and the processes of its database."""
        if self.database.startswith("sqlite:"):
            return [self.pid, *self.beside]
        async with await psycopg.AsyncConnection.connect(self.database) as connection:
            select = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
            return [self.pid, *(pid for (pid,) in await (await connection.execute(select)).fetchall())]


@asynccontextmanager
async def serve_hub(data: Path, database: str, **settings: str) -> AsyncIterator[ServedHub]:
    words = (STRATA, "hub", "--data", str(data), "--database", database, "--listen")
    settings = {"STRATA_HUB_STALE_AFTER_S": f"{STALE_S:.0f}", "STRATA_HUB_KEEP_FREE_BYTES": "0", **settings}
    async with serving(*words, settings=settings) as (address, pid):
        yield ServedHub(f"http://{address}", data, pid, database)


async def measure_pages(report: Report, kind: str, hub: ServedHub, shown: dict[str, str], chosen: Turns) -> None:
    walls: dict[str, list[float]] = {name: [] for name in shown}
    costs: dict[str, list[float]] = {name: [] for name in shown}
    bare: dict[str, list[float]] = {name: [] for name in shown}
    async with hub.browse(f"reader-{kind}") as browser:
        for path in shown.values():
            reply = await browser.get(path)
            assert reply.status_code == 200, (path, reply.text)
        await asyncio.sleep(SETTLE_S)
        watched = await hub.processes()
        before_s, began_s = _spent_s(watched), time.perf_counter()
        await asyncio.sleep(2 * SETTLE_S)
        idle = 100 * (_spent_s(watched) - before_s) / (time.perf_counter() - began_s)
        report.add(f"{kind}.idle", "%", Comparison([idle], [idle], "lower"), note="hub and database, nobody looks")
        for _ in range(chosen.rounds):
            round_s = time.perf_counter()
            for name, path in shown.items():
                before_s, began_s = _spent_s(watched), time.perf_counter()
                await browser.get(path)
                walls[name].append(1000 * (time.perf_counter() - began_s))
                costs[name].append(1000 * (_spent_s(watched) - before_s))
                began_s = time.perf_counter()
                await browser.get("/login")
                bare[name].append(1000 * (time.perf_counter() - began_s))
            await asyncio.sleep(max(0.0, 1.1 * FRESH_S - (time.perf_counter() - round_s)))
    for name in shown:
        found = Comparison([percentile(walls[name], 95)], [percentile(bare[name], 95)], "lower")
        note = f"median {median(walls[name]):.0f} ms; processor {median(costs[name]):.0f} ms"
        report.add(f"{kind}.{name}", "ms", found, limit=LIMIT_MS, note=f"{note}, p95 {percentile(costs[name], 95):.0f}")


def _spent_s(pids: Sequence[int]) -> float:
    return sum(map(cpu_s, pids))


async def measure_paint(report: Report, hub: ServedHub, shown: dict[str, str], chosen: Turns) -> None:
    async with async_playwright() as playwright, hub.browse("painter") as logged_in:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        cookies = dict(logged_in.cookies)
        for name, path in shown.items():
            paints = [await _first_paint(browser, hub.url, path, cookies) for _ in range(chosen.paints)]
            found = Comparison([max(paints)], [min(paints)], "lower")
            report.add(
                f"paint.{name}", "ms", found, limit=PAINT_MS, note=f"slowest of {len(paints)}; bare: the fastest"
            )
        await browser.close()


async def _first_paint(browser: Browser, url: str, path: str, cookies: dict[str, str]) -> float:
    # The pages' policy forbids what playwright waits with.
    context = await browser.new_context(viewport={"width": 1440, "height": 900}, bypass_csp=True)
    await context.add_cookies([{"name": name, "value": value, "url": url} for name, value in cookies.items()])
    context.set_default_timeout(PATIENCE_MS)
    page = await context.new_page()
    await page.goto(url + path, wait_until="load")
    painted = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
    first = await page.wait_for_function(painted)
    found = float(await first.json_value())
    await context.close()
    return found


async def measure_viewers(report: Report, kind: str, hub: ServedHub, chosen: Turns) -> None:
    hosts = await enrol(hub.socket, hub.data, RENEWERS)
    points: dict[str, list[float]] = {"ours": [], "bare": []}
    rates: list[float] = []
    fetches: list[float] = []
    async with AsyncExitStack() as stack:
        load = Clients(await stack.enter_async_context(started(sys.executable, "-m", "bench.fleet.load", settings={})))
        browsers = [await stack.enter_async_context(hub.browse(f"viewer-{kind}-{n}")) for n in range(VIEWERS)]
        changes = await stack.enter_async_context(hub.operator())
        await load.carry_out(Hold(hub.socket, hosts, LEASES))
        numbers = count(1)
        for side in turns(chosen.watched):
            viewers = [
                Viewer(browser, WATCHED[place % len(WATCHED)])
                for place, browser in enumerate(browsers if side == "ours" else ())
            ]
            tasks = [asyncio.create_task(each.look()) for each in viewers]
            tasks.append(asyncio.create_task(_change(changes, numbers)))
            await asyncio.sleep(SETTLE_S)
            before = sum(each.fetches for each in viewers)
            taken, rate = await _renew(hub, load, hosts, chosen.seconds)
            points[side].append(taken)
            rates.append(rate)
            if viewers:
                fetches.append((sum(each.fetches for each in viewers) - before) / chosen.seconds)
            await _end(tasks)
    found = Comparison(points["ours"], points["bare"], "lower")
    note = (
        f"{found.ours_more:+.1f} points (goal: at most {POINTS:g}) at {min(rates):,.0f} of {RENEWALS:,.0f} renewals/s,"
        f" {median(fetches):.0f} pages/s"
    )
    report.add(f"{kind}.viewers", "%", found, note=note)


async def _renew(hub: ServedHub, load: Clients, hosts: list[Host], seconds: float) -> tuple[float, float]:
    """What the hub took of a processor, in percent, and how many leases were renewed in a second."""
    interval_s = len(hosts) * LEASES / RENEWALS
    before_s, began_s = cpu_s(hub.pid), time.perf_counter()
    _, beats, _ = await load.carry_out(Stay(hub.socket, hosts, 0.0, interval_s, seconds))
    return 100 * (cpu_s(hub.pid) - before_s) / (time.perf_counter() - began_s), beats * LEASES


async def _change(operator: httpx.AsyncClient, numbers: Iterator[int]) -> None:
    """Jobs that have ended are archived one by one: an event for every open page."""
    for number in numbers:
        (await operator.post(f"/v1/job/{job_id(number)}/archive")).raise_for_status()
        await asyncio.sleep(CHANGES_S)


async def _end(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(outcome, asyncio.CancelledError), f"a viewer stopped looking: {outcome!r}"


async def _gang(report: Report, folder: Path, chosen: Turns) -> None:
    workers = watching.WORKERS
    report.progress(f"a gang of {workers:,} workers")
    async with clients() as load, ours(f"sqlite:{folder / 'coordinator.db'}") as coordinator:
        await load.carry_out(Join(coordinator.address, GANG, workers, watching.CHANNELS))
        seconds = workers / watching.FIRST_RATE + 1
        beats = (workers, watching.CHANNELS, watching.FIRST_RATE, seconds, coordinator.pid)
        await load.carry_out(Beats(coordinator.address, GANG, *beats))
        settings = {"STRATA_HUB_COORDINATOR_ADDRESS": coordinator.address}
        async with serve_hub(folder / "gang", f"sqlite:{folder / 'gang.db'}", **settings) as hub:
            shown = {"gangs": "/gangs", "gang": f"/gangs/{GANG}", "gang.search": f"/gangs/{GANG}?q=w59"}
            await measure_pages(report, "gang", replace(hub, beside=(coordinator.pid,)), shown, chosen)
