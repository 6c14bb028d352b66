"""Who takes part: joining, fencing, eviction, leaving, commands; and what each SDK makes of them."""

from __future__ import annotations

import asyncio
import signal
import time

import pytest

from strata.coord.pb import coordinator_pb2 as pb
from tests.conformance.coordinator.fleet import MARKS, Fleet, consume, finish, next_shard, samples

pytestmark = MARKS


async def test_joining_gives_a_place_and_the_parameters_of_the_job(fleet: Fleet, sdk: str) -> None:
    driver = await fleet.start(sdk)
    found = await driver.ask("join", job=fleet.job, worker_id="w")
    assert (found["job"], found["worker_id"]) == (fleet.job, "w")
    assert (found["rank"], found["world_size"], found["generation"]) == (0, 1, 1)
    assert found["parameters"] == {"learning_rate": "0.1", "name": "größer"}
    assert found["incarnation"]
    job = await fleet.until(lambda job: job.workers[0].attached)
    assert job.workers[0].liveness == pb.LIVENESS_ALIVE
    assert job.workers[0].sdk_version.startswith(f"strata-{sdk}/")
    assert job.workers[0].resources.memory_used_bytes > 1 << 20


async def test_two_workers_get_two_ranks_of_one_generation(fleet: Fleet, pair: tuple[str, str]) -> None:
    first, second = [await driver.ask("state") for driver in await fleet.join_all(*pair)]
    assert {first["rank"], second["rank"]} == {0, 1}
    assert first["world_size"] == second["world_size"] == 2
    assert first["generation"] == second["generation"]


async def test_a_new_member_is_raised_where_the_job_is_not_elastic(fleet: Fleet, pair: tuple[str, str]) -> None:
    old = await fleet.join(pair[0], "old")
    new = await fleet.join(pair[1], "new")
    generation = (await new.ask("state"))["generation"]
    error = await old.refused("barrier", barrier_id="here")
    assert (error.code, error.reason) == ("FAILED_PRECONDITION", "stale-generation")
    assert error.detail["generation"] == generation
    assert (await old.ask("follow"))["generation"] == generation
    await asyncio.gather(*(driver.ask("barrier", barrier_id="here") for driver in (old, new)))


async def test_an_elastic_worker_goes_on_when_somebody_joins(fleet: Fleet, pair: tuple[str, str]) -> None:
    old = await fleet.join(pair[0], "old", elastic=True)
    await old.ask("dataset", dataset_id="corpus", samples=40, shard_size=10)
    held = await next_shard(old)
    new = await fleet.join(pair[1], "new", elastic=True)
    await finish(old, held)
    read = await asyncio.gather(consume(old), consume(new))
    assert samples([held, *read[0], *read[1]]) == list(range(40))
    await asyncio.gather(*(driver.ask("barrier", barrier_id="end") for driver in (old, new)))
    assert (await old.ask("state"))["world_size"] == 2


async def test_a_second_life_of_a_worker_ends_the_first(fleet: Fleet, pair: tuple[str, str]) -> None:
    old = await fleet.join(pair[0], "w", elastic=True)
    new = await fleet.join(pair[1], "w", elastic=True)
    error = await old.refused("barrier", barrier_id="here")
    assert (error.code, error.reason) == ("FAILED_PRECONDITION", "stale-incarnation")
    await new.ask("barrier", barrier_id="here")


async def test_a_worker_taken_for_dead_changes_nothing_when_it_wakes_up(fleet: Fleet, pair: tuple[str, str]) -> None:
    frozen, other = await fleet.join_all(*pair, elastic=True)
    await other.ask("dataset", dataset_id="corpus", samples=40, shard_size=10)
    held = await next_shard(frozen)
    await finish(frozen, held)
    frozen.signal(signal.SIGSTOP)
    await fleet.lost("w0")
    # Everything is read by the other one, also what the frozen one has read and not acked.
    assert samples(await consume(other)) == list(range(40))
    frozen.signal(signal.SIGCONT)
    error = await frozen.refused("flush")
    assert (error.code, error.reason) == ("FAILED_PRECONDITION", "evicted")
    # Nothing is left to ack by now, and that is no success.
    assert (await frozen.refused("flush")).reason == "evicted"
    assert (await frozen.refused("next_shard", dataset_id="corpus", epoch=1)).reason == "evicted"


