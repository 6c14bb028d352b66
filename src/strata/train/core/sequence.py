"""Sequence numbers of a model's operations: counted from 1, accepted out of order, recognised when repeated; and the
errors of wrong numbers.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from strata.base.errors import Code, StrataError


class SequenceCheck(Enum):
    NEW = "new"
    DUPLICATE = "duplicate"
    """An idempotent retry: it came before with the same content and has the future of then."""


class SequenceWindow(msgspec.Struct):
    """The numbers that arrived: those up to `released` were scheduled, later ones are held until the gap closes."""

    released: int = 0
    held: set[int] = set()

    @property
    def wanted(self) -> int:
        """The missing number that everything held waits for."""
        return self.released + 1

    def check(self, seq: int, digest: str, known: str | None) -> SequenceCheck:
        """`known` is the digest of the operation that used this number before, if it is still stored.

        CONFLICT if the content differs: a client that reuses a number has lost count, and whichever of the two
        operations were dropped, the model would be trained on something the client did not ask for.
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
            return SequenceCheck.DUPLICATE
        if seq <= self.released or seq in self.held:
            raise StrataError(Code.GONE, f"number {seq} was used so long ago that its result is gone")
        return SequenceCheck.NEW

    def release(self, seq: int) -> range:
        """Record a new number; returns the numbers that are released to the scheduler by it, in order."""
        self.held.add(seq)
        first = self.wanted
        while self.wanted in self.held:
            self.released += 1
            self.held.remove(self.released)
        return range(first, self.wanted)
