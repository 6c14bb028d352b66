"""Full fine-tuning: the same numbers as Hugging Face, sums over the ranks, and files that Hugging Face reads."""

from __future__ import annotations

import numpy as np

from strata.train.core import commands, model_options, ops
from tests.shell.train_runner import reference
from tests.shell.train_runner.check_results import Check, Found
from tests.shell.train_runner.dispatched import Dispatched
from tests.shell.train_runner.driver import (
    Driver,
    apart,
    apart_by,
    batch,
    datum,
    logprobs_of,
    loss_of,
    on_last,
    packed,
    tokens_of,
)


def losses_and_gradients_are_those_of_hugging_face(driver: Driver, found: Found) -> None:
    driver.create("whole", None)
    name = driver.dispatcher._runner.settings.name
    loss, logprobs, gradients = reference.train(reference.plain(found.models / name), batch())
    result = driver.train("whole", batch())
    for ours, theirs in zip(logprobs_of(result), logprobs, strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), atol=2e-4)
    assert abs(loss_of(result) - loss) < 1e-4 * abs(loss)
    assert apart_by(gradients, driver.gradient("whole")) < 2e-4
    found.numbers[f"whole.{name}"] = loss_of(result)
    driver.unload("whole")


def rows_ranks_and_operations_make_no_difference(driver: Driver, found: Found) -> None:
    driver.create("cut", None)
    driver.train("cut", batch(5))
    whole = driver.gradient("cut")
    for layout in (apart, on_last):
        driver.train("cut", batch(5), layout=layout)
        assert apart_by(whole, driver.gradient("cut")) < 2e-5, layout.__name__
    for one in batch(5):
        driver.train("cut", [one])
    assert apart_by(whole, driver.gradient("cut")) < 2e-5
    driver.unload("cut")


def gradients_are_reduced_once_in_a_pass(driver: Driver, found: Found) -> None:
    """However many rows it has."""
    driver.create("reduced", None)
    reduced = []
    for layout in (packed, apart):
        with Dispatched() as dispatched:
            driver.train("reduced", batch(6), layout=layout)
        reduced.append(dispatched.count("reduce_scatter"))
    assert reduced[0] == reduced[1]
    assert reduced[0] > 0 or driver.ranks == 1
    driver.unload("reduced")


def what_fails_or_only_looks_adds_nothing(driver: Driver, found: Found) -> None:
    driver.create("careful", None)
    driver.train("careful", batch())
    expected = driver.gradient("careful")
    driver.train("careful", batch())
    (result,) = driver.passes(("careful", [*batch(2), datum(5, 6, weights=np.full(6, 3e38))]))
    assert isinstance(result, ops.Failed)
    assert "datum 2: its loss is" in result.message
    driver.train("careful", batch(seed=3), forward_only=True)
    assert apart_by(expected, driver.gradient("careful")) == 0
    driver.train("careful", batch())
    assert driver.do(commands.ManageModel(ops.AbortGradients("careful", 1))) == [ops.GradientsAborted()]
    assert max(float(value.abs().max()) for value in driver.gradient("careful").values()) == 0
    driver.unload("careful")


def training_goes_on_from_a_checkpoint_and_the_next_model_begins_with_the_base(driver: Driver, found: Found) -> None:
    driver.create("first", None)
    untrained = driver.train("first", batch(), forward_only=True)
    for number in range(2):
        driver.train("first", batch(seed=number))
        driver.step("first", learning_rate=1e-3, weight_decay=0.1, grad_clip_norm=1.0)
    assert isinstance(driver.save("first", "middle"), ops.WeightsSaved)
    states = []
    for turn in range(2):
        if turn:
            assert isinstance(driver.load("first", "middle"), ops.WeightsLoaded)
        driver.train("first", batch(seed=5))
        found.numbers["whole.grad_norm"] = driver.step("first", learning_rate=1e-3)["grad_norm"]
        states.append(driver.state("first"))
    assert apart_by(states[0], states[1]) == 0
    result = driver.train("first", batch(), forward_only=True)
    assert isinstance(driver.save("first", "exported", "sampler_weights"), ops.WeightsSaved)
    model = reference.plain(driver.folder / "exported")
    for one, ours in zip(batch(), logprobs_of(result), strict=True):
        theirs = reference.logprobs(model, one).detach().numpy()
        np.testing.assert_allclose(ours, theirs, atol=2e-4)
        assert len(tokens_of(one)) == len(ours)
    driver.unload("first")
    driver.create("second", None)
    fresh = driver.train("second", batch(), forward_only=True)
    assert loss_of(fresh) == loss_of(untrained) != loss_of(result)
    driver.unload("second")


def one_model_owns_the_base(driver: Driver, found: Found) -> None:
    driver.create("owner", None)
    (second,) = driver.do(commands.ManageModel(ops.CreateModel("guest", "tiny", None)))
    assert isinstance(second, ops.Failed)
    assert second.category == "server"
    driver.unload("owner")
    (adapter,) = driver.do(commands.ManageModel(ops.CreateModel("guest", "tiny", model_options.LoraConfig())))
    assert isinstance(adapter, ops.Failed)
    assert adapter.category == "user"
    (muon,) = driver.do(commands.ManageModel(ops.CreateModel("guest", "tiny", None, optimizer="muon")))
    assert isinstance(muon, ops.Failed)
    assert "whole matrices" in muon.message


def a_step_without_a_pass_is_not_left_behind_for_the_next_model(driver: Driver, found: Found) -> None:
    """It has no gradient, and lets the weights decay all the same."""
    driver.create("first", None)
    untrained = driver.train("first", batch(), forward_only=True)
    driver.unload("first")
    driver.create("decayed", None)
    driver.step("decayed", learning_rate=0.1, weight_decay=0.5)
    driver.unload("decayed")
    driver.create("next", None)
    assert loss_of(driver.train("next", batch(), forward_only=True)) == loss_of(untrained)
    driver.unload("next")


def sleep_and_wake_change_nothing(driver: Driver, found: Found) -> None:
    driver.create("sleepy", None)
    driver.train("sleepy", batch())
    driver.step("sleepy", learning_rate=1e-3)
    expected = driver.state("sleepy")
    (asleep,) = driver.do(commands.ManageModel(ops.Sleep()))
    assert isinstance(asleep, ops.Asleep)
    runner = driver.dispatcher._runner
    # Of a device it is measured, and a block that has other tensors too stays.
    if runner.ranks.device.type == "cpu":
        assert asleep.freed_bytes >= 3 * 4 * runner.base.parameters
    assert driver.do(commands.ManageModel(ops.Wake())) == [ops.Awake()]
    assert apart_by(expected, driver.state("sleepy")) == 0
    driver.train("sleepy", batch())
    driver.step("sleepy", learning_rate=1e-3)
    driver.unload("sleepy")


PARITY: tuple[Check, ...] = (losses_and_gradients_are_those_of_hugging_face,)
OFFLOADED: tuple[Check, ...] = (
    *PARITY,
    training_goes_on_from_a_checkpoint_and_the_next_model_begins_with_the_base,
)
CHECKS: tuple[Check, ...] = (
    *PARITY,
    rows_ranks_and_operations_make_no_difference,
    gradients_are_reduced_once_in_a_pass,
    what_fails_or_only_looks_adds_nothing,
    training_goes_on_from_a_checkpoint_and_the_next_model_begins_with_the_base,
    one_model_owns_the_base,
    a_step_without_a_pass_is_not_left_behind_for_the_next_model,
    sleep_and_wake_change_nothing,
)
