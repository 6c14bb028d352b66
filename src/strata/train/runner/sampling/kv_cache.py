"""What sequences remember: the keys and values of their tokens, in places that are made once and used again.

A sequence gets its place when it begins, as long as it can ever become; places of one length lie side by side on a
shelf, those in use first, so that a step computes over a plain view of them. How much there may be in all is a bound
that is kept when sequences are admitted: one that was admitted never runs out of room.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import torch

SHORTEST: Final = 64
"""Lengths of places are powers of two from here: few shelves, and at most half of a place is never used."""


def place_length(tokens: int, longest: int) -> int:
    length = SHORTEST
    while length < tokens:
        length *= 2
    return min(length, max(longest, tokens))


@dataclass(eq=False)
class KVPool:
    """Places of one length, of every layer: (place, token, head, dimension)."""

    length: int
    places: int = 0
    used: int = 0
    layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def resize(self, places: int) -> None:
        self.places = places
        for layer, kept in self.layers.items():
            self.layers[layer] = (self._moved(kept[0]), self._moved(kept[1]))

    def _moved(self, old: torch.Tensor) -> torch.Tensor:
        new = old.new_zeros((self.places, *old.shape[1:]))
        new[: self.used] = old[: self.used]
        return new

    def of(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The places of a layer, made like these keys and values, (token, head, dimension), when it is first asked for.

        Zeros, because attention multiplies also what it masks, and nothing times NaN is NaN.
        """
        kept = self.layers.get(layer)
        if kept is None:
            made = [part.new_zeros((self.places, self.length, *part.shape[1:])) for part in (keys, values)]
            kept = self.layers[layer] = (made[0], made[1])
        return kept

    def release(self, place: int, tokens: int, last_tokens: int) -> None:
        """Empty a place; the last one in use, which has `last_tokens`, moves there."""
        self.used -= 1
        for kept in self.layers.values():
            for part in kept:
                part[place, :tokens] = 0
                if place != self.used:
                    part[place, :last_tokens] = part[self.used, :last_tokens]
                    part[self.used, :last_tokens] = 0


class KVCache:
    """The shelves of a rank, within its bounds. `key` tells sequences of different base weights apart."""

    def __init__(self, max_sequences: int, max_tokens: int) -> None:
        self.max_sequences = max_sequences
        self.max_tokens = max_tokens
        self.sequences = 0
        self.tokens = 0
        """Of places in use."""
        self._shelves: dict[tuple[str, int], KVPool] = {}

    @property
    def allocated(self) -> int:
        return sum(shelf.places * shelf.length for shelf in self._shelves.values())

    def fits(self, length: int) -> bool:
        return self.sequences < self.max_sequences and self.tokens + length <= self.max_tokens

    def take(self, key: str, length: int) -> tuple[KVPool, int]:
        """A place, which has to fit."""
        shelf = self._shelves.get((key, length))
        if shelf is None or shelf.used == shelf.places:
            shelf = self._grow(key, length)
        self.sequences += 1
        self.tokens += length
        shelf.used += 1
        return shelf, shelf.used - 1

    def release(self, shelf: KVPool, place: int, tokens: int, last_tokens: int) -> None:
        self.sequences -= 1
        self.tokens -= shelf.length
        shelf.release(place, tokens, last_tokens)

    def trim(self) -> None:
        """Give back all that is not in use."""
        for name, shelf in list(self._shelves.items()):
            if not shelf.used:
                del self._shelves[name]
            elif shelf.used < shelf.places:
                shelf.resize(shelf.used)

    def _grow(self, key: str, length: int) -> KVPool:
        """Twice as many places if there is room for them, else what there is."""
        shelf = self._shelves.get((key, length))
        wanted = max(shelf.places, 1) if shelf is not None else 1
        if self.allocated + wanted * length > self.max_tokens:
            self.trim()
            wanted = max(1, min(wanted, (self.max_tokens - self.allocated) // length))
        shelf = self._shelves.setdefault((key, length), KVPool(length))
        shelf.resize(shelf.places + wanted)
        return shelf

    def tensors(self) -> Iterator[torch.Tensor]:
        for shelf in self._shelves.values():
            for kept in shelf.layers.values():
                yield from kept
