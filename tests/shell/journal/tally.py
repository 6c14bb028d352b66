"""A machine whose facts are 1, 2, 3, …: it refuses a gap and a repetition, so replaying it is a check."""

from __future__ import annotations

from collections.abc import Sequence

from strata.journal.replica import Machine


class Tally(Machine[int, None, int]):
    def initial(self) -> int:
        return 0

    def decide(self, state: int, given: None, now_s: float) -> tuple[Sequence[bytes], int]:
        del given, now_s
        return [b"%d" % (state + 1)], state + 1

    def apply(self, state: int, fact: bytes) -> int:
        if int(fact) != state + 1:
            raise AssertionError(f"after {state} comes {int(fact)}")
        return state + 1

    def save(self, state: int) -> bytes:
        return b"%d" % state

    def load(self, saved: bytes) -> int:
        return int(saved)
