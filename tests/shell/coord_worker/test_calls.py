"""The async worker against a coordinator in the same loop: acks, lost answers, commands, states."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import strata.coord.worker as strata
from strata.base.errors import StrataError
from strata.coord.pb import coordinator_pb2 as pb
from tests.shell.coord.running import Running, in_process
from tests.support.proxy import ChaosProxy

JOB = "default"


@asynccontextmanager
async def worker(running: Running, worker_id: str = "w", **given: Any) -> AsyncIterator[strata.AsyncWorker]:
    settings = {"address": running.address, "id": worker_id, "patience_s": 10, **given}
    async with strata.join_async(**settings) as found:
        yield found


def leases(running: Running, epoch: int = 0) -> dict[int, int]:
    """By open lease, how far it is acked."""
    leases = running.service.state.jobs[JOB].datasets["corpus"].epochs[epoch]
    return {lease.lease_id: lease.until for lease in leases.leases.values()}


async def seen(running: Running, wanted: Callable[[pb.JobState], bool]) -> None:
    async with asyncio.timeout(10):
        while not wanted((await running.stub.GetJob(pb.GetJobRequest())).job):
            await asyncio.sleep(0.01)


async def test_acks_are_held_back_between_taking_a_checkpoint_and_reporting_it() -> None:
    async with in_process() as running, worker(running) as found:
        await found.dataset("corpus", samples=100, shard_size=10)
        first = await found.next_shard("corpus", 0)
        assert first is not None
        first.progress(first.start + 4)
        capture = found.begin_checkpoint(1)
        first.done()
        second = await found.next_shard("corpus", 0)
        assert second is not None
        assert leases(running) == {first.lease_id: first.start, second.lease_id: second.start}
        reported = await found.report_checkpoint(capture, "mem://part", digest="sha256:0", size=1)
        assert reported.committed
        second.done()
        await found.next_shard("corpus", 0)
        assert first.lease_id not in leases(running)
        # Four samples of the first shard are in the checkpoint, and none of the second.
        manifest = await found.recover()
        assert manifest is not None
        assert (manifest.step, manifest.parts[0].uri) == (1, "mem://part")
        rest = {shard.start: shard.end async for shard in found.shards("corpus", 0)}
        assert rest[first.start + 4] == first.end
        assert sum(end - start for start, end in rest.items()) == 96


async def test_a_lease_whose_grant_got_lost_is_handed_out_again() -> None:
    async with in_process() as running:
        port = int(running.address.rpartition(":")[2])
        async with ChaosProxy("127.0.0.1", port) as proxy, worker(running, address=f"127.0.0.1:{proxy.port}") as found:
            await found.dataset("corpus", samples=100, shard_size=10)
            await anext(found.shards("corpus", 0))
            asking = asyncio.create_task(found.next_shard("corpus", 0))
            proxy.swallow_replies()
            async with asyncio.timeout(5):
                while len(leases(running)) < 2:
                    await asyncio.sleep(0.005)
            granted = set(leases(running))
            proxy.heal()
            shard = await asking
            assert shard is not None
            assert set(leases(running)) == granted
            assert shard.lease_id in granted


async def test_a_loop_that_breaks_off_gets_its_shard_again() -> None:
    async with in_process() as running, worker(running) as found:
        await found.dataset("corpus", samples=20, shard_size=10)
        first = await anext(found.shards("corpus", 0))
        first.progress(first.start + 3)
        rest = [(shard.start, shard.end) async for shard in found.shards("corpus", 0)]
        assert rest[0] == (first.start + 3, first.end)
        assert sum(end - start for start, end in rest) == 17
        assert list(found.epochs(2)) == [1]


async def test_leaving_acks_what_was_done() -> None:
    async with in_process() as running, worker(running, "stays", elastic=True) as stays:
        async with worker(running, "goes", elastic=True) as goes:
            await goes.dataset("corpus", samples=20, shard_size=10)
            shard = await goes.next_shard("corpus", 0)
            assert shard is not None
            shard.done()
        assert [(each.start, each.end) async for each in stays.shards("corpus", 0)] == [
            (start, start + 10) for start in (0, 10) if start != shard.start
        ]


@pytest.mark.proves(
    "Never again: a worker that was cancelled in the instant of a heartbeat hung at its end "
    "(`asyncio.wait_for` of Python 3.11)"
)
async def test_drain_ends_the_loop_and_is_acknowledged(tmp_path: Path) -> None:
    told: list[strata.Command] = []
    async with in_process() as running, worker(running, on_command=told.append, drained=tmp_path) as found:
        await found.dataset("corpus", samples=100, shard_size=10)
        read = 0
        async for _ in found.shards("corpus", 0):
            read += 1
            if read == 2:
                await running.stub.IssueCommand(pb.IssueCommandRequest(kind=pb.COMMAND_KIND_DRAIN, reason="upgrade"))
                await seen(running, lambda job: not job.commands)
                # A drain is acknowledged when it has arrived; the callback runs beside that, in a thread.
                async with asyncio.timeout(10):
                    while not told:
                        await asyncio.sleep(0.005)
        assert read == 2
        assert found.should_stop
        assert [(each.kind, each.reason) for each in told] == [(strata.CommandKind.DRAIN, "upgrade")]
        assert len(leases(running)) == 1
    assert running.service.telemetry.of(JOB).departed == {"w": "left"}
    assert [each.name for each in tmp_path.iterdir()] == [str(os.getpid())], "its launcher starts one worker fewer"


async def test_a_rebalance_gives_what_was_not_begun_to_a_worker_that_waits() -> None:
    async with (
        in_process() as running,
        worker(running, "slow", elastic=True) as slow,
        worker(running, "quick", elastic=True) as quick,
    ):
        await slow.dataset("corpus", samples=40, shard_size=10)
        begun = await slow.next_shard("corpus", 0, at_once=4)
        assert begun is not None
        waiting = asyncio.create_task(quick.next_shard("corpus", 0))
        await running.stub.IssueCommand(pb.IssueCommandRequest(kind=pb.COMMAND_KIND_REBALANCE))
        moved = []
        async with asyncio.timeout(10):
            for number in range(3):
                shard = await (waiting if number == 0 else quick.next_shard("corpus", 0))
                assert shard is not None
                moved.append(shard)
                shard.done()
        begun.done()
        await slow.flush()
        assert await quick.next_shard("corpus", 0) is None
        assert sorted(each.start for each in (begun, *moved)) == [0, 10, 20, 30]
        ledger = running.service.state.jobs[JOB].datasets["corpus"]
        assert (ledger.finished, ledger.quarantined) == ([0], {})


async def test_a_wanted_checkpoint_is_acknowledged_by_beginning_one() -> None:
    async with in_process() as running, worker(running) as found:
        await running.stub.IssueCommand(pb.IssueCommandRequest(kind=pb.COMMAND_KIND_CHECKPOINT_NOW))
        async with asyncio.timeout(5):
            while not await found.checkpoint_due():
                await asyncio.sleep(0.005)
        found.begin_checkpoint(1)
        assert not await found.checkpoint_due()


async def test_heartbeats_tell_what_the_worker_does_and_uses() -> None:
    job = strata_job(heartbeat_interval_s=0.2)
    async with in_process(job) as running, worker(running) as found:
        await seen(running, lambda job: job.workers[0].status == pb.WORKER_STATUS_IDLE)
        found.step(7)
        found.step(8)
        await seen(running, lambda job: (job.workers[0].status, job.workers[0].step) == (pb.WORKER_STATUS_TRAINING, 8))
        found.begin_checkpoint(8)
        await seen(running, lambda job: job.workers[0].status == pb.WORKER_STATUS_CHECKPOINTING)
        shown = (await running.stub.GetJob(pb.GetJobRequest())).job.workers[0]
        assert shown.resources.memory_used_bytes > 1 << 20
        assert shown.step_time_ms > 0
        assert shown.sdk_version.startswith("strata-python/")


async def test_a_failed_body_counts_as_a_lost_worker_and_acks_nothing() -> None:
    async def fail(running: Running) -> None:
        async with worker(running) as found:
            await found.dataset("corpus", samples=20, shard_size=10)
            (await anext(found.shards("corpus", 0))).done()
            raise ZeroDivisionError

    async with in_process() as running:
        with pytest.raises(ZeroDivisionError):
            await fail(running)
        job = (await running.stub.GetJob(pb.GetJobRequest())).job
        assert [(each.worker_id, each.liveness) for each in job.workers] == [("w", pb.LIVENESS_LOST)]
        assert job.datasets[0].open_epochs[0].done_shards == 0


async def test_a_second_incarnation_of_a_worker_id_ends_the_first() -> None:
    async with in_process() as running, worker(running, elastic=True) as old, worker(running, elastic=True):
        with pytest.raises(strata.StrataError) as caught:
            await old.barrier("here")
        assert strata.reason_of(caught.value) is strata.Reason.REPLACED


async def test_an_unknown_dataset_is_not_an_eviction() -> None:
    async with in_process() as running, worker(running) as found:
        with pytest.raises(strata.StrataError) as caught:
            await found.next_shard("nothing", 0)
        assert caught.value.code is strata.Code.NOT_FOUND
        await found.barrier("still here")


async def test_a_dataset_is_defined_while_others_still_join() -> None:
    async with in_process() as running, worker(running) as found, worker(running, "other", elastic=True):
        async with asyncio.timeout(10):
            while not found.is_stale:
                await asyncio.sleep(0.01)
        assert await found.dataset("corpus", samples=100, shard_size=10) == 10
        with pytest.raises(StrataError) as caught:
            await found.next_shard("corpus", 0)
        assert strata.reason_of(caught.value) is strata.Reason.MEMBERSHIP_CHANGED


async def test_deterministic_shards_belong_to_a_step() -> None:
    async with in_process() as running, worker(running) as found:
        await found.dataset(
            "corpus", samples=60, shard_size=10, options=strata.DatasetOptions(global_batch_shards=2, shuffle=False)
        )
        read = [[shard.start for shard in await found.step_shards("corpus", step)] for step in range(4)]
        assert read == [[0, 10], [20, 30], [40, 50], [0, 10]]


def strata_job(**given: Any) -> Any:
    from strata.coord.core.job_config import JobConfig

    return JobConfig(settle_s=0.05, **given)


async def test_who_was_told_to_stop_and_was_evicted_does_not_come_back_by_itself() -> None:
    job = strata_job(heartbeat_interval_s=0.2)
    async with in_process(job) as running, worker(running, rejoin=True) as found:
        await running.stub.IssueCommand(pb.IssueCommandRequest(kind=pb.COMMAND_KIND_STOP))
        await seen(running, lambda job: not job.commands)
        failed = pb.HeartbeatRequest(
            worker_id="w", incarnation=found.incarnation, generation=1, status=pb.WORKER_STATUS_ERROR
        )
        await running.stub.Heartbeat(failed)
        with pytest.raises(StrataError) as refused:
            async with asyncio.timeout(10):
                await found.barrier("never")
        assert refused.value.detail["reason"] == "evicted"
        assert running.service.telemetry.of(JOB).departed.keys() == {"w"}


def test_the_blocking_worker_has_every_name_of_the_async_one_with_its_words() -> None:
    names = {name for name in dir(strata.AsyncWorker) if not name.startswith("_")}
    assert {name for name in dir(strata.Worker) if not name.startswith("_")} == names
    for name in names - {"run", "shards", "busy"}:
        blocking = vars(strata.Worker)[name]
        assert blocking.__doc__ == getattr(strata.AsyncWorker, name).__doc__, name


def test_a_worker_that_is_not_joined_says_so() -> None:
    worker = strata.join()
    for use in (lambda: worker.rank, worker.members, worker.commands, lambda: worker.restart("corpus", 0)):
        with pytest.raises(StrataError, match="the worker is not joined"):
            use()
