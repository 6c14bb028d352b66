"""`RequestHandler`: carries out the requests of API servers and answers them."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final, assert_never

from strata.base import log
from strata.base.errors import Code, StrataError
from strata.train.core import commands, inputs, messages, ops, status
from strata.train.core.completion_log import SamplerClientIds, Target, target_of
from strata.train.core.state import ModelCheckpoint, TrainState
from strata.train.core.throughput import describe_wait
from strata.train.core.views import (
    check_sampler_owner,
    checkpoints_of,
    find_checkpoint,
    find_future,
    find_model,
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
from strata.train.orchestrator.status import describe

MAX_WAIT_S: Final = 120.0
HEALTH_S: Final = 5.0
TRANSIENT: Final = frozenset({Code.UNAVAILABLE, Code.EXHAUSTED, Code.DEADLINE})
_log = log.get(__name__)


class RequestHandler:
    def __init__(self, context: OrchestratorContext, attached: Callable[[], commands.AttachReply | None]) -> None:
        self._context = context
        self._store = context.store
        self._attached = attached
        self.session_reaper = SessionReaper(context.store, context.settings.limits)
        self._client_ids = SamplerClientIds(context.store.leader_epoch)
        self.checkpoint_gc = CheckpointGc(context.store, context.settings)
        self.publisher = Publisher(context.settings, context.store, self._keep)

    async def handle(self, request: messages.OrchestratorRequest) -> messages.Output:
        """A refusal is an answer; anything else that goes wrong is a defect of this process."""
        try:
            return await self._answer(request)
        except StrataError as error:
            return await self._error_response(error)

    async def _error_response(self, error: StrataError) -> messages.ErrorResponse:
        """A refusal is the end for a client, unless it is one of those that pass. So only whoever leads may say it: one
        that was deposed knows nothing of what came since, not even that it was.
        """
        if error.code not in TRANSIENT:
            try:
                await self._store.confirm_leadership()
            except StrataError as lost:
                error = StrataError(Code.UNAVAILABLE, f"the lead was lost: {lost.message}", hint="ask again")
        return messages.ErrorResponse(error.code, error.message, error.hint)

    async def _answer(self, request: messages.OrchestratorRequest) -> messages.Output:
        tenant = request.tenant
        match request.request_type:
            case messages.RequestType.ADD:
                if request.operation is None:
                    raise StrataError(Code.INVALID, "there is no operation in the request")
                if isinstance(request.operation, ops.OpenSampler):
                    await self.checkpoint_gc.delete_expired()
                given = inputs.Accept(tenant, request.operation, self._now_s(), request.session_id)
                outcome = await self._store.commit(given)
                assert isinstance(outcome.reply, inputs.Taken)
                self.session_reaper.touch(tenant, outcome.reply.future_id)
                return messages.Accepted(outcome.reply.future_id, outcome.reply.model_id)
            case messages.RequestType.ABORT:
                if not isinstance(request.payload, messages.Abort):
                    raise StrataError(Code.INVALID, "there is no future in the request")
                self.session_reaper.touch_request(tenant, request.payload)
                await self._store.commit(inputs.Abort(tenant, request.payload.future_id, self._now_s()))
                return messages.Done()
            case messages.RequestType.UTILITY:
                if request.payload is None or isinstance(request.payload, messages.Abort):
                    raise StrataError(Code.INVALID, "there is no question in the request")
                try:
                    return await self._look(tenant, request.payload)
                finally:
                    # Also what is refused was asked. Not before: a session is there after it was opened.
                    self.session_reaper.touch_request(tenant, request.payload)

    async def _look(self, tenant: str, asked: messages.Utility) -> messages.Output:  # noqa: C901, PLR0911, PLR0912
        state = self._store.state
        base = attached.model if (attached := self._attached()) else None
        match asked:
            case messages.OpenSession():
                await self._store.commit(_opened(tenant, asked, self._now_s()))
                return messages.Done()
            case messages.SessionHeartbeat():
                find_session(state, tenant, asked.session_id)
                return messages.Done()
            case messages.FinishSession():
                await self._store.commit(inputs.FinishSession(tenant, asked.session_id, asked.reason, self._now_s()))
                return messages.Done()
            case messages.WatchFuture():
                return await self._watch(tenant, asked)
            case messages.WatchSamples():
                return await self._watch_samples(tenant, asked)
            case messages.DescribeModel():
                return view_model(find_model(state, tenant, asked.model_id), base)
            case messages.DescribeSampler():
                return view_sampler(find_sampler(state, tenant, asked.sampler_id))
            case messages.JoinSampler():
                sampler = find_sampler(state, tenant, asked.sampler_id)
                return messages.SamplerJoined(self._client_ids.issue(sampler.sampler_id, state.samplers))
            case messages.ListModels():
                mine = [view_model(each, base) for each in state.models.values() if each.tenant == tenant]
                return messages.ModelList(mine)
            case messages.ListSessions():
                named = asked.session_id
                sessions = [find_session(state, tenant, named)] if named is not None else state.sessions.values()
                return messages.SessionList([view_session(state, each) for each in sessions if each.tenant == tenant])
            case messages.SetCheckpointTtl():
                await self.checkpoint_gc.delete_expired()
                given = inputs.SetCheckpointTtl(
                    tenant, asked.run_id, asked.kind, asked.name, asked.ttl_s, self._now_s()
                )
                await self._store.commit(given)
                return messages.Done()
            case messages.ImportCheckpoint():
                await self.checkpoint_gc.import_checkpoint(tenant, asked)
                return messages.Done()
            case messages.ListCheckpoints():
                await self.checkpoint_gc.delete_expired()
                found = checkpoints_of(state, tenant, asked.model_id)
                return messages.CheckpointList([await self._view(each) for each in found])
            case messages.DescribeCheckpoint():
                await self.checkpoint_gc.delete_expired()
                return await self._view(find_checkpoint(state, tenant, asked.run_id, asked.kind, asked.name))
            case messages.DeleteCheckpoint():
                return await self._delete(inputs.DeleteCheckpoint(tenant, asked.run_id, asked.kind, asked.name))
            case messages.DescribeServer():
                return self._server()
            case messages.CheckHealth():
                return await self._health()
            case messages.AddEndpoint() | messages.RemoveEndpoint() | messages.ListEndpoints():
                return await self._endpoints(asked)
            case status.DescribeStatus() | status.DescribeTimeline() | status.ListTimelines() | status.ReadMetrics():
                return await describe(self._context, attached, tenant, asked)
            case _:
                assert_never(asked)

    async def _watch(self, tenant: str, asked: messages.WatchFuture) -> messages.Output:
        future = find_future(self._store.state, tenant, asked.future_id)
        if future.result is None and asked.wait_s > 0:
            await self._store.wait_for_completion(asked.future_id, min(asked.wait_s, MAX_WAIT_S))
        if future.result is not None:
            if future.ended_at_s + self._context.settings.limits.result_ttl_s <= self._now_s():
                await self._store.expire_results()
                find_future(self._store.state, tenant, asked.future_id)
            if isinstance(future.result, ops.Failed | ops.WeightsSynced | ops.SampleDone) or not future.number:
                await self._wait_durable()
            return messages.FutureResult(future.result)
        attached = self._attached() is not None
        return describe_wait(self._store.state, future, self._context.throughput, attached=attached)

    async def _watch_samples(self, tenant: str, asked: messages.WatchSamples) -> messages.SamplesEnded:
        store, state = self._store, self._store.state
        check_sampler_owner(state, tenant, asked.sampler_id)
        target = asked.sampler_id, asked.copy
        ended, cursor = store.completions.after(target, asked.cursor)
        if not ended:
            opened = _open(state, target)
            if opened:
                store.completions.expect(target)
            elif asked.linger:
                # One that has made room: nothing of it will ever end.
                find_sampler(state, tenant, asked.sampler_id)
            if asked.wait_s > 0 and (opened or asked.linger):
                await store.wait_for_completion(target, min(asked.wait_s, MAX_WAIT_S))
                ended, cursor = store.completions.after(target, asked.cursor)
        views = [view_ended_sample(state, each) for each in ended]
        if views:
            await self._wait_durable()
        return messages.SamplesEnded(views, cursor)

    async def _endpoints(
        self, asked: messages.AddEndpoint | messages.RemoveEndpoint | messages.ListEndpoints
    ) -> messages.Output:
        match asked:
            case messages.AddEndpoint():
                origin = check_allowed(asked.url, self._context.settings.inference.allow)
                address = await resolve_address(origin)
                await self._store.commit(
                    inputs.AddEndpoint(asked.name, str(origin), address, asked.engine, self._now_s())
                )
                return messages.Done()
            case messages.RemoveEndpoint():
                await self._store.commit(inputs.RemoveEndpoint(asked.name))
                return messages.Done()
            case messages.ListEndpoints():
                return await self.publisher.list_endpoints()

    async def _keep(self, result: ops.Result) -> ops.Result:
        room = max(MAX_INLINE_RESULT_BYTES - self._store.state.futures.result_bytes, 0)
        return await self._context.processor.keep(result, inline_bytes=min(ops.INLINE_BYTES, room))

    async def _wait_durable(self) -> None:
        """A failure that is told and then lost with the lead would be followed by a result, and a sample by another."""
        try:
            await self._store.wait_durable()
        except StrataError as error:
            raise StrataError(Code.UNAVAILABLE, f"the lead was lost: {error.message}", hint="ask again") from error

    async def _view(self, checkpoint: ModelCheckpoint) -> messages.ModelCheckpointView:
        size = await asyncio.to_thread(_size, self._context.settings.checkpoints / checkpoint.path)
        return view_checkpoint(self._store.state, checkpoint, size)

    async def _delete(self, given: inputs.DeleteCheckpoint) -> messages.Done:
        outcome = await self._store.commit(given)
        assert isinstance(outcome.reply, inputs.Removed)
        await self.checkpoint_gc.remove(outcome.reply.path)
        return messages.Done()

    def _server(self) -> messages.ServerView:
        state, attached = self._store.state, self._attached()
        return messages.ServerView(
            base_model=self._context.settings.model.base_model,
            max_context=attached.model.max_context if attached else 0,
            full=self._context.settings.model.training == "full",
            world_size=attached.world_size if attached else 0,
            arch=attached.model.arch if attached else "",
            ready=attached is not None,
            pending=state.futures.pending(),
            running=len(state.dispatches),
            dispatched=state.dispatched,
            snapshot=state.snapshots[-1].number if state.snapshots else 0,
        )

    async def _health(self) -> messages.HealthReport:
        if self._attached() is None:
            return messages.HealthReport("starting", (), "the ranks are starting")
        try:
            healthy = await self._context.backend.request(commands.HealthCheck(), HEALTH_S)
        except StrataError as error:
            running = self._store.state.dispatches
            if error.code is Code.DEADLINE and running:
                # Rank 0 answers between two dispatches; one that takes too long is noticed elsewhere.
                return messages.HealthReport("healthy", (), f"busy with dispatch {min(running)}")
            return messages.HealthReport("unhealthy", (), str(error))
        return messages.HealthReport("healthy", healthy.ranks, "all ranks answered")

    def _now_s(self) -> float:
        return self._store.clock.wall_s()


def _open(state: TrainState, target: Target) -> bool:
    return any(target_of(future_id) == target for future_id in state.samples_of(target[0]))


def _opened(tenant: str, asked: messages.OpenSession, at_s: float) -> inputs.OpenSession:
    return inputs.OpenSession(
        tenant, asked.session_id, at_s, tuple(asked.tags), dict(asked.user_metadata), asked.sdk_version
    )


def _size(folder: Path) -> int:
    """Of what is there: a checkpoint may be deleted while somebody looks at it."""
    size = 0
    try:
        for path in folder.rglob("*"):
            found = path.lstat()
            size += found.st_size if stat.S_ISREG(found.st_mode) else 0
    except FileNotFoundError:
        _log.info("a checkpoint was deleted while its size was looked up", folder=str(folder))
    return size
