"""Computes causal attention in each document of a packed row: choice of kernel (fused, blocks, variable length), block
sizes, and gradients.

`attend_documents` is the entry; `attend_continuation` is for a document whose beginning is cached. It chooses among
three computations of the same numbers:

- On CPU, and where the next does not apply, a fused kernel for one document at a time. A sliding window is computed in
  blocks of queries with the keys in their reach, so that neither time nor memory grows with the square of the document.
- On CUDA in half precision, the kernel for rows of documents of different lengths (`torch.nn.attention.varlen`).
- With soft-capping, which no kernel takes, and for sinks where neither applies, the plain softmax in blocks of queries,
  recomputed in the backward pass.

A sink is one more score in each head's softmax, without a value. No kernel takes sinks either, but their effect follows
from the log-sum-exp of the scores that kernels return (`_AttentionWithSinks`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.attention.varlen import AuxRequest, varlen_attn
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers.integrations.sdpa_attention import repeat_kv

from strata.base.errors import Code, StrataError

BLOCK: Final = 256
"""Queries of a sliding window that are computed at once, at least: smaller blocks would cost more in calls."""
SCORES: Final = 16 << 20
"""Scores of soft-capped attention that are in memory at once, at most."""
VARLEN_DIMENSIONS: Final = 256
"""The widest head of the kernel for documents of different lengths."""

States = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries, keys and values: (batch, heads, tokens, dimensions)."""


