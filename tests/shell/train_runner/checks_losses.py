"""Every loss through the ranks: what the formula says of the log-probabilities that came back, and its gradient."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from strata.train.core import model_options, ops
from tests.shell.train_runner.check_results import Check, Found
from tests.shell.train_runner.checks_lora import CLOSE, trained
from tests.shell.train_runner.detached_formulas import held_fixed
from tests.shell.train_runner.dispatched import Dispatched
from tests.shell.train_runner.driver import Driver, apart_by, array_of, datum, dense, logprobs_of, loss_of
from tests.shell.train_runner.formulas import CONFIGS, FORMULAS, Array


def sampled(driver: Driver, model: str, seed: int, length: int) -> ops.Datum:
    """A datum whose sampler was near the model, so that some ratios are clipped and some are not."""
    chance = np.random.default_rng(seed)
    own = logprobs_of(driver.train(model, [datum(seed, length)], forward_only=True))[0]
    return datum(
        seed,
        length,
        weights=np.where(chance.random(length) < 0.3, 0.0, chance.normal(1, 0.2, length)),
        logprobs=own + chance.normal(0, 0.2, length),
        advantages=chance.normal(0, 1, length),
        sequence_ratio_mask=(np.arange(length) > 1).astype(float),
    )


def every_loss_is_what_its_formula_says_and_its_gradient_is_that_of_the_formula(driver: Driver, found: Found) -> None:
    """dL/dθ through a loss equals that of a cross-entropy with the weights -dL/dlogp: these come from differences."""
    model = trained(driver, "losses")
    data = [sampled(driver, model, seed, 6 + seed) for seed in (1, 2)]
    for name, formula in FORMULAS.items():
        for number, config in enumerate(CONFIGS[name]):
            result = driver.train(model, data, loss=model_options.LossName(name), config=config)
            gradient = driver.gradient(model)
            expected, weights = 0.0, []
            for one, logprobs in zip(data, logprobs_of(result), strict=True):
                inputs = {key: array_of(tensor).astype(np.float64) for key, tensor in one.inputs.items()}
                exact = logprobs.astype(np.float64)
                expected += formula(exact, inputs, config)
                weights.append(_weights(name, exact, inputs, config))
            assert abs(loss_of(result) - expected) < 1e-4 * max(abs(expected), 1), name
            found.numbers[f"loss.{name}.{number}"] = loss_of(result)
            linear = [
                ops.Datum(one.tokens, {**one.inputs, "weights": dense(weight, ops.DType.F32)})
                for one, weight in zip(data, weights, strict=True)
            ]
            driver.train(model, linear)
            assert apart_by(gradient, driver.gradient(model)) < 1e-3, (name, config)
    driver.unload(model)


def a_row_reads_no_number_for_each_datum(driver: Driver, found: Found) -> None:
    """Each number that the host reads waits for a device: reads are counted of rows with few datums and with many."""
    model = trained(driver, "reads")
    few, many = ([sampled(driver, model, seed, 6) for seed in range(1, count)] for count in (3, 9))
    passes = driver.dispatcher._runner._passes
    compute_rows = passes._compute_rows
    for name in FORMULAS:
        reads = []
        for data in (few, many):
            with _dispatched_in_rows(passes) as dispatched:
                driver.train(model, data, loss=model_options.LossName(name))
            assert dispatched.calls
            reads.append(dispatched.reads)
        # transformers reads one itself, to learn whether the row is packed.
        assert reads[0] == reads[1] <= 1, (name, reads)
    assert passes._compute_rows == compute_rows
    driver.unload(model)


@contextmanager
def _dispatched_in_rows(passes: Any) -> Iterator[Dispatched]:
    """What is dispatched while rows are computed; their inputs are checked on the host, before."""
    compute_rows, dispatched = passes._compute_rows, Dispatched()

    def compute(*args: Any, **options: Any) -> None:
        with dispatched:
            compute_rows(*args, **options)

    passes._compute_rows = compute
    try:
        yield dispatched
    finally:
        del passes._compute_rows


def _weights(name: str, logprobs: Array, inputs: dict[str, Array], config: Mapping[str, float]) -> Array:
    """-dL/dlogp by central differences; where a gradient is stopped, of the formula with that part held fixed."""
    formula = held_fixed(name, logprobs, inputs, config)
    step = 1e-6
    found = np.zeros_like(logprobs)
    for place in range(len(logprobs)):
        moved = np.zeros_like(logprobs)
        moved[place] = step
        found[place] = -(formula(logprobs + moved) - formula(logprobs - moved)) / (2 * step)
    return found


def a_distillation_is_the_sum_over_its_targets_dense_or_sparse(driver: Driver, found: Found) -> None:
    model = trained(driver, "distil")
    chance = np.random.default_rng(5)
    targets = chance.integers(1, 512, (6, 3))
    weights = np.where(chance.random((6, 3)) < 0.4, 0.0, chance.random((6, 3))).astype(np.float32)
    targets = np.where(weights == 0, 0, targets)
    both = {"target_tokens": dense(targets, ops.DType.I64), "weights": dense(weights, ops.DType.F32)}
    result = driver.train(model, [datum(4, 6, **both)])
    (logprobs,) = logprobs_of(result)
    assert logprobs.shape == (6, 3)
    assert abs(loss_of(result) + float((weights * logprobs).sum())) < 1e-4
    gradient = driver.gradient(model)
    sparse = {"target_tokens": _csr(targets, "<i8", ops.DType.I64), "weights": _csr(weights, "<f4", ops.DType.F32)}
    again = driver.train(model, [datum(4, 6, **sparse), datum(1, 4, weights=np.zeros(4))])
    np.testing.assert_allclose(logprobs_of(again)[0], logprobs, atol=1e-5)
    assert apart_by(gradient, driver.gradient(model)) < CLOSE
    for column in range(3):
        single = {
            "target_tokens": dense(targets[:, column], ops.DType.I64),
            "weights": dense(weights[:, column], ops.DType.F32),
        }
        driver.train(model, [datum(4, 6, **single)])
    assert apart_by(gradient, driver.gradient(model)) < CLOSE
    driver.unload(model)


def _csr(matrix: Array, kind: str, dtype: ops.DType) -> ops.Sparse:
    rows, columns = np.nonzero(matrix)
    crow = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(matrix)))])
    return ops.Sparse(
        dtype,
        (matrix.shape[0], matrix.shape[1]),
        matrix[rows, columns].astype(kind).tobytes(),
        crow.astype("<i8").tobytes(),
        columns.astype("<i8").tobytes(),
    )


CHECKS: tuple[Check, ...] = (
    a_row_reads_no_number_for_each_datum,
    every_loss_is_what_its_formula_says_and_its_gradient_is_that_of_the_formula,
    a_distillation_is_the_sum_over_its_targets_dense_or_sparse,
)
