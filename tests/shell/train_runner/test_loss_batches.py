"""Losses of many documents at once: values, gradients and metrics beside the formulas, one document at a time.

The oracle is `formulas.py`, in float64 and token by token; gradients are the central differences of
`detached_formulas.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import pytest
import torch

from strata.base.errors import StrataError
from strata.train.core import ops
from strata.train.core.model_options import LossName
from strata.train.runner.passes.losses import RULES, check_config, measure_loss, read_inputs, read_metrics
from strata.train.runner.passes.packed_row import PackedDocument, RowContents, pack_row
from tests.shell.train_runner.detached_formulas import held_fixed
from tests.shell.train_runner.formulas import CONFIGS, FORMULAS, limited_ratios

Array = np.ndarray[Any, Any]
CPU: Final = torch.device("cpu")
LENGTHS: Final = (5, 1, 12, 3)
VOCABULARY: Final = 50
LOSSES: Final = [LossName(name) for name in FORMULAS]


def drawn(length: int, seed: int, targets: int = 1) -> dict[str, Array]:
    draw = np.random.default_rng(seed)
    shape = (length,) if targets == 1 else (length, targets)
    mask = draw.integers(0, 2, length).astype("<f4")
    mask[0] = 1.0
    advantages = draw.normal(size=shape).astype("<f4")
    advantages[draw.random(shape) < 0.2] = 0.0
    return {
        "target_tokens": draw.integers(0, VOCABULARY, shape).astype("<i8"),
        "weights": draw.normal(size=shape).astype("<f4"),
        "logprobs": (-2 + 0.3 * draw.normal(size=shape)).astype("<f4"),
        "advantages": advantages,
        "sequence_ratio_mask": mask,
    }


def document(number: int, loss: LossName, config: Mapping[str, float], inputs: Mapping[str, Array]) -> PackedDocument:
    dense = {
        name: ops.Dense(ops.DType.I64 if each.dtype.kind == "i" else ops.DType.F32, each.shape, each.tobytes())
        for name, each in inputs.items()
    }
    datum = ops.Datum(np.zeros(len(inputs["weights"]), "<i4").tobytes(), dense)
    return PackedDocument(number, 0, loss, read_inputs(loss, config, datum, VOCABULARY), None)


def logprobs_of(inputs: Mapping[str, Array], seed: int) -> Array:
    sampled = inputs["logprobs"]
    apart = np.random.default_rng(seed).normal(0.0, 0.3, size=sampled.shape)
    return np.add(sampled, apart, dtype=np.float32, casting="same_kind")


def compute(contents: RowContents, logprobs: Sequence[Array]) -> tuple[dict[int, dict[str, float]], list[Array]]:
    """The metrics of each document, and the gradient of the row's loss by its log probabilities."""
    flat = torch.from_numpy(np.concatenate([each.reshape(-1) for each in logprobs]))
    flat.requires_grad_()
    found: dict[int, dict[str, float]] = {}
    totals = []
    for batch, own in zip(contents.batches, contents.of_batches(flat), strict=True):
        terms = RULES[batch.loss].loss(own, batch.inputs)
        totals.append(terms.loss.sum())
        numbers = measure_loss(terms, batch.inputs, own)
        metrics = read_metrics(numbers.numpy(), batch.counted, batch.sampled)
        found |= {each.item: one for each, one in zip(batch.documents, metrics, strict=True)}
    torch.stack(totals).sum().backward()  # type: ignore[no-untyped-call]
    assert flat.grad is not None
    return found, np.split(flat.grad.numpy(), np.cumsum([each.size for each in logprobs])[:-1])


@pytest.mark.parametrize("loss", LOSSES)
def test_each_document_of_a_batch_has_the_loss_of_the_formula(loss: LossName) -> None:
    """Documents of one loss have configurations of their own."""
    lengths = LENGTHS * 2
    configs = [CONFIGS[loss.value][number % len(CONFIGS[loss.value])] for number in range(len(lengths))]
    inputs = [drawn(length, number) for number, length in enumerate(lengths)]
    logprobs = [logprobs_of(each, 9 + number) for number, each in enumerate(inputs)]
    documents = [document(number, loss, *each) for number, each in enumerate(zip(configs, inputs, strict=True))]
    found, _ = compute(pack_row(documents, CPU), logprobs)
    for number, (own, config, one) in enumerate(zip(inputs, configs, logprobs, strict=True)):
        expected = FORMULAS[loss.value](one.astype(np.float64), own, config)
        assert found[number]["loss:sum"] == pytest.approx(expected, rel=2e-6, abs=2e-6)
        assert found[number]["tokens:sum"] == np.count_nonzero(own["weights"])
        if RULES[loss].sampled:
            check_ratios(found[number], loss, own, one.astype(np.float64), config)


