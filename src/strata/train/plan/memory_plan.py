"""The arithmetic of `strata plan`: memory of a device for weights, gradients, moments, activations and KV cache,
margins, traffic of collectives, and the smallest mesh that fits.

`strata plan` fills in the sizes by a trace of the model, `strata serve` and `strata models check` from the headers of
its files. All of them compare the same sums with the memory that there is.

A pass has two peaks: where the backward pass begins, with the activations of all layers, and where it ends, with the
gradients of the embeddings and the head. The plan is that of the moment that needs most. An optimizer step needs less
than both: it works in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from strata.train.plan.quantisation import Quantise

MARGIN: Final = 0.10
"""Added to everything that is traced or estimated."""
UNEVEN: Final = 0.08
"""The share of activations that is added in expert groups: tokens do not choose all experts equally often, as the trace
assumes."""
PROCESS_BYTES: Final = {"cuda": 1 << 30, "cpu": 400 << 20}
"""A CUDA context with its libraries and the buffers of collectives; or a process with torch and transformers."""
QUANTISING_BYTES: Final = 48 << 20
"""What bitsandbytes adds to a process."""
MOMENTS_BYTES: Final = 8
GRADIENT_BYTES: Final = 4
"""Gradients are summed in float32."""
MOST_DEVICES: Final = 4096

AdapterHolders = Literal["all", "same parts", "same experts"]
Source = Literal["counted", "traced", "estimated"]
Moment = Literal["beginning of the backward pass", "end of the backward pass"]


class MemoryRecipe(msgspec.Struct, frozen=True, kw_only=True):
    training: Literal["lora", "full"] = "lora"
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    quantise: Quantise = ""
    """How the linear layers of a frozen base are quantised."""
    lora_rank: int = 32
    slots: int = 1
    """LoRA models on the device."""
    row_tokens: int = 4096
    cached_tokens: int = 32_768
    checkpointing: int = 0
    """Activation checkpointing of every n-th layer; 0 is none."""
    offload: bool = False
    """Weights, their gradients and their optimizer state are in the memory of the host."""
    replicated_bytes: int = 256 << 20
    """A frozen base of at most this size is on every device in full. Gradients of all weights that are at most so large
    are reduced once in a pass, and are on every device in full until then."""
    accumulates: bool = True
    """Several passes before an optimizer step: the sum of the earlier ones is there beside the gradients of the last.
    """
    device: Literal["cuda", "cpu"] = "cuda"

    @property
    def full(self) -> bool:
        return self.training == "full"

    @property
    def stored_bytes(self) -> int:
        """Returns the bytes of each weight: trained ones are in float32."""
        return 4 if self.full else self.item_bytes

    @property
    def has_weights(self) -> bool:
        """Says whether weights, their gradients and their optimizer state are on the device."""
        return self.device == "cpu" or not self.offload

    @property
    def item_bytes(self) -> int:
        return 2 if self.dtype == "bfloat16" else 4


class MeshShape(msgspec.Struct, frozen=True):
    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    expert: int = 1
    """Devices, of those that hold a copy, that hold different experts."""
    context: int = 1
    """Devices that have different slices of the same rows. They shard a copy too."""
    pipeline: int = 1
    """Stages, each on devices of its own."""

    @property
    def shards(self) -> int:
        """Devices that shard a copy, or a stage of it."""
        return self.shard * self.context

    @property
    def devices(self) -> int:
        return self.pipeline * self.replicate * self.shards * self.tensor


ONE_DEVICE: Final = MeshShape()


class PassMemory(msgspec.Struct, frozen=True):
    """Bytes at the two peaks of a pass over one row."""

    beginning: int
    """Bytes at the beginning of the backward pass."""
    end: int


class CollectiveCost(msgspec.Struct, frozen=True):
    """Calls of one kind by each device. Bytes are those of the largest tensor of each call, summed."""

    name: Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all"]
    over: Literal["shard", "replicate", "context", "tensor", "expert", "same experts", "same parts", "all"]
    """The dimension of the mesh, the devices that hold the same experts or the same parts of layers, or all devices."""
    per: Literal["row", "step"]
    calls: int
    bytes: int


class ModelCost(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a model under a recipe, on groups of one size, before it is sharded."""

    parameters: int
    rank_parameters: int
    """Parameters of one rank of a tensor group; all without such groups."""
    expert_parameters: int
    """Parameters of all experts; of one rank of a tensor group, as if it had its share of each."""
    blocks: int
    """Groups of weights that are gathered together: the layers."""
    expert_blocks: int
    """Layers with experts: those of an expert group are gathered apart."""
    block_parameters: int
    """Parameters of the largest block, as a rank of a tensor or expert group computes with it."""
    root_parameters: int
    """Parameters of what is in no block: embeddings and head. It stays gathered during a pass."""
    adapter_parameters: int
    """Parameters of an adapter. Every rank holds all of it, except what is of experts, or of parts of layers, that it
    does not hold."""
    adapter_expert_parameters: int
    """Those of experts."""
    adapter_split_parameters: int = 0
    """Those of matrices that are split over a tensor group, on all of its ranks together."""
    cache_numbers: int
    """Numbers in the KV cache, of one token."""
    saved_bytes: int = 0
    """Bytes by which the weights are smaller because layers are quantised."""
    block_saved_bytes: int = 0
    """Bytes by which the largest block is smaller for the same reason."""
    activations: PassMemory | None = None
    """Activations of a row, or a rank's slice of it, with all weights in place; None if nothing was traced."""
    gathered: PassMemory | None = None
    """What a pass takes beside that if the weights are sharded: gathered weights, gradients before they are reduced."""
    copied: PassMemory | None = None
    """What it takes if one device has all the weights: FSDP copies them too, perhaps to another dtype."""
    exchanges: Sequence[CollectiveCost] = ()
    """Collectives of a row within its tensor, expert or context group, as traced."""


