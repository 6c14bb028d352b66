"""The gap between sampler and trainer: what is compared, what is not, and what an alarm says."""

from __future__ import annotations

import array
import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from strata.train.core import model_options, ops
from strata.train.core.sampling import SampledSequence, SampleOperation, SampleParams, decode_result
from strata.train.orchestrator.sampler_gap import (
    GapMeasure,
    GapMonitor,
    SampleIndex,
    WeightsVersion,
    is_comparable,
    read_sequence,
)
from strata.train.payload import Payloads
from strata.train.status import queries, reports
from tests.shell.train_orchestrator.stacks import Stack, running

MODEL = "session:train:0"
HIGH = "strata_train_sampler_gap_high_models"
PROMPT, ANSWER, DRAWN = [1, 2, 3], [4, 5], [-1.0, -2.0]


def ints(*numbers: int) -> bytes:
    return array.array("i", numbers).tobytes()


def floats(numbers: Sequence[float]) -> ops.Dense:
    return ops.Dense(ops.DType.F32, (len(numbers),), array.array("f", numbers).tobytes())


def rollout(
    prompt: Sequence[int], answer: Sequence[int], advantage: float = 1.0, logprobs: Sequence[float] = ()
) -> ops.Datum:
    tokens, before = [*prompt, *answer], [0.0] * (len(prompt) - 1)
    return ops.Datum(
        ints(*tokens[:-1]),
        {
            "target_tokens": ops.Dense(ops.DType.I64, (len(tokens) - 1,), array.array("q", tokens[1:]).tobytes()),
            "logprobs": floats([*before, *(logprobs or [0.0] * len(answer))]),
            "advantages": floats([*before, *[advantage] * len(answer)]),
        },
    )


def trained(*logprobs: float) -> ops.DatumOutput:
    return ops.DatumOutput({"logprobs": floats(logprobs)})


def measured(datum: ops.Datum, output: ops.DatumOutput, changed: int = 0, model_id: str = MODEL) -> GapMeasure:
    index = SampleIndex()
    drawn = SampledSequence(ints(*ANSWER), array.array("f", DRAWN).tobytes(), "length")
    index.add(ints(*PROMPT), drawn, WeightsVersion(MODEL, 5))
    sequence, measure = read_sequence(datum, output), GapMeasure()
    assert sequence is not None
    measure.add(sequence, index, model_id, changed)
    return measure


def test_tokens_of_the_same_weights_are_compared_whatever_the_client_says_of_them() -> None:
    found = measured(rollout(PROMPT, ANSWER, logprobs=[-9.0, -9.0]), trained(0.0, 0.0, -1.5, -2.25), changed=4)
    assert (found.tokens, found.mean, found.max) == (2, 0.375, 0.5)
    assert (found.stale, found.unknown) == (0, 0)


def test_tokens_of_earlier_weights_are_stale_and_not_compared() -> None:
    found = measured(rollout(PROMPT, ANSWER), trained(0.0, 0.0, -7.0, -7.0), changed=6)
    assert (found.tokens, found.stale, found.mean) == (0, 2, 0.0)


@pytest.mark.parametrize(
    ("prompt", "answer", "model_id"),
    [([1, 2, 9], ANSWER, MODEL), (PROMPT, [4, 6], MODEL), (PROMPT, [4], MODEL), (PROMPT, ANSWER, "another:train:0")],
    ids=["another prompt", "another answer", "a part of it", "another model"],
)
def test_what_was_not_drawn_like_this_is_unknown(prompt: list[int], answer: list[int], model_id: str) -> None:
    output = trained(*[-7.0] * (len(prompt) + len(answer) - 1))
    found = measured(rollout(prompt, answer), output, model_id=model_id)
    assert (found.tokens, found.stale, found.unknown) == (0, 0, len(answer))


def test_the_index_forgets_the_oldest_samples_first() -> None:
    index = SampleIndex(max_tokens=300)
    for token in (1, 2, 3):  # of 130 tokens each, with what a record takes beside them
        sequence = SampledSequence(ints(token, token), array.array("f", DRAWN).tobytes(), "length")
        index.add(ints(7), sequence, WeightsVersion(MODEL, token))
    assert index.find(ints(7, 1, 1), 2) is None
    assert [index.find(ints(7, token, token), 2) is not None for token in (2, 3)] == [True, True]


@pytest.mark.parametrize(
    ("params", "comparable"),
    [
        (SampleParams(), True),
        (SampleParams(temperature=0.0, top_p=0.5), True),
        (SampleParams(temperature=0.7), False),
        (SampleParams(top_k=5), False),
        (SampleParams(top_p=0.9), False),
    ],
)
def test_a_transformed_distribution_is_not_the_models(params: SampleParams, comparable: bool) -> None:
    assert is_comparable(SampleOperation("sampler", 0, ints(1), params)) is comparable


