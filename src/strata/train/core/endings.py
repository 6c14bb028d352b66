"""The order in which samples ended: for clients that ask after all of theirs with one question.

A client says up to where it was told, by a cursor, and hears what ended after that. The order is that of this process
alone: the next orchestrator may learn of the same ends in another order, because a client can hear of an end before it
is durable. So a cursor carries the generation that gave it out, and to any other generation it means the beginning.
Whoever hears of an end twice loses nothing by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

BLOCK: Final = 1_000_000_000
"""Of sequence numbers: every copy of a client counts in a block of its own."""
MOST: Final = 1000
"""Told at a time; the rest is there for the next question at once."""
_COUNT_BITS: Final = 40

Target = tuple[str, int]
"""A sampler and which copy of its client asked."""


def target_of(future_id: str) -> Target | None:
    """Whose sample this future is; None for anything that is no sample."""
    sampler_id, _, number = future_id.rpartition(":")
    if ":sample:" not in sampler_id or not number.isdecimal():
        return None
    return sampler_id, int(number) // BLOCK


class Ends:
    """Of one target, oldest first."""

    def __init__(self) -> None:
        self.future_ids: list[str] = []
        self.dropped = 0
        """How many are forgotten; the first that is kept has the number after this."""
        self.told: int | None = None
        """The client said that it knows of those up to this number; None if nobody ever asked."""


class Endings:
    def __init__(self, generation: int, ended: Iterable[str] = ()) -> None:
        self._first = generation << _COUNT_BITS
        self._of: dict[Target, Ends] = {}
        for future_id in ended:
            self.add(future_id)

    def add(self, future_id: str) -> Target | None:
        """Whom it concerns."""
        target = target_of(future_id)
        if target is not None:
            self._of.setdefault(target, Ends()).future_ids.append(future_id)
        return target

    def expect(self, target: Target) -> None:
        """Somebody waits for the next one."""
        ends = self._of.setdefault(target, Ends())
        ends.told = ends.told or 0

    def after(self, target: Target, cursor: int) -> tuple[Sequence[str], int]:
        """What ended after that, and the cursor to ask with next."""
        ends = self._of.get(target)
        if ends is None:
            return (), self._first
        last = ends.dropped + len(ends.future_ids)
        told = cursor - self._first
        if not 0 <= told <= last:
            told = 0
        ends.told = max(ends.told or 0, told)
        start = max(told - ends.dropped, 0)
        found = ends.future_ids[start : start + MOST]
        return found, self._first + ends.dropped + start + len(found)

    def forget(self, kept: Callable[[str], bool], alive: Callable[[str], bool]) -> None:
        """Drop those whose results are gone, except from somebody who has yet to hear of them: it would wait for ever.

        `alive` says whether there is still such a sampler; nobody waits for one that is not.
        """
        for target, ends in list(self._of.items()):
            untold = ends.told is not None and alive(target[0])
            most = (ends.told or 0) - ends.dropped if untold else len(ends.future_ids)
            gone = 0
            while gone < most and not kept(ends.future_ids[gone]):
                gone += 1
            del ends.future_ids[:gone]
            ends.dropped += gone
            if not ends.future_ids and not alive(target[0]):
                del self._of[target]
