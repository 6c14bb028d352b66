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
from strata.train.core import client_commands, commands, custom_losses, ops
from strata.train.core.inputs import ClientCommand, Decision, Dispatching
from strata.train.core.lookup import (
    check_sampler_owner,
    checkpoints_of,
    find_future,
    find_model,
    find_readable_checkpoint,
    find_sampler,
    find_session,
)
from strata.train.core.state import ModelCheckpoint, TrainState
from strata.train.endpoints.origin import check_allowed, resolve_address
from strata.train.endpoints.publisher import Publisher
from strata.train.link import messages
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
from strata.train.status import queries, reports, views
from strata.train.status.completion_log import SamplerClientIds, Target, target_of
from strata.train.status.rollouts import RolloutsView, RolloutView
from strata.train.status.throughput import describe_wait
from strata.train.status.views import (
    ended_results,
    view_checkpoint,
    view_ended_sample,
    view_model,
    view_sampler,
    view_session,
)

MAX_WAIT_S: Final = 120.0
TRANSIENT: Final = frozenset({Code.UNAVAILABLE, Code.EXHAUSTED, Code.DEADLINE})
"""Errors that a client retries by itself."""
_log = log.get(__name__)

Q = TypeVar("Q", bound=queries.Query)
QueryHandler = Callable[[str, Any], Awaitable[messages.Output]]
"""Answers a query of one type, for a tenant."""


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
                _query(queries.SessionHeartbeat, self._heartbeat),
                _query(queries.WatchFuture, self._watch_future),
                _query(queries.WatchTokens, self._watch_tokens),
                _query(queries.WatchSamples, self._watch_samples),
                _query(queries.DescribeModel, self._describe_model),
                _query(queries.DescribeCustomLoss, self._describe_loss),
                _query(queries.DescribeSampler, self._describe_sampler),
                _query(queries.JoinSampler, self._join_sampler),
                _query(queries.ListModels, self._list_models),
                _query(queries.ListSessions, self._list_sessions),
                _query(queries.ListCheckpoints, self._list_checkpoints),
                _query(queries.DescribeCheckpoint, self._describe_checkpoint),
                _query(queries.ListResults, self._list_results),
                _query(queries.DescribeServer, self._describe_server),
                _query(queries.CheckHealth, self._check_health),
                _query(queries.ListEndpoints, self._list_endpoints),
                _query(queries.DescribeStatus, self._describe_status),
                _query(queries.DescribeTimeline, self._describe_timeline),
                _query(queries.ListTimelines, self._list_timelines),
                _query(queries.ReadMetrics, self._read_metrics),
                _query(queries.DescribeActivity, self._describe_activity),
                _query(queries.ReportMetrics, self._report_metrics),
                _query(queries.ReadThroughput, self._read_throughput),
                _query(queries.ReadCurves, self._read_curves),
                _query(queries.ReadUsage, self._read_usage),
                _query(queries.ListRollouts, self._list_rollouts),
                _query(queries.ReadRollout, self._read_rollout),
            ]
        )

    async def handle(self, request: messages.OrchestratorRequest) -> messages.Output:
        """An error is a response; any other exception is a defect of this process."""
        try:
            return await self._handle(request.tenant, request.body)
        except StrataError as error:
            return await self._error_response(error)

    async def _error_response(self, error: StrataError) -> views.ErrorResponse:
        """An error that is not transient is final for the client. So only the leader may send it: a deposed
        orchestrator does not know what was decided since, not even that it was deposed.
        """
        if error.code not in TRANSIENT:
            try:
                await self._store.confirm_leadership()
            except StrataError as lost:
                error = StrataError(Code.UNAVAILABLE, f"the lead was lost: {lost.message}", hint="ask again")
        return views.ErrorResponse(error.code, error.message, error.hint)

    async def _handle(self, tenant: str, body: client_commands.Command | queries.Query) -> messages.Output:
        try:
            if isinstance(body, client_commands.Command):
                response = await self._execute(tenant, body)
                if isinstance(response, client_commands.Accepted):
                    self.session_reaper.touch(tenant, response.future_id)
                    self._store.telemetry.record_traced(response.future_id, trace.traceparent())
                return response
            return await self.queries[type(body)](tenant, body)
        finally:
            # A rejected request shows that the client is alive, too. Not earlier: OpenSession makes the session.
            if body.subject is not None:
                self.session_reaper.touch(tenant, body.subject)

    async def _execute(
        self, tenant: str, command: client_commands.Command
    ) -> client_commands.Done | client_commands.Accepted:
        match command:
            case client_commands.ImportCheckpoint():
                return _response(await self.checkpoint_gc.import_checkpoint(tenant, command))
            case client_commands.AddEndpoint() | client_commands.RemoveEndpoint() if (
                command.name in self._context.settings.inference.engines
            ):
                raise StrataError(Code.CONFLICT, f"{command.name} is an engine of the server itself")
            case client_commands.AddEndpoint():
                origin = check_allowed(command.url, self._context.settings.inference.allow)
                command = msgspec.structs.replace(command, url=str(origin), address=await resolve_address(origin))
            case client_commands.SetCheckpointTtl() | client_commands.SubmitOperation(operation=ops.OpenSampler()):
                await self.checkpoint_gc.delete_expired()
            case _:
                pass
        decision = await self._store.commit(ClientCommand(tenant, command, self._now_s()))
        await self.checkpoint_gc.remove(*decision.deleted_folders)
        return _response(decision)

    # Queries

    async def _heartbeat(self, tenant: str, query: queries.SessionHeartbeat) -> client_commands.Done:
        find_session(self._state, tenant, query.session_id)
        return client_commands.Done()

    async def _watch_future(self, tenant: str, query: queries.WatchFuture) -> messages.Output:
        if query.future_id in self._state.custom_losses:
            created = custom_losses.find(self._state, tenant, query.future_id)
            return views.FutureResult(ops.LossCreated(created.loss_id))
        future = find_future(self._state, tenant, query.future_id)
        if future.result is None and query.wait_s > 0:
            await self._store.wait_for_completion(query.future_id, min(query.wait_s, MAX_WAIT_S))
        if future.result is not None:
            if future.ended_at_s + self._context.settings.limits.result_ttl_s <= self._now_s():
                await self._store.expire_results()
                find_future(self._state, tenant, query.future_id)
            if isinstance(future.result, ops.Failed | ops.WeightsSynced | ops.SampleDone) or not future.number:
                await self._wait_durable()
            return views.FutureResult(future.result)
        attached = self._attached() is not None
        return describe_wait(self._state, future, self._context.throughput, attached=attached)

    async def _watch_tokens(self, tenant: str, query: queries.WatchTokens) -> messages.Output:
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
            return views.TokensSampled(parts)
        return await self._watch_future(tenant, queries.WatchFuture(query.future_id, 0.0))

    async def _watch_samples(self, tenant: str, query: queries.WatchSamples) -> views.SamplesEnded:
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
        samples = [view_ended_sample(state, future_id) for future_id in ended]
        if samples:
            await self._wait_durable()
        return views.SamplesEnded(samples, cursor)

    async def _describe_model(self, tenant: str, query: queries.DescribeModel) -> views.ModelView:
        return view_model(find_model(self._state, tenant, query.model_id), self._base)

    async def _describe_loss(self, tenant: str, query: queries.DescribeCustomLoss) -> views.CustomLossView:
        return views.CustomLossView(custom_losses.find(self._state, tenant, query.loss_id).loss)

    async def _describe_sampler(self, tenant: str, query: queries.DescribeSampler) -> views.SamplerView:
        return view_sampler(find_sampler(self._state, tenant, query.sampler_id))

    async def _join_sampler(self, tenant: str, query: queries.JoinSampler) -> views.SamplerJoined:
        sampler = find_sampler(self._state, tenant, query.sampler_id)
        return views.SamplerJoined(self._client_ids.issue(sampler.sampler_id, self._state.samplers))

    async def _list_models(self, tenant: str, _: queries.ListModels) -> views.ModelList:
        base = self._base
        models = [view_model(model, base) for model in self._state.models.values() if model.tenant == tenant]
        return views.ModelList(models)

    async def _list_sessions(self, tenant: str, query: queries.ListSessions) -> views.SessionList:
        state, name = self._state, query.session_id
        sessions = [find_session(state, tenant, name)] if name is not None else state.sessions.values()
        return views.SessionList([view_session(state, each) for each in sessions if each.tenant == tenant])

    async def _list_checkpoints(self, tenant: str, query: queries.ListCheckpoints) -> views.CheckpointList:
        await self.checkpoint_gc.delete_expired()
        checkpoints = checkpoints_of(self._state, tenant, query.model_id)
        return views.CheckpointList([await self._view_checkpoint(checkpoint) for checkpoint in checkpoints])

    async def _describe_checkpoint(self, tenant: str, query: queries.DescribeCheckpoint) -> views.ModelCheckpointView:
        await self.checkpoint_gc.delete_expired()
        checkpoint = find_readable_checkpoint(self._state, tenant, query.run_id, query.kind, query.name)
        return await self._view_checkpoint(checkpoint)

    async def _list_results(self, tenant: str, query: queries.ListResults) -> views.ResultList:
        model = find_model(self._state, tenant, query.model_id)
        results = ended_results(self._state, query.model_id, query.after, query.limit)
        # A result that is lost with the leadership may come again with another end.
        await self._wait_durable()
        return views.ResultList(results, model.unloaded)

    async def _describe_server(self, _: str, __: queries.DescribeServer) -> views.ServerView:
        state, attached, base = self._state, self._attached(), self._base
        return views.ServerView(
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

    async def _check_health(self, _: str, __: queries.CheckHealth) -> views.HealthReport:
        if self._attached() is None:
            return views.HealthReport("starting", (), "the ranks are starting")
        try:
            reply = await self._context.backend.request(commands.HealthCheck(), HEALTH_S)
        except StrataError as error:
            running = self._state.dispatches
            if error.code is Code.DEADLINE and running:
                # Rank 0 replies between two dispatches; the session has a timeout for one that takes too long.
                return views.HealthReport("healthy", (), f"busy with dispatch {min(running)}")
            return views.HealthReport("unhealthy", (), str(error))
        return views.HealthReport("healthy", reply.ranks, "all ranks answered")

    async def _list_endpoints(self, _: str, __: queries.ListEndpoints) -> views.EndpointList:
        return await self.publisher.list_endpoints()

    async def _describe_status(self, tenant: str, query: queries.DescribeStatus) -> reports.StatusView:
        attached = self._attached()
        healthy = await check_ranks(self._context, attached)
        only = None if query.everything else tenant
        return reports.StatusView(describe_status(self._context, attached, healthy, only))

    async def _describe_timeline(self, tenant: str, query: queries.DescribeTimeline) -> reports.TimelineView:
        return describe_timeline(self._context, tenant, query.future_id)

    async def _list_timelines(self, tenant: str, query: queries.ListTimelines) -> reports.TimelinesView:
        lines = list(self._store.telemetry.timelines)
        if query.session_id:
            session = find_session(self._state, tenant, query.session_id)
            lines = [line for line in lines if line.future_id.startswith(f"{session.session_id}:")]
        return reports.TimelinesView(lines)

    async def _read_metrics(self, tenant: str, query: queries.ReadMetrics) -> reports.MetricsView:
        return render_metrics(self._context, self._attached(), None if query.everything else tenant)

    async def _describe_activity(self, tenant: str, query: queries.DescribeActivity) -> reports.ActivityView:
        return describe_activity(self._context, query.operations, None if query.everything else tenant)

    async def _report_metrics(self, tenant: str, query: queries.ReportMetrics) -> client_commands.Done:
        find_model(self._state, tenant, query.model_id)
        self._store.telemetry.curves.report(query.model_id, query.seq_id, query.values)
        return client_commands.Done()

    async def _read_throughput(self, _: str, __: queries.ReadThroughput) -> reports.ThroughputView:
        points = self._store.telemetry.throughput.points(self._now_s())
        return reports.ThroughputView(reports.ThroughputReport(points=points))

    async def _read_usage(self, tenant: str, query: queries.ReadUsage) -> views.UsageView:
        return views.UsageView(self._state.usage.of(tenant, query.from_s, query.until_s))

    async def _read_curves(self, tenant: str, query: queries.ReadCurves) -> reports.CurvesView:
        return read_curves(self._context, tenant, query)

    async def _list_rollouts(self, tenant: str, query: queries.ListRollouts) -> RolloutsView:
        if query.model_id:
            find_model(self._state, tenant, query.model_id)
        return self._store.telemetry.rollouts.kept.newest(tenant, query.model_id, query.limit, self._now_s())

    async def _read_rollout(self, tenant: str, query: queries.ReadRollout) -> RolloutView:
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
        """Waits before a failure or a sample is sent: were it lost with the leadership, the client would see another
        one."""
        try:
            await self._store.wait_durable()
        except StrataError as error:
            raise StrataError(Code.UNAVAILABLE, f"the lead was lost: {error.message}", hint="ask again") from error

    async def _view_checkpoint(self, checkpoint: ModelCheckpoint) -> views.ModelCheckpointView:
        size = await asyncio.to_thread(_size, self._context.settings.checkpoint_folder / checkpoint.path)
        return view_checkpoint(self._state, checkpoint, size)

    def _now_s(self) -> float:
        return self._store.clock.wall_s()


def _query(
    kind: type[Q], answer: Callable[[str, Q], Awaitable[messages.Output]]
) -> tuple[type[msgspec.Struct], QueryHandler]:
    """An entry of the table, with the query and its handler of the same type."""
    return kind, answer


def _response(decision: Decision) -> client_commands.Done | client_commands.Accepted:
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
