"""`Orchestrator`: leads the journal, accepts at most 5,000 open requests, supervises groups of ranks (a dispatch in
which three groups died fails), and runs the background loops at their intervals (expiry, replication, snapshots,
compaction, curves).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Final

import msgspec

from strata import __version__
from strata.base import log, trace
from strata.base.clock import Clock
from strata.base.errors import Code, StrataError
from strata.base.loop import every
from strata.journal.group_commit import WriterLimits
from strata.journal.port import Journal
from strata.journal.replica import Replica
from strata.train.core import commands, device_turns
from strata.train.core.inputs import FailDispatch, RanksOutOfMemory, RejectSnapshot
from strata.train.core.machine import TrainMachine
from strata.train.core.out_of_memory import RowLimit
from strata.train.core.replay import reject_reason
from strata.train.core.state import Rules
from strata.train.link import messages
from strata.train.link.ports import ApiSide, Links, ZmqLinks
from strata.train.orchestrator.backend import RemoteBackend
from strata.train.orchestrator.device_turns import TURN_S, DeviceTurns
from strata.train.orchestrator.maintenance.compaction import Compaction
from strata.train.orchestrator.maintenance.curve_file import CurveFile
from strata.train.orchestrator.maintenance.replication import CheckpointReplicator, open_replicator
from strata.train.orchestrator.maintenance.state_copy import CopyJournal, StateCopy
from strata.train.orchestrator.metrics import ServerTelemetry
from strata.train.orchestrator.rank_session import (
    Disconnected,
    Diverged,
    OrchestratorContext,
    OutOfMemory,
    RankSession,
    SessionEnd,
    TimedOut,
    describe_end,
)
from strata.train.orchestrator.request_handler import RequestHandler
from strata.train.orchestrator.request_processor import RequestProcessor
from strata.train.orchestrator.state_store import StateStore, TrainReplica
from strata.train.payload import Payloads
from strata.train.settings import ServerSettings
from strata.train.status import views
from strata.train.status.throughput import ThroughputEstimate

MAX_GROUP_DEATHS: Final = 3
"""A dispatch in which so many groups of ranks died is not sent to another one."""
ALL_SLICES: Final = 0
"""Stands for all sampling slices where deaths are counted."""
EXPIRE_S: Final = 30.0
REPLICATE_S: Final = 1.0
"""How often to check for a checkpoint to upload or to delete."""
SNAPSHOT_S: Final = 5.0
COMPACT_S: Final = 0.05
"""The least time between two runs; a run waits until there is something to do."""
CURVES_S: Final = 1.0
CURVES_SHARE: Final = 0.02
"""The share of the time: many long curves are written less often."""
SHUTDOWN_S: Final = 1.0
MAX_OPEN_REQUESTS: Final = 5_000
"""Requests that may wait here at a time."""

_log = log.get(__name__)
Notify = Callable[[str], None]
"""Notifies the launcher: `leading`, `attached GROUP`, `lost GROUP`, `stuck GROUP`, `stuck-engine NAME`,
`snapshot NUMBER`. A group that never replied is `unknown`."""


class Orchestrator:
    def __init__(
        self,
        settings: ServerSettings,
        journal: Journal,
        clock: Clock,
        notify: Notify,
        links: Callable[[ServerSettings], Links] = ZmqLinks,
        *,
        copy_journal: CopyJournal | None = None,
    ) -> None:
        self._settings = settings
        self._journal = journal
        self._clock = clock
        self._notify = notify
        self._links = links
        self._copy_journal = copy_journal
        """Copies the journal's file; None if it is no file in the data folder."""
        self._suspect: tuple[int, str] | None = None
        """The dispatch that a group may have died of, and that group."""
        self._deaths: dict[int, int] = {}
        """Groups that died, by dispatch; by the negated number if they died while they restored its snapshot."""
        self._last_deadly = 0
        """The last dispatch that a group may have died of."""
        self._quarantined_groups: set[str] = set()
        self._rows = RowLimit()
        self._open_requests: set[asyncio.Task[None]] = set()
        self._replicator: CheckpointReplicator | None = None

    async def run(self, stop: asyncio.Event, holder: str, stop_ranks: asyncio.Event) -> None:
        """Run until `stop` is set or leadership is lost: then with the reason. The ranks stay unless `stop_ranks` is
        set."""
        replica: TrainReplica = Replica(
            self._journal, self._settings.stream, TrainMachine(rules_of(self._settings)), self._clock
        )
        # An operation is dispatched as soon as it is accepted: both in one commit.
        limits = WriterLimits(follow_up=True)
        standby = asyncio.create_task(replica.stand_by(holder, self._settings.server.lease_s, limits))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait([standby, stopping], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not standby.done():
            standby.cancel()
            await asyncio.wait([standby])
            return
        standby.result()
        self._notify("leading")
        links = self._links(self._settings)
        settings = self._settings
        telemetry = ServerTelemetry(
            self._clock, settings.server.timelines, settings.sampling.gap_alarm_nats, settings.rollouts.limits
        )
        curves = CurveFile(settings.curves_file, telemetry.curves)
        curves.load()
        context = self._open_context(links, StateStore(replica, self._clock, telemetry))
        try:
            await self._lead(replica, context, links, curves, stop)
            if stop_ranks.is_set():
                await self._shut_down_ranks(context)
        finally:
            context.backend.close()
            links.close()
            await curves.run_once()
        if replica.failure is None:
            await context.store.snapshot_if_due(self._settings.server.snapshot_every)
            await replica.resign()

    def _open_context(self, links: Links, store: StateStore) -> OrchestratorContext:
        settings = self._settings
        state = store.state
        self._replicator = open_replicator(settings, store)
        _log.info(
            "leading", generation=store.leader_epoch, dispatched=state.dispatched, in_flight=len(state.dispatches)
        )
        if settings.server.lost:
            _log.warning("state_lost", reason=settings.server.lost)
        return OrchestratorContext(
            settings=settings,
            journal=self._journal,
            store=store,
            backend=RemoteBackend(links, settings, self._clock, store.leader_epoch),
            processor=RequestProcessor(
                Payloads(settings.payloads),
                settings.checkpoint_folder,
                self._replicator.fetch if self._replicator is not None else None,
            ),
            throughput=ThroughputEstimate(),
            notify=self._notify,
        )

    async def _lead(
        self,
        replica: TrainReplica,
        context: OrchestratorContext,
        links: Links,
        curves: CurveFile,
        stop: asyncio.Event,
    ) -> None:
        settings, store, clock = self._settings, context.store, self._clock
        api_links = [links.api(store.leader_epoch, number) for number in range(settings.server.api_servers)]
        handler = RequestHandler(context)
        reaper = handler.session_reaper
        compaction = Compaction(settings, self._journal, store)
        leadership = asyncio.create_task(replica.lead_until_replaced(settings.server.lease_s), name="leadership")
        workers = [
            *(asyncio.create_task(self._serve_requests(link, handler), name="requests") for link in api_links),
            asyncio.create_task(self._supervise_ranks(context), name="ranks"),
            asyncio.create_task(every(EXPIRE_S, store.expire_results, clock=clock), name="expire results"),
            asyncio.create_task(
                every(settings.checkpoints.sweep_s, handler.checkpoint_gc.run_once, clock=clock), name="checkpoint gc"
            ),
            asyncio.create_task(every(reaper.interval_s, reaper.run_once, clock=clock), name="session reaper"),
            asyncio.create_task(handler.publisher.run(), name="endpoints"),
            asyncio.create_task(
                every(SNAPSHOT_S, lambda: store.snapshot_if_due(settings.server.snapshot_every), clock=clock),
                name="snapshot",
            ),
            asyncio.create_task(every(COMPACT_S, compaction.run_once, clock=clock), name="compaction"),
            asyncio.create_task(every(CURVES_S, curves.run_once, clock=clock, max_share=CURVES_SHARE), name="curves"),
            asyncio.create_task(every(EXPIRE_S, store.telemetry.rollouts.expire, clock=clock), name="expire rollouts"),
            asyncio.create_task(store.telemetry.rollouts.run(Payloads(settings.payloads)), name="rollouts"),
        ]
        if self._replicator is not None:
            replicating = every(REPLICATE_S, self._replicator.run_once, clock=clock)
            workers.append(asyncio.create_task(replicating, name="replication"))
        if settings.inference.takes_turns:
            turns = DeviceTurns(context, handler.publisher, lambda name: self._notify(f"stuck-engine {name}"))
            workers.append(asyncio.create_task(every(TURN_S, turns.run_once, clock=clock), name="device turns"))
        if self._copy_journal is not None and settings.makes_copies:
            copying = every(
                settings.server.copy_every_s, StateCopy(settings, store, self._copy_journal).run_once, clock=clock
            )
            workers.append(asyncio.create_task(copying, name="copies"))
        stopping = asyncio.create_task(stop.wait(), name="stop")
        tasks: list[asyncio.Task[object]] = [leadership, stopping, *workers]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (*tasks, *self._open_requests):
                task.cancel()
            await asyncio.wait([*tasks, *self._open_requests])
            for link in api_links:
                link.close()
        for task in workers:
            if not task.cancelled():
                task.result()
        if not leadership.cancelled():
            raise leadership.result()

    async def _serve_requests(self, link: ApiSide, handler: RequestHandler) -> None:
        async def respond(request: messages.OrchestratorRequest) -> None:
            name = f"orchestrator {request.body.__struct_config__.tag}"
            with trace.continued(name, request.traceparent, kind="server"), _correlated(request.traceparent):
                output = await handler.handle(request)
            link.send(messages.OrchestratorOutputs(request.request_id, output))

        while True:
            request = await link.receive()
            if len(self._open_requests) >= MAX_OPEN_REQUESTS:
                rejected = views.ErrorResponse(Code.EXHAUSTED, f"{MAX_OPEN_REQUESTS} requests wait already")
                link.send(messages.OrchestratorOutputs(request.request_id, rejected))
                continue
            task = asyncio.create_task(respond(request))
            self._open_requests.add(task)
            task.add_done_callback(self._on_response)

    def _on_response(self, task: asyncio.Task[None]) -> None:
        self._open_requests.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("request_failed", reason=repr(error))

    async def _supervise_ranks(self, context: OrchestratorContext) -> None:
        """Run one session after the other, each with the group of ranks that is there."""
        while True:
            try:
                attached = await context.backend.attach()
            except StrataError as error:
                if error.code is not Code.DEADLINE:
                    raise
                _log.error("ranks_stuck", reason=str(error))
                self._notify("stuck unknown")
                continue
            reason = await self._validate_group(context, attached)
            if reason is not None:
                _log.error("rank_group_rejected", group=attached.group, reason=reason)
                await self._quarantine(context, attached)
                continue
            _log.info("ranks_attached", group=attached.group, ranks=attached.world_size, applied=attached.applied)
            context.attached = attached
            context.store.telemetry.record_attached(attached.group)
            self._notify(f"attached {attached.group}")
            end: SessionEnd | None = None
            try:
                end = await RankSession(context, attached, self._rows).run()
            finally:
                context.attached = None
                context.store.telemetry.record_lost(describe_end(end))
            await self._on_session_end(context, attached, end)

    async def _validate_group(self, context: OrchestratorContext, attached: commands.AttachReply) -> str | None:
        """Says why this group must not be used. Also decides about the dispatch that the last group may have died
        of."""
        state = context.store.state
        if attached.group in self._quarantined_groups:
            return "it was quarantined"
        if attached.version != __version__:
            theirs = attached.version or "an older version"
            return f"these ranks run strata {theirs}, the orchestrator {__version__}: start both from one version"
        reason = reject_reason(state, attached.group, attached.applied) or device_turns.reject_reason(
            state, attached.group
        )
        if reason is not None:
            return reason
        suspect, self._suspect = self._suspect, None
        if suspect is None or suspect[1] == attached.group or suspect[0] not in state.dispatches:
            return None
        number, exhausted = suspect[0], attached.exhausted
        if exhausted is None or not await self._fail_oversized(context, number, exhausted):
            await self._count_death(context, number)
        return None

    async def _count_death(self, context: OrchestratorContext, number: int) -> None:
        """A group of ranks died in this dispatch, and nothing says why. It fails when too many groups have."""
        state = context.store.state
        # A sampling slice is not replayed but composed again: slices that groups die of in a row count as one.
        is_slice = state.dispatches[number].slice is not None
        counted = ALL_SLICES if is_slice else number
        if is_slice and state.last_slice > self._last_deadly:
            self._deaths.pop(ALL_SLICES, None)
        self._last_deadly = number
        self._deaths[counted] = self._deaths.get(counted, 0) + 1
        if self._deaths[counted] >= MAX_GROUP_DEATHS:
            self._deaths.pop(counted)
            reason = f"{MAX_GROUP_DEATHS} groups of ranks died in this operation"
            await context.store.commit(FailDispatch(number, reason, self._clock.wall_s()))

    async def _fail_oversized(
        self, context: OrchestratorContext, number: int, exhausted: commands.RowOutOfMemory
    ) -> bool:
        """Says whether the row was of this dispatch. One death is enough then: the next group would die of it as
        well."""
        decision = await context.store.commit(RanksOutOfMemory(number, exhausted, self._clock.wall_s()))
        if not decision.facts:
            return False
        _log.error("ranks_out_of_memory", dispatch=number, **msgspec.structs.asdict(exhausted))
        self._rows.ran_out(exhausted)
        return True

    async def _on_session_end(
        self, context: OrchestratorContext, attached: commands.AttachReply, end: SessionEnd
    ) -> None:
        if end.restoring and end.dispatch is not None:
            await self._count_failed_restore(context, end.dispatch)
        match end:
            case Disconnected():
                _log.warning("ranks_disconnected", group=attached.group, dispatch=end.dispatch)
                self._suspect = (end.dispatch, attached.group) if end.dispatch is not None else None
                self._notify(f"lost {attached.group}")
            case TimedOut():
                limit_s = self._settings.limits.operation_timeout_s
                _log.error("ranks_timed_out", group=attached.group, dispatch=end.dispatch, after_s=limit_s)
                reason = f"it took longer than {limit_s:g} seconds"
                await context.store.commit(FailDispatch(end.dispatch, reason, self._clock.wall_s()))
                await self._quarantine(context, attached)
            case Diverged():
                _log.error("rank_group_diverged", group=attached.group, dispatch=end.dispatch)
                await self._quarantine(context, attached)
            case OutOfMemory():
                _log.error("replay_out_of_memory", group=attached.group, reason=end.reason)
                await self._quarantine(context, attached)

    async def _count_failed_restore(self, context: OrchestratorContext, number: int) -> None:
        """A snapshot that groups die of in a row is as bad as a damaged one."""
        self._deaths[-number] = self._deaths.get(-number, 0) + 1
        if self._deaths[-number] >= MAX_GROUP_DEATHS:
            self._deaths.pop(-number)
            reason = f"{MAX_GROUP_DEATHS} groups of ranks could not restore it"
            await context.store.commit(RejectSnapshot(number, reason))

    async def _quarantine(self, context: OrchestratorContext, attached: commands.AttachReply) -> None:
        """Shut this group down and never use it again: nothing that it still does is in the journal."""
        self._quarantined_groups.add(attached.group)
        self._notify(f"stuck {attached.group}")
        await self._shut_down_ranks(context)
        context.backend.close()

    async def _shut_down_ranks(self, context: OrchestratorContext) -> None:
        """Ranks end at once unless they are busy; then they read the request when their dispatch is done."""
        try:
            await context.backend.shut_down()
            async with asyncio.timeout(SHUTDOWN_S):
                await context.backend.lost()
        except (StrataError, TimeoutError) as error:
            _log.info("ranks_still_running", reason=str(error))


def _correlated(traceparent: str) -> AbstractContextManager[None]:
    """Log lines of a request that is traced carry the id of its trace, as those of the API server do."""
    return log.correlation(trace.trace_id(traceparent)) if traceparent else nullcontext()


def rules_of(settings: ServerSettings) -> Rules:
    limits, row_tokens = settings.limits, settings.by_device.max_tokens_per_row
    return Rules(
        max_running=limits.max_running_requests,
        max_pending=limits.max_pending_requests,
        max_pending_per_tenant=limits.max_pending_per_tenant,
        max_models_per_tenant=limits.max_models_per_tenant or (settings.model.places + 1) // 2,
        max_sessions_per_tenant=limits.max_sessions_per_tenant,
        max_imports_per_tenant=limits.max_imports_per_tenant,
        max_loss_bytes=limits.max_loss_bytes_per_tenant,
        ended_session_ttl_s=limits.ended_session_ttl_s,
        max_ended_sessions=limits.max_ended_sessions,
        base_models=settings.model.base_models,
        max_tokens_per_row=row_tokens,
        fairness_quantum_tokens=limits.fairness_quantum_tokens or row_tokens,
        pack_tenants=limits.pack_tenants,
        slots=settings.model.slots,
        initial_checkpoint=settings.model.initial_checkpoint,
        result_ttl_s=limits.result_ttl_s,
        max_samplers=settings.sampling.max_samplers(full=settings.model.training == "full"),
        max_pending_samples=settings.sampling.max_pending_requests,
        max_running_samples=settings.sampling.max_running_requests,
        slice_steps=settings.sampling.slice_steps,
        push=settings.inference.pushes,
        route=settings.inference.routes,
        engines=settings.inference.engines,
        device_turn_s=settings.inference.turn_s if settings.inference.takes_turns else 0.0,
        fallback=settings.inference.fallback,
        refuse_unroutable=settings.inference.unroutable == "refuse",
        # An engine has one model of full fine-tunes at a time.
        keep_versions=1 if settings.model.training == "full" else settings.inference.keep,
        snapshot_dispatches=settings.snapshots.every_dispatches,
        snapshot_s=settings.snapshots.every_s,
        snapshot_payload_bytes=settings.snapshots.every_payload_mb << 20,
        snapshot_replay_s=settings.snapshots.every_replay_s,
        keep_checkpoints=settings.checkpoints.keep,
    )
