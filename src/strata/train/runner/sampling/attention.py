"""How the tokens of a pass find what came before them: prompts among themselves, single tokens in their places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from strata.train.runner.model.attention import AttentionTerms, Reach, States, attend_documents, softmax_attention
from strata.train.runner.sampling.kv_cache import KVPool


@dataclass(frozen=True)
class Prompt:
    """A document of a pass over prompts: how long it is, and which places are to remember it."""

    length: int
    places: Sequence[tuple[KVPool, int]]


class PrefillPlan:
    """Each prompt looks at itself alone; what it computes is kept in all the places that continue it."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._prompts = prompts
        self._lengths = [prompt.length for prompt in prompts]

    def attend(self, module: nn.Module, states: States, terms: AttentionTerms) -> torch.Tensor:
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        kept = [torch.split(part[0].transpose(0, 1), self._lengths) for part in states[1:]]
        for prompt, keys, values in zip(self._prompts, *kept, strict=True):
            for shelf, place in prompt.places:
                for part, own in zip(shelf.of(layer, keys, values), (keys, values), strict=True):
                    part[place, : prompt.length] = own
        return attend_documents(module, states, self._lengths, terms)


class KVPoolRows:
    """The rows of a step whose places are on one shelf, in the order of their places.

    Lengths are before the step: the new token goes to the place of that number.
    """

    def __init__(self, shelf: KVPool, rows: Sequence[int], lengths: Sequence[int], device: torch.device) -> None:
        self.shelf = shelf
        self.count = len(rows)
        ordered = list(rows) == list(range(rows[0], rows[0] + len(rows)))
        self._slice = slice(rows[0], rows[0] + len(rows)) if ordered else None
        self.rows = torch.tensor(rows, dtype=torch.int64, device=device)
        starts = torch.arange(self.count, device=device) * shelf.length
        self.at = torch.tensor(lengths, dtype=torch.int64, device=device)
        """The place of each row's newest token."""
        self.flat = starts + self.at
        self.newest = max(lengths)
        self._even = min(lengths) == max(lengths)
        self._masks: dict[Reach, torch.Tensor | None] = {}

    def advance(self) -> None:
        self.at += 1
        self.flat += 1
        self.newest += 1
        self._masks = {}

    def pick(self, states: torch.Tensor) -> torch.Tensor:
        return states[self._slice] if self._slice is not None else states.index_select(0, self.rows)

    def put(self, target: torch.Tensor, part: torch.Tensor) -> None:
        if self._slice is not None:
            target[self._slice] = part
        else:
            target.index_copy_(0, self.rows, part)

    def mask(self, reach: Reach) -> torch.Tensor | None:
        """Which tokens each row sees: all of its own, or those in reach. None if that is everything there is."""
        if reach.covers(self.newest + 1):
            reach = Reach()
        if reach not in self._masks:
            self._masks[reach] = self._masked(reach)
        return self._masks[reach]

    def _masked(self, reach: Reach) -> torch.Tensor | None:
        if self._even and reach == Reach():
            return None
        places = torch.arange(self.newest + 1, device=self.at.device)
        return reach.allows(self.at[:, None], places)[:, None, None]


class DecodePlan:
    """One token for each sequence, which looks at all that its place remembers."""

    def __init__(self, shelves: Sequence[KVPoolRows]) -> None:
        self.shelves = shelves

    def advance(self) -> None:
        for rows in self.shelves:
            rows.advance()

    @cached_property
    def _alone(self) -> KVPoolRows | None:
        only = self.shelves[0]
        return only if len(self.shelves) == 1 and only._slice is not None else None

    def attend(self, module: nn.Module, states: States, terms: AttentionTerms) -> torch.Tensor:
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        query, key, value = (part[0].transpose(0, 1) for part in states)
        if self._alone is not None:
            return _attend(self._alone, layer, (query, key, value), terms)[None]
        out = value.new_empty((*query.shape[:2], value.shape[-1]))
        for rows in self.shelves:
            picked = (rows.pick(query), rows.pick(key), rows.pick(value))
            rows.put(out, _attend(rows, layer, picked, terms))
        return out[None]


def _attend(rows: KVPoolRows, layer: int, states: States, terms: AttentionTerms) -> torch.Tensor:
    """Queries are (row, head, dimension). Heads that share keys are to the kernel several queries of one head: so the
    keys need not be repeated for them."""
    query, key, value = states
    keys, values = rows.shelf.of(layer, key, value)
    keys.flatten(0, 1).index_copy_(0, rows.flat, key)
    values.flatten(0, 1).index_copy_(0, rows.flat, value)
    until = rows.newest + 1
    keys, values = (part[: rows.count, :until].transpose(1, 2) for part in (keys, values))
    mask = rows.mask(terms.reach)
    if not terms.plain:
        return softmax_attention((query[:, :, None], keys, values), mask, terms)[:, 0]
    found = scaled_dot_product_attention(
        query.reshape(rows.count, key.shape[1], -1, query.shape[-1]),
        keys,
        values,
        attn_mask=mask,
        scale=terms.scaling,
    )
    return found.reshape(rows.count, -1, value.shape[-1])
