"""`RequestHandler`: carries out the commands of API servers and answers their queries.

A command goes to the state machine as it came. A few need I/O around the decision: an address is resolved, files are
put in place or removed. A query has a method here, by its type.
"""

from __future__ import annotations

import asyncio
import stat
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from strata.base import log, trace
from strata.base.errors import Code, StrataError
from strata.train.core import commands, custom_losses, messages, ops, status
from strata.train.core.completion_log import SamplerClientIds, Target, target_of
from strata.train.core.inputs import ClientCommand, Decision, Dispatching
from strata.train.core.rollouts import RolloutsView, RolloutView
from strata.train.core.state import ModelCheckpoint, TrainState
from strata.train.core.throughput import describe_wait
from strata.train.core.views import (
    check_sampler_owner,
    checkpoints_of,
    ended_results,
    find_future,
    find_model,
    find_readable_checkpoint,
    find_sampler,
    find_session,
    view_checkpoint,
    view_ended_sample,
    view_model,
    view_sampler,
    view_session,
)
from strata.train.endpoints.origin import check_allowed, resolve_address
from strata.train.endpoints.publisher import Publisher
from strata.train.orchestrator.maintenance.checkpoint_gc import CheckpointGc
from strata.train.orchestrator.maintenance.session_reaper import SessionReaper
from strata.train.orchestrator.rank_session import OrchestratorContext
from strata.train.orchestrator.state_store import MAX_INLINE_RESULT_BYTES
from strata.train.orchestrator.status import (
    HEALTH_S,
    check_ranks,
    describe_activity,
    describe_status,
    describe_timeline,
    read_curves,
    render_metrics,
)

MAX_WAIT_S: Final = 120.0
TRANSIENT: Final = frozenset({Code.UNAVAILABLE, Code.EXHAUSTED, Code.DEADLINE})
"""Errors that a client retries by itself."""
_log = log.get(__name__)

Q = TypeVar("Q", bound=messages.Query)
QueryHandler = Callable[[str, Any], Awaitable[messages.Output]]
"""Of a tenant, and a query of one type."""


