"""Snapshots of the models: ranks that start anew begin there, and what came long before is let go."""

from __future__ import annotations

import array
import asyncio
from pathlib import Path
from typing import Final

import pytest

from strata.base.clock import SystemClock
from strata.journal.open import open_journal
from strata.journal.port import StreamStatus
from strata.journal.replay import replay
from strata.train.core import facts, ops
from strata.train.core.sampling import SampleOperation, SampleParams, decode_result
from strata.train.status import queries, views
from tests.shell.train_orchestrator.stacks import Stack, running
from tests.shell.train_orchestrator.test_failpoints import OF_SNAPSHOTS

pytestmark = pytest.mark.proves(
    "Ranks that were killed go on from the last snapshot with the same bits; a damaged snapshot is never restored"
)

OFTEN: Final = "every_dispatches = 3\npayload_grace_s = 1"
LARGE: Final = 8
"""So many datums of 3,000 tokens do not fit into the journal."""


async def train(stack: Stack, model: str, first: int, last: int, large: int = 0) -> list[ops.Result]:
    """Operations with these numbers, one after the other. The last one leaves a gradient behind if it is odd."""
    results = []
    for seq in range(first, last + 1):
        operation = large_batch(stack, model, seq, large) if seq % 2 else stack.step(model, seq)
        results.append(await stack.result(await stack.submit(operation)))
    return results


async def journal(stack: Stack) -> tuple[StreamStatus, list[facts.Fact]]:
    async with await open_journal(stack.settings.database, SystemClock()) as found:
        (status,) = await found.streams()
        return status, [
            facts.decode(one) async for batch in replay(found, status.stream, status.floor) for one in batch.facts
        ]


async def snapshot_after(stack: Stack, number: int) -> int:
    """The number of the first snapshot after that dispatch, once it is there."""
    async with asyncio.timeout(30):
        while (view := await stack.look(views.ServerView, queries.DescribeServer())).snapshot <= number:
            pass
    return view.snapshot


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> list[ops.Result]:
    """What comes of it when nobody dies and nothing is written."""
    off = "every_dispatches = 0\nevery_s = 0\nevery_payload_mb = 0\nevery_replay_s = 0"

    async def undisturbed() -> list[ops.Result]:
        async with running(tmp_path_factory.mktemp("calm"), snapshots=off) as stack:
            return await train(stack, await stack.model(), 1, 14)

    return asyncio.run(undisturbed())


async def test_ranks_that_start_anew_restore_the_newest_snapshot_and_are_told_only_what_came_after(
    tmp_path: Path, calm: list[ops.Result]
) -> None:
    async with running(tmp_path, snapshots="every_dispatches = 4") as stack:
        model = await stack.model()
        # Creation and three operations: the snapshot holds a gradient that no step has used yet.
        found = await train(stack, model, 1, 3)
        snapshot = await snapshot_after(stack, 0)
        found += await train(stack, model, 4, 5)
        await stack.ranks.kill()
        before = len(stack.applied())
        await stack.start_ranks()
        found += await train(stack, model, 6, 8)
        assert [each for _, each in stack.applied()[before:]] == [
            f"restored:{snapshot}",
            *(f"{model}:{seq}" for seq in range(4, 9)),
        ]
        assert found == calm[: len(found)]


def damage(stack: Stack, number: int) -> None:
    (file,) = stack.settings.snapshot_folder.glob(f"{number:012d}-*/*")
    file.write_bytes(file.read_bytes().replace(b"weight", b"wright", 1))


async def test_a_damaged_snapshot_is_never_restored_and_the_one_before_it_is(
    tmp_path: Path, calm: list[ops.Result]
) -> None:
    async with running(tmp_path, snapshots=OFTEN) as stack:
        model = await stack.model()
        found = await train(stack, model, 1, 2)
        first = await snapshot_after(stack, 0)
        found += await train(stack, model, 3, 5)
        second = await snapshot_after(stack, first)
        found += await train(stack, model, 6, 7)
        damage(stack, second)
        await stack.ranks.kill()
        before = len(stack.applied())
        await stack.start_ranks()
        found += await train(stack, model, 8, 11)
        assert found == calm[: len(found)]
        told = [each for _, each in stack.applied()[before:]]
        assert told == [f"restored:{first}", *(f"{model}:{seq}" for seq in range(3, 12))]


