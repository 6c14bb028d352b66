"""Processes die in the middle of operations: every future resolves, nothing is done twice, nothing is lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from strata.base.errors import Code
from strata.train.core import client_commands, ops
from strata.train.status import queries, views
from tests.shell.train_orchestrator.stacks import Stack, running

ONE_AT_A_TIME = "max_running_requests = 1"


async def train(stack: Stack, model: str, steps: int, first: int = 1, **config: float) -> list[str]:
    ids = []
    for step in range(steps):
        seq = first + 2 * step
        ids.append(await stack.submit(stack.batch(model, seq, [[seq, seq + 1], [3, 4, 5]], **config)))
        ids.append(await stack.submit(stack.step(model, seq + 1)))
    return ids


async def undisturbed(folder: Path, steps: int) -> list[ops.Result]:
    async with running(folder) as stack:
        model = await stack.model()
        return [await stack.result(each) for each in await train(stack, model, steps)]


async def test_an_orchestrator_that_is_killed_is_followed_by_one_that_finishes_what_it_began(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    expected = await undisturbed(tmp_path / "a", 4)
    async with running(tmp_path / "b") as stack:
        model = await stack.model()
        ids = await train(stack, model, 4, pretend_s=0.05)
        await stack.result(ids[1])
        await stack.orchestrator.kill()
        await stack.start_orchestrator()
        assert [await stack.result(each) for each in ids] == expected
        done = Counter(each for _, each in stack.applied())
        assert done == Counter({f"{model}:CreateModel": 1} | dict.fromkeys(ids, 1))


async def test_ranks_that_are_killed_are_followed_by_ranks_that_catch_up(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    expected = await undisturbed(tmp_path / "a", 4)
    async with running(tmp_path / "b") as stack:
        model = await stack.model()
        ids = await train(stack, model, 4, pretend_s=0.05)
        await stack.result(ids[3])
        await stack.ranks.kill()
        await stack.start_ranks()
        await stack.orchestrator.told("attached")
        assert [await stack.result(each) for each in ids] == expected
        groups = list(dict.fromkeys(group for group, _ in stack.applied()))
        assert len(groups) == 2
        last = [each for group, each in stack.applied() if group == groups[1]]
        assert last == [f"{model}:CreateModel", *ids]


async def test_both_may_die_at_once_and_an_unacknowledged_operation_can_be_sent_again(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    expected = await undisturbed(tmp_path / "a", 3)
    async with running(tmp_path / "b") as stack:
        model = await stack.model()
        ids = await train(stack, model, 3)
        await stack.result(ids[2])
        await asyncio.gather(stack.orchestrator.kill(), stack.ranks.kill())
        await stack.start_ranks()
        await stack.start_orchestrator()
        assert await train(stack, model, 3) == ids
        assert [await stack.result(each) for each in ids] == expected


async def test_questions_asked_while_nobody_leads_are_answered_by_the_next_one(tmp_path: Path) -> None:
    async with running(tmp_path) as stack:
        model = await stack.model()
        slow = await stack.submit(stack.batch(model, 1, [[1]], pretend_s=0.5))
        watching = asyncio.create_task(stack.look(views.FutureResult, queries.WatchFuture(slow, 30.0)))
        await stack.orchestrator.kill()
        submitting = asyncio.create_task(stack.submit(stack.step(model, 2)))
        await stack.start_orchestrator()
        assert isinstance((await watching).result, ops.PassDone)
        assert isinstance(await stack.result(await submitting), ops.StepDone)


async def test_an_api_server_that_comes_back_is_greeted_and_finds_every_future(tmp_path: Path) -> None:
    async with running(tmp_path) as stack:
        model = await stack.model()
        ids = await train(stack, model, 2)
        for _ in range(3):
            await stack.restart_client()
            for each in ids:
                assert not isinstance(await stack.result(each), ops.Failed)


async def test_an_operation_that_kills_its_ranks_fails_after_a_few_groups_and_the_next_one_runs(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, limits=ONE_AT_A_TIME) as stack:
        model = await stack.model()
        before = await train(stack, model, 1)
        deadly = await stack.submit(stack.batch(model, 3, [[1]], pretend_death=1.0))
        after = await stack.submit(stack.step(model, 4))
        for _ in range(3):
            await stack.ranks.end()
            await stack.start_ranks()
        result = await stack.result(deadly)
        assert isinstance(result, ops.Failed)
        assert result.category == "server"
        assert "died" in result.message
        assert isinstance(await stack.result(after), ops.StepDone)
        last = stack.applied()[-1][0]
        assert [each for group, each in stack.applied() if group == last] == [f"{model}:CreateModel", *before, after]


@pytest.mark.proves("Never: one timeout desynchronises the link to the ranks for ever")
async def test_one_operation_that_never_ends_does_not_desynchronise_the_link(tmp_path: Path) -> None:
    limits = f"{ONE_AT_A_TIME}\noperation_timeout_s = 1.0"
    async with running(tmp_path, limits=limits) as stack:
        model = await stack.model()
        stuck = await stack.submit(stack.batch(model, 1, [[1]], pretend_hang=1.0))
        after = await stack.submit(stack.batch(model, 2, [[1, 2, 3]]))
        assert await stack.orchestrator.told("stuck")
        result = await stack.result(stuck)
        assert isinstance(result, ops.Failed)
        assert "longer than 1 seconds" in result.message
        await stack.ranks.kill()
        await stack.start_ranks()
        assert len(stack.outputs(await stack.result(after)).outputs[0].fields["logprobs"].data) == 12


async def test_ranks_that_hang_while_the_orchestrator_restarts_are_told_of_as_stuck(tmp_path: Path) -> None:
    """They do not reply to its connect requests, and it has no connection on which it could notice that."""
    limits = f"{ONE_AT_A_TIME}\noperation_timeout_s = 2.0"
    async with running(tmp_path, limits=limits, group="start_timeout_s = 0.5") as stack:
        model = await stack.model()
        hanging = await stack.submit(stack.batch(model, 1, [[1]], pretend_hang=1.0))
        while hanging not in [each for _, each in stack.applied()]:
            await stack.watch(hanging)
        await stack.orchestrator.kill()
        await stack.start_orchestrator(attached=False)
        assert await stack.orchestrator.told("stuck") == "stuck unknown"
        await stack.ranks.kill()
        await stack.start_ranks()
        result = await stack.result(hanging)
        assert isinstance(result, ops.Failed)
        assert "longer than 2 seconds" in result.message


async def test_ranks_that_were_given_up_are_never_listened_to_again(tmp_path: Path) -> None:
    limits = f"{ONE_AT_A_TIME}\noperation_timeout_s = 0.5"
    async with running(tmp_path, limits=limits) as stack:
        model = await stack.model()
        late = await stack.submit(stack.batch(model, 1, [[1]], pretend_s=3.5))
        await stack.orchestrator.told("stuck")
        # They wake up when what told them to end has gone, and an orchestrator connects: they are told again.
        assert await stack.ranks.end() == 0
        result = await stack.result(late)
        assert isinstance(result, ops.Failed)
        await stack.start_ranks()
        assert isinstance(await stack.result(await stack.submit(stack.step(model, 2))), ops.StepDone)


async def test_ranks_that_know_more_than_the_journal_are_not_used(tmp_path: Path) -> None:
    async with running(tmp_path) as stack:
        model = await stack.model()
        for each in await train(stack, model, 1):
            await stack.result(each)
        await stack.orchestrator.kill()
        for file in stack.settings.data.glob("journal.db*"):
            file.unlink()
        # Its generations begin anew: the first is not heard, the next is, and finds that these ranks are not its own.
        await stack.start_orchestrator(attached=False)
        assert await stack.orchestrator.end() == 1
        await stack.start_orchestrator(attached=False)
        await stack.orchestrator.told("stuck")
        assert await stack.ranks.end() == 0


async def test_ranks_of_another_version_are_not_used_until_they_run_the_one_of_the_orchestrator(tmp_path: Path) -> None:
    async with running(tmp_path, ranks=False) as stack:
        await stack.start_ranks("--version", "0.0.1")
        await stack.orchestrator.told("stuck")
        assert await stack.ranks.end() == 0
        await stack.start_ranks()
        await stack.orchestrator.told("attached")
        assert await stack.model()


async def test_an_orchestrator_stops_in_order_when_told_to(tmp_path: Path) -> None:
    async with running(tmp_path) as stack:
        model = await stack.model()
        future_id = await stack.submit(stack.step(model, 1))
        await stack.result(future_id)
        assert await stack.orchestrator.stop() == 0
        await stack.start_orchestrator()
        assert isinstance(await stack.result(future_id), ops.StepDone)


async def test_results_that_had_their_time_are_gone_and_not_unknown(tmp_path: Path) -> None:
    async with running(tmp_path, limits="result_ttl_s = 0.5") as stack:
        model = await stack.model()
        future_id = await stack.submit(stack.step(model, 1))
        assert isinstance(await stack.result(future_id), ops.StepDone)
        while isinstance(output := await stack.watch(future_id), views.FutureResult):
            pass
        assert isinstance(output, views.ErrorResponse)
        assert output.code is Code.GONE
        await stack.orchestrator.kill()
        await stack.start_orchestrator()
        output = await stack.watch(future_id)
        assert isinstance(output, views.ErrorResponse)
        assert output.code is Code.GONE


async def test_a_snapshot_takes_nothing_away(tmp_path: Path) -> None:
    async with running(tmp_path, server="snapshot_every = 1") as stack:
        model = await stack.model()
        ids = await train(stack, model, 2)
        results = [await stack.result(each) for each in ids]
        assert await stack.orchestrator.stop() == 0
        assert await stack.snapshot() is not None
        await stack.start_orchestrator()
        assert [await stack.result(each) for each in ids] == results
        await stack.ranks.kill()
        await stack.start_ranks()
        assert isinstance(await stack.result(await stack.submit(stack.step(model, 5))), ops.StepDone)


async def test_the_files_of_a_checkpoint_stay_while_ranks_that_start_anew_have_to_load_them(tmp_path: Path) -> None:
    """The ranks find them and do not save them again; without them, their weights would be others, in silence."""
    async with running(tmp_path, limits=ONE_AT_A_TIME, checkpoints="sweep_s = 0.05") as stack:
        model = await stack.model()
        operations = (
            stack.batch(model, 1, [[1, 2]]),
            stack.step(model, 2),
            ops.SaveWeights(model, 3, "weights", "mine"),
            stack.step(model, 4),
            stack.batch(model, 5, [[3]], pretend_s=1.0),
            ops.LoadWeights(model, 6, model, "weights", "mine", optimizer=True),
        )
        for each in [await stack.submit(operation) for operation in operations]:
            assert not isinstance(await stack.result(each), ops.Failed)
        await stack.ranks.kill()
        await stack.start_ranks()
        await stack.orchestrator.told("attached")
        await stack.look(client_commands.Done, client_commands.DeleteCheckpoint(model, "weights", "mine"))
        stepped = await stack.result(await stack.submit(stack.step(model, 7)))
        assert isinstance(stepped, ops.StepDone)
        assert stepped.metrics["step"] == 2


@pytest.mark.proves("Never: loaded weights are lost by a restart")
async def test_weights_that_were_loaded_are_not_lost_when_ranks_or_orchestrator_start_anew(tmp_path: Path) -> None:
    async with running(tmp_path) as stack:
        model = await stack.model()
        saved = ops.SaveWeights(model, 2, "weights", "first")
        load = ops.LoadWeights(model, 4, model, "weights", "first", optimizer=True)
        looks = [stack.batch(model, seq, [[1, 2, 3]]) for seq in (5, 6, 7)]
        before: list[ops.Operation] = [stack.step(model, 1), saved, stack.step(model, 3), load, looks[0]]
        ids = [await stack.submit(each) for each in before]
        assert isinstance(await stack.result(ids[3]), ops.WeightsLoaded)
        expected = stack.outputs(await stack.result(ids[4])).metrics
        await stack.ranks.kill()
        await stack.start_ranks()
        await stack.orchestrator.told("attached")
        assert stack.outputs(await stack.result(await stack.submit(looks[1]))).metrics == expected
        await stack.orchestrator.kill()
        await stack.start_orchestrator()
        assert stack.outputs(await stack.result(await stack.submit(looks[2]))).metrics == expected


async def begun_anew(stack: Stack) -> None:
    """Other ranks, in place of those that the next orchestrator finds and does not use."""
    await stack.start_orchestrator(attached=False)
    await stack.orchestrator.told("stuck")
    assert await stack.ranks.end() == 0
    await stack.start_ranks()
    await stack.orchestrator.told("attached")


async def test_ranks_whose_orchestrator_died_while_they_caught_up_are_not_gone_on_with(tmp_path: Path) -> None:
    """What came of all that they did, nobody has heard."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    expected = await undisturbed(tmp_path / "a", 3)
    async with running(tmp_path / "b", limits=ONE_AT_A_TIME) as stack:
        model = await stack.model()
        ids = await train(stack, model, 2, pretend_s=0.4)
        await stack.result(ids[-1])
        await stack.ranks.kill()
        known = len(stack.applied())
        await stack.start_ranks()
        while len(stack.applied()) < known + 2:
            await stack.watch(ids[-1])
        await stack.orchestrator.kill()
        await begun_anew(stack)
        ids += await train(stack, model, 1, first=5)
        assert [await stack.result(each) for each in ids] == expected


