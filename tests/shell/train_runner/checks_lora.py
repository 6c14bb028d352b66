"""Adapters: the same numbers as Hugging Face and PEFT, however the work is cut, packed, ordered and shared."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch

from strata.train.core import commands, model_options, ops
from strata.train.runner.checkpoint.formats import to_peft
from tests.shell.train_runner import reference
from tests.shell.train_runner.check_results import Check, Found
from tests.shell.train_runner.driver import (
    Driver,
    Layout,
    apart,
    apart_by,
    backwards,
    batch,
    datum,
    dense,
    logprobs_of,
    loss_of,
    on_last,
    outcome,
    packed,
)

SMALL = model_options.LoraConfig(rank=4, alpha=8.0, seed=1)
LARGER = model_options.LoraConfig(rank=8, alpha=8.0, seed=2)
HEAD_ONLY = model_options.LoraConfig(rank=2, alpha=4.0, seed=3, train_attn=False, train_mlp=False)
CLOSE = 2e-5


def trained(driver: Driver, name: str, lora: model_options.LoraConfig = SMALL, data: int = 50) -> str:
    """A model that is no longer the base: B is not zero any more."""
    driver.create(name, lora)
    driver.train(name, batch(seed=data))
    driver.step(name, learning_rate=0.02)
    return name


def losses_logprobs_and_gradients_are_those_of_peft(driver: Driver, found: Found) -> None:
    model = trained(driver, "parity")
    saved = driver.save(model, "parity", "sampler_weights")
    assert isinstance(saved, ops.WeightsSaved), saved
    name = driver.dispatcher._runner.settings.name
    peft = reference.with_adapter(found.models / name, driver.folder / "parity")
    loss, logprobs, gradients = reference.train(peft, batch())
    result = driver.train(model, batch())
    for ours, theirs in zip(logprobs_of(result), logprobs, strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), atol=2e-4)
    assert abs(loss_of(result) - loss) < 1e-4 * abs(loss)
    own = to_peft(driver.gradient(model))
    assert apart_by({name.replace("default.", ""): value for name, value in gradients.items()}, own) < 2e-4
    found.numbers[f"parity.{name}"] = loss_of(result)
    driver.unload(model)


def a_loss_is_a_sum_and_twice_the_weight_is_twice_the_gradient(driver: Driver, found: Found) -> None:
    model = trained(driver, "sum")
    once = driver.train(model, batch())
    assert abs(loss_of(once) + sum(float(own.sum()) for own in logprobs_of(once))) < 1e-3
    gradient = driver.gradient(model)
    heavy = [datum(number, 5 + 3 * number, weights=np.full(5 + 3 * number, 2.0)) for number in range(4)]
    assert abs(loss_of(driver.train(model, heavy)) - 2 * loss_of(once)) < 1e-3
    assert apart_by({name: 2 * value for name, value in gradient.items()}, driver.gradient(model)) < CLOSE
    found.numbers["sum.loss"] = loss_of(once)
    found.numbers |= {f"sum.gradient.{name}": float(value.double().norm()) for name, value in gradient.items()}
    driver.unload(model)


def one_operation_or_four_make_the_same_gradient(driver: Driver, found: Found) -> None:
    model = trained(driver, "split")
    driver.train(model, batch())
    whole = driver.gradient(model)
    for one in batch():
        driver.train(model, [one])
    assert apart_by(whole, driver.gradient(model)) < CLOSE
    driver.unload(model)


def rows_and_ranks_make_no_difference_and_outputs_keep_their_order(driver: Driver, found: Found) -> None:
    model = trained(driver, "pack")
    expected = driver.train(model, batch(5))
    gradient = driver.gradient(model)
    for layout in (apart, backwards, on_last):
        result = driver.train(model, batch(5), layout=layout)
        for ours, theirs in zip(logprobs_of(result), logprobs_of(expected), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-4)
        assert apart_by(gradient, driver.gradient(model)) < CLOSE, layout.__name__
    driver.unload(model)


def neighbours_of_other_clients_change_nothing(driver: Driver, found: Found, layout: Layout = packed) -> None:
    mine, other, third = trained(driver, "mine"), trained(driver, "other", LARGER), trained(driver, "third", HEAD_ONLY)
    alone = driver.train(mine, batch())
    gradient = driver.gradient(mine)
    theirs_alone = driver.train(other, batch(seed=7))
    theirs = driver.gradient(other)
    results = driver.passes((other, batch(seed=7)), (mine, batch()), (third, batch(2, seed=8)), layout=layout)
    for together, single in ((results[1], alone), (results[0], theirs_alone)):
        for ours, expected in zip(logprobs_of(outcome(together)), logprobs_of(single), strict=True):
            np.testing.assert_allclose(ours, expected, atol=1e-4)
    assert apart_by(gradient, driver.gradient(mine)) < CLOSE
    assert apart_by(theirs, driver.gradient(other)) < CLOSE
    assert max(float(value.abs().max()) for value in driver.gradient(third).values()) > 0
    for model in (mine, other, third):
        driver.unload(model)


def weights_are_any_real_numbers(driver: Driver, found: Found) -> None:
    """The gradient is linear in the weights, so that of a mixture is the mixture of those of single tokens."""
    model = trained(driver, "real")
    weights = np.array([0.25, -1.5, 0.0, 3.0])
    result = driver.train(model, [datum(9, 4, weights=weights)])
    (logprobs,) = logprobs_of(result)
    assert abs(loss_of(result) + float((weights * logprobs).sum())) < 1e-4
    mixed = driver.gradient(model)
    total: dict[str, torch.Tensor] = {}
    for place, weight in enumerate(weights):
        driver.train(model, [datum(9, 4, weights=np.eye(4)[place])])
        for name, value in driver.gradient(model).items():
            total[name] = total.get(name, torch.zeros_like(value)) + float(weight) * value
    assert apart_by(mixed, total) < CLOSE
    driver.unload(model)


def zero_weights_give_logprobs_and_no_gradient(driver: Driver, found: Found) -> None:
    model = trained(driver, "zero")
    expected = logprobs_of(driver.train(model, [datum(3, 8)]))[0]
    driver.do(commands.ManageModel(ops.AbortGradients(model, 1)))
    result = driver.train(model, [datum(3, 8, weights=np.zeros(8))])
    np.testing.assert_array_equal(logprobs_of(result)[0], expected)
    assert loss_of(result) == 0
    assert max(float(value.abs().max()) for value in driver.gradient(model).values()) == 0
    driver.unload(model)


def forward_only_leaves_gradients_untouched(driver: Driver, found: Found) -> None:
    model = trained(driver, "forward")
    expected = driver.train(model, batch())
    gradient = driver.gradient(model)
    driver.train(model, batch())
    looked = driver.train(model, batch(seed=4), forward_only=True)
    assert loss_of(looked) > 0
    assert apart_by(gradient, driver.gradient(model)) == 0
    again = driver.train(model, batch(), forward_only=True)
    np.testing.assert_allclose(logprobs_of(again)[0], logprobs_of(expected)[0], atol=1e-5)
    assert max(float(value.abs().max()) for value in driver.gradient(model).values()) == 0
    driver.unload(model)


def aborted_gradients_are_gone(driver: Driver, found: Found) -> None:
    model = trained(driver, "abort")
    driver.train(model, batch())
    assert driver.do(commands.ManageModel(ops.AbortGradients(model, 1))) == [ops.GradientsAborted()]
    assert max(float(value.abs().max()) for value in driver.gradient(model).values()) == 0
    driver.unload(model)


def a_loss_that_is_not_finite_names_its_datum_and_adds_nothing(driver: Driver, found: Found) -> None:
    model = trained(driver, "nan")
    driver.train(model, batch())
    before = driver.gradient(model)
    driver.train(model, batch())
    endless = [*batch(2), datum(5, 6, weights=np.full(6, 3e38))]
    (result,) = driver.passes((model, endless))
    assert isinstance(result, ops.Failed), result
    assert (result.category, result.message[:8]) == ("user", "datum 2:"), result
    assert "inf" in result.message
    assert apart_by(before, driver.gradient(model)) == 0
    driver.unload(model)


def a_broken_model_does_not_reach_its_neighbours(driver: Driver, found: Found) -> None:
    """Its activations are NaN: they must stay inside its documents, and its own operation alone fails."""
    mine, broken = trained(driver, "healthy"), trained(driver, "broken")
    driver.train(broken, batch())
    driver.step(broken, learning_rate=1e36)
    expected = driver.train(mine, batch())
    gradient = driver.gradient(mine)
    healthy, failed = driver.passes((mine, batch()), (broken, batch(seed=2)))
    assert isinstance(failed, ops.Failed), failed
    assert "datum 0: its loss is nan" in failed.message
    for ours, theirs in zip(logprobs_of(outcome(healthy)), logprobs_of(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
    assert apart_by(gradient, driver.gradient(mine)) < CLOSE
    for model in (mine, broken):
        driver.unload(model)


def repeats(
    driver: Driver, *items: tuple[str, list[ops.Datum]], times: Sequence[int], forward_only: bool = False
) -> Sequence[ops.Result]:
    """The results of one pass, of which rank 0 is to compute the documents of each item so many times."""
    datums = [own for _, own in items]
    results = driver.passes(*items, forward_only=forward_only)
    row = packed(datums, driver.ranks)[0][0]
    expected = sum(times[place.item] * datums[place.item][place.datum].length for place in row)
    assert driver.dispatcher._runner.times.tokens == expected
    return results


def a_broken_model_is_computed_twice_and_its_neighbours_once(driver: Driver, found: Found) -> None:
    """On whichever rank its only token is: the others have to know of it, and to meet that rank a second time. The same
    pass again, as ranks that start anew do it, makes the same bits."""
    mine, broken = trained(driver, "steady"), trained(driver, "broken")
    driver.train(broken, batch())
    driver.step(broken, learning_rate=1e36)
    driver.train(mine, batch(3))
    gradient = driver.gradient(mine)
    shared = []
    for first, forward_only in ((True, False), (True, True), (False, True), (False, False), (False, False)):
        items = [(broken, [datum(1, 1)]), (mine, batch(3))][:: 1 if first else -1]
        results = repeats(driver, *items, times=[2, 1] if first else [1, 2], forward_only=forward_only)
        healthy, failed = results[:: -1 if first else 1]
        outcome(healthy)
        assert isinstance(failed, ops.Failed), failed
        assert "datum 0: its loss is nan" in failed.message
        if not forward_only:
            shared.append(driver.gradient(mine))
            assert apart_by(gradient, shared[-1]) < CLOSE
    assert apart_by(shared[-2], shared[-1]) == 0
    for model in (mine, broken):
        driver.unload(model)


def an_endless_loss_leaves_what_the_same_client_sent_beside_it(driver: Driver, found: Found) -> None:
    mine, other = trained(driver, "mine"), trained(driver, "other", LARGER)
    driver.train(mine, batch())
    gradient = driver.gradient(mine)
    driver.train(other, batch(3, seed=7))
    theirs = driver.gradient(other)
    endless = [*batch(1, seed=3), datum(5, 6, weights=np.full(6, 3e38))]
    items = [(mine, batch()), (other, batch(3, seed=7)), (mine, endless)]
    results = repeats(driver, *items, times=[2, 1, 2])
    outcome(results[0])
    outcome(results[1])
    assert isinstance(results[2], ops.Failed), results[2]
    assert results[2].message.startswith("datum 1: its loss is"), results[2]
    assert apart_by(gradient, driver.gradient(mine)) < CLOSE
    assert apart_by(theirs, driver.gradient(other)) < CLOSE
    for model in (mine, other):
        driver.unload(model)


def gradients_that_are_not_finite_beside_a_broken_model_are_computed_again(driver: Driver, found: Found) -> None:
    """The loss of such a pass is finite, so it is alone too, and the step says what is wrong with the gradients."""
    mine, broken, steep = trained(driver, "steady"), trained(driver, "broken"), "steep"
    driver.train(broken, batch())
    driver.step(broken, learning_rate=1e36)
    driver.create(steep, model_options.LoraConfig(rank=4, alpha=4e20, seed=4))
    driver.train(mine, batch())
    gradient = driver.gradient(mine)
    heavy = [datum(3, 8, weights=np.full(8, 1e30))]
    results = repeats(driver, (steep, heavy), (mine, batch()), (broken, batch(2)), times=[2, 1, 2])
    outcome(results[0])
    outcome(results[1])
    assert isinstance(results[2], ops.Failed), results[2]
    assert apart_by(gradient, driver.gradient(mine)) < CLOSE
    (stepped,) = driver.do(commands.StepsCommand([ops.OptimStep(steep, 1, model_options.AdamParams())]))
    assert isinstance(stepped, ops.Failed), stepped
    assert "the norm of the gradients is" in stepped.message
    for model in (mine, broken, steep):
        driver.unload(model)


def a_request_that_cannot_be_computed_fails_alone(driver: Driver, found: Found) -> None:
    model = trained(driver, "alone")
    short = [*batch(2), datum(5, 6, weights=np.ones(5))]
    foreign = [datum(5, 6, target_tokens=dense(np.full(6, 512), ops.DType.I64))]
    results = driver.passes((model, short), (model, batch()), ("nobody", batch()), (model, foreign))
    messages = [one.message if isinstance(one, ops.Failed) else "" for one in results]
    assert messages == [
        "datum 2: weights has the shape (5,) where target_tokens has (6,)",
        "",
        "there is no model 'nobody'",
        "datum 0: target_tokens holds a token that is not one of the 512 of the vocabulary",
    ]
    alone = driver.gradient(model)
    driver.train(model, batch())
    assert apart_by(alone, driver.gradient(model)) < CLOSE
    (broken,) = driver.do(
        commands.PassCommand(
            False, [commands.PassItem("r", model, model_options.LossName.DRO, {}, b"?")], [[[]]] * driver.ranks
        )
    )
    assert isinstance(broken, ops.Failed)
    assert broken.category == "user"
    (unplaced,) = driver.passes((model, batch()), layout=lambda items, ranks: packed([items[0][:2]], ranks))
    assert isinstance(unplaced, ops.Failed)
    assert unplaced.category == "server"
    driver.unload(model)


def the_same_again_is_the_same_bits(driver: Driver, found: Found) -> None:
    digests = []
    for turn in range(2):
        model = trained(driver, f"bits-{turn}", model_options.LoraConfig(rank=4, alpha=8.0, seed=11))
        for number in range(3):
            driver.train(model, batch(seed=number))
            driver.step(model, learning_rate=0.01, weight_decay=0.1, grad_clip_norm=1.0)
        state = driver.state(model)
        digests.append(hashlib.sha256(b"".join(state[name].numpy().tobytes() for name in sorted(state))).hexdigest())
        driver.unload(model)
    assert digests[0] == digests[1]
    found.numbers["bits"] = float(int(digests[0][:12], 16))


def a_model_without_a_seed_begins_the_same_every_time_and_another_differently(driver: Driver, found: Found) -> None:
    states = []
    for name in ("one", "one", "two"):
        driver.create(name, model_options.LoraConfig(rank=4))
        states.append(driver.state(name))
        driver.unload(name)
    assert apart_by(states[0], states[1]) == 0
    assert apart_by(states[0], states[2]) > 0


def what_does_not_fit_is_not_created(driver: Driver, found: Found) -> None:
    def refused(name: str, lora: model_options.LoraConfig | None) -> str:
        (result,) = driver.do(commands.ManageModel(ops.CreateModel(name, "tiny", lora)))
        assert isinstance(result, ops.Failed), result
        return result.message

    assert "lora_config" in refused("x", None)
    assert "rank must be 1 to 64 (model.max_lora_rank of the server)" in refused("x", model_options.LoraConfig(rank=65))
    nothing = model_options.LoraConfig(train_attn=False, train_mlp=False, train_unembed=False)
    assert "nothing is to be trained" in refused("x", nothing)
    for number in range(8):
        driver.create(f"full-{number}", HEAD_ONLY)
    assert "the limit of 8 models" in refused("x", SMALL)
    assert "already" in refused("full-0", SMALL) or "places" in refused("full-0", SMALL)
    for number in range(8):
        driver.unload(f"full-{number}")


def the_gradient_does_not_depend_on_what_is_kept_for_it(driver: Driver, found: Found) -> None:
    """Logits in pieces and layers computed twice: the numbers are those of the plain way."""
    model = trained(driver, "sum")
    result = driver.train(model, batch())
    found.numbers["thrifty.loss"] = loss_of(result)
    for name, value in driver.gradient(model).items():
        found.numbers[f"thrifty.gradient.{name}"] = float(value.double().norm())
    driver.unload(model)


def half_precision_is_close(driver: Driver, found: Found) -> None:
    model = trained(driver, "sum")
    found.numbers["half.loss"] = loss_of(driver.train(model, batch()))
    assert {value.dtype for value in driver.gradient(model).values()} == {torch.float32}
    driver.unload(model)


PARITY: tuple[Check, ...] = (
    losses_logprobs_and_gradients_are_those_of_peft,
    neighbours_of_other_clients_change_nothing,
)
SAME_NUMBERS: tuple[Check, ...] = (the_gradient_does_not_depend_on_what_is_kept_for_it, *PARITY)
ROUGHLY: tuple[Check, ...] = (half_precision_is_close,)
CHECKS: tuple[Check, ...] = (
    *PARITY,
    a_loss_is_a_sum_and_twice_the_weight_is_twice_the_gradient,
    one_operation_or_four_make_the_same_gradient,
    rows_and_ranks_make_no_difference_and_outputs_keep_their_order,
    weights_are_any_real_numbers,
    zero_weights_give_logprobs_and_no_gradient,
    forward_only_leaves_gradients_untouched,
    aborted_gradients_are_gone,
    a_loss_that_is_not_finite_names_its_datum_and_adds_nothing,
    a_broken_model_does_not_reach_its_neighbours,
    a_broken_model_is_computed_twice_and_its_neighbours_once,
    an_endless_loss_leaves_what_the_same_client_sent_beside_it,
    gradients_that_are_not_finite_beside_a_broken_model_are_computed_again,
    a_request_that_cannot_be_computed_fails_alone,
    the_same_again_is_the_same_bits,
    a_model_without_a_seed_begins_the_same_every_time_and_another_differently,
    what_does_not_fit_is_not_created,
)
