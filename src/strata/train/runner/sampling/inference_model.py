"""The model as the sampler runs it: the same modules once more, without weights, that are lent some for a quantum.

The model that is trained is sharded, adapted and hooked for passes in which all ranks meet in every layer. Sampling is
the opposite: ranks go on by themselves, each as many steps as its sequences need. So it has modules of its own, and at
the start of a quantum all ranks together put the weights for them together (on one rank: take them as they are). The
weights are those of the live base, which adapters never change, or of a copy that was made of a whole model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from strata.train.runner.lora.adapter import Adapter, Adapters, Span, targets_of
from strata.train.runner.lora.experts import adapt_experts
from strata.train.runner.model.attention import AttentionTerms, States, describe_mask, terms_of
from strata.train.runner.passes.logprobs import DecoderAndHead

ATTENTION: Final = "strata_sampling"


class Plan(Protocol):
    """Where the tokens of a pass belong, and what each of them looks back at."""

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
    plan: Plan,
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
            make: Any = type(lm)._from_config
            self._lm: PreTrainedModel = make(copy.deepcopy(lm.config), attn_implementation=ATTENTION, dtype=dtype)
        self._lm.eval()
        self._halves = DecoderAndHead(self._lm, decoder)
        self._adapters = Adapters(self._lm)
        adapt_experts(self._lm, self._adapters)
        for name, buffer in lm.named_buffers(remove_duplicate=False):
            module, last = _parent(self._lm, name)
            module._buffers[last] = buffer
        # A weight with two names, as a head that is the embedding once more, is known by the first of them. Which
        # are one is for the model to say that was read: its files may overrule its configuration.
        first: dict[int, str] = {}
        known = {
            name: first.setdefault(id(parameter), name)
            for name, parameter in lm.named_parameters(remove_duplicate=False)
        }
        own = list(self._lm.named_parameters(remove_duplicate=False))
        self._places = [(known[name], *_parent(self._lm, name)) for name, _ in own]
        self._empty = [parameter for _, parameter in own]

    @contextmanager
    def with_weights(self, weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
        for name, module, last in self._places:
            module._parameters[last] = nn.Parameter(weights[name], requires_grad=False)
        try:
            yield
        finally:
            for (_, module, last), empty in zip(self._places, self._empty, strict=True):
                module._parameters[last] = empty

    def hidden(self, tokens: torch.Tensor, positions: torch.Tensor, spans: Sequence[Span], plan: Plan) -> torch.Tensor:
        """The last hidden state of each of these tokens, which follow one another in one row."""
        self._adapters.row = spans
        return self._halves.hidden(input_ids=tokens[None], position_ids=positions[None], plan=plan)

    def logits(self, hidden: torch.Tensor, spans: Sequence[Span]) -> torch.Tensor:
        self._adapters.head_row = spans
        return self._halves.logits(hidden)


def _parent(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, last = name.rpartition(".")
    return model.get_submodule(path), last


def copied(parameters: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Each rank copies its own parts, as they are computed with."""
    return {name: parameter.detach().to(dtype, copy=True) for name, parameter in parameters.items()}


def put_together(parameters: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """All ranks call it together. Where a rank has everything already, nothing is copied."""
    found = {}
    for name, parameter in parameters.items():
        own = parameter.detach().to(dtype)
        found[name] = own.full_tensor() if isinstance(own, DTensor) else own
    return found


def frozen(adapter: Adapter, lm: PreTrainedModel) -> Adapter:
    """A copy that no step changes."""
    kept = Adapter(adapter.config, targets_of(lm, adapter.config), adapter.flat.device)
    kept.flat.copy_(adapter.flat)
    return kept
