"""A checkpoint that an operator wants is of one step, whatever the languages of the ranks; so is a drain."""

from __future__ import annotations

import asyncio

from strata.coord.pb import coordinator_pb2 as pb
from tests.conformance.coordinator.drivers import Answer, Driver
from tests.conformance.coordinator.fleet import MARKS, Fleet

pytestmark = MARKS
STEPS = (3, 7)


async def not_in_step(fleet: Fleet, pair: tuple[str, str]) -> list[Driver]:
    """Two workers that have finished different steps, as the coordinator knows."""
    workers = await fleet.join_all(*pair)
    for worker, step in zip(workers, STEPS, strict=True):
        assert not (await worker.ask("checkpoint_due"))["due"]
        await worker.ask("step", number=step)
    await fleet.until(lambda job: sorted(each.step for each in job.workers) == list(STEPS))
    return workers


async def go_on(worker: Driver, step: int, stride: int = 1) -> int:
    """To the step of which a checkpoint is due."""
    while True:
        step += stride
        await worker.ask("step", number=step)
        if (await worker.ask("checkpoint_due"))["due"]:
            return step


async def written(fleet: Fleet, workers: list[Driver], step: int) -> list[Answer]:
    """What each is told when both have reported."""
    for number, worker in enumerate(workers):
        (fleet.folder / f"{number}.bin").write_bytes(b"state")
        await worker.ask("begin_checkpoint", step=step)
    for number, worker in enumerate(workers):
        await worker.ask("report_checkpoint", path=f"{number}.bin")
    return [await worker.ask("report_checkpoint", path=f"{number}.bin") for number, worker in enumerate(workers)]


async def test_ranks_that_are_not_in_step_write_one_checkpoint_of_one_step(fleet: Fleet, pair: tuple[str, str]) -> None:
    workers = await not_in_step(fleet, pair)
    request = pb.IssueCommandRequest(job_id=fleet.job, kind=pb.COMMAND_KIND_CHECKPOINT_NOW)
    issued = await fleet.stub.IssueCommand(request)
    first, second = await asyncio.gather(*map(go_on, workers, STEPS))
    assert first == second
    assert all(each["committed"] and not each["drained"] for each in await written(fleet, workers, first))
    job = (await fleet.stub.GetJob(pb.GetJobRequest(job_id=fleet.job))).job
    (committed,) = job.checkpoints
    assert (committed.manifest.step, committed.command_id) == (first, issued.command_id)
    await workers[0].ask("step", number=first + 1)
    assert not (await workers[0].ask("checkpoint_due"))["due"]


async def test_ranks_that_report_every_seventh_step_write_a_checkpoint_of_such_a_step(
    fleet: Fleet, pair: tuple[str, str]
) -> None:
    workers = await fleet.join_all(*pair)
    for worker in workers:
        for step in (7, 14):
            await worker.ask("step", number=step)
            assert not (await worker.ask("checkpoint_due"))["due"]
    await fleet.until(lambda job: [each.step for each in job.workers] == [14, 14])
    await fleet.tell(pb.COMMAND_KIND_CHECKPOINT_NOW)
    first, second = await asyncio.gather(*(go_on(worker, 14, 7) for worker in workers))
    assert first == second
    assert first % 7 == 0
    assert all(each["committed"] for each in await written(fleet, workers, first))


async def test_ranks_that_share_no_step_are_refused_and_wait_for_nobody(fleet: Fleet, pair: tuple[str, str]) -> None:
    workers = await fleet.join_all(*pair)
    for number, worker in enumerate(workers):
        for step in (number, number + 2):
            await worker.ask("step", number=step)
            await worker.ask("checkpoint_due")
    await fleet.until(lambda job: sorted(each.step for each in job.workers) == [2, 3])
    request = pb.IssueCommandRequest(job_id=fleet.job, kind=pb.COMMAND_KIND_CHECKPOINT_NOW)
    issued = await fleet.stub.IssueCommand(request)
    job = await fleet.until(lambda job: len(job.refused_commands) == 1, within_s=60)
    (refused,) = job.refused_commands
    assert refused.command_id == issued.command_id
    assert "asks for checkpoints after every 2 steps" in refused.reason
    assert "w0" in refused.reason
    assert "w1" in refused.reason
    for worker, step in zip(workers, (4, 5), strict=True):
        await worker.ask("step", number=step)
        assert not (await worker.ask("checkpoint_due"))["due"]


async def test_a_drained_rank_leaves_with_a_checkpoint_and_the_other_goes_on(
    fleet: Fleet, pair: tuple[str, str]
) -> None:
    workers = await not_in_step(fleet, pair)
    stays, goes = workers
    await fleet.tell(pb.COMMAND_KIND_DRAIN, "w1")
    step, _ = await asyncio.gather(*map(go_on, workers, STEPS))
    assert not (await goes.ask("state"))["should_stop"], "before the checkpoint it would break off the step of all"
    replies = await written(fleet, workers, step)
    assert [(each["committed"], each["drained"]) for each in replies] == [(True, False), (True, True)]
    assert (await goes.ask("state"))["should_stop"]
    assert (await stays.refused("step", number=step + 1)).reason == "stale-generation"
    await goes.ask("leave")
    recovered = await stays.ask("recover")
    assert (recovered["world_size"], recovered["checkpoint"]["step"]) == (1, step)
