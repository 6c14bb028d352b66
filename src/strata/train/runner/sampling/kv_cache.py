"""The KV cache: sizes of slots (64 tokens at least), pools, reuse of prefixes in blocks of 32, capacity, and attention
over it.

A sequence gets its slot at admission, as long as the sequence can ever become; slots of one length form a pool, those
in use first, so that a decode step computes over a plain view of them. The cache has a capacity in sequences and in
tokens, which admission respects: a sequence that was admitted never runs out of cache. Prefill writes the
keys and values of whole prompts. Decode appends those of one token of each sequence, and attends to all of its slot.

Room that no slot needs holds blocks of earlier prompts: of a prompt that begins like one of them, only the rest is
computed. Blocks belong to one sampler, so to one version of the weights and to one tenant.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import Final

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from strata.train.runner.model.attention_kernels import (
    AttentionTerms,
    Documents,
    Reach,
    States,
    attend_continuation,
    attend_documents,
    softmax_attention,
)

SHORTEST_SLOT: Final = 64
"""Slot lengths are powers of two from here: few pools, and at most half of a slot is never used."""

BLOCK: Final = 32
"""Tokens of a block of the prefix cache."""
_TOKEN_BYTES: Final = 4


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


@dataclass(frozen=True)
class PrefixBlock:
    """What was computed of `BLOCK` tokens."""

    layers: dict[int, tuple[torch.Tensor, torch.Tensor]]
    """Their keys and values, by layer."""
    routing: bytes
    """The experts that they were computed with; empty if that was not recorded."""


class PrefixCache:
    """Blocks of prompts, by the sampler and all tokens up to their end; the least recently used are evicted first."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._blocks: dict[tuple[str, bytes], PrefixBlock] = {}

    @property
    def tokens(self) -> int:
        return len(self._blocks) * BLOCK

    def match(self, sampler_id: str, prompt: bytes, *, routing: bool = False) -> list[PrefixBlock]:
        """The blocks that this prompt begins with, with `routing` those that have it. Its last token is never in one:
        its hidden state is needed."""
        names: list[tuple[str, bytes]] = []
        for name in _block_names(sampler_id, prompt[:-_TOKEN_BYTES]):
            if name not in self._blocks or (routing and not self._blocks[name].routing):
                break
            names.append(name)
        blocks = [self._blocks[name] for name in names]
        self._touch(names)
        return blocks

    def add(self, sampler_id: str, prompt: bytes, pool: KVPool, slot: int, room: int, routing: bytes = b"") -> None:
        """Copy the blocks of a prompt from its slot. `room` is what the KV cache has beside its pools, in tokens."""
        routed = len(routing) * _TOKEN_BYTES // len(prompt)
        most = min(self.max_tokens, room) // BLOCK
        names = _block_names(sampler_id, prompt)[:most]
        for number, name in enumerate(names):
            if name not in self._blocks:
                part = slice(number * BLOCK, (number + 1) * BLOCK)
                layers = {
                    layer: (keys[slot, part].clone(), values[slot, part].clone())
                    for layer, (keys, values) in pool.layers.items()
                }
                self._blocks[name] = PrefixBlock(layers, routing[part.start * routed : part.stop * routed])
        self._touch(names)
        self.shrink(most * BLOCK)

    def shrink(self, tokens: int) -> None:
        while self._blocks and self.tokens > max(tokens, 0):
            del self._blocks[next(iter(self._blocks))]

    def drop(self, sampler_id: str) -> None:
        self._blocks = {name: block for name, block in self._blocks.items() if name[0] != sampler_id}

    def _touch(self, names: Sequence[tuple[str, bytes]]) -> None:
        """The first block of a prompt last: without it the others match nothing."""
        for name in reversed(names):
            self._blocks[name] = self._blocks.pop(name)

    def tensors(self) -> Iterator[torch.Tensor]:
        for block in self._blocks.values():
            for layer in block.layers.values():
                yield from layer


