"""The flat blocks of an adapter: what a rank holds of it, and where that is in the whole adapter."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from strata.train.core.model_options import LoraConfig
from strata.train.runner.collectives import ShareGroup
from strata.train.runner.lora.adapter import Adapter, AdapterPlacement, LoraPart
from strata.train.runner.lora.targets import LoraTarget

LORA = LoraConfig(rank=3, alpha=3.0)
TARGETS = [
    LoraTarget("q_proj", 8, 5),
    LoraTarget("o_proj", 5, 8),
    LoraTarget("experts.down_proj", 2, 5, experts=4),
    LoraTarget("norm_proj", 3, 2),
]
TENSOR = 4
HOLDERS = 2
"""Ranks at the same place in their tensor groups."""


def part_of(rank: int, target: LoraTarget) -> LoraPart:
    """Of one of four ranks, of which two hold the same experts."""
    own = range(2 * rank, 2 * rank + 2)
    match target.name:
        case "q_proj":
            return LoraPart(rows=own)
        case "o_proj":
            return LoraPart(columns=own)
        case "experts.down_proj":
            return LoraPart(experts=range(2 * (rank % 2), 2 * (rank % 2) + 2))
        case _:
            return LoraPart(is_counted=rank == 0)


def adapter_of(rank: int, *, in_full: bool = False) -> Adapter:
    """Of one of eight ranks."""
    placement = AdapterPlacement(
        partial(part_of, rank % TENSOR),
        ShareGroup(rank, TENSOR * HOLDERS),
        ShareGroup(rank // 2, 4),
        None if in_full else ShareGroup(rank // TENSOR, HOLDERS),
    )
    return Adapter(LORA, TARGETS, torch.device("cpu"), placement=placement)


@pytest.mark.parametrize("in_full", [False, True])
@pytest.mark.parametrize("rank", range(TENSOR))
def test_runs_and_pieces_say_where_each_number_of_a_block_is_in_the_whole_adapter(rank: int, *, in_full: bool) -> None:
    adapter = adapter_of(rank, in_full=in_full)
    numbers = torch.arange(adapter.size)
    whole = adapter.views(numbers)
    for block in adapter.blocks:
        held = torch.cat([adapter.take_own(tensor.name, whole[tensor.name]).flatten() for tensor in block.tensors])
        assert len(held) == block.size
        for start in range(block.size + 1):
            for stop in range(start, block.size + 1):
                expected, runs = held[start:stop], block.runs(slice(start, stop))
                assert runs == sorted(runs)
                assert torch.equal(torch.cat([numbers[:0], *(numbers[first:last] for first, last in runs)]), expected)
        for piece in block.pieces(block.share):
            own = held[block.share][piece.place]
            assert torch.equal(own, numbers[piece.start : piece.start + piece.size])
            assert torch.equal(own, whole[piece.name].flatten()[piece.offset : piece.offset + piece.size])


def test_each_number_of_an_adapter_is_in_the_share_of_one_rank() -> None:
    counts = torch.zeros(adapter_of(0).size, dtype=torch.int64)
    for rank in range(TENSOR * HOLDERS):
        for block in adapter_of(rank).blocks:
            for first, last in block.share_runs:
                counts[first:last] += 1
    assert bool((counts == 1).all())


@pytest.mark.parametrize("rank", range(TENSOR))
def test_a_rank_holds_its_rows_of_b_and_its_columns_of_a(rank: int) -> None:
    adapter, full = adapter_of(rank), adapter_of(rank, in_full=True)
    assert {name: tuple(value.shape) for name, value in adapter.values().items()} == {
        "q_proj.lora_A": (3, 5),
        "q_proj.lora_B": (2, 3),
        "o_proj.lora_A": (3, 2),
        "o_proj.lora_B": (5, 3),
        "experts.down_proj.lora_A": (2, 3, 5),
        "experts.down_proj.lora_B": (2, 2, 3),
        "norm_proj.lora_A": (3, 2),
        "norm_proj.lora_B": (3, 3),
    }
    assert adapter.split is not None
    assert [tensor.name for tensor in adapter.split.tensors] == ["q_proj.lora_B", "o_proj.lora_A"]
    assert full.split is None
    assert [block.size for block in full.blocks] == [
        adapter.blocks[0].size + TENSOR * adapter.split.size,
        adapter.blocks[2].size,
    ]
    assert not adapter.is_whole
    adapter.begin()
    assert sum(map(len, adapter.take())) < sum(block.padded.numel() for block in full.blocks)


@pytest.mark.parametrize("rank", range(TENSOR))
def test_a_rank_computes_with_the_same_numbers_if_it_holds_layers_in_full(rank: int) -> None:
    adapter, full = adapter_of(rank), adapter_of(rank, in_full=True)
    for each in (adapter, full):
        each.initialise("seed")
        for block in each.blocks:
            for first, piece in ((piece.start, piece) for piece in block.pieces(slice(0, block.size))):
                block.flat[piece.place] += torch.arange(first, first + piece.size)
        each.begin()
    for name, pair in adapter.pairs.items():
        for own, other in zip(pair, full.pairs[name], strict=True):
            assert torch.equal(own, other)
            assert own.requires_grad == other.requires_grad
            assert own.grad is None or (other.grad is not None and own.grad.shape == other.grad.shape)
