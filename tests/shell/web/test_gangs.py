"""The pages of gangs, of a real coordinator: who holds a gang up, and what a kill cost, in two clicks."""

from __future__ import annotations

import asyncio
import html
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from time import perf_counter

from strata.base.clock import SystemClock
from strata.base.secret import Secret
from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.server.tokens import ALL_JOBS, Claims, TokenRole, Tokens
from strata.coord.view import BarrierView, GangEventsView, GangsView, GangView
from strata.hub.gangs import GangQuery, open_gangs
from strata.hub.settings import GangCoordinatorSettings
from strata.web.pages.gangs import barrier_words
from tests.shell.coord import running as coordinators
from tests.shell.coord.running import in_process, register
from tests.shell.fleet_http.running import Running, ok, running
from tests.shell.web.browsing import Tags, log_in
from tests.support.ports import port_of, reserve_port

HOSTILE = '"><xss-probe onxss=1>'


@asynccontextmanager
async def hub_with(folder: Path, coordinator: coordinators.Running) -> AsyncIterator[Running]:
    async with running(folder / "hub", coordinator=GangCoordinatorSettings(address=coordinator.address)) as site:
        yield site


def beat(worker_id: str, **fields: float) -> pb.HeartbeatRequest:
    request = pb.HeartbeatRequest(worker_id=worker_id, job_id="run", status=pb.WORKER_STATUS_TRAINING, step=12)
    request.step_time_ms = fields.get("step_time_ms", 100.0)
    return request


async def test_from_the_overview_two_clicks_lead_to_who_holds_the_gang_up_and_what_a_kill_cost(tmp_path: Path) -> None:
    async with in_process() as coordinator, hub_with(tmp_path, coordinator) as site:
        stub = coordinator.stub
        await register(stub, "worker-1", "worker-2", "worker-7", job="run")
        for name in ("worker-1", "worker-2", "worker-7"):
            await stub.Heartbeat(beat(name, step_time_ms=190.0 if name == "worker-7" else 100.0))
        killed = pb.HeartbeatRequest(worker_id="worker-2", job_id="run", status=pb.WORKER_STATUS_ERROR)
        await stub.Heartbeat(killed)
        async with asyncio.timeout(60):
            while (await stub.RegisterWorker(_info("worker-1"))).world_size != 2:
                await asyncio.sleep(0.05)
        await stub.Barrier(pb.BarrierRequest(barrier_id="epoch_3", worker_id="worker-1", job_id="run", wait=False))
        coordinator.service.telemetry.of("run").sample_lanes(round(SystemClock().wall_s() * 1000), ["worker-1"])
        browser = await log_in(site, "viewer")
        assert 'href="/gangs"' in await browser.shows("/")
        listed = await browser.shows("/gangs")
        assert 'href="/gangs/run"' in listed
        shown = html.unescape(await browser.shows("/gangs/run"))
        held_up = re.search(r'id="held-up">([^<]*)<', shown)
        assert held_up is not None
        assert held_up[1].startswith("Barrier epoch_3: 1 of 2 arrived, waiting for worker-7 since ")
        assert "last seen " in held_up[1]
        assert re.search("\\d\\.\\d\N{MULTIPLICATION SIGN} slower\\)$", held_up[1])
        incidents = shown[shown.index('id="incidents"') : shown.index('id="workers"')]
        assert "worker lost" in incidents
        assert "worker-2" in incidents
        assert re.search(r"noticed after .* restart .* rolled back ", incidents)
        assert "training" in shown[shown.index('id="workers"') :]


async def test_a_straggler_among_ranks_that_step_together_is_the_headline(tmp_path: Path) -> None:
    async with in_process() as coordinator, hub_with(tmp_path, coordinator) as site:
        names = [f"worker-{number}" for number in range(4)]
        await register(coordinator.stub, *names, job="run")
        soft = coordinator.service.state.soft_of("run")
        while not soft.stragglers.generation:
            await asyncio.sleep(0)
        for step in range(1, 12):
            for name in names:
                beat = pb.HeartbeatRequest(
                    worker_id=name, job_id="run", status=pb.WORKER_STATUS_TRAINING, step=step, step_time_ms=2_000.0
                )
                beat.compute_times_ms.extend([1_950.0 if name == "worker-2" else 300.0] * min(step, 8))
                await coordinator.stub.Heartbeat(beat)
            soft.stragglers.judged_s = None
            while soft.stragglers.progress or soft.stragglers.judged_s is None:
                await asyncio.sleep(0)
        await coordinator.stub.Barrier(
            pb.BarrierRequest(barrier_id="step_12", worker_id="worker-1", job_id="run", wait=False)
        )
        browser = await log_in(site, "viewer")
        shown = html.unescape(await browser.shows("/gangs/run"))
        held_up = re.search(r'id="held-up">([^<]*)<', shown)
        assert held_up is not None
        assert held_up[1].startswith("worker-2 is slow: 1.95 s of computing for a step where the median of 4")
        first = shown[shown.index('id="worker-') :][:900]
        assert first.startswith('id="worker-worker-2"')
        assert "2 s a step, 1.95 s of computing" in first
        assert re.search("6\\.5\N{MULTIPLICATION SIGN} slower · slow", first)


def _info(worker_id: str) -> pb.WorkerInfo:
    return pb.WorkerInfo(worker_id=worker_id, job_id="run", incarnation=f"{worker_id}-1")


