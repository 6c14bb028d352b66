"""The distance between sampler and trainer that every pass with sampled tokens measures."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from strata.train.core.model_options import LossName
from strata.train.runner.passes.losses import RULES, LossInputs, measure_loss, read_metrics
from strata.train.runner.passes.packed_row import PackedDocument, pack_row
from strata.train.status.pass_metrics import combine_metrics


def measured(trained: list[float], sampled: list[float], advantages: list[float]) -> dict[str, float]:
    count = len(trained)
    inputs = LossInputs(
        tokens=np.zeros(count, np.int64),
        targets=np.zeros(count, np.int64),
        weights=np.ones(count, np.float32),
        logprobs=np.array(sampled, np.float32),
        advantages=np.array(advantages, np.float32),
        low=0.8,
        high=1.2,
        beta=0.0,
        mask=None,
    )
    row = pack_row([PackedDocument(0, 0, LossName.PPO, inputs, None)], torch.device("cpu"))
    (batch,) = row.batches
    logprobs = torch.tensor(trained, requires_grad=True)
    numbers = measure_loss(RULES[LossName.PPO].loss(logprobs, batch.inputs), batch.inputs, logprobs)
    return read_metrics(numbers.numpy(), batch.counted, batch.sampled)[0]


def test_the_gap_is_over_the_sampled_tokens_of_all_datums() -> None:
    """The first token is of a prompt: it has no advantage, and what is said of it means nothing."""
    first = measured([-9.0, -1.0, -2.5], [0.0, -1.5, -2.0], [0.0, 1.0, -1.0])
    second = measured([-3.0], [-2.75], [0.5])
    found = combine_metrics([first, second])
    assert found["sampled_tokens:sum"] == 3
    assert found["sampler_gap:sum"] == pytest.approx(0.5 + 0.5 + 0.25)
    assert found["sampler_gap:max"] == pytest.approx(0.5)
    expected = sum(math.exp(each) - 1 - each for each in (0.5, -0.5, -0.25))
    assert found["sampler_kl:sum"] == pytest.approx(expected)


def test_a_prompt_has_no_part_in_the_ratios_and_clips_of_a_pass() -> None:
    """As the cookbook sends it: zeros for the log probabilities and advantages of the prompt."""
    first = measured([-9.0, -8.0, -1.0, -2.0], [0.0, 0.0, -1.0, -2.0], [0.0, 0.0, 1.0, -1.0])
    assert (first["ratio:mean"], first["ratio:min"], first["ratio:max"]) == (1.0, 1.0, 1.0)
    assert (first["tokens:sum"], first["sampled_tokens:sum"], first["clipped_tokens:sum"]) == (4, 2, 0)
    second = measured([-2.0, -2.0 + math.log(2.0)], [0.0, -2.0], [0.0, 1.0])
    assert second["clipped_tokens:sum"] == 1
    assert combine_metrics([first, second])["ratio:mean"] == pytest.approx((1.0 + 1.0 + 2.0) / 3)
    assert not [name for name in measured([-1.0], [0.0], [0.0]) if name.startswith("ratio:")]


def test_the_same_numbers_are_no_gap_and_nothing_sampled_is_no_figure() -> None:
    same = measured([-1.0, -2.0], [-1.0, -2.0], [1.0, 1.0])
    assert (same["sampler_gap:max"], same["sampler_kl:sum"]) == (0.0, 0.0)
    nothing = measured([-1.0], [-2.0], [0.0])
    assert nothing["sampled_tokens:sum"] == 0
    assert "sampler_gap:max" not in nothing


def test_the_estimate_of_the_divergence_is_right_in_the_mean() -> None:
    """Summed over everything that can be drawn, by how likely it is."""
    sampler, trainer = [0.5, 0.3, 0.2], [0.25, 0.25, 0.5]
    estimate = sum(
        share * measured([math.log(p)], [math.log(share)], [1.0])["sampler_kl:sum"]
        for share, p in zip(sampler, trainer, strict=True)
    )
    exact = sum(share * math.log(share / p) for share, p in zip(sampler, trainer, strict=True))
    assert estimate == pytest.approx(exact, rel=1e-5)
