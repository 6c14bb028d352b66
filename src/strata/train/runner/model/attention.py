"""Causal attention inside each document of a packed row, as the model's family defines it.

A family defines its attention by a mask and by options. Both are on an allow-list: causal masks, sliding windows and
chunks; scaling, soft-capping and sinks. Anything else is rejected, because leaving it out would silently give other
numbers. A mask is described and not built for the whole row, so that no tensor as large as the row squared is needed
and a NaN of one tenant cannot reach another's tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

from strata.base.errors import Code, StrataError

ATTENTION: Final = "strata_documents"
COMPUTED: Final = frozenset({"scaling", "softcap", "s_aux"})
"""Options that change the numbers, and are implemented here."""
WITHOUT_EFFECT: Final = frozenset(
    {
        "cache_position", "documents", "dropout", "is_causal", "num_items_in_batch", "output_attentions",
        "output_hidden_states", "output_router_logits", "plan", "position_embeddings", "position_ids", "return_dict",
        "sliding_window", "use_cache",
    }
)  # fmt: skip
"""Options that transformers' own eager attention ignores too: windows are in the mask, dropout is off."""

States = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries, keys and values: (batch, heads, tokens, dimensions)."""


@dataclass(frozen=True)
class Reach:
    """How far back a token attends in its document: to the last `window` tokens, or to those of its chunk."""

    window: int | None = None
    chunk: int | None = None

    def covers(self, length: int) -> bool:
        """Whether it makes no difference to a document of this length."""
        return all(limit is None or length <= limit for limit in (self.window, self.chunk))

    def allows(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Which keys each query attends to, by their indices in the document."""
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
    def fits_kernel(self) -> bool:
        """Whether a kernel for scaled dot-product attention computes it."""
        return self.softcap is None and self.sinks is None


def describe_mask(*, mask_function: Callable[..., Any], attention_mask: Any = None, **unused: Any) -> Reach | None:
    """Called where transformers would build a mask. None is the causal mask."""
    del unused
    if attention_mask is not None and not bool(attention_mask.all()):
        raise _unsupported("its attention mask leaves out tokens")
    parts = [_named(part) for part in _conjuncts(mask_function)]
    limits = {name: value for name, value in parts if value is not None}
    if not any(name == "causal_mask_function" for name, _ in parts):
        raise _unsupported("its attention looks at later tokens")
    reach = Reach(window=limits.get("sliding_window_overlay"), chunk=limits.get("chunked_overlay"))
    return None if reach == Reach() else reach


def _conjuncts(mask: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    if mask.__qualname__ == "and_masks.<locals>.and_mask":
        for part in _closure(mask)["mask_functions"]:
            yield from _conjuncts(part)
    else:
        yield mask


def _named(mask: Callable[..., Any]) -> tuple[str, int | None]:
    """The transformers function that makes a part of a mask, and the limit of that part if it has one."""
    name = mask.__qualname__.removesuffix(".<locals>.inner_mask")
    match name if mask.__module__ == "transformers.masking_utils" else "":
        case "causal_mask_function" | "packed_sequence_mask_function":
            return name, None
        case "sliding_window_overlay":
            return name, int(_closure(mask)["sliding_window"])
        case "chunked_overlay":
            return name, int(_closure(mask)["chunk_size"])
        case "bidirectional_mask_function":
            raise _unsupported("its attention looks at later tokens")
    raise _unsupported(f"its attention mask has a part that is not known here, {name}")


def _closure(mask: Callable[..., Any]) -> Mapping[str, Any]:
    return inspect.getclosurevars(mask).nonlocals


def terms_of(mask: object, options: Mapping[str, Any]) -> AttentionTerms:
    """UNSUPPORTED for a mask or an option that is not on the allow-lists."""
    for name in sorted(options.keys() - COMPUTED - WITHOUT_EFFECT):
        if options[name] is not None and options[name] is not False:
            raise _unsupported(f"its attention takes an option that is not known here, {name}")
    if mask is not None and not isinstance(mask, Reach):
        raise _unsupported("its attention makes a mask of its own")
    return AttentionTerms(
        scaling=options.get("scaling"),
        reach=mask if mask is not None else Reach(),
        softcap=options.get("softcap") or None,
        sinks=options.get("s_aux"),
    )


def _unsupported(why: str) -> StrataError:
    return StrataError(Code.UNSUPPORTED, why)


def document_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    *,
    documents: Sequence[int] | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """(batch, heads, tokens, dimensions) in, tokens before heads out."""
    lengths = list(documents) if documents is not None else [query.shape[2]]
    return attend_documents(module, (query, key, value), lengths, terms_of(attention_mask, options)), None


def attend_documents(module: nn.Module, states: States, lengths: Sequence[int], terms: AttentionTerms) -> torch.Tensor:
    if any(part.shape[2] != sum(lengths) for part in states):
        raise _unsupported("its attention has keys that belong to no token of the row")
    split = zip(*(torch.split(part, list(lengths), 2) for part in states), strict=True)
    parts = [_attend(module, (query, key, value), terms) for query, key, value in split]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _attend(module: nn.Module, states: States, terms: AttentionTerms) -> torch.Tensor:
    length = states[0].shape[2]
    indices = torch.arange(length, device=states[0].device)
    if not terms.fits_kernel:
        return softmax_attention(states, terms.reach.allows(indices[:, None], indices), terms)
    mask = None if terms.reach.covers(length) else terms.reach.allows(indices[:, None], indices)[None, None]
    return sdpa_attention_forward(module, *states, mask, scaling=terms.scaling, is_causal=True)[0]


def softmax_attention(states: States, allowed: torch.Tensor | None, terms: AttentionTerms) -> torch.Tensor:
    """Attention without a fused kernel, for options that no kernel takes: it holds the scores of every query and key.

    A sink is an additional score in each head's softmax that has no value.
    """
    query, key, value = states
    groups = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    scores = query @ key.transpose(2, 3) * (terms.scaling if terms.scaling is not None else query.shape[-1] ** -0.5)
    if terms.softcap is not None:
        scores = torch.tanh(scores / terms.softcap) * terms.softcap
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    if terms.sinks is not None:
        column = terms.sinks.to(scores.dtype).reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return (weights[..., : key.shape[2]] @ value).transpose(1, 2)


AttentionInterface.register(ATTENTION, document_attention)
AttentionMaskInterface.register(ATTENTION, describe_mask)
