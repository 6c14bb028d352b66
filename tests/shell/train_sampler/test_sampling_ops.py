"""What is drawn follows the distribution that Hugging Face's warpers make of the same logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from strata.train.core.sampling import SampleParams
from strata.train.runner.sampling.sampling_ops import LogitsProcessor, SeededRng, sample_tokens
from tests.shell.train_sampler.stage import Array, surprising, warpers

CPU = torch.device("cpu")
LOGITS = torch.tensor([1.5, -0.3, 0.9, 2.0, -4.0, 0.0, 1.1, -1.2])
KINDS = (
    SampleParams(),
    SampleParams(temperature=0.6),
    SampleParams(temperature=2.5),
    SampleParams(top_k=3),
    SampleParams(top_p=0.8),
    SampleParams(top_p=0.95, temperature=1.7),
    SampleParams(top_k=5, top_p=0.7, temperature=1.3),
    SampleParams(top_k=1),
    SampleParams(top_k=100, top_p=0.999),
    SampleParams(top_p=1e-9),
)


def expected(logits: torch.Tensor, params: SampleParams) -> torch.Tensor:
    return torch.softmax(warpers(params)(torch.zeros(len(logits), 1, dtype=torch.int64), logits.clone()), -1)


def draws(params: SampleParams, count: int) -> Array:
    uniform = torch.tensor([SeededRng(f"sequence {number}").next() for number in range(count)], dtype=torch.float64)
    chosen = sample_tokens(LOGITS.expand(count, -1), LogitsProcessor([params] * count, len(LOGITS), CPU), uniform)
    return np.bincount(chosen.tokens.numpy(), minlength=len(LOGITS))


@pytest.mark.parametrize("params", KINDS[:7])
def test_draws_follow_the_distribution(params: SampleParams) -> None:
    count = 20_000
    wanted = expected(LOGITS[None], params)[0].double().numpy() * count
    assert surprising(draws(params, count), wanted) < 3.5


def test_the_measure_of_surprise_notices_another_temperature() -> None:
    count = 20_000
    wanted = expected(LOGITS[None], SampleParams(temperature=1.1))[0].double().numpy() * count
    assert surprising(draws(SampleParams(), count), wanted) > 3.5


def test_later_draws_of_one_sequence_follow_the_distribution_too() -> None:
    chance = SeededRng("one")
    count = 20_000
    uniform = torch.tensor([chance.next() for _ in range(count)], dtype=torch.float64)
    chosen = sample_tokens(LOGITS.expand(count, -1), LogitsProcessor([KINDS[0]] * count, len(LOGITS), CPU), uniform)
    wanted = expected(LOGITS[None], KINDS[0])[0].double().numpy() * count
    assert surprising(np.bincount(chosen.tokens.numpy(), minlength=len(LOGITS)), wanted) < 3.5


def test_rows_of_every_kind_in_one_batch_have_each_their_own_distribution() -> None:
    torch.manual_seed(0)
    logits = torch.randn(len(KINDS), 3000) * 3
    chosen = sample_tokens(
        logits, LogitsProcessor(KINDS, 3000, CPU), torch.full((len(KINDS),), 0.5, dtype=torch.float64)
    )
    for row, params in enumerate(KINDS):
        wanted = expected(logits[row : row + 1], params)[0]
        torch.testing.assert_close(chosen.distribution[row].exp(), wanted, atol=1e-6, rtol=1e-4)
        assert wanted[chosen.tokens[row]] > 0
        assert chosen.logprobs[row] == chosen.distribution[row, chosen.tokens[row]]


def test_a_flat_distribution_is_cut_as_well_where_the_likeliest_tokens_are_not_enough() -> None:
    logits = torch.randn(1, 5000, generator=torch.Generator().manual_seed(1)) * 0.1
    params = SampleParams(top_p=0.9)
    chosen = sample_tokens(logits, LogitsProcessor([params], 5000, CPU), torch.tensor([0.3], dtype=torch.float64))
    kept, wanted = chosen.distribution[0] > -torch.inf, expected(logits, params)[0] > 0
    assert int((kept != wanted).sum()) <= 1, "rounding may decide over the last one"


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
def test_a_token_without_probability_is_never_drawn(uniform: float) -> None:
    logits = torch.tensor([[-torch.inf, 1.0, -torch.inf, 1.0, -torch.inf]])
    chosen = sample_tokens(
        logits, LogitsProcessor([SampleParams()], 5, CPU), torch.tensor([uniform], dtype=torch.float64)
    )
    assert int(chosen.tokens[0]) in (1, 3)


def test_cold_rows_take_the_likeliest_token_beside_rows_that_draw() -> None:
    params = [SampleParams(temperature=0.0), SampleParams(), SampleParams(temperature=1e-5)]
    uniform = torch.full((3,), 1 - 1e-9, dtype=torch.float64)
    chosen = sample_tokens(LOGITS.expand(3, -1), LogitsProcessor(params, len(LOGITS), CPU), uniform)
    assert chosen.tokens.tolist() == [3, 7, 3]
    torch.testing.assert_close(chosen.distribution[0], torch.log_softmax(LOGITS, -1))
    assert chosen.logprobs[2] == 0


def test_logits_that_are_not_numbers_show_in_the_logprob_and_in_no_other_row() -> None:
    logits = torch.stack([LOGITS, torch.full_like(LOGITS, torch.nan), LOGITS])
    uniform = torch.full((3,), 0.5, dtype=torch.float64)
    chosen = sample_tokens(logits, LogitsProcessor([SampleParams(top_p=0.9)] * 3, len(LOGITS), CPU), uniform)
    assert chosen.logprobs.isfinite().tolist() == [True, False, True]


def test_chance_follows_from_the_name_alone() -> None:
    one, same, other = SeededRng("a/1/0"), SeededRng("a/1/0"), SeededRng("a/1/1")
    first = [one.next() for _ in range(300)]
    assert first == [same.next() for _ in range(300)]
    assert len({*first, *(other.next() for _ in range(300))}) == 600
    assert all(0 <= number < 1 for number in first)