async def test_leaving_acks_what_was_done_and_gives_the_rest_to_others(fleet: Fleet, pair: tuple[str, str]) -> None:
    goes, stays = await fleet.join_all(*pair, elastic=True)
    await goes.ask("dataset", dataset_id="corpus", samples=40, shard_size=10)
    done, begun = await next_shard(goes), await next_shard(goes)
    await finish(goes, done)
    await goes.ask("progress", lease_id=begun["lease_id"], until=begun["start"] + 4)
    await goes.ask("leave")
    read = samples(await consume(stays))
    consumed = [*range(done["start"], done["end"]), *range(begun["start"], begun["start"] + 4)]
    assert sorted(read + consumed) == list(range(40))
    job = await fleet.until(lambda job: job.world_size == 1)
    assert [each.liveness for each in job.workers if each.worker_id == "w0"] == [pb.LIVENESS_LEFT]
    assert not job.incidents


async def test_a_loop_that_failed_is_a_lost_worker(fleet: Fleet, pair: tuple[str, str]) -> None:
    fails, stays = await fleet.join_all(*pair, elastic=True)
    await fails.ask("dataset", dataset_id="corpus", samples=40, shard_size=10)
    await next_shard(fails)
    await fails.ask("crash")
    await fleet.lost("w0")
    assert samples(await consume(stays)) == list(range(40))


async def test_stop_ends_the_data_and_is_acknowledged(fleet: Fleet, sdk: str) -> None:
    driver = await fleet.join(sdk, "w")
    await driver.ask("dataset", dataset_id="corpus", samples=40, shard_size=10)
    await next_shard(driver)
    await fleet.tell(pb.COMMAND_KIND_STOP, "w")
    await fleet.until(lambda job: not job.commands)
    assert (await driver.ask("state"))["should_stop"]
    assert (await driver.ask("next_shard", dataset_id="corpus", epoch=0))["shard"] is None


async def test_drain_finishes_what_is_held_and_takes_nothing_new(fleet: Fleet, sdk: str) -> None:
    driver = await fleet.join(sdk, "w")
    await driver.ask("dataset", dataset_id="corpus", samples=40, shard_size=10)
    first = (await driver.ask("next_shard", dataset_id="corpus", epoch=0, at_once=2))["shard"]
    await fleet.tell(pb.COMMAND_KIND_DRAIN, "w")
    await fleet.until(lambda job: not job.commands)
    second = await next_shard(driver)
    assert second["lease_id"] != first["lease_id"]
    assert (await driver.ask("next_shard", dataset_id="corpus", epoch=0))["shard"] is None


async def test_a_wanted_checkpoint_waits_for_the_loop_and_is_acknowledged_by_it(fleet: Fleet, sdk: str) -> None:
    driver = await fleet.join(sdk, "w")
    await fleet.tell(pb.COMMAND_KIND_RELOAD, "w")
    await fleet.tell(pb.COMMAND_KIND_CHECKPOINT_NOW, "w")
    async with asyncio.timeout(10):
        while not (await driver.ask("checkpoint_due"))["due"]:
            pass
    job = (await fleet.stub.GetJob(pb.GetJobRequest(job_id=fleet.job))).job
    assert len(job.commands) == 2
    await driver.ask("begin_checkpoint", step=1)
    assert [each["kind"] for each in (await driver.ask("commands"))["commands"]] == [pb.COMMAND_KIND_RELOAD]
    await fleet.until(lambda job: not job.commands)


async def test_what_the_worker_does_is_seen(fleet: Fleet, sdk: str) -> None:
    driver = await fleet.join(sdk, "w")
    for number in (7, 8):
        await driver.ask("step", number=number, compute_s=0.25)
    job = await fleet.until(lambda job: job.workers[0].step == 8)
    assert job.workers[0].compute_time_ms == pytest.approx(250)
    assert job.workers[0].status == pb.WORKER_STATUS_TRAINING
    assert job.workers[0].step_time_ms > 0
    await driver.ask("begin_checkpoint", step=8)
    await fleet.until(lambda job: job.workers[0].status == pb.WORKER_STATUS_CHECKPOINTING)


async def test_a_phase_without_steps_is_announced_and_is_no_part_of_the_next_step(fleet: Fleet, sdk: str) -> None:
    driver = await fleet.join(sdk, "w")
    await driver.ask("step", number=1)
    began_s = time.monotonic()
    await driver.ask("step", number=2)
    await fleet.until(lambda job: (job.workers[0].step, job.workers[0].status) == (2, pb.WORKER_STATUS_TRAINING))
    await driver.ask("busy", on=True)
    busy_s = time.monotonic()
    await fleet.until(lambda job: job.workers[0].status == pb.WORKER_STATUS_IDLE)
    # A phase that takes longer than the calls around it.
    await asyncio.sleep(1.0)
    busy_s = time.monotonic() - busy_s
    await driver.ask("busy", on=False)
    await driver.ask("step", number=3)
    took_s = time.monotonic() - began_s
    job = await fleet.until(lambda job: job.workers[0].step == 3)
    assert job.workers[0].status == pb.WORKER_STATUS_TRAINING
    assert job.workers[0].step_time_ms / 1000 <= took_s - busy_s + 0.001