async def test_a_gang_of_thousands_is_shown_by_page_and_soon(tmp_path: Path) -> None:
    async with in_process() as coordinator, hub_with(tmp_path, coordinator) as site:
        names = [f"worker-{number:04}" for number in range(1_500)]
        await asyncio.gather(*(coordinator.stub.RegisterWorker(_info(name)) for name in names))
        client = await site.with_role("viewer")
        reply = ok(await client.get("/v1/gang/run", params={"limit": 50}), GangView)
        assert (len(reply.job.workers), reply.workers_total) == (50, 1_500)
        assert sum(each.count for each in reply.worker_counts) == 1_500
        browser = await log_in(site, "viewer")
        began_s = perf_counter()
        shown = await browser.shows("/gangs/run?offset=50")
        print(f"page of 50 of 1,500 workers: {(perf_counter() - began_s) * 1000:.0f} ms, {len(shown):,} bytes")
        assert len(re.findall(r'id="worker-worker-\d+"', shown)) == 50
        assert "51 to 100 of" in shown
        found = await browser.shows("/gangs/run?q=1499")
        assert re.findall(r'id="worker-(worker-\d+)"', found) == ["worker-1499"]


async def test_hostile_names_of_workers_and_commands_stay_text(tmp_path: Path) -> None:
    async with in_process() as coordinator, hub_with(tmp_path, coordinator) as site:
        await coordinator.stub.RegisterWorker(
            pb.WorkerInfo(worker_id=HOSTILE, job_id="run", incarnation="1", hostname=HOSTILE)
        )
        await coordinator.stub.Barrier(
            pb.BarrierRequest(barrier_id=HOSTILE, worker_id=HOSTILE, job_id="run", wait=False, expected_participants=1)
        )
        await coordinator.stub.IssueCommand(
            pb.IssueCommandRequest(job_id="run", kind=pb.COMMAND_KIND_RELOAD, reason=HOSTILE)
        )
        browser = await log_in(site, "viewer")
        shown = await browser.shows("/gangs/run")
        assert not [tag for tag, attributes in Tags(shown).elements if tag == "xss-probe" or "onxss" in attributes]


async def test_a_hub_without_a_coordinator_says_what_to_do(tmp_path: Path) -> None:
    async with running(tmp_path / "hub") as site:
        browser = await log_in(site, "viewer")
        assert "hub.coordinator" in await browser.shows("/gangs")
        client = await site.with_role("viewer")
        assert ok(await client.get("/v1/gangs"), GangsView).coordinator == ""
        assert (await client.get("/v1/gang/run")).status_code == 404


async def test_events_of_a_gang_come_by_kind_and_page(tmp_path: Path) -> None:
    async with in_process() as coordinator, hub_with(tmp_path, coordinator) as site:
        await register(coordinator.stub, "a", "b", job="run")
        client = await site.with_role("viewer")
        first = ok(await client.get("/v1/gang/run/events", params={"limit": 1}), GangEventsView)
        assert len(first.events) == 1
        rest = await client.get("/v1/gang/run/events", params={"before": first.next_before, "limit": 1000})
        assert "JOB_CREATED" in {each.kind for each in ok(rest, GangEventsView).events}
        assert (await client.get("/v1/gang/run/events", params={"kind": "explosion"})).status_code == 400
        assert (await client.get("/v1/gang/nowhere")).status_code == 404


async def test_the_hub_reads_a_coordinator_with_tokens_as_operator_of_all_jobs() -> None:
    secret = Secret("s" * 32)
    tokens = Tokens(secret)
    claims = Claims(job=ALL_JOBS, role=TokenRole.OPERATOR, expires_s=round(SystemClock().wall_s()) + 600)
    async with in_process(tokens=tokens) as coordinator:
        metadata = (("authorization", f"Bearer {tokens.issue(claims)}"),)
        for name in ("one", "two"):
            await coordinator.stub.CreateJob(pb.CreateJobRequest(job_id=name), metadata=metadata)
        gangs = open_gangs(GangCoordinatorSettings(address=coordinator.address, token_secret=secret), SystemClock())
        try:
            assert [each.job_id for each in (await gangs.listed()).gangs] == ["one", "two"]
            assert (await gangs.described("two", GangQuery())).job.job_id == "two"
        finally:
            await gangs.close()


async def test_a_viewer_learns_neither_parameters_nor_addresses_of_a_gang(tmp_path: Path) -> None:
    async with in_process() as coordinator, hub_with(tmp_path, coordinator) as site:
        parameters = {"api_key": "not for all"}
        await coordinator.stub.CreateJob(pb.CreateJobRequest(job_id="run", training_parameters=parameters))
        await register(coordinator.stub, "a", job="run")
        client = await site.with_role("viewer")
        view = ok(await client.get("/v1/gang/run"), GangView)
        assert [(each.worker_id, each.ip, each.port) for each in view.job.workers] == [("a", "", 0)]
        assert not view.job.training_parameters
        assert not view.job.commands


def test_a_barrier_that_waits_for_many_names_a_few() -> None:
    barrier = BarrierView(
        barrier_id="b",
        generation=1,
        step=3,
        arrived=10,
        expected=20,
        missing=("w1", "w2", "w3", "w4"),
        open_ms=75_000,
    )
    assert barrier_words(barrier, ()) == (
        "Barrier b: 10 of 20 arrived, waiting for w1, w2, w3 and 7 more since 1 min 15 s"
    )


async def test_a_coordinator_that_does_not_answer_yet_is_no_error(tmp_path: Path) -> None:
    with reserve_port() as guard:
        address = f"127.0.0.1:{port_of(guard)}"
        async with running(tmp_path / "hub", coordinator=GangCoordinatorSettings(address=address)) as site:
            browser = await log_in(site, "viewer")
            assert "No coordinator answers" in await browser.shows("/gangs")
            assert (await browser.get("/v1/gangs")).status_code == 503
