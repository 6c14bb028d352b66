"""One packed row through the model: documents one after the other, none of which sees another.

Attention runs document by document through the engine's own kernel, so that a document's numbers do not depend on its
neighbours, no mask as large as the row squared is needed, and a NaN of one client cannot reach another's tokens.
Positions start anew with each document.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from strata.train.layers import HEAD
from strata.train.runner.lora import Adapters, Span, spans_between

ATTENTION: Final = "strata_documents"


@dataclass(frozen=True)
class Row:
    """`places` and `targets` name, pair by pair, which token's distribution is asked about which target."""

    tokens: torch.Tensor
    documents: Sequence[int]
    """Lengths, in order."""
    spans: Sequence[Span]
    places: torch.Tensor
    targets: torch.Tensor

    @property
    def positions(self) -> torch.Tensor:
        return torch.cat([torch.arange(length, device=self.tokens.device) for length in self.documents])


def document_attention(  # noqa: PLR0913 - the engine's signature
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    documents: Sequence[int] | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside each document; (batch, heads, tokens, dimensions) in, tokens before heads out."""
    del attention_mask
    lengths = list(documents) if documents is not None else [query.shape[2]]
    parts = [
        sdpa_attention_forward(module, q, k, v, _window(q, sliding_window), **options)[0]
        for q, k, v in zip(*(torch.split(part, lengths, 2) for part in (query, key, value)), strict=True)
    ]
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)), None


def _window(query: torch.Tensor, width: int | None) -> torch.Tensor | None:
    """The mask of a layer that looks back only so far; None, plainly causal, where the document is no longer."""
    length = query.shape[2]
    if width is None or length <= width:
        return None
    back = torch.arange(length, device=query.device)[:, None] - torch.arange(length, device=query.device)
    return ((back >= 0) & (back < width))[None, None]


AttentionInterface.register(ATTENTION, document_attention)


class TargetLogprobs(torch.autograd.Function):
    """Log-probabilities of targets under rows of logits, with one float32 copy of the logits and none more on the way
    back: the copy becomes the gradient."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, places: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logprobs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
        ctx.save_for_backward(logprobs, places, targets)
        ctx.dtype = logits.dtype
        return logprobs[places, targets]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (grad,) = grads
        logprobs, places, targets = ctx.saved_tensors
        of_row = torch.zeros(len(logprobs), dtype=grad.dtype, device=grad.device).index_add_(0, places, grad)
        whole = logprobs.exp_().mul_(of_row.neg_()[:, None])
        whole.index_put_((places, targets), grad, accumulate=True)
        return whole.to(ctx.dtype), None, None


class PackedModel(nn.Module):
    """The base with its head, asked for log-probabilities of targets and nothing larger.

    It is the root of the sharding, so that everything which reads a sharded weight happens inside its `forward`.
    """

    def __init__(self, lm: PreTrainedModel, adapters: Adapters | None, logits_bytes: int) -> None:
        super().__init__()
        self.lm = lm
        self._adapters = adapters
        self._logits_bytes = logits_bytes

    def forward(self, row: Row, *, by_engine: bool = False) -> torch.Tensor:
        """The float32 log-probability of each target of the row. `by_engine` is the long way, to compare with."""
        if by_engine:
            logits = self.lm(**self._inputs(row)).logits[0]
            return torch.log_softmax(logits, dim=-1, dtype=torch.float32)[row.places, row.targets]
        hidden = self.lm.base_model(**self._inputs(row)).last_hidden_state[0]
        step = max(1, self._logits_bytes // (4 * self.lm.config.get_text_config().vocab_size))
        if step >= len(hidden):
            return self._logprobs(hidden, row.places, row.targets, row.spans)
        parts = []
        for start in range(0, len(hidden), step):
            end = min(start + step, len(hidden))
            here = (row.places >= start) & (row.places < end)
            spans = spans_between(row.spans, start, end)
            parts.append(
                checkpoint(
                    self._logprobs,
                    hidden[start:end],
                    row.places[here] - start,
                    row.targets[here],
                    spans,
                    use_reentrant=False,
                    preserve_rng_state=False,
                )
            )
        return torch.cat(parts)

    def _inputs(self, row: Row) -> dict[str, Any]:
        return {
            "input_ids": row.tokens[None],
            "position_ids": row.positions[None],
            "use_cache": False,
            "documents": list(row.documents),
        }

    def _logprobs(
        self, hidden: torch.Tensor, places: torch.Tensor, targets: torch.Tensor, spans: Sequence[Span]
    ) -> torch.Tensor:
        head = self.lm.get_output_embeddings()  # type: ignore[no-untyped-call]
        assert head is not None
        logits = head(hidden)
        if self._adapters is not None:
            logits = self._adapters.add(HEAD, hidden, logits, spans)
        return TargetLogprobs.apply(logits, places, targets)  # type: ignore[no-any-return, no-untyped-call]
