"""Dispatches that ended long ago, read again from the journal: for ranks that start anew and have to catch up."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence, Set

from strata.base.errors import Code, StrataError
from strata.journal.port import Journal
from strata.journal.replay import replay
from strata.train.core import facts, ops
from strata.train.core.catching_up import Past, is_told_all_the_same, left_out
from strata.train.core.memory import without
from strata.train.core.state import Dispatch


async def dispatches(
    journal: Journal,
    stream: str,
    *,
    after: int,
    through: int,
    given_up: Set[int],
    pending: Mapping[str, ops.Operation],
) -> AsyncIterator[Past]:
    """Those with numbers from `after` + 1 to `through`, in order, each with its operations and what came of them.

    `pending` has the operations that were accepted before what the journal still has. One is kept only until the
    results of its dispatch are read, so this takes as much memory as ever waited and ran at once.
    """
    reading = _Reading(stream, after, through, given_up, pending)
    async for _, fact in still_there(journal, stream):
        reading.take(fact)
        while (past := reading.next()) is not None:
            if not left_out(past):
                yield past
        if reading.over:
            return
    reading.check_end()


class _Reading:
    def __init__(
        self, stream: str, after: int, through: int, given_up: Set[int], pending: Mapping[str, ops.Operation]
    ) -> None:
        self._stream = stream
        self._after = after
        self._through = through
        self._given_up = given_up
        self._expected = after + 1
        self._accepted = dict(pending)
        self._unanswered: dict[int, _Unanswered] = {}

    @property
    def over(self) -> bool:
        return self._expected > self._through and not self._unanswered

    def take(self, fact: facts.Fact) -> None:
        match fact:
            case facts.Accepted():
                self._accepted[fact.future_id] = fact.operation
            case facts.Dispatched():
                operations = [self._accepted.pop(future_id, None) for future_id in fact.future_ids]
                if self._after < fact.number <= self._through:
                    self._dispatch(fact, [each for each in operations if each is not None])
            case _:
                if isinstance(fact, facts.Finished):
                    self._accepted.pop(fact.future_id, None)
                for each in self._unanswered.values():
                    each.hear(fact)

    def _dispatch(self, fact: facts.Dispatched, found: Sequence[ops.Operation]) -> None:
        if fact.number != self._expected:
            raise StrataError(Code.CORRUPT, f"dispatch {self._expected} of stream {self._stream!r} is missing")
        self._expected += 1
        # What was sampled is a result, or is sampled anew, and a snapshot is taken of what there is: neither changed a
        # model.
        if fact.quantum is not None or fact.snapshot:
            return
        if fact.number in self._given_up and not is_told_all_the_same(found):
            return
        if len(found) != len(fact.future_ids):
            raise StrataError(Code.CORRUPT, f"operations of dispatch {fact.number} of {self._stream!r} are missing")
        self._unanswered[fact.number] = _Unanswered(fact, found)

    def next(self) -> Past | None:
        """The first that was not taken yet, if all its results are read."""
        if not self._unanswered:
            return None
        first = min(self._unanswered)
        past = self._unanswered[first].past()
        if past is not None:
            del self._unanswered[first]
        return past

    def check_end(self) -> None:
        if self._unanswered:
            first = min(self._unanswered)
            raise StrataError(Code.CORRUPT, f"results of dispatch {first} of stream {self._stream!r} are missing")


class _Unanswered:
    """A dispatch whose results come later in the journal."""

    def __init__(self, fact: facts.Dispatched, operations: Sequence[ops.Operation]) -> None:
        self._fact = fact
        self._operations = operations
        self._failed: dict[str, bool] = {}
        self._exhausted: set[str] = set()
        """Operations that did not fit into the memory of the ranks."""

    def hear(self, fact: facts.Fact) -> None:
        match fact:
            case facts.Finished() if fact.future_id in self._fact.future_ids:
                self._failed[fact.future_id] = isinstance(fact.result, ops.Failed)
                if isinstance(fact.result, ops.Failed) and fact.result.memory:
                    self._exhausted.add(fact.future_id)
            case facts.PushBegun() | facts.GivenUp() if fact.number == self._fact.number:
                # Saved; when endpoints have been told of it is not for the ranks to wait for.
                self._failed = dict.fromkeys(self._fact.future_ids, isinstance(fact, facts.GivenUp))
            case _:
                pass

    def past(self) -> Past | None:
        fact = self._fact
        if len(self._failed) < len(fact.future_ids):
            return None
        dispatch = Dispatch(fact.number, fact.future_ids, fact.rows, fact.path, fact.close)
        operations = self._operations
        if self._exhausted:
            dispatch = without(dispatch, self._exhausted)
            operations = [
                operation
                for future_id, operation in zip(fact.future_ids, self._operations, strict=True)
                if future_id not in self._exhausted
            ]
        return Past(dispatch, operations, [self._failed[each] for each in dispatch.future_ids])


async def position_of(journal: Journal, stream: str, number: int) -> int | None:
    """Where the journal says that this dispatch was made; None if that was let go already."""
    async for position, fact in still_there(journal, stream):
        if isinstance(fact, facts.Dispatched) and fact.number == number:
            return position
    return None


async def still_there(journal: Journal, stream: str, after: int = 0) -> AsyncIterator[tuple[int, facts.Fact]]:
    """Every fact after a position that was not let go, each with its own position."""
    position = after
    while True:
        try:
            async for batch in replay(journal, stream, position):
                for place, encoded in enumerate(batch.facts):
                    yield batch.first + place, facts.decode(encoded)
                position = batch.last
        except StrataError as error:
            if error.code is not Code.GONE:
                raise
            # Let go a moment ago, or long ago: whoever reads does not need it.
            position = int(error.detail["floor"])
        else:
            return
