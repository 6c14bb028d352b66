"""Chooses the operation that fails when a row did not fit into the ranks' memory, learns the limit of tokens in a row,
and words the out-of-memory error.

One operation fails, the one with most tokens of the row that did not fit. The others of its dispatch run without it:
`without_operations` is the composition that is left, the same live and in a replay.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Final

import msgspec

from strata.train.core import ops
from strata.train.core.client_commands import Done
from strata.train.core.commands import RowOutOfMemory
from strata.train.core.facts import OperationFinished
from strata.train.core.inputs import Decision, RanksOutOfMemory
from strata.train.core.state import Dispatch, TrainState

NEAR_LIMIT: Final = 0.8
"""A row of this share of the measured limit may well have been too long."""


def fail_oversized(state: TrainState, request: RanksOutOfMemory) -> Decision:
    """Fail the operation whose row was too long. No fact if the row was of another dispatch: the cause is unknown."""
    dispatch = state.dispatches.get(request.number)
    for future_id in dispatch.future_ids if dispatch is not None else ():
        future = state.futures.get(future_id)
        operation = future.operation if future is not None else None
        if isinstance(operation, ops.ForwardBackward) and operation.model_id == request.exhausted.model_id:
            result = ops.Failed("user", describe_out_of_memory(request.exhausted), memory=True)
            return Decision(Done(), (OperationFinished(future_id, result, request.at_s),), (future_id,))
    return Decision(Done())


def most_likely_cause(reports: Iterable[RowOutOfMemory | None]) -> RowOutOfMemory | None:
    """Returns the report that the group most likely died of: the other ranks ran rows too."""
    return max((each for each in reports if each is not None), key=lambda each: (each.sure, each.tokens), default=None)


class RowLimit:
    """The longest row that may be dispatched: the measured limit, and shorter than a row that a group died of."""

    def __init__(self) -> None:
        self._deadly = 0
        """Tokens of the shortest such row; 0 if there is none."""

    def ran_out(self, exhausted: RowOutOfMemory) -> None:
        """An unsure report counts only near the measured limit: else it would keep all tenants from rows that fit."""
        if exhausted.sure or (exhausted.limit and exhausted.tokens >= NEAR_LIMIT * exhausted.limit):
            self._deadly = min(self._deadly or exhausted.tokens, exhausted.tokens)

    def succeeded(self, tokens: int) -> None:
        if tokens >= self._deadly:
            self._deadly = 0

    def of(self, measured: int) -> int:
        """0 is any length."""
        return min((limit for limit in (measured, self._deadly - 1) if limit > 0), default=0)


def describe_out_of_memory(exhausted: RowOutOfMemory) -> str:
    """The error message of the client: tokens and limit."""
    return out_of_memory_message(exhausted.tokens, exhausted.limit)


def out_of_memory_message(tokens: int, limit: int) -> str:
    """The limit is an estimate, 0 if there is none; it is shown below the row that did not fit."""
    limit = min(limit or tokens, tokens - 1)
    return f"out of memory: a row of {tokens:,} tokens, and the memory of the ranks holds about {limit:,}"


def without_operations(dispatch: Dispatch, future_ids: Set[str]) -> Dispatch:
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
