"""Registers, the smallest useful model: what a client may request, and what it may then see.

The operations are messages too, so that a simulated system can send them as they are. A layer's own vocabulary does
not belong here; its model lives next to its tests.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TypeAlias, assert_never

import msgspec

from tests.support.history import Outcome

Value: TypeAlias = int | str | None


class Read(msgspec.Struct, frozen=True, tag=True):
    """Returns the value."""

    key: str


class Write(msgspec.Struct, frozen=True, tag=True):
    """Returns None."""

    key: str
    value: Value


class Add(msgspec.Struct, frozen=True, tag=True):
    """Returns the new total."""

    key: str
    n: int


class CompareAndSet(msgspec.Struct, frozen=True, tag=True):
    """Returns whether the value was `old` and now is `new`."""

    key: str
    old: Value
    new: Value


RegisterInput: TypeAlias = Read | Write | Add | CompareAndSet


@dataclass(frozen=True, slots=True)
class RegisterModel:
    """One register for each key; the state of a partition is the value."""

    start: Value = 0

    def initial(self) -> Value:
        return self.start

    def partition(self, input: RegisterInput) -> Hashable:
        return input.key

    def is_read(self, input: RegisterInput, outcome: Outcome[Value]) -> bool:
        return isinstance(input, Read) or (isinstance(input, CompareAndSet) and not outcome.allows(output=True))

    def step(self, state: Value, input: RegisterInput, outcome: Outcome[Value]) -> tuple[Value, ...]:
        after: Value
        output: Value
        match input:
            case Read():
                after = output = state
            case Write(value=value):
                after, output = value, None
            case Add(n=n):
                if not isinstance(state, int):
                    return ()
                after = output = state + n
            case CompareAndSet(old=old, new=new):
                output = state == old
                after = new if output else state
            case _:
                assert_never(input)
        return (after,) if outcome.allows(output) else ()
