"""Replays whose numbers differ: compared with the journal's, reported, and stopped where they had to be equal."""

from __future__ import annotations

import array
import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from strata.base.clock import SystemClock
from strata.journal.open import open_journal
from strata.journal.replay import replay
from strata.train.core import facts, model_options, ops
from strata.train.core.client_commands import Accepted, Done, ResolveReplay
from strata.train.core.replay import CompletedDispatch
from strata.train.core.replay_differences import LARGEST, RankNumerics, ReplayDifferences
from strata.train.core.state import Dispatch
from strata.train.orchestrator.replay_comparison import ReplayComparison
from strata.train.payload import Payloads
from strata.train.status import queries, reports
from tests.core.train.servers import forward_backward, step
from tests.shell.train_orchestrator.stacks import Stack, running

DETERMINISTIC = "deterministic = true"
MODEL = "session-alice:train:0"
HERE = RankNumerics("2 ranks", "float32", deterministic=True)


async def train(stack: Stack, model: str, first: int, rounds: int = 2) -> list[str]:
    """Passes and steps, with all their results."""
    ids = []
    for seq in range(first, first + 2 * rounds, 2):
        ids.append(await stack.submit(stack.batch(model, seq, [[1, 2, 3], [5, 6]])))
        ids.append(await stack.submit(stack.step(model, seq + 1)))
    for each in ids:
        assert not isinstance(await stack.result(each), ops.Failed)
    return ids


async def save(stack: Stack, model: str, seq: int, name: str) -> None:
    await stack.result(await stack.submit(ops.SaveWeights(model, seq, "weights", name)))


async def another_group(stack: Stack, noise: float = 0.0) -> None:
    await stack.ranks.kill()
    await stack.orchestrator.told("lost")
    await stack.start_ranks("--noise", str(noise))
    await stack.orchestrator.told("attached")


async def status(stack: Stack) -> reports.ServerStatus:
    """When the attached group has finished its replay."""
    async with asyncio.timeout(60):
        while (found := await _status(stack)).ranks.state == "catching up":
            await asyncio.sleep(0.05)
    return found


async def _status(stack: Stack) -> reports.ServerStatus:
    return (await stack.look(reports.StatusView, queries.DescribeStatus(everything=True))).status


async def metrics(stack: Stack) -> Mapping[tuple[str, ...], float]:
    text = (await stack.look(reports.MetricsView, queries.ReadMetrics(everything=True))).text.decode()
    return {
        (each.name.removeprefix("strata_train_"), *each.labels.values()): each.value
        for family in text_string_to_metric_families(text)
        for each in family.samples
    }


async def journaled(stack: Stack) -> list[facts.ReplayCompared]:
    await stack.orchestrator.stop()
    async with await open_journal(stack.settings.database, SystemClock()) as journal:
        batches = [batch async for batch in replay(journal, stack.settings.stream, 0)]
    found = [facts.decode(fact) for batch in batches for fact in batch.facts]
    return [fact for fact in found if isinstance(fact, facts.ReplayCompared)]


@pytest.mark.proves("A replay is compared with the first run: without noise the difference is 0")
async def test_a_replay_that_is_the_same_is_counted_and_adds_nothing_to_the_journal(tmp_path: Path) -> None:
    async with running(tmp_path, group=DETERMINISTIC) as stack:
        model = await stack.model()
        await train(stack, model, 1)
        await another_group(stack)
        found = await status(stack)
        assert found.recovered[0].differences == ReplayDifferences(compared=4)
        assert (found.stopped, found.stopped_models) == ([], 0)
        numbers = await metrics(stack)
        assert numbers["replay_compared_total", "yes"] == 4
        assert numbers["replay_compared_total", "no"] == 0
        assert [numbers["replay_difference_max", kind] for kind in ("loss", "gradient_norm", "logprobs")] == [0, 0, 0]
        await train(stack, model, 5, 1)
        assert await journaled(stack) == []


@pytest.mark.parametrize(("group", "noise"), [(DETERMINISTIC, 1e-6), ("", 0.5)], ids=["below", "not deterministic"])
async def test_what_differs_little_or_promised_nothing_is_reported_and_goes_on(
    tmp_path: Path, group: str, noise: float
) -> None:
    async with running(tmp_path, group=group) as stack:
        model = await stack.model()
        await train(stack, model, 1)
        await another_group(stack, noise)
        found = await status(stack)
        differences = found.recovered[0].differences
        assert differences.logprobs == pytest.approx(noise, rel=0.1)
        assert differences.loss == pytest.approx(5 * noise, rel=0.1)
        assert (bool(differences.above), differences.stops_at, found.stopped_models) == (noise > 0.1, 0, 0)
        assert (await metrics(stack))["replay_difference_max", "logprobs"] == pytest.approx(noise, rel=0.1)
        await train(stack, model, 5, 1)


async def test_a_model_is_stopped_and_goes_on_with_the_numbers_that_its_owner_accepts(tmp_path: Path) -> None:
    async with running(tmp_path, group=DETERMINISTIC) as stack:
        model, other = await stack.model(), await stack.model(1)
        await train(stack, model, 1)
        await another_group(stack, 0.5)
        found = await status(stack)
        (stopped,) = found.stopped
        assert (stopped.model_id, stopped.tenant, found.stopped_models) == (model, "alice", 1)
        assert stopped.differences.logprobs == pytest.approx(0.5)
        refused = await stack.result(await stack.submit(stack.step(model, 5)))
        assert isinstance(refused, ops.Failed)
        assert "is stopped" in refused.message
        await train(stack, other, 1, 1)
        assert (await metrics(stack))["stopped_models",] == 1
        # Also for the next leader.
        await stack.orchestrator.kill()
        await stack.start_orchestrator()
        assert [each.model_id for each in (await status(stack)).stopped] == [model]
        await stack.look(Done, ResolveReplay(model, "accept"))
        assert not (await status(stack)).stopped
        await train(stack, model, 6, 1)
        # The same difference again was accepted, and what came after it is the same.
        await another_group(stack, 0.5)
        again = await status(stack)
        assert again.recovered[0].differences.above
        assert not [each for each in again.stopped if each.model_id == model]


