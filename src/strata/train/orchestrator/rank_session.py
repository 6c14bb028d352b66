"""`RankSession`: one session with a group of ranks: attach, restore of the snapshot, replay, dispatch, timeout,
divergence, and how its end is described.

Recovery is part of every session. A group reports the last dispatch it applied, and the session replays every dispatch
after that one in its original composition. Rank 0 answers what it applied already from memory. A new group first
restores the newest snapshot of the models, if there is one, and then replays what came after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Final, NamedTuple, assert_never

import msgspec

from strata.base import log, trace
from strata.base.errors import Code, StrataError
from strata.base.failpoint import failpoint
from strata.journal.port import Journal
from strata.train.core import commands, inflight, ops
from strata.train.core.facts import ReplayCompared
from strata.train.core.inputs import (
    CommitSnapshot,
    CompareReplay,
    CompleteDispatch,
    CompleteSlice,
    CompleteSnapshotCopy,
    Dispatching,
    DispatchNext,
    FailDispatch,
    RanksAttached,
    RejectSnapshot,
)
from strata.train.core.ops import tokens_of
from strata.train.core.out_of_memory import RowLimit
from strata.train.core.replay import CompletedDispatch, divergence
from strata.train.core.router_replay import recorded_for
from strata.train.core.sampling import SampleOperation
from strata.train.core.snapshots import pending_operations, recovery_point, retained_numerics
from strata.train.core.state import Dispatch, ModelSnapshot, TrainState
from strata.train.orchestrator.backend import RemoteBackend
from strata.train.orchestrator.recorded_routing import name_recorded
from strata.train.orchestrator.replay_comparison import ReplayComparison, report_differences
from strata.train.orchestrator.replay_reader import completed_dispatches
from strata.train.orchestrator.request_processor import RequestProcessor, retry_unavailable, sample_result
from strata.train.orchestrator.state_store import MAX_INLINE_RESULT_BYTES, StateStore
from strata.train.payload import Payloads
from strata.train.settings import ServerSettings
from strata.train.status.throughput import ThroughputEstimate

SNAPSHOT: Final = "snapshot"
_PAYLOAD_LOST: Final = (Code.NOT_FOUND, Code.CORRUPT, Code.UNAVAILABLE)
_log = log.get(__name__)


@dataclass
class OrchestratorContext:
    """The services of a leading orchestrator. They outlive a session and serve the next one."""

    settings: ServerSettings
    journal: Journal
    store: StateStore
    backend: RemoteBackend
    processor: RequestProcessor
    throughput: ThroughputEstimate
    attached: commands.AttachReply | None = None
    """The group of ranks that is in a session."""
    notify: Callable[[str], None] = lambda _: None
    """Notifies the launcher."""

    @property
    def base(self) -> commands.ModelInfo | None:
        return self.attached.model if self.attached is not None else None


class InFlight(NamedTuple):
    """A dispatch that was sent to the ranks and has no reply yet."""

    kind: str
    tokens: int
    longest_row: int = 0
    """Tokens of the longest row of a backward pass; 0 if there is none."""


@dataclass(frozen=True)
class Disconnected:
    """The connection broke. `dispatch` is the one that the ranks were running, if any."""

    dispatch: int | None
    restoring: bool = False
    """They were restoring the snapshot of that dispatch."""


@dataclass(frozen=True)
class TimedOut:
    """This dispatch has taken longer than an operation may."""

    dispatch: int
    restoring: bool = False


@dataclass(frozen=True)
class Diverged:
    """The orchestrator failed this dispatch, and these ranks had applied it."""

    dispatch: int
    restoring: bool = False


@dataclass(frozen=True)
class OutOfMemory:
    """These ranks lack the memory to replay a dispatch that earlier ranks completed, so their models differ."""

    dispatch: int
    reason: str
    restoring: bool = False


SessionEnd = Disconnected | TimedOut | Diverged | OutOfMemory


def describe_end(end: SessionEnd | None) -> str:
    """Says why a session ended, for people; None if the orchestrator itself failed in it."""
    match end:
        case Disconnected(dispatch=None):
            return "the ranks disconnected while they were idle"
        case Disconnected():
            return f"the ranks disconnected in dispatch {end.dispatch}"
        case TimedOut():
            return f"dispatch {end.dispatch} took too long"
        case Diverged():
            return f"dispatch {end.dispatch} had failed, and these ranks had applied it"
        case OutOfMemory():
            return f"the ranks lacked the memory to replay dispatch {end.dispatch}"
        case None:
            return "the session with the ranks failed"
        case _:
            assert_never(end)


class RankSession:
    def __init__(self, context: OrchestratorContext, attached: commands.AttachReply, rows: RowLimit) -> None:
        self._context = context
        self._attached = attached
        self._data_ranks = attached.data_ranks or attached.world_size
        self._rows = rows
        self._applied = attached.applied
        self._replay_through = context.store.state.settled_through
        """Dispatches up to this one have results: replaying them has to give the same outcome."""
        context.store.replayed = attached.applied >= self._replay_through
        self._replaying: dict[int, CompletedDispatch] = {}
        """Replayed dispatches without a reply, each with its first outcome."""
        payloads = Payloads(context.settings.payloads)
        self._comparison = ReplayComparison(payloads, attached.numerics)
        self._in_flight: dict[int, InFlight] = {}
        self._progressed = asyncio.Event()
        self._oldest_since_s = 0.0
        """When the ranks can have begun the oldest dispatch in flight."""
        self._restoring: asyncio.Future[commands.Restored] | None = None
        self._woken = -1
        """The turn on shared devices for which the ranks were woken."""
        self._written = attached.written
        """A snapshot that is on the disk and not yet in the journal."""

    async def run(self) -> SessionEnd:
        """Run until the session ends. STALE if another process leads now, CORRUPT if a replay diverged.

        After an error the group is validated again before the next session: without a completed replay it is rejected.
        """
        dispatch, receive = asyncio.create_task(self._dispatch_loop()), asyncio.create_task(self._receive_loop())
        lost = asyncio.create_task(self._context.backend.lost())
        timeout = asyncio.create_task(self._watch_timeout())
        tasks = (dispatch, receive, lost, timeout)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        if not receive.cancelled():
            return receive.result()
        if not dispatch.cancelled():
            return dispatch.result()
        if not timeout.cancelled():
            return TimedOut(timeout.result(), self._restoring is not None)
        return Disconnected(min(self._in_flight, default=None), self._restoring is not None)

    async def _dispatch_loop(self) -> Diverged:
        store, ranks = self._context.store, self._data_ranks
        await self._restore_newest()
        await self._replay()
        await self._compare_replay()
        # Not earlier: the next session must not take this group for replayed. Not later: the resent dispatches below
        # are without the slice and the snapshot that an earlier group was running.
        await store.commit(RanksAttached(self._attached.group, self._attached.numerics))
        store.replayed = True
        store.telemetry.record_replayed()
        state = store.state
        for number, dispatch in sorted(state.dispatches.items()):
            await self._wait_for_capacity()
            if number in state.dispatches:
                await self._send(*self._with_operations(dispatch))
            if number in state.failed_dispatches and number <= self._attached.applied:
                return Diverged(number)
        while True:
            store.dispatchable.clear()
            now_s = store.clock.wall_s()
            model = self._attached.model
            request = DispatchNext(
                ranks, model.max_context, now_s, self._rows.of(model.row_tokens), model.one_document_per_row
            )
            decision = await store.commit(request)
            if isinstance(decision.reply, Dispatching):
                failpoint("train.orchestrator.dispatch_durable")
                await self._send(*self._with_operations(decision.reply.dispatch))
            elif not decision.facts:
                await store.dispatchable.wait()

    async def _restore_newest(self) -> None:
        """Restore a new group from the recovery point: the newest snapshot that is as it was written."""
        store, rejected = self._context.store, set[int]()
        while self._applied == 0 and (snapshot := recovery_point(store.state, rejected)) is not None:
            restored = await self._restore(snapshot)
            if restored.refused is None:
                self._applied = snapshot.number
                store.replayed = self._applied >= self._replay_through
                store.telemetry.record_restored(snapshot.number)
                _log.info("model_snapshot_restored", number=snapshot.number, through=self._replay_through)
                return
            _log.error("model_snapshot_rejected", number=snapshot.number, name=snapshot.name, reason=restored.refused)
            rejected.add(snapshot.number)
            if restored.damaged:
                await store.commit(RejectSnapshot(snapshot.number, restored.refused))

    async def _restore(self, snapshot: ModelSnapshot) -> commands.Restored:
        self._restoring = asyncio.get_running_loop().create_future()
        self._oldest_since_s = self._context.store.clock.monotonic_s()
        self._in_flight[snapshot.number] = InFlight("restore", 0)
        self._progressed.set()
        folder = self._context.settings.snapshot_folder / snapshot.name
        await self._context.backend.restore(snapshot.number, folder, snapshot.digest)
        restored = await self._restoring
        self._restoring = None
        return restored

    async def _replay(self) -> None:
        """Send the dispatches that have results and that neither this group nor its snapshot has applied."""
        context, applied, replayed = self._context, self._applied, 0
        # An earlier session may have ended between a dispatch and its fact: the ranks must not apply what the journal
        # may never have.
        await context.store.wait_durable()
        if applied >= self._replay_through:
            return
        _log.info("replay_started", applied=applied, through=self._replay_through)
        async for completed in completed_dispatches(
            context.journal,
            context.settings.stream,
            after=applied,
            through=self._replay_through,
            failed=context.store.state.failed_dispatches,
            pending=pending_operations(context.store.state, applied),
            numerics=retained_numerics(context.store.state),
        ):
            await self._wait_for_capacity()
            self._replaying[completed.dispatch.number] = completed
            await self._send(completed.dispatch, completed.operations)
            replayed += 1
        await self._wait_for_capacity(1)
        _log.info("replay_finished", dispatches=replayed, through=self._replay_through)

    async def _compare_replay(self) -> None:
        """Journal how far the replay was from the first run. The models that it stops are not trained from here on."""
        store, group = self._context.store, self._attached
        for number, dispatch in store.state.dispatches.items():
            # An orchestrator that died may have sent these results to clients before they were durable.
            if group.applied < number <= store.inherited_through and dispatch.slice is None:
                futures = [store.state.futures.get(each) for each in dispatch.future_ids]
                self._comparison.add_lost([each.operation for each in futures if each is not None and each.operation])
        models = self._comparison.models
        request = CompareReplay(group.group, self._replay_through, models, store.clock.wall_s())
        decision = await store.commit(request)
        stopped = [each for fact in decision.facts if isinstance(fact, ReplayCompared) for each in fact.stopped]
        store.telemetry.record_comparison(models)
        report_differences(models, stopped)

    async def _wait_for_capacity(self, limit: int | None = None) -> None:
        """Return when fewer dispatches than the limit are in flight."""
        while len(self._in_flight) >= (limit or self._context.settings.limits.max_running_requests):
            self._progressed.clear()
            await self._progressed.wait()

    def _with_operations(self, dispatch: Dispatch) -> tuple[Dispatch, list[ops.Operation]]:
        """A dispatch with its operations; a sampling slice without the samples that were cancelled since."""
        futures = self._context.store.state.futures
        operations = []
        if dispatch.slice is not None:
            open_ids = [each for each in dispatch.future_ids if (future := futures.get(each)) and future.operation]
            dispatch = msgspec.structs.replace(dispatch, future_ids=open_ids)
        for future_id in dispatch.future_ids:
            dispatched = futures.get(future_id)
            assert dispatched is not None, f"{future_id} was dispatched and does not exist"
            assert dispatched.operation is not None, f"{future_id} was dispatched and has ended"
            operations.append(dispatched.operation)
        return dispatch, operations

    async def _send(self, dispatch: Dispatch, operations: Sequence[ops.Operation]) -> None:
        context, store = self._context, self._context.store
        try:
            work = await self._build_work(dispatch, operations)
        except StrataError as error:
            if error.code not in _PAYLOAD_LOST or dispatch.number <= self._replay_through:
                raise
            _log.error("dispatch_payload_lost", number=dispatch.number, reason=str(error))
            await store.commit(FailDispatch(dispatch.number, str(error), store.clock.wall_s()))
            return
        if not self._in_flight:
            self._oldest_since_s = store.clock.monotonic_s()
        tokens = sum(map(tokens_of, operations)) or len(operations)
        await self._take_devices()
        self._in_flight[dispatch.number] = InFlight(_kind(dispatch, operations), tokens, _longest(work, operations))
        self._progressed.set()
        if dispatch.number > self._replay_through:
            store.telemetry.record_sent(store.state, dispatch.number, dispatch.future_ids)
        else:
            store.telemetry.record_replay()
        # One dispatch may serve several clients: its span is in the trace of the first and names the others.
        with _dispatch_span(dispatch.number, store.telemetry.traces_of(dispatch.future_ids)):
            await context.backend.send(dispatch.number, work, store.durable_through, trace.traceparent())
        failpoint("train.orchestrator.dispatch_sent")

    async def _take_devices(self) -> None:
        """Wake the ranks in each turn that they have on shared devices: the fact of it is durable, because the dispatch
        is. Ranks that a client put to sleep stay so."""
        context, state = self._context, self._context.store.state
        turn = state.current_turn
        if turn is None or state.asleep:
            return
        # A request of the next turn has counted up, and this turn is still theirs.
        taken = turn.number - turn.leaving
        if taken == self._woken:
            return
        assert turn.side == "ranks", "nothing is dispatched while engines have the devices"
        reply = await context.backend.request(commands.TakeDevices(), context.settings.limits.operation_timeout_s)
        if reply.failure:
            raise StrataError(Code.UNAVAILABLE, f"the ranks cannot take their devices: {reply.failure}")
        self._woken = taken

    async def _build_work(self, dispatch: Dispatch, operations: Sequence[ops.Operation]) -> commands.Work:
        context = self._context
        if dispatch.snapshot:
            return commands.TakeSnapshot(str(context.settings.snapshot_folder / dispatch.path))
        state = context.store.state
        added = []
        if dispatch.slice is not None:
            added = [
                inflight.added_sample(state, future_id, operation, routing=bool(recorded_for(state, operation)))
                for future_id, operation in zip(dispatch.future_ids, operations, strict=True)
                if isinstance(operation, SampleOperation)
            ]
        work = await retry_unavailable(
            lambda: context.processor.work(dispatch, operations, self._data_ranks, added),
            context.store.clock,
            context.settings.limits.operation_timeout_s,
        )
        if isinstance(work, commands.PassCommand) and dispatch.number <= self._replay_through:
            return msgspec.structs.replace(work, replayed=True)
        return work

    async def _receive_loop(self) -> OutOfMemory:
        while True:
            self._commit_snapshot()
            match await self._context.backend.receive():
                case commands.DispatchReply() as reply:
                    if (end := await self._check_replay(reply)) is not None:
                        return end
                    await self._on_reply(reply)
                case commands.SnapshotWritten() as written:
                    self._written = written
                case commands.SampleProgress(parts=parts):
                    for future_id, part in parts:
                        self._context.store.record_tokens(future_id, part)
                case commands.Restored() as restored:
                    self._in_flight.pop(restored.number, None)
                    self._progressed.set()
                    if self._restoring is not None and not self._restoring.done():
                        self._restoring.set_result(restored)

    async def _check_replay(self, reply: commands.DispatchReply) -> OutOfMemory | None:
        """Compare with the first outcome before anything can take this group for replayed."""
        completed = self._replaying.pop(reply.number, None)
        if completed is None:
            return None
        error = divergence(completed, reply.results)
        if error is not None and error.code is not Code.EXHAUSTED:
            raise error
        if error is not None:
            return OutOfMemory(reply.number, error.message)
        await self._comparison.add(completed, reply.results)
        return None

    async def _on_reply(self, reply: commands.DispatchReply) -> None:
        context, store = self._context, self._context.store
        sent = self._in_flight.pop(reply.number, None)
        if sent is None:
            _log.info("unexpected_reply_dropped", number=reply.number)
            return
        self._oldest_since_s = store.clock.monotonic_s()
        self._progressed.set()
        replayed = reply.number <= self._replay_through
        if not replayed:
            store.telemetry.record_reply(reply)
        failure = _first_failure(reply.results)
        if sent.kind == SNAPSHOT and not replayed:
            store.submit_nowait(CompleteSnapshotCopy(reply.number, failure))
            return
        context.throughput.record(sent.kind, sent.tokens, reply.timing.total_s)
        if sent.longest_row and failure is None:
            self._rows.succeeded(sent.longest_row)
        if replayed:
            return
        free_bytes = MAX_INLINE_RESULT_BYTES - store.state.futures.result_bytes
        inline_bytes = min(ops.INLINE_BYTES, max(free_bytes, 0))
        results = [
            await context.processor.keep(result, inline_bytes=inline_bytes) for result in _results(store.state, reply)
        ]
        failpoint("train.orchestrator.answer_heard")
        store.submit_nowait(_completion(reply, results, store.clock.wall_s()))

    def _commit_snapshot(self) -> None:
        """Commit a written snapshot once every dispatch up to it has results; after a restart they are resent."""
        store, written = self._context.store, self._written
        if written is None or store.state.settled_through < written.number:
            return
        self._written = None
        failpoint("train.orchestrator.snapshot_heard")
        if written.trouble is not None:
            _log.error("model_snapshot_failed", number=written.number, reason=written.trouble)
        decision, _ = store.submit_nowait(CommitSnapshot(written, store.clock.wall_s()))
        if decision.facts and written.trouble is None:
            self._context.notify(f"snapshot {written.number}")
            _log.info(
                "model_snapshot_committed",
                number=written.number,
                bytes=written.size,
                held_s=round(written.held_s, 4),
                written_s=round(written.written_s, 3),
            )

    async def _watch_timeout(self) -> int:
        """Return the dispatch that takes too long. Only the oldest can: the others wait behind it."""
        limit_s, clock = self._context.settings.limits.operation_timeout_s, self._context.store.clock
        while True:
            left_s = self._oldest_since_s + limit_s - clock.monotonic_s() if self._in_flight else None
            if left_s is not None and left_s <= 0:
                return min(self._in_flight)
            self._progressed.clear()
            try:
                async with asyncio.timeout(left_s):
                    await self._progressed.wait()
            except TimeoutError:
                continue


def _dispatch_span(number: int, traces: Sequence[str]) -> AbstractContextManager[trace.TraceSpan | None]:
    if not traces:
        return nullcontext()
    return trace.span("dispatch", kind="producer", parent=traces[0], links=traces[1:], dispatch=number)


def _kind(dispatch: Dispatch, operations: Sequence[ops.Operation]) -> str:
    if dispatch.snapshot:
        return SNAPSHOT
    return "slice" if dispatch.slice is not None else ops.kind_of(operations[0])


def _longest(work: commands.Work, operations: Sequence[ops.Operation]) -> int:
    """A forward pass needs far less memory, so only rows with a backward pass count."""
    if not isinstance(work, commands.PassCommand) or work.forward_only:
        return 0
    lengths = [operation.lengths for operation in operations if isinstance(operation, ops.ForwardBackward)]
    return max((sum(lengths[at.item][at.datum] for at in row) for rank in work.rows for row in rank), default=0)


def _results(state: TrainState, reply: commands.DispatchReply) -> Sequence[ops.Result]:
    if reply.sampled is None:
        return reply.results
    return [name_recorded(state, ended, sample_result(ended.outcome)) for ended in reply.sampled.ended]


def _first_failure(results: Sequence[ops.Result]) -> str | None:
    return next((result.message for result in results if isinstance(result, ops.Failed)), None)


def _completion(
    reply: commands.DispatchReply, results: Sequence[ops.Result], at_s: float
) -> CompleteDispatch | CompleteSlice:
    if reply.sampled is None:
        return CompleteDispatch(reply.number, results, at_s, reply.timing.total_s)
    future_ids = [ended.request_id for ended in reply.sampled.ended]
    ended = [*zip(future_ids, results, strict=True)]
    return CompleteSlice(reply.number, ended, reply.sampled.requests, at_s, reply.sampled.drawn)
