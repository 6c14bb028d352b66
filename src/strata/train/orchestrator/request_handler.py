"""`RequestHandler`: executes the commands of API servers (addresses resolved, files moved), and dispatches their
queries; which errors are transient.

A command goes to the state machine as it came. A few need I/O around the decision: an address is resolved, files are
put in place or removed. A query has a function by its type: here what the handler's own parts answer and what only
looks something up, in `results` what waits for a result, in `status` what describes the server.
"""

from __future__ import annotations

import asyncio
import stat
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from strata.base import log, trace
from strata.base.errors import Code, StrataError
from strata.train.core import client_commands, custom_losses, ops
from strata.train.core.inputs import ClientCommand, Decision, Dispatching
from strata.train.core.lookup import (
    checkpoints_of,
    find_model,
    find_readable_checkpoint,
    find_sampler,
    find_session,
)
from strata.train.core.state import ModelCheckpoint, TrainState
from strata.train.endpoints.origin import check_allowed, resolve_address
from strata.train.endpoints.publisher import Publisher
from strata.train.link import messages
from strata.train.orchestrator import results, status
from strata.train.orchestrator.maintenance.checkpoint_gc import CheckpointGc
from strata.train.orchestrator.maintenance.session_reaper import SessionReaper
from strata.train.orchestrator.rank_session import OrchestratorContext
from strata.train.orchestrator.recorded_routing import with_routing
from strata.train.orchestrator.state_store import MAX_INLINE_RESULT_BYTES
from strata.train.payload import Payloads
from strata.train.status import queries, views
from strata.train.status.completion_log import SamplerClientIds
from strata.train.status.rollouts import RolloutFilter, RolloutStore, RolloutsView, RolloutView
from strata.train.status.views import view_checkpoint, view_model, view_sampler, view_session

TRANSIENT: Final = frozenset({Code.UNAVAILABLE, Code.EXHAUSTED, Code.DEADLINE})
"""Errors that a client retries by itself."""
_log = log.get(__name__)

Q = TypeVar("Q", bound=queries.Query)
QueryHandler = Callable[[str, Any], Awaitable[messages.Output]]
"""Answers a query of one type, for a tenant."""


class RequestHandler:
    def __init__(self, context: OrchestratorContext) -> None:
        self._context = context
        self._store = context.store
        self._payloads = Payloads(context.settings.payloads)
        self._reading_routing = asyncio.Lock()
        self.session_reaper = SessionReaper(context.store, context.settings.limits, context.settings.server.lost)
        self._client_ids = SamplerClientIds(context.store.leader_epoch)
        self.checkpoint_gc = CheckpointGc(context.store, context.settings)
        self.publisher = Publisher(context.settings, context.store, self._keep_result)
        self.queries: Mapping[type[msgspec.Struct], QueryHandler] = dict(
            [
                _query(queries.SessionHeartbeat, self._heartbeat),
                _query(queries.DescribeModel, self._describe_model),
                _query(queries.DescribeCustomLoss, self._describe_loss),
                _query(queries.DescribeSampler, self._describe_sampler),
                _query(queries.JoinSampler, self._join_sampler),
                _query(queries.ListModels, self._list_models),
                _query(queries.ListSessions, self._list_sessions),
                _query(queries.ListCheckpoints, self._list_checkpoints),
                _query(queries.DescribeCheckpoint, self._describe_checkpoint),
                _query(queries.ListEndpoints, self._list_endpoints),
                _query(queries.ListRollouts, self._list_rollouts),
                _query(queries.ReadRollout, self._read_rollout),
                _query_in(context, queries.WatchFuture, results.watch_future),
                _query_in(context, queries.WatchTokens, results.watch_tokens),
                _query_in(context, queries.WatchSamples, results.watch_samples),
                _query_in(context, queries.ListResults, results.list_results),
                _query_in(context, queries.DescribeServer, status.describe_server),
                _query_in(context, queries.CheckHealth, status.check_health),
                _query_in(context, queries.DescribeStatus, status.describe_status),
                _query_in(context, queries.DescribeTimeline, status.describe_timeline),
                _query_in(context, queries.ListTimelines, status.list_timelines),
                _query_in(context, queries.ReadMetrics, status.read_metrics),
                _query_in(context, queries.DescribeActivity, status.describe_activity),
                _query_in(context, queries.ReportMetrics, status.report_metrics),
                _query_in(context, queries.ReadThroughput, status.read_throughput),
                _query_in(context, queries.ReadCurves, status.read_curves),
                _query_in(context, queries.ReadUsage, status.read_usage),
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
                error = results.lead_lost(lost)
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
            case client_commands.SubmitOperation(operation=ops.ForwardBackward() as operation):
                operation = await with_routing(self._state, self._payloads, self._reading_routing, tenant, operation)
                command = msgspec.structs.replace(command, operation=operation)
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

    async def _describe_model(self, tenant: str, query: queries.DescribeModel) -> views.ModelView:
        return view_model(find_model(self._state, tenant, query.model_id), self._context.base)

    async def _describe_loss(self, tenant: str, query: queries.DescribeCustomLoss) -> views.CustomLossView:
        return views.CustomLossView(custom_losses.find(self._state, tenant, query.loss_id).loss)

    async def _describe_sampler(self, tenant: str, query: queries.DescribeSampler) -> views.SamplerView:
        return view_sampler(find_sampler(self._state, tenant, query.sampler_id))

    async def _join_sampler(self, tenant: str, query: queries.JoinSampler) -> views.SamplerJoined:
        sampler = find_sampler(self._state, tenant, query.sampler_id)
        return views.SamplerJoined(self._client_ids.issue(sampler.sampler_id, self._state.samplers))

    async def _list_models(self, tenant: str, _: queries.ListModels) -> views.ModelList:
        base = self._context.base
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

    async def _list_endpoints(self, _: str, __: queries.ListEndpoints) -> views.EndpointList:
        return await self.publisher.list_endpoints()

    async def _list_rollouts(self, tenant: str, query: queries.ListRollouts) -> RolloutsView:
        self._check_filter(tenant, query.chosen)
        return self._kept_rollouts.find(tenant, query.chosen, query.limit, self._now_s())

    async def _read_rollout(self, tenant: str, query: queries.ReadRollout) -> RolloutView:
        self._check_filter(tenant, query.chosen)
        return self._kept_rollouts.read(tenant, query.rollout_id, query.chosen, self._now_s())

    def _check_filter(self, tenant: str, chosen: RolloutFilter) -> None:
        if chosen.model:
            find_model(self._state, tenant, chosen.model)

    @property
    def _kept_rollouts(self) -> RolloutStore:
        return self._store.telemetry.rollouts.kept

    # What they share

    @property
    def _state(self) -> TrainState:
        return self._store.state

    async def _keep_result(self, result: ops.Result) -> ops.Result:
        free_bytes = max(MAX_INLINE_RESULT_BYTES - self._state.futures.result_bytes, 0)
        return await self._context.processor.keep(result, inline_bytes=min(ops.INLINE_BYTES, free_bytes))

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


def _query_in(
    context: OrchestratorContext,
    kind: type[Q],
    answer: Callable[[OrchestratorContext, str, Q], Awaitable[messages.Output]],
) -> tuple[type[msgspec.Struct], QueryHandler]:
    return kind, partial(answer, context)


def _response(decision: Decision) -> client_commands.Done | client_commands.Accepted:
    assert not isinstance(decision.reply, Dispatching), "only DispatchNext dispatches"
    return decision.reply


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