async def test_weights_that_cannot_be_loaded_again_are_an_end_in_words_and_not_other_weights(tmp_path: Path) -> None:
    async with running(tmp_path) as stack:
        model, file, expected = await loaded(stack, there=True)
        kept = file.read_bytes()
        file.unlink()
        await stack.ranks.kill()
        await stack.start_ranks()
        assert await stack.orchestrator.end() == 1
        file.write_bytes(kept)
        await begun_anew(stack)
        look = await stack.submit(stack.batch(model, 6, [[1, 2, 3]]))
        assert stack.outputs(await stack.result(look)).metrics == expected


async def test_ranks_that_lack_the_memory_to_catch_up_are_followed_by_others_and_the_orchestrator_stays(
    tmp_path: Path,
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    expected = await undisturbed(tmp_path / "a", 3)
    async with running(tmp_path / "b") as stack:
        model = await stack.model()
        ids = await train(stack, model, 2)
        await stack.result(ids[-1])
        await stack.ranks.kill()
        await stack.start_ranks("--short-of-memory")
        await stack.orchestrator.told("stuck")
        assert await stack.ranks.end() == 0
        await stack.start_ranks()
        ids += await train(stack, model, 1, first=5)
        assert [await stack.result(each) for each in ids] == expected


async def test_what_is_replayed_is_told_as_such_and_nothing_else_is(tmp_path: Path) -> None:
    """Ranks check the memory that is free now before a pass, and not before one that others have done already."""
    async with running(tmp_path) as stack:
        model = await stack.model()
        first = await stack.submit(stack.batch(model, 1, [[1, 2]]))
        await stack.result(first)
        await stack.ranks.kill()
        await stack.start_ranks()
        await stack.orchestrator.told("attached")
        second = await stack.submit(stack.batch(model, 2, [[1, 2]]))
        await stack.result(second)
        lines = [line.split(" ")[1:] for line in stack.applied_file.read_text(encoding="utf-8").splitlines()]
        passes = [line for line in lines if not line[0].endswith("CreateModel")]
        assert passes == [[first], [first, "replayed"], [second]]


async def test_weights_that_could_not_be_loaded_are_not_loaded_when_ranks_start_anew(tmp_path: Path) -> None:
    async with running(tmp_path) as stack:
        model, file, expected = await loaded(stack, there=False)
        file.write_bytes(file.with_suffix(".away").read_bytes())
        await stack.ranks.kill()
        await stack.start_ranks()
        await stack.orchestrator.told("attached")
        look = await stack.submit(stack.batch(model, 6, [[1, 2, 3]]))
        assert stack.outputs(await stack.result(look)).metrics == expected


async def loaded(stack: Stack, *, there: bool) -> tuple[str, Path, object]:
    """A model that was told to load what it saved before its last step; the file of that, and what a pass says now."""
    model = await stack.model()
    for operation in (stack.batch(model, 1, [[1, 2]]), ops.SaveWeights(model, 2, "weights", "first")):
        await stack.result(await stack.submit(operation))
    await stack.result(await stack.submit(stack.step(model, 3)))
    (file,) = stack.settings.checkpoint_folder.rglob("weights.json")
    if not there:
        file.rename(file.with_suffix(".away"))
    load = await stack.result(await stack.submit(ops.LoadWeights(model, 4, model, "weights", "first", optimizer=True)))
    assert isinstance(load, ops.WeightsLoaded if there else ops.Failed)
    look = await stack.submit(stack.batch(model, 5, [[1, 2, 3]]))
    return model, file, stack.outputs(await stack.result(look)).metrics


async def test_ranks_that_did_what_nobody_can_ask_them_for_again_are_given_up_with_it(tmp_path: Path) -> None:
    async with running(tmp_path, limits=ONE_AT_A_TIME) as stack:
        model = await stack.model()
        large = stack.batch(model, 1, [[1] * 3000] * 8, pretend_s=0.5)
        assert isinstance(large.payload, ops.StoredPayload)
        lost = await stack.submit(large)
        while lost not in [each for _, each in stack.applied()]:
            await stack.watch(lost)
        await stack.orchestrator.kill()
        (payload,) = stack.settings.payloads.rglob(large.payload.sha256)
        payload.unlink()
        await begun_anew(stack)
        assert isinstance(await stack.result(lost), ops.Failed)
        stepped = await stack.result(await stack.submit(stack.step(model, 2)))
        assert isinstance(stepped, ops.StepDone)
        assert stepped.metrics["weight"] == 0.0
