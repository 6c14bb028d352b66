"""Steps, checkpoints and sleep: what was kept comes back bit for bit, and training goes on as if nothing had been."""

from __future__ import annotations

import msgspec
import numpy as np
import torch

from strata.train.core import commands, model_options, ops
from tests.shell.train_runner.check_results import Check, Found
from tests.shell.train_runner.checks_lora import LARGER, SMALL, trained
from tests.shell.train_runner.driver import Driver, apart_by, batch, logprobs_of


def steps_are_those_of_adamw(driver: Driver, found: Found) -> None:
    """With other numbers in every step, and a schedule; the gradients are those that the ranks summed."""
    driver.create("steps", SMALL, model_options.Schedule("cosine", warmup_steps=1, total_steps=4))
    start = _adapter(driver, "steps")
    flat = torch.nn.Parameter(start.clone())
    other = torch.optim.AdamW([flat], lr=1.0, fused=True)
    schedule = model_options.Schedule("cosine", warmup_steps=1, total_steps=4)
    orders = (
        {"learning_rate": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1},
        {"learning_rate": 0.02, "beta1": 0.8, "beta2": 0.99, "eps": 1e-6, "grad_clip_norm": 0.5},
        {"learning_rate": 0.005, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.01},
    )
    for number, order in enumerate(orders, start=1):
        driver.train("steps", batch(seed=number))
        model = driver.dispatcher._runner.models["steps"]
        gradient = _summed(driver)
        metrics = driver.step("steps", **order)
        norm = float(gradient.norm())
        assert abs(metrics["grad_norm"] - norm) < 1e-4 * norm
        assert metrics["lr"] == order["learning_rate"] * schedule.factor(number)
        clip = order.get("grad_clip_norm", 0.0)
        flat.grad = gradient * (clip / (norm + 1e-6)) if clip else gradient
        other.param_groups[0].update(
            lr=metrics["lr"],
            betas=(order["beta1"], order["beta2"]),
            eps=order["eps"],
            weight_decay=order.get("weight_decay", 0.0),
        )
        other.step()
        ours = _adapter(driver, "steps")
        assert float((ours - flat.detach()).abs().max()) < 1e-5
        assert model.optimizer.steps == number
        with torch.no_grad():
            flat.copy_(ours)
    driver.unload("steps")


def steps_are_those_of_muon(driver: Driver, found: Found) -> None:
    """Each matrix of an adapter is stepped alone; the optimizer of torch gets them as parameters of their own."""
    driver.create("steps", SMALL, optimizer="muon")
    adapter = driver.dispatcher._runner.models["steps"].adapter  # type: ignore[attr-defined]
    theirs = [torch.nn.Parameter(matrix.clone()) for matrix in adapter.blocks[0].matrices(adapter.flat.cpu())]
    other = torch.optim.Muon(theirs, lr=1.0)
    orders = (
        model_options.MuonParams(0.02, weight_decay=0.1),
        model_options.MuonParams(0.01, momentum=0.8, nesterov=False, grad_clip_norm=0.5),
        model_options.MuonParams(0.01, ns_steps=3, adjust_lr_fn="match_rms_adamw"),
    )
    for number, order in enumerate(orders, start=1):
        driver.train("steps", batch(seed=number))
        gradient = _summed(driver)
        metrics = driver.muon_step("steps", order)
        norm = float(gradient.norm())
        assert abs(metrics["grad_norm"] - norm) < 1e-4 * norm
        if order.grad_clip_norm:
            gradient *= order.grad_clip_norm / (norm + 1e-6)
        for matrix, own in zip(theirs, adapter.blocks[0].matrices(gradient), strict=True):
            matrix.grad = own
        settings = msgspec.structs.asdict(order)
        other.param_groups[0].update(settings, lr=settings.pop("learning_rate"))
        before = torch.cat([matrix.detach().flatten() for matrix in theirs])
        other.step()  # type: ignore[no-untyped-call]
        expected = torch.cat([matrix.detach().flatten() for matrix in theirs])
        # torch orthogonalises in bfloat16: where two gradients round otherwise, so do their updates.
        assert float((adapter.flat.cpu() - expected).abs().max()) < 0.02 * float((expected - before).abs().max())
        with torch.no_grad():
            for matrix, own in zip(theirs, adapter.blocks[0].matrices(adapter.flat.cpu()), strict=True):
                matrix.copy_(own)
    driver.unload("steps")


