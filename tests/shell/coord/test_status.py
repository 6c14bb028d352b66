"""Every status code of the contract's table, with its trailing metadata, over a real connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from strata.base.errors import Code, StrataError
from strata.coord.core.barriers import MAX_OPEN
from strata.coord.core.inputs import Tick
from strata.coord.core.job_config import JobConfig
from strata.coord.pb import coordinator_pb2 as pb
from strata.journal.group_commit import Writer
from tests.shell.coord.running import Running, as_worker, in_process, refused, register, trailing

Status = grpc.StatusCode


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    async with in_process() as found:
        yield found


async def test_every_call_but_two_of_a_stranger_is_told_to_register_first(running: Running) -> None:
    await register(running.stub, "known")
    stub = running.stub
    calls = [
        stub.GetNextShards(pb.ShardRequest(dataset_id="d"), metadata=as_worker("stranger")),
        stub.AckDataset(pb.DatasetInfo(dataset_id="d"), metadata=as_worker("stranger")),
        stub.Barrier(pb.BarrierRequest(barrier_id="b"), metadata=as_worker("stranger")),
        stub.ReportCheckpoint(pb.CheckpointInfo(checkpoint_id="c"), metadata=as_worker("stranger")),
        stub.RequestRecovery(pb.RecoveryRequest(), metadata=as_worker("stranger")),
        stub.LeaveWorker(pb.LeaveWorkerRequest(), metadata=as_worker("stranger")),
        stub.Attach(pb.AttachRequest(), metadata=as_worker("stranger")).read(),
        stub.Barrier(pb.BarrierRequest(barrier_id="b", job_id="no such job"), metadata=as_worker("stranger")),
    ]
    for call in calls:
        error = await refused(call)
        assert (error.code(), trailing(error)["strata-reason"]) == (Status.FAILED_PRECONDITION, "not-registered")


async def test_a_heartbeat_of_a_stranger_is_not_found(running: Running) -> None:
    error = await refused(running.stub.Heartbeat(pb.HeartbeatRequest(worker_id="stranger")))
    assert error.code() is Status.NOT_FOUND
    assert "register again" in (error.details() or "")


async def test_a_stale_generation_is_told_the_current_one(running: Running) -> None:
    first = await register(running.stub, "a")
    second = await register(running.stub, "a", "b")
    assert second.generation > first.generation
    stale = pb.ShardRequest(dataset_id="d", worker_id="a", generation=first.generation)
    error = await refused(running.stub.GetNextShards(stale))
    assert error.code() is Status.FAILED_PRECONDITION
    assert trailing(error)["strata-reason"] == "stale-generation"
    assert trailing(error)["strata-generation"] == str(second.generation)


async def test_a_replaced_incarnation_is_told_to_stop(running: Running) -> None:
    await running.stub.RegisterWorker(pb.WorkerInfo(worker_id="a", incarnation="one"))
    await running.stub.RegisterWorker(pb.WorkerInfo(worker_id="a", incarnation="two"))
    for call in (
        running.stub.Heartbeat(pb.HeartbeatRequest(worker_id="a", incarnation="one")),
        running.stub.Barrier(pb.BarrierRequest(worker_id="a", incarnation="one", barrier_id="b")),
    ):
        error = await refused(call)
        assert (error.code(), trailing(error)["strata-reason"]) == (Status.FAILED_PRECONDITION, "stale-incarnation")


async def test_a_worker_in_error_is_told_to_stop_and_unknown_afterwards(running: Running) -> None:
    await register(running.stub, "a", "b")
    failed = pb.HeartbeatRequest(worker_id="a", status=pb.WORKER_STATUS_ERROR)
    assert (await running.stub.Heartbeat(failed)).command == pb.COMMAND_KIND_STOP
    for call in (
        running.stub.Heartbeat(pb.HeartbeatRequest(worker_id="a")),
        running.stub.Barrier(pb.BarrierRequest(worker_id="a", barrier_id="b")),
    ):
        assert (await refused(call)).code() is Status.NOT_FOUND


async def test_an_unknown_dataset_or_job_is_not_found(running: Running) -> None:
    await register(running.stub, "a")
    for call in (
        running.stub.AckDataset(pb.DatasetInfo(dataset_id="none", worker_id="a")),
        running.stub.GetNextShards(pb.ShardRequest(dataset_id="none", worker_id="a")),
        running.stub.GetJob(pb.GetJobRequest(job_id="none")),
        running.stub.IssueCommand(pb.IssueCommandRequest(job_id="none", kind=pb.COMMAND_KIND_STOP)),
    ):
        assert (await refused(call)).code() is Status.NOT_FOUND


async def test_during_a_rebalance_a_call_is_told_when_to_come_again() -> None:
    async with in_process(JobConfig(settle_s=0.5)) as running:
        await register(running.stub, "a")
        joining = asyncio.ensure_future(running.stub.RegisterWorker(pb.WorkerInfo(worker_id="b")))
        while "b" not in running.service.state.jobs["default"].members:
            await asyncio.sleep(0)
        error = await refused(running.stub.Barrier(pb.BarrierRequest(worker_id="a", barrier_id="x")))
        assert error.code() is Status.UNAVAILABLE
        assert int(trailing(error)["strata-retry-after-ms"]) == 500
        assert (await joining).world_size == 2


async def test_a_barrier_that_times_out_names_the_missing(running: Running) -> None:
    await register(running.stub, "a", "b", "c")
    late = pb.BarrierRequest(worker_id="a", barrier_id="late", timeout_ms=50)
    error = await refused(running.stub.Barrier(late))
    assert error.code() is Status.DEADLINE_EXCEEDED
    named = (error.details() or "").partition("missing: ")[2]
    assert set(named.split(", ")) == {"b", "c"}
    # The verdict stands: who only looks sees it, who waits gets the same error.
    late.wait = False
    late.worker_id = "b"
    found = await running.stub.Barrier(late)
    assert (found.verdict, set(found.missing)) == (pb.BARRIER_VERDICT_TIMED_OUT, {"b", "c"})
    late.wait = True
    assert (await refused(running.stub.Barrier(late))).code() is Status.DEADLINE_EXCEEDED
    job = (await running.stub.GetJob(pb.GetJobRequest())).job
    assert job.incidents[0].kind == pb.INCIDENT_KIND_BARRIER_TIMED_OUT


async def test_another_definition_of_a_dataset_already_exists(running: Running) -> None:
    await register(running.stub, "a")
    defined = pb.DatasetInfo(dataset_id="d", worker_id="a", num_samples=100, shard_size=10)
    assert (await running.stub.AckDataset(defined)).created
    again = await running.stub.AckDataset(defined)
    assert (again.accepted, again.created, again.num_shards) == (True, False, 10)
    defined.num_samples = 101
    assert (await refused(running.stub.AckDataset(defined))).code() is Status.ALREADY_EXISTS
    named = await running.stub.AckDataset(pb.DatasetInfo(dataset_id="d", worker_id="a"))
    assert (named.accepted, named.created) == (True, False)


@pytest.mark.parametrize(
    "request_",
    [
        pb.WorkerInfo(),
        pb.WorkerInfo(worker_id="w" * 300),
        pb.WorkerInfo(worker_id="w", weight=float("nan")),
        pb.WorkerInfo(worker_id="w", weight=-1.0),
    ],
)
async def test_what_can_never_succeed_is_an_invalid_argument(request_: pb.WorkerInfo, running: Running) -> None:
    assert (await refused(running.stub.RegisterWorker(request_))).code() is Status.INVALID_ARGUMENT


async def test_too_many_open_barriers_exhaust_the_job(running: Running) -> None:
    await register(running.stub, "a", "b")

    def arrive(number: int) -> grpc.aio.UnaryUnaryCall[pb.BarrierRequest, pb.BarrierResponse]:
        return running.stub.Barrier(pb.BarrierRequest(worker_id="a", barrier_id=f"b{number}", wait=False))

    found = await asyncio.gather(*map(arrive, range(MAX_OPEN)))
    assert {each.verdict for each in found} == {pb.BARRIER_VERDICT_PENDING}
    error = await refused(arrive(MAX_OPEN))
    assert error.code() is Status.RESOURCE_EXHAUSTED
    assert int(trailing(error)["strata-retry-after-ms"]) > 0


async def test_a_defect_shows_an_id_and_no_traceback(running: Running) -> None:
    await register(running.stub, "a")
    running.service.state.jobs["default"].ranks = {}
    error = await refused(running.stub.ReportCheckpoint(pb.CheckpointInfo(checkpoint_id="c", worker_id="a", step=1)))
    assert error.code() is Status.INTERNAL
    assert "fault_" in (error.details() or "")
    assert "Traceback" not in (error.details() or "")
    assert "KeyError" not in (error.details() or "")


async def test_who_does_not_lead_is_unavailable() -> None:
    async with in_process(standby=True) as running:
        for call in (
            running.stub.RegisterWorker(pb.WorkerInfo(worker_id="a")),
            running.stub.Heartbeat(pb.HeartbeatRequest(worker_id="a")),
            running.stub.HeartbeatBatch(pb.HeartbeatBatchRequest()),
            running.stub.GetJob(pb.GetJobRequest()),
            running.stub.Attach(pb.AttachRequest(worker_id="a")).read(),
        ):
            error = await refused(call)
            assert error.code() is Status.UNAVAILABLE
            assert int(trailing(error)["strata-retry-after-ms"]) > 0


async def test_a_request_that_a_full_append_queue_refuses_leaves_no_trace_in_soft_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with in_process() as running:
        state = running.service.state_if_leading
        assert state is not None
        monkeypatch.setattr(Writer, "check_capacity", _refuse)
        ticked_s = state.ticked_s
        with pytest.raises(StrataError) as caught:
            await running.service.submit(Tick())
        assert caught.value.code is Code.EXHAUSTED
        assert state.ticked_s == ticked_s


def _refuse(_writer: Writer) -> None:
    raise StrataError(Code.EXHAUSTED, "the queue is full")