def _block_names(sampler_id: str, prompt: bytes) -> list[tuple[str, bytes]]:
    """Names the whole blocks of a prompt."""
    size, digest = BLOCK * _TOKEN_BYTES, blake2b(digest_size=16)
    names = []
    for start in range(0, len(prompt) - size + 1, size):
        digest.update(prompt[start : start + size])
        names.append((sampler_id, digest.digest()))
    return names


class KVCache:
    """The pools of a rank, within its capacity. `key` tells sequences of different base weights apart."""

    def __init__(self, max_sequences: int, max_tokens: int, prefix_tokens: int = 0) -> None:
        self.max_sequences = max_sequences
        self.max_tokens = max_tokens
        self.prefixes = PrefixCache(prefix_tokens)
        self.sequences = 0
        self.tokens = 0
        """Reserved by slots in use."""
        self._pools: dict[tuple[str, int], KVPool] = {}

    @property
    def allocated(self) -> int:
        return sum(pool.slots * pool.length for pool in self._pools.values())

    def remember(self, sampler_id: str, prompt: bytes, pool: KVPool, slot: int, routing: bytes = b"") -> None:
        """Keep the blocks of a prompt that was prefilled into this slot, as far as there is room."""
        if self.prefixes.max_tokens:
            self.prefixes.add(sampler_id, prompt, pool, slot, self.max_tokens - self.allocated, routing)

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
        # Slots have precedence over what may be reused.
        self.prefixes.shrink(self.max_tokens - self.allocated - added * length)
        pool = self._pools.setdefault((key, length), KVPool(length))
        pool.resize(pool.slots + added)
        return pool

    def tensors(self) -> Iterator[torch.Tensor]:
        for pool in self._pools.values():
            for layer in pool.layers.values():
                yield from layer
        yield from self.prefixes.tensors()


@dataclass(frozen=True)
class Prompt:
    """A document of a prefill: the tokens to compute, and the slots of the sequences that continue it."""

    length: int
    """The length without those of `prefix`."""
    slots: Sequence[tuple[KVPool, int]]
    prefix: Sequence[PrefixBlock] = ()
    """Computed before."""

    @property
    def reused(self) -> int:
        return len(self.prefix) * BLOCK

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        until = self.reused + self.length
        for pool, slot in self.slots:
            for part, (cached, new) in enumerate(zip(pool.of_layer(layer, keys, values), (keys, values), strict=True)):
                for number, block in enumerate(self.prefix):
                    cached[slot, number * BLOCK : (number + 1) * BLOCK] = block.layers[layer][part]
                cached[slot, self.reused : until] = new


