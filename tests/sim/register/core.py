"""A register as a pure machine: the smallest thing that has what the layers have: facts, replies, repeated requests."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from strata.journal.replica import Machine
from tests.support.register_model import Add, CompareAndSet, Read, RegisterInput, Value, Write


class Request(msgspec.Struct, frozen=True):
    """A client numbers its requests; it repeats one under the same number until it has an answer."""

    client: str
    number: int
    operation: Read | Write | Add | CompareAndSet


class Reply(msgspec.Struct, frozen=True):
    value: bool | int | str | None


class Changed(msgspec.Struct, frozen=True, array_like=True):
    """The one kind of fact: who asked for what, and how it was answered.

    Adds are kept as differences on purpose: a fact that is in the journal twice must show.
    """

    client: str
    number: int
    key: str
    answer: bool | int | str | None
    value: int | str | None = None
    added: int | None = None


class State(msgspec.Struct):
    values: dict[str, int | str | None]
    answered: dict[str, tuple[int, bool | int | str | None]]
    """For each client its last request and the answer."""


_encode = msgspec.msgpack.Encoder().encode
_decode_fact = msgspec.msgpack.Decoder(Changed).decode
_decode_state = msgspec.msgpack.Decoder(State).decode


class Register(Machine[State, Request, Reply | None]):
    def initial(self) -> State:
        return State({}, {})

    def decide(self, state: State, given: Request, now_s: float) -> tuple[Sequence[bytes], Reply | None]:
        """None answers a request that is older than the client's last: it has moved on and listens no more."""
        del now_s
        number, answer = state.answered.get(given.client, (0, None))
        if self.is_repeated(given.number, number):
            return (), Reply(answer) if given.number == number else None
        fact, value = _changed(given, state.values.get(given.operation.key, 0))
        return (() if fact is None else (_encode(fact),)), Reply(value)

    def is_repeated(self, number: int, last: int) -> bool:
        return number <= last

    def apply(self, state: State, fact: bytes) -> State:
        changed = _decode_fact(fact)
        if changed.added is not None:
            before = state.values.get(changed.key, 0)
            state.values[changed.key] = (before if isinstance(before, int) else 0) + changed.added
        else:
            state.values[changed.key] = changed.value
        state.answered[changed.client] = (changed.number, changed.answer)
        return state

    def save(self, state: State) -> bytes:
        return _encode(state)

    def load(self, saved: bytes) -> State:
        return _decode_state(saved)


def _changed(given: Request, before: Value) -> tuple[Changed | None, Value]:
    operation: RegisterInput = given.operation
    match operation:
        case Read():
            return None, before
        case Write():
            return Changed(given.client, given.number, operation.key, None, operation.value), None
        case Add():
            total = (before if isinstance(before, int) else 0) + operation.n
            return Changed(given.client, given.number, operation.key, total, added=operation.n), total
        case CompareAndSet():
            swapped = before == operation.old
            value = operation.new if swapped else before
            return Changed(given.client, given.number, operation.key, swapped, value), swapped
