"""Estimates the memory that a server's settings need from the headers of its model's files: which weights are split,
and what adapters and quantisation take.

The sizes of all weights are known; activations are not, so the estimate is the least that a server needs.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Final, Literal

import msgspec

from strata.train.parallel import ParallelSettings
from strata.train.peft.layers import kind_of
from strata.train.plan.memory_plan import MemoryRecipe, MeshShape, ModelCost, cache_numbers, plan_device
from strata.train.plan.model_files import HEAD, ModelFiles
from strata.train.plan.quantisation import can_be_quantised, saved_bytes
from strata.train.settings import ServerSettings, count_ranks

DeviceKind = Literal["cuda", "cpu"]
_LAYER: Final = re.compile(r".*?\.\d+\.")
"""The name of a layer, up to its number."""
_EXPERTS: Final = ".experts."
_UNSPLIT: Final = (".gate.weight", ".router.weight", ".q_a_proj.weight", ".kv_a_proj_with_mqa.weight")
"""Matrices of layers that every rank of a tensor group has: routers, and what all heads of `deepseek_v3` share."""
_SPLIT_BY_INPUTS: Final = (".o_proj.weight", ".down_proj.weight")
"""Matrices of layers that a tensor group splits by their inputs; it splits the others by their outputs."""
_CONV1D_FAMILIES: Final = frozenset({"gpt2", "openai-gpt"})
"""Families (`model_type`) whose layers are `Conv1D` of transformers, which are not quantised; only the model has their
types, not its files."""
_EMBEDDING: Final = "embed_tokens."


class MemoryEstimate(msgspec.Struct, frozen=True):
    """Bytes of each rank, and so of each device."""

    base: int
    """The minimum to start."""
    full: int
    """Bytes with every slot in use, a full KV cache, and several passes before a step."""


def estimate(settings: ServerSettings, model: ModelFiles, device: DeviceKind = "cpu") -> MemoryEstimate:
    """Estimates the memory to start: without a LoRA model, a sample or a second pass before a step. The activations of
    a row come on top."""
    recipe = memory_recipe(settings, device)
    mesh = mesh_shape(settings.parallel, count_ranks(settings))
    cost = largest_stage_cost(model, recipe, settings.parallel, mesh)
    least = msgspec.structs.replace(recipe, slots=0, cached_tokens=0, accumulates=False)
    # What may work is not refused.
    start = sum(part.bytes for part in plan_device(cost, least, mesh).parts if part.name != "margin")
    return MemoryEstimate(start, plan_device(cost, recipe, mesh).total)


def mesh_shape(parallel: ParallelSettings, ranks: int) -> MeshShape:
    shard = max(parallel.shards(ranks) // parallel.context, 1)
    return MeshShape(parallel.replicate, shard, parallel.tensor, parallel.expert, parallel.context, parallel.pipeline)


def memory_recipe(settings: ServerSettings, device: DeviceKind = "cpu") -> MemoryRecipe:
    model, values = settings.model, settings.by_device
    return MemoryRecipe(
        training=model.training,
        dtype=values.dtype,
        quantise=model.quantise,
        lora_rank=model.max_lora_rank,
        slots=model.slots,
        row_tokens=values.max_tokens_per_row,
        cached_tokens=settings.sampling.cached_tokens,
        checkpointing=int(model.activation_checkpointing),
        offload=model.offload,
        replicated_bytes=values.replicated_mb << 20,
        device=device,
    )


def largest_stage_cost(
    model: ModelFiles, recipe: MemoryRecipe, parallel: ParallelSettings, mesh: MeshShape
) -> ModelCost:
    """Returns the cost of the stage that has most parameters, with the adapters of its layers; ranks that are stages
    have no KV cache. Without stages, of the model."""
    whole = model_cost(model, recipe, mesh)
    if mesh.pipeline == 1:
        return whole
    stages = [
        model_cost(ModelFiles(_stage_shapes(model, parallel, stage), model.config), recipe, mesh)
        for stage in range(mesh.pipeline)
    ]
    return msgspec.structs.replace(
        max(stages, key=lambda cost: cost.rank_parameters),
        parameters=whole.parameters,
        cache_numbers=0,
    )


def _stage_shapes(model: ModelFiles, parallel: ParallelSettings, stage: int) -> dict[str, tuple[int, ...]]:
    """A tied head is on the last stage too."""
    own = parallel.stage_layers(stage, int(model.config.get("num_hidden_layers", 0)))
    is_last, is_tied = stage == parallel.pipeline - 1, HEAD not in model.shapes
    shapes = {}
    for name, shape in model.shapes.items():
        if (match := _LAYER.match(name)) is not None:
            is_own = int(match.group().split(".")[-2]) in own
        elif _EMBEDDING in name:
            is_own = stage == 0 or (is_last and is_tied)
        else:
            is_own = is_last
        if is_own:
            shapes[name] = shape
    return shapes


def model_cost(model: ModelFiles, recipe: MemoryRecipe, mesh: MeshShape) -> ModelCost:
    """The sizes of a model by the headers of its files, without a trace of a pass."""
    of_rank = {name: _rank_parameters(model, name, mesh.tensor) for name in model.shapes}
    layers: Counter[str] = Counter()
    experts: Counter[str] = Counter()
    saved: Counter[str] = Counter()
    for name, size in of_rank.items():
        match = _LAYER.match(name)
        layer = match.group() if match else ""
        (experts if _EXPERTS in name else layers)[layer] += size
        saved[layer] += weight_saved_bytes(model, name, recipe)
    root = layers.pop("", 0)
    adapted = {name: _adapted(name, shape) for name, shape in model.shapes.items()}
    blocks = layers.keys() | experts.keys()
    return ModelCost(
        parameters=sum(map(math.prod, model.shapes.values())),
        rank_parameters=sum(of_rank.values()),
        expert_parameters=experts.total(),
        blocks=len(blocks),
        expert_blocks=len(experts),
        block_parameters=max((layers[name] + experts[name] * mesh.tensor // mesh.expert for name in blocks), default=0),
        root_parameters=root,
        adapter_parameters=recipe.lora_rank * sum(adapted.values()),
        adapter_split_parameters=recipe.lora_rank * sum(_split_adapted(model, name, mesh.tensor) for name in adapted),
        adapter_expert_parameters=recipe.lora_rank * sum(adapted[name] for name in adapted if _EXPERTS in name),
        cache_numbers=cache_numbers(model.config),
        saved_bytes=saved.total(),
        block_saved_bytes=max(saved.values(), default=0),
    )


def _rank_parameters(model: ModelFiles, name: str, tensor: int) -> int:
    """Returns what a rank of a tensor group has of a weight. Matrices of layers are split, if no rank needs them in
    full, and a head that is not tied, if it can be divided."""
    return math.prod(model.shapes[name]) // (tensor if _is_split(model, name, tensor) else 1)


def _is_split(model: ModelFiles, name: str, tensor: int) -> bool:
    shape = model.shapes[name]
    is_head = name == HEAD and not model.config.get("tie_word_embeddings") and shape[0] % tensor == 0
    in_layer = _LAYER.match(name) is not None and not name.endswith(_UNSPLIT)
    return is_head or (len(shape) > 1 and in_layer)


def weight_saved_bytes(model: ModelFiles, name: str, recipe: MemoryRecipe) -> int:
    """Returns by how many bytes a weight is smaller if it is quantised. Experts are not, nor are `Conv1D` layers."""
    shape = model.shapes[name]
    if not recipe.quantise or len(shape) != 2 or _EXPERTS in name or model.config.get("model_type") in _CONV1D_FAMILIES:
        return 0
    rows, columns = shape
    if not can_be_quantised(recipe.quantise, kind_of(name.removesuffix(".weight")), columns):
        return 0
    return saved_bytes(recipe.quantise, rows, columns, recipe.item_bytes)


def _adapted(name: str, shape: tuple[int, ...]) -> int:
    """Rows and columns of a weight that an adapter has, for each expert that it is of."""
    target = name.removesuffix(".weight")
    if len(shape) < 2 or kind_of(target) is None:
        return 0
    *experts, rows, columns = shape
    # Files may have the two matrices apart that are one weight in memory, with one adapter.
    shared = _EXPERTS in name and target.endswith((".up_proj", ".w3"))
    return math.prod(experts) * (rows + (0 if shared else columns))


def _split_adapted(model: ModelFiles, name: str, tensor: int) -> int:
    """The rows or the columns of a weight, whose part of its adapter is split over a tensor group."""
    shape = model.shapes[name]
    if tensor == 1 or _EXPERTS in name or not _adapted(name, shape) or not _is_split(model, name, tensor):
        return 0
    return shape[1] if name.endswith(_SPLIT_BY_INPUTS) else shape[0]