class RequestHandler:
    def __init__(self, context: OrchestratorContext, attached: Callable[[], commands.AttachReply | None]) -> None:
        self._context = context
        self._store = context.store
        self._attached = attached
        self.session_reaper = SessionReaper(context.store, context.settings.limits, context.settings.server.lost)
        self._client_ids = SamplerClientIds(context.store.leader_epoch)
        self.checkpoint_gc = CheckpointGc(context.store, context.settings)
        self.publisher = Publisher(context.settings, context.store, self._keep_result)
        self.queries: Mapping[type[msgspec.Struct], QueryHandler] = dict(
            [
                _query(messages.SessionHeartbeat, self._heartbeat),
                _query(messages.WatchFuture, self._watch_future),
                _query(messages.WatchTokens, self._watch_tokens),
                _query(messages.WatchSamples, self._watch_samples),
                _query(messages.DescribeModel, self._describe_model),
                _query(messages.DescribeCustomLoss, self._describe_loss),
                _query(messages.DescribeSampler, self._describe_sampler),
                _query(messages.JoinSampler, self._join_sampler),
                _query(messages.ListModels, self._list_models),
                _query(messages.ListSessions, self._list_sessions),
                _query(messages.ListCheckpoints, self._list_checkpoints),
                _query(messages.DescribeCheckpoint, self._describe_checkpoint),
                _query(messages.ListResults, self._list_results),
                _query(messages.DescribeServer, self._describe_server),
                _query(messages.CheckHealth, self._check_health),
                _query(messages.ListEndpoints, self._list_endpoints),
                _query(messages.DescribeStatus, self._describe_status),
                _query(messages.DescribeTimeline, self._describe_timeline),
                _query(messages.ListTimelines, self._list_timelines),
                _query(messages.ReadMetrics, self._read_metrics),
                _query(messages.DescribeActivity, self._describe_activity),
                _query(messages.ReportMetrics, self._report_metrics),
                _query(messages.ReadThroughput, self._read_throughput),
                _query(messages.ReadCurves, self._read_curves),
                _query(messages.ReadUsage, self._read_usage),
                _query(messages.ListRollouts, self._list_rollouts),
                _query(messages.ReadRollout, self._read_rollout),
            ]
        )

    async def handle(self, request: messages.OrchestratorRequest) -> messages.Output:
        """An error is a response; any other exception is a defect of this process."""
        try:
            return await self._handle(request.tenant, request.body)
        except StrataError as error:
            return await self._error_response(error)

    async def _error_response(self, error: StrataError) -> messages.ErrorResponse:
        """An error that is not transient is final for the client. So only the leader may send it: a deposed
        orchestrator does not know what was decided since, not even that it was deposed.
        """
        if error.code not in TRANSIENT:
            try:
                await self._store.confirm_leadership()
            except StrataError as lost:
                error = StrataError(Code.UNAVAILABLE, f"the lead was lost: {lost.message}", hint="ask again")
        return messages.ErrorResponse(error.code, error.message, error.hint)

    async def _handle(self, tenant: str, body: messages.Command | messages.Query) -> messages.Output:
        try:
            if isinstance(body, messages.Command):
                response = await self._execute(tenant, body)
                if isinstance(response, messages.Accepted):
                    self.session_reaper.touch(tenant, response.future_id)
                    self._store.telemetry.record_traced(response.future_id, trace.traceparent())
                return response
            return await self.queries[type(body)](tenant, body)
        finally:
            # A rejected request shows that the client is alive, too. Not earlier: OpenSession makes the session.
            if body.subject is not None:
                self.session_reaper.touch(tenant, body.subject)

    async def _execute(self, tenant: str, command: messages.Command) -> messages.Done | messages.Accepted:
        match command:
            case messages.ImportCheckpoint():
                return _response(await self.checkpoint_gc.import_checkpoint(tenant, command))
            case messages.AddEndpoint() | messages.RemoveEndpoint() if (
                command.name in self._context.settings.inference.engines
            ):
                raise StrataError(Code.CONFLICT, f"{command.name} is an engine of the server itself")
            case messages.AddEndpoint():
                origin = check_allowed(command.url, self._context.settings.inference.allow)
                command = msgspec.structs.replace(command, url=str(origin), address=await resolve_address(origin))
            case messages.SetCheckpointTtl() | messages.SubmitOperation(operation=ops.OpenSampler()):
                await self.checkpoint_gc.delete_expired()
            case _:
                pass
        decision = await self._store.commit(ClientCommand(tenant, command, self._now_s()))
        await self.checkpoint_gc.remove(*decision.deleted_folders)
        return _response(decision)

    # Queries

    async def _heartbeat(self, tenant: str, query: messages.SessionHeartbeat) -> messages.Done:
        find_session(self._state, tenant, query.session_id)
        return messages.Done()

    async def _watch_future(self, tenant: str, query: messages.WatchFuture) -> messages.Output:
        if query.future_id in self._state.custom_losses:
            created = custom_losses.find(self._state, tenant, query.future_id)
            return messages.FutureResult(ops.LossCreated(created.loss_id))
        future = find_future(self._state, tenant, query.future_id)
        if future.result is None and query.wait_s > 0:
            await self._store.wait_for_completion(query.future_id, min(query.wait_s, MAX_WAIT_S))
        if future.result is not None:
            if future.ended_at_s + self._context.settings.limits.result_ttl_s <= self._now_s():
                await self._store.expire_results()
                find_future(self._state, tenant, query.future_id)
            if isinstance(future.result, ops.Failed | ops.WeightsSynced | ops.SampleDone) or not future.number:
                await self._wait_durable()
            return messages.FutureResult(future.result)
        attached = self._attached() is not None
        return describe_wait(self._state, future, self._context.throughput, attached=attached)

    async def _watch_tokens(self, tenant: str, query: messages.WatchTokens) -> messages.Output:
        store = self._store
        deadline_s = store.clock.monotonic_s() + min(query.wait_s, MAX_WAIT_S)
        while True:
            future = find_future(self._state, tenant, query.future_id)
            parts = store.streams.after(query.future_id, query.counts)
            left_s = deadline_s - store.clock.monotonic_s()
            if parts or future.result is not None or left_s <= 0:
                break
            # Tokens that this client has, or cannot use yet, wake it too.
            await store.wait_for_completion(query.future_id, left_s)
        if parts:
            return messages.TokensSampled(parts)
        return await self._watch_future(tenant, messages.WatchFuture(query.future_id, 0.0))

    async def _watch_samples(self, tenant: str, query: messages.WatchSamples) -> messages.SamplesEnded:
        store, state = self._store, self._state
        check_sampler_owner(state, tenant, query.sampler_id)
        target = query.sampler_id, query.copy
        ended, cursor = store.completions.after(target, query.cursor)
        if not ended:
            open_samples = _has_open_samples(state, target)
            if open_samples:
                store.completions.expect(target)
            elif query.linger:
                # NOT_FOUND if the sampler was evicted: nothing of it will ever end.
                find_sampler(state, tenant, query.sampler_id)
            if query.wait_s > 0 and (open_samples or query.linger):
                await store.wait_for_completion(target, min(query.wait_s, MAX_WAIT_S))
                ended, cursor = store.completions.after(target, query.cursor)
        views = [view_ended_sample(state, future_id) for future_id in ended]
        if views:
            await self._wait_durable()
        return messages.SamplesEnded(views, cursor)

    async def _describe_model(self, tenant: str, query: messages.DescribeModel) -> messages.ModelView:
        return view_model(find_model(self._state, tenant, query.model_id), self._base)

    async def _describe_loss(self, tenant: str, query: messages.DescribeCustomLoss) -> messages.CustomLossView:
        return messages.CustomLossView(custom_losses.find(self._state, tenant, query.loss_id).loss)

    async def _describe_sampler(self, tenant: str, query: messages.DescribeSampler) -> messages.SamplerView:
        return view_sampler(find_sampler(self._state, tenant, query.sampler_id))

    async def _join_sampler(self, tenant: str, query: messages.JoinSampler) -> messages.SamplerJoined:
        sampler = find_sampler(self._state, tenant, query.sampler_id)
        return messages.SamplerJoined(self._client_ids.issue(sampler.sampler_id, self._state.samplers))

    async def _list_models(self, tenant: str, _: messages.ListModels) -> messages.ModelList:
        base = self._base
        models = [view_model(model, base) for model in self._state.models.values() if model.tenant == tenant]
        return messages.ModelList(models)

    async def _list_sessions(self, tenant: str, query: messages.ListSessions) -> messages.SessionList:
        state, name = self._state, query.session_id
        sessions = [find_session(state, tenant, name)] if name is not None else state.sessions.values()
        return messages.SessionList([view_session(state, each) for each in sessions if each.tenant == tenant])

    async def _list_checkpoints(self, tenant: str, query: messages.ListCheckpoints) -> messages.CheckpointList:
        await self.checkpoint_gc.delete_expired()
        checkpoints = checkpoints_of(self._state, tenant, query.model_id)
        return messages.CheckpointList([await self._view_checkpoint(checkpoint) for checkpoint in checkpoints])

    async def _describe_checkpoint(
        self, tenant: str, query: messages.DescribeCheckpoint
    ) -> messages.ModelCheckpointView:
        await self.checkpoint_gc.delete_expired()
        checkpoint = find_readable_checkpoint(self._state, tenant, query.run_id, query.kind, query.name)
        return await self._view_checkpoint(checkpoint)

    async def _list_results(self, tenant: str, query: messages.ListResults) -> messages.ResultList:
        model = find_model(self._state, tenant, query.model_id)
        results = ended_results(self._state, query.model_id, query.after, query.limit)
        # A result that is lost with the leadership may come again with another end.
        await self._wait_durable()
        return messages.ResultList(results, model.unloaded)

    async def _describe_server(self, _: str, __: messages.DescribeServer) -> messages.ServerView:
        state, attached, base = self._state, self._attached(), self._base
        return messages.ServerView(
            base_model=self._context.settings.model.base_model,
            max_context=base.max_context if base else 0,
            full=self._context.settings.model.training == "full",
            world_size=attached.world_size if attached else 0,
            arch=base.arch if base else "",
            ready=attached is not None,
            pending=state.futures.pending(),
            running=len(state.dispatches),
            dispatched=state.dispatched,
            snapshot=state.snapshots[-1].number if state.snapshots else 0,
        )

    async def _check_health(self, _: str, __: messages.CheckHealth) -> messages.HealthReport:
        if self._attached() is None:
            return messages.HealthReport("starting", (), "the ranks are starting")
        try:
            reply = await self._context.backend.request(commands.HealthCheck(), HEALTH_S)
        except StrataError as error:
            running = self._state.dispatches
            if error.code is Code.DEADLINE and running:
                # Rank 0 replies between two dispatches; the session has a timeout for one that takes too long.
                return messages.HealthReport("healthy", (), f"busy with dispatch {min(running)}")
            return messages.HealthReport("unhealthy", (), str(error))
        return messages.HealthReport("healthy", reply.ranks, "all ranks answered")

    async def _list_endpoints(self, _: str, __: messages.ListEndpoints) -> messages.EndpointList:
        return await self.publisher.list_endpoints()

    async def _describe_status(self, tenant: str, query: messages.DescribeStatus) -> status.StatusView:
        attached = self._attached()
        healthy = await check_ranks(self._context, attached)
        only = None if query.everything else tenant
        return status.StatusView(describe_status(self._context, attached, healthy, only))

    async def _describe_timeline(self, tenant: str, query: messages.DescribeTimeline) -> status.TimelineView:
        return describe_timeline(self._context, tenant, query.future_id)

    async def _list_timelines(self, tenant: str, query: messages.ListTimelines) -> status.TimelinesView:
        lines = list(self._store.telemetry.timelines)
        if query.session_id:
            session = find_session(self._state, tenant, query.session_id)
            lines = [line for line in lines if line.future_id.startswith(f"{session.session_id}:")]
        return status.TimelinesView(lines)

    async def _read_metrics(self, tenant: str, query: messages.ReadMetrics) -> status.MetricsView:
        return render_metrics(self._context, self._attached(), None if query.everything else tenant)

    async def _describe_activity(self, tenant: str, query: messages.DescribeActivity) -> status.ActivityView:
        return describe_activity(self._context, query.operations, None if query.everything else tenant)

    async def _report_metrics(self, tenant: str, query: messages.ReportMetrics) -> messages.Done:
        find_model(self._state, tenant, query.model_id)
        self._store.telemetry.curves.report(query.model_id, query.seq_id, query.values)
        return messages.Done()

    async def _read_throughput(self, _: str, __: messages.ReadThroughput) -> status.ThroughputView:
        points = self._store.telemetry.throughput.points(self._now_s())
        return status.ThroughputView(status.ThroughputReport(points=points))

    async def _read_usage(self, tenant: str, query: messages.ReadUsage) -> messages.UsageView:
        return messages.UsageView(self._state.usage.of(tenant, query.from_s, query.until_s))

    async def _read_curves(self, tenant: str, query: messages.ReadCurves) -> status.CurvesView:
        return read_curves(self._context, tenant, query)

    async def _list_rollouts(self, tenant: str, query: messages.ListRollouts) -> RolloutsView:
        if query.model_id:
            find_model(self._state, tenant, query.model_id)
        return self._store.telemetry.rollouts.kept.newest(tenant, query.model_id, query.limit, self._now_s())

    async def _read_rollout(self, tenant: str, query: messages.ReadRollout) -> RolloutView:
        return RolloutView(self._store.telemetry.rollouts.kept.get(tenant, query.rollout_id, self._now_s()))

    # What they share

    @property
    def _state(self) -> TrainState:
        return self._store.state

    @property
    def _base(self) -> commands.ModelInfo | None:
        attached = self._attached()
        return attached.model if attached is not None else None

    async def _keep_result(self, result: ops.Result) -> ops.Result:
        free_bytes = max(MAX_INLINE_RESULT_BYTES - self._state.futures.result_bytes, 0)
        return await self._context.processor.keep(result, inline_bytes=min(ops.INLINE_BYTES, free_bytes))

    async def _wait_durable(self) -> None:
        """Before a failure or a sample is sent: were it lost with the leadership, the client would see another one."""
        try:
            await self._store.wait_durable()
        except StrataError as error:
            raise StrataError(Code.UNAVAILABLE, f"the lead was lost: {error.message}", hint="ask again") from error

    async def _view_checkpoint(self, checkpoint: ModelCheckpoint) -> messages.ModelCheckpointView:
        size = await asyncio.to_thread(_size, self._context.settings.checkpoint_folder / checkpoint.path)
        return view_checkpoint(self._state, checkpoint, size)

    def _now_s(self) -> float:
        return self._store.clock.wall_s()


def _query(
    kind: type[Q], answer: Callable[[str, Q], Awaitable[messages.Output]]
) -> tuple[type[msgspec.Struct], QueryHandler]:
    """An entry of the table, with the query and its handler of the same type."""
    return kind, answer


def _response(decision: Decision) -> messages.Done | messages.Accepted:
    assert not isinstance(decision.reply, Dispatching), "only DispatchNext dispatches"
    return decision.reply


def _has_open_samples(state: TrainState, target: Target) -> bool:
    return any(target_of(future_id) == target for future_id in state.samples_of(target[0]))


def _size(folder: Path) -> int:
    """Bytes of the files that are there: a checkpoint may be deleted meanwhile."""
    size = 0
    try:
        for path in folder.rglob("*"):
            found = path.lstat()
            size += found.st_size if stat.S_ISREG(found.st_mode) else 0
    except FileNotFoundError:
        _log.info("checkpoint_deleted_while_sized", folder=str(folder))
    return size
