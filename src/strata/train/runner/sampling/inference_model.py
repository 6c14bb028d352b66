"""The model as the sampler runs it, without weights of its own: gathering sharded weights in buckets, swapping
adapters, and the check that decode matches training.

The trained model is sharded and hooked for passes in which all ranks meet in the collectives of every layer. Sampling
is the opposite: each rank decodes by itself, as many steps as its sequences need. So it has modules of its own. The
weights are those of the live base, which adapters never change, or a copy of a full fine-tune.

The ranks gather them together: of a small model all at the start of a time slice. Of a larger one, no rank ever holds
more than one layer, besides the weights outside of layers: every forward pass of a rank gathers layer after layer, and
all ranks take part in it, each with a pass of its own or with none (`_LayerStream`). Adapters of experts that are
spread over ranks are gathered with the weights of their layer.

A self-check at start-up compares the two: decoding with the KV cache must give the log probabilities that training
computes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from strata.base.errors import StrataError
from strata.train.combinations import assess
from strata.train.runner.collectives import RankGroup
from strata.train.runner.experts import group_experts
from strata.train.runner.lora.adapter import Adapter
from strata.train.runner.lora.hooks import Adapters, Span
from strata.train.runner.mesh import blocks_of
from strata.train.runner.model.attention import describe_mask, terms_of, whole_row
from strata.train.runner.model.attention_kernels import AttentionTerms, States
from strata.train.runner.model.base import DTYPES, BaseModel
from strata.train.runner.model.expert_parallel import ExpertParallel
from strata.train.runner.model.fused_kernels import fuse_layers
from strata.train.runner.model.loading import parent_of
from strata.train.runner.model.quantised import replace_layers
from strata.train.runner.model.startup_check import FAILURES, TOLERANCE, first_line
from strata.train.runner.model.trained import local, mesh_size
from strata.train.runner.passes.logprobs import DecoderAndHead, PackedRow
from strata.train.runner.router_replay import RouterReplay
from strata.train.runner.sampling.kv_cache import SHORTEST_SLOT, DecodePlan, KVCache, KVPoolRows, PrefillPlan, Prompt

ATTENTION: Final = "strata_sampling"
ONLY_ATTENTION: Final = "the built-in sampler keeps nothing but keys and values of attention that it computes itself"
CHECKED_PROMPT: Final = 7
CHECKED_LENGTH: Final = 12
"""Tokens of the self-check that are prefilled, and all of its tokens."""
SPLITTING: Final = ("tensor", "expert")
"""Dimensions of meshes that split weights before FSDP shards them. A weight has at most one of them."""
BUCKET_ELEMENTS: Final = 16 << 20
"""Elements of weights that are gathered together: more would take memory beside the weights themselves."""


class AttentionPlan(Protocol):
    """Where the keys and values of the tokens are cached, and what each token attends to."""

    def attend(self, module: nn.Module, states: States, terms: AttentionTerms) -> torch.Tensor:
        """Attends from queries, keys and values, (1, heads, tokens, dimensions), to (1, tokens, heads, dimensions)."""
        ...


def planned_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    *,
    plan: AttentionPlan,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    return plan.attend(module, (query, key, value), terms_of(attention_mask, options)), None


AttentionInterface.register(ATTENTION, planned_attention)
AttentionMaskInterface.register(ATTENTION, describe_mask)


Location = tuple[str, nn.Module, str]
"""A weight: its name in the loaded model, the module that computes with it, and its name there."""


class InferenceModel:
    """Weights of at most `replicated_bytes` are gathered at once, larger ones layer by layer."""

    def __init__(self, base: BaseModel, ranks: RankGroup) -> None:
        lm, decoder = base.lm, base.decoder
        dtype = DTYPES[base.settings.dtype]
        self.dtype = dtype
        self.logits_bytes = base.settings.logits_bytes
        self._gathered_bytes = base.settings.replicated_bytes
        self._ranks = ranks
        self.vocabulary = int(lm.config.get_text_config(decoder=True).vocab_size)
        with torch.device("meta"):
            from_config: Any = type(lm)._from_config
            self._lm: PreTrainedModel = from_config(
                copy.deepcopy(lm.config),
                attn_implementation="eager" if base.rows == "own attention" else ATTENTION,
                dtype=dtype,
            )
        if base.settings.quantise:
            replace_layers(self._lm, base.settings.quantise)
        if base.settings.fused_layers:
            fuse_layers(self._lm)
        self._lm.eval()
        self._split = DecoderAndHead(self._lm, decoder)
        self._adapters = Adapters()
        self._adapters.add_hooks(self._lm)
        self.routers = RouterReplay()
        group_experts(self._lm, self._adapters, routers=self.routers)
        for name, buffer in lm.named_buffers(remove_duplicate=False):
            module, last = parent_of(self._lm, name)
            module._buffers[last] = buffer
        # A tied weight, such as a head that shares the embedding, goes by the first of its names. Which weights are
        # tied is taken from the loaded model: its files may overrule its configuration.
        first: dict[int, str] = {}
        first_names = {
            name: first.setdefault(id(parameter), name)
            for name, parameter in base.all_stages.named_parameters(remove_duplicate=False)
        }
        empty = list(self._lm.named_parameters(remove_duplicate=False))
        locations = {name: (first_names[name], *parent_of(self._lm, name)) for name, _ in empty}
        self._weights = _Weights(locations.values())
        blocks = blocks_of(self._lm)
        in_blocks = {id(module) for block in blocks for module in block.modules()}
        self._outside = _Weights(each for each in locations.values() if id(each[1]) not in in_blocks)
        self._experts = base.mesh.experts
        self._stream = _LayerStream(blocks, locations.values(), ranks)

    @contextmanager
    def with_weights(self, parameters: Mapping[str, torch.Tensor], adapters: Sequence[Adapter] = ()) -> Iterator[None]:
        """Compute with these weights, sharded or not, by their names in the loaded model, and with these adapters or
        none, until the context ends. All ranks enter and leave it together; in between each may make as many passes as
        it wants."""
        source = _Source(parameters, adapters, self._experts, self.dtype)
        size = source.adapter_bytes + sum(
            parameter.numel() * _gathered_dtype(parameter, self.dtype).itemsize for parameter in parameters.values()
        )
        is_free = all(_costs_nothing(parameter, self.dtype) for parameter in parameters.values())
        streamed = size > self._gathered_bytes and not is_free
        weights = self._outside if streamed else self._weights
        weights.install(source.gather(weights))
        try:
            if streamed:
                with self._stream.of(source):
                    yield
            else:
                yield
        finally:
            weights.remove()

    def hidden(
        self, tokens: torch.Tensor, positions: torch.Tensor, spans: Sequence[Span], plan: AttentionPlan
    ) -> torch.Tensor:
        """The last hidden state of each of these tokens, which form one row."""
        self._adapters.row = spans
        self._stream.begin_pass()
        return self._split.hidden(
            input_ids=tokens[None], attention_mask=whole_row(tokens), position_ids=positions[None], plan=plan
        )

    def logits(self, hidden: torch.Tensor, spans: Sequence[Span]) -> torch.Tensor:
        self._adapters.head_row = spans
        return self._split.logits(hidden)


@dataclass(frozen=True)
class _GatheredAdapter:
    """A target of an adapter, with all experts."""

    adapter: Adapter
    target: str
    own: tuple[torch.Tensor, torch.Tensor]
    """The weights of the experts that this rank holds."""
    full: tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class _Gathered:
    """What some modules compute with."""

    weights: Mapping[str, torch.Tensor]
    adapters: Sequence[_GatheredAdapter]


class _Weights:
    """Weights of some modules, which have none otherwise, and adapters of their experts, which have a part."""

    def __init__(self, locations: Iterable[Location]) -> None:
        self._locations = list(locations)
        self._empty = [module._parameters[last] for _, module, last in self._locations]
        self._adapters: Sequence[_GatheredAdapter] = ()
        self.names = dict.fromkeys(name for name, _, _ in self._locations)
        """The names, each once, in an order."""

    def install(self, gathered: _Gathered) -> None:
        for name, module, last in self._locations:
            module._parameters[last] = nn.Parameter(gathered.weights[name], requires_grad=False)
        self._adapters = gathered.adapters
        for each in self._adapters:
            each.adapter.pairs[each.target] = each.full

    def remove(self) -> None:
        for (_, module, last), empty in zip(self._locations, self._empty, strict=True):
            module._parameters[last] = empty
        for each in self._adapters:
            each.adapter.pairs[each.target] = each.own
        self._adapters = ()


@dataclass(frozen=True)
class _Source:
    """Where weights are gathered from. All ranks have the same adapters, in the same order."""

    parameters: Mapping[str, torch.Tensor]
    adapters: Sequence[Adapter]
    experts: ExpertParallel
    dtype: torch.dtype

    def gather(self, weights: _Weights) -> _Gathered:
        """All ranks call it together."""
        with torch.no_grad():
            gathered = gather_weights({name: self.parameters[name] for name in weights.names}, self.dtype)
            return _Gathered(gathered, list(self._gather_adapters(weights.names)))

    def _gather_adapters(self, weights: Collection[str]) -> Iterator[_GatheredAdapter]:
        for adapter in self.adapters:
            targets = [target for target in adapter.spread if target in weights]
            if not targets:
                continue
            own = [matrix.detach().to(self.dtype) for target in targets for matrix in adapter.pairs[target]]
            full = self.experts.gather_experts(own)
            for target, a, b in zip(targets, full[::2], full[1::2], strict=True):
                yield _GatheredAdapter(adapter, target, adapter.pairs[target], (a, b))

    @property
    def adapter_bytes(self) -> int:
        """Returns the bytes of all that is gathered of adapters."""
        matrices = (
            math.prod(adapter.shapes[f"{target}.{part}"])
            for adapter in self.adapters
            for target in adapter.spread
            for part in ("lora_A", "lora_B")
        )
        return sum(matrices) * self.dtype.itemsize


class _LayerStream:
    """The weights of one layer at a time, gathered before the layer computes and dropped after it.

    Ranks make passes of their own, as many as they need. Each pass begins with an agreement: a rank that makes one, and
    a rank that has ended its time slice, meet in it, and then in the collectives of every layer. When no rank makes a
    pass any more, all have ended.
    """

    def __init__(self, blocks: Sequence[nn.Module], locations: Iterable[Location], ranks: RankGroup) -> None:
        self._ranks = ranks
        self._source: _Source | None = None
        self._order: list[_Weights] = []
        """The layers in the order in which the last pass called them: the same in all passes of a model."""
        everywhere = list(locations)
        for block in blocks:
            modules = {id(module) for module in block.modules()}
            weights = _Weights(each for each in everywhere if id(each[1]) in modules)
            block.register_forward_pre_hook(lambda *_, weights=weights: self._gather(weights))
            # Also after an error, which must not keep the layer.
            block.register_forward_hook(lambda *_, weights=weights: self._drop(weights), always_call=True)

    @contextmanager
    def of(self, source: _Source) -> Iterator[None]:
        self._source = source
        try:
            yield
            while self._ranks.all_reduce_any([False])[0]:
                for weights in self._order:
                    source.gather(weights)
        finally:
            self._source = None

    def begin_pass(self) -> None:
        if self._source is not None:
            self._ranks.all_reduce_any([True])
            self._order = []

    def _gather(self, weights: _Weights) -> None:
        if self._source is not None:
            weights.install(self._source.gather(weights))
            self._order.append(weights)

    def _drop(self, weights: _Weights) -> None:
        if self._source is not None:
            weights.remove()


def _costs_nothing(parameter: torch.Tensor, dtype: torch.dtype) -> bool:
    """Says whether this rank has the full weight in this dtype already, where it computes."""
    is_there = local(parameter).device.type == _device_of(parameter).type
    return is_there and _is_whole(parameter) and parameter.dtype == _gathered_dtype(parameter, dtype)


def _gathered_dtype(parameter: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
    """Numbers and scales of a quantised weight stay what they are."""
    return dtype if parameter.dtype.is_floating_point else parameter.dtype


def _is_whole(parameter: torch.Tensor) -> bool:
    if not isinstance(parameter, DTensor):
        return True
    return all(mesh_size(parameter, name) == 1 for name in ("shard", *SPLITTING))


def gather_weights(parameters: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """All-gather the full weights from the shards. All ranks call it together; an unsharded weight that
    is on the device is not copied.

    Shards of many weights share a collective: one for each weight takes longer than the first token of a sample.
    """
    weights: dict[str, torch.Tensor] = {}
    buckets: dict[tuple[DeviceMesh, torch.dtype], dict[str, DTensor]] = {}
    for name, parameter in parameters.items():
        wanted = _gathered_dtype(parameter, dtype)
        if _is_whole(parameter):
            weights[name] = local(parameter).to(_device_of(parameter), wanted)
            continue
        assert isinstance(parameter, DTensor)
        key = parameter.device_mesh, wanted
        bucket = buckets.setdefault(key, {})
        bucket[name] = parameter
        if sum(shard.numel() for shard in bucket.values()) >= BUCKET_ELEMENTS:
            weights |= _gather_bucket(buckets.pop(key), wanted)
    for (_, wanted), bucket in buckets.items():
        weights |= _gather_bucket(bucket, wanted)
    return weights


def _gather_bucket(bucket: Mapping[str, DTensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """A weight is split over a tensor or expert group first, in equal parts. FSDP splits the first dimension of a part
    into as many equal shards as there are ranks; the last ones may be shorter."""
    like = next(iter(bucket.values()))
    count, mesh = mesh_size(like, "shard"), like.device_mesh
    shapes = [_part_shape(weight) for weight in bucket.values()]
    lengths = [-(-shape[0] // count) * math.prod(shape[1:]) for shape in shapes]
    shards = [local(weight) for weight in bucket.values()]
    room = torch.empty(sum(lengths), dtype=dtype, device=_device_of(like))
    gathered = _all_gather(shards, lengths, room, mesh.get_group("shard"), count)
    parts = [part.reshape(-1, *shape[1:])[: shape[0]] for part, shape in zip(gathered, shapes, strict=True)]
    weights = dict(zip(bucket, parts, strict=True))
    if split := {name: dimension for name, weight in bucket.items() if (dimension := _split_dimension(weight)) >= 0}:
        parts = [weights[name] for name in split]
        lengths = [part.numel() for part in parts]
        splitting = _splitting(like)
        room = parts[0].new_empty(sum(lengths))
        gathered = _all_gather(parts, lengths, room, mesh.get_group(splitting), mesh_size(like, splitting))
        for (name, dimension), part in zip(split.items(), gathered, strict=True):
            weights[name] = torch.cat([each.view(weights[name].shape) for each in part], dim=dimension)
    return weights


def _device_of(weight: torch.Tensor) -> torch.device:
    """Returns where ranks compute with a weight: its shards may be in the memory of the host."""
    return torch.device(weight.device_mesh.device_type) if isinstance(weight, DTensor) else weight.device


def _split_dimension(weight: DTensor) -> int:
    """Returns the dimension along which a group splits the weight; -1 if each of its ranks has all of it."""
    names = weight.device_mesh.mesh_dim_names or ()
    placement = weight.placements[names.index(_splitting(weight))] if _splitting(weight) else None
    return placement.dim if isinstance(placement, Shard) else -1


def _splitting(weight: DTensor) -> str:
    """The dimension of the weight's mesh that splits weights; empty if it has none."""
    return next((name for name in weight.device_mesh.mesh_dim_names or () if name in SPLITTING), "")


