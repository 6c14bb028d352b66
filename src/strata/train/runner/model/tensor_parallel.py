"""Tensor parallelism: which layers are split and how (the `tp_plan` of transformers), collectives with their gradients,
and the refusals of families.

transformers knows which layers of a family are split, and how (its `tp_plan`); the arithmetic is here. Weights are
tensors that are split over the group, or replicated on it: so FSDP can shard them further, and files show which part a
rank holds. A layer computes with its part as a plain tensor. Two sums make the numbers those of one rank:

- Of a layer that is split by its outputs (`columns`), each rank has some outputs; gradients of its inputs are summed
  where the block begins that such layers belong to, once for all of them.
- Of a layer that is split by its inputs (`rows`), each rank has a summand of all outputs; the layer's output is summed.

In between, a rank has attention heads and inner dimensions of its own. A weight that all of them share there, such as
the norm of a head, gets the sum of its gradients. Embeddings are replicated, and a head that is tied to them.

Between these blocks each rank has a slice of the tokens of a row (sequence parallelism): hidden states, their norms and
what a backward pass keeps of them are divided by the group. A block gathers the tokens of all ranks where it begins,
and a sum that ends it leaves each rank its slice; a weight between blocks gets the sum of its gradients. A row that the
group does not divide, and several rows at once, are not sliced.

Experts are not split here but spread over expert groups (`expert_parallel`), to which the ranks of a tensor group
belong. Each rank of it sends its slice of the tokens to their experts; if the row is not sliced, one that is taken for
that, and the results are gathered.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.nn.functional import pad
from transformers import PreTrainedModel

from strata.base.errors import Code, StrataError
from strata.train.runner.lora.adapter import LoraPart
from strata.train.runner.lora.hooks import Span, slice_spans
from strata.train.runner.lora.targets import LoraTarget, is_experts
from strata.train.runner.model.distributed_weights import SplitModel, compute_locally, distribute_weight
from strata.train.runner.model.loading import parent_of

Split = Literal["columns", "rows", "shared", "gathered"]
HookedInput = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a module, and those by name."""
SPLITS: Final[Mapping[str, Split | None]] = {
    "colwise": "columns",
    "rowwise": "rows",
    "replicated_with_grad_allreduce": "shared",
    "colwise_gather_output": "gathered",
    "embedding_rowwise": None,
    "moe_tp_experts": None,
}
"""What transformers calls the ways to split a layer. `gathered` is `columns` with the outputs of all ranks."""
ATTENTION_PLANS: Final[Mapping[str, Mapping[str, str]]] = {
    # Of attention itself: one sink for each head.
    "gpt_oss": {"": "colwise", ".q_proj": "colwise", ".k_proj": "colwise", ".v_proj": "colwise", ".o_proj": "rowwise"},
    # Queries, keys and values are computed from a few numbers that all heads share.
    "deepseek_v3": {
        ".q_proj": "colwise",
        ".q_a_proj": "replicated_with_grad_allreduce",
        ".q_a_layernorm": "replicated_with_grad_allreduce",
        ".q_b_proj": "colwise",
        ".kv_a_proj_with_mqa": "replicated_with_grad_allreduce",
        ".kv_a_layernorm": "replicated_with_grad_allreduce",
        ".kv_b_proj": "colwise",
        ".o_proj": "rowwise",
    },
}
"""How layers of attention are split in families of which transformers has no plan for them."""
_NUMBER: Final = re.compile(r"\.\d+(?=\.|$)")
_LAYER: Final = re.compile(r"\.layers\.\d+$")


