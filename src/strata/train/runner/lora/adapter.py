"""The parameters of a LoRA adapter on a rank: layout in flat tensors, shares of ranks, initial values, gradients.

They stand outside the model's module tree: sharding, saving and freezing of the base never see them. Every rank holds
all of them, except those of experts, stages and parts of layers that other ranks compute. The gradients of a pass are
summed over the ranks when it is over.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Final, NamedTuple

import torch
from torch import nn

from strata.train.core.model_options import LoraConfig
from strata.train.runner.collectives import ALONE, ShareGroup
from strata.train.runner.lora.targets import LoraTarget


class LoraPart(NamedTuple):
    """What a rank computes of a layer that is split over several: some outputs, summands from some inputs, or some
    experts."""

    rows: range | None = None
    """Rows of B. None: all."""
    columns: range | None = None
    """Columns of A. None: all."""
    is_counted: bool = True
    """Whether this rank's gradients count: of ranks that all compute the same, those of one do."""
    experts: range | None = None
    """Those that this rank computes; it holds the adapter of no others. None: all, or there are none."""

    def of_tensor(self, name: str, shape: tuple[int, ...]) -> tuple[int, range]:
        """Returns what this rank computes with of A or B: a dimension, and the range of it."""
        if self.experts is not None:
            return 0, self.experts
        dimension, own = (len(shape) - 1, self.columns) if name.endswith("lora_A") else (len(shape) - 2, self.rows)
        return (0, range(shape[0])) if own is None else (dimension, own)


@dataclass(frozen=True)
class AdapterPlacement:
    """What this rank computes of each adapter, and with which ranks it shares what it holds."""

    part_of: Callable[[LoraTarget], LoraPart | None] = lambda _: LoraPart()
    """None if another stage computes the layer: this rank holds nothing of its adapter."""
    ranks: ShareGroup = ALONE
    """All of a stage."""
    holders: ShareGroup = ALONE
    """Those that hold the same experts."""
    part_holders: ShareGroup | None = ALONE
    """Those that hold the same parts of layers that are split over ranks. None: all of a stage hold such layers in
    full, and compute with their parts."""
    is_staged: bool = False
    """Whether there are other stages."""


WHOLE: Final = AdapterPlacement()
"""This rank holds and computes all."""


Run = tuple[int, int]
"""Adjacent numbers of the whole adapter, or of a tensor: where they begin and end."""


@dataclass(frozen=True)
class HeldTensor:
    """What this rank holds of A or B of one target: a range of one dimension, which may be all of it."""

    name: str
    whole: tuple[int, ...]
    """The shape of the whole tensor."""
    dimension: int
    part: range
    """Experts, rows of B or columns of A."""
    start: int
    """Numbers of the whole adapter before the tensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.whole[: self.dimension], len(self.part), *self.whole[self.dimension + 1 :])

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns what this rank holds, as a view of the whole tensor."""
        return whole.narrow(self.dimension, self.part.start, len(self.part))

    def runs(self, first: int, last: int) -> Iterator[Run]:
        """Yields where the numbers from `first` to `last`, of those that this rank holds, are in the whole tensor."""
        step = math.prod(self.whole[self.dimension + 1 :])
        length, stride = len(self.part) * step, self.whole[self.dimension] * step
        while first < last:
            number, place = divmod(first, length)
            begin = number * stride + self.part.start * step + place
            size = min(length - place, last - first)
            yield begin, begin + size
            first += size


class HeldPiece(NamedTuple):
    """Adjacent numbers of one tensor in a part of a block."""

    name: str
    offset: int
    """Where they begin in the tensor."""
    start: int
    """Where they begin in the whole adapter."""
    place: slice
    """Where they are in the part of the block."""

    @property
    def size(self) -> int:
        return int(self.place.stop - self.place.start)