class MemoryPart(msgspec.Struct, frozen=True):
    name: str
    bytes: int
    source: Source


class DevicePlan(msgspec.Struct, frozen=True):
    """What each device of the mesh needs at the moment that needs most."""

    mesh: MeshShape
    moment: Moment
    parts: Sequence[MemoryPart]
    collectives: Sequence[CollectiveCost]

    @property
    def total(self) -> int:
        return sum(part.bytes for part in self.parts)


def plan_device(cost: ModelCost, recipe: MemoryRecipe, mesh: MeshShape) -> DevicePlan:
    shards = 1 if is_replicated(cost, recipe, mesh) else mesh.shards
    weights = _share(cost.rank_parameters, shards)
    trained = weights if recipe.full else recipe.slots * sum(_held_adapter(cost, mesh).values())
    weights_bytes = weights * recipe.stored_bytes - cost.saved_bytes // shards
    held = [MemoryPart("weights", weights_bytes if recipe.has_weights else 0, "counted")]
    if not recipe.full:
        held.append(MemoryPart("adapters", trained * 4, "counted"))
    # Devices that hold the same of an adapter share its moments and summed gradients; those of a weight are sharded as
    # it is.
    sharing = mesh.devices // mesh.pipeline
    stepped = trained if recipe.full else recipe.slots * _share(cost.adapter_parameters, sharing)
    if recipe.full and not recipe.has_weights:
        trained = stepped = 0
    held.append(MemoryPart("optimizer", stepped * MOMENTS_BYTES, "counted"))
    held.append(MemoryPart("KV cache", recipe.cached_tokens * cost.cache_numbers * recipe.item_bytes, "counted"))
    quantising = QUANTISING_BYTES if recipe.quantise and recipe.device == "cpu" else 0
    held.append(MemoryPart("process", PROCESS_BYTES[recipe.device] + quantising, "estimated"))
    plans = []
    for moment, parts in _moments(cost, recipe, mesh, trained, stepped):
        uncertain = sum(part.bytes for part in parts if part.source != "counted")
        uneven = sum(part.bytes for part in parts if part.name == "activations") if mesh.expert > 1 else 0
        margin = MemoryPart("margin", int(MARGIN * uncertain + UNEVEN * uneven), "estimated")
        shown = tuple(part for part in (*held, *parts, margin) if part.bytes)
        plans.append(DevicePlan(mesh, moment, shown, collective_costs(cost, recipe, mesh)))
    return max(plans, key=lambda plan: plan.total)


def is_replicated(cost: ModelCost, recipe: MemoryRecipe, mesh: MeshShape) -> bool:
    """A frozen base that is small, or has a single device, is on every device in full, without FSDP."""
    is_small = cost.parameters * recipe.item_bytes - cost.saved_bytes <= recipe.replicated_bytes
    is_split = mesh.tensor > 1 or mesh.expert > 1 or mesh.pipeline > 1
    return (is_small or mesh.devices == 1) and not (recipe.full or recipe.offload or is_split)


def collective_costs(cost: ModelCost, recipe: MemoryRecipe, mesh: MeshShape) -> tuple[CollectiveCost, ...]:
    """Commands, rows and results travel besides; they are small."""
    costs = []
    groups, numbers = cost.blocks, _group_parameters(cost, mesh)
    if mesh.expert > 1:
        groups += cost.expert_blocks
        if mesh.shards * mesh.tensor == mesh.expert:
            # Each rank has all that it computes with of them.
            groups, numbers = cost.blocks, cost.rank_parameters - cost.expert_parameters
    if mesh.shards > 1 and not is_replicated(cost, recipe, mesh):
        # A block is gathered for the forward and again for the backward pass, what is in no block once.
        gathered = (2 * numbers - cost.root_parameters) * recipe.item_bytes - 2 * cost.saved_bytes
        costs.append(CollectiveCost("all-gather", "shard", "row", 2 * groups + 1, gathered))
        if recipe.full:
            costs.append(CollectiveCost("reduce-scatter", "shard", "row", groups + 1, numbers * GRADIENT_BYTES))
    if recipe.full and mesh.replicate > 1:
        calls = cost.blocks + 1 + (cost.expert_blocks if mesh.expert > 1 else 0)
        reduced = _share(cost.rank_parameters, mesh.shards) * GRADIENT_BYTES
        costs.append(CollectiveCost("all-reduce", "replicate", "row", calls, reduced))
    costs.extend(cost.exchanges)
    if mesh.devices > 1:
        # The norm of all gradients of each model; then the gradients of an adapter, and its new values.
        norms = 1 if recipe.full else recipe.slots
        costs.append(CollectiveCost("all-reduce", "all", "step", norms, 8 * norms))
        if not recipe.full:
            costs.extend(_adapter_collectives(cost, recipe, mesh))
    return tuple(costs)


