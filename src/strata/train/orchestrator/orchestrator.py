"""`Orchestrator`: leads its journal, answers API servers, keeps the ranks at work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import msgspec

from strata.base import log
from strata.base.clock import Clock
from strata.base.errors import Code, StrataError
from strata.base.loop import every
from strata.journal.port import Journal
from strata.journal.replica import Replica
from strata.train.core import commands, messages
from strata.train.core.catching_up import unfit
from strata.train.core.inputs import GiveUp, RefuseSnapshot, RunOut
from strata.train.core.machine import TrainMachine
from strata.train.core.memory import RowLimit
from strata.train.core.pace import Pace
from strata.train.core.state import Rules
from strata.train.link.ports import ApiSide, Links, ZmqLinks
from strata.train.orchestrator.backend import RemoteBackend
from strata.train.orchestrator.conversation import Conversation, End, Lost, Parts, Short, Spoiled, Stuck
from strata.train.orchestrator.figures import Figures
from strata.train.orchestrator.ledger import Ledger, TrainReplica
from strata.train.orchestrator.questions import Questions
from strata.train.orchestrator.request_processor import RequestProcessor
from strata.train.orchestrator.storage import Storage, open_storage
from strata.train.orchestrator.trimming import Trimming
from strata.train.payload import Payloads
from strata.train.settings import ServerSettings

DEADLY: Final = 3
"""A dispatch in which so many groups of ranks died is not told to another one."""
QUANTUM: Final = 0
"""Stands for all quanta where their deaths are counted."""
EXPIRE_S: Final = 30.0
STORE_S: Final = 1.0
"""How often it is looked whether there is a checkpoint to copy, or to delete."""
SNAPSHOT_S: Final = 5.0
TRIM_S: Final = 0.05
"""At least between two turns; a turn waits until there is something to do."""
END_S: Final = 1.0
MAX_QUESTIONS: Final = 5_000
"""That may wait here at a time."""

_log = log.get(__name__)
Event = Callable[[str], None]
"""Told to whoever started this process: `leading`, `attached GROUP`, `lost GROUP`, `stuck GROUP`. A group that never
answered is `unknown`."""


class Orchestrator:
    def __init__(
        self,
        settings: ServerSettings,
        journal: Journal,
        clock: Clock,
        tell: Event,
        links: Callable[[ServerSettings], Links] = ZmqLinks,
    ) -> None:
        self._settings = settings
        self._journal = journal
        self._clock = clock
        self._tell = tell
        self._links = links
        self._attached: commands.Attached | None = None
        self._suspect: tuple[int, str] | None = None
        """The dispatch that a group may have died of, and that group."""
        self._deaths: dict[int, int] = {}
        self._died_in = 0
        """The last dispatch that a group may have died of."""
        self._condemned: set[str] = set()
        self._rows = RowLimit()
        self._answering: set[asyncio.Task[None]] = set()
        self._storage: Storage | None = None

    async def run(self, stop: asyncio.Event, holder: str, ranks_too: asyncio.Event) -> None:
        """Until told to stop, or the lead is lost: then with the reason. The ranks stay unless `ranks_too` is set."""
        replica: TrainReplica = Replica(
            self._journal, self._settings.stream, TrainMachine(rules_of(self._settings)), self._clock
        )
        standing = asyncio.create_task(replica.stand_by(holder, self._settings.server.lease_s))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait([standing, stopping], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not standing.done():
            standing.cancel()
            await asyncio.wait([standing])
            return
        standing.result()
        self._tell("leading")
        links = self._links(self._settings)
        figures = Figures(self._clock, self._settings.server.timelines)
        parts = self._parts(links, Ledger(replica, self._clock, figures))
        try:
            await self._lead(replica, parts, links, stop)
            if ranks_too.is_set():
                await self._end_ranks(parts)
        finally:
            parts.backend.close()
            links.close()
        if replica.failure is None:
            await parts.ledger.snapshot(self._settings.server.snapshot_every)
            await replica.resign()

    def _parts(self, links: Links, ledger: Ledger) -> Parts:
        settings = self._settings
        state = ledger.state
        self._storage = open_storage(settings, ledger)
        _log.info(
            "leading", generation=ledger.generation, dispatched=state.dispatched, unanswered=len(state.dispatches)
        )
        return Parts(
            settings=settings,
            journal=self._journal,
            ledger=ledger,
            backend=RemoteBackend(links, settings, self._clock, ledger.generation),
            processor=RequestProcessor(
                Payloads(settings.payloads),
                settings.checkpoints,
                self._storage.bring if self._storage is not None else None,
            ),
            pace=Pace(),
        )

    async def _lead(self, replica: TrainReplica, parts: Parts, links: Links, stop: asyncio.Event) -> None:
        apis = [links.api(parts.ledger.generation, number) for number in range(self._settings.server.api_servers)]
        every_s = self._settings.server.snapshot_every
        questions = Questions(parts, lambda: self._attached)
        trimming = Trimming(self._settings, self._journal, parts.ledger)
        reigning = asyncio.create_task(replica.lead_until_deposed(self._settings.server.lease_s), name="reign")
        working = [
            *(asyncio.create_task(self._listen(link, questions), name="listen") for link in apis),
            asyncio.create_task(self._keep_at_work(parts), name="ranks"),
            asyncio.create_task(every(EXPIRE_S, parts.ledger.expire, clock=self._clock), name="expire"),
            asyncio.create_task(
                every(self._settings.kept.sweep_s, questions.retention.run_once, clock=self._clock), name="retain"
            ),
            asyncio.create_task(
                every(questions.silence.every_s, questions.silence.run_once, clock=self._clock), name="silence"
            ),
            asyncio.create_task(questions.publisher.run(), name="endpoints"),
            asyncio.create_task(
                every(SNAPSHOT_S, lambda: parts.ledger.snapshot(every_s), clock=self._clock), name="snapshot"
            ),
            asyncio.create_task(every(TRIM_S, trimming.run_once, clock=self._clock), name="trim"),
        ]
        if self._storage is not None:
            storing = every(STORE_S, self._storage.run_once, clock=self._clock)
            working.append(asyncio.create_task(storing, name="store"))
        stopping = asyncio.create_task(stop.wait(), name="stop")
        tasks: list[asyncio.Task[object]] = [reigning, stopping, *working]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (*tasks, *self._answering):
                task.cancel()
            await asyncio.wait([*tasks, *self._answering])
            for link in apis:
                link.close()
        for task in working:
            if not task.cancelled():
                task.result()
        if not reigning.cancelled():
            raise reigning.result()

    async def _listen(self, link: ApiSide, questions: Questions) -> None:
        async def answer(request: messages.OrchestratorRequest) -> None:
            output = await questions.answer(request)
            link.send(messages.OrchestratorOutputs(request.request_id, output))

        while True:
            request = await link.receive()
            if len(self._answering) >= MAX_QUESTIONS:
                refused = messages.Refused(Code.EXHAUSTED, f"{MAX_QUESTIONS} questions wait already")
                link.send(messages.OrchestratorOutputs(request.request_id, refused))
                continue
            task = asyncio.create_task(answer(request))
            self._answering.add(task)
            task.add_done_callback(self._answered)

    def _answered(self, task: asyncio.Task[None]) -> None:
        self._answering.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a question was not answered", reason=repr(error))

    async def _keep_at_work(self, parts: Parts) -> None:
        """One group of ranks after the other."""
        while True:
            try:
                attached = await parts.backend.attach()
            except StrataError as error:
                if error.code is not Code.DEADLINE:
                    raise
                _log.error("the ranks are stuck", reason=str(error))
                self._tell("stuck unknown")
                continue
            reason = await self._judge(parts, attached)
            if reason is not None:
                _log.error("a group of ranks cannot be used", group=attached.group, reason=reason)
                await self._condemn(parts, attached)
                continue
            _log.info("attached", group=attached.group, ranks=attached.world_size, applied=attached.applied)
            self._attached = attached
            parts.ledger.figures.attached(attached.group)
            self._tell(f"attached {attached.group}")
            try:
                end = await Conversation(parts, attached, self._rows).hold()
            finally:
                self._attached = None
                parts.ledger.figures.lost()
            await self._after(parts, attached, end)

    async def _judge(self, parts: Parts, attached: commands.Attached) -> str | None:
        """Why this group must not be spoken to. Also settles what the group before it may have died of."""
        state = parts.ledger.state
        reason = "it was given up" if attached.group in self._condemned else None
        reason = reason or unfit(state, attached.group, attached.applied)
        if reason is not None:
            return reason
        suspect, self._suspect = self._suspect, None
        if suspect is not None and suspect[1] != attached.group and suspect[0] in state.dispatches:
            number = suspect[0]
            if attached.exhausted is not None and await self._run_out(parts, number, attached.exhausted):
                return None
            # A quantum is not told again but made anew: those that groups die of one after the other count as one.
            quantum = state.dispatches[number].quantum is not None
            counted = QUANTUM if quantum else number
            if quantum and state.last_quantum > self._died_in:
                self._deaths.pop(QUANTUM, None)
            self._died_in = number
            self._deaths[counted] = self._deaths.get(counted, 0) + 1
            if self._deaths[counted] >= DEADLY:
                self._deaths.pop(counted)
                reason = f"{DEADLY} groups of ranks died in this operation"
                await parts.ledger.commit(GiveUp(number, reason, self._clock.wall_s()))
        return None

    async def _run_out(self, parts: Parts, number: int, exhausted: commands.Exhausted) -> bool:
        """Whether it was a row of this dispatch. One death is enough then: others would die of it as well."""
        outcome = await parts.ledger.commit(RunOut(number, exhausted, self._clock.wall_s()))
        if not outcome.facts:
            return False
        _log.error("the ranks ran out of memory", dispatch=number, **msgspec.structs.asdict(exhausted))
        self._rows.ran_out(exhausted)
        return True

    async def _after(self, parts: Parts, attached: commands.Attached, end: End) -> None:
        if end.restoring and end.doing is not None:
            await self._note_restoring(parts, end.doing)
        match end:
            case Lost():
                _log.warning("the ranks are gone", group=attached.group, doing=end.doing)
                self._suspect = (end.doing, attached.group) if end.doing is not None else None
                self._tell(f"lost {attached.group}")
            case Stuck():
                limit_s = self._settings.limits.operation_timeout_s
                _log.error("the ranks are stuck", group=attached.group, doing=end.doing, after_s=limit_s)
                reason = f"it took longer than {limit_s:g} seconds"
                await parts.ledger.commit(GiveUp(end.doing, reason, self._clock.wall_s()))
                await self._condemn(parts, attached)
            case Spoiled():
                _log.error("the ranks did what was given up since", group=attached.group, doing=end.doing)
                await self._condemn(parts, attached)
            case Short():
                _log.error("the ranks lack the memory to catch up", group=attached.group, reason=end.reason)
                await self._condemn(parts, attached)

    async def _note_restoring(self, parts: Parts, number: int) -> None:
        """A snapshot that groups die of, one after the other, is as bad as one that is damaged."""
        self._deaths[-number] = self._deaths.get(-number, 0) + 1
        if self._deaths[-number] >= DEADLY:
            self._deaths.pop(-number)
            reason = f"{DEADLY} groups of ranks could not restore it"
            await parts.ledger.commit(RefuseSnapshot(number, reason))

    async def _condemn(self, parts: Parts, attached: commands.Attached) -> None:
        """Whatever it still does is in nobody's journal: it is told to end, and never listened to again."""
        self._condemned.add(attached.group)
        self._tell(f"stuck {attached.group}")
        await self._end_ranks(parts)
        parts.backend.close()

    async def _end_ranks(self, parts: Parts) -> None:
        """They answer at once, unless they are at work; then they find the message when they have done it."""
        try:
            await parts.backend.shut_down()
            async with asyncio.timeout(END_S):
                await parts.backend.lost()
        except (StrataError, TimeoutError) as error:
            _log.info("the ranks have not ended yet", reason=str(error))


