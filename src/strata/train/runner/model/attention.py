"""Reads the attention mask and options of a model family: which are supported (causal, sliding window, chunks,
soft-capping, sinks), and which are refused with the reason.

A family defines its attention by a mask and by options. Both are on an allow-list: causal masks, sliding windows and
chunks; scaling, soft-capping and sinks. Anything else is rejected, because leaving it out would silently give other
numbers. A mask is described and not built for the whole row, so that no tensor as large as the row squared is needed
and a NaN of one tenant cannot reach another's tokens. `attention_kernels` computes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from strata.base.errors import Code, StrataError
from strata.train.runner.model.attention_kernels import AttentionTerms, Documents, Reach
from strata.train.runner.model.context_parallel import WHOLE_ROWS, ContextParallel

ATTENTION: Final = "strata_documents"
LATER_TOKENS: Final = "its attention looks at later tokens"
COMPUTED: Final = frozenset({"scaling", "softcap", "s_aux"})
"""Options that change the numbers, and are computed."""
WITHOUT_EFFECT: Final = frozenset(
    {
        "cache_position", "documents", "dropout", "is_causal", "num_items_in_batch", "output_attentions",
        "output_hidden_states", "output_router_logits", "plan", "position_embeddings", "position_ids", "return_dict",
        "sliding_window", "use_cache",
    }
)  # fmt: skip
"""Options that transformers' own eager attention ignores too: windows are in the mask, dropout is off."""


def whole_row(tokens: torch.Tensor) -> torch.Tensor:
    """An attention mask that leaves out none of these tokens, for a decoder.

    Without one, transformers looks in the position ids for documents, and waits for the device to know if there are
    several (`find_packed_sequence_indices`). `describe_mask` knows this one without reading it.
    """
    mask = torch.ones((), dtype=torch.bool, device=tokens.device).expand(1, len(tokens))
    mask.is_whole_row = True  # type: ignore[attr-defined]
    return mask


def describe_mask(*, mask_function: Callable[..., Any], attention_mask: Any = None, **unused: Any) -> Reach | None:
    """Called where transformers would build a mask. None is the causal mask."""
    del unused
    if attention_mask is not None and not (hasattr(attention_mask, "is_whole_row") or bool(attention_mask.all())):
        raise _unsupported("its attention mask leaves out tokens")
    parts = [_named(part) for part in _conjuncts(mask_function)]
    limits = {name: value for name, value in parts if value is not None}
    if not any(name == "causal_mask_function" for name, _ in parts):
        raise _unsupported(LATER_TOKENS)
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
        case "causal_mask_function":
            return name, None
        case "sliding_window_overlay":
            return name, int(_closure(mask)["sliding_window"])
        case "chunked_overlay":
            return name, int(_closure(mask)["chunk_size"])
        case "bidirectional_mask_function":
            raise _unsupported(LATER_TOKENS)
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
    documents: Documents | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """(batch, heads, tokens, dimensions) in, tokens before heads out. In a context group the tokens are a slice of the
    row that has these documents."""
    del module
    context: ContextParallel = options.pop("context", WHOLE_ROWS)
    states, terms = (query, key, value), terms_of(attention_mask, options)
    return context.attend(states, documents or Documents([query.shape[2]]), terms), None


AttentionInterface.register(ATTENTION, document_attention)
AttentionMaskInterface.register(ATTENTION, describe_mask)