def _adapter_collectives(cost: ModelCost, recipe: MemoryRecipe, mesh: MeshShape) -> Iterator[CollectiveCost]:
    stage = mesh.devices // mesh.pipeline
    holders = {"all": stage, "same parts": stage // mesh.tensor, "same experts": stage // mesh.expert}
    for over, numbers in _held_adapter(cost, mesh).items():
        if numbers and holders[over] > 1:
            size = recipe.slots * numbers * GRADIENT_BYTES
            yield CollectiveCost("reduce-scatter", over, "step", recipe.slots, size)
            yield CollectiveCost("all-gather", over, "step", recipe.slots, size)


def _held_adapter(cost: ModelCost, mesh: MeshShape) -> dict[AdapterHolders, int]:
    """Returns what each rank holds of an adapter, by the ranks that hold the same."""
    split = cost.adapter_split_parameters if mesh.tensor > 1 else 0
    of_experts = cost.adapter_expert_parameters if mesh.expert > 1 else 0
    return {
        "all": cost.adapter_parameters - split - of_experts,
        "same parts": _share(split, mesh.tensor),
        "same experts": _share(of_experts, mesh.expert),
    }


def smallest_plan(
    cost: ModelCost, recipe: MemoryRecipe, device_bytes: int, groups: MeshShape = ONE_DEVICE
) -> DevicePlan | None:
    """The fewest devices that hold it, by doubling those that shard `groups`; None if more of them would not help."""
    mesh = groups
    while mesh.devices <= MOST_DEVICES:
        plan = plan_device(cost, recipe, mesh)
        if plan.total <= device_bytes:
            return plan
        mesh = msgspec.structs.replace(mesh, shard=2 * mesh.shard)
    return None


def cache_numbers(config: Mapping[str, Any]) -> int:
    """Keys and values of one token in all layers, by a model's configuration; 0 if it does not say. A family that
    compresses them needs less."""
    text: Mapping[str, Any] = config.get("text_config") or config
    heads, layers = text.get("num_attention_heads"), text.get("num_hidden_layers")
    if not (isinstance(heads, int) and isinstance(layers, int)):
        return 0
    width = text.get("head_dim") or text.get("hidden_size", 0) // heads
    return int(2 * layers * (text.get("num_key_value_heads") or heads) * width)


def _moments(
    cost: ModelCost, recipe: MemoryRecipe, mesh: MeshShape, trained: int, stepped: int
) -> Iterator[tuple[Moment, Sequence[MemoryPart]]]:
    last = trained * GRADIENT_BYTES
    earlier = stepped * GRADIENT_BYTES if recipe.accumulates else 0
    if recipe.full and cost.parameters * GRADIENT_BYTES <= recipe.replicated_bytes:
        last = _group_parameters(cost, mesh) * GRADIENT_BYTES
    # A pass has several rows: those of the first ones are there when the last one begins.
    gradients = MemoryPart("gradients", earlier + last, "counted")
    activations = cost.activations or PassMemory(0, 0)
    gathered, source = _gathered(cost, recipe, mesh)
    yield (
        "beginning of the backward pass",
        (
            gradients,
            MemoryPart("activations", activations.beginning, "traced"),
            MemoryPart("gathered weights", gathered.beginning, source),
        ),
    )
    yield (
        "end of the backward pass",
        (
            gradients,
            MemoryPart("activations", activations.end, "traced"),
            MemoryPart("gathered weights", gathered.end, source),
        ),
    )


def _gathered(cost: ModelCost, recipe: MemoryRecipe, mesh: MeshShape) -> tuple[PassMemory, Source]:
    if is_replicated(cost, recipe, mesh):
        return PassMemory(0, 0), "traced"
    copied = 0
    if not recipe.has_weights:
        # The shard of a group is copied to the device before it is gathered.
        copied = _share(max(cost.block_parameters, cost.root_parameters), mesh.shards) * recipe.stored_bytes
    traced = cost.gathered if mesh.shards > 1 else cost.copied
    if traced is not None:
        return PassMemory(traced.beginning + copied, traced.end + copied), "traced"
    least = (cost.block_parameters + cost.root_parameters) * recipe.item_bytes - cost.block_saved_bytes + copied
    return PassMemory(least, least), "estimated"


def _group_parameters(cost: ModelCost, mesh: MeshShape) -> int:
    """Returns what one rank of a tensor or expert group computes with."""
    return cost.rank_parameters - cost.expert_parameters + _share(cost.expert_parameters * mesh.tensor, mesh.expert)


def _share(numbers: int, shards: int) -> int:
    return -(-numbers // shards)
