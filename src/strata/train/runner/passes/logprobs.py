"""One packed row through the model: documents one after the other, none of which sees another.

Attention runs document by document (`attention.py`), so that a document's numbers do not depend on its neighbours.
Positions start anew with each document.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from strata.base.errors import Code, StrataError
from strata.train.runner.lora.adapter import Adapters, Span, spans_between


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


class DecoderAndHead:
    """A causal language model in two: its decoder, and what its family does from the decoder's output to logits.

    The second half is the family's own code (scales, caps, a norm before the head): its `forward` runs with a decoder
    that returns the given hidden states. So logits can be computed of some tokens of a row at a time.
    """

    def __init__(self, lm: PreTrainedModel, decoder: str) -> None:
        self._lm = lm
        self._decoder: Any = lm.get_submodule(decoder)
        self._output: Any = None

    def hidden(self, **inputs: Any) -> torch.Tensor:
        """The last hidden state of each token of a row."""
        output = self._decoder(**inputs, use_cache=False)
        self._output = type(output)
        hidden = output.last_hidden_state
        assert isinstance(hidden, torch.Tensor)
        return hidden[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        calls = 0

        def stand_in(*unused: Any, **options: Any) -> Any:
            del unused, options
            nonlocal calls
            calls += 1
            return self._output(last_hidden_state=hidden[None])

        self._decoder.forward = stand_in
        try:
            tokens = torch.zeros((1, len(hidden)), dtype=torch.int64, device=hidden.device)
            logits = self._lm(input_ids=tokens, use_cache=False).logits
        finally:
            del self._decoder.forward
        if calls != 1:
            raise StrataError(Code.UNSUPPORTED, "its logits are not computed from its decoder's output alone")
        assert isinstance(logits, torch.Tensor)
        return logits[0]


class PackedModel(nn.Module):
    """The base with its head, asked for log-probabilities of targets and nothing larger.

    It is the root of the sharding, so that everything which reads a sharded weight happens inside its `forward`.
    """

    def __init__(self, lm: PreTrainedModel, decoder: str, adapters: Adapters | None, logits_bytes: int) -> None:
        super().__init__()
        self.lm = lm
        self._halves = DecoderAndHead(lm, decoder)
        self._adapters = adapters
        self._step = max(1, logits_bytes // (4 * lm.config.get_text_config(decoder=True).vocab_size))

    def forward(self, row: Row) -> torch.Tensor:
        """The float32 log-probability of each target of the row."""
        hidden = self._halves.hidden(
            input_ids=row.tokens[None], position_ids=row.positions[None], documents=list(row.documents)
        )
        if self._step >= len(hidden):
            return self._logprobs(hidden, row.places, row.targets, row.spans)
        parts = []
        for start in range(0, len(hidden), self._step):
            end = min(start + self._step, len(hidden))
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

    def _logprobs(
        self, hidden: torch.Tensor, places: torch.Tensor, targets: torch.Tensor, spans: Sequence[Span]
    ) -> torch.Tensor:
        if self._adapters is not None:
            self._adapters.head_row = spans
        logits = self._halves.logits(hidden)
        return TargetLogprobs.apply(logits, places, targets)  # type: ignore[no-any-return, no-untyped-call]