async def test_with_no_snapshot_left_and_all_history_there_the_ranks_begin_at_the_beginning(tmp_path: Path) -> None:
    async with running(tmp_path, snapshots=OFTEN) as stack:
        model = await stack.model()
        before = await train(stack, model, 1, 2)
        damage(stack, await snapshot_after(stack, 0))
        await stack.ranks.kill()
        known = len(stack.applied())
        await stack.start_ranks()
        await train(stack, model, 3, 3)
        told = [each for _, each in stack.applied()[known:]]
        assert told == [f"{model}:CreateModel", *(f"{model}:{seq}" for seq in range(1, 4))]
        assert all(not isinstance(each, ops.Failed) for each in before)


async def test_with_no_snapshot_left_and_history_let_go_nothing_is_trained_and_a_repaired_one_is_taken(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, snapshots=OFTEN) as stack:
        model = await stack.model()
        await train(stack, model, 1, 2)
        first = await snapshot_after(stack, 0)
        await train(stack, model, 3, 5)
        second = await snapshot_after(stack, first)
        files = [*stack.settings.snapshot_folder.glob("*/*")]
        assert len(files) == 2
        kept = {file: file.read_bytes() for file in files}
        for file in files:
            file.write_bytes(b"{}")
        await stack.ranks.kill()
        await stack.start_ranks()
        assert await stack.orchestrator.end() == 1
        for file, data in kept.items():
            file.write_bytes(data)
        known = len(stack.applied())
        await stack.start_orchestrator()
        stepped = (await train(stack, model, 6, 6))[-1]
        assert isinstance(stepped, ops.StepDone)
        assert stepped.metrics["step"] == 3
        # The newer one was given up when there was still another; the last one never is.
        assert stack.applied()[known][1] == f"restored:{first}"
        assert second > first


async def test_payloads_and_facts_that_a_snapshot_covers_go_and_what_is_still_needed_stays(tmp_path: Path) -> None:
    async with running(tmp_path, snapshots=OFTEN) as stack:
        model = await stack.model()
        # Held by a gap all the time: its payload and the operation itself outlive every snapshot.
        held = await stack.submit(stack.batch(model, 14, [[1] * 3000] * LARGE))
        taken = 0
        for first in (1, 5, 9):
            await train(stack, model, first, first + 3, LARGE)
            taken = await snapshot_after(stack, taken)
        covered = {payload_of(stack, model, seq) for seq in (1, 3, 5)}
        async with asyncio.timeout(30):
            while covered & payloads(stack):
                await stack.look(views.ServerView, queries.DescribeServer())
        assert len([*stack.settings.snapshot_folder.iterdir()]) <= 3
        await stack.ranks.kill()
        known = len(stack.applied())
        await stack.start_ranks()
        await train(stack, model, 13, 13)
        assert isinstance(await stack.result(held), ops.PassDone)
        told = [each for _, each in stack.applied()[known:]]
        assert told[0].startswith("restored:")
        assert len(told) < 8
        assert await stack.orchestrator.stop() == 0
        status, left = await journal(stack)
        assert status.floor > 0
        assert len([fact for fact in left if isinstance(fact, facts.Dispatched)]) < 14
        # What is left is enough for another orchestrator and another group.
        await stack.ranks.kill()
        await stack.start_ranks()
        await stack.start_orchestrator()
        assert isinstance((await train(stack, model, 15, 16))[-1], ops.StepDone)


def payloads(stack: Stack) -> set[str]:
    return {file.name for file in stack.settings.payloads.rglob("*") if file.is_file()}


def payload_of(stack: Stack, model: str, seq: int) -> str:
    """The digest of what `train` sends; asking for it stores it once more."""
    operation = large_batch(stack, model, seq)
    assert isinstance(operation.payload, ops.StoredPayload)
    return operation.payload.sha256