class PrefillPlan:
    """Each prompt attends to itself alone; its keys and values are written to the slots of all its sequences."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._prompts = prompts
        self._documents = Documents([prompt.length for prompt in prompts])

    def attend(self, module: nn.Module, states: States, terms: AttentionTerms) -> torch.Tensor:
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        computed = [torch.split(part[0].transpose(0, 1), self._documents.lengths) for part in states[1:]]
        for prompt, keys, values in zip(self._prompts, *computed, strict=True):
            prompt.write(layer, keys, values)
        if not any(prompt.prefix for prompt in self._prompts):
            return attend_documents(states, self._documents, terms)
        split = zip(*(torch.split(part, self._documents.lengths, 2) for part in states), strict=True)
        attended = [
            self._attend_one(layer, prompt, (query, key, value), terms)
            for prompt, (query, key, value) in zip(self._prompts, split, strict=True)
        ]
        return torch.cat(attended, dim=1)

    @staticmethod
    def _attend_one(layer: int, prompt: Prompt, states: States, terms: AttentionTerms) -> torch.Tensor:
        if not prompt.prefix:
            return attend_documents(states, Documents([prompt.length]), terms)
        pool, slot = prompt.slots[0]
        until = prompt.reused + prompt.length
        keys, values = (part[slot, :until].transpose(0, 1)[None] for part in pool.layers[layer])
        return attend_continuation((states[0], keys, values), terms)


class KVPoolRows:
    """The rows of a decode step whose slots are in one pool, in the order of their slots.

    Lengths are those before the step: the new token is written at the index of that number.
    """

    def __init__(self, pool: KVPool, rows: Sequence[int], lengths: Sequence[int], device: torch.device) -> None:
        self.pool = pool
        self.count = len(rows)
        contiguous = list(rows) == list(range(rows[0], rows[0] + len(rows)))
        self._slice = slice(rows[0], rows[0] + len(rows)) if contiguous else None
        self.rows = torch.tensor(rows, dtype=torch.int64, device=device)
        starts = torch.arange(self.count, device=device) * pool.length
        self.newest = torch.tensor(lengths, dtype=torch.int64, device=device)
        """The index of each row's newest token in its slot."""
        self.flat = starts + self.newest
        """The same in the pool, all slots one after the other."""
        self.longest = max(lengths)
        self._equal_lengths = min(lengths) == max(lengths)
        self._masks: dict[Reach, torch.Tensor | None] = {}

    def advance(self) -> None:
        self.newest += 1
        self.flat += 1
        self.longest += 1
        self._masks = {}

    def pick(self, states: torch.Tensor) -> torch.Tensor:
        return states[self._slice] if self._slice is not None else states.index_select(0, self.rows)

    def put(self, target: torch.Tensor, part: torch.Tensor) -> None:
        if self._slice is not None:
            target[self._slice] = part
        else:
            target.index_copy_(0, self.rows, part)

    def mask(self, reach: Reach) -> torch.Tensor | None:
        """Returns which cached tokens each row attends to: all of its own, or those in reach. None if that is
        everything."""
        if reach.covers(self.longest + 1):
            reach = Reach()
        if reach not in self._masks:
            self._masks[reach] = self._build_mask(reach)
        return self._masks[reach]

    def _build_mask(self, reach: Reach) -> torch.Tensor | None:
        if self._equal_lengths and reach == Reach():
            return None
        keys = torch.arange(self.longest + 1, device=self.newest.device)
        return reach.allows(self.newest[:, None], keys)[:, None, None]

    @property
    def contiguous(self) -> bool:
        return self._slice is not None


class DecodePlan:
    """One token of each sequence, which attends to everything in the sequence's slot."""

    def __init__(self, pools: Sequence[KVPoolRows]) -> None:
        self.pools = pools

    def advance(self) -> None:
        for rows in self.pools:
            rows.advance()

    @cached_property
    def _single_pool(self) -> KVPoolRows | None:
        only = self.pools[0]
        return only if len(self.pools) == 1 and only.contiguous else None

    def attend(self, module: nn.Module, states: States, terms: AttentionTerms) -> torch.Tensor:
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        query, key, value = (part[0].transpose(0, 1) for part in states)
        if self._single_pool is not None:
            return _attend(self._single_pool, layer, (query, key, value), terms)[None]
        out = value.new_empty((*query.shape[:2], value.shape[-1]))
        for rows in self.pools:
            picked = (rows.pick(query), rows.pick(key), rows.pick(value))
            rows.put(out, _attend(rows, layer, picked, terms))
        return out[None]


def _attend(rows: KVPoolRows, layer: int, states: States, terms: AttentionTerms) -> torch.Tensor:
    """Queries are (row, head, dimension). Query heads that share a key head (grouped-query attention) are passed to
    the kernel as several queries of that head, so the keys need not be repeated."""
    query, key, value = states
    keys, values = rows.pool.of_layer(layer, key, value)
    keys.flatten(0, 1).index_copy_(0, rows.flat, key)
    values.flatten(0, 1).index_copy_(0, rows.flat, value)
    until = rows.longest + 1
    keys, values = (part[: rows.count, :until].transpose(1, 2) for part in (keys, values))
    mask = rows.mask(terms.reach)
    if not terms.is_plain:
        return softmax_attention((query[:, :, None], keys, values), mask, terms)[:, 0]
    attended = scaled_dot_product_attention(
        query.reshape(rows.count, key.shape[1], -1, query.shape[-1]),
        keys,
        values,
        attn_mask=mask,
        scale=terms.scaling,
    )
    return attended.reshape(rows.count, -1, value.shape[-1])
