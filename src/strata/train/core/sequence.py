"""The order of one model's operations: numbered by the client from 1, they may arrive in any order and twice."""

from __future__ import annotations

from enum import Enum

import msgspec

from strata.base.errors import Code, StrataError


class Standing(Enum):
    NEW = "new"
    SAME = "same"
    """It came before, with the same content: its future is the one given then."""


class Line(msgspec.Struct):
    """What has come. Numbers up to `released` were handed on without a gap; those beyond are held until it closes."""

    released: int = 0
    held: set[int] = set()

    @property
    def wanted(self) -> int:
        """The number everything held waits for."""
        return self.released + 1

    def judge(self, seq: int, digest: str, known: str | None) -> Standing:
        """`known` is the digest under which this number came before, if that is remembered.

        CONFLICT if it came with other content: a client that reuses a number has lost count, and whichever of the two
        were dropped, it would train on something it did not ask for.
        """
        if seq < 1:
            raise StrataError(Code.INVALID, f"operations are numbered from 1, not {seq}")
        if known is not None:
            if known != digest:
                raise StrataError(
                    Code.CONFLICT,
                    f"number {seq} was used before, for an operation with other content",
                    hint="count every operation of a model once",
                )
            return Standing.SAME
        if seq <= self.released or seq in self.held:
            raise StrataError(Code.GONE, f"number {seq} was used so long ago that its result is gone")
        return Standing.NEW

    def take(self, seq: int) -> range:
        """Note one that is new; returns the numbers that may now be handed on, in order."""
        self.held.add(seq)
        first = self.wanted
        while self.wanted in self.held:
            self.released += 1
            self.held.remove(self.released)
        return range(first, self.wanted)
