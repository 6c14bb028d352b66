"""Compositions of tenants that share a pass, and what must not depend on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from strata.train.core import commands, model_options, ops
from strata.train.core.pack import pack
from tests.shell.train_runner.check_results import Check, Found
from tests.shell.train_runner.driver import Driver, Layout, batch, datum, logprobs_of, outcome

CLOSE_LOGPROBS: Final = 1e-4
CLOSE_GRADIENTS: Final = 2e-5
"""Of the largest number of the gradient. Matrices of another height are multiplied in another order, no more."""

TENANTS: Final[Mapping[str, model_options.LoraConfig]] = {
    "small": model_options.LoraConfig(rank=1, alpha=3.0, seed=1),
    "usual": model_options.LoraConfig(rank=8, alpha=16.0, seed=2),
    "attention": model_options.LoraConfig(rank=4, alpha=1.0, seed=3, train_mlp=False, train_unembed=False),
    "mlp": model_options.LoraConfig(rank=16, alpha=8.0, seed=4, train_attn=False, train_unembed=False),
    "head": model_options.LoraConfig(rank=3, alpha=32.0, seed=5, train_attn=False, train_mlp=False),
    "wide": model_options.LoraConfig(rank=64, alpha=64.0, seed=6),
}


@dataclass(frozen=True)
class Composition:
    """Who is in a pass, with documents of these lengths, and how long its rows may be."""

    lengths: Mapping[str, Sequence[int]]
    row_tokens: int
    seed: int

    def datums(self, name: str) -> list[ops.Datum]:
        """Of a tenant, whoever else is there."""
        first = self.seed * 10_000 + 100 * list(TENANTS).index(name)
        return [datum(first + number, length) for number, length in enumerate(self.lengths[name])]

    def layout(self) -> Layout:
        """As the orchestrator would have it."""

        def rows(items: Sequence[Sequence[ops.Datum]], ranks: int) -> list[list[list[commands.Segment]]]:
            lengths = [[len(each.tokens) // 4 for each in datums] for datums in items]
            found = pack(lengths, ranks=ranks, max_tokens_per_row=self.row_tokens, max_context=2048).rows
            return [[list(row) for row in own] for own in found]

        return rows


def settle(driver: Driver) -> None:
    """All tenants, each with an adapter that adds something of its own."""
    for number, (name, lora) in enumerate(TENANTS.items()):
        driver.create(name, lora)
        driver.train(name, batch(seed=50 + number))
        driver.step(name, learning_rate=0.02)


def independent(driver: Driver, given: Composition) -> None:
    """Everybody's log-probabilities and gradients are those that it has alone."""
    names = list(given.lengths)
    together = driver.passes(*((name, given.datums(name)) for name in names), layout=given.layout())
    shared = {name: driver.gradient(name) for name in names}
    for name, result in zip(names, together, strict=True):
        alone = driver.train(name, given.datums(name))
        for ours, expected in zip(logprobs_of(outcome(result)), logprobs_of(alone), strict=True):
            np.testing.assert_allclose(ours, expected, atol=CLOSE_LOGPROBS, err_msg=name)
        assert_close(name, shared[name], driver.gradient(name))


def assert_close(name: str, ours: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert ours.keys() == expected.keys()
    largest = max(float(value.abs().max()) for value in expected.values())
    assert largest > 0, f"{name} learns nothing"
    for weight, value in expected.items():
        worst = float((ours[weight] - value).abs().max()) / largest
        assert worst < CLOSE_GRADIENTS, f"{name}: {weight} is off by {worst:.2g} of the largest number"


class Quick(Driver):
    """Reads gradients where they are, which on one rank is all of them."""

    def gradient(self, model: str) -> dict[str, torch.Tensor]:
        trained: Any = self.dispatcher._runner.models[model]
        found = {name: value.clone() for name, value in trained.adapter.views(trained.gradients[0]).items()}
        assert self.do(commands.ManageModel(ops.AbortGradients(model, 1))) == [ops.GradientsAborted()]
        return found


def company_changes_nothing(driver: Driver, found: Found) -> None:
    """On as many ranks as there are: a tenant may have all its documents on one of them, and its company on others."""
    settle(driver)
    lengths = {"usual": [30, 7], "head": [12], "small": [1, 25, 9], "wide": [40], "mlp": [3, 3], "attention": [17]}
    independent(driver, Composition(lengths, row_tokens=64, seed=1))
    del found


CHECKS: tuple[Check, ...] = (company_changes_nothing,)
