"""Context parallelism: how a row is sliced over the ranks of a context group, and the exchange of heads in attention
(Ulysses).

Each slice has as many adjacent tokens, wherever documents begin and end. A model computes a token without the others,
except in attention. There the ranks exchange (Ulysses): each gets the queries, keys and values of all tokens of the row
for some of the heads, attends document by document as one rank would, and sends the results back to the ranks that have
their tokens. A head of keys that queries of several ranks share is sent to each of them.

Log probabilities of a row are joined, so that losses and results are those of the whole row on every rank. Each rank
computes the gradient of its slice of them; sums over the ranks, which are there for other reasons, make it the whole.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Final

import torch
import torch.distributed as dist
from transformers.integrations.sdpa_attention import repeat_kv

from strata.base.errors import Code, StrataError
from strata.train.runner.collectives import MeshGroup, exchange_rows
from strata.train.runner.model.attention_kernels import AttentionTerms, Documents, States, attend_documents


class ContextParallel(MeshGroup):
    """All ranks of the group call the model together, with the same row. A rank alone has whole rows."""

    def attend(self, states: States, documents: Documents, terms: AttentionTerms) -> torch.Tensor:
        """Attends from this rank's tokens and all heads to the same. `documents` are those of the row."""
        if self.size == 1:
            return attend_documents(states, documents, terms)
        heads = states[0].shape[1]
        if heads % self.size:
            raise StrataError(Code.UNSUPPORTED, f"parallel.context {self.size} does not divide its {heads} heads")
        if terms.sinks is not None:
            terms = replace(terms, sinks=terms.sinks.chunk(self.size)[self.rank])
        return self._gather_heads(attend_documents(self._gather_tokens(states), documents, terms))

    def join(self, logprobs: torch.Tensor, own: slice, count: int) -> torch.Tensor:
        """The log probabilities of all targets of a row, from those of each rank's slice of it."""
        if self.size == 1:
            return logprobs
        return _Join.apply(logprobs, own, count, self.group)  # type: ignore[no-any-return, no-untyped-call]

    def _gather_tokens(self, states: States) -> States:
        """All tokens, and this rank's heads of them, in one exchange."""
        shared = [self._share_heads(part) for part in states]
        rows = torch.cat([part.reshape(self.size, -1) for part in shared], dim=1)
        received = torch.split(self._exchange(rows), [part.numel() // self.size for part in shared], dim=1)
        query, key, value = (
            each.view(self.size, part.shape[1] // self.size, *part.shape[2:]).transpose(0, 1).flatten(1, 2)[None]
            for each, part in zip(received, shared, strict=True)
        )
        return query, key, value

    def _share_heads(self, part: torch.Tensor) -> torch.Tensor:
        """Repeats heads of keys or values to as many as the ranks can divide."""
        heads = part.shape[1]
        return repeat_kv(part, math.lcm(heads, self.size) // heads)

    def _gather_heads(self, attended: torch.Tensor) -> torch.Tensor:
        """This rank's tokens, and all heads of them: tokens before heads."""
        _, tokens, heads, width = attended.shape
        received = self._exchange(attended.reshape(self.size, -1))
        return received.view(self.size, tokens // self.size, heads, width).transpose(0, 1).flatten(1, 2)[None]

    def _exchange(self, rows: torch.Tensor) -> torch.Tensor:
        """One row to each rank, and one from each."""
        return exchange_rows(rows, [1] * self.size, [1] * self.size, self.group)


WHOLE_ROWS: Final = ContextParallel()


class _Join(torch.autograd.Function):
    """The gradient of the whole is the same on all ranks; each takes that of its slice."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, own: slice, count: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.own = own
        whole = part.new_zeros(count)
        whole[own] = part
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return grads[0][ctx.own], None, None, None
