"""KV cache: the keys and values of the running sequences' tokens, in slots that are allocated once and used again.

A sequence gets its slot at admission, as long as the sequence can ever become; slots of one length form a pool, those
in use first, so that a decode step computes over a plain view of them. The cache has a capacity in sequences and in
tokens, which admission respects: a sequence that was admitted never runs out of cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import torch

SHORTEST_SLOT: Final = 64
"""Slot lengths are powers of two from here: few pools, and at most half of a slot is never used."""


def slot_length(tokens: int, longest: int) -> int:
    length = SHORTEST_SLOT
    while length < tokens:
        length *= 2
    return min(length, max(longest, tokens))


@dataclass(eq=False)
class KVPool:
    """Slots of one length. The tensors of each layer are (slot, token, head, dimension)."""

    length: int
    slots: int = 0
    used: int = 0
    layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def resize(self, slots: int) -> None:
        self.slots = slots
        for layer, (keys, values) in self.layers.items():
            self.layers[layer] = (self._resized(keys), self._resized(values))

    def _resized(self, old: torch.Tensor) -> torch.Tensor:
        new = old.new_zeros((self.slots, *old.shape[1:]))
        new[: self.used] = old[: self.used]
        return new

    def of_layer(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values of a layer. Allocated at the first call, like these ones: (token, head, dimension).

        Filled with zeros, because attention multiplies masked entries too, and zero times NaN is NaN.
        """
        cached = self.layers.get(layer)
        if cached is None:
            zeros = [part.new_zeros((self.slots, self.length, *part.shape[1:])) for part in (keys, values)]
            cached = self.layers[layer] = (zeros[0], zeros[1])
        return cached

    def free(self, slot: int, tokens: int, last_tokens: int) -> None:
        """Clear a slot. The last slot in use, which has `last_tokens`, moves there."""
        self.used -= 1
        for layer in self.layers.values():
            for part in layer:
                part[slot, :tokens] = 0
                if slot != self.used:
                    part[slot, :last_tokens] = part[self.used, :last_tokens]
                    part[self.used, :last_tokens] = 0


class KVCache:
    """The pools of a rank, within its capacity. `key` tells sequences of different base weights apart."""

    def __init__(self, max_sequences: int, max_tokens: int) -> None:
        self.max_sequences = max_sequences
        self.max_tokens = max_tokens
        self.sequences = 0
        self.tokens = 0
        """Reserved by slots in use."""
        self._pools: dict[tuple[str, int], KVPool] = {}

    @property
    def allocated(self) -> int:
        return sum(pool.slots * pool.length for pool in self._pools.values())

    def fits(self, length: int) -> bool:
        return self.sequences < self.max_sequences and self.tokens + length <= self.max_tokens

    def allocate(self, key: str, length: int) -> tuple[KVPool, int]:
        """A free slot of this length. The caller has checked that it fits."""
        pool = self._pools.get((key, length))
        if pool is None or pool.used == pool.slots:
            pool = self._grow(key, length)
        self.sequences += 1
        self.tokens += length
        pool.used += 1
        return pool, pool.used - 1

    def free(self, pool: KVPool, slot: int, tokens: int, last_tokens: int) -> None:
        self.sequences -= 1
        self.tokens -= pool.length
        pool.free(slot, tokens, last_tokens)

    def trim(self) -> None:
        """Release the memory of all slots that are not in use."""
        for name, pool in list(self._pools.items()):
            if not pool.used:
                del self._pools[name]
            elif pool.used < pool.slots:
                pool.resize(pool.used)

    def _grow(self, key: str, length: int) -> KVPool:
        """Double the slots of a pool, or add as many as the capacity allows."""
        pool = self._pools.get((key, length))
        added = max(pool.slots, 1) if pool is not None else 1
        if self.allocated + added * length > self.max_tokens:
            self.trim()
            added = max(1, min(added, (self.max_tokens - self.allocated) // length))
        pool = self._pools.setdefault((key, length), KVPool(length))
        pool.resize(pool.slots + added)
        return pool

    def tensors(self) -> Iterator[torch.Tensor]:
        for pool in self._pools.values():
            for layer in pool.layers.values():
                yield from layer
