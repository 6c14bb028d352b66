"""Losses of clients through the ranks: in one pass where a group is in one row, in two where it is not.

The oracle is the client-side way of the `tinker` SDK: its own functions compute the loss of the log probabilities that
a forward pass returned, and the gradient goes back as weights of a cross-entropy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from tinker.lib.public_interfaces.custom_loss import trace_loss

from strata.train.core import commands, model_options, ops
from tests.shell.train_runner.check_results import Check, Found
from tests.shell.train_runner.checks_lora import trained
from tests.shell.train_runner.driver import (
    Driver,
    Layout,
    apart,
    apart_by,
    array_of,
    datum,
    dense,
    logprobs_of,
    loss_of,
    on_last,
    packed,
)
from tests.shell.train_runner.test_custom_loss import dpo, reference_kl, to_core

EQUAL: Final = 5e-6
"""In float32: rows of another composition are summed in another order."""
PAIR: Final = {"group_size": 2.0}


def pair(driver: Driver, model: str, seed: int) -> list[ops.Datum]:
    """A chosen and a rejected answer, with the log probabilities of a reference near the model."""
    data = []
    for number, sign in enumerate((1.0, -1.0)):
        length = 5 + seed + 4 * number
        own = logprobs_of(driver.train(model, [datum(10 * seed + number, length)], forward_only=True))[0]
        reference = own + np.random.default_rng(seed).normal(0, 0.3, length)
        data.append(datum(10 * seed + number, length, reference=reference, sign=np.full(length, sign)))
    return data


def client_side(driver: Driver, model: str, data: Sequence[ops.Datum], compute: Any) -> tuple[float, dict[str, Any]]:
    """The loss, and the gradient after a second pass with weights, as `forward_backward_custom` does it."""
    returned = logprobs_of(driver.train(model, data, forward_only=True, layout=apart))
    leaves = [torch.tensor(each).requires_grad_() for each in returned]
    loss = compute(leaves)
    loss.backward()
    linear = []
    for one, leaf in zip(data, leaves, strict=True):
        assert leaf.grad is not None
        linear.append(ops.Datum(one.tokens, {**one.inputs, "weights": dense(-leaf.grad.numpy(), ops.DType.F32)}))
    driver.train(model, linear, layout=apart)
    return float(loss.detach()), driver.gradient(model)


def preferences_have_the_gradient_of_the_client_side_way_in_one_pass_and_in_two(driver: Driver, found: Found) -> None:
    model = trained(driver, "pairs")
    data = [one for seed in (1, 2, 3) for one in pair(driver, model, seed)]
    handle = trace_loss(dpo, {"logprobs": 1, "reference": 1, "sign": 1}, "session")
    tensors = [{name: torch.tensor(array_of(each)) for name, each in one.inputs.items()} for one in data]

    def compute(leaves: Sequence[torch.Tensor]) -> Any:
        groups = [slice(start, start + 2) for start in range(0, len(leaves), 2)]
        return sum(
            handle.graph(
                torch.cat(list(leaves[group])),
                torch.cat([each["reference"] for each in tensors[group]]),
                torch.cat([each["sign"] for each in tensors[group]]),
            )[0]
            for group in groups
        )

    expected, gradient = client_side(driver, model, data, compute)
    found.numbers["custom.dpo"] = expected
    layouts: Sequence[Layout] = (on_last, packed, apart)
    for layout in layouts:
        result = driver.train(
            model, data, loss=model_options.LossName.CUSTOM, config=PAIR, custom=to_core(handle), layout=layout
        )
        assert abs(loss_of(result) - expected) < EQUAL * 10, layout
        assert 0 <= result.metrics["custom/accuracy:mean"] <= 1
        distance = apart_by(gradient, driver.gradient(model))
        assert distance < EQUAL, (layout, distance)
        only = driver.train(
            model,
            data,
            loss=model_options.LossName.CUSTOM,
            config=PAIR,
            custom=to_core(handle),
            layout=layout,
            forward_only=True,
        )
        assert abs(loss_of(only) - expected) < EQUAL * 10
        assert driver.step(model, learning_rate=0.0)["grad_norm"] == 0.0


def a_loss_with_a_reference_model_has_the_gradient_of_the_client_side_way(driver: Driver, found: Found) -> None:
    del found
    model = trained(driver, "reference")
    data = [
        datum(
            seed,
            6 + seed,
            advantages=np.random.default_rng(seed).normal(0, 1, 6 + seed),
            reference=np.full(6 + seed, -5.0),
        )
        for seed in range(4)
    ]
    handle = trace_loss(reference_kl, {"logprobs": 1, "advantages": 1, "reference": 1}, "session")

    def compute(leaves: Sequence[torch.Tensor]) -> Any:
        inputs = [[torch.tensor(array_of(one.inputs[name])) for name in handle.input_names] for one in data]
        return sum(handle.graph(leaf, *own)[0] for leaf, own in zip(leaves, inputs, strict=True))

    expected, gradient = client_side(driver, model, data, compute)
    for layout in (packed, apart):
        result = driver.train(model, data, loss=model_options.LossName.CUSTOM, custom=to_core(handle), layout=layout)
        assert abs(loss_of(result) - expected) < 1e-5 * abs(expected)
        assert apart_by(gradient, driver.gradient(model)) < EQUAL


def a_loss_that_fails_leaves_the_gradients_of_all_as_they_were(driver: Driver, found: Found) -> None:
    """Also those of its own model from before, and those of its neighbours in the row."""
    del found
    model, other = trained(driver, "broken"), trained(driver, "neighbour")
    data = [datum(1, 5, reference=np.zeros(5), sign=np.ones(5)), datum(2, 7, reference=np.zeros(7), sign=np.ones(7))]

    def root(logprobs: torch.Tensor, reference: torch.Tensor, sign: torch.Tensor) -> Any:
        return (logprobs * 0 * sign + reference).sqrt().sum(), {}

    def unfitting(logprobs: torch.Tensor, reference: torch.Tensor, sign: torch.Tensor) -> Any:
        return (logprobs[:-1] + reference * sign).sum(), {}

    driver.train(other, data)
    alone = driver.gradient(other)
    for fn, words in ((root, "a gradient of its loss is not finite"), (unfitting, "graph: node")):
        custom = to_core(trace_loss(fn, {"logprobs": 1, "reference": 1, "sign": 1}, "session"))
        for layout in (on_last, apart):
            items = [
                commands.PassItem(
                    "a", model, model_options.LossName.CUSTOM, PAIR, ops.encode_pass_data(ops.PassData(data, custom))
                ),
                commands.PassItem(
                    "b", other, model_options.LossName.CROSS_ENTROPY, {}, ops.encode_pass_data(ops.PassData(data))
                ),
            ]
            rows = layout([data, data], driver.ranks)
            failed, fine = driver.do(commands.PassCommand(False, items, rows))
            assert isinstance(failed, ops.Failed), failed
            assert failed.category == "user"
            assert words in failed.message, failed
            assert isinstance(fine, ops.PassDone), fine
            assert apart_by(alone, driver.gradient(other)) < 2e-5
            assert driver.step(model, learning_rate=0.0)["grad_norm"] == 0.0


CHECKS: tuple[Check, ...] = (
    preferences_have_the_gradient_of_the_client_side_way_in_one_pass_and_in_two,
    a_loss_with_a_reference_model_has_the_gradient_of_the_client_side_way,
    a_loss_that_fails_leaves_the_gradients_of_all_as_they_were,
)