def a_model_with_muon_goes_on_from_a_checkpoint_and_takes_nothing_of_adamw(driver: Driver, found: Found) -> None:
    driver.create("muon", SMALL, optimizer="muon")
    states = []
    for name in ("muon", "resumed"):
        if name == "resumed":
            driver.create(name, SMALL, optimizer="muon")
            assert isinstance(driver.load(name, "muon-middle"), ops.WeightsLoaded)
        for number in range(4):
            if name == "muon" or number >= 2:
                driver.train(name, batch(seed=number))
                driver.muon_step(name, model_options.MuonParams(0.02))
            if name == "muon" and number == 1:
                assert isinstance(driver.save(name, "muon-middle"), ops.WeightsSaved)
        states.append(driver.state(name))
    assert apart_by(states[0], states[1]) == 0
    assert float(states[0]["momentum_buffer.lm_head.lora_A"].abs().max()) > 0
    (refused,) = driver.do(commands.StepsCommand([ops.OptimStep("muon", 9, model_options.AdamParams())]))
    _refuses(refused, "user", "created with muon")
    driver.create("adam", SMALL)
    _refuses(driver.load("adam", "muon-middle"), "user", "not one of adamw")
    (refused,) = driver.do(commands.StepsCommand([ops.OptimStep("adam", 9, None, model_options.MuonParams(0.02))]))
    _refuses(refused, "user", "created with adamw")
    for name in ("muon", "resumed", "adam"):
        driver.unload(name)


def _adapter(driver: Driver, name: str) -> torch.Tensor:
    model = driver.dispatcher._runner.models[name]
    return model.adapter.flat.cpu().clone()  # type: ignore[attr-defined, no-any-return]


def _summed(driver: Driver) -> torch.Tensor:
    """The gradient over all ranks, without touching the model: by a twin that has the same weights and data."""
    model = driver.dispatcher._runner.models["steps"]
    driver.create("twin", SMALL)
    saved = driver.save("steps", f"twin-{driver.number}", "sampler_weights")
    assert isinstance(saved, ops.WeightsSaved)
    assert isinstance(driver.load("twin", f"twin-{driver.number - 1}", optimizer=False), ops.WeightsLoaded)
    driver.train("twin", batch(seed=model.optimizer.steps + 1))
    gradient = driver.gradient("twin")
    driver.unload("twin")
    return torch.cat([gradient[name].flatten() for name in model.adapter.shapes])  # type: ignore[attr-defined]


def a_step_with_numbers_that_are_none_is_refused_and_endless_gradients_too(driver: Driver, found: Found) -> None:
    model = trained(driver, "odd")
    before = driver.state(model)
    for adam in (
        model_options.AdamParams(learning_rate=-1),
        model_options.AdamParams(beta1=1.0),
        model_options.AdamParams(eps=float("nan")),
    ):
        (result,) = driver.do(commands.StepsCommand([ops.OptimStep(model, 1, adam)]))
        assert isinstance(result, ops.Failed)
        assert result.category == "user"
    assert apart_by(before, driver.state(model)) == 0
    driver.unload(model)


def steps_made_together_are_bit_for_bit_those_made_alone(driver: Driver, found: Found) -> None:
    """Also beside one that is refused, and one of another size that has no gradient."""
    names = ("first", "refused", "idle", "last")
    states: list[dict[str, dict[str, torch.Tensor]]] = []
    for together in (False, True):
        for name in names:
            driver.create(name, LARGER if name == "idle" else SMALL)
        for number in range(2):
            for place, name in enumerate(names):
                if name != "idle":
                    driver.train(name, batch(seed=10 * number + place))
            orders = [
                ops.OptimStep(name, number, model_options.AdamParams(learning_rate=-1 if name == "refused" else 0.01))
                for name in names
            ]
            works = (
                [commands.StepsCommand(orders)] if together else [commands.StepsCommand([order]) for order in orders]
            )
            results = [result for work in works for result in driver.do(work)]
            assert [isinstance(result, ops.Failed) for result in results] == [name == "refused" for name in names]
        states.append({name: driver.state(name) for name in names})
        for name in names:
            driver.unload(name)
    assert all(apart_by(states[0][name], states[1][name]) == 0 for name in names)
    # They would also be equal if nothing had been done.
    assert float(states[0]["first"]["exp_avg.lm_head.lora_A"].abs().max()) > 0


def training_goes_on_from_a_checkpoint_bit_for_bit(driver: Driver, found: Found) -> None:
    model = trained(driver, "goes-on")
    assert isinstance(driver.save(model, "middle"), ops.WeightsSaved)
    states = []
    for name in (model, "resumed"):
        if name != model:
            driver.create(name, SMALL)
            assert isinstance(driver.load(name, "middle"), ops.WeightsLoaded)
        for number in range(2):
            driver.train(name, batch(seed=number))
            driver.step(name, learning_rate=0.01, weight_decay=0.1)
        states.append(driver.state(name))
    assert apart_by(states[0], states[1]) == 0
    assert isinstance(driver.load("resumed", "middle", optimizer=False), ops.WeightsLoaded)
    assert float(driver.state("resumed")["exp_avg.lm_head.lora_A"].abs().max()) == 0
    for name in (model, "resumed"):
        driver.unload(name)


