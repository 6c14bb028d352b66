"""What a job takes of a host (cards, shares of cards, VRAM, memory, cores, slots), what is left beside the running
jobs, which cards a job gets, and how much more memory a retry after out of memory requests.

The hub is the only accountant. Both stores call these functions in the transaction of a claim, on the attempts of the
host that have not ended; each attempt is stored with what it took. So no card is given twice, also by two hubs.

- A job takes what it declares. A card is exclusive unless the job declares `gpu_share`: then it takes that share of
  each of its cards, and of the card's VRAM what `min_vram_gib` says, or else the same share.
- A job that declares no amount takes the whole host.
- A host with `slots` is divided by them: a job that declares no amount takes its `slots` and nothing else. Amounts that
  jobs declare count there as well.
- Where there are no slots, a job takes at least one core: so there are never more jobs than cores.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, Literal, NamedTuple

import msgspec

from strata.fleet.core.requirement import Needs

_TOLERANCE: Final = 1e-6
"""Shares are sums of fractions: ten tenths are a card."""


class Amounts(NamedTuple):
    """What a job of one requirement class takes of a host."""

    whole: bool = False
    slots: int = 1
    cores: int = 0
    ram_gib: float = 0.0
    gpus: int = 0
    gpu_share: float = 1.0
    vram_gib: float = 0.0
    """VRAM of each card; what the share is of a card's VRAM if it is 0."""
    prefers_gpu: bool = False
    """It takes a free card if there is one, and runs without otherwise."""


class Card(NamedTuple):
    id: str
    """The UUID of the device, or its number where there is none."""
    vram_gib: float


class Capacity(NamedTuple):
    """What a host has for jobs, by its capability and its policy."""

    cards: tuple[Card, ...] = ()
    cores: int = 1
    ram_gib: float = 0.0
    slots: int | None = None
    """How many one-slot jobs at once; None: as many as fit by their amounts."""


