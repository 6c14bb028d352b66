"""Fair share between owners by dominant resource (DRF) within one priority: how an owner's share is computed, and whose
job is picked next.

An owner's share is the largest of its shares of the fleet's resources: hosts, slots, cores, memory, cards. Of the jobs
that a claim may take, those with the highest priority come first; among these the job of the owner with the smallest
share; then the oldest. So owners who all have jobs waiting get equal shares, up to the size of one job, whoever queued
more of them or sooner.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from strata.fleet.core.amounts import Amounts, Capacity, Taken


class JobOffer(NamedTuple):
    """A job that waits, and could be taken now."""

    seq: int
    class_id: int
    priority: int
    owner: str


class FleetTotals(NamedTuple):
    """What all hosts have together."""

    hosts: int = 0
    slots: int = 0
    cores: int = 0
    ram_gib: float = 0.0
    cards: int = 0


def add_up(capacities: Iterable[Capacity]) -> FleetTotals:
    hosts = slots = cores = cards = 0
    ram_gib = 0.0
    for each in capacities:
        hosts += 1
        slots += each.slots or 0
        cores += each.cores
        cards += len(each.cards)
        ram_gib += each.ram_gib
    return FleetTotals(hosts, slots, cores, ram_gib, cards)


class OwnerShares:
    """What the owners hold of the fleet now. `owners` are those with jobs that have not ended."""

    def __init__(self, totals: FleetTotals, owners: Iterable[str], held: Iterable[tuple[str, Taken, int]] = ()) -> None:
        """`held` are owners, what a lease of theirs takes, and how many such leases they have."""
        self.owners = tuple(owners)
        self._totals = totals
        self._held: dict[str, list[float]] = {}
        for owner, taken, leases in held:
            _add(self._held, owner, [leases * part for part in self._parts(taken)])

    def share(self, owner: str) -> float:
        return _dominant(self._held, owner)

    def pick(
        self, offers: Iterable[JobOffer], classes: Mapping[int, Amounts], count: int, *, spare: int = 0
    ) -> list[JobOffer]:
        """The `count` jobs that come first, in their order, and `spare` more. Each counts for its owner before the next
        is chosen; the owners keep what the first `count` take."""
        queues: dict[tuple[str, int], list[JobOffer]] = {}
        for offer in sorted(offers, key=lambda each: (each.priority, -each.seq)):
            queues.setdefault((offer.owner, offer.class_id), []).append(offer)
        held = {owner: list(parts) for owner, parts in self._held.items()}
        heap = [_entry(held, queue[-1]) for queue in queues.values()]
        heapq.heapify(heap)
        picked: list[JobOffer] = []
        while heap and len(picked) < count + spare:
            _, share, _, offer = heapq.heappop(heap)
            queue = queues[offer.owner, offer.class_id]
            if share == _dominant(held, offer.owner):
                picked.append(queue.pop())
                _add(held, offer.owner, self._parts(classes[offer.class_id]))
                if len(picked) == count:
                    self._held = {owner: list(parts) for owner, parts in held.items()}
            # Otherwise the owner got another job since this entry was made: it is compared again.
            if queue:
                heapq.heappush(heap, _entry(held, queue[-1]))
        if len(picked) < count:
            self._held = held
        return picked

    def _parts(self, taken: Amounts | Taken) -> list[float]:
        amounts = (float(taken.whole), taken.slots, taken.cores, taken.ram_gib, _cards(taken))
        return [amount / total if total else 0.0 for amount, total in zip(amounts, self._totals, strict=True)]


def _add(held: dict[str, list[float]], owner: str, parts: list[float]) -> None:
    before = held.setdefault(owner, [0.0] * len(parts))
    for place, part in enumerate(parts):
        before[place] += part


def _dominant(held: Mapping[str, list[float]], owner: str) -> float:
    return max(held.get(owner, (0.0,)))


def _entry(held: Mapping[str, list[float]], offer: JobOffer) -> tuple[int, float, int, JobOffer]:
    return -offer.priority, _dominant(held, offer.owner), offer.seq, offer


def _cards(taken: Amounts | Taken) -> float:
    return taken.gpus if isinstance(taken, Taken) else taken.gpus * taken.gpu_share
