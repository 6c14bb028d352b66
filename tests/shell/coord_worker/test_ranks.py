"""Workers with ranks of a launcher: the coordinator's are the same, or the worker does not join."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import strata.coord.worker as strata
from strata.base.errors import Code, StrataError
from strata.coord.core.facts import GangStatus
from strata.coord.core.job_config import JobConfig
from strata.coord.pb import coordinator_pb2 as pb
from tests.shell.coord.running import Running, in_process
from tests.shell.coord_worker.test_calls import strata_job, worker
from tests.shell.coord_worker.test_start import checkpointed


async def together(running: Running, ranks: int) -> list[strata.AsyncWorker]:
    """The last one first: the order of joining must not matter."""
    found = [
        strata.join_async(address=running.address, id=f"r{rank}", rank=rank, wait_for=ranks, ip="10.0.0.1", port=rank)
        for rank in range(ranks)
    ]
    joining = []
    for each in reversed(found):
        joining.append(asyncio.create_task(each.__aenter__()))
        await asyncio.sleep(0)
    await asyncio.gather(*joining)
    return found


async def test_ranks_are_those_of_the_launcher_and_members_know_each_others_address() -> None:
    async with in_process() as running:
        found = await together(running, 3)
        assert [(each.rank, each.world_size) for each in found] == [(0, 3), (1, 3), (2, 3)]
        assert len({each.generation for each in found}) == 1
        members = await found[0].members()
        assert [(each.worker_id, each.rank, each.ip, each.port) for each in members] == [
            (f"r{rank}", rank, "10.0.0.1", rank) for rank in range(3)
        ]
        for each in found:
            await each.__aexit__(None, None, None)


async def test_ranks_that_were_started_again_start_in_one_generation_from_one_checkpoint(tmp_path: Path) -> None:
    async with in_process() as running, worker(running, "r1") as before:
        await checkpointed(before, tmp_path)
        # An incarnation that is not known as dead yet.
        found = await together(running, 2)
        assert len({each.generation for each in found}) == 1
        starts = [each.start for each in found]
        assert [start and start.step for start in starts] == [1, 1]
        assert not any(each.is_stale for each in found)
        for each in found:
            await each.__aexit__(None, None, None)
        with pytest.raises(StrataError):
            await before.flush()


async def test_a_rank_that_learns_of_the_last_commit_after_the_others_have_left_is_done_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The next generation has formed, without the rank that left, when the other one looks again.
    monkeypatch.setattr("strata.coord.worker.checkpoints.COMMIT_POLL_S", (1.0, 1.0))
    part = tmp_path / "part"
    part.write_bytes(b"state")
    async with in_process() as running:
        found = await together(running, 2)
        for each in found:
            await each.dataset("corpus", samples=20, shard_size=10)
            shard = await each.next_shard("corpus", 0)
            assert shard is not None
            shard.done()
        late = asyncio.create_task(found[1].checkpoint(3, part))
        async with asyncio.timeout(10):
            while not running.service.state.jobs["default"].collecting:
                await asyncio.sleep(0.01)
        assert (await found[0].checkpoint(3, part)).committed
        await found[0].__aexit__(None, None, None)
        async with asyncio.timeout(10):
            while running.service.state.jobs["default"].generation < 2 or not found[1].is_stale:
                await asyncio.sleep(0.01)
        assert (await late).committed
        with pytest.raises(StrataError) as stale:
            found[1].step(4)
        assert strata.reason_of(stale.value) is strata.Reason.MEMBERSHIP_CHANGED
        await found[1].__aexit__(None, None, None)
        assert running.service.state.jobs["default"].status is GangStatus.FINISHED


async def test_all_ranks_end_well_after_the_last_commit_whatever_the_order_in_which_they_learn_of_it(
    tmp_path: Path,
) -> None:
    ranks = 6
    part = tmp_path / "part"
    part.write_bytes(b"state")
    async with in_process(JobConfig()) as running:
        found = await together(running, ranks)
        for each in found:
            await each.dataset("corpus", samples=10 * ranks, shard_size=10)
            shard = await each.next_shard("corpus", 0)
            assert shard is not None
            shard.done()

        async def finish(rank: int) -> None:
            # They look again at different times, and every rank that leaves lets the others settle again.
            await asyncio.sleep(0.08 * rank)
            assert (await found[rank].checkpoint(3, part)).committed
            await found[rank].__aexit__(None, None, None)

        await asyncio.gather(*map(finish, reversed(range(ranks))))
        assert running.service.state.jobs["default"].status is GangStatus.FINISHED


async def test_an_elastic_worker_that_lost_a_lease_meanwhile_commits_nothing_of_it(tmp_path: Path) -> None:
    part = tmp_path / "part"
    part.write_bytes(b"state")
    async with (
        in_process() as running,
        worker(running, "a", elastic=True) as steady,
        worker(running, "b", elastic=True, wait_for=2) as rewound,
    ):
        for each in (steady, rewound):
            await each.dataset("corpus", samples=40, shard_size=10)
        shard = await rewound.next_shard("corpus", 0)
        assert shard is not None
        shard.done()
        capture = rewound.begin_checkpoint(3)
        await steady.recover()
        with pytest.raises(StrataError) as refused:
            await rewound.report_checkpoint(capture, part)
        assert strata.reason_of(refused.value) is strata.Reason.LEASE_LOST
        rewound.give_up_checkpoint(capture)
        await rewound.recover()
        assert running.service.state.jobs["default"].checkpoints == []


async def test_a_worker_that_was_evicted_while_it_wrote_its_part_commits_nothing_of_it(tmp_path: Path) -> None:
    part = tmp_path / "part"
    part.write_bytes(b"state")
    quick = strata_job(heartbeat_interval_s=0.2)
    async with in_process(quick) as running, worker(running, rejoin=True, elastic=True) as found:
        await found.dataset("corpus", samples=20, shard_size=10)
        shard = await found.next_shard("corpus", 0)
        assert shard is not None
        shard.done()
        capture, before = found.begin_checkpoint(3), found.incarnation
        failed = pb.HeartbeatRequest(
            worker_id="w", incarnation=before, generation=found.generation, status=pb.WORKER_STATUS_ERROR
        )
        await running.stub.Heartbeat(failed)
        async with asyncio.timeout(20):
            while found.incarnation == before or found.generation < 2:
                await asyncio.sleep(0.01)
        with pytest.raises(StrataError) as refused:
            await found.report_checkpoint(capture, part)
        assert strata.reason_of(refused.value) is strata.Reason.LEASE_LOST
        assert running.service.state.jobs["default"].checkpoints == []


async def test_a_worker_whose_rank_is_taken_by_others_says_so_and_does_not_join() -> None:
    async with in_process() as running, worker(running, "other"):
        with pytest.raises(StrataError, match="rank 0 of 2 workers in the generation is not rank 0 of 1") as refused:
            async with worker(running, "r0", rank=0, wait_for=1, patience_s=0.5):
                pass
        assert strata.reason_of(refused.value) is strata.Reason.RANK_DIFFERS


def test_under_torchrun_the_rank_and_the_number_of_workers_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"STRATA_WORKER_TORCHRUN": "yes", "RANK": "3", "WORLD_SIZE": "8"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    found = strata._settings({})
    assert (found.id, found.rank, found.wait_for) == ("rank-3", 3, 8)
    monkeypatch.delenv("STRATA_WORKER_TORCHRUN")
    assert strata._settings({}).rank is None


def test_a_rank_without_the_number_of_workers_is_refused() -> None:
    with pytest.raises(StrataError, match="there is no rank 2 of 0") as refused:
        strata.join_async(rank=2)
    assert refused.value.code is Code.INVALID