def a_checkpoint_that_is_not_whole_or_does_not_fit_is_refused(driver: Driver, found: Found) -> None:
    model = trained(driver, "refused")
    driver.create("larger", LARGER)
    driver.create("louder", msgspec.structs.replace(SMALL, alpha=2 * SMALL.alpha))
    assert isinstance(driver.save(model, "good"), ops.WeightsSaved)
    assert isinstance(driver.save(model, "weights-only", "sampler_weights"), ops.WeightsSaved)
    before = driver.state(model)
    _refuses(driver.load("larger", "good"), "user", "in the checkpoint")
    _refuses(driver.load("louder", "good"), "user", "alpha is")
    _refuses(driver.load(model, "weights-only"), "user", "no optimizer state")
    _refuses(driver.load(model, "nothing"), "user", "there is no checkpoint")
    _refuses(driver.save(model, "good"), "user", "already")
    assert isinstance(driver.save(model, "good", overwrite=True), ops.WeightsSaved)
    file = driver.folder / "good" / "adapter_model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    _refuses(driver.load(model, "good"), "server", "not as it was written")
    file.write_bytes(whole)
    (driver.folder / "good" / "extra.bin").write_bytes(b"?")
    _refuses(driver.load(model, "good"), "server", "extra.bin")
    (driver.folder / "good" / "extra.bin").unlink()
    (driver.folder / "good" / "manifest.json").write_bytes(b"{")
    _refuses(driver.load(model, "good"), "server", "manifest")
    (driver.folder / "file").write_bytes(b"no folder")
    operation = ops.SaveWeights(model, 999, "weights", "x")
    _refuses(driver.do(commands.SaveState(operation, str(driver.folder / "file" / "x")))[0], "server", "rank 0")
    assert apart_by(before, driver.state(model)) == 0
    for name in (model, "larger", "louder"):
        driver.unload(name)


def _refuses(result: ops.Result, category: str, words: str) -> None:
    assert isinstance(result, ops.Failed), result
    assert result.category == category, result
    assert words in result.message, result


def saving_again_for_the_same_operation_changes_nothing(driver: Driver, found: Found) -> None:
    model = trained(driver, "again")
    operation = ops.SaveWeights(model, 500, "weights", "again")
    work = commands.SaveState(operation, str(driver.folder / "again"))
    first = driver.do(work)
    manifest = (driver.folder / "again" / "manifest.json").read_bytes()
    driver.train(model, batch())
    driver.step(model)
    assert driver.do(work) == first
    assert (driver.folder / "again" / "manifest.json").read_bytes() == manifest
    driver.unload(model)


def sleep_frees_and_wake_restores_bit_for_bit(driver: Driver, found: Found) -> None:
    model = trained(driver, "sleepy")
    driver.train(model, batch())
    runner = driver.dispatcher._runner
    parts = list(runner._tensors())
    kept = [part.clone() for part in parts]
    (asleep,) = driver.do(commands.ManageModel(ops.Sleep()))
    assert isinstance(asleep, ops.Asleep)
    # Of a device it is measured, and a block that has other tensors too stays.
    if runner.ranks.device.type == "cpu":
        assert asleep.freed_bytes >= sum(part.numel() * part.element_size() for part in kept)
    assert all(part.untyped_storage().nbytes() == 0 for part in parts)
    _refuses(
        driver.do(commands.StepsCommand([ops.OptimStep(model, 1, model_options.AdamParams())]))[0], "server", "sleeps"
    )
    _refuses(driver.passes((model, batch()))[0], "server", "sleeps")
    assert driver.do(commands.ManageModel(ops.Sleep())) == [ops.Asleep(0)]
    assert driver.do(commands.ManageModel(ops.Wake())) == [ops.Awake()]
    for part, before in zip(parts, kept, strict=True):
        assert torch.equal(part, before)
    once = driver.gradient(model)
    driver.train(model, batch())
    assert apart_by(once, driver.gradient(model)) == 0
    driver.unload(model)


def a_twin_from_a_sampler_checkpoint_says_the_same(driver: Driver, found: Found) -> None:
    model = trained(driver, "sampler")
    expected = logprobs_of(driver.train(model, batch(), forward_only=True))
    assert isinstance(driver.save(model, "sampler", "sampler_weights"), ops.WeightsSaved)
    driver.create("reader", SMALL)
    assert isinstance(driver.load("reader", "sampler", optimizer=False), ops.WeightsLoaded)
    for ours, theirs in zip(logprobs_of(driver.train("reader", batch(), forward_only=True)), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for name in (model, "reader"):
        driver.unload(name)


CHECKS: tuple[Check, ...] = (
    steps_are_those_of_adamw,
    steps_are_those_of_muon,
    a_model_with_muon_goes_on_from_a_checkpoint_and_takes_nothing_of_adamw,
    a_step_with_numbers_that_are_none_is_refused_and_endless_gradients_too,
    steps_made_together_are_bit_for_bit_those_made_alone,
    training_goes_on_from_a_checkpoint_bit_for_bit,
    a_checkpoint_that_is_not_whole_or_does_not_fit_is_refused,
    saving_again_for_the_same_operation_changes_nothing,
    sleep_frees_and_wake_restores_bit_for_bit,
    a_twin_from_a_sampler_checkpoint_says_the_same,
)
