"""One group of ranks, from its greeting to its end: told what it has not done, then whatever comes, and heard.

This is the whole recovery: a group says which dispatch it applied last, and is told everything after that again, in the
same words. What it applied already it answers from memory. A group that started anew first restores the newest snapshot
of the models, if there is one, and then does once more what came after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec

from strata.base import log
from strata.base.errors import Code, StrataError
from strata.base.failpoint import failpoint
from strata.journal.port import Journal
from strata.train.core import commands, ops
from strata.train.core.catching_up import Past, astray
from strata.train.core.inputs import (
    Answer,
    AnswerQuantum,
    AnswerSnapshot,
    CommitSnapshot,
    Dispatching,
    DispatchNext,
    GiveUp,
    Greet,
    RefuseSnapshot,
)
from strata.train.core.memory import RowLimit
from strata.train.core.pace import Pace
from strata.train.core.snapshots import pending_at, way_back
from strata.train.core.state import Dispatch, Snapshot
from strata.train.core.views import tokens_of
from strata.train.orchestrator.backend import RemoteBackend
from strata.train.orchestrator.history import dispatches
from strata.train.orchestrator.ledger import KEEP_INLINE_BYTES, Ledger
from strata.train.orchestrator.request_processor import RequestProcessor, sampled, waited_for
from strata.train.settings import ServerSettings

SNAPSHOT: Final = "snapshot"
_GONE: Final = (Code.NOT_FOUND, Code.CORRUPT, Code.UNAVAILABLE)
_log = log.get(__name__)


@dataclass(frozen=True)
class Parts:
    """What a conversation stands on, and the next one after it."""

    settings: ServerSettings
    journal: Journal
    ledger: Ledger
    backend: RemoteBackend
    processor: RequestProcessor
    pace: Pace


class Told(NamedTuple):
    kind: str
    tokens: int
    longest: int = 0
    """Tokens of the longest row on the way back, if there is one."""


@dataclass(frozen=True)
class Lost:
    """The connection broke. `doing` is the dispatch the ranks were at, if they were at any."""

    doing: int | None
    restoring: bool = False
    """They were at the snapshot of that dispatch."""


@dataclass(frozen=True)
class Stuck:
    """This dispatch has taken longer than an operation may."""

    doing: int
    restoring: bool = False


@dataclass(frozen=True)
class Spoiled:
    """This dispatch was given up, and these ranks had done it."""

    doing: int
    restoring: bool = False


@dataclass(frozen=True)
class Short:
    """Of memory: these ranks could not do this dispatch again, which others did. They are not the same without it."""

    doing: int
    reason: str
    restoring: bool = False


End = Lost | Stuck | Spoiled | Short


class Conversation:
    def __init__(self, parts: Parts, attached: commands.Attached, rows: RowLimit) -> None:
        self._parts = parts
        self._attached = attached
        self._rows = rows
        self._applied = attached.applied
        self._known = parts.ledger.state.settled
        """Results up to this dispatch are there: what is told again before it has to come out the same."""
        parts.ledger.caught_up = attached.applied >= self._known
        self._past: dict[int, Past] = {}
        """Of what is told again, what came of it before."""
        self._told: dict[int, Told] = {}
        """And not answered."""
        self._moved = asyncio.Event()
        self._since_s = 0.0
        """When the ranks can have begun with the oldest of those."""
        self._restoring: asyncio.Future[commands.Restored] | None = None
        self._written = attached.written
        """A snapshot that is on the disk and not yet in the journal."""

    async def hold(self) -> End:
        """Until it ends. STALE if somebody else leads now, CORRUPT if the ranks cannot be brought to where others were.

        After an error the ranks are judged anew: if nobody saw them catch up, nobody goes on with them.
        """
        tell, hear = asyncio.create_task(self._tell()), asyncio.create_task(self._hear())
        lost, watch = asyncio.create_task(self._parts.backend.lost()), asyncio.create_task(self._watch())
        tasks = (tell, hear, lost, watch)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        if not hear.cancelled():
            return hear.result()
        if not tell.cancelled():
            return tell.result()
        if not watch.cancelled():
            return Stuck(watch.result(), self._restoring is not None)
        return Lost(min(self._told, default=None), self._restoring is not None)

    async def _tell(self) -> Spoiled:
        parts, ranks = self._parts, self._attached.world_size
        await self._begin()
        await self._catch_up()
        # Not earlier: whoever hears from these ranks next must not take them for caught up. Not later: what is asked
        # again below is without the quantum and the snapshot that ranks before these were at.
        await parts.ledger.commit(Greet(self._attached.group))
        parts.ledger.caught_up = True
        parts.ledger.figures.caught_up()
        state = parts.ledger.state
        for number, dispatch in sorted(state.dispatches.items()):
            await self._room()
            if number in state.dispatches:
                await self._send(*self._complete(dispatch))
            if number in state.given_up and number <= self._attached.applied:
                return Spoiled(number)
        while True:
            parts.ledger.changed.clear()
            now_s = parts.ledger.clock.wall_s()
            model = self._attached.model
            given = DispatchNext(ranks, model.max_context, now_s, self._rows.of(model.row_tokens))
            outcome = await parts.ledger.commit(given)
            if isinstance(outcome.reply, Dispatching):
                failpoint("train.orchestrator.dispatch_durable")
                await self._send(*self._complete(outcome.reply.dispatch))
            elif not outcome.facts:
                await parts.ledger.changed.wait()

    async def _begin(self) -> None:
        """What a group that starts anew begins from: the newest snapshot that is as it was written."""
        ledger, refused = self._parts.ledger, set[int]()
        while self._applied == 0 and (snapshot := way_back(ledger.state, refused)) is not None:
            answer = await self._restore(snapshot)
            if answer.refused is None:
                self._applied = snapshot.number
                ledger.caught_up = self._applied >= self._known
                _log.info("restored a snapshot of the models", number=snapshot.number, through=self._known)
                return
            _log.error(
                "a snapshot of the models is refused", number=snapshot.number, name=snapshot.name, reason=answer.refused
            )
            refused.add(snapshot.number)
            if answer.damaged:
                await ledger.commit(RefuseSnapshot(snapshot.number, answer.refused))

    async def _restore(self, snapshot: Snapshot) -> commands.Restored:
        self._restoring = asyncio.get_running_loop().create_future()
        self._since_s = self._parts.ledger.clock.monotonic_s()
        self._told[snapshot.number] = Told("restore", 0)
        self._moved.set()
        place = self._parts.settings.snapshot_folder / snapshot.name
        await self._parts.backend.restore(snapshot.number, place, snapshot.digest)
        answer = await self._restoring
        self._restoring = None
        return answer

    async def _catch_up(self) -> None:
        """Tell this group what was told to others, has its results, and is not in the snapshot that it began from."""
        parts, applied, told = self._parts, self._applied, 0
        # The conversation before may have ended between a dispatch and its fact: what the journal may never have must
        # not be done.
        await parts.ledger.settled()
        if applied >= self._known:
            return
        _log.info("the ranks start anew and catch up", applied=applied, through=self._known)
        async for past in dispatches(
            parts.journal,
            parts.settings.stream,
            after=applied,
            through=self._known,
            given_up=parts.ledger.state.given_up,
            pending=pending_at(parts.ledger.state, applied),
        ):
            await self._room()
            self._past[past.dispatch.number] = past
            await self._send(past.dispatch, past.operations)
            told += 1
        await self._room(1)
        _log.info("the ranks have caught up", told=told, through=self._known)

    async def _room(self, most: int | None = None) -> None:
        """Return when fewer than that are told and not answered."""
        while len(self._told) >= (most or self._parts.settings.limits.max_running_requests):
            self._moved.clear()
            await self._moved.wait()

    def _complete(self, dispatch: Dispatch) -> tuple[Dispatch, list[ops.Operation]]:
        """With its operations. What was given up since does not belong to a quantum any longer."""
        futures = self._parts.ledger.state.futures
        found = []
        if dispatch.quantum is not None:
            here = [each for each in dispatch.future_ids if (known := futures.get(each)) and known.operation]
            dispatch = msgspec.structs.replace(dispatch, future_ids=here)
        for future_id in dispatch.future_ids:
            future = futures.get(future_id)
            assert future is not None, f"{future_id} was dispatched and does not exist"
            assert future.operation is not None, f"{future_id} was dispatched and has ended"
            found.append(future.operation)
        return dispatch, found

    async def _send(self, dispatch: Dispatch, operations: Sequence[ops.Operation]) -> None:
        parts = self._parts
        try:
            work = await self._work(dispatch, operations)
        except StrataError as error:
            if error.code not in _GONE or dispatch.number <= self._known:
                raise
            _log.error("what a dispatch needs is lost", number=dispatch.number, reason=str(error))
            await parts.ledger.commit(GiveUp(dispatch.number, str(error), parts.ledger.clock.wall_s()))
            return
        if not self._told:
            self._since_s = parts.ledger.clock.monotonic_s()
        tokens = sum(map(tokens_of, operations)) or len(operations)
        self._told[dispatch.number] = Told(_kind(dispatch, operations), tokens, _longest(work, operations))
        self._moved.set()
        if dispatch.number > self._known:
            parts.ledger.figures.sent(parts.ledger.state, dispatch.number, dispatch.future_ids)
        else:
            parts.ledger.figures.replayed()
        await parts.backend.send(dispatch.number, work, parts.ledger.durable)
        failpoint("train.orchestrator.dispatch_sent")

    async def _work(self, dispatch: Dispatch, operations: Sequence[ops.Operation]) -> commands.Work:
        parts = self._parts
        if dispatch.snapshot:
            return commands.TakeSnapshot(str(parts.settings.snapshot_folder / dispatch.path))
        futures = parts.ledger.state.futures
        tenants = [futures.tenant_of(each) for each in dispatch.future_ids] if dispatch.quantum is not None else ()
        work = await waited_for(
            lambda: parts.processor.work(dispatch, operations, self._attached.world_size, tenants),
            parts.ledger.clock,
            parts.settings.limits.operation_timeout_s,
        )
        if isinstance(work, commands.Pass) and dispatch.number <= self._known:
            return msgspec.structs.replace(work, replayed=True)
        return work

    async def _hear(self) -> Short:
        while True:
            self._commit_written()
            match await self._parts.backend.receive():
                case commands.Reply() as reply:
                    if (short := self._check(reply)) is not None:
                        return short
                    await self._take(reply)
                case commands.SnapshotWritten() as written:
                    self._written = written
                case commands.Restored() as restored:
                    self._told.pop(restored.number, None)
                    self._moved.set()
                    if self._restoring is not None and not self._restoring.done():
                        self._restoring.set_result(restored)

    def _check(self, reply: commands.Reply) -> Short | None:
        """Before anybody can take these ranks for caught up."""
        past = self._past.pop(reply.number, None)
        error = astray(past, reply.results) if past is not None else None
        if error is not None and error.code is not Code.EXHAUSTED:
            raise error
        return Short(reply.number, error.message) if error is not None else None

    async def _take(self, reply: commands.Reply) -> None:
        parts = self._parts
        told = self._told.pop(reply.number, None)
        if told is None:
            _log.info("dropped an answer that nobody waits for", number=reply.number)
            return
        self._since_s = parts.ledger.clock.monotonic_s()
        self._moved.set()
        if reply.number > self._known:
            parts.ledger.figures.answered(reply)
        if reply.number > self._known and told.kind == SNAPSHOT:
            failed = [each.message for each in reply.results if isinstance(each, ops.Failed)]
            parts.ledger.put(AnswerSnapshot(reply.number, failed[0] if failed else None))
            return
        parts.pace.note(told.kind, told.tokens, reply.timing.total_s)
        if told.longest and not any(isinstance(each, ops.Failed) for each in reply.results):
            self._rows.succeeded(told.longest)
        if reply.number <= self._known:
            return
        room = KEEP_INLINE_BYTES - parts.ledger.state.futures.result_bytes
        inline_bytes = min(ops.INLINE_BYTES, max(room, 0))
        results = [await parts.processor.keep(result, inline_bytes=inline_bytes) for result in _results(reply)]
        failpoint("train.orchestrator.answer_heard")
        parts.ledger.put(_answer(reply, results, parts.ledger.clock.wall_s()))

    def _commit_written(self) -> None:
        """Once all that the snapshot rests on has its results, which after a restart are asked for again first."""
        ledger, written = self._parts.ledger, self._written
        if written is None or ledger.state.settled < written.number:
            return
        self._written = None
        failpoint("train.orchestrator.snapshot_heard")
        if written.trouble is not None:
            _log.error("a snapshot of the models was not written", number=written.number, reason=written.trouble)
        given = CommitSnapshot(
            written.number,
            written.digest,
            written.size,
            written.held_s,
            written.written_s,
            ledger.clock.wall_s(),
            written.trouble,
        )
        outcome, _ = ledger.put(given)
        if outcome.facts and written.trouble is None:
            _log.info(
                "a snapshot of the models is there",
                number=written.number,
                bytes=written.size,
                held_s=round(written.held_s, 4),
                written_s=round(written.written_s, 3),
            )

    async def _watch(self) -> int:
        """Return the dispatch that takes too long. Only the oldest can: the others wait behind it."""
        limit_s, clock = self._parts.settings.limits.operation_timeout_s, self._parts.ledger.clock
        while True:
            left_s = self._since_s + limit_s - clock.monotonic_s() if self._told else None
            if left_s is not None and left_s <= 0:
                return min(self._told)
            self._moved.clear()
            try:
                async with asyncio.timeout(left_s):
                    await self._moved.wait()
            except TimeoutError:
                continue


def _kind(dispatch: Dispatch, operations: Sequence[ops.Operation]) -> str:
    if dispatch.snapshot:
        return SNAPSHOT
    return "quantum" if dispatch.quantum is not None else ops.kind_of(operations[0])


def _longest(work: commands.Work, operations: Sequence[ops.Operation]) -> int:
    """Without a way back a row needs far less memory, and says nothing of one that has it."""
    if not isinstance(work, commands.Pass) or work.forward_only:
        return 0
    lengths = [each.lengths for each in operations if isinstance(each, ops.ForwardBackward)]
    return max((sum(lengths[at.item][at.datum] for at in row) for rank in work.rows for row in rank), default=0)


def _results(reply: commands.Reply) -> Sequence[ops.Result]:
    return reply.results if reply.sampled is None else [sampled(one.outcome) for one in reply.sampled.ended]


def _answer(reply: commands.Reply, results: Sequence[ops.Result], at_s: float) -> Answer | AnswerQuantum:
    if reply.sampled is None:
        return Answer(reply.number, results, at_s)
    names = [one.request_id for one in reply.sampled.ended]
    return AnswerQuantum(reply.number, [*zip(names, results, strict=True)], reply.sampled.requests, at_s)
