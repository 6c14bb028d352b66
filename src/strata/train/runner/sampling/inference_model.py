"""The model as the sampler runs it: the same modules once more, without weights of their own.

The trained model is sharded and hooked for passes in which all ranks meet in the collectives of every layer. Sampling
is the opposite: each rank decodes by itself, as many steps as its sequences need. So it has modules of its own. At the
start of a time slice all ranks together gather the full weights for them (on one rank there is nothing to gather). The
weights are those of the live base, which adapters never change, or a copy of a full fine-tune.
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


def copy_weights(parameters: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Copy this rank's shards in the dtype of the arithmetic."""
    return {name: parameter.detach().to(dtype, copy=True) for name, parameter in parameters.items()}


def gather_weights(parameters: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """All-gather the full weights from the shards. All ranks call it together; an unsharded weight is not copied."""
    weights = {}
    for name, parameter in parameters.items():
        weight = parameter.detach().to(dtype)
        weights[name] = weight.full_tensor() if isinstance(weight, DTensor) else weight
    return weights


def copy_adapter(adapter: Adapter, lm: PreTrainedModel) -> Adapter:
    """A copy that no optimizer step changes."""
    fixed = Adapter(adapter.config, targets_of(lm, adapter.config), adapter.flat.device)
    fixed.flat.copy_(adapter.flat)
    return fixed
