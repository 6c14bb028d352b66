"""Slow workers, open calls, incarnations that are over and operators' requests, over real connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from strata.base.clock import SystemClock
from strata.coord.core.facts import CommandKind, RegisteredWorker
from strata.coord.core.inputs import IssueCommand, Register
from strata.coord.core.job_config import JobConfig
from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.server import operations
from strata.coord.server.service import CoordinatorService
from strata.coord.settings import CoordinatorSettings
from tests.shell.coord.running import QUICK, Running, in_process, refused, register, trailing
from tests.support.memory_journal import MemoryJournal

Status = grpc.StatusCode


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    async with in_process() as found:
        yield found


async def test_a_slow_worker_is_shown_with_its_reason_and_gets_less(running: Running) -> None:
    ids = [f"w{number}" for number in range(5)]
    await register(running.stub, *ids)
    soft = running.service.state.soft_of("default")
    while not soft.stragglers.generation:
        await asyncio.sleep(0)
    told: list[pb.Command] = []
    for step in range(30):
        for worker_id in ids:
            time_ms = 400.0 if worker_id == "w3" else 100.0
            beat = await running.stub.Heartbeat(
                pb.HeartbeatRequest(
                    worker_id=worker_id, step=step, step_time_ms=time_ms, status=pb.WORKER_STATUS_TRAINING
                )
            )
            told += beat.commands
        # The judgement that would come with a tick after a second; what was said has to be taken in first.
        soft.stragglers.judged_s = None
        while soft.stragglers.progress or soft.stragglers.judged_s is None:
            await asyncio.sleep(0)
    job = (await running.stub.GetJob(pb.GetJobRequest())).job
    incident = job.incidents[-1]
    assert (incident.kind, incident.worker_id) == (pb.INCIDENT_KIND_STRAGGLER, "w3")
    assert incident.message.startswith("w3 is slow: 0.4 s for a step where the median of 5 workers is 0.1 s")
    assert incident.message.endswith("; it gets less data")
    weights = {each.worker_id: each.weight for each in job.workers}
    assert weights.pop("w3") == pytest.approx(0.25)
    assert set(weights.values()) == {1.0}
    assert told == [], "slow hardware stays as it is"
    findings = {each.worker_id: (each.finding, each.finding_reason) for each in job.workers if each.finding}
    reason = incident.message.removesuffix("; it gets less data")
    assert findings == {"w3": (pb.INCIDENT_KIND_STRAGGLER, reason)}


async def test_ranks_that_step_together_are_ordered_by_their_computing_times(running: Running) -> None:
    ids = ["w0", "w1", "w2", "w3"]
    await register(running.stub, *ids)
    for worker_id in ids:
        beat = pb.HeartbeatRequest(worker_id=worker_id, step=9, step_time_ms=2_000.0, status=pb.WORKER_STATUS_TRAINING)
        beat.compute_times_ms.extend([1_900.0 if worker_id == "w2" else 300.0] * 5)
        await running.stub.Heartbeat(beat)
    page = pb.GetJobRequest(worker_limit=4, worker_order=pb.WORKER_ORDER_ATTENTION)
    workers = (await running.stub.GetJob(page)).job.workers
    assert workers[0].worker_id == "w2"
    assert [round(each.slowdown, 1) for each in workers] == [6.3, 1.0, 1.0, 1.0]


async def test_a_worker_whose_call_waits_here_counts_as_there(running: Running) -> None:
    await register(running.stub, "a", "b")
    await running.stub.AckDataset(pb.DatasetInfo(dataset_id="d", worker_id="a", num_samples=10, shard_size=10))
    await running.stub.GetNextShards(pb.ShardRequest(dataset_id="d", worker_id="b"))
    waiting = running.service.state.soft_of("default").open_calls
    barrier = running.stub.Barrier(pb.BarrierRequest(worker_id="a", barrier_id="x"))
    shards = running.stub.GetNextShards(pb.ShardRequest(dataset_id="d", worker_id="a", wait_ms=60_000))
    at_barrier, for_shards = asyncio.ensure_future(barrier), asyncio.ensure_future(shards)
    while waiting != {("a", "a-1"): 2}:
        await asyncio.sleep(0)
    # The client ends one, the coordinator the other.
    barrier.cancel()
    while waiting != {("a", "a-1"): 1}:
        await asyncio.sleep(0)
    await running.stub.LeaveWorker(pb.LeaveWorkerRequest(worker_id="b"))
    assert (await for_shards).shard_id
    assert waiting == {}
    with pytest.raises(asyncio.CancelledError):
        await at_barrier


async def test_a_worker_that_waits_for_a_generation_counts_as_there() -> None:
    async with in_process(JobConfig(settle_s=0.05, min_workers=2)) as running:
        early = asyncio.ensure_future(running.stub.RegisterWorker(pb.WorkerInfo(worker_id="a", incarnation="1")))
        while ("a", "1") not in running.service.state.soft_of("default").open_calls:
            await asyncio.sleep(0)
        await running.stub.RegisterWorker(pb.WorkerInfo(worker_id="b", incarnation="1"))
        assert (await early).generation == 1
        assert running.service.state.soft_of("default").open_calls == {}


async def test_an_acked_lease_is_not_lost_when_its_worker_comes_back(running: Running) -> None:
    await register(running.stub, "a", "b")
    await running.stub.AckDataset(pb.DatasetInfo(dataset_id="d", worker_id="a", num_samples=30, shard_size=10))
    request = pb.ShardRequest(dataset_id="d", worker_id="a", explicit_acks=True, max_shards=2)
    acked, held = (await running.stub.GetNextShards(request)).shards
    request.acks.add(lease_id=acked.lease_id)
    request.held_leases.append(held.lease_id)
    request.acks_only = True
    await running.stub.GetNextShards(request)
    again = await running.stub.RegisterWorker(
        pb.WorkerInfo(worker_id="a", incarnation="a-1", held_leases=[acked.lease_id, held.lease_id, 77])
    )
    assert list(again.lost_leases) == [77]


async def test_an_incarnation_that_was_replaced_cannot_register_again(running: Running) -> None:
    for incarnation in ("one", "two"):
        await running.stub.RegisterWorker(pb.WorkerInfo(worker_id="a", incarnation=incarnation))
    error = await refused(running.stub.RegisterWorker(pb.WorkerInfo(worker_id="a", incarnation="one")))
    assert (error.code(), trailing(error)["strata-reason"]) == (Status.FAILED_PRECONDITION, "stale-incarnation")


async def test_what_was_not_found_is_told_apart(running: Running) -> None:
    await register(running.stub, "a", "b")
    await running.stub.LeaveWorker(pb.LeaveWorkerRequest(worker_id="b"))
    await register(running.stub, "a")
    found = {
        reason: trailing(await refused(call)).get("strata-reason")
        for reason, call in {
            "evicted": running.stub.Barrier(pb.BarrierRequest(worker_id="b", barrier_id="x")),
            "unknown-worker": running.stub.Heartbeat(pb.HeartbeatRequest(worker_id="stranger")),
            "unknown-dataset": running.stub.GetNextShards(pb.ShardRequest(worker_id="a", dataset_id="none")),
            "unknown-job": running.stub.GetJob(pb.GetJobRequest(job_id="none")),
        }.items()
    }
    assert found == {reason: reason for reason in found}


async def test_a_large_fleet_is_told_a_longer_interval(running: Running) -> None:
    small = await register(running.stub, "a", "b", "c")
    assert small.heartbeat_interval_ms == 5_000
    running.service.state.heartbeats_per_s = 0.25
    assert (await register(running.stub, "a", "b", "c", "d")).heartbeat_interval_ms == 16_000
    beat = await running.stub.Heartbeat(pb.HeartbeatRequest(worker_id="a"))
    assert beat.heartbeat_interval_ms == 16_000


async def test_the_arguments_of_a_command_reach_the_worker(running: Running) -> None:
    await register(running.stub, "a")
    order = pb.IssueCommandRequest(kind=pb.COMMAND_KIND_RELOAD, arguments={"config": "v2", "when": "now"})
    await running.stub.IssueCommand(order)
    (command,) = (await running.stub.Heartbeat(pb.HeartbeatRequest(worker_id="a"))).commands
    assert dict(command.arguments) == {"config": "v2", "when": "now"}
    order.arguments["much"] = "x" * 20_000
    assert (await refused(running.stub.IssueCommand(order))).code() is Status.INVALID_ARGUMENT


async def _nobody_cares() -> None:
    return


async def test_a_request_is_known_to_the_next_leader() -> None:
    """Two coordinators on one journal, one after the other."""
    clock = SystemClock()
    journal = MemoryJournal(clock)
    answers: list[tuple[int, tuple[str, ...]]] = []
    for _ in range(2):
        service = CoordinatorService(journal, clock, CoordinatorSettings(job=QUICK))
        serving = asyncio.create_task(service.run(_nobody_cares))
        while not service.leads:
            await asyncio.sleep(0)
        if not answers:
            await operations.register(service, Register("default", RegisteredWorker(worker_id="a", incarnation="1")))
        answers.append(
            await operations.issue(service, IssueCommand("default", CommandKind.DRAIN, request_id="nightly"))
        )
        await service.drain()
        await serving
    assert answers == [(1, ("a",))] * 2