async def test_a_model_that_is_rolled_back_has_the_weights_of_its_last_checkpoint(tmp_path: Path) -> None:
    async with running(tmp_path, group=DETERMINISTIC) as stack:
        model = await stack.model()
        await train(stack, model, 1)
        await save(stack, model, 5, "good")
        expected = stack.outputs(await stack.result(await stack.submit(stack.batch(model, 6, [[7, 8, 9]]))))
        await train(stack, model, 7, 1)
        await another_group(stack, 0.5)
        assert (await status(stack)).stopped
        accepted = await stack.look(Accepted, ResolveReplay(model, "roll_back"))
        assert isinstance(await stack.result(accepted.future_id), ops.WeightsLoaded)
        assert not (await status(stack)).stopped
        now = stack.outputs(await stack.result(await stack.submit(stack.batch(model, 9, [[7, 8, 9]]))))
        assert now.outputs == expected.outputs
        await another_group(stack)
        assert not (await status(stack)).stopped


async def test_results_that_an_orchestrator_took_with_it_are_counted_as_not_compared(tmp_path: Path) -> None:
    async with running(tmp_path, group=DETERMINISTIC, limits="max_running_requests = 1") as stack:
        model = await stack.model()
        await train(stack, model, 1, 1)
        slow = await stack.submit(stack.batch(model, 3, [[1, 2]], pretend_s=3.0))
        async with asyncio.timeout(60):
            while not (await _status(stack)).running:
                await asyncio.sleep(0.02)
        await asyncio.gather(stack.orchestrator.kill(), stack.ranks.kill())
        await stack.start_ranks()
        await stack.start_orchestrator()
        await stack.result(slow)
        numbers = await metrics(stack)
        assert (numbers["replay_compared_total", "yes"], numbers["replay_compared_total", "no"]) == (2, 1)


# The comparison itself


def passed(logprobs: Sequence[float], loss: float = 1.0) -> ops.PassDone:
    values = ops.Dense(ops.DType.F32, (len(logprobs),), array.array("f", logprobs).tobytes())
    result = ops.PassResult([ops.DatumOutput({"logprobs": values})], {"loss:sum": loss})
    return ops.PassDone(ops.InlinePayload(ops.encode_pass_data(result)))


async def compared(
    tmp_path: Path, operation: ops.Operation, first: ops.Result | None, now: ops.Result
) -> ReplayDifferences:
    comparison = ReplayComparison(Payloads(tmp_path / "payloads"), HERE)
    past = CompletedDispatch(Dispatch(3, ["a"]), [operation], [isinstance(first, ops.Failed)], [first], HERE)
    await comparison.add(past, [now])
    return comparison.models.get(MODEL, ReplayDifferences())


async def test_the_largest_difference_of_a_token_counts_and_what_is_no_number_counts_as_larger(tmp_path: Path) -> None:
    nan = float("nan")
    batch = forward_backward(MODEL, 1)
    for first, now, expected in (
        ([1.0, 2.0, nan], [1.0, 2.5, nan], 0.5),
        ([1.0], [nan], LARGEST),
        ([1.0], [1.0, 1.0], LARGEST),
        ([], [], 0.0),
    ):
        found = await compared(tmp_path, batch, passed(first), passed(now))
        assert (found.compared, found.logprobs, bool(found.stops_at)) == (1, expected, expected > 0)


async def test_a_result_whose_file_is_gone_or_that_has_no_numbers_is_not_compared(tmp_path: Path) -> None:
    batch, lost = forward_backward(MODEL, 1), ops.PassDone(ops.StoredPayload("ab" * 32, 7))
    for operation, first, now in (
        (batch, lost, passed([1.0])),
        (batch, None, passed([1.0])),
        (step(MODEL, 2), ops.StepDone({}), ops.StepDone({"grad_norm": 1.0})),
    ):
        found = await compared(tmp_path, operation, first, now)
        assert found == ReplayDifferences(not_compared=1)


async def test_a_result_in_a_file_is_compared_and_a_failure_has_nothing_to_compare(tmp_path: Path) -> None:
    inline = passed([1.0, 2.0])
    assert isinstance(inline.payload, ops.InlinePayload)
    stored = ops.PassDone(Payloads(tmp_path / "payloads").store(inline.payload.data))
    assert await compared(tmp_path, forward_backward(MODEL, 1), stored, inline) == ReplayDifferences(compared=1)
    failed = ops.Failed("server", "no")
    assert await compared(tmp_path, step(MODEL, 1), failed, failed) == ReplayDifferences()
    save = ops.SaveWeights(MODEL, 1, "weights", "a")
    assert await compared(tmp_path, save, ops.WeightsSaved("x"), ops.WeightsSaved("x")) == ReplayDifferences()


async def test_the_norm_of_a_gradient_is_compared(tmp_path: Path) -> None:
    first, now = (ops.StepDone({"grad_norm": norm}) for norm in (2.0, 2.25))
    operation = ops.OptimStep(MODEL, 1, model_options.AdamParams())
    assert await compared(tmp_path, operation, first, now) == ReplayDifferences(
        compared=1, gradient_norm=0.25, above=3, stops_at=3
    )
