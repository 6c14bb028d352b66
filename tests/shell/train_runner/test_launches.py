"""How many operations a pass and a step start: each is a launch on a device, which waits for the host if there are too
many of them. Counted on a processor, without views; attention is one operation for each document there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
import torch
from torch.distributed.tensor import DTensor

from strata.train.core.model_options import AdamParams, LoraConfig
from strata.train.runner.lora.span_products import GroupedProducts, LoopedProducts, SpanProducts
from strata.train.runner.model.tiny import TinyModel, make
from strata.train.runner.passes.optimizer import Optimizer, sum_squares
from tests.shell.train_runner.driver import Driver, datum
from tests.shell.train_runner.single_rank import driver_of, one_rank
from tests.support.device_counters import CPU_DEVICE, DeviceCounters

FEW, MANY = 2, 6
"""Layers of the two models."""
DOCUMENTS, TENANTS = 8, (1, 2, 8)
LOOPED_PER_ADAPTER = 42
LAYER = 144
ONE_RANK = 970
"""Operations of a row of one document in a model of `MANY` layers."""


@pytest.fixture(scope="module")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[int, Driver]]:
    """A model of each number of layers, whose adapters have made a step: the base is larger than what is replicated on
    several ranks."""
    folder = tmp_path_factory.mktemp("launches")
    with one_rank(folder) as ranks:
        drivers = {}
        for layers in (FEW, MANY):
            model = folder / f"layers-{layers}"
            make(model, TinyModel(layers=layers))
            driver = drivers[layers] = driver_of(ranks, model, folder / f"files-{layers}", max_models=8, slots=8)
            for number in range(max(TENANTS)):
                driver.create(f"m{number}", LoraConfig(rank=8, alpha=16.0, seed=number))
            launches(driver, max(TENANTS))
        yield drivers


def launches(driver: Driver, tenants: int, documents: int = DOCUMENTS, products: SpanProducts | None = None) -> int:
    """Operations of a pass of one row, whose documents are those of so many tenants."""
    driver.dispatcher._runner.base.adapters.products = products
    each = documents // tenants
    items = [(f"m{number}", [datum(number * each + seed, 12) for seed in range(each)]) for number in range(tenants)]
    with DeviceCounters(CPU_DEVICE) as counters:
        driver.passes(*items)
    for name, _ in items:
        driver.step(name, learning_rate=1e-3)
    return counters.counts.launches


def per_layer(drivers: Mapping[int, Driver], tenants: int, products: SpanProducts | None) -> float:
    few, many = (launches(drivers[layers], tenants, products=products) for layers in (FEW, MANY))
    return (many - few) / (MANY - FEW)


@pytest.mark.parametrize(
    ("products", "each"), [(GroupedProducts(), 0), (None, 0), (LoopedProducts(), LOOPED_PER_ADAPTER)]
)
def test_a_further_adapter_starts_operations_only_in_a_loop(
    drivers: Mapping[int, Driver], products: SpanProducts | None, each: int
) -> None:
    two, eight = (per_layer(drivers, tenants, products) for tenants in (2, 8))
    assert (eight - two) / 6 == each


def test_a_layer_with_one_adapter_and_a_row_on_one_rank_start_no_more_than_before(
    drivers: Mapping[int, Driver],
) -> None:
    few, many = (launches(drivers[layers], 1, documents=1) for layers in (FEW, MANY))
    assert (many - few) / (MANY - FEW) <= LAYER
    assert many <= ONE_RANK


def test_one_rank_has_no_wrapper_of_sharding(drivers: Mapping[int, Driver]) -> None:
    lm = drivers[MANY].dispatcher._runner.base.lm
    assert not any(isinstance(parameter, DTensor) for parameter in lm.parameters())


def test_the_first_step_copies_nothing_to_the_device() -> None:
    optimizer = Optimizer([torch.ones(100) for _ in range(3)], None)
    gradients = [torch.ones(100) for _ in range(3)]
    with DeviceCounters(CPU_DEVICE) as counters:
        optimizer.step(gradients, 1.0, AdamParams(learning_rate=1e-3))
    assert counters.counts.to_device.total() == 0


def test_the_norm_of_many_tensors_starts_as_many_operations_as_that_of_few() -> None:
    def started(count: int) -> int:
        tensors = [torch.ones(100) for _ in range(count)]
        with DeviceCounters(CPU_DEVICE) as counters:
            sum_squares(tensors)
        return counters.counts.launches

    assert started(200) == started(2)
