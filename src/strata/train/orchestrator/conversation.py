"""One group of ranks, from its greeting to its end: told what it has not done, then whatever comes, and heard.

This is the whole recovery: a group says which dispatch it applied last, and is told everything after that again, in the
same words. What it applied already it answers from memory; a group that started anew does all of it once more.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import msgspec

from strata.base import log
from strata.base.errors import Code, StrataError
from strata.base.failpoint import failpoint
from strata.journal.port import Journal
from strata.train.core import commands, ops
from strata.train.core.inputs import Answer, AnswerQuantum, Dispatching, DispatchNext, GiveUp
from strata.train.core.pace import Pace
from strata.train.core.state import Dispatch
from strata.train.core.views import tokens_of
from strata.train.orchestrator.backend import RemoteBackend
from strata.train.orchestrator.history import dispatches
from strata.train.orchestrator.ledger import KEEP_INLINE_BYTES, Ledger
from strata.train.orchestrator.request_processor import RequestProcessor, sampled
from strata.train.settings import ServerSettings

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


@dataclass(frozen=True)
class Lost:
    """The connection broke. `doing` is the dispatch the ranks were at, if they were at any."""

    doing: int | None


@dataclass(frozen=True)
class Stuck:
    """This dispatch has taken longer than an operation may."""

    doing: int


class Conversation:
    def __init__(self, parts: Parts, attached: commands.Attached) -> None:
        self._parts = parts
        self._attached = attached
        self._known = parts.ledger.state.settled
        """Results up to this dispatch are there: of what is told again before it, the answers are not news."""
        parts.ledger.caught_up = attached.applied >= self._known
        self._told: dict[int, tuple[str, int]] = {}
        """Told and not answered: kind and tokens."""
        self._moved = asyncio.Event()
        self._since_s = 0.0
        """When the ranks can have begun with the oldest of those."""

    async def hold(self) -> Lost | Stuck:
        """Until it ends. STALE if somebody else leads now."""
        tell, hear = asyncio.create_task(self._tell()), asyncio.create_task(self._hear())
        lost, watch = asyncio.create_task(self._parts.backend.lost()), asyncio.create_task(self._watch())
        tasks = (tell, hear, lost, watch)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        for task in (tell, hear):
            if not task.cancelled():
                task.result()
        if not watch.cancelled():
            return Stuck(watch.result())
        return Lost(min(self._told, default=None))

    async def _tell(self) -> None:
        parts, ranks = self._parts, self._attached.world_size
        async for dispatch, operations in self._owed():
            while len(self._told) >= parts.settings.limits.max_running_requests:
                self._moved.clear()
                await self._moved.wait()
            await self._send(dispatch, operations)
        while any(number <= self._known for number in self._told):
            self._moved.clear()
            await self._moved.wait()
        parts.ledger.caught_up = True
        while True:
            parts.ledger.changed.clear()
            now_s = parts.ledger.clock.wall_s()
            outcome = await parts.ledger.commit(DispatchNext(ranks, self._attached.model.max_context, now_s))
            if isinstance(outcome.reply, Dispatching):
                failpoint("train.orchestrator.dispatch_durable")
                await self._send(*self._complete(outcome.reply.dispatch))
            elif not outcome.facts:
                await parts.ledger.changed.wait()

    async def _owed(self) -> AsyncIterator[tuple[Dispatch, list[ops.Operation]]]:
        """What this group has to be told because it was told before, to it or to another."""
        state, applied = self._parts.ledger.state, self._attached.applied
        unanswered = sorted(state.dispatches.items())
        if applied < self._known:
            _log.info("the ranks start anew and catch up", applied=applied, through=self._known)
            async for each in dispatches(
                self._parts.journal,
                self._parts.settings.stream,
                after=applied,
                through=self._known,
                given_up=state.given_up,
            ):
                yield each
        # The conversation before may have ended between a dispatch and its fact: what the journal may never have must
        # not be done.
        await self._parts.ledger.settled()
        for number, dispatch in unanswered:
            if number in state.dispatches:
                yield self._complete(dispatch)

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

    async def _send(self, dispatch: Dispatch, operations: list[ops.Operation]) -> None:
        parts = self._parts
        try:
            work = await parts.processor.work(dispatch, operations, self._attached.world_size)
        except StrataError as error:
            if error.code not in (Code.NOT_FOUND, Code.CORRUPT) or dispatch.number <= self._known:
                raise
            _log.error("a payload is lost", number=dispatch.number, reason=str(error))
            await parts.ledger.commit(GiveUp(dispatch.number, str(error), parts.ledger.clock.wall_s()))
            return
        if not self._told:
            self._since_s = parts.ledger.clock.monotonic_s()
        kind = "quantum" if dispatch.quantum is not None else str(operations[0].__struct_config__.tag)
        self._told[dispatch.number] = kind, sum(map(tokens_of, operations))
        self._moved.set()
        await parts.backend.send(dispatch.number, work, parts.ledger.durable)
        failpoint("train.orchestrator.dispatch_sent")

    async def _hear(self) -> None:
        parts = self._parts
        while True:
            reply = await parts.backend.receive()
            told = self._told.pop(reply.number, None)
            if told is None:
                _log.info("dropped an answer that nobody waits for", number=reply.number)
                continue
            self._since_s = parts.ledger.clock.monotonic_s()
            self._moved.set()
            parts.pace.note(*told, reply.timing.total_s)
            if reply.number <= self._known:
                continue
            room = KEEP_INLINE_BYTES - parts.ledger.state.futures.result_bytes
            inline_bytes = min(ops.INLINE_BYTES, max(room, 0))
            results = [await parts.processor.keep(result, inline_bytes=inline_bytes) for result in _results(reply)]
            failpoint("train.orchestrator.answer_heard")
            parts.ledger.put(_answer(reply, results, parts.ledger.clock.wall_s()))

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


def _results(reply: commands.Reply) -> Sequence[ops.Result]:
    return reply.results if reply.sampled is None else [sampled(one.outcome) for one in reply.sampled.ended]


def _answer(reply: commands.Reply, results: Sequence[ops.Result], at_s: float) -> Answer | AnswerQuantum:
    if reply.sampled is None:
        return Answer(reply.number, results, at_s)
    names = [one.request_id for one in reply.sampled.ended]
    return AnswerQuantum(reply.number, [*zip(names, results, strict=True)], reply.sampled.requests, at_s)
