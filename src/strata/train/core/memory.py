"""What becomes of a pass that does not fit into the memory of the ranks.

One operation fails, the one whose tokens are most of the row that did not fit. The others of its dispatch go on without
it: `without` is the composition that is left, the same live and when the dispatch is replayed.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Final

import msgspec

from strata.train.core import ops
from strata.train.core.commands import Exhausted
from strata.train.core.facts import Finished
from strata.train.core.inputs import Done, Outcome, RunOut
from strata.train.core.state import Dispatch, TrainState

NEAR: Final = 0.8
"""A row of this share of what fits by the measurement may well have been too long."""


def run_out(state: TrainState, given: RunOut) -> Outcome:
    """Without a fact if the row was not of this dispatch: then nobody knows what the ranks died of."""
    dispatch = state.dispatches.get(given.number)
    for future_id in dispatch.future_ids if dispatch is not None else ():
        future = state.futures.get(future_id)
        operation = future.operation if future is not None else None
        if isinstance(operation, ops.ForwardBackward) and operation.model_id == given.exhausted.model_id:
            result = ops.Failed("user", describe(given.exhausted), memory=True)
            return Outcome(Done(), (Finished(future_id, result, given.at_s),), (future_id,))
    return Outcome(Done())


def worst(said: Iterable[Exhausted | None]) -> Exhausted | None:
    """Of what the ranks say, that which the group most likely died of: when one dies, the others were at rows too."""
    return max((each for each in said if each is not None), key=lambda each: (each.sure, each.tokens), default=None)


class RowLimit:
    """How long a row may be: what the ranks say, and less than what a group of them died of."""

    def __init__(self) -> None:
        self._deadly = 0
        """Tokens of the shortest such row; 0 if there is none."""

    def ran_out(self, exhausted: Exhausted) -> None:
        """A suspicion alone would keep all tenants from rows that fit, so it counts only near what was measured."""
        if exhausted.sure or (exhausted.limit and exhausted.tokens >= NEAR * exhausted.limit):
            self._deadly = min(self._deadly or exhausted.tokens, exhausted.tokens)

    def succeeded(self, tokens: int) -> None:
        if tokens >= self._deadly:
            self._deadly = 0

    def of(self, measured: int) -> int:
        """0 is any length."""
        return min((limit for limit in (measured, self._deadly - 1) if limit > 0), default=0)


def describe(exhausted: Exhausted) -> str:
    """What its client is told: tokens and limit."""
    return too_many(exhausted.tokens, exhausted.limit)


def too_many(tokens: int, limit: int) -> str:
    """The limit is an estimate, and 0 if there is none: what did not fit is more than what fits."""
    limit = min(limit or tokens, tokens - 1)
    return f"out of memory: a row of {tokens:,} tokens, and the memory of the ranks holds about {limit:,}"


def without(dispatch: Dispatch, future_ids: Set[str]) -> Dispatch:
    """The rows of a pass as they were, without the datums of these operations."""
    places: dict[int, int] = {}
    for place, future_id in enumerate(dispatch.future_ids):
        if future_id not in future_ids:
            places[place] = len(places)
    rows = [
        [
            tuple(msgspec.structs.replace(each, item=places[each.item]) for each in row if each.item in places)
            for row in rank
        ]
        for rank in dispatch.rows
    ]
    return msgspec.structs.replace(dispatch, future_ids=[dispatch.future_ids[place] for place in places], rows=rows)
