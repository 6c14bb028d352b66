"""Reads completed dispatches back from the journal, in order, for a group of ranks that has to replay them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence, Set

from strata.base.errors import Code, StrataError
from strata.journal.port import Journal
from strata.journal.replay import replay
from strata.train.core import facts, ops
from strata.train.core.out_of_memory import without_operations
from strata.train.core.replay import CompletedDispatch, always_replayed, skip_on_replay
from strata.train.core.replay_differences import RankNumerics
from strata.train.core.state import Dispatch


async def completed_dispatches(  # noqa: PLR0913 - by name
    journal: Journal,
    stream: str,
    *,
    after: int,
    through: int,
    failed: Set[int],
    pending: Mapping[str, ops.Operation],
    numerics: RankNumerics | None = None,
) -> AsyncIterator[CompletedDispatch]:
    """The dispatches `after` + 1 to `through`, in order, each with its operations and their first results.

    `failed` are dispatches that the orchestrator failed itself. `pending` has the operations that were accepted before
    the retained part of the journal, `numerics` those of the ranks at that time. An operation is held only until the
    results of its dispatch are read, so memory is bounded by what ever waited and ran at once.
    """
    reader = _ReplayReader(stream, after, through, failed, pending, numerics)
    async for _, fact in retained_facts(journal, stream):
        reader.read(fact)
        while (completed := reader.next()) is not None:
            if not skip_on_replay(completed):
                yield completed
        if reader.finished:
            return
    reader.check_end()


class _ReplayReader:
    def __init__(
        self,
        stream: str,
        after: int,
        through: int,
        failed: Set[int],
        pending: Mapping[str, ops.Operation],
        numerics: RankNumerics | None,
    ) -> None:
        self._stream = stream
        self._after = after
        self._through = through
        self._failed = failed
        self._expected = after + 1
        self._accepted = dict(pending)
        self._incomplete: dict[int, _PendingDispatch] = {}
        self._numerics = numerics

    @property
    def finished(self) -> bool:
        return self._expected > self._through and not self._incomplete

    def read(self, fact: facts.Fact) -> None:
        match fact:
            case facts.OperationAccepted():
                self._accepted[fact.future_id] = fact.operation
            case facts.Dispatched():
                operations = [self._accepted.pop(future_id, None) for future_id in fact.future_ids]
                if self._after < fact.number <= self._through:
                    self._dispatch(fact, [operation for operation in operations if operation is not None])
            case facts.RanksRenewed():
                self._numerics = fact.numerics
            case _:
                if isinstance(fact, facts.OperationFinished):
                    self._accepted.pop(fact.future_id, None)
                for dispatch in self._incomplete.values():
                    dispatch.read(fact, self._numerics)

    def _dispatch(self, fact: facts.Dispatched, operations: Sequence[ops.Operation]) -> None:
        if fact.number != self._expected:
            raise StrataError(Code.CORRUPT, f"dispatch {self._expected} of stream {self._stream!r} is missing")
        self._expected += 1
        # Neither changed a model: a sample is a result or is sampled again, and a snapshot is a copy.
        if fact.slice is not None or fact.snapshot:
            return
        if fact.number in self._failed and not always_replayed(operations):
            return
        if len(operations) != len(fact.future_ids):
            raise StrataError(Code.CORRUPT, f"operations of dispatch {fact.number} of {self._stream!r} are missing")
        self._incomplete[fact.number] = _PendingDispatch(fact, operations)

    def next(self) -> CompletedDispatch | None:
        """The first dispatch that was not returned yet, if all its results are read."""
        if not self._incomplete:
            return None
        first = min(self._incomplete)
        completed = self._incomplete[first].completed()
        if completed is not None:
            del self._incomplete[first]
        return completed

    def check_end(self) -> None:
        if self._incomplete:
            first = min(self._incomplete)
            raise StrataError(Code.CORRUPT, f"results of dispatch {first} of stream {self._stream!r} are missing")


class _PendingDispatch:
    """A dispatch whose results come later in the journal."""

    def __init__(self, fact: facts.Dispatched, operations: Sequence[ops.Operation]) -> None:
        self._fact = fact
        self._operations = operations
        self._failed: dict[str, bool] = {}
        self._results: dict[str, ops.Result] = {}
        self._numerics: RankNumerics | None = None
        self._out_of_memory: set[str] = set()
        """Operations that did not fit into the memory of the ranks."""

    def read(self, fact: facts.Fact, numerics: RankNumerics | None) -> None:
        """`numerics` are those of the ranks that were attached when this fact was written."""
        match fact:
            case facts.OperationFinished() if fact.future_id in self._fact.future_ids:
                self._numerics = numerics
                self._results[fact.future_id] = fact.result
                self._failed[fact.future_id] = isinstance(fact.result, ops.Failed)
                if isinstance(fact.result, ops.Failed) and fact.result.memory:
                    self._out_of_memory.add(fact.future_id)
            case facts.PushBegun() | facts.DispatchFailed() if fact.number == self._fact.number:
                # The ranks are done when the weights are saved; they do not wait for the push to endpoints.
                self._failed = dict.fromkeys(self._fact.future_ids, isinstance(fact, facts.DispatchFailed))
            case _:
                pass

    def completed(self) -> CompletedDispatch | None:
        fact = self._fact
        if len(self._failed) < len(fact.future_ids):
            return None
        dispatch = Dispatch(fact.number, fact.future_ids, fact.rows, fact.path, fact.close)
        operations = self._operations
        if self._out_of_memory:
            dispatch = without_operations(dispatch, self._out_of_memory)
            operations = [
                operation
                for future_id, operation in zip(fact.future_ids, self._operations, strict=True)
                if future_id not in self._out_of_memory
            ]
        return CompletedDispatch(
            dispatch,
            operations,
            [self._failed[future_id] for future_id in dispatch.future_ids],
            [self._results.get(future_id) for future_id in dispatch.future_ids],
            self._numerics,
        )


async def find_dispatch(journal: Journal, stream: str, number: int) -> int | None:
    """The position of this dispatch in the journal; None if it was truncated already."""
    async for position, fact in retained_facts(journal, stream):
        if isinstance(fact, facts.Dispatched) and fact.number == number:
            return position
    return None


async def retained_facts(journal: Journal, stream: str, after: int = 0) -> AsyncIterator[tuple[int, facts.Fact]]:
    """Every fact after a position that was not truncated, with its own position."""
    position = after
    while True:
        try:
            async for batch in replay(journal, stream, position):
                for offset, encoded in enumerate(batch.facts):
                    yield batch.first + offset, facts.decode(encoded)
                position = batch.last
        except StrataError as error:
            if error.code is not Code.GONE:
                raise
            # Truncated before or during this read: the reader does not need those facts.
            position = int(error.detail["floor"])
        else:
            return
