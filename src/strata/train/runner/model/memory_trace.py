"""Traces the memory of a pass for `strata plan`: runs layers on tensors without content, counts live bytes and
collectives, and extrapolates to all layers.

Parameters and adapters are counted by shapes. The memory of a pass is traced: the model runs one row forward and
backward on tensors without content, split and sharded over ranks that do not exist, and everything that it allocates
is counted until it is freed; so is what the ranks of a tensor, expert or context group exchange. A few layers of each
kind are enough: each further one costs what the last one did. Temporary memory inside kernels and the allocator's
fragmentation are not seen. Tokens choose all experts equally often.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final, Literal, NamedTuple

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from strata.base.errors import Code, StrataError
from strata.train.combinations import Combination, check_combination
from strata.train.core.model_options import LoraConfig
from strata.train.parallel import ParallelSettings
from strata.train.plan.memory_plan import (
    ONE_DEVICE,
    CollectiveCost,
    MemoryRecipe,
    MeshShape,
    ModelCost,
    PassMemory,
    cache_numbers,
)
from strata.train.plan.quantisation import saved_bytes
from strata.train.runner.collectives import MeshGroup, ShareGroup
from strata.train.runner.lora.adapter import Adapter, AdapterPlacement, LoraPart
from strata.train.runner.lora.hooks import Span
from strata.train.runner.lora.targets import LoraTarget, is_experts, targets_of
from strata.train.runner.mesh import blocks_of, make_mesh
from strata.train.runner.model.attention_kernels import Documents
from strata.train.runner.model.base import DTYPES, checkpoint_layers
from strata.train.runner.model.expert_parallel import DispatchSizes, ExpertParallel
from strata.train.runner.model.loading import build_skeleton
from strata.train.runner.model.quantised import quantised_layers, replace_layers
from strata.train.runner.model.startup_check import find_decoder, unsupported_errors
from strata.train.runner.model.tensor_parallel import placement_of, plan_splits, split_adapter
from strata.train.runner.passes.logprobs import PackedModel, PackedRow, RowPlaces
from strata.train.runner.settings import LOGITS_BYTES
from strata.train.settings import check_quantise_package

TRACED: Final = 3
"""Layers of each kind: FSDP gathers the weights of one, computes another, and reduces the gradients of a third."""
SHARDS: Final = 2
"""Shards of a traced model that is sharded: what a pass gathers is the same for more."""
Layers = Sequence[int]
"""Numbers of blocks, in their order."""
Collective = Literal["all-gather", "all-reduce", "all-to-all", "reduce-scatter"]
Groups = Literal["tensor", "expert", "context"]
Exchange = tuple[Collective, Groups]
COLLECTIVES: Final[dict[str, Collective]] = {
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "allreduce_": "all-reduce",
    "alltoall_base_": "all-to-all",
}
"""What torch calls them."""
CPU: Final = torch.device("cpu")


class AdapterSizes(NamedTuple):
    all: int
    split: int
    """Bytes of matrices that a tensor group splits."""
    experts: int


class TracedPass(NamedTuple):
    memory: PassMemory
    calls: Counter[Exchange]
    sent: Counter[Exchange]
    """Bytes of the largest tensor of each call."""

    def plus(self, count: int, more: TracedPass, less: TracedPass) -> TracedPass:
        """Adds so many times the difference of two others."""

        def add(own: Counter[Exchange], more: Counter[Exchange], less: Counter[Exchange]) -> Counter[Exchange]:
            return Counter({name: own[name] + count * (more[name] - less[name]) for name in more})

        beginning = self.memory.beginning + count * (more.memory.beginning - less.memory.beginning)
        end = self.memory.end + count * (more.memory.end - less.memory.end)
        calls, sent = add(self.calls, more.calls, less.calls), add(self.sent, more.sent, less.sent)
        return TracedPass(PassMemory(beginning, end), calls, sent)


def trace_cost(model: str, recipe: MemoryRecipe, mesh: MeshShape = ONE_DEVICE) -> ModelCost:
    """The sizes of the model in this folder, on tensor, expert or context groups of this mesh. INVALID if it has no
    configuration or cannot be on such groups, UNSUPPORTED if its family cannot be trained here, or cannot be traced
    without content."""
    parallel = ParallelSettings(
        replicate=mesh.replicate,
        context=mesh.context,
        tensor=mesh.tensor,
        expert=mesh.expert,
        pipeline=mesh.pipeline,
    )
    combination = Combination(
        parallel=parallel,
        training=recipe.training,
        quantise=recipe.quantise,
        offload=recipe.offload,
        is_planned=True,
    )
    check_combination(combination)
    check_quantise_package(recipe.quantise)
    skeleton = build_skeleton(model, DTYPES[recipe.dtype])
    config = skeleton.config.to_dict()
    check_combination(msgspec.structs.replace(combination, config=config))
    if problem := parallel.problem(mesh.devices) or parallel.shape_problem(config):
        raise StrataError(Code.INVALID, problem)
    with unsupported_errors(str(skeleton.config.model_type)):
        sizes = _rank_parameters(skeleton, mesh.tensor)
        of_experts = {
            id(weight) for module in skeleton.modules() if is_experts(module) for weight in module.parameters()
        }
        # Of each block, of experts and of the rest.
        blocks = []
        for block in blocks_of(skeleton):
            experts = sum(sizes[id(weight)] for weight in block.parameters() if id(weight) in of_experts)
            blocks.append((experts, sum(sizes[id(weight)] for weight in block.parameters()) - experts))
        kinds = _layers_by_kind(skeleton, recipe)
        traced_in_place = _extrapolate(kinds, lambda layers: trace_pass(model, recipe, layers, 0, mesh))
        in_place = traced_in_place[-1]

        def extra_memory(shards: int) -> PassMemory:
            """Returns what FSDP gathers at a time: weights of a few layers, however many there are. With more of them
            the peak may move to a moment that has less of it, so it is what a few need at least."""
            traced = _extrapolate(kinds, lambda layers: trace_pass(model, recipe, layers, shards, mesh))
            pairs = [(more.memory, less.memory) for more, less in zip(traced, traced_in_place, strict=True)]
            beginning = max(more.beginning - less.beginning for more, less in pairs)
            return PassMemory(max(beginning, 0), max(0, *(more.end - less.end for more, less in pairs)))

        parameters = sum(parameter.numel() for parameter in skeleton.parameters())
        adapter = AdapterSizes(0, 0, 0) if recipe.full else _adapter_sizes(skeleton, recipe, mesh.tensor)
        saved, block_saved = _saved_by_quantising(skeleton, recipe)
        return ModelCost(
            parameters=parameters,
            rank_parameters=sum(sizes.values()),
            expert_parameters=sum(experts for experts, _ in blocks),
            blocks=len(blocks),
            expert_blocks=sum(experts > 0 for experts, _ in blocks),
            block_parameters=max((experts * mesh.tensor // mesh.expert + rest for experts, rest in blocks), default=0),
            root_parameters=sum(sizes.values()) - sum(experts + rest for experts, rest in blocks),
            adapter_parameters=adapter.all,
            adapter_split_parameters=adapter.split,
            adapter_expert_parameters=adapter.experts,
            cache_numbers=cache_numbers(skeleton.config.to_dict()),
            saved_bytes=saved,
            block_saved_bytes=block_saved,
            activations=in_place.memory,
            gathered=extra_memory(SHARDS),
            copied=extra_memory(1) if mesh.expert <= mesh.tensor and mesh.context == 1 else None,
            exchanges=[
                CollectiveCost(*exchange, "row", calls, in_place.sent[exchange])
                for exchange, calls in in_place.calls.items()
            ],
        )


def _rank_parameters(lm: PreTrainedModel, tensor: int) -> dict[int, int]:
    """The size of each weight on a rank of a tensor group, by the identity of the weight. Experts are spread over more
    ranks, so that the ranks of a tensor group have different ones."""
    splits = plan_splits(lm, tensor) if tensor > 1 else {}
    sizes = {}
    for name, weight in lm.named_parameters():
        module, _, last = name.rpartition(".")
        is_split = isinstance(placement_of(splits.get(module), last), Shard) or is_experts(lm.get_submodule(module))
        sizes[id(weight)] = weight.numel() // (tensor if is_split else 1)
    return sizes


def _saved_by_quantising(skeleton: PreTrainedModel, recipe: MemoryRecipe) -> tuple[int, int]:
    """Bytes by which all weights, and those of the largest block, are smaller. The skeleton's layers are replaced."""
    if not recipe.quantise:
        return 0, 0
    replace_layers(skeleton, recipe.quantise)

    def saved(module: nn.Module) -> int:
        return sum(
            saved_bytes(layer.kind, layer.out_features, layer.in_features, recipe.item_bytes)
            for _, layer in quantised_layers(module)
        )

    return saved(skeleton), max(map(saved, blocks_of(skeleton)), default=0)


