"""Two well known ways to place buckets on workers, for comparison only: jump hash and Maglev, both with weights.

Lamping and Veach, "A Fast, Minimal Memory, Consistent Hash Algorithm", 2014; Eisenbud and others, "Maglev: A Fast and
Reliable Software Network Load Balancer", 2016. Neither paper has weights: here a worker of weight 4 counts four times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b

_MASK: int = (1 << 64) - 1
_MULTIPLIER: int = 2862933555777941757


def jump(key: int, slots: int) -> int:
    """The slot of a key. With one slot more, a key stays or goes to the new one."""
    slot, following = -1, 0
    while following < slots:
        slot = following
        key = (key * _MULTIPLIER + 1) & _MASK
        following = int((slot + 1) * ((1 << 31) / ((key >> 33) + 1)))
    return slot


def slots_of(weights: Mapping[str, int]) -> list[str]:
    return [worker for worker, weight in weights.items() for _ in range(weight)]


def without(slots: Sequence[str], lost: str) -> list[str]:
    """Jump hash can only drop its last slot, so the last ones take the places of those that are gone."""
    kept = list(slots)
    at = 0
    while at < len(kept):
        if kept[at] != lost:
            at += 1
        elif (last := kept.pop()) != lost:
            kept[at] = last
    return kept


def jump_owners(buckets: int, slots: Sequence[str]) -> list[str]:
    return [slots[jump(hashed(f"bucket-{bucket}"), len(slots))] for bucket in range(buckets)]


def maglev_owners(buckets: int, weights: Mapping[str, int]) -> list[str]:
    """The lookup table itself: its entries are the buckets, but for the few by which a prime is larger."""
    size = next_prime(buckets)
    table: list[str | None] = [None] * size
    steps = {
        worker: (hashed(f"offset {worker}") % size, hashed(f"skip {worker}") % (size - 1) + 1) for worker in weights
    }
    tried = dict.fromkeys(weights, 0)
    filled = 0
    while True:
        for worker, weight in weights.items():
            offset, skip = steps[worker]
            for _ in range(weight):
                while table[entry := (offset + tried[worker] * skip) % size] is not None:
                    tried[worker] += 1
                table[entry] = worker
                filled += 1
                if filled == size:
                    return [owner for owner in table[:buckets] if owner is not None]


def next_prime(number: int) -> int:
    while any(number % divisor == 0 for divisor in range(2, int(number**0.5) + 1)):
        number += 1
    return number


def hashed(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