def large_batch(stack: Stack, model: str, seq: int, large: int = LARGE) -> ops.ForwardBackward:
    return stack.batch(model, seq, [[seq, 2, 3], [4, 5], *([[seq] * 3000] * large)])


async def test_samplers_in_memory_live_on_when_the_ranks_start_anew_from_a_snapshot(tmp_path: Path) -> None:
    async with running(tmp_path, snapshots="every_dispatches = 4") as stack:
        model = await stack.model()
        await train(stack, model, 1, 2)
        session = model.partition(":")[0]
        sampler = f"{session}:sample:0"
        assert await stack.result(await stack.submit(ops.SaveSampler(model, 3, sampler))) == ops.SamplerOpened(sampler)
        before = await sample(stack, sampler, 0)
        await snapshot_after(stack, 0)
        await train(stack, model, 5, 4)
        await stack.ranks.kill()
        known = len(stack.applied())
        await stack.start_ranks()
        assert await sample(stack, sampler, 1) == before
        told = [each for _, each in stack.applied()[known:]]
        assert told[0].startswith("restored:")
        assert told[1:] == [f"{sampler}:1:added"]


async def sample(stack: Stack, sampler: str, seq: int) -> object:
    prompt = array.array("i", [1, 2, 3]).tobytes()
    params = SampleParams(max_tokens=4, seed=3, end_tokens=False)
    done = await stack.result(await stack.submit(SampleOperation(sampler, seq, prompt, params)))
    assert isinstance(done, ops.SampleDone)
    assert isinstance(done.payload, ops.InlinePayload)
    return decode_result(done.payload.data)


DEATHS: Final = (
    "pretended.snapshot.copied",
    "pretended.snapshot.before_name",
    "pretended.snapshot.before_told",
)


@pytest.mark.parametrize("place", DEATHS)
async def test_ranks_that_die_over_a_snapshot_leave_the_one_before_and_nothing_else(
    place: str, tmp_path: Path, calm: list[ops.Result]
) -> None:
    async with running(tmp_path, ranks=False, snapshots=OFTEN) as stack:
        await stack.start_ranks(die_at=place)
        model = await stack.model()
        training = asyncio.create_task(train(stack, model, 1, 6))
        await stack.ranks.end()
        await stack.start_ranks()
        assert await training == calm[:6]
        await snapshot_after(stack, 0)
        async with asyncio.timeout(30):
            while len([*stack.settings.snapshot_folder.iterdir()]) > 1:
                await stack.look(views.ServerView, queries.DescribeServer())


async def test_ranks_that_die_while_they_restore_are_followed_by_others_that_do(tmp_path: Path) -> None:
    async with running(tmp_path, snapshots=OFTEN) as stack:
        model = await stack.model()
        await train(stack, model, 1, 2)
        await snapshot_after(stack, 0)
        await stack.ranks.kill()
        await stack.start_ranks(die_at="pretended.snapshot.restore")
        await stack.ranks.end()
        await stack.start_ranks()
        stepped = (await train(stack, model, 3, 4))[-1]
        assert isinstance(stepped, ops.StepDone)
        assert stepped.metrics["step"] == 2


@pytest.mark.parametrize("place", [*sorted(OF_SNAPSHOTS), "journal.replica.between_snapshot_and_truncate"])
async def test_an_orchestrator_that_dies_over_a_snapshot_is_followed_by_one_that_finds_its_way(
    place: str, tmp_path: Path, calm: list[ops.Result]
) -> None:
    async with running(tmp_path, armed=(place, 0), snapshots="every_dispatches = 2\npayload_grace_s = 1") as stack:
        model = await stack.model()
        found = await train(stack, model, 1, 10)
        async with asyncio.timeout(30):
            while stack.deaths < 1:
                await stack.look(views.ServerView, queries.DescribeServer())
        await stack.ranks.kill()
        known = len(stack.applied())
        await stack.start_ranks()
        found += await train(stack, model, 11, 14)
        assert found == calm
        told = [each for _, each in stack.applied()[known:]]
        assert told[0].startswith("restored:")
        assert len(told) < 14