def check_ratios(
    found: Mapping[str, float], loss: LossName, own: Mapping[str, Array], logprobs: Array, config: Mapping[str, float]
) -> None:
    sampled = (own["weights"] != 0) & (own["advantages"] != 0)
    distance = logprobs - own["logprobs"]
    mask = own["sequence_ratio_mask"] != 0
    shared = np.full(len(distance), math.exp(distance[mask].mean()))
    ratio = shared if loss is LossName.GSPO else np.array(limited_ratios(logprobs, own, config))
    assert found["sampled_tokens:sum"] == sampled.sum()
    if not sampled.any():
        assert not [name for name in found if name.startswith(("ratio:", "sampler_"))]
        return
    ratios, gaps = ratio[sampled], distance[sampled]
    expected = {
        "ratio:mean": ratios.mean(),
        "ratio:min": ratios.min(),
        "ratio:max": ratios.max(),
        "sampler_gap:sum": np.abs(gaps).sum(),
        "sampler_gap:max": np.abs(gaps).max(),
        "sampler_kl:sum": (np.expm1(gaps) - gaps).sum(),
    }
    defaults = RULES[loss].config
    if "clip_low_threshold" in defaults:
        low, high = ({**defaults, **config}[name] for name in ("clip_low_threshold", "clip_high_threshold"))
        clipped = np.clip(ratio, low, high)
        advantages = own["advantages"]
        counts = clipped != ratio if loss is LossName.CISPO else clipped * advantages < ratio * advantages
        expected["clipped_tokens:sum"] = (counts & sampled).sum()
    for name, number in expected.items():
        assert found[name] == pytest.approx(number, rel=1e-5, abs=1e-6), name


CONFIGURED: Final = [(LossName(name), config) for name, configs in CONFIGS.items() for config in configs]


@pytest.mark.parametrize(("loss", "config"), CONFIGURED)
def test_the_gradient_of_a_batch_is_that_of_the_formula(loss: LossName, config: Mapping[str, float]) -> None:
    inputs = [drawn(length, number) for number, length in enumerate(LENGTHS)]
    logprobs = [logprobs_of(each, 9 + number) for number, each in enumerate(inputs)]
    documents = [document(number, loss, config, each) for number, each in enumerate(inputs)]
    _, gradients = compute(pack_row(documents, CPU), logprobs)
    for own, one, gradient in zip(inputs, logprobs, gradients, strict=True):
        formula = held_fixed(loss.value, one.astype(np.float64), own, config)
        for place in range(len(one)):
            above, below = one.astype(np.float64), one.astype(np.float64)
            above[place] += 1e-5
            below[place] -= 1e-5
            slope = (formula(above) - formula(below)) / 2e-5
            assert gradient[place] == pytest.approx(slope, rel=1e-4, abs=1e-5)


BIAS: Final = [
    ({"clip_low_threshold": 1.0, "clip_high_threshold": 1.0}, 1.2),
    ({"clip_high_threshold": 2.0}, 0.33),
    ({"clip_high_threshold": 8.0}, 0.045),
    ({"clip_low_threshold": 1 / 8, "clip_high_threshold": 8.0, "mask_outliers": 1.0}, 0.22),
]
"""How far the expected gradient of a noisy sampler may be from that of an exact one, beside its length."""


