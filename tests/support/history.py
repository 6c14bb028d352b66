"""Operation histories: what clients requested, when, and what they saw, recorded from any number of threads or tasks.

Nothing here judges a history (`linearizable.check` does), and nothing knows time, chance, threads of the system under
test or a layer's vocabulary: the caller passes the time.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Generic, TypeAlias, TypeVar

In = TypeVar("In")
Out = TypeVar("Out")
In_co = TypeVar("In_co", covariant=True)
Out_co = TypeVar("Out_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Returned(Generic[Out_co]):
    """The client saw this output."""

    output: Out_co

    def allows(self, output: object) -> bool:
        return self.output == output


@dataclass(frozen=True, slots=True)
class Unknown:
    """Timeout, crash or lost reply: it took effect once, at any time after its invocation, or never."""

    def allows(self, output: object) -> bool:
        return True


Outcome: TypeAlias = Returned[Out_co] | Unknown


@dataclass(frozen=True, slots=True)
class Operation(Generic[In_co, Out_co]):
    """One call of one client.

    Two operations are ordered when one returned before the other was invoked. At equal times the recorder's sequence
    numbers decide; operations built by hand leave them 0 and overlap at equal times, so a tie never accuses anyone.
    """

    client: Hashable
    input: In_co
    invoked_at: float
    returned_at: float | None
    outcome: Outcome[Out_co]
    invoked_seq: int = 0
    returned_seq: int = 0

    def __post_init__(self) -> None:
        if (self.returned_at is None) != isinstance(self.outcome, Unknown):
            raise ValueError(f"an operation has a time of return exactly if it returned: {self}")
        if self.returned_at is not None and self.returned_at < self.invoked_at:
            raise ValueError(f"an operation cannot return before it was invoked: {self}")

    def __str__(self) -> str:
        shown = f"-> {self.outcome.output!r}" if isinstance(self.outcome, Returned) else "-> unknown"
        return f"{self.client}: {self.input!r} {shown}"


# At equal times and sequence numbers an invocation sorts before a return, and so a tie is an overlap.
Moment: TypeAlias = tuple[float, int, int]


def began(operation: Operation[In, Out]) -> Moment:
    return (operation.invoked_at, operation.invoked_seq, 0)


def ended(operation: Operation[In, Out]) -> Moment:
    assert operation.returned_at is not None
    return (operation.returned_at, operation.returned_seq, 1)


class Handle(Generic[Out]):
    """One operation in flight; closed exactly once, or left open, which counts as unknown."""

    def __init__(self, close: Callable[[Outcome[Out] | None, float | None], None]) -> None:
        self._close = close
        self._closed = False

    def returned(self, output: Out, now: float) -> None:
        self._once(Returned(output), now)

    def unknown(self) -> None:
        self._once(Unknown(), None)

    def failed(self) -> None:
        """Known to have had no effect: the operation leaves the history."""
        self._once(None, None)

    def _once(self, outcome: Outcome[Out] | None, now: float | None) -> None:
        if self._closed:
            raise RuntimeError("this operation has already been closed")
        self._close(outcome, now)
        self._closed = True


class History(Generic[In, Out]):
    """Records operations from any number of threads or tasks; `invoke` before the call, `returned` after it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seq = itertools.count(1)
        self._operations: dict[int, Operation[In, Out]] = {}

    def invoke(self, client: Hashable, input: In, now: float) -> Handle[Out]:
        with self._lock:
            number = next(self._seq)
            self._operations[number] = Operation(client, input, now, None, Unknown(), invoked_seq=number)

        def close(outcome: Outcome[Out] | None, returned_at: float | None) -> None:
            with self._lock:
                if outcome is None:
                    del self._operations[number]
                elif isinstance(outcome, Returned):
                    self._operations[number] = replace(
                        self._operations[number],
                        returned_at=returned_at,
                        outcome=outcome,
                        returned_seq=next(self._seq),
                    )

        return Handle(close)

    def operations(self) -> tuple[Operation[In, Out], ...]:
        """In order of invocation; operations still open are unknown."""
        with self._lock:
            return tuple(self._operations.values())
