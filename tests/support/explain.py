"""Making a violation readable: find the operation to blame, drop what does not matter, draw what is left as text.

No result is reached or changed here. One `SearchBudget` bounds the further searches that shrinking needs; when it runs
out, the reader gets a larger picture, never a wrong one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from typing import Generic

from tests.support.history import In, Operation, Out, Returned, Unknown, began, ended
from tests.support.order_search import Search, SearchResult, SequentialModel, State

SHOWN = 24
_COLUMNS = 48


class SearchBudget(Generic[State, In, Out]):
    """Bounded searches on behalf of an explanation; what cannot be afforded is answered with LIMIT."""

    def __init__(self, model: SequentialModel[State, In, Out], limit: int) -> None:
        self._model = model
        self._limit = limit
        self.steps = 0

    def share(self, parts: int) -> SearchBudget[State, In, Out]:
        return SearchBudget(self._model, self._limit // parts)

    def find(self, part: Sequence[Operation[In, Out]]) -> SearchResult:
        if self.steps >= self._limit:
            return SearchResult.LIMIT
        search = Search(part, self._model, min(self._limit - self.steps, self._limit // 10))
        found = search.run()
        self.steps += search.steps + len(part)
        return found


def shortest_prefix(
    part: Sequence[Operation[In, Out]], search: Search[State, In, Out], effort: SearchBudget[State, In, Out]
) -> tuple[Operation[In, Out], list[Operation[In, Out]]]:
    """The operation whose return made the history impossible, and what had been invoked by then.

    The search got as far as `furthest`, knowing the answers of operations that were still open there. Without that
    knowledge the prefix may be explainable, and then a later return is the one to blame.
    """
    start = search.returned.index(search.furthest())
    for culprit in search.returned[start:]:
        prefix = _until(part, culprit)
        if effort.find(prefix) is SearchResult.NOTHING:
            return culprit, prefix
    return search.returned[start], list(part)


def _until(part: Sequence[Operation[In, Out]], last: Operation[In, Out]) -> list[Operation[In, Out]]:
    end = ended(last)
    return [
        each if each.returned_at is None or ended(each) <= end else _weakened(each)
        for each in part
        if began(each) < end
    ]


def _weakened(operation: Operation[In, Out]) -> Operation[In, Out]:
    return replace(operation, returned_at=None, returned_seq=0, outcome=Unknown())


def _contradicts(
    rest: Sequence[Operation[In, Out]], culprit: Operation[In, Out], effort: SearchBudget[State, In, Out]
) -> Operation[In, Out] | None:
    """The latest operation that the culprit contradicts: had its answer been lost, there would be an explanation."""
    scan = effort.share(4)
    for each in reversed(rest):
        if isinstance(each.outcome, Returned):
            others = [other for other in rest if other is not each]
            if scan.find([*others, _weakened(each), culprit]) is SearchResult.ORDER:
                break
    else:
        each = None
    effort.steps += scan.steps
    return each


def shrink(
    part: list[Operation[In, Out]], culprit: Operation[In, Out], effort: SearchBudget[State, In, Out]
) -> list[Operation[In, Out]]:
    """Drop operations while the same thing is wrong.

    "Still violates" would not be enough: a stale read without the write it saw violates too, but tells a person that
    nobody wrote the value. So each repair that explained the whole must go on explaining what is left: the culprit
    gone (or, if others saw its effect, its answer lost); the culprit at any other time; failing that, the answer of
    one earlier operation lost, which then stays in the picture.
    """
    rest = [each for each in part if each is not culprit]
    moved = replace(culprit, invoked_at=-inf, returned_at=inf)
    kept, repairs = [culprit], [[] if effort.find(rest) is SearchResult.ORDER else [_weakened(culprit)]]
    if effort.find([*rest, moved]) is SearchResult.ORDER:
        repairs.append([moved])
    elif (other := _contradicts(rest, culprit, effort)) is not None:
        rest = [each for each in rest if each is not other]
        kept, repairs = [culprit, other], [[*repairs[0], other], [culprit, _weakened(other)]]

    def same_failure(fewer: list[Operation[In, Out]]) -> bool:
        return effort.find([*fewer, *kept]) is SearchResult.NOTHING and all(
            effort.find([*fewer, *repair]) is SearchResult.ORDER for repair in repairs
        )

    return sorted([*_smallest(rest, same_failure), *kept], key=began)


def _smallest(
    rest: list[Operation[In, Out]], suffices: Callable[[list[Operation[In, Out]]], bool]
) -> list[Operation[In, Out]]:
    """Drop pieces, ever smaller ones, as long as what is left suffices; then no single operation can be dropped."""
    size = max(len(rest) // 2, 1)
    while True:
        before = len(rest)
        at = 0
        while at < len(rest):
            fewer = rest[:at] + rest[at + size :]
            if suffices(fewer):
                rest = fewer
            else:
                at += size
        if size == 1 and len(rest) == before:
            return rest
        size = max(size // 2, 1)


def latest(operations: Sequence[Operation[In, Out]]) -> Sequence[Operation[In, Out]]:
    return operations[-SHOWN:]


def timeline(operations: Sequence[Operation[In, Out]], marked: Sequence[Operation[In, Out]]) -> list[str]:
    """One row for each operation, one column for each event: order is what matters, not duration."""
    shown = latest(operations)
    events = sorted({began(each) for each in shown} | {ended(each) for each in shown if each.returned_at is not None})
    column = {event: number * min(_COLUMNS // len(events) + 1, 4) for number, event in enumerate(events)}
    width = max(column.values()) + 1
    labels = max(len(str(each)) for each in shown)
    rows = [f"  ({len(operations) - len(shown)} earlier operations not shown)"] if len(shown) < len(operations) else []
    for each in shown:
        start = column[began(each)]
        bar = "|" + "." * (width - start - 1) + ">"
        if each.returned_at is not None:
            bar = "|" + "=" * (column[ended(each)] - start - 1) + "|"
        mark = "  <-- cannot be placed" if each in marked else ""
        rows.append(f"  {each!s:<{labels}}  {' ' * start}{bar:<{width - start + 1}}{mark}".rstrip())
    return rows