class Taken(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one attempt has of its host; stored with it."""

    whole: bool = False
    """Nothing else runs there meanwhile."""
    slots: int = 1
    cores: int = 0
    ram_gib: float = 0.0
    cards: tuple[str, ...] = ()
    gpu_share: float = 1.0
    vram_gib: float = 0.0
    """VRAM of each card that is shared."""

    @property
    def gpus(self) -> float:
        """Cards, in whole ones."""
        return len(self.cards) * self.gpu_share


UNKNOWN: Final = Taken(whole=True)
"""What an attempt holds that began before amounts were counted."""


def job_amounts(needs: Needs, capacity: Capacity) -> Amounts:
    """Returns what a job with these needs takes of a host with this capacity."""
    gpus = needs.gpus
    divided = capacity.slots is not None
    # Of a host without slots a job has none: the fleet's slots are those of divided hosts alone.
    slots = needs.slots if divided else 0
    if not divided and not (gpus or needs.min_ram_gib or needs.min_cores):
        return Amounts(whole=True, slots=slots)
    return Amounts(
        slots=slots,
        cores=needs.min_cores if divided else max(1, needs.min_cores),
        ram_gib=needs.min_ram_gib,
        gpus=gpus,
        gpu_share=needs.gpu_share or 1.0,
        vram_gib=needs.min_vram_gib,
        prefers_gpu=needs.prefer_cuda and not gpus,
    )


class MoreMemory(NamedTuple):
    """What the next attempt of a job needs that ran out of memory."""

    needs: Needs
    had: str
    """What it ran out of, in words."""


class MemoryLimits(NamedTuple):
    """What hosts give to one job, where it ran out of memory and elsewhere."""

    applied_gib: float
    """The limit that the attempt had, as its host reports it."""
    host_gib: float
    """The most that a job can get on that host."""
    largest_gib: float
    """The most that it can get on any host that is eligible for it."""


def more_memory(
    kind: Literal["host", "gpu"], needs: Needs, taken: Taken, capacity: Capacity, limits: MemoryLimits
) -> MoreMemory | None:
    """More than the attempt had, of the host's memory or of its cards'. None: there were no cards.

    A job that declared its memory needs twice as much, or what the largest host has. One that had all that its host
    gives needs a host that gives more. One that shared a card needs a card for itself; one that had it for itself needs
    a larger card.
    """
    if kind == "host":
        ran_out_of = f"{limits.applied_gib:.3g} GiB of memory"
        if taken.whole or not taken.ram_gib:
            raised = {"above_ram_gib": limits.host_gib}
        elif limits.applied_gib < taken.ram_gib:
            raised = {"above_ram_gib": min(limits.host_gib, limits.applied_gib)}
        elif taken.ram_gib < limits.largest_gib < 2 * taken.ram_gib:
            raised = {"min_ram_gib": limits.largest_gib}
        else:
            raised = {"min_ram_gib": 2 * taken.ram_gib}
        return MoreMemory(msgspec.structs.replace(needs, **raised), ran_out_of)
    sizes = [card.vram_gib for card in capacity.cards if card.id in taken.cards]
    if not sizes:
        return None
    if taken.gpu_share < 1:
        had = taken.vram_gib or taken.gpu_share * min(sizes)
        return MoreMemory(
            msgspec.structs.replace(needs, gpu_share=0.0, min_gpus=max(1, needs.min_gpus)), f"{had:g} GiB of VRAM"
        )
    had = max(sizes) if taken.whole else min(sizes)
    above = {"above_vram_gib": had} if taken.whole else {"min_vram_gib": had + 0.5}
    return MoreMemory(msgspec.structs.replace(needs, **above), f"{had:g} GiB of VRAM")


class Room:
    """What is left of a host."""

    def __init__(self, capacity: Capacity, held: Iterable[Taken] = ()) -> None:
        self._capacity = capacity
        self._jobs = 0
        self._whole = False
        self._slots = capacity.slots
        self._cores = max(1, capacity.cores)
        self._ram_gib = capacity.ram_gib
        self._cards = {card.id: (1.0, card.vram_gib, card.vram_gib) for card in capacity.cards}
        """The share and the VRAM that are left of each card, and the VRAM that it has."""
        for taken in held:
            self.hold(taken)

    @property
    def full(self) -> bool:
        """Says whether no job whatever fits."""
        return self._whole or (self._cores < 1 if self._slots is None else self._slots < 1)

    @property
    def left(self) -> Capacity:
        """Returns what is free: of the cards those that are not given away, each with the VRAM that is left."""
        if self._whole:
            return Capacity(cores=0, slots=None if self._slots is None else 0)
        cards = tuple(Card(id_, vram_gib) for id_, (share, vram_gib, _) in self._cards.items() if share > _TOLERANCE)
        return Capacity(cards, max(0, self._cores), max(0.0, self._ram_gib), self._slots)

    def fits(self, amounts: Amounts) -> bool:
        if self._whole:
            return False
        if amounts.whole:
            return not self._jobs
        return (
            (self._slots is None or amounts.slots <= self._slots)
            and amounts.cores <= self._cores
            and amounts.ram_gib <= self._ram_gib + _TOLERANCE
            and (not amounts.gpus or self._choose_cards(amounts, amounts.gpus) is not None)
        )

    def fitting(self, classes: Mapping[int, Amounts]) -> tuple[tuple[int, ...], list[Amounts]]:
        """Returns the classes of which a job fits, and the different amounts that their jobs take."""
        # By identity: equal amounts of one host are one object, and a claim may name hundreds of classes.
        kinds = {id(amounts): amounts for amounts in classes.values()}
        fits = {key: amounts for key, amounts in kinds.items() if self.fits(amounts)}
        if len(fits) == len(kinds):
            return tuple(classes), list(fits.values())
        return tuple([id_ for id_, amounts in classes.items() if id(amounts) in fits]), list(fits.values())

    def shortage(self, amounts: Amounts) -> str:
        """Returns what is missing just now, in words; empty if a job with these amounts fits."""
        if self.fits(amounts):
            return ""
        if self._whole:
            return "another job has the whole host"
        if amounts.whole:
            return "it takes the whole host, and other jobs run there"
        for needed, left, what in (
            (amounts.slots, self._slots, "slots"),
            (amounts.cores, self._cores, "cores"),
            (amounts.ram_gib, self._ram_gib, "GiB of memory"),
        ):
            if left is not None and needed > left + _TOLERANCE:
                return f"needs {needed:g} {what if needed != 1 else what.removesuffix('s')}, {max(0, left):g} free"
        return self._card_shortage(amounts)

    def plan(self, amounts: Amounts, count: int = 1) -> list[Taken]:
        """Returns what each of so many jobs with these amounts would get, as far as they fit beside each other."""
        room, planned = (self if count == 1 else self._copied()), list[Taken]()
        while len(planned) < count and room.fits(amounts):
            planned.append(room._taken(amounts))
            if count > 1:
                room.hold(planned[-1])
        return planned

    def _taken(self, amounts: Amounts) -> Taken:
        capacity = self._capacity
        if amounts.whole:
            cards = tuple(self._cards)
            return Taken(whole=True, slots=amounts.slots, cores=capacity.cores, ram_gib=capacity.ram_gib, cards=cards)
        count = amounts.gpus or int(amounts.prefers_gpu)
        return _take(amounts, (self._choose_cards(amounts, count) or ()) if count else ())

    def admits(self, taken: Taken) -> bool:
        """Says whether an attempt could go on with just this."""
        if self._whole or (taken.whole and self._jobs):
            return False
        return (
            taken.whole
            or (
                (self._slots is None or taken.slots <= self._slots)
                and taken.cores <= self._cores
                and taken.ram_gib <= self._ram_gib + _TOLERANCE
            )
        ) and all(self._card_has(card, taken.gpu_share, taken.vram_gib) for card in taken.cards)

    def reserve(self, amounts: Amounts) -> None:
        """Keep what a job with these amounts needs from all others: what is free, and what comes free later."""
        self.hold(self._taken(amounts) if self.fits(amounts) else _take(amounts, self._emptiest_cards(amounts)))

    def hold(self, taken: Taken) -> None:
        self._jobs += 1
        self._whole = self._whole or taken.whole
        if self._slots is not None:
            self._slots -= taken.slots
        self._cores -= taken.cores
        self._ram_gib -= taken.ram_gib
        for card in taken.cards:
            if card in self._cards:
                share, vram_gib, size_gib = self._cards[card]
                needed = taken.vram_gib or taken.gpu_share * size_gib
                self._cards[card] = (share - taken.gpu_share, vram_gib - needed, size_gib)

    def _copied(self) -> Room:
        room = Room(self._capacity)
        vars(room).update(vars(self), _cards=self._cards.copy())
        return room

    def _card_has(self, card: str, share: float, vram_gib: float) -> bool:
        if card not in self._cards:
            return False
        left, vram_left, size_gib = self._cards[card]
        needed = vram_gib or share * size_gib
        return share <= left + _TOLERANCE and needed <= vram_left + _TOLERANCE

    def _choose_cards(self, amounts: Amounts, count: int) -> tuple[str, ...] | None:
        """The fullest cards that suffice, then the smallest: larger ones stay free for jobs that need them."""
        suffice = [
            (*self._cards[card.id][:2], number, card.id)
            for number, card in enumerate(self._capacity.cards)
            if self._card_has(card.id, amounts.gpu_share, amounts.vram_gib)
        ]
        if len(suffice) < count:
            return None
        return tuple([id_ for *_, id_ in sorted(sorted(suffice)[:count], key=lambda each: each[2])])

    def _emptiest_cards(self, amounts: Amounts) -> tuple[str, ...]:
        """The cards that a job waits for: those of which most is free, as far as they are large enough."""
        large = [card.id for card in self._capacity.cards if card.vram_gib + _TOLERANCE >= amounts.vram_gib]
        return tuple(sorted(large, key=lambda card: self._cards[card][:2], reverse=True)[: amounts.gpus])

    def _card_shortage(self, amounts: Amounts) -> str:
        suffice = sum(self._card_has(card, amounts.gpu_share, amounts.vram_gib) for card in self._cards)
        each = f" with {amounts.vram_gib:g} GiB" if amounts.vram_gib else ""
        share = f"{amounts.gpu_share:g} of " if amounts.gpu_share < 1 else ""
        cards = "1 card" if amounts.gpus == 1 else f"{amounts.gpus} cards"
        return f"needs {share}{cards}{each}, {suffice} free"


def _take(amounts: Amounts, cards: tuple[str, ...]) -> Taken:
    return Taken(
        whole=amounts.whole,
        slots=amounts.slots,
        cores=amounts.cores,
        ram_gib=amounts.ram_gib,
        cards=cards,
        gpu_share=amounts.gpu_share,
        vram_gib=amounts.vram_gib if amounts.gpu_share < 1 else 0.0,
    )
