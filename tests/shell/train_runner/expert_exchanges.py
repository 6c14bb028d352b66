"""Exchanges and host reads of layers with experts: `torchrun … -m tests.shell.train_runner.expert_exchanges FOLDER`.

Rank 0 writes what one more layer costs on ranks that hold different experts, and whether rows that are in flight
together have the gradients that they have one after the other.
"""

from __future__ import annotations

import gc
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from strata.train.core.model_options import LoraConfig
from strata.train.parallel import ParallelSettings
from strata.train.runner.collectives import RankGroup
from strata.train.runner.lora.adapter import Adapter
from strata.train.runner.lora.hooks import Span
from strata.train.runner.model.base import BaseModel
from strata.train.runner.model.expert_parallel import RoutedPairs
from strata.train.runner.model.tiny import TinyModel, make
from strata.train.runner.passes.logprobs import PackedRow
from strata.train.runner.settings import RunnerSettings
from tests.shell.train_runner.dispatched import Dispatched
from tests.support.ranks import join_ranks

READS: Final = frozenset({"tolist", "item", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__"})
"""Methods of a tensor that wait for its device."""
LAYERS: Final = (1, 2)
CHECKPOINTING: Final = (0, 1)


class Cost(msgspec.Struct, frozen=True):
    """What happens in a layer, in a pass without gradients, and in both halves of one with gradients."""

    exchanges: tuple[float, float, float]
    reads: tuple[float, float, float]


class ExchangesFound(msgspec.Struct):
    costs: dict[int, Cost]
    """By `CHECKPOINTING`."""
    kept: dict[str, int]
    """How many layers have kept their choice of experts at some moments."""
    apart: float
    """By how much gradients differ if rows are in flight together, beside the largest."""


class Reads(TorchFunctionMode):
    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += getattr(func, "__name__", "") in READS
        return func(*args, **(kwargs or {}))


class Row:
    """A row of this rank through a model, forward and backward."""

    def __init__(self, base: BaseModel, adapter: Adapter, number: int) -> None:
        self._base = base
        tokens = (torch.arange(20 + 3 * number) * (number + 5) + 7 * base.mesh.experts.rank) % base.vocabulary
        indices = torch.arange(len(tokens))
        spans = [Span(None, 6), Span(adapter, len(tokens) - 6)]
        self._row = PackedRow(
            tokens=tokens, documents=[len(tokens)], spans=spans, logit_indices=indices, targets=tokens.flip(0)
        )

    def forward(self) -> torch.Tensor:
        return self._base.logprobs(self._row).sum()


def counted(work: Any) -> tuple[Any, int, int]:
    """What it returns, its exchanges and its reads."""
    with Dispatched() as dispatched, Reads() as reads:
        result = work()
    return result, dispatched.count("alltoall"), reads.count


def cost_of(base: BaseModel, adapter: Adapter) -> torch.Tensor:
    """Exchanges and reads of a row: without gradients, forward with them, and backward."""
    row = Row(base, adapter, 1)
    adapter.begin()
    with torch.no_grad():
        _, *unrecorded = counted(row.forward)
    total, *forward = counted(row.forward)
    # Not by the tensor's method, inside which no method is counted.
    _, *backward = counted(lambda: torch.autograd.backward(total))
    adapter.discard()
    return torch.tensor([unrecorded, forward, backward]).T


def gradients_of(base: BaseModel, adapter: Adapter, *, together: bool) -> torch.Tensor:
    rows = [Row(base, adapter, number) for number in range(3)]
    adapter.begin()
    if together:
        for total in [row.forward() for row in rows]:
            total.backward()  # type: ignore[no-untyped-call]
    else:
        for row in rows:
            row.forward().backward()  # type: ignore[no-untyped-call]
    return torch.cat(adapter.take())


def kept() -> int:
    return sum(type(each) is RoutedPairs for each in gc.get_objects())


def watch_kept(base: BaseModel, adapter: Adapter) -> dict[str, int]:
    """What fails on one rank would leave the other in an exchange, so it fails on both."""
    rows = [Row(base, adapter, number) for number in range(2)]
    found = {}
    adapter.begin()
    with torch.no_grad():
        rows[0].forward()
    found["without gradients"] = kept()
    totals = [row.forward() for row in rows]
    found["two rows in flight"] = kept()
    totals.pop(0).backward()  # type: ignore[no-untyped-call]
    found["one of them is done"] = kept()
    totals.pop()
    found["the other was given up"] = kept()

    def fail(*unused: object) -> None:
        raise InterruptedError

    hook = base.lm.get_submodule(f"{base.decoder}.layers.{LAYERS[1] - 1}.mlp").register_forward_hook(fail)
    with suppress(InterruptedError):
        rows[0].forward()
    hook.remove()
    found["a forward pass failed"] = kept()
    found["context is left"] = int(base.mesh.experts.checkpoint is not None)
    total = rows[0].forward()
    hook = base.lm.get_submodule(f"{base.decoder}.layers.0.mlp").register_forward_hook(fail)
    with suppress(InterruptedError):
        total.backward()  # type: ignore[no-untyped-call]
    hook.remove()
    del total
    found["a recomputation failed"] = kept()
    adapter.discard()
    return found


def load(folder: Path, ranks: RankGroup, layers: int, every: int) -> tuple[BaseModel, Adapter]:
    settings = RunnerSettings(
        model=str(folder / str(layers)),
        sleep_folder=folder,
        parallel=ParallelSettings(expert=ranks.size),
        activation_checkpointing=every,
    )
    base = BaseModel(settings, ranks)
    adapter = base.new_adapter(LoraConfig(rank=4, alpha=8.0), ranks.device)
    adapter.initialise("seed")
    for block in adapter.blocks:
        # B begins with zeros, and A would have no gradient.
        block.flat.add_(0.01)
    base.adapters.in_pass = [adapter]
    return base, adapter


def main(folder: Path, ranks: RankGroup) -> None:
    with ranks.collective_errors():
        if ranks.is_rank0:
            for layers in LAYERS:
                make(folder / str(layers), TinyModel(family="qwen3_moe", layers=layers, experts=8))
    costs = {}
    for every in CHECKPOINTING:
        few, many = (cost_of(*load(folder, ranks, layers, every)) for layers in LAYERS)
        of_layer = (many - few) / (LAYERS[1] - LAYERS[0])
        costs[every] = msgspec.convert(dict(zip(Cost.__struct_fields__, of_layer.tolist(), strict=True)), Cost)
    base, adapter = load(folder, ranks, LAYERS[1], 1)
    kept_at = watch_kept(base, adapter)
    alone, together = (gradients_of(base, adapter, together=each) for each in (False, True))
    apart = float((alone - together).abs().max() / alone.abs().max())
    if ranks.is_rank0:
        (folder / "found.json").write_bytes(msgspec.json.encode(ExchangesFound(costs, kept_at, apart)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), join_ranks(120))
    # A rank that ends with the threads of its group aborts when the other rank has gone first.
    dist.destroy_process_group()
