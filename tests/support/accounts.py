"""Whether the attempts of a host together have more of it than there is."""

from __future__ import annotations

from collections.abc import Sequence

from strata.fleet.core.amounts import Capacity, Taken


def assert_within(capacity: Capacity, held: Sequence[Taken]) -> None:
    if any(taken.whole for taken in held):
        assert len(held) == 1, held
    assert sum(taken.cores for taken in held) <= capacity.cores, held
    assert sum(taken.ram_gib for taken in held) <= capacity.ram_gib + 1e-6, held
    assert capacity.slots is None or sum(taken.slots for taken in held) <= capacity.slots, held
    for card in capacity.cards:
        users = [taken for taken in held if card.id in taken.cards]
        assert sum(taken.gpu_share for taken in users) <= 1 + 1e-6, held
        assert sum(taken.vram_gib or taken.gpu_share * card.vram_gib for taken in users) <= card.vram_gib + 1e-6, held