class TensorParallel(SplitModel):
    """A model that is split over a tensor group. All ranks of the group call the model together, with the same row."""

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        super().__init__(mesh)
        self._splits: Mapping[str, Split] = {}
        self._is_sliced = False
        """Whether this rank has a slice of the tokens between the blocks of the layer that computes."""

    def split(self, lm: PreTrainedModel) -> None:
        """Replace the weights and add the sums. The model may have no memory yet; nothing is communicated."""
        self._splits = plan_splits(lm, self.size)
        replaced: dict[int, nn.Parameter] = {}
        for name, weight in list(lm.named_parameters(remove_duplicate=False)):
            module, last = parent_of(lm, name)
            if is_experts(module):
                continue
            if id(weight) not in replaced:
                placement = placement_of(self._splits.get(_parent(name)), last)
                replaced[id(weight)] = distribute_weight(weight, self.mesh, placement)
            setattr(module, last, replaced[id(weight)])
        blocks = _blocks(self._splits)
        layers = [name for name, _ in lm.named_modules() if _LAYER.search(name) and f"{name}.self_attn" in blocks]
        for name, module in lm.named_modules():
            is_between = _is_in(name, layers) and not _is_in(name, blocks)
            if module._parameters and not is_experts(module):
                compute_locally(module, partial(self._local, self._splits.get(name), is_between=is_between))
            if name in blocks:
                module.register_forward_pre_hook(self._begin_block, with_kwargs=True)
            match self._splits.get(name):
                case "rows":
                    module.register_forward_hook(self._sum_output)
                case "gathered":
                    module.register_forward_pre_hook(self._sum_input_gradients, with_kwargs=True)
                    module.register_forward_hook(self._gather_output)
        for name in layers:
            begin = partial(self._begin_layer, is_first=name == layers[0])
            lm.get_submodule(name).register_forward_pre_hook(begin, with_kwargs=True)
        lm.get_submodule(layers[-1]).register_forward_hook(self._end_layers)

    def lora_part(self, target: LoraTarget) -> LoraPart:
        """Returns what this rank's computation of a layer takes of the layer's adapter. Gradients are summed over all
        ranks that hold a matrix: those of a layer that every rank computes in full count once. Of a layer that the
        heads of all ranks share, a rank has the gradient from its own heads."""
        return split_adapter(self._splits.get(target.name), target, self.rank, self.size)

    def take_tokens(self, values: torch.Tensor) -> torch.Tensor:
        """This rank's slice of what all ranks have for each token. Slices are equally long: zeros are added."""
        if self._is_sliced:
            return values
        length = self._slice_length(len(values))
        padded = pad(self._sum_gradients(values), (0, 0, 0, length * self.size - len(values)))
        return padded[self.rank * length : (self.rank + 1) * length]

    def take_spans(self, spans: Sequence[Span], tokens: int) -> Sequence[Span]:
        if self._is_sliced:
            return slice_spans(spans, self.rank * tokens, (self.rank + 1) * tokens)
        length = self._slice_length(tokens)
        padding = Span(None, length * self.size - tokens)
        return slice_spans([*spans, padding], self.rank * length, (self.rank + 1) * length)

    def gather_tokens(self, values: torch.Tensor, tokens: int) -> torch.Tensor:
        if self._is_sliced:
            return values
        gathered = self._gather(values, dim=0)
        # A copy: FSDP's hook on the result of a module does not bear a view that is changed in place.
        return gathered if len(gathered) == tokens else gathered[:tokens].clone()

    def _slice_length(self, tokens: int) -> int:
        return -(-tokens // self.size)

    def _local(self, split: Split | None, name: str, weight: DTensor, *, is_between: bool) -> torch.Tensor:
        if self._whole:
            return weight.full_tensor()
        local = weight.to_local()
        if split == "shared" or (is_between and self._is_sliced):
            return self._sum_gradients(local)
        if split == "rows" and name == "bias":
            # The outputs are summed, and the bias is in that sum once.
            return self._sum_gradients(local) * (self.rank == 0)
        return local

    def _sum_gradients(self, value: torch.Tensor) -> torch.Tensor:
        return _SumGradients.apply(value, self.group)  # type: ignore[no-any-return, no-untyped-call]

    def _begin_layer(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_first: bool
    ) -> HookedInput:
        """Also when a layer is computed again for its backward pass: whether it is sliced follows from its inputs."""
        del module
        hidden, tokens = args[0], kwargs["position_embeddings"][0].shape[1]
        self._is_sliced = not self._whole and len(hidden) == 1 and tokens % self.size == 0
        if self._is_sliced and is_first:
            hidden = _Slice.apply(hidden, self.group)  # type: ignore[no-untyped-call]
        return (hidden, *args[1:]), kwargs

    def _end_layers(self, module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        del module, args
        return self._gather(output, dim=1) if self._is_sliced else output

    def _begin_block(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> HookedInput:
        if self._is_sliced:
            return _with_hidden(module, args, kwargs, self._gather_tokens)
        return self._sum_input_gradients(module, args, kwargs)

    def _gather_tokens(self, hidden: torch.Tensor) -> torch.Tensor:
        return _GatherTokens.apply(hidden, self.group)  # type: ignore[no-any-return, no-untyped-call]

    def _sum_input_gradients(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> HookedInput:
        if self._whole:
            return args, kwargs
        return _with_hidden(module, args, kwargs, self._sum_gradients)

    def _sum_output(self, module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        del module, args
        if self._is_sliced:
            return _ScatterSum.apply(output, self.group)  # type: ignore[no-any-return, no-untyped-call]
        return output if self._whole else _Sum.apply(output, self.group)  # type: ignore[no-untyped-call]

    def _gather_output(self, module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        del module, args
        return output if self._whole else self._gather(output, dim=-1)

    def _gather(self, value: torch.Tensor, dim: int) -> torch.Tensor:
        return _Gather.apply(value, self.group, dim)  # type: ignore[no-any-return, no-untyped-call]


def _with_hidden(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[torch.Tensor], torch.Tensor]
) -> HookedInput:
    """The inputs of a block with other hidden states."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    if "hidden_states" not in kwargs:
        raise StrataError(Code.UNSUPPORTED, f"{type(module).__name__} has other inputs than hidden states")
    return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}


def plan_splits(lm: PreTrainedModel, size: int) -> dict[str, Split]:
    """Returns how each layer is split by so many ranks. UNSUPPORTED if there is no plan, or another kind of one."""
    splits: dict[str, Split] = {}
    names = _names_of_weights(lm)
    plan = {**lm.tp_plan, **_attention_plan(lm)}
    for name, module in lm.named_modules():
        style = plan.get(_NUMBER.sub(".*", name))
        # What another stage of a pipeline has is without weights here.
        if style is None or next(module.parameters(), None) is None:
            continue
        if style not in SPLITS:
            raise StrataError(Code.UNSUPPORTED, f"{name} would be split as {style}, which is not computed here")
        split = SPLITS[style]
        if split == "gathered" and not _fits(module, names, size):
            continue
        if split is not None:
            splits[name] = split
            _check_divisible(name, module, split, size)
    if not _blocks(splits):
        raise StrataError(Code.UNSUPPORTED, "there is no plan to split its layers")
    for block in _blocks(splits):
        for name, _ in lm.get_submodule(block).named_parameters(prefix=block):
            if _parent(name) not in splits:
                # Its gradient would be that of one rank's part of the block.
                raise StrataError(Code.UNSUPPORTED, f"the plan of transformers leaves out {name}")
    return splits


def _attention_plan(lm: PreTrainedModel) -> dict[str, str]:
    plan = ATTENTION_PLANS.get(str(lm.config.model_type), {})
    return {f"{lm.base_model_prefix}.layers.*.self_attn{name}": style for name, style in plan.items()}


def placement_of(split: Split | None, name: str) -> Placement:
    """Returns where a tensor group has a weight, by the split of its module and its name there."""
    match split:
        case "columns" | "gathered":
            return Shard(0)
        case "rows" if name == "weight":
            return Shard(1)
        case _:
            return Replicate()


def split_adapter(split: Split | None, target: LoraTarget, rank: int, count: int) -> LoraPart:
    """Returns what a rank of a tensor group takes of the adapter of a layer, by the split of the layer."""
    match split:
        case "columns" | "gathered":
            return LoraPart(rows=_part(target.rows, rank, count))
        case "rows":
            return LoraPart(columns=_part(target.columns, rank, count))
        case "shared":
            return LoraPart()
        case _:
            return LoraPart(is_counted=rank == 0)


def _blocks(splits: Mapping[str, Split]) -> set[str]:
    """The modules, such as attention, whose inputs all ranks have and whose outputs they sum."""
    return {_parent(name) for name, split in splits.items() if split == "rows"}


def _names_of_weights(lm: nn.Module) -> dict[int, int]:
    """Returns how many names each weight has: more than one if it is tied."""
    counts: dict[int, int] = {}
    for _, weight in lm.named_parameters(remove_duplicate=False):
        counts[id(weight)] = counts.get(id(weight), 0) + 1
    return counts


def _fits(module: nn.Module, names: Mapping[int, int], size: int) -> bool:
    weights = [weight for _, weight in module.named_parameters(recurse=False)]
    return all(names[id(weight)] == 1 and weight.shape[0] % size == 0 for weight in weights)


def _check_divisible(name: str, module: nn.Module, split: Split, size: int) -> None:
    for last, weight in module.named_parameters(recurse=False):
        placement = placement_of(split, last)
        if isinstance(placement, Shard) and (length := weight.shape[placement.dim]) % size:
            what = f"{length} {'inputs' if split == 'rows' else 'outputs'}"
            raise StrataError(Code.UNSUPPORTED, f"{name} has {what}, which parallel.tensor {size} does not divide")


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _is_in(name: str, modules: Collection[str]) -> bool:
    """Says whether a module is one of these, or inside of one."""
    parts = name.split(".")
    return any(".".join(parts[:count]) in modules for count in range(1, len(parts) + 1))


def _part(length: int, rank: int, count: int) -> range:
    return range(rank * length // count, (rank + 1) * length // count)


class _SumGradients(torch.autograd.Function):
    """A value that all ranks have in common, at the beginning of what each computes by itself."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Sum(torch.autograd.Function):
    """The sum over the ranks, in place: `value` is fresh from its layer. Its gradient is the same on all ranks."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        dist.all_reduce(value, group=group)
        ctx.mark_dirty(value)
        return value

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        del ctx
        return grads[0], None


class _Gather(torch.autograd.Function):
    """The values of all ranks, in their order. The gradient of them is the same on all ranks; each takes its own."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
        ctx.rank, ctx.count, ctx.dim = dist.get_rank(group), dist.get_world_size(group), dim
        return _gathered(value, group, dim)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return torch.chunk(grads[0], ctx.count, dim=ctx.dim)[ctx.rank], None, None


class _Slice(torch.autograd.Function):
    """This rank's tokens of what all ranks have. Each rank has the gradient of its tokens, and gets that of all."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        # A copy, so that the whole need not be kept.
        return torch.chunk(value, dist.get_world_size(group), dim=1)[dist.get_rank(group)].clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _gathered(grads[0], ctx.group, dim=1), None


class _GatherTokens(torch.autograd.Function):
    """The tokens of all ranks, where each begins to compute with its weights: their gradients are summed."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _gathered(value, group, dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _scattered(grads[0], ctx.group), None


class _ScatterSum(torch.autograd.Function):
    """This rank's tokens of the sum over the ranks. Each rank needs the gradients of all tokens."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _scattered(value, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _gathered(grads[0], ctx.group, dim=1), None


def _gathered(value: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    count = dist.get_world_size(group)
    gathered = value.new_empty(count * value.shape[0], *value.shape[1:])
    dist.all_gather_single(gathered, value.contiguous(), group=group)
    return torch.cat(gathered.chunk(count), dim=dim)


def _scattered(value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's tokens of the sum."""
    parts = torch.chunk(value, dist.get_world_size(group), dim=1)
    total = torch.empty_like(parts[0], memory_format=torch.contiguous_format)
    dist.reduce_scatter_single(total, torch.cat(parts), group=group)
    return total
