"""Numbers for the copies of a client that sample from one sampler: each counts its requests in a block of its own."""

from __future__ import annotations

from collections.abc import Container
from typing import Final

from strata.base.errors import Code, StrataError
from strata.train.core.endings import BLOCK

PER_GENERATION: Final = 1 << 16
_LAST: Final = 2**62 // BLOCK - 1
"""Sequence numbers go no further."""


class Copies:
    """Of this generation of the orchestrator. No other gives out the same numbers, so none has to be remembered."""

    def __init__(self, generation: int) -> None:
        self._first = generation * PER_GENERATION
        self._given: dict[str, int] = {}

    def next(self, sampler_id: str, samplers: Container[str]) -> int:
        """`samplers` are those that there are: of others nothing is kept."""
        given = self._given.get(sampler_id, 0)
        number = self._first + given
        if given >= PER_GENERATION or not 0 < number <= _LAST:
            raise StrataError(Code.EXHAUSTED, f"{sampler_id} has no number left for another copy of its client")
        self._given = {each: count for each, count in self._given.items() if each in samplers}
        self._given[sampler_id] = given + 1
        return number
