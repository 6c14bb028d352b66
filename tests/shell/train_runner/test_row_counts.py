"""What a row of a pass makes the host and the device do: no read, one copy, and no launches for a further document."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from strata.train.core import ops
from strata.train.core.model_options import LoraConfig, LossName
from strata.train.runner.collectives import RankGroup
from strata.train.runner.model.base import BaseModel
from strata.train.runner.model.row_limit import RowMemory
from strata.train.runner.model.tiny import TinyModel, make
from strata.train.runner.model.trained import LoraModel
from strata.train.runner.passes.partition import PackedDatum, RankPass, RankPassItem
from strata.train.runner.passes.pass_runner import PassRunner
from strata.train.runner.settings import RunnerSettings
from tests.shell.train_runner.dispatched import Dispatched, HostTraffic
from tests.shell.train_runner.single_rank import one_rank

DEVICE: Final = torch.device("cpu", 0)
MODEL: Final = "counted"
TOKENS: Final = 96
"""Of a row. The logits of 40 are in memory at once."""
LOSSES: Final = [loss for loss in LossName if loss is not LossName.CUSTOM]
KERNEL: Final = "aten._scaled_dot_product_flash_attention_for_cpu"
"""On CPU alone attention is computed document by document."""


@dataclass(frozen=True)
class RowCounts:
    operations: Counter[str]
    reads: Counter[str]
    copies: int


@dataclass(frozen=True)
class Counted:
    runner: PassRunner
    model: LoraModel

    def run(self, losses: list[LossName], documents: int, *, rows: int = 1, forward_only: bool = False) -> RowCounts:
        """A pass of rows that have an operation of each of these losses, with so many documents of equal length."""
        items = [RankPassItem(MODEL, loss, {}, datums=rows * documents) for loss in losses]
        length = TOKENS // documents // len(losses)
        packed = [
            [
                PackedDatum(item, row * documents + number, drawn(loss, length))
                for item, loss in enumerate(losses)
                for number in range(documents)
            ]
            for row in range(rows)
        ]
        with Dispatched() as dispatched, HostTraffic(DEVICE) as traffic:
            report = self.runner.run(RankPass(forward_only, items, packed))
        self.model.abort()
        assert not report.failures
        assert len(report.computed) == rows * documents * len(losses)
        reads = traffic.reads + Counter({"read": dispatched.reads})
        return RowCounts(dispatched.launches, reads, traffic.copies)


def drawn(loss: LossName, length: int) -> ops.Datum:
    inputs = {"target_tokens": dense(np.arange(length, dtype="<i8"))}
    if loss is not LossName.CROSS_ENTROPY:
        inputs |= {name: dense(np.full(length, value, "<f4")) for name, value in (("logprobs", -3), ("advantages", 1))}
    if loss is LossName.GSPO:
        inputs["sequence_ratio_mask"] = dense(np.ones(length, "<f4"))
    return ops.Datum(np.arange(length, dtype="<i4").tobytes(), inputs)


def dense(array: NDArray[Any]) -> ops.Dense:
    return ops.Dense(ops.DType.I64 if array.dtype.kind == "i" else ops.DType.F32, array.shape, array.tobytes())


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Counted]:
    folder = tmp_path_factory.mktemp("counted")
    make(folder / "model", TinyModel())
    with one_rank(folder):
        ranks = RankGroup(DEVICE)
        settings = RunnerSettings(
            model=str(folder / "model"), sleep_folder=folder / "asleep", logits_bytes=40 * 4 * 512
        )
        base = BaseModel(settings, ranks)
        created = ops.CreateModel(model_id=MODEL, base_model="", lora=LoraConfig(rank=4, alpha=8.0))
        assert created.lora is not None
        adapter = base.new_adapter(created.lora, ranks.device)
        adapter.initialise("counted")
        model = LoraModel(created, adapter, ranks)
        memory = RowMemory(base, ranks, folder / "row")
        counted = Counted(PassRunner(base, ranks, {MODEL: model}, memory), model)
        # Buffers that are made at the first use are no part of a row.
        counted.run([LossName.CROSS_ENTROPY], 1)
        yield counted


@pytest.mark.parametrize("losses", [[LossName.CROSS_ENTROPY], LOSSES], ids=["sft", "mixed"])
@pytest.mark.parametrize("forward_only", [False, True], ids=["", "forward-only"])
def test_a_row_is_read_by_nobody_and_arrives_in_one_copy(
    counted: Counted, losses: list[LossName], forward_only: bool
) -> None:
    one = counted.run(losses, 2, forward_only=forward_only)
    three = counted.run(losses, 2, rows=3, forward_only=forward_only)
    assert three.reads - one.reads == {}
    assert three.copies - one.copies == 2


@pytest.mark.parametrize("loss", LOSSES)
def test_a_further_document_adds_no_launches(counted: Counted, loss: LossName) -> None:
    few, many = counted.run([loss], 2), counted.run([loss], 16)
    further = many.operations - few.operations
    for kernel in (KERNEL, f"{KERNEL}_backward"):
        assert further.pop(kernel)
    assert further.total() / 14 <= 3, further


def test_operations_of_one_loss_are_computed_at_once(counted: Counted) -> None:
    one, several = counted.run([LossName.PPO], 8), counted.run([LossName.PPO] * 4, 2)
    assert several.operations.total() <= one.operations.total()
