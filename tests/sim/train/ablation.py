"""The training server's safeguards, each taken out in turn. The simulation must notice every one of them.

Those of the journal are not among them: `tests/sim/register` takes them out; others stand behind them here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from strata.testing.fake_ranks import FakeRanks
from strata.train.core import decide, future, ops, quanta
from strata.train.core.facts import Finished
from strata.train.core.future import OPEN, Future, FutureStore
from strata.train.core.inputs import Abort, Accept, DispatchNext, Done, Greet, Input, Outcome
from strata.train.core.schedule import Entry, Scheduler
from strata.train.core.sequence import Line, Standing
from strata.train.core.state import TrainState
from strata.train.core.views import find_future
from strata.train.orchestrator import conversation, history, questions
from strata.train.orchestrator.ledger import Ledger
from strata.train.orchestrator.orchestrator import Orchestrator
from strata.train.orchestrator.questions import Questions

Ablation = tuple[Any, str, Callable[..., Any]]


def _not_awaited(kind: type[Input]) -> Callable[..., Any]:
    async def commit(self: Ledger, given: Input) -> Outcome:
        if not isinstance(given, kind):
            return await _commit(self, given)
        outcome, durable = self.put(given)
        if durable is not None:
            durable.add_done_callback(lambda done: None if done.cancelled() else done.exception())
        return outcome

    return commit


def _as_they_come(self: Line, seq: int) -> range:
    _take(self, seq)
    return range(seq, seq + 1)


def _any_content(self: Line, seq: int, digest: str, known: str | None) -> Standing:
    return Standing.SAME if known is not None else _judge(self, seq, digest, known)


async def _composed_anew(*args: Any, **named: Any) -> AsyncIterator[Any]:
    async for past in _dispatches(*args, **named):
        rows = [list(reversed(rank)) for rank in past.dispatch.rows][::-1]
        yield past._replace(dispatch=msgspec.structs.replace(past.dispatch, rows=rows))


async def _given_up_too(*args: Any, **named: Any) -> AsyncIterator[Any]:
    async for each in _dispatches(*args, **{**named, "given_up": set()}):
        yield each


async def _nothing_of_old(*args: Any, **named: Any) -> AsyncIterator[Any]:
    empty: tuple[Any, ...] = ()
    for each in empty:
        yield each


def _once_more(self: FakeRanks, command: Any) -> Any:
    self.applied = min(self.applied, command.number - 1)
    return _answer(self, command)


def _always_admitted(state: TrainState, tenant: str) -> None:
    return


def _first_come(self: Scheduler) -> Entry | None:
    heads = [head for tenant in self._ring for head in self._heads(tenant)]
    first = min(heads, key=lambda head: head.turn, default=None)
    if first is not None:
        self._pay(first)
    return first


def _soon_overdue(self: FutureStore, now_s: float, *, ttl_s: float, keep: int) -> float | None:
    return _overdue(self, now_s, ttl_s=ttl_s / 20, keep=keep)


def _given_up_while_it_runs(state: TrainState, given: Abort) -> Outcome:
    found = find_future(state, given.tenant, given.future_id)
    if found.status not in OPEN or not isinstance(found.operation, ops.Sequenced):
        return _abort(state, given)
    result = ops.Failed("cancelled", "given up by the client")
    return Outcome(Done(), (Finished(given.future_id, result, given.at_s),), (given.future_id,))


async def _at_once(self: Questions) -> None:
    return


def _same_as_before(state: TrainState, given: Greet) -> Outcome:
    return Outcome(Done())


def _anybodys(state: TrainState, tenant: str, future_id: str) -> Future:
    found = state.futures.get(future_id)
    return found or find_future(state, tenant, future_id)


async def _not_condemned(self: Orchestrator, parts: Any, attached: Any) -> None:
    parts.backend.close()


async def _fine(self: Orchestrator, parts: Any, attached: Any) -> None:
    return None


def _nothing_pending(state: TrainState, after: int) -> dict[str, ops.Operation]:
    return {}


_commit = Ledger.commit
_take = Line.take
_judge = Line.judge
_dispatches = history.dispatches
_answer = FakeRanks._answer
_overdue = FutureStore.overdue
_abort = decide._abort

SEAMS: dict[str, list[Ablation]] = {
    "ranks are told what is not durable": [(Ledger, "commit", _not_awaited(DispatchNext))],
    "clients hear of what is not durable": [(Ledger, "commit", _not_awaited(Accept))],
    "operations of a model run as they come": [(Line, "take", _as_they_come)],
    "a number may be used for two operations": [(Line, "judge", _any_content)],
    "what is told again is composed anew": [(conversation, "dispatches", _composed_anew)],
    "what was given up is told again": [(conversation, "dispatches", _given_up_too)],
    "ranks that start anew do not catch up": [(conversation, "dispatches", _nothing_of_old)],
    "rank 0 does again what it has done": [(FakeRanks, "_answer", _once_more)],
    "a tenant may fill the queue": [(decide, "admit", _always_admitted), (quanta, "admit", _always_admitted)],
    "first come, first served": [(Scheduler, "_next", _first_come)],
    "results go before their time": [(FutureStore, "overdue", _soon_overdue)],
    "what runs can be given up": [
        (decide, "_abort", _given_up_while_it_runs),
        (future, "OF_SAMPLES", frozenset()),  # type: ignore[list-item]
    ],
    "a failure is told before it is durable": [(Questions, "_settled", _at_once)],
    "samples that died with their ranks are not begun again": [(quanta, "greet", _same_as_before)],
    "anybody may ask for any result": [(questions, "find_future", _anybodys)],
    "ranks are spoken to whatever they did": [
        (Orchestrator, "_condemn", _not_condemned),
        (Orchestrator, "_judge", _fine),
    ],
    "what waited at a snapshot is forgotten": [(conversation, "pending_at", _nothing_pending)],
}
EVERY = [*SEAMS]
SHOWN_BY = {
    "rank 0 does again what it has done": 11,
    "a tenant may fill the queue": 5,
    "first come, first served": 8,
    "what runs can be given up": 16,
    "results go before their time": 1,
    "samples that died with their ranks are not begun again": 21,
}
"""The first seed that showed it when it was looked for last; 0 for the others."""


@contextmanager
def without(safeguard: str) -> Iterator[None]:
    seams = SEAMS.get(safeguard, [])
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in seams]
    for owner, name, replacement in seams:
        setattr(owner, name, replacement)
    try:
        yield
    finally:
        for owner, name, original in before:
            setattr(owner, name, original)