def test_an_alarm_is_raised_once_and_ends_with_a_pass_below_it(caplog: pytest.LogCaptureFixture) -> None:
    monitor = GapMonitor(alarm_nats=0.1)
    measures = [GapMeasure(tokens=2, total=total, max=total) for total in (0.1, 0.4, float("nan"), 0.1, 0.3)]
    assert [monitor.record(MODEL, seq, each, 0.0) for seq, each in enumerate(measures)] == [
        False, True, False, False, True,
    ]  # fmt: skip
    events = [record.message for record in caplog.records]
    assert sum("sampler_gap_high" in each for each in events) == 2, events
    assert not GapMonitor().record(MODEL, 1, measures[1], 0.0), "0 is no alarm"
    assert monitor.by_model[MODEL].high
    monitor.end_alarm(MODEL)
    assert (monitor.by_model[MODEL].high, monitor.by_model[MODEL].seq_id) == (False, 4), "an unloaded model"


async def drawn_by(stack: Stack, sampler: str, seq: int) -> list[int]:
    sample = SampleOperation(sampler, seq, ints(*PROMPT), SampleParams(max_tokens=3))
    result = await stack.result(await stack.submit(sample))
    assert isinstance(result, ops.SampleDone), result
    (sequence,) = decode_result(Payloads(stack.settings.payloads).read(result.payload)).sequences
    return array.array("i", sequence.tokens).tolist()


def learn(stack: Stack, model: str, seq: int, answer: Sequence[int]) -> ops.ForwardBackward:
    datum = rollout(PROMPT, answer)
    payload = Payloads(stack.settings.payloads).keep(ops.encode_pass_data(ops.PassData([datum])))
    return ops.ForwardBackward(model, seq, model_options.LossName.PPO, {}, False, [datum.length], payload)


async def compared(stack: Stack, stale: int, same: int) -> None:
    """Wait until so many tokens are counted: nothing waits for the comparison."""
    async with asyncio.timeout(10):
        while await tokens(stack) != (stale, same):
            await asyncio.sleep(0.02)


async def high_models(stack: Stack) -> float:
    text = (await stack.look(reports.MetricsView, queries.ReadMetrics(everything=True))).text.decode()
    families = text_string_to_metric_families(text)
    (value,) = [each.value for one in families for each in one.samples if each.name == HIGH]
    return value


async def tokens(stack: Stack) -> tuple[float, float]:
    text = (await stack.look(reports.MetricsView, queries.ReadMetrics(everything=True))).text.decode()
    counts = {
        each.labels["compared"]: each.value
        for family in text_string_to_metric_families(text)
        for each in family.samples
        if each.name == "strata_train_sampler_gap_tokens_total"
    }
    return counts.get("stale", 0.0), counts.get("same_weights", 0.0)


async def test_a_server_compares_its_own_samples_and_raises_an_alarm_for_the_owner(tmp_path: Path) -> None:
    async with running(tmp_path, sampling="gap_alarm_nats = 0.01") as stack:
        model = await stack.model()
        sampler = f"{model.partition(':')[0]}:sample:0"
        await stack.result(await stack.submit(ops.SaveSampler(model, 1, sampler)))
        answer = await drawn_by(stack, sampler, 1)
        await stack.result(await stack.submit(learn(stack, model, 2, answer)))
        await compared(stack, 0, 3)
        await stack.result(await stack.submit(stack.step(model, 3)))
        await stack.result(await stack.submit(learn(stack, model, 4, answer)))
        await compared(stack, 3, 3)

        own = (await stack.look(reports.StatusView, queries.DescribeStatus(False))).status
        ((high,), others) = (
            own.high_gaps,
            (await stack.look(reports.StatusView, queries.DescribeStatus(False), "bob")).status,
        )
        assert (high.model_id, high.gap.seq_id, high.gap.tokens, own.gap_alarm_nats) == (model, 2, 3, 0.01)
        assert not others.high_gaps, "another tenant's"
        (row,) = (await stack.look(reports.ActivityView, queries.DescribeActivity(False, 10))).activity.models
        assert row.gap == high.gap
        expected = sum(abs(-1.0 + 0.1 + token / 97) for token in [PROMPT[-1], *answer[:-1]]) / 3
        assert high.gap.mean == pytest.approx(expected, abs=1e-5)
        curves = (await stack.look(reports.CurvesView, queries.ReadCurves(model, False, 100))).curves
        (curve,) = [each for each in curves.series if each.name == "same_weights_gap"]
        assert curve.steps == [3]
        assert curve.values == pytest.approx([expected], abs=1e-5)
        assert await high_models(stack) == 1
        await stack.result(await stack.submit(ops.UnloadModel(model)))
        assert await high_models(stack) == 0
        assert not (await stack.look(reports.StatusView, queries.DescribeStatus(False))).status.high_gaps
