"""The linearizability checker: whether one sequential order explains what the clients of a recorded history saw.

`check` splits a history by `SequentialModel.partition` and searches each part. A layer writes its own model next to its
own tests; `register_model` is an example. `order_search` finds an order; `explain` shrinks and draws a violation.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeAlias, assert_never

from tests.support.explain import SHOWN, SearchBudget, latest, shortest_prefix, shrink, timeline
from tests.support.history import History, In, In_co, Operation, Out, Out_co, began, ended
from tests.support.order_search import Search, SearchResult, SequentialModel, State


@dataclass(frozen=True, slots=True)
class Linearizable(Generic[In_co, Out_co]):
    """`orders`: for each partition one order that explains it, with the unknown operations that order needs."""

    orders: dict[Hashable, tuple[Operation[In_co, Out_co], ...]]
    steps: int


@dataclass(frozen=True, slots=True)
class Violation(Generic[In_co, Out_co]):
    """No order explains one partition. All fields but `culprit` describe the shrunk history, which also violates.

    `culprit` is the operation whose return made the history impossible: everything before it has an explanation.
    An operation still open at that moment appears as unknown in `operations`.
    """

    partition: Hashable
    culprit: Operation[In_co, Out_co]
    operations: tuple[Operation[In_co, Out_co], ...]
    placed: tuple[Operation[In_co, Out_co], ...]
    unplaced: tuple[Operation[In_co, Out_co], ...]
    states: tuple[Hashable, ...]
    steps: int

    def explain(self) -> str:
        lines = [
            f"partition {self.partition!r}: no order of these {len(self.operations)} operations explains",
            f"  {self.culprit}  (invoked {self.culprit.invoked_at}, returned {self.culprit.returned_at})",
            *timeline(self.operations, self.unplaced),
            f"longest order found places {len(self.placed)}:",
            *(f"  {each}" for each in latest(self.placed)),
            "state there: " + " or ".join(repr(each) for each in self.states),
            *(f"cannot come next: {each}" for each in self.unplaced),
        ]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Undecided(Generic[In_co, Out_co]):
    """The search used up its steps in this partition. It proves nothing, and a caller treats it as a failure."""

    partition: Hashable
    steps: int
    furthest: Operation[In_co, Out_co]

    def explain(self) -> str:
        head = f"partition {self.partition!r}: undecided after {self.steps} steps; no order yet gets past"
        return f"{head}\n  {self.furthest}"


Verdict: TypeAlias = Linearizable[In_co, Out_co] | Violation[In_co, Out_co] | Undecided[In_co, Out_co]


def check(
    history: History[In, Out] | Iterable[Operation[In, Out]],
    model: SequentialModel[State, In, Out],
    *,
    limit: int = 1_000_000,
    shrink_limit: int = 200_000,
) -> Verdict[In, Out]:
    """Is there one order of the operations that respects real time and the model?

    `limit` bounds the model steps of each partition, `shrink_limit` the steps spent on making a violation small.
    A violation in any partition outweighs an undecided one; the first in order of invocation is reported.
    """
    operations = history.operations() if isinstance(history, History) else tuple(history)
    parts: dict[Hashable, list[Operation[In, Out]]] = {}
    for operation in sorted(operations, key=began):
        parts.setdefault(model.partition(operation.input), []).append(operation)
    orders: dict[Hashable, tuple[Operation[In, Out], ...]] = {}
    undecided: Undecided[In, Out] | None = None
    steps = 0
    for key, part in parts.items():
        search = Search(part, model, limit)
        verdict = search.run()
        steps += search.steps
        match verdict:
            case SearchResult.ORDER:
                orders[key] = search.best[0].order()
            case SearchResult.NOTHING:
                return _violation(key, part, search, shrink_limit)
            case SearchResult.LIMIT:
                undecided = undecided or Undecided(key, search.steps, search.furthest())
            case _:
                assert_never(verdict)
    return undecided or Linearizable(orders, steps)


def _violation(
    key: Hashable, part: Sequence[Operation[In, Out]], search: Search[State, In, Out], shrink_limit: int
) -> Violation[In, Out]:
    effort = SearchBudget(search.model, shrink_limit)
    culprit, prefix = shortest_prefix(part, search, effort)
    small = shrink(prefix, culprit, effort)
    final = Search(small, search.model, search.limit)
    if final.run() is not SearchResult.NOTHING:  # the budget ran out before a smaller history was proven to violate
        small, final = list(part), search
    unplaced = {id(each): each for node in final.best for each in final.candidates(node)}
    return Violation(
        partition=key,
        culprit=culprit,
        operations=tuple(small),
        placed=final.best[0].order(),
        unplaced=tuple(sorted(unplaced.values(), key=lambda each: (each != culprit, ended(each)))),
        states=tuple(dict.fromkeys(node.state for node in final.best))[:SHOWN],
        steps=search.steps + effort.steps,
    )