@pytest.mark.parametrize(("config", "most"), BIAS, ids=["none", "truncate 2", "truncate 8", "mask 8"])
def test_importance_weights_correct_the_expected_gradient_of_a_noisy_sampler(
    config: Mapping[str, float], most: float
) -> None:
    """Each token of the vocabulary is there as often as the sampler draws it: the mean over all answers."""
    draw = np.random.default_rng(0)
    logits = draw.normal(size=(40, VOCABULARY))
    noisy = logits + draw.normal(size=logits.shape)
    own, sampled = (each - np.log(np.exp(each).sum(-1, keepdims=True)) for each in (logits, noisy))
    advantages = draw.normal(size=logits.shape)
    inputs = [
        {
            "target_tokens": np.arange(VOCABULARY, dtype="<i8"),
            "weights": np.exp(log_q).astype("<f4"),
            "logprobs": log_q.astype("<f4"),
            "advantages": gain.astype("<f4"),
        }
        for log_q, gain in zip(sampled, advantages, strict=True)
    ]
    documents = [document(number, LossName.CISPO, config, each) for number, each in enumerate(inputs)]
    _, gradients = compute(pack_row(documents, CPU), [each.astype(np.float32) for each in own])
    exact = -np.exp(own) * advantages
    bias = np.linalg.norm(np.stack(gradients) - exact) / np.linalg.norm(exact)
    assert 0.9 * most < bias <= most


def test_a_switch_of_a_loss_is_0_or_1() -> None:
    check_config(LossName.CISPO, {"mask_outliers": 1.0, "sequence_level": 0.0})
    with pytest.raises(StrataError, match=r"mask_outliers is 0\.5 where the loss cispo takes 0 or 1"):
        check_config(LossName.CISPO, {"mask_outliers": 0.5})
    with pytest.raises(StrataError, match="the loss ppo knows no 'sequence_level'"):
        check_config(LossName.PPO, {"sequence_level": 1.0})


def test_several_targets_of_a_token_are_summed() -> None:
    inputs = [drawn(4, 0, targets=3), drawn(2, 1), drawn(5, 2, targets=2)]
    for each in inputs:
        del each["advantages"], each["sequence_ratio_mask"]
    logprobs = [logprobs_of(each, number) for number, each in enumerate(inputs)]
    documents = [document(number, LossName.CROSS_ENTROPY, {}, each) for number, each in enumerate(inputs)]
    contents = pack_row(documents, CPU)
    assert contents.row.logit_indices.tolist() == [*np.repeat(range(4), 3), 4, 5, *np.repeat(range(6, 11), 2)]
    assert contents.row.places.positions.tolist() == [0, 1, 2, 3, 0, 1, 0, 1, 2, 3, 4]
    found, gradients = compute(contents, logprobs)
    for number, (own, one) in enumerate(zip(inputs, logprobs, strict=True)):
        expected = FORMULAS["cross_entropy"](one.astype(np.float64), own, {})
        assert found[number]["loss:sum"] == pytest.approx(expected, rel=2e-6, abs=2e-6)
        assert gradients[number] == pytest.approx(-own["weights"].reshape(-1))


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_document_that_is_not_finite_reaches_no_other_of_its_batch(broken: float) -> None:
    """Neither a loss, nor a metric, nor a gradient: bit by bit what they are without it."""
    losses = [*LOSSES, *LOSSES, LossName.PPO]
    inputs = [drawn(6, number) for number in range(len(losses))]
    logprobs = [logprobs_of(each, number) for number, each in enumerate(inputs)]
    documents = [document(number, loss, {}, inputs[number]) for number, loss in enumerate(losses)]
    sound = range(0, len(losses), 2)
    before, gradients_before = compute(
        pack_row([documents[number] for number in sound], CPU), [logprobs[number] for number in sound]
    )
    for number in range(1, len(losses), 2):
        logprobs[number][2:4] = broken
    after, gradients_after = compute(pack_row(documents, CPU), logprobs)
    for place, number in enumerate(sound):
        assert after[number] == before[number]
        assert gradients_after[number].tobytes() == gradients_before[place].tobytes()
    assert any(not math.isfinite(after[number]["loss:sum"]) for number in range(1, len(losses), 2))


def test_the_sum_of_a_long_document_is_that_of_float64() -> None:
    inputs = [drawn(60_000, 0), drawn(1, 1)]
    logprobs = [logprobs_of(each, number) for number, each in enumerate(inputs)]
    documents = [document(number, LossName.CROSS_ENTROPY, {}, each) for number, each in enumerate(inputs)]
    found, _ = compute(pack_row(documents, CPU), logprobs)
    rounded = [(own["weights"] * one).astype(np.float64).sum() for own, one in zip(inputs, logprobs, strict=True)]
    assert found[0]["loss:sum"] == pytest.approx(-rounded[0], rel=1e-13)