@dataclass(frozen=True)
class Reach:
    """How far back a token attends in its document: to the last `window` tokens, or to those of its chunk."""

    window: int | None = None
    chunk: int | None = None

    def covers(self, length: int) -> bool:
        """Says whether it makes no difference to a document of this length."""
        return all(limit is None or length <= limit for limit in (self.window, self.chunk))

    def allows(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Says which keys each query attends to, by their indices in the document."""
        allowed = key <= query
        if self.window is not None:
            allowed = allowed & (key > query - self.window)
        if self.chunk is not None:
            allowed = allowed & (key // self.chunk == query // self.chunk)
        return allowed


@dataclass(frozen=True)
class AttentionTerms:
    """The options of one layer's attention, besides its queries, keys and values."""

    scaling: float | None = None
    reach: Reach = Reach()
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Says whether a kernel for scaled dot-product attention computes it."""
        return self.softcap is None and self.sinks is None


class Documents:
    """The lengths of the documents of a row, for all of its layers. A compiled layer would be compiled again for
    another list of numbers, but not for another object."""

    def __init__(self, lengths: Sequence[int], ends: torch.Tensor | None = None) -> None:
        """`ends` are `document_ends` of these lengths, on the device of the row."""
        self.lengths = list(lengths)
        self.tokens = sum(lengths)
        self._ends = ends
        self._chunks: dict[int, Documents] = {}

    def ends(self, device: torch.device) -> torch.Tensor:
        """Returns where documents begin and end, as int32: copied to the device once, not once for each layer."""
        if self._ends is None or self._ends.device != device:
            self._ends = torch.from_numpy(document_ends(self.lengths)).to(device)
        return self._ends

    def in_chunks(self, longest: int) -> Documents:
        """The chunks of so many tokens as documents of their own: tokens of one attend to no other."""
        if longest not in self._chunks:
            lengths = [min(longest, length - start) for length in self.lengths for start in range(0, length, longest)]
            self._chunks[longest] = self if lengths == self.lengths else Documents(lengths)
        return self._chunks[longest]


def document_ends(lengths: Sequence[int]) -> NDArray[np.int32]:
    return np.cumsum([0, *lengths], dtype=np.int32)


def attend_documents(states: States, documents: Documents, terms: AttentionTerms) -> torch.Tensor:
    """Tokens before heads: (batch, tokens, heads, dimensions)."""
    if any(part.shape[2] != documents.tokens for part in states):
        raise StrataError(Code.UNSUPPORTED, "its attention has keys that belong to no token of the row")
    if terms.reach.chunk is not None:
        documents = documents.in_chunks(terms.reach.chunk)
        terms = replace(terms, reach=Reach(window=terms.reach.window))
    if _fits_varlen(states, terms):
        return _attend_varlen(states, documents, terms)
    split = zip(*(torch.split(part, documents.lengths, 2) for part in states), strict=True)
    parts = [_attend_document((query, key, value), terms) for query, key, value in split]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def attend_continuation(states: States, terms: AttentionTerms) -> torch.Tensor:
    """The last tokens of one document: there are queries for them alone, and keys and values of all of it."""
    query, key, _ = states
    batch, heads, count, _ = query.shape
    length, fused = key.shape[2], _is_fused(query, terms)
    step = max(1, SCORES // (length if fused else batch * heads * length))
    return _attend_blocks(states, range(length - count, length, step), terms, fused=fused)


def _attend_document(states: States, terms: AttentionTerms) -> torch.Tensor:
    query, _, _ = states
    length = query.shape[2]
    fused = _is_fused(query, terms)
    if fused and terms.reach.covers(length):
        return _attend_fused(states, None, terms)
    return _attend_blocks(states, range(0, length, _block_size(states, terms, fused=fused)), terms, fused=fused)


def _is_fused(query: torch.Tensor, terms: AttentionTerms) -> bool:
    return terms.is_plain or (terms.softcap is None and _takes_sinks(query))


def _attend_blocks(states: States, starts: range, terms: AttentionTerms, *, fused: bool) -> torch.Tensor:
    blocks = [
        _attend_block(states, start, min(start + starts.step, starts.stop), terms, fused=fused) for start in starts
    ]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1)


def _takes_sinks(query: torch.Tensor) -> bool:
    """Says whether `_CpuKernel` is right for it. In half precision it would round the output twice, and a router that
    is near a tie then chooses other experts than the unmodified model does."""
    return query.device.type == "cpu" and query.dtype in (torch.float32, torch.float64)


def _block_size(states: States, terms: AttentionTerms, *, fused: bool) -> int:
    batch, heads, length, _ = states[0].shape
    window = terms.reach.window
    size = length if window is None else max(window, BLOCK)
    keys = length if window is None else size + window
    return size if fused else min(size, max(1, SCORES // (batch * heads * min(keys, length))))


def _attend_block(states: States, start: int, end: int, terms: AttentionTerms, *, fused: bool) -> torch.Tensor:
    """The queries of the tokens from `start` to `end` of a document, and the keys in their reach."""
    query, key, value = states
    # There may be queries for the last tokens alone.
    before = key.shape[2] - query.shape[2]
    first = 0 if terms.reach.window is None else max(0, start - terms.reach.window + 1)
    block = (query[:, :, start - before : end - before], key[:, :, first:end], value[:, :, first:end])
    indices = torch.arange(first, end, device=query.device)
    allowed = terms.reach.allows(indices[start - first :, None], indices)
    if fused:
        return _attend_fused(block, allowed, terms)
    if end - start == query.shape[2] or not torch.is_grad_enabled():
        return softmax_attention(block, allowed, terms)
    # The scores of one block at a time are in memory, in the backward pass too.
    attended = checkpoint(softmax_attention, block, allowed, terms, use_reentrant=False, preserve_rng_state=False)
    assert isinstance(attended, torch.Tensor)
    return attended


def _attend_fused(states: States, allowed: torch.Tensor | None, terms: AttentionTerms) -> torch.Tensor:
    """Attends by a kernel for one document. Without a mask, it is causal and there is a query for each key."""
    if terms.is_plain and allowed is None and states[1].shape[1] == states[2].shape[1]:
        # Without a mask the kernel shares heads of keys and values, and no copies of them are saved.
        shared = states[0].shape[1] != states[1].shape[1]
        attended = scaled_dot_product_attention(*states, is_causal=True, scale=terms.scaling, enable_gqa=shared)
        return attended.transpose(1, 2)
    query, key, value = _repeat_heads(states)
    if terms.sinks is None:
        attended = scaled_dot_product_attention(
            query, key, value, attn_mask=allowed, is_causal=allowed is None, scale=terms.scaling
        )
        return attended.transpose(1, 2)
    width, wide = value.shape[-1], max(query.shape[-1], value.shape[-1])
    scaling = terms.scaling if terms.scaling is not None else query.shape[-1] ** -0.5
    # The kernel takes values that are as wide as keys. Zeros change no score, and add columns that are dropped.
    padded = [pad(part, (0, wide - part.shape[-1])) for part in (query, key, value)]
    mask = None if allowed is None else _additive(allowed, query.dtype)
    kernel = _CpuKernel(mask, scaling)
    attended = _AttentionWithSinks.apply(*padded, terms.sinks, kernel)  # type: ignore[no-untyped-call]
    return attended[..., :width].transpose(1, 2)  # type: ignore[no-any-return]


def _additive(allowed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros_like(allowed, dtype=dtype).masked_fill_(~allowed, -torch.inf)


def _repeat_heads(states: States) -> States:
    """Repeats heads of keys and of values to as many as of queries."""
    query, key, value = states
    heads = query.shape[1]
    return query, repeat_kv(key, heads // key.shape[1]), repeat_kv(value, heads // value.shape[1])


def softmax_attention(states: States, allowed: torch.Tensor | None, terms: AttentionTerms) -> torch.Tensor:
    """Attention without a fused kernel: it holds the scores of every query and key."""
    query, key, value = _repeat_heads(states)
    scores = query @ key.transpose(2, 3) * (terms.scaling if terms.scaling is not None else query.shape[-1] ** -0.5)
    if terms.softcap is not None:
        scores = torch.tanh(scores / terms.softcap) * terms.softcap
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    if terms.sinks is not None:
        column = terms.sinks.to(scores.dtype).reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], dim=-1)
    precise = torch.promote_types(scores.dtype, torch.float32)
    weights = torch.softmax(scores, dim=-1, dtype=precise).to(query.dtype)
    return (weights[..., : key.shape[2]] @ value).transpose(1, 2)


# Sinks


class _Kernel(Protocol):
    """A kernel that returns the log-sum-exp of the scores too. Heads are the second dimension of all tensors."""

    def forward(self, states: States) -> tuple[torch.Tensor, torch.Tensor]: ...

    def backward(self, grad: torch.Tensor, states: States, out: torch.Tensor, lse: torch.Tensor) -> States: ...


class _AttentionWithSinks(torch.autograd.Function):
    """Attention with sinks by a kernel that does not know them.

    A sink s adds exp(s) to the sum of the softmax, so the output shrinks by sigmoid(lse - s). In the backward pass a
    kernel computes the weights p = exp(score - lse) and Σ grad · out of each query. If it is given the output and the
    log-sum-exp with the sink in them, then its gradients are those of attention with sinks. The sink has the weight
    exp(s - lse) and no value: its gradient is the sum of -exp(s - lse) · Σ grad · out over the queries.
    """

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor, kernel: _Kernel
    ) -> torch.Tensor:
        out, lse = kernel.forward((query, key, value))
        score = _per_head(sinks, lse)
        out = out * torch.sigmoid(lse - score).to(out.dtype)[..., None]
        lse = torch.logaddexp(lse, score)
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        ctx.kernel = kernel
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, sinks, out, lse = ctx.saved_tensors
        (grad,) = grads
        of_states = ctx.kernel.backward(grad, (query, key, value), out, lse)
        weight = torch.exp(_per_head(sinks, lse) - lse)
        of_queries = weight * (grad.to(lse.dtype) * out).sum(dim=-1)
        of_sinks = -of_queries.transpose(0, 1).reshape(len(sinks), -1).sum(dim=1)
        return *of_states, of_sinks.to(sinks.dtype), None


def _per_head(sinks: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    return sinks.to(lse.dtype).view(1, -1, *[1] * (lse.ndim - 2))


@dataclass(frozen=True)
class _CpuKernel:
    """One document: queries (batch, heads, tokens, dimensions), and as many heads of keys."""

    mask: torch.Tensor | None
    scaling: float

    def forward(self, states: States) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *states, 0.0, self.mask is None, attn_mask=self.mask, scale=self.scaling
        )
        return out, lse

    def backward(self, grad: torch.Tensor, states: States, out: torch.Tensor, lse: torch.Tensor) -> States:
        query, key, value = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, *states, out, lse, 0.0, self.mask is None, attn_mask=self.mask, scale=self.scaling
        )
        return query, key, value


# Documents of different lengths in one call, on CUDA. No CUDA device has run it yet: docs/limits.md.


def _fits_varlen(states: States, terms: AttentionTerms) -> bool:
    query, _, value = states
    width = query.shape[-1]
    return (
        query.device.type == "cuda"
        and query.dtype in (torch.bfloat16, torch.float16)
        and terms.softcap is None
        and query.shape[0] == 1
        and width == value.shape[-1]
        and width % 8 == 0
        and width <= VARLEN_DIMENSIONS
    )


def _attend_varlen(states: States, documents: Documents, terms: AttentionTerms) -> torch.Tensor:
    query, key, value = (part[0].transpose(0, 1) for part in states)
    # The kernel counts the tokens before the query's own.
    window = -1 if terms.reach.window is None else terms.reach.window - 1
    ends, longest = documents.ends(query.device), max(documents.lengths)
    kernel = _VarlenKernel(ends, longest, window, terms.scaling)
    if terms.sinks is None:
        return kernel.attend((query, key, value))[0][None]
    attended: torch.Tensor = _AttentionWithSinks.apply(query, key, value, terms.sinks, kernel)  # type: ignore[no-untyped-call]
    return attended[None]


@dataclass(frozen=True)
class _VarlenKernel:
    """All documents of a row: (tokens, heads, dimensions). Query heads may share a head of keys."""

    ends: torch.Tensor
    longest: int
    window: int
    scaling: float | None

    def attend(self, states: States) -> tuple[torch.Tensor, torch.Tensor]:
        attended, lse = varlen_attn(
            *states,
            self.ends,
            self.ends,
            self.longest,
            self.longest,
            return_aux=AuxRequest(lse=True),
            scale=self.scaling,
            window_size=(self.window, 0),
            enable_gqa=True,
        )
        return attended, lse

    def forward(self, states: States) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = self.attend(states)
        return out, lse.transpose(0, 1)

    def backward(self, grad: torch.Tensor, states: States, out: torch.Tensor, lse: torch.Tensor) -> States:
        unused = torch.zeros(2, dtype=torch.uint64, device=grad.device)
        query, key, value = torch.ops.torch_attn._varlen_attn_backward(
            grad.contiguous(),
            *states,
            out,
            lse.transpose(0, 1).contiguous(),
            self.ends,
            self.ends,
            self.longest,
            self.longest,
            self.window == -1,
            unused,
            self.scaling,
            [self.window, 0],
        )
        return query, key, value