def rules_of(settings: ServerSettings) -> Rules:
    limits = settings.limits
    return Rules(
        max_running=limits.max_running_requests,
        max_pending=limits.max_pending_requests,
        max_pending_per_tenant=limits.max_pending_per_tenant,
        max_models_per_tenant=limits.max_models_per_tenant,
        base_models=settings.model.base_models,
        max_tokens_per_row=settings.model.max_tokens_per_row,
        pack_tenants=limits.pack_tenants,
        slots=settings.model.slots,
        initial_checkpoint=settings.model.initial_checkpoint,
        result_ttl_s=limits.result_ttl_s,
        max_kept_results=limits.max_kept_results,
        max_samplers=settings.sampling.places(full=settings.model.training == "full"),
        max_pending_samples=settings.sampling.max_pending_requests,
        max_running_samples=settings.sampling.max_running_requests,
        quantum_steps=settings.sampling.quantum_steps,
        push=settings.inference.push,
        route=settings.inference.sample,
        # An engine has one whole model at a time.
        keep_versions=1 if settings.model.training == "full" else settings.inference.keep,
        snapshot_dispatches=settings.snapshots.every_dispatches,
        snapshot_s=settings.snapshots.every_s,
        snapshot_payload_bytes=settings.snapshots.every_payload_mb << 20,
        keep_checkpoints=settings.kept.keep,
    )