def _adapter_sizes(lm: PreTrainedModel, recipe: MemoryRecipe, tensor: int) -> AdapterSizes:
    splits = plan_splits(lm, tensor) if tensor > 1 else {}

    def part_of_first(target: LoraTarget) -> LoraPart:
        return LoraPart() if target.experts else split_adapter(splits.get(target.name), target, 0, tensor)

    adapter = _new_adapter(lm, recipe, torch.device("meta"), AdapterPlacement(part_of_first))
    split = 0 if adapter.split is None else adapter.split.size * tensor
    return AdapterSizes(adapter.size, split, sum(math.prod(each) for each in adapter.shapes.values() if len(each) == 3))


def _new_adapter(
    lm: PreTrainedModel, recipe: MemoryRecipe, device: torch.device, placement: AdapterPlacement
) -> Adapter:
    lora = LoraConfig(rank=recipe.lora_rank, alpha=1.0)
    return Adapter(lora, targets_of(lm, lora), device, placement=placement)


def _layers_by_kind(lm: PreTrainedModel, recipe: MemoryRecipe) -> list[Layers]:
    """Layers of one kind have the same shapes, the same reach of attention, and are recomputed alike."""
    if recipe.checkpointing:
        checkpoint_layers(lm, every=recipe.checkpointing, experts=ExpertParallel())
    kinds: dict[object, list[int]] = defaultdict(list)
    for number, block in enumerate(blocks_of(lm)):
        shapes = tuple((name, parameter.shape) for name, parameter in block.named_parameters())
        reach = tuple(getattr(module, "sliding_window", None) for module in block.modules())
        kinds[shapes, reach, getattr(block, "gradient_checkpointing", False)].append(number)
    return list(kinds.values())