def _part_shape(weight: DTensor) -> list[int]:
    """Returns the shape of what a rank of a group computes with."""
    dimension = _split_dimension(weight)
    return [
        length // mesh_size(weight, _splitting(weight)) if number == dimension else length
        for number, length in enumerate(weight.shape)
    ]


def _all_gather(
    tensors: Sequence[torch.Tensor],
    lengths: Sequence[int],
    sent: torch.Tensor,
    group: dist.ProcessGroup,
    count: int,
) -> Sequence[torch.Tensor]:
    """Returns for each tensor those of all ranks, (ranks, length), in one collective. A tensor may be shorter. `sent`
    is room for those of this rank."""
    for part, tensor in zip(torch.split(sent, list(lengths)), tensors, strict=True):
        part[: tensor.numel()].copy_(tensor.reshape(-1))
    gathered = sent.new_empty(count * len(sent))
    dist.all_gather_single(gathered, sent, group=group)
    return torch.split(gathered.view(count, -1), list(lengths), dim=1)


def verify_decode_matches_training(model: InferenceModel, base: BaseModel, device: torch.device) -> str:
    """Says why this architecture cannot be sampled, or an empty string. All ranks call this together.

    A layer that keeps state other than keys and values, or keeps it elsewhere, would silently sample from another
    distribution than the one that is trained.
    """
    verdict = assess(msgspec.structs.replace(base.settings.combination, samples=True))
    if verdict.level == "refused":
        return verdict.message
    if base.rows != "packed":
        return f"{base.arch} cannot be sampled here: {ONLY_ATTENTION}"
    tokens = torch.randint(base.vocabulary, (CHECKED_LENGTH,), generator=torch.Generator().manual_seed(1)).to(device)
    indices = torch.arange(CHECKED_LENGTH - 1, device=device)
    row = PackedRow(tokens=tokens, documents=[CHECKED_LENGTH], spans=(), logit_indices=indices, targets=tokens[1:])
    with torch.no_grad():
        trained = base.logprobs(row)
    try:
        with model.with_weights(dict(base.lm.named_parameters())), torch.inference_mode():
            logits = _prefill_and_decode(model, tokens)
    except StrataError as error:
        return f"{base.arch} cannot be sampled here: {error.message}"
    except FAILURES as error:
        return f"{base.arch} cannot be sampled here: its code fails with {type(error).__name__}: {first_line(error)}"
    decoded = torch.log_softmax(logits[:-1], dim=-1, dtype=torch.float32)[indices, tokens[1:]]
    difference = float((trained - decoded).abs().max())
    if math.isfinite(difference) and difference <= TOLERANCE[base.settings.dtype]:
        return ""
    reason = f"decoding gives other log probabilities than training (off by {difference:.2g} nats)"
    return f"{base.arch} cannot be sampled here: {reason}"


def _prefill_and_decode(model: InferenceModel, tokens: torch.Tensor) -> torch.Tensor:
    """The logits of every token: the first ones by a prefill, the others by a decode step each."""
    device = tokens.device
    pool, slot = KVCache(1, SHORTEST_SLOT).allocate("", SHORTEST_SLOT)
    prefill = PrefillPlan([Prompt(CHECKED_PROMPT, [(pool, slot)])])
    hidden = [model.hidden(tokens[:CHECKED_PROMPT], torch.arange(CHECKED_PROMPT, device=device), (), prefill)]
    decode = DecodePlan([KVPoolRows(pool, [0], [CHECKED_PROMPT], device)])
    for index in range(CHECKED_PROMPT, CHECKED_LENGTH):
        hidden.append(model.hidden(tokens[index : index + 1], torch.tensor([index], device=device), (), decode))
        decode.advance()
    return model.logits(torch.cat(hidden), ())
