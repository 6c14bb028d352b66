"""The training server's safeguards, each taken out in turn. The simulation must notice every one of them.

Those of the journal are not among them: `tests/sim/register` takes them out; others stand behind them here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from strata.train.core import decide, future, inflight, ops, sampling_slices
from strata.train.core.client_commands import AbortOperation, Done, SubmitOperation
from strata.train.core.facts import OperationFinished
from strata.train.core.future import OPEN, FutureStore, OperationFuture
from strata.train.core.inputs import ClientCommand, Decision, DispatchNext, Input, RanksAttached
from strata.train.core.lookup import find_future
from strata.train.core.sampling import AddedSample, SampleOperation
from strata.train.core.scheduler import QueuedOperation, Scheduler
from strata.train.core.sequence import SequenceCheck, SequenceWindow
from strata.train.core.state import TrainState
from strata.train.orchestrator import rank_session, replay_reader, results
from strata.train.orchestrator.orchestrator import Orchestrator
from strata.train.orchestrator.state_store import StateStore
from tests.support.fake_ranks import FakeRanks

Ablation = tuple[Any, str, Callable[..., Any]]


def _not_awaited(kind: type[DispatchNext | SubmitOperation]) -> Callable[..., Any]:
    async def commit(self: StateStore, request: Input) -> Decision:
        if not isinstance(request.command if isinstance(request, ClientCommand) else request, kind):
            return await _commit(self, request)
        decision, durable = self.submit_nowait(request)
        if durable is not None:
            durable.add_done_callback(lambda done: None if done.cancelled() else done.exception())
        return decision

    return commit


def _as_they_come(self: SequenceWindow, seq: int) -> range:
    _release(self, seq)
    return range(seq, seq + 1)


def _any_content(self: SequenceWindow, seq: int, digest: str, known: str | None) -> SequenceCheck:
    return SequenceCheck.DUPLICATE if known is not None else _check(self, seq, digest, known)


async def _composed_anew(*args: Any, **named: Any) -> AsyncIterator[Any]:
    async for past in _dispatches(*args, **named):
        rows = [list(reversed(rank)) for rank in past.dispatch.rows][::-1]
        yield past._replace(dispatch=msgspec.structs.replace(past.dispatch, rows=rows))


async def _given_up_too(*args: Any, **named: Any) -> AsyncIterator[Any]:
    async for each in _dispatches(*args, **{**named, "failed": set()}):
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


def _first_come(self: Scheduler, account: Any) -> QueuedOperation | None:
    heads = [head for tenant in account.ring for head in self._heads(tenant)]
    first = min(heads, key=lambda head: head.turn, default=None)
    if first is not None:
        self._charge(account, first)
    return first


def _soon_overdue(self: FutureStore, now_s: float, *, ttl_s: float, keep: int) -> float | None:
    return _overdue(self, now_s, ttl_s=ttl_s / 20, keep=keep)


def _given_up_while_it_runs(state: TrainState, tenant: str, command: AbortOperation, at_s: float) -> Decision:
    found = find_future(state, tenant, command.future_id)
    if found.status not in OPEN or not isinstance(found.operation, ops.Sequenced):
        return _abort(state, tenant, command, at_s)
    result = ops.Failed("cancelled", "cancelled by the client")
    return Decision(Done(), (OperationFinished(command.future_id, result, at_s),), (command.future_id,))


async def _at_once(store: StateStore) -> None:
    return


def _same_as_before(state: TrainState, request: RanksAttached) -> Decision:
    return Decision(Done())


def _anybodys(state: TrainState, tenant: str, future_id: str) -> OperationFuture:
    found = state.futures.get(future_id)
    return found or find_future(state, tenant, future_id)


async def _not_quarantined(self: Orchestrator, context: Any, attached: Any) -> None:
    context.backend.close()


async def _fine(self: Orchestrator, context: Any, attached: Any) -> None:
    return None


def _nothing_pending(state: TrainState, after: int) -> dict[str, ops.Operation]:
    return {}


def _from_the_start(state: TrainState, future_id: str, sample: SampleOperation, *, routing: bool) -> AddedSample:
    return msgspec.structs.replace(_added(state, future_id, sample, routing=routing), drawn={})


def _coming_is_open(state: TrainState, future_id: str, sample: SampleOperation) -> bool:
    return sample.sampler_id in state.samplers


def _never_stale(state: TrainState, dispatch: Any, results: Any, at_s: float) -> Sequence[OperationFinished]:
    return ()


_added = inflight.added_sample
_commit = StateStore.commit
_release = SequenceWindow.release
_check = SequenceWindow.check
_dispatches = replay_reader.completed_dispatches
_answer = FakeRanks._execute_once
_overdue = FutureStore.overdue
_abort = decide._abort

SEAMS: dict[str, list[Ablation]] = {
    "dispatches are sent before they are durable": [(StateStore, "commit", _not_awaited(DispatchNext))],
    "operations are acknowledged before they are durable": [(StateStore, "commit", _not_awaited(SubmitOperation))],
    "operations of a model run out of sequence": [(SequenceWindow, "release", _as_they_come)],
    "a sequence number may be used for two operations": [(SequenceWindow, "check", _any_content)],
    "replayed dispatches are composed again": [(rank_session, "completed_dispatches", _composed_anew)],
    "failed dispatches are replayed": [(rank_session, "completed_dispatches", _given_up_too)],
    "new ranks do not replay": [(rank_session, "completed_dispatches", _nothing_of_old)],
    "rank 0 applies a dispatch twice": [(FakeRanks, "_execute_once", _once_more)],
    "a tenant may fill the queue": [(decide, "admit", _always_admitted), (sampling_slices, "admit", _always_admitted)],
    "first come, first served": [(Scheduler, "_next", _first_come)],
    "results expire before their TTL": [(FutureStore, "overdue", _soon_overdue)],
    "running operations can be cancelled": [
        (decide, "_abort", _given_up_while_it_runs),
        (future, "SAMPLES_ONLY", frozenset()),  # type: ignore[list-item]
    ],
    "a failure is sent before it is durable": [(results, "_wait_durable", _at_once)],
    "samples of lost ranks are not started again": [(sampling_slices, "attach_ranks", _same_as_before)],
    "in-flight samples of lost ranks begin again": [(inflight, "added_sample", _from_the_start)],
    "in-flight samples do not wait for the save of their sampler": [
        (sampling_slices, "_ready", _coming_is_open),
        (sampling_slices, "_is_open", lambda state, sample: sample.sampler_id in state.samplers),
    ],
    "samples that became too stale run on": [(inflight, "cancel_stale", _never_stale)],
    "any tenant may read any result": [(results, "find_future", _anybodys)],
    "diverged ranks are used": [
        (Orchestrator, "_quarantine", _not_quarantined),
        (Orchestrator, "_validate_group", _fine),
    ],
    "operations that were pending at a snapshot are lost": [(rank_session, "pending_operations", _nothing_pending)],
}
EVERY = [*SEAMS]
SHOWN_BY = {
    "rank 0 applies a dispatch twice": 11,
    "a tenant may fill the queue": 5,
    "first come, first served": 8,
    "running operations can be cancelled": 16,
    "results expire before their TTL": 1,
    "samples of lost ranks are not started again": 21,
    "in-flight samples do not wait for the save of their sampler": 3,
    "samples that became too stale run on": 10,
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