def _extrapolate(kinds: Sequence[Layers], trace: Callable[[Set[int]], TracedPass]) -> tuple[TracedPass, TracedPass]:
    """Returns the pass of a few layers of each kind as traced, and that of all layers, which grows with their number as
    with one further layer."""
    few: set[int] = {number for layers in kinds for number in layers[:TRACED]}
    least = traced = trace(few)
    for layers in kinds:
        if (further := len(layers) - TRACED) > 0:
            traced = traced.plus(further, trace(few | {layers[TRACED]}), least)
    return least, traced


def trace_pass(
    model: str, recipe: MemoryRecipe, layers: Set[int], shards: int, mesh: MeshShape = ONE_DEVICE
) -> TracedPass:
    """A row of one document, forward and backward, in a model of these layers. With 0 shards all weights of a rank are
    in place; else FSDP gathers them, also on one rank. The ranks of a context group shard the model too, those of an
    expert group what is not of experts; with `SHARDS`, experts too if the mesh does so."""
    compute = DTYPES[recipe.dtype]
    lm = build_skeleton(model, torch.float32 if recipe.full and shards else compute)
    if recipe.quantise:
        replace_layers(lm, recipe.quantise)
    parallel = ParallelSettings(context=mesh.context, tensor=mesh.tensor, expert=mesh.expert)
    tokens = -(-recipe.row_tokens // mesh.context)
    if mesh.shards * mesh.tensor == mesh.expert > 1:
        shards = min(shards, 1)
    with _fake_ranks(max(shards, 1) * math.lcm(mesh.expert, mesh.tensor * mesh.context)) as size:
        fake = make_mesh(parallel, ShareGroup(0, size), CPU, compute)
        if mesh.expert > 1:
            pairs = -(-tokens // mesh.tensor) * lm.config.num_experts_per_tok
            fake = replace(fake, experts=_BalancedExperts(fake.experts.mesh, pairs))
        if recipe.checkpointing:
            checkpoint_layers(lm, every=recipe.checkpointing, experts=fake.experts)
        _keep_layers(lm, layers)
        # FSDP changes the names of their classes.
        first, decoder = blocks_of(lm)[0], find_decoder(lm)
        lm.tie_weights()
        lm.requires_grad_(requires_grad=recipe.full)
        fake.split(lm)
        packed = PackedModel(lm, decoder, fake.stage, fake.context, LOGITS_BYTES)
        groups: dict[Groups, MeshGroup] = {"tensor": fake.tensor, "expert": fake.experts, "context": fake.context}
        live = _LiveBytes({each.group.group_name: name for name, each in groups.items() if each.size > 1})
        if shards:
            fake.shard(packed)
        with FakeTensorMode(allow_non_fake_inputs=True):
            lm.to_empty(device=CPU)
            lm.tie_weights()
            packed.use_attention(own=False)
            fake.group_experts(lm, packed.adapters)
            adapter = None
            if not recipe.full:
                packed.adapters.add_hooks(lm)
                adapter = _new_adapter(lm, recipe, CPU, fake.adapters)
                packed.adapters.in_pass = [adapter]
                adapter.begin()
                lm.enable_input_require_grads()  # type: ignore[no-untyped-call]
            return _trace_row(packed, first, adapter, tokens, live)


class _BalancedExperts(ExpertParallel):
    """Every rank gets as many pairs: no number has to be read to know how many."""

    def __init__(self, mesh: DeviceMesh, pairs: int) -> None:
        super().__init__(mesh)
        ranks = mesh.size()
        self._sizes = [pairs // ranks + (rank < pairs % ranks) for rank in range(ranks)]

    def _read_sizes(self, sent: torch.Tensor, received: torch.Tensor, adapted: torch.Tensor) -> DispatchSizes:
        """All of the last adapter, if there is one."""
        del sent, received
        return DispatchSizes(self._sizes, self._sizes, [*[0] * (len(adapted) - 1), sum(self._sizes)])


def _keep_layers(lm: PreTrainedModel, layers: Set[int]) -> None:
    kept = {block for number, block in enumerate(blocks_of(lm)) if number in layers}
    dropped = set(blocks_of(lm)) - kept
    for module in list(lm.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.ModuleList) and dropped.intersection(child):
                setattr(module, name, nn.ModuleList(block for block in child if block not in dropped))


@contextmanager
def _fake_ranks(size: int) -> Iterator[int]:
    """A group of which this process is the first rank; the others do not exist, and collectives do nothing."""
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        yield size
    finally:
        dist.destroy_process_group()


def _trace_row(
    packed: PackedModel, first: nn.Module, adapter: Adapter | None, tokens: int, live: _LiveBytes
) -> TracedPass:
    """`tokens` are those of this rank."""
    content = torch.zeros(tokens, dtype=torch.int64)
    spans, length = [Span(adapter, tokens)], packed.context.size * tokens
    # Each token of the row has one target. The tensors have no content from which that could be read.
    known = RowPlaces(content, Documents([length]), np.arange(tokens))
    row = PackedRow(
        tokens=content, documents=[length], spans=spans, logit_indices=content, targets=content, known=known
    )
    packed.adapters.row = spans
    for parameter in packed.parameters():
        if parameter.requires_grad:
            # What is left of a gradient, this rank's shard of it, is counted apart.
            parameter.register_post_accumulate_grad_hook(_free_gradient)  # type: ignore[no-untyped-call]

    def watch_gradient(_: nn.Module, __: object, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            hidden.register_hook(live.begin_end)

    first.register_forward_hook(watch_gradient)
    with live:
        packed(row).sum().backward()
    return TracedPass(PassMemory(live.peak, live.end_peak), live.calls, live.sent)


def _free_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None


class _LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the memory of tensors that were made inside, from their first appearance until they are freed, and
    collectives of these groups, by their names."""

    def __init__(self, groups: Mapping[str, Groups]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._groups = groups
        self.peak = 0
        """The peak until the backward pass reached the first layer."""
        self.end_peak = 0
        """The peak since then."""
        self.calls: Counter[Exchange] = Counter()
        self.sent: Counter[Exchange] = Counter()
        self._live = 0
        self._at_end = False
        self._sizes: dict[int, int] = {}
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def begin_end(self, _: torch.Tensor) -> None:
        self._at_end = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # FSDP frees and allocates the memory of gathered weights between operations.
        for number, reference in list(self._storages.items()):
            if (storage := reference()) is not None and storage.nbytes() != self._sizes[number]:
                self._resize(number, storage.nbytes())
        is_grouped = func is torch.ops.aten._grouped_mm.default
        result = _grouped_shape(*args, **(kwargs or {})) if is_grouped else func(*args, **(kwargs or {}))
        if (collective := COLLECTIVES.get(func.__name__.partition(".")[0])) is not None:
            self._count(collective, args)
        inputs = {tensor.untyped_storage()._cdata for tensor in _tensors((*args, *(kwargs or {}).values()))}
        for tensor in _tensors((result,)):
            storage = tensor.untyped_storage()
            if storage._cdata not in inputs and storage._cdata not in self._storages:
                self._add(storage)
        return result

    def _count(self, collective: Collective, args: Sequence[Any]) -> None:
        boxed = next(each for each in args if isinstance(each, torch.ScriptObject))
        group = self._groups.get(dist.ProcessGroup.unbox(boxed).group_name)
        if group is not None:
            self.calls[collective, group] += 1
            self.sent[collective, group] += max(tensor.nbytes for tensor in _tensors(args))

    def _add(self, storage: torch.UntypedStorage) -> None:
        number = storage._cdata

        def freed(_: object) -> None:
            self._storages.pop(number, None)
            self._live -= self._sizes.pop(number, 0)

        self._storages[number] = weakref.ref(storage, freed)
        self._resize(number, storage.nbytes())

    def _resize(self, number: int, size: int) -> None:
        self._live += size - self._sizes.get(number, 0)
        self._sizes[number] = size
        if self._at_end:
            self.end_peak = max(self.end_peak, self._live)
        else:
            self.peak = max(self.peak, self._live)


def _grouped_shape(left: torch.Tensor, right: torch.Tensor, offs: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Returns what a grouped multiplication returns. Without content torch has it in bfloat16 only."""
    if right.ndim == 3:
        return left.new_empty(left.shape[0], right.shape[2])
    return left.new_empty(len(offs), left.shape[0], right.shape[1])


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
