"""The model as the sampler runs it: the same modules once more, without weights of their own.

The trained model is sharded and hooked for passes in which all ranks meet in the collectives of every layer. Sampling
is the opposite: each rank decodes by itself, as many steps as its sequences need. So it has modules of its own. At the
start of a time slice all ranks together gather the full weights for them (on one rank there is nothing to gather). The
weights are those of the live base, which adapters never change, or a copy of a full fine-tune.

A self-check at start-up compares the two: decoding with the KV cache must give the log probabilities that training
computes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from strata.base.errors import StrataError
from strata.train.runner.lora import Adapters, Span, adapt_experts
from strata.train.runner.model.attention import AttentionTerms, States, describe_mask, terms_of
from strata.train.runner.model.base import BaseModel
from strata.train.runner.model.startup_check import FAILURES, TOLERANCE, first_line
from strata.train.runner.passes.logprobs import DecoderAndHead, PackedRow
from strata.train.runner.sampling.kv_cache import SHORTEST_SLOT, DecodePlan, KVCache, KVPoolRows, PrefillPlan, Prompt

ATTENTION: Final = "strata_sampling"
CHECKED_PROMPT: Final = 7
CHECKED_LENGTH: Final = 12
"""Tokens of the self-check that are prefilled, and all of its tokens."""


class AttentionPlan(Protocol):
    """Where the keys and values of the tokens are cached, and what each token attends to."""

    def attend(self, module: nn.Module, states: States, terms: AttentionTerms) -> torch.Tensor:
        """From queries, keys and values, (1, heads, tokens, dimensions), to (1, tokens, heads, dimensions)."""
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


class InferenceModel:
    def __init__(self, lm: PreTrainedModel, decoder: str, dtype: torch.dtype, logits_bytes: int) -> None:
        self.dtype = dtype
        self.logits_bytes = logits_bytes
        self.vocabulary = int(lm.config.get_text_config(decoder=True).vocab_size)
        with torch.device("meta"):
            from_config: Any = type(lm)._from_config
            self._lm: PreTrainedModel = from_config(
                copy.deepcopy(lm.config), attn_implementation=ATTENTION, dtype=dtype
            )
        self._lm.eval()
        self._split = DecoderAndHead(self._lm, decoder)
        self._adapters = Adapters(self._lm)
        adapt_experts(self._lm, self._adapters)
        for name, buffer in lm.named_buffers(remove_duplicate=False):
            module, last = _parent(self._lm, name)
            module._buffers[last] = buffer
        # A tied weight, such as a head that shares the embedding, goes by the first of its names. Which weights are
        # tied is taken from the loaded model: its files may overrule its configuration.
        first: dict[int, str] = {}
        first_names = {
            name: first.setdefault(id(parameter), name)
            for name, parameter in lm.named_parameters(remove_duplicate=False)
        }
        empty = list(self._lm.named_parameters(remove_duplicate=False))
        self._parameters = [(first_names[name], *_parent(self._lm, name)) for name, _ in empty]
        self._empty = [parameter for _, parameter in empty]

    @contextmanager
    def with_weights(self, weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Compute with these weights, by their names in the loaded model, until the context ends."""
        for name, module, last in self._parameters:
            module._parameters[last] = nn.Parameter(weights[name], requires_grad=False)
        try:
            yield
        finally:
            for (_, module, last), empty in zip(self._parameters, self._empty, strict=True):
                module._parameters[last] = empty

    def hidden(
        self, tokens: torch.Tensor, positions: torch.Tensor, spans: Sequence[Span], plan: AttentionPlan
    ) -> torch.Tensor:
        """The last hidden state of each of these tokens, which form one row."""
        self._adapters.row = spans
        return self._split.hidden(input_ids=tokens[None], position_ids=positions[None], plan=plan)

    def logits(self, hidden: torch.Tensor, spans: Sequence[Span]) -> torch.Tensor:
        self._adapters.head_row = spans
        return self._split.logits(hidden)


def _parent(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, last = name.rpartition(".")
    return model.get_submodule(path), last


def gather_weights(parameters: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """All-gather the full weights from the shards. All ranks call it together; an unsharded weight is not copied."""
    weights = {}
    for name, parameter in parameters.items():
        weight = parameter.detach().to(dtype)
        weights[name] = weight.full_tensor() if isinstance(weight, DTensor) else weight
    return weights


def verify_decode_matches_training(model: InferenceModel, base: BaseModel, device: torch.device) -> str:
    """Why this architecture cannot be sampled, or an empty string. All ranks call this together.

    A layer that keeps state other than keys and values, or keeps it elsewhere, would silently sample from another
    distribution than the one that is trained.
    """
    tokens = torch.randint(base.vocabulary, (CHECKED_LENGTH,), generator=torch.Generator().manual_seed(1)).to(device)
    indices = torch.arange(CHECKED_LENGTH - 1, device=device)
    row = PackedRow(tokens=tokens, documents=[CHECKED_LENGTH], spans=(), logit_indices=indices, targets=tokens[1:])
    with torch.no_grad():
        trained = base.logprobs(row)
        weights = gather_weights(dict(base.lm.named_parameters()), model.dtype)
    try:
        with model.with_weights(weights), torch.inference_mode():
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
