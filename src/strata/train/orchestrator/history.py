"""Dispatches that ended long ago, read again from the journal: for ranks that start anew and have to catch up."""

from __future__ import annotations

from collections.abc import AsyncIterator, Set

from strata.base.errors import Code, StrataError
from strata.journal.port import Journal
from strata.journal.replay import replay
from strata.train.core import facts, ops
from strata.train.core.state import Dispatch


async def dispatches(
    journal: Journal, stream: str, *, after: int, through: int, given_up: Set[int]
) -> AsyncIterator[tuple[Dispatch, list[ops.Operation]]]:
    """Those with numbers from `after` + 1 to `through`, in order, each with its operations.

    An operation is kept only until its dispatch is read, so this takes as much memory as was ever waiting at once.
    """
    accepted: dict[str, ops.Operation] = {}
    expected = 1
    async for batch in replay(journal, stream):
        for encoded in batch.facts:
            fact = facts.decode(encoded)
            if isinstance(fact, facts.Accepted):
                accepted[fact.future_id] = fact.operation
            elif isinstance(fact, facts.Finished):
                accepted.pop(fact.future_id, None)
            elif isinstance(fact, facts.Dispatched):
                if fact.number != expected:
                    raise StrataError(Code.CORRUPT, f"dispatch {expected} of stream {stream!r} is missing")
                if fact.number > through:
                    return
                expected += 1
                if fact.quantum is not None:
                    # What was sampled is a result, or is sampled anew: it changed no model.
                    continue
                operations = [accepted.pop(future_id) for future_id in fact.future_ids]
                if fact.number > after and fact.number not in given_up:
                    yield Dispatch(fact.number, fact.future_ids, fact.rows, fact.path, fact.close), operations
