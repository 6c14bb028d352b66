"""Whole workers over real connections: the minimal one, many at a barrier, one that dies."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import ExitStack

import pytest

from strata.coord.core.inputs import Caller
from strata.coord.core.job_config import JobConfig
from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.pb import coordinator_pb2_grpc as pb_grpc
from strata.coord.server.presence import open_presence
from tests.shell.coord.running import Running, as_worker, connect, in_process, patiently, register
from tests.support.busy import BUSY

SAMPLES = 1_000
MANY = 64


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    async with in_process() as found:
        yield found


async def minimal_worker(address: str, worker_id: str, epochs: int) -> Counter[tuple[int, int]]:
    """Knows only fields 1 to 9 of the contract, and says who it is in the metadata. What it has read, by epoch."""
    read: Counter[tuple[int, int]] = Counter()
    who = as_worker(worker_id)
    async with connect(address) as channel:
        stub = pb_grpc.CoordinatorStub(channel)
        await patiently(stub.RegisterWorker, pb.WorkerInfo(worker_id=worker_id, ip="127.0.0.1", port=1, gpu_count=1))
        await patiently(stub.AckDataset, pb.DatasetInfo(dataset_id="corpus"), metadata=who)
        released = False
        while not released:
            # The others may still be coming.
            found = await patiently(
                stub.Barrier, pb.BarrierRequest(barrier_id="start", expected_participants=0), metadata=who
            )
            released = found.released
        for epoch in range(epochs):
            while True:
                request = pb.ShardRequest(dataset_id="corpus", epoch=epoch)
                shard = await patiently(stub.GetNextShards, request, metadata=who)
                read.update((epoch, sample) for sample in range(shard.start_index, shard.end_index))
                if shard.shard_id:
                    await patiently(
                        stub.Heartbeat,
                        pb.HeartbeatRequest(worker_id=worker_id, status=pb.WORKER_STATUS_TRAINING),
                        metadata=who,
                    )
                elif shard.end_of_epoch:
                    break
                else:
                    await asyncio.sleep(0.01)
            barrier = pb.BarrierRequest(barrier_id=f"epoch_{epoch}", step=epoch + 1)
            assert (await patiently(stub.Barrier, barrier, metadata=who)).released
            checkpoint = pb.CheckpointInfo(checkpoint_id=f"{worker_id}-{epoch}", path=f"/{worker_id}", size_bytes=1)
            await patiently(stub.ReportCheckpoint, checkpoint, metadata=who)
    return read


async def test_minimal_workers_see_every_sample_of_two_epochs_once() -> None:
    async with in_process(JobConfig(settle_s=0.2, min_workers=3)) as running:
        await running.stub.RegisterWorker(pb.WorkerInfo(worker_id="definer"))
        defined = pb.DatasetInfo(dataset_id="corpus", worker_id="definer", num_samples=SAMPLES, shard_size=7)
        await running.stub.AckDataset(defined)
        await running.stub.LeaveWorker(pb.LeaveWorkerRequest(worker_id="definer"))
        read = await asyncio.gather(*(minimal_worker(running.address, f"w{n}", epochs=2) for n in range(3)))
        total = sum(read, Counter[tuple[int, int]]())
        assert total == Counter({(epoch, sample): 1 for epoch in (0, 1) for sample in range(SAMPLES)})
        assert all(read), "every worker got something"
        job = (await running.stub.GetJob(pb.GetJobRequest())).job
        # Each had an id of its own for its part, and named no step: one checkpoint for each step of the barriers.
        assert [(each.committed, each.manifest.step) for each in job.checkpoints] == [(True, 2), (True, 1)]
        assert list(job.datasets[0].finished_epochs) == [0, 1]


async def test_many_workers_go_through_barriers_together(running: Running) -> None:
    ids = [f"w{number}" for number in range(MANY)]
    config = await register(running.stub, *ids)
    assert config.world_size == MANY
    order: list[tuple[int, str]] = []

    async def walk(worker_id: str) -> None:
        for step in range(10):
            found = await running.stub.Barrier(pb.BarrierRequest(barrier_id=f"s{step}", worker_id=worker_id, step=step))
            assert (found.released, found.arrived, found.expected) == (True, MANY, MANY)
            order.append((step, worker_id))

    began_s = time.monotonic()
    await asyncio.gather(*map(walk, ids))
    print(f"\n{MANY} workers, 10 barriers: {(time.monotonic() - began_s) / 10 * 1000:.1f} ms each")
    assert [step for step, _ in order] == sorted(step for step, _ in order), "nobody went ahead"


async def test_the_death_of_an_attached_worker_frees_the_others_and_its_shards(running: Running) -> None:
    await register(running.stub, "a", "b")
    await running.stub.AckDataset(pb.DatasetInfo(dataset_id="d", worker_id="a", num_samples=20, shard_size=10))
    doomed = connect(running.address)
    stub = pb_grpc.CoordinatorStub(doomed)
    presence = stub.Attach(pb.AttachRequest(worker_id="b"))
    first = await presence.read()
    assert isinstance(first, pb.AttachResponse)
    assert first.generation > 0
    held = await stub.GetNextShards(pb.ShardRequest(dataset_id="d", worker_id="b"))
    waiting = asyncio.ensure_future(running.stub.Barrier(pb.BarrierRequest(barrier_id="x", worker_id="a")))
    began_s = time.monotonic()
    await doomed.close(grace=None)
    found = await waiting
    unblocked_s = time.monotonic() - began_s
    assert found.verdict == pb.BARRIER_VERDICT_MEMBERSHIP_CHANGED
    assert unblocked_s <= 1.0 * BUSY
    taken = [await patiently(running.stub.GetNextShards, pb.ShardRequest(dataset_id="d", worker_id="a"))]
    reissued_s = time.monotonic() - began_s
    assert taken[0].start_index == held.start_index, "what was given back comes first"
    assert taken[0].lease_id != held.lease_id
    assert reissued_s <= 1.0 * BUSY
    print(f"\nunblocked after {unblocked_s:.3f} s, shard re-issued after {reissued_s:.3f} s")
    job = (await running.stub.GetJob(pb.GetJobRequest())).job
    assert (job.incidents[0].kind, job.incidents[0].worker_id) == (pb.INCIDENT_KIND_WORKER_LOST, "b")
    assert {each.worker_id: each.liveness for each in job.workers} == {"a": pb.LIVENESS_ALIVE, "b": pb.LIVENESS_LOST}


async def test_only_the_end_of_a_workers_newest_stream_is_suspicion(running: Running) -> None:
    await register(running.stub, "a")
    soft = running.service.state.soft_of("default")
    with ExitStack() as second, open_presence(running.service, Caller("default", "a")):
        with open_presence(running.service, Caller("default", "a")):
            second.enter_context(open_presence(running.service, Caller("default", "a")))
        assert not soft.disconnected_at_s, "an older stream ended"
        job = (await running.stub.GetJob(pb.GetJobRequest())).job
        assert (job.workers[0].liveness, job.workers[0].attached) == (pb.LIVENESS_ALIVE, True)
        second.close()
        assert list(soft.disconnected_at_s) == ["a"]
        job = (await running.stub.GetJob(pb.GetJobRequest())).job
        assert (job.workers[0].liveness, job.workers[0].attached) == (pb.LIVENESS_SUSPECT, False)


async def test_commands_reach_streams_and_heartbeats_and_are_acknowledged_once(running: Running) -> None:
    await register(running.stub, "a", "b")
    presence = running.stub.Attach(pb.AttachRequest(worker_id="a"))
    await presence.read()
    order = pb.IssueCommandRequest(kind=pb.COMMAND_KIND_CHECKPOINT_NOW, reason="nightly", request_id="r1")
    issued = await running.stub.IssueCommand(order)
    assert set(issued.worker_ids) == {"a", "b"}
    assert (await running.stub.IssueCommand(order)).command_id == issued.command_id
    pushed = await presence.read()
    assert isinstance(pushed, pb.AttachResponse)
    assert [each.command_id for each in pushed.commands] == [issued.command_id]
    # One that acknowledges by id hears it until it does; one that does not hears it once.
    explicit = pb.HeartbeatRequest(worker_id="a", explicit_acks=True)
    for _ in range(2):
        assert (await running.stub.Heartbeat(explicit)).command == pb.COMMAND_KIND_CHECKPOINT_NOW
    explicit.acked_command_ids.append(issued.command_id)
    assert not (await running.stub.Heartbeat(explicit)).commands
    implicit = pb.HeartbeatRequest()
    heard = [(await running.stub.Heartbeat(implicit, metadata=as_worker("b"))).command for _ in range(2)]
    assert heard == [pb.COMMAND_KIND_CHECKPOINT_NOW, pb.COMMAND_KIND_UNSPECIFIED]
    assert not (await running.stub.GetJob(pb.GetJobRequest())).job.commands
    presence.cancel()


async def test_a_call_for_shards_waits_for_what_others_give_back(running: Running) -> None:
    await register(running.stub, "a", "b")
    await running.stub.AckDataset(pb.DatasetInfo(dataset_id="d", worker_id="a", num_samples=10, shard_size=10))
    held = await running.stub.GetNextShards(pb.ShardRequest(dataset_id="d", worker_id="a", explicit_acks=True))
    nothing = await running.stub.GetNextShards(pb.ShardRequest(dataset_id="d", worker_id="b"))
    assert (nothing.shard_id, nothing.end_of_epoch) == ("", False)
    assert nothing.retry_after_ms > 0
    waiting = asyncio.ensure_future(
        running.stub.GetNextShards(pb.ShardRequest(dataset_id="d", worker_id="b", wait_ms=5_000))
    )
    failed = pb.ShardAck(lease_id=held.lease_id, consumed_until=4, failed=True, reason="disk")
    await running.stub.GetNextShards(
        pb.ShardRequest(dataset_id="d", worker_id="a", explicit_acks=True, acks=[failed], max_shards=1)
    )
    found = await waiting
    if not found.shard_id:
        pytest.fail("the rest was not handed to the one who waited")
    assert (found.start_index, found.end_index) == (4, 10)


async def test_a_call_for_shards_waits_through_the_loss_of_a_worker(running: Running) -> None:
    await register(running.stub, "a", "b")
    await running.stub.AckDataset(pb.DatasetInfo(dataset_id="d", worker_id="a", num_samples=10, shard_size=10))
    held = await running.stub.GetNextShards(pb.ShardRequest(dataset_id="d", worker_id="a"))
    waiting = asyncio.ensure_future(
        running.stub.GetNextShards(pb.ShardRequest(dataset_id="d", worker_id="b", wait_ms=5_000))
    )
    while not len(running.service.notifier.events):
        await asyncio.sleep(0)
    await running.stub.LeaveWorker(pb.LeaveWorkerRequest(worker_id="a"))
    found = await waiting
    assert (found.start_index, found.end_index) == (held.start_index, held.end_index)


async def test_the_last_shard_of_an_epoch_may_be_acked_in_the_next(running: Running) -> None:
    await register(running.stub, "a")
    await running.stub.AckDataset(pb.DatasetInfo(dataset_id="d", worker_id="a", num_samples=10, shard_size=10))
    request = pb.ShardRequest(dataset_id="d", worker_id="a", explicit_acks=True)
    last = await running.stub.GetNextShards(request)
    request.epoch = 1
    request.acks.add(lease_id=last.lease_id)
    first = await running.stub.GetNextShards(request)
    assert (first.epoch, first.end_index, list(first.rejected_leases)) == (1, 10, [])
    job = (await running.stub.GetJob(pb.GetJobRequest())).job
    assert list(job.datasets[0].finished_epochs) == [0]


async def test_who_leaves_hands_back_what_it_did_not_ack(running: Running) -> None:
    await register(running.stub, "a", "b")
    await running.stub.AckDataset(pb.DatasetInfo(dataset_id="d", worker_id="a", num_samples=20, shard_size=10))
    both = await running.stub.GetNextShards(
        pb.ShardRequest(dataset_id="d", worker_id="b", explicit_acks=True, max_shards=2)
    )
    done, open_ = both.shards
    leaving = pb.LeaveWorkerRequest(worker_id="b", acks=[pb.ShardAck(lease_id=done.lease_id), pb.ShardAck(lease_id=9)])
    left = await running.stub.LeaveWorker(leaving)
    assert list(left.rejected_leases) == [9]
    assert (await running.stub.LeaveWorker(pb.LeaveWorkerRequest(worker_id="b"))).generation == left.generation
    found = await patiently(running.stub.GetNextShards, pb.ShardRequest(dataset_id="d", worker_id="a"))
    assert found.start_index == open_.start_index
    job = (await running.stub.GetJob(pb.GetJobRequest())).job
    assert not job.incidents
    assert {each.worker_id: each.liveness for each in job.workers}["b"] == pb.LIVENESS_LEFT


async def test_all_who_saw_a_failure_go_back_once(running: Running) -> None:
    config = await register(running.stub, "a", "b")
    await running.stub.AckDataset(pb.DatasetInfo(dataset_id="d", worker_id="a", num_samples=20, shard_size=10))
    for worker_id in "ab":
        await running.stub.GetNextShards(pb.ShardRequest(dataset_id="d", worker_id=worker_id))
    acks = [
        await running.stub.ReportCheckpoint(
            pb.CheckpointInfo(checkpoint_id="c", path=f"s3://{worker_id}", size_bytes=5, worker_id=worker_id, step=7)
        )
        for worker_id in "ab"
    ]
    assert [(each.committed, each.step) for each in acks] == [(False, 7), (True, 7)]
    found = [
        await running.stub.RequestRecovery(
            pb.RecoveryRequest(worker_id=worker_id, observed_generation=config.generation)
        )
        for worker_id in "ab"
    ]
    assert {each.generation for each in found} == {config.generation + 1}
    assert {each.ledger_rewound for each in found} == {True}
    assert {each.checkpoint.step for each in found} == {7}
    assert {part.uri for part in found[0].checkpoint.parts} == {"s3://a", "s3://b"}


async def test_who_came_too_early_is_called_back_when_a_generation_forms() -> None:
    async with in_process(JobConfig(settle_s=0.05, min_workers=2)) as running:
        early = await running.stub.RegisterWorker(pb.WorkerInfo(worker_id="a", incarnation="1"))
        assert (early.generation, early.world_size) == (0, 0)
        assert not (await running.stub.Heartbeat(pb.HeartbeatRequest(worker_id="a"))).commands
        presence = running.stub.Attach(pb.AttachRequest(worker_id="a"))
        await presence.read()
        assert (await running.stub.RegisterWorker(pb.WorkerInfo(worker_id="b"))).world_size == 2
        told: list[pb.Command] = []
        while not told:
            news = await presence.read()
            assert isinstance(news, pb.AttachResponse)
            told += news.commands
        assert [each.kind for each in told] == [pb.COMMAND_KIND_REBALANCE]
        again = await running.stub.RegisterWorker(pb.WorkerInfo(worker_id="a", incarnation="1"))
        assert (again.generation, again.world_size) == (1, 2)
        presence.cancel()


async def test_who_watches_a_job_sees_it_change(running: Running) -> None:
    await register(running.stub, "a")
    watching = running.stub.WatchJob(pb.WatchJobRequest(min_interval_ms=1))
    first = await watching.read()
    assert isinstance(first, pb.WatchJobResponse)
    assert len(first.job.workers) == 1
    await register(running.stub, "a", "b")
    while True:
        seen = await watching.read()
        assert isinstance(seen, pb.WatchJobResponse)
        if seen.job.world_size == 2:
            break
    watching.cancel()


async def test_a_batch_is_answered_in_its_order_whatever_becomes_of_each_beat(running: Running) -> None:
    await register(running.stub, "a", "b", "c")
    order = pb.IssueCommandRequest(kind=pb.COMMAND_KIND_RELOAD, worker_ids=["b"])
    beats = [pb.HeartbeatRequest(worker_id=each) for each in ("a", "stranger", "b", "c")]
    request = pb.HeartbeatBatchRequest(heartbeats=beats)

    async def told() -> list[tuple[str, int, int]]:
        found = (await running.stub.HeartbeatBatch(request)).outcomes
        return [(each.worker_id, each.status_code, each.response.command) for each in found]

    quiet = [("a", 0, 0), ("stranger", 5, 0), ("b", 0, 0), ("c", 0, 0)]
    assert await told() == quiet
    assert await told() == quiet
    await running.stub.IssueCommand(order)
    assert await told() == [*quiet[:2], ("b", 0, pb.COMMAND_KIND_RELOAD), ("c", 0, 0)]
    # Without explicit acks the next beat acknowledges.
    assert await told() == quiet
    beats[0].status = pb.WORKER_STATUS_ERROR
    request = pb.HeartbeatBatchRequest(heartbeats=beats)
    assert (await told())[0] == ("a", 0, pb.COMMAND_KIND_STOP)


async def test_the_answer_to_a_batch_names_the_new_generation_once_there_is_one(running: Running) -> None:
    first = await register(running.stub, "a", "b")
    request = pb.HeartbeatBatchRequest(heartbeats=[pb.HeartbeatRequest(worker_id="a")])
    assert (await running.stub.HeartbeatBatch(request)).outcomes[0].response.generation == first.generation
    # As many workers as before: nothing but the generation tells the two apart.
    second = await patiently(running.stub.RegisterWorker, pb.WorkerInfo(worker_id="b", incarnation="b-2"))
    assert second.generation > first.generation
    assert (await running.stub.HeartbeatBatch(request)).outcomes[0].response.generation == second.generation


@pytest.mark.parametrize("batch", [64])
async def test_heartbeats_in_batches(running: Running, batch: int) -> None:
    ids = [f"w{number}" for number in range(batch)]
    await register(running.stub, *ids)
    usage = pb.ResourceUsage(cpu_percent=50, memory_used_bytes=1 << 30, gpu_metrics=[pb.GpuMetrics(index=0)])
    request = pb.HeartbeatBatchRequest(
        heartbeats=[
            pb.HeartbeatRequest(worker_id=each, status=pb.WORKER_STATUS_TRAINING, step=3, resources=usage)
            for each in ids
        ]
    )
    request.heartbeats.add(worker_id="stranger")
    found = await running.stub.HeartbeatBatch(request)
    assert [each.status_code for each in found.outcomes] == [0] * batch + [5]
    assert found.outcomes[0].response.generation > 0
    total = 100_000
    began_s = time.monotonic()

    async def beat() -> None:
        for _ in range(total // batch // 4):
            await running.stub.HeartbeatBatch(request)

    await asyncio.gather(*(beat() for _ in range(4)))
    rate = total / (time.monotonic() - began_s)
    print(f"\n{rate:,.0f} beats/s in batches of {batch}, client and server in one process")
    assert rate > 2_000
    job = (await running.stub.GetJob(pb.GetJobRequest())).job
    assert (job.workers[0].step, job.workers[0].resources.cpu_percent) == (3, 50)
