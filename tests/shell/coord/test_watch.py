"""Watching a job: deltas of one projection, whole states for older clients, pages of workers, events that last."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from strata.base.clock import SystemClock
from strata.coord.operator import ConnectionLost, Operator, OperatorSettings, WorkerPage, changed_view, job_view
from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.server import watch as watching
from strata.coord.server.watch import JobProjection
from strata.coord.view import JobView
from tests.shell.coord.running import CoordinatorProcess, Running, connect, in_process, refused, register
from tests.shell.coord.test_gang import gang
from tests.support.ports import port_of, reserve_port

WITHIN_S = 60.0


@pytest.fixture
async def running(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Running]:
    """Telemetry alone is sent sooner than to people."""
    monkeypatch.setattr(watching, "REFRESH_S", 0.2)
    async with in_process() as found:
        yield found


def beat(worker_id: str, **fields: Any) -> pb.HeartbeatRequest:
    return pb.HeartbeatRequest(worker_id=worker_id, status=pb.WORKER_STATUS_TRAINING, **fields)


def operator(address: str) -> Operator:
    return Operator(OperatorSettings(address=address), SystemClock())


def without_times(view: JobView) -> Any:
    """What does not change by itself."""
    return (
        view.generation,
        [
            (each.worker_id, each.rank, each.status, each.liveness, each.step, each.leased_shards)
            for each in view.workers
        ],
        view.datasets,
        [(each.barrier_id, each.arrived, each.missing) for each in view.barriers],
        view.checkpoints,
        view.incidents,
        view.commands,
    )


async def test_the_first_response_is_whole_and_the_next_have_what_changed(running: Running) -> None:
    await register(running.stub, "a", "b", "c")
    call = running.stub.WatchJob(pb.WatchJobRequest(deltas=True, min_interval_ms=1))
    first = await call.read()
    assert isinstance(first, pb.WatchJobResponse)
    assert [each.rank for each in first.job.workers] == [0, 1, 2]
    assert not first.HasField("change")
    await running.stub.Heartbeat(beat("b", step=7))
    async with asyncio.timeout(WITHIN_S):
        while True:
            response = await call.read()
            assert isinstance(response, pb.WatchJobResponse)
            assert not response.HasField("job")
            if any(each.worker_id == "b" and each.step == 7 for each in response.change.job.workers):
                break
    assert response.change.job.generation == first.job.generation
    call.cancel()


async def test_changes_add_up_to_what_a_new_reader_sees(running: Running) -> None:
    await register(running.stub, "a", "b")
    async with operator(running.address) as client, asyncio.timeout(WITHIN_S):
        seen: list[JobView] = []

        async def watch() -> None:
            async with aclosing(client.watch()) as views:
                async for view in views:
                    assert isinstance(view, JobView)
                    seen.append(view)

        task = asyncio.create_task(watch())
        await running.stub.AckDataset(pb.DatasetInfo(dataset_id="d", num_samples=20, shard_size=10, worker_id="a"))
        await running.stub.GetNextShards(pb.ShardRequest(dataset_id="d", worker_id="a"))
        await register(running.stub, "a", "b", "c")
        await running.stub.Heartbeat(beat("c", step=3))
        await running.stub.Barrier(pb.BarrierRequest(barrier_id="x", worker_id="a", wait=False))
        await running.stub.LeaveWorker(pb.LeaveWorkerRequest(worker_id="b", reason="enough"))
        await running.stub.IssueCommand(pb.IssueCommandRequest(kind=pb.COMMAND_KIND_RELOAD))
        while True:
            want = without_times(await client.job())
            if seen and without_times(seen[-1]) == want:
                break
            await asyncio.sleep(0.1)
        assert len(seen) > 1
        task.cancel()


async def test_a_client_that_knows_no_changes_gets_the_whole_job_each_time(running: Running) -> None:
    await register(running.stub, "a", "b")
    call = running.stub.WatchJob(pb.WatchJobRequest(min_interval_ms=1))
    for _ in range(3):
        response = await call.read()
        assert isinstance(response, pb.WatchJobResponse)
        assert {each.worker_id for each in response.job.workers} == {"a", "b"}
        assert not response.HasField("change")
        await running.stub.Heartbeat(beat("a"))
    call.cancel()


async def test_many_watchers_share_one_rendering(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    await register(running.stub, "a", "b")
    made: list[JobProjection] = []
    run_once = JobProjection.run_once

    async def counted(self: JobProjection) -> None:
        made.append(self)
        await run_once(self)

    monkeypatch.setattr(JobProjection, "run_once", counted)
    calls = [running.stub.WatchJob(pb.WatchJobRequest(deltas=True)) for _ in range(8)]
    firsts = await asyncio.gather(*(call.read() for call in calls))
    assert len({bytes(each.SerializeToString()) for each in firsts if isinstance(each, pb.WatchJobResponse)}) <= 2
    for call in calls:
        await call.read()
        call.cancel()
    assert len({id(each) for each in made}) == 1


async def test_a_watcher_sees_what_it_did_before_also_if_others_watch_already(running: Running) -> None:
    await register(running.stub, "a")
    other = running.stub.WatchJob(pb.WatchJobRequest(deltas=True))
    await other.read()
    for number in range(5):
        await running.stub.IssueCommand(pb.IssueCommandRequest(kind=pb.COMMAND_KIND_RELOAD, reason=f"{number}"))
        call = running.stub.WatchJob(pb.WatchJobRequest(deltas=True))
        response = await call.read()
        assert isinstance(response, pb.WatchJobResponse)
        assert [each.command.reason for each in response.job.commands][-1] == f"{number}"
        call.cancel()
    other.cancel()


async def test_a_large_job_is_described_in_turns_and_completely(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "ROWS_AT_ONCE", 3)
    names = [f"w{number}" for number in range(10)]
    await register(running.stub, *names)
    call = running.stub.WatchJob(pb.WatchJobRequest(deltas=True, min_interval_ms=1))
    first = await call.read()
    assert isinstance(first, pb.WatchJobResponse)
    view = job_view(first.job)
    for number, name in enumerate(names):
        await running.stub.Heartbeat(beat(name, step=number + 1))
    async with asyncio.timeout(WITHIN_S):
        while {each.worker_id: each.step for each in view.workers} != dict(zip(names, range(1, 11), strict=True)):
            response = await call.read()
            assert isinstance(response, pb.WatchJobResponse)
            assert len(response.change.job.workers) <= 3 * watching.ROUNDS_KEPT
            view = changed_view(view, response.change)
    call.cancel()


async def test_a_watch_of_a_job_that_is_deleted_ends_with_not_found(running: Running) -> None:
    await running.stub.CreateJob(pb.CreateJobRequest(job_id="gone"))
    call = running.stub.WatchJob(pb.WatchJobRequest(job_id="gone", deltas=True, min_interval_ms=1))
    await call.read()
    await running.stub.DeleteJob(pb.DeleteJobRequest(job_id="gone"))

    async def read_on() -> None:
        while True:
            await call.read()

    error = await refused(asyncio.wait_for(read_on(), WITHIN_S))
    assert error.code().name == "NOT_FOUND"


async def test_workers_come_in_pages_those_first_that_hold_the_job_up(running: Running) -> None:
    names = [f"w{number}" for number in range(6)]
    await register(running.stub, *names)
    for name in names:
        await running.stub.Heartbeat(beat(name, step=1, step_time_ms=190.0 if name == "w2" else 100.0))
    for name in names:
        if name != "w4":
            await running.stub.Barrier(pb.BarrierRequest(barrier_id="epoch", worker_id=name, wait=False))
    async with operator(running.address) as client:
        page = await client.page(WorkerPage(limit=2, attention_first=True))
        assert [each.worker_id for each in page.job.workers] == ["w4", "w2"]
        assert page.job.workers[1].slowdown == pytest.approx(1.9)
        assert (page.workers_total, sum(each.count for each in page.worker_counts)) == (6, 6)
        rest = await client.page(WorkerPage(limit=10, offset=2, attention_first=True))
        assert {each.worker_id for each in rest.job.workers} == {"w0", "w1", "w3", "w5"}
        ranks = [each.rank or 0 for each in rest.job.workers]
        assert ranks == sorted(ranks)
        found = await client.page(WorkerPage(search="W5"))
        assert ([each.worker_id for each in found.job.workers], found.workers_total) == (["w5"], 1)


async def test_lanes_have_the_states_of_workers_over_time(running: Running) -> None:
    await register(running.stub, "a", "b")
    await running.stub.Heartbeat(beat("a"))
    telemetry = running.service.telemetry.of("default")
    telemetry.sample_lanes(1_000, ["a", "b"])
    await running.stub.Heartbeat(pb.HeartbeatRequest(worker_id="a", status=pb.WORKER_STATUS_CHECKPOINTING))
    telemetry.sample_lanes(6_000, ["a", "b"])
    async with operator(running.address) as client:
        page = await client.page(WorkerPage(lanes=True))
    lanes = {each.worker_id: [(span.status, span.end_unix_ms) for span in each.spans][-2:] for each in page.lanes}
    assert page.lanes_start_unix_ms is not None
    assert lanes == {"a": [("TRAINING", 6_000), ("CHECKPOINTING", 6_000)], "b": []}


async def test_events_and_goodput_survive_the_coordinator(tmp_path: Path) -> None:
    with reserve_port() as guard:
        process = CoordinatorProcess(f"sqlite:{tmp_path / 'coord.db'}", port_of(guard))
        try:
            await process.start()
            await process.serving()
            async with connect(process.address) as channel:
                stub = _stub(channel)
                await register(stub, "a", "b")
                await stub.Heartbeat(pb.HeartbeatRequest(worker_id="b", status=pb.WORKER_STATUS_ERROR))
                async with operator(process.address) as client:
                    before = await client.events()
            await process.kill()
            await process.start()
            await process.serving()
            async with operator(process.address) as client, asyncio.timeout(WITHIN_S):
                while True:
                    after = await client.events()
                    if "FAILOVER" in {each.kind for each in after.events}:
                        break
                    await asyncio.sleep(0.1)
                lost = await client.events(kinds=["worker_lost"])
                goodput = await client.goodput()
            known = {each.number for each in before.events}
            # A generation may have formed between the two reads.
            assert known <= {each.number for each in after.events}
            assert [(each.workers, each.message) for each in lost.events] == [(("b",), "error")]
            assert goodput is not None
            assert goodput.useful_ms > 0
        finally:
            await process.close()


def _stub(channel: Any) -> Any:
    from strata.coord.pb import coordinator_pb2_grpc as pb_grpc

    return pb_grpc.CoordinatorStub(channel)


async def test_an_unknown_kind_of_event_is_refused_with_the_known_ones(running: Running) -> None:
    await register(running.stub, "a")
    async with operator(running.address) as client:
        with pytest.raises(Exception, match="no kind of event"):
            await client.events(kinds=["explosion"])
        assert not isinstance(await client.job(), ConnectionLost)


async def test_the_command_line_shows_events_and_goodput(running: Running) -> None:
    await register(running.stub, "a", "b")
    await running.stub.LeaveWorker(pb.LeaveWorkerRequest(worker_id="b", reason="enough"))
    at = ("--address", running.address)
    shown = await gang("events", "default", *at)
    assert (shown.status, "WORKER_LEFT" in shown.out, "left: enough" in shown.out) == (0, True, True)
    found = json.loads((await gang("events", "default", "--kind", "worker_left", "-o", "json", *at)).out)
    assert [each["workers"] for each in found] == [["b"]]
    parts = json.loads((await gang("goodput", "default", "-o", "json", *at)).out)
    assert [each["part"] for each in parts] == [
        "useful",
        "waiting",
        "checkpoint",
        "detect",
        "restart",
        "rolled_back",
    ]
    assert sum(each["share"] for each in parts) == pytest.approx(1.0, abs=0.01)
    assert "rolled back" in (await gang("goodput", *at)).out
