"""The RPCs of the contract: each says who calls, converts, calls the service, and converts back."""

# ruff: noqa: N802 - the names of the calls are the contract's
from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

import grpc

from strata.base import log
from strata.base.errors import Code, StrataError
from strata.coord import beats, calls, wire
from strata.coord.core.inputs import Beat, Caller, Recover
from strata.coord.core.shards import files_of
from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.pb import coordinator_pb2_grpc as pb_grpc
from strata.coord.presence import attached
from strata.coord.rpc.gate import ANY, OPERATOR, WORKER, Gate
from strata.coord.rpc.status import STATUS_OF, number, trailing
from strata.coord.service import CoordinatorService, not_leading
from strata.coord.tokens import Role
from strata.coord.waiting import until
from strata.coord.wire import Identity
from strata.coord.wire_job import job_state

MAX_BATCH: Final = 10_000
MAX_WAIT_S: Final = 60.0
"""A call for shards waits no longer than this, so that its answer still finds the caller."""
WATCH_S: Final = 0.5
REFRESH_S: Final = 2.0
"""Telemetry alone is no change, but people want to see it."""

Reply = TypeVar("Reply")
Context = grpc.aio.ServicerContext[Any, Any]

_log = log.get(__name__)


class Servicer(pb_grpc.CoordinatorServicer):
    def __init__(self, service: CoordinatorService, gate: Gate) -> None:
        self._service = service
        self._gate = gate

    async def RegisterWorker(self, request: pb.WorkerInfo, context: Context) -> pb.WorkerConfig:
        return await self._answer(context, WORKER, lambda who: self._register(request, who))

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Context) -> pb.HeartbeatResponse:
        return await self._answer(context, WORKER, lambda who: self._beat(request, who))

    async def HeartbeatBatch(self, request: pb.HeartbeatBatchRequest, context: Context) -> pb.HeartbeatBatchResponse:
        return await self._answer(context, WORKER, lambda who: self._beats(request, who))

    async def GetNextShards(self, request: pb.ShardRequest, context: Context) -> pb.ShardAssignment:
        return await self._answer(context, WORKER, lambda who: self._next_shards(request, who))

    async def AckDataset(self, request: pb.DatasetInfo, context: Context) -> pb.DatasetAck:
        return await self._answer(context, WORKER, lambda who: self._ack_dataset(request, who))

    async def Barrier(self, request: pb.BarrierRequest, context: Context) -> pb.BarrierResponse:
        return await self._answer(context, WORKER, lambda who: self._barrier(request, who))

    async def ReportCheckpoint(self, request: pb.CheckpointInfo, context: Context) -> pb.CheckpointAck:
        return await self._answer(context, WORKER, lambda who: self._report(request, who))

    async def RequestRecovery(self, request: pb.RecoveryRequest, context: Context) -> pb.RecoveryResponse:
        return await self._answer(context, WORKER, lambda who: self._recover(request, who))

    async def LeaveWorker(self, request: pb.LeaveWorkerRequest, context: Context) -> pb.LeaveWorkerResponse:
        return await self._answer(context, WORKER, lambda who: self._leave(request, who))

    # A coroutine that writes, not a generator: a generator is closed only some time after its client has gone.
    async def Attach(self, request: pb.AttachRequest, context: Context) -> None:  # type: ignore[override]
        await self._answer(context, WORKER, lambda who: self._attach(request, who, context))

    async def GetJob(self, request: pb.GetJobRequest, context: Context) -> pb.GetJobResponse:
        return await self._answer(context, ANY, lambda who: self._get_job(request, who))

    async def WatchJob(self, request: pb.WatchJobRequest, context: Context) -> None:  # type: ignore[override]
        await self._answer(context, ANY, lambda who: self._watch_job(request, who, context))

    async def IssueCommand(self, request: pb.IssueCommandRequest, context: Context) -> pb.IssueCommandResponse:
        return await self._answer(context, OPERATOR, lambda who: self._issue(request, who))

    async def _answer(
        self, context: Context, roles: frozenset[Role], work: Callable[[Identity], Awaitable[Reply]]
    ) -> Reply:
        """The outermost handler of every call: an error leaves as a status, never as a traceback."""
        try:
            return await self._expected(context, roles, work)
        except StrataError as error:
            await context.abort(STATUS_OF[error.code], str(error), trailing(error))
            raise AssertionError("abort always raises") from error

    async def _expected(
        self, context: Context, roles: frozenset[Role], work: Callable[[Identity], Awaitable[Reply]]
    ) -> Reply:
        try:
            return await work(self._gate.identify(context.invocation_metadata() or (), roles))
        except (StrataError, grpc.aio.BaseError):
            raise
        except Exception as error:
            correlation_id = self._service.ids.new("fault")
            with log.correlation(correlation_id):
                _log.exception("a call failed unexpectedly")
            raise StrataError(Code.INTERNAL, f"internal error; the log knows more under {correlation_id}") from error

    async def _register(self, request: pb.WorkerInfo, who: Identity) -> pb.WorkerConfig:
        given = wire.worker(request, who, self._service.ids.new("life"))
        job, place = await calls.register(self._service, given)
        if request.sdk_version:
            self._service.watch(job.job).sdks[given.worker.worker_id] = request.sdk_version
        reply = wire.config(job, place, self._service.state.leader_epoch)
        if request.include_members and place.generation:
            reply.members.extend(wire.members(job))
        if request.held_leases:
            reply.lost_leases.extend(calls.lost_leases(job, given.worker.worker_id, request.held_leases))
        return reply

    async def _beat(self, request: pb.HeartbeatRequest, who: Identity) -> pb.HeartbeatResponse:
        job_id, worker_id = who.job_of(request.job_id), who.worker_of(request.worker_id)
        found = beats.at_once(self._service, request, job_id, worker_id, self._service.clock.monotonic_s())
        return found if not isinstance(found, Beat) else await beats.after_commit(self._service, request, found)

    async def _beats(self, request: pb.HeartbeatBatchRequest, who: Identity) -> pb.HeartbeatBatchResponse:
        """Most beats make no facts and are answered in this one turn of the loop."""
        if len(request.heartbeats) > MAX_BATCH:
            raise StrataError(Code.INVALID, f"a batch has at most {MAX_BATCH} heartbeats")
        if not self._service.leads:
            raise not_leading()
        reply = pb.HeartbeatBatchResponse()
        later: list[Awaitable[None]] = []
        now_s = self._service.clock.monotonic_s()
        for message in request.heartbeats:
            outcome = reply.outcomes.add()
            outcome.worker_id = message.worker_id
            try:
                outcome.job_id = job_id = who.job_of(message.job_id)
                worker_id = who.worker_of(message.worker_id)
                found = beats.at_once(self._service, message, job_id, worker_id, now_s)
                if isinstance(found, Beat):
                    later.append(self._beat_later(message, found, outcome))
                else:
                    outcome.response.CopyFrom(found)
            except StrataError as error:
                _refuse(outcome, error)
        if later:
            await asyncio.gather(*later)
        return reply

    async def _beat_later(self, message: pb.HeartbeatRequest, beat: Beat, outcome: pb.HeartbeatOutcome) -> None:
        try:
            outcome.response.CopyFrom(await beats.after_commit(self._service, message, beat))
        except StrataError as error:
            _refuse(outcome, error)

    async def _next_shards(self, request: pb.ShardRequest, who: Identity) -> pb.ShardAssignment:
        given = wire.next_shards(request, who)
        found = await calls.next_shards(self._service, given, min(request.wait_ms / 1000, MAX_WAIT_S))
        state = self._service.state
        job, live = state.jobs[given.caller.job], state.live_of(given.caller.job)
        dataset = job.datasets[given.dataset_id].dataset
        files_of(live, dataset, 0, 1)
        ends = live.file_ends[given.dataset_id]
        generation = self._service.watch(job.job).generation
        return wire.assignment(found, generation, request.epoch, dataset, ends)

    async def _ack_dataset(self, request: pb.DatasetInfo, who: Identity) -> pb.DatasetAck:
        registered, ledger = await calls.confirm_dataset(
            self._service,
            wire.caller(request, who, request.generation),
            request.dataset_id,
            lambda known: wire.dataset(request, known),
        )
        return wire.dataset_ack(registered, ledger)

    async def _barrier(self, request: pb.BarrierRequest, who: Identity) -> pb.BarrierResponse:
        wait = request.wait if request.HasField("wait") else True
        return wire.barrier(await calls.arrive(self._service, wire.arrive(request, who), wait=wait))

    async def _report(self, request: pb.CheckpointInfo, who: Identity) -> pb.CheckpointAck:
        caller = wire.caller(request, who, request.generation)
        steps = self._service.watch(caller.job).steps if caller.job in self._service.state.jobs else {}
        found, step = await calls.report(
            self._service,
            caller,
            lambda job: wire.report(request, caller, job, steps.get(caller.worker_id, 0)),
        )
        return wire.checkpoint_ack(found, step)

    async def _recover(self, request: pb.RecoveryRequest, who: Identity) -> pb.RecoveryResponse:
        caller = wire.caller(request, who)
        given = Recover(caller, request.observed_generation, request.bad_checkpoint_id or None)
        found = await calls.recover(self._service, given)
        times = self._service.watch(caller.job).committed_at_s
        at_s = times.get(found.checkpoint.checkpoint_id, 0.0) if found.checkpoint else 0.0
        return wire.recovery(found, self._service.state.leader_epoch, at_s)

    async def _leave(self, request: pb.LeaveWorkerRequest, who: Identity) -> pb.LeaveWorkerResponse:
        caller = wire.caller(request, who)
        generation, rejected = await calls.leave(self._service, caller, request.reason, wire.acks(request.acks))
        return pb.LeaveWorkerResponse(generation=generation, rejected_leases=rejected)

    async def _attach(self, request: pb.AttachRequest, who: Identity, context: Context) -> None:
        caller: Caller = wire.caller(request, who)
        with attached(self._service, caller) as presence:
            while True:
                news = await presence.news()
                await context.write(
                    pb.AttachResponse(
                        commands=map(wire.command, news.commands),
                        generation=news.generation,
                        leader_epoch=self._service.state.leader_epoch,
                    )
                )

    async def _get_job(self, request: pb.GetJobRequest, who: Identity) -> pb.GetJobResponse:
        return pb.GetJobResponse(job=self._show(who.job_of(request.job_id), request.history_limit))

    async def _watch_job(self, request: pb.WatchJobRequest, who: Identity, context: Context) -> None:
        job_id = who.job_of(request.job_id)
        pause_s = request.min_interval_ms / 1000 or WATCH_S
        while True:
            with self._service.events.on(("changed", job_id)) as changed:
                await context.write(pb.WatchJobResponse(job=self._show(job_id, request.history_limit)))
                await self._service.clock.sleep(pause_s)
                await until(changed, max(REFRESH_S, pause_s))
                if changed.cancelled():
                    raise not_leading()

    def _show(self, job_id: str, limit: int) -> pb.JobState:
        state = self._service.state
        if job_id not in state.jobs:
            raise StrataError(Code.NOT_FOUND, f"there is no job {job_id!r}")
        clock = self._service.clock
        return job_state(state, job_id, self._service.watch(job_id), clock.monotonic_s(), clock.wall_s(), limit)

    async def _issue(self, request: pb.IssueCommandRequest, who: Identity) -> pb.IssueCommandResponse:
        command_id, workers = await calls.issue(self._service, wire.issue(request, who), request.request_id)
        return pb.IssueCommandResponse(command_id=command_id, worker_ids=workers)


def _refuse(outcome: pb.HeartbeatOutcome, error: StrataError) -> None:
    outcome.status_code = number(STATUS_OF[error.code])
    outcome.status_message = str(error)
