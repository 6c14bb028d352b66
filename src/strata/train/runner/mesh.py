"""Builds the mesh of the ranks for a model: data, tensor, context, expert and pipeline groups of this rank, and who
holds which adapters.

A model that nothing divides is no special case for others: its only stage is the first and the last, and this rank
alone is its tensor, expert and context group.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from transformers import PreTrainedModel

from strata.base.errors import Code, StrataError
from strata.train.parallel import ParallelSettings
from strata.train.runner.collectives import ALONE, ShareGroup
from strata.train.runner.experts import group_experts
from strata.train.runner.lora.adapter import AdapterPlacement, LoraPart
from strata.train.runner.lora.hooks import Adapters
from strata.train.runner.lora.targets import LoraTarget, is_experts
from strata.train.runner.model.context_parallel import ContextParallel
from strata.train.runner.model.expert_parallel import ExpertParallel
from strata.train.runner.model.pipeline_parallel import PipelineStage
from strata.train.runner.model.tensor_parallel import TensorParallel
from strata.train.runner.passes.logprobs import PackedModel
from strata.train.runner.router_replay import RouterReplay


@dataclass(frozen=True)
class Mesh:
    """The stage and the groups of this rank. Each has one rank or more."""

    dtype: torch.dtype
    """That of the arithmetic."""
    data_ranks: int
    """How many of the ranks, or groups of them, compute rows of their own."""
    is_first_of_row: bool
    """Whether this rank stands for those that compute its rows together with it."""
    stage: PipelineStage
    context: ContextParallel
    tensor: TensorParallel
    experts: ExpertParallel
    weights: DeviceMesh
    """The ranks of the stage in order: those of a tensor group are adjacent, and those of a copy of the model. Ranks of
    a context group shard the model as others do."""
    expert_weights: DeviceMesh
    """The same ranks as the experts are spread over them: those of an expert group are adjacent, and are those of one
    tensor group or of several."""
    adapters: AdapterPlacement
    """Where adapters are in passes."""

    @property
    def sampled_adapters(self) -> AdapterPlacement:
        """Returns where adapters are to sample with: each rank computes all layers, and holds the same experts."""
        part_of = self.adapters.part_of
        return replace(self.adapters, part_of=lambda target: part_of(target) if target.experts else LoraPart())

    def split(self, lm: PreTrainedModel) -> None:
        """Split the weights over tensor and expert groups. The model may have no memory yet; nothing is
        communicated."""
        if self.tensor.size > 1:
            self.tensor.split(lm)
        if self.experts.size > 1:
            self.experts.split(lm)
        elif self.tensor.size > 1 and any(map(is_experts, lm.modules())):
            raise StrataError(Code.UNSUPPORTED, "a tensor group splits no experts: set parallel.expert")

    def group_experts(self, lm: PreTrainedModel, adapters: Adapters, routers: RouterReplay | None = None) -> None:
        """Replace the loops over experts in a model."""
        plan = self.experts.dispatch if self.experts.size > 1 else None
        group_experts(lm, adapters, plan, self.tensor if self.tensor.size > 1 else None, routers)

    def shard(self, packed: PackedModel, *, offload: bool = False) -> None:
        """Shard a model (FSDP), whose weights may be split over tensor or expert groups, over the rest of the mesh.
        With `offload`, shards and their gradients are in the memory of the host."""
        reduce = torch.promote_types(self.dtype, torch.float32)
        policy = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=reduce, cast_forward_inputs=False)
        if self.experts.size > 1:
            for module in list(packed.lm.modules()):
                if is_experts(module):
                    fully_shard(module, mesh=_mesh_without(self.expert_weights, "expert"), mp_policy=policy)
        sharding = _mesh_without(self.weights, "tensor")
        host = CPUOffloadPolicy(pin_memory=sharding.device_type != "cpu") if offload else OffloadPolicy()
        for module in (*blocks_of(packed.lm), packed):
            fully_shard(module, mesh=sharding, mp_policy=policy, offload_policy=host)
        register_fsdp_forward_method(packed, PackedModel.unmodified_logits.__name__)
        for module in packed.modules():
            if isinstance(module, FSDPModule):
                # FSDP would average over the ranks. A loss is a sum, so its gradient is one too.
                module.set_gradient_divide_factor(1.0)
                # A plain sum, which every backend supports.
                module.set_force_sum_reduction_for_comms(enable=True)


def make_mesh(parallel: ParallelSettings, ranks: ShareGroup, device: torch.device, dtype: torch.dtype) -> Mesh:
    """All ranks call it together. `dtype` is that of the arithmetic."""
    copies, shards, tensor, expert = parallel.replicate, parallel.shards(ranks.size), parallel.tensor, parallel.expert
    stage = PipelineStage(parallel, ranks, dtype)
    weights = expert_weights = row = _device_mesh(parallel, device, replicate=copies, shard=shards, tensor=tensor)
    if expert > 1:
        spread = shards * tensor // expert
        expert_weights = _device_mesh(parallel, device, replicate=copies, shard=spread, expert=expert)
    data_ranks = parallel.data_ranks(ranks.size)
    if parallel.context > 1:
        row = _device_mesh(parallel, device, rows=data_ranks, context=parallel.context, tensor=tensor)
    splits = TensorParallel(_group(weights, "tensor")), ExpertParallel(_group(expert_weights, "expert"))
    part_holders, expert_holders = (_make_holders(ranks, stage.shares, spread) for spread in (tensor, expert))
    return Mesh(
        dtype,
        data_ranks,
        stage.is_last and ranks.rank % parallel.row_ranks == 0,
        stage,
        ContextParallel(_group(row, "context")),
        *splits,
        weights,
        expert_weights,
        AdapterPlacement(
            partial(_part_of, stage, *splits), stage.shares, expert_holders, part_holders, is_staged=not stage.is_only
        ),
    )


def _part_of(
    stage: PipelineStage, tensor: TensorParallel, experts: ExpertParallel, target: LoraTarget
) -> LoraPart | None:
    split = experts if target.experts else tensor
    return split.lora_part(target) if stage.computes(target.name) else None


def _group(mesh: DeviceMesh, name: str) -> DeviceMesh | None:
    return mesh[name] if name in (mesh.mesh_dim_names or ()) else None


def _device_mesh(parallel: ParallelSettings, device: torch.device, **sizes: int) -> DeviceMesh:
    """A mesh of these sizes in each stage. What has a single rank there is no dimension, except the first of a model
    without copies."""
    kept = {name: size for name, size in sizes.items() if size > 1 or name in ("shard", "rows")}
    stages = {"pipeline": parallel.pipeline} if parallel.pipeline > 1 else {}
    mesh = init_device_mesh(device.type, (*stages.values(), *kept.values()), mesh_dim_names=(*stages, *kept))
    return mesh[tuple(kept)] if stages else mesh


def _make_holders(ranks: ShareGroup, stage: ShareGroup, spread: int) -> ShareGroup:
    """The ranks of this rank's stage that hold the same as it, if groups of so many adjacent ranks hold different parts
    of something: those at the same place in their groups. All ranks of all stages call it together."""
    if spread == 1:
        return stage
    if spread == stage.size:
        return ALONE
    firsts = [first + place for first in range(0, ranks.size, stage.size) for place in range(spread)]
    holders = [list(range(first, first // stage.size * stage.size + stage.size, spread)) for first in firsts]
    group, _ = dist.new_subgroups_by_enumeration(holders)  # type: ignore[no-untyped-call]
    return ShareGroup(stage.rank // spread, stage.size // spread, group)


def _mesh_without(mesh: DeviceMesh, dimension: str) -> DeviceMesh:
    assert mesh.mesh_dim_names is not None
    return mesh[tuple(name for name in mesh.mesh_dim_names if name != dimension)]


def blocks_of(lm: PreTrainedModel) -> list[nn.Module]:
    """The modules whose weights are gathered together: the layers of the model. All other weights are one group."""
    names = set(lm._no_split_modules or ())
    # A module that is sharded is of a class derived from its own.
    return [module for module in lm.modules() if any(kind.__name__ in names for kind in type(module).__mro__)]