class AdapterBlock:
    """The tensors of an adapter that the same ranks hold, as one flat block of values. Each of these ranks has a share
    of the block, and makes the optimizer step of it."""

    def __init__(
        self, tensors: Sequence[HeldTensor], group: ShareGroup, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.tensors = tensors
        self.group = group
        self.size = sum(tensor.size for tensor in tensors)
        self.padded = torch.zeros(group.padded(self.size), dtype=dtype, device=device)
        """The numbers padded to as many as the ranks can share equally; those beyond `flat` are zero."""
        self.flat = self.padded[: self.size]
        self.share = group.share(self.size)

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors of a flat block, as views of the same memory."""
        return _views(self._shapes, flat)

    @cached_property
    def _shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {tensor.name: tensor.shape for tensor in self.tensors}

    def matrices(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The matrices of a flat block, those of experts one by one, as views of the same memory."""
        return [matrix for view in self.views(flat).values() for matrix in (view if view.ndim == 3 else [view])]

    def pieces(self, part: slice) -> Iterator[HeldPiece]:
        """Yields what a part of the block consists of."""
        begin = 0
        for tensor in self.tensors:
            first, last = max(begin, part.start), min(begin + tensor.size, part.stop)
            place = first - part.start
            for offset, end in tensor.runs(first - begin, last - begin):
                following = place + end - offset
                yield HeldPiece(tensor.name, offset, tensor.start + offset, slice(place, following))
                place = following
            begin += tensor.size

    def runs(self, part: slice) -> list[Run]:
        """Returns where the numbers of a part of the block are in the whole adapter."""
        runs: list[Run] = []
        for piece in self.pieces(part):
            start = runs.pop()[0] if runs and runs[-1][1] == piece.start else piece.start
            runs.append((start, piece.start + piece.size))
        return runs

    @cached_property
    def share_runs(self) -> list[Run]:
        """Returns where the numbers of this rank's share are in the whole adapter."""
        return self.runs(self.share)


class Adapter:
    """The parameters of one LoRA model that this rank holds: flat blocks of float32, each for values and for the
    gradients of a pass.

    A pass then ends with one reduce-scatter of each block, and a step with one all-gather. A pass accumulates into
    staging blocks (`begin`), which are taken (`take`) or dropped (`discard`): a pass that fails adds nothing.

    One block holds what all ranks of a stage have. Where a layer is split over ranks, a second block (`split`) holds
    this rank's rows of B, or columns of A; the other matrix of the layer is in the first block. A further block holds
    the experts of this rank, if other ranks hold others. `pairs` are the matrices that this rank computes with, in the
    same memory. If all ranks hold split layers in full, `pairs` are parts of their matrices, and the other parts have
    no gradient here. `targets`, `shapes` and `size` are those of the whole adapter, which files have.
    """

    def __init__(
        self,
        config: LoraConfig,
        targets: Sequence[LoraTarget],
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        placement: AdapterPlacement = WHOLE,
    ) -> None:
        self.config = config
        self.scale = config.alpha / config.rank
        self.targets = targets
        self.shapes = _shapes(config.rank, targets)
        self.size = sum(math.prod(shape) for shape in self.shapes.values())
        parts = {target.name: placement.part_of(target) for target in targets}
        self._parts = {name: part for name, part in parts.items() if part is not None}
        self.spread = [name for name, part in self._parts.items() if part.experts is not None]
        """The targets whose experts are spread over ranks."""
        common, parts_of_layers, of_experts = self._held_tensors(holds_parts=placement.part_holders is not None)
        # A stage may have none of the layers that are trained.
        self.blocks = [AdapterBlock(common, placement.ranks if common else ALONE, device, dtype)]
        self.split: AdapterBlock | None = None
        """The parts of layers of which other ranks hold other parts."""
        if placement.part_holders is not None and parts_of_layers:
            self.split = AdapterBlock(parts_of_layers, placement.part_holders, device, dtype)
            self.blocks.append(self.split)
        if of_experts:
            self.blocks.append(AdapterBlock(of_experts, placement.holders, device, dtype))
        self._held = {tensor.name: tensor for block in self.blocks for tensor in block.tensors}
        self.is_whole = not placement.is_staged and self.size == sum(block.size for block in self.blocks)
        """Whether every rank holds all of it."""
        self.pairs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for name, (a, b) in self._split([block.flat for block in self.blocks]).items():
            is_counted = self._parts[name].is_counted
            self.pairs[name] = nn.Parameter(a, requires_grad=is_counted), nn.Parameter(b, requires_grad=is_counted)
        self._staged: list[torch.Tensor] = []

    def _held_tensors(self, *, holds_parts: bool) -> tuple[list[HeldTensor], list[HeldTensor], list[HeldTensor]]:
        """Those that all ranks of the stage hold, this rank's parts of split layers, and those of its experts."""
        common: list[HeldTensor] = []
        split: list[HeldTensor] = []
        of_experts: list[HeldTensor] = []
        start = 0
        for name, shape in self.shapes.items():
            part = self._parts.get(name.rpartition(".")[0])
            if part is not None:
                dimension, own = part.of_tensor(name, shape)
                if part.experts is not None:
                    of_experts.append(HeldTensor(name, shape, dimension, own, start))
                elif holds_parts and len(own) < shape[dimension]:
                    split.append(HeldTensor(name, shape, dimension, own, start))
                else:
                    common.append(HeldTensor(name, shape, 0, range(shape[0]), start))
            start += math.prod(shape)
        return common, split, of_experts

    @cached_property
    def layout(self) -> str:
        """The same for adapters that have, as a whole, the same tensors at the same places."""
        shapes = [f"{name} {'x'.join(map(str, shape))}" for name, shape in self.shapes.items()]
        return hashlib.sha256("\n".join(shapes).encode()).hexdigest()

    @property
    def flat(self) -> torch.Tensor:
        """All values, if every rank holds all."""
        (block,) = self.blocks
        return block.flat

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors of the whole adapter in a flat block, as views of the same memory."""
        return _views(self.shapes, flat)

    def values(self) -> dict[str, torch.Tensor]:
        """Those that this rank holds, by the names of their tensors."""
        return self.held_views([block.flat for block in self.blocks])

    def held_views(self, flats: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors that this rank holds in flat blocks, as views of the same memory."""
        views = [block.views(flat) for block, flat in zip(self.blocks, flats, strict=True)]
        return {name: view for of_block in views for name, view in of_block.items()}

    def _split(self, flats: Sequence[torch.Tensor]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Returns what this rank computes with of A and B of each target in flat blocks."""
        views = self.held_views(flats)

        def computed(name: str) -> torch.Tensor:
            view, part = views[name], self._narrowed.get(name)
            return view if part is None else view.narrow(*part)

        return {name: (computed(f"{name}.lora_A"), computed(f"{name}.lora_B")) for name in self._parts}

    @cached_property
    def _narrowed(self) -> Mapping[str, tuple[int, int, int]]:
        """Tensors of which this rank computes with less than it holds: a dimension, the first of it, and how many."""
        narrowed = {}
        for name, tensor in self._held.items():
            dimension, own = self._parts[name.rpartition(".")[0]].of_tensor(name, self.shapes[name])
            if tensor.shape[dimension] != len(own):
                narrowed[name] = dimension, own.start, len(own)
        return narrowed

    def take_own(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Returns what this rank holds of a tensor of the whole adapter."""
        return self._held[name].take(tensor)

    def install(self, flats: Sequence[torch.Tensor]) -> None:
        """Take over the values of flat blocks."""
        for block, flat in zip(self.blocks, flats, strict=True):
            block.flat.copy_(flat)

    def initialise(self, seed: str) -> None:
        for name, view in self.values().items():
            view.copy_(self.take_own(name, self.draw(name, seed)))

    def draw(self, name: str, seed: str) -> torch.Tensor:
        """The first values of a tensor. A is uniform, as torch initialises a linear layer; B is zero: the model starts
        equal to the base.

        Each tensor is seeded by the seed and its own name: it is the same whatever else is trained, and on every mesh.
        """
        shape = self.shapes[name]
        if name.endswith("lora_B"):
            return torch.zeros(shape)
        number = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8]) >> 1
        drawn = torch.rand(shape, generator=torch.Generator().manual_seed(number))
        return (2 * drawn - 1) * (1 / math.sqrt(shape[-1]))

    def begin(self) -> None:
        self._staged = [torch.zeros_like(block.padded) for block in self.blocks]
        for name, parts in self._split(self._staged).items():
            for leaf, part in zip(self.pairs[name], parts, strict=True):
                leaf.grad = part if leaf.requires_grad else None

    def is_finite(self) -> bool:
        """Says whether all staged gradients are finite."""
        return all(map(is_finite, self._staged))

    def take(self) -> list[torch.Tensor]:
        """The gradients of the pass on this rank, of each block, padded as the values are."""
        staged = self._staged
        self.discard()
        return staged

    def discard(self) -> None:
        self._staged = []
        for leaf in chain.from_iterable(self.pairs.values()):
            leaf.grad = None


def is_finite(tensor: torch.Tensor) -> bool:
    """Says whether all numbers of a contiguous tensor are finite. No temporary memory: a NaN is the least and the
    greatest number of a tensor, and so is found like an infinity."""
    return not tensor.numel() or all(bool(bound.isfinite()) for bound in torch.aminmax(tensor))


def _views(shapes: Mapping[str, tuple[int, ...]], flat: torch.Tensor) -> dict[str, torch.Tensor]:
    sizes = [math.prod(shape) for shape in shapes.values()]
    # One operation for all: a pass makes views of all gradients of all of its adapters.
    parts = torch.split(flat[: sum(sizes)], sizes)
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def _shapes(rank: int, targets: Sequence[LoraTarget]) -> Mapping[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for target in targets:
        experts = (target.experts,) if target.experts else ()
        shapes[f"{target.name}.lora_A"] = (*experts, rank, target.columns)
        shapes[f"{target.name}.lora_B"] = (*experts, target.rows, rank)
    return shapes
