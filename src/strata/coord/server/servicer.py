"""The RPCs of the contract: each authenticates the caller, converts the message, calls the service and converts back;
with the longest wait, the interval of watches, and the page size of events.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any, Final, NoReturn, TypeVar, cast

import grpc
import msgspec
from google.protobuf.message import Message

from strata.base import log
from strata.base.errors import Code, StrataError
from strata.coord.core.history import find_events, open_cost
from strata.coord.core.inputs import BarrierState, Caller, CreateJob, DeleteJob, RequestRecovery, ResetJob, UpdateJob
from strata.coord.core.lifecycle import job_named
from strata.coord.core.shards import file_ends
from strata.coord.core.state import CoordState
from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.server import operations, wire
from strata.coord.server.authenticator import ANONYMOUS, ANY, OPERATOR, WORKER, Metadata, TokenAuthenticator
from strata.coord.server.grpc_handler import STATUS_OF, trailing
from strata.coord.server.heartbeat import HeartbeatHandler
from strata.coord.server.presence import open_presence, suspect_unless
from strata.coord.server.service import CoordinatorService
from strata.coord.server.tokens import TokenRole
from strata.coord.server.watch import JobWatches, unknown_job
from strata.coord.server.wire import Identity
from strata.coord.server.wire_job import EVENT_KIND_OF, created_config, job_event, summary, updated_config

MAX_WAIT_S: Final = 60.0
"""A call for shards waits no longer than this, so that its reply still reaches the caller."""
WATCH_S: Final = 0.5
EVENTS: Final = 100
MOST_EVENTS: Final = 1_000
VALID_CHECK_S: Final = 1.0
"""How long a stream may outlive its token."""

STREAMS: Final = frozenset({"Attach", "WatchJob"})
FORWARDED: Final = "strata-forwarded"
"""Metadata of a call that another process of the installation has forwarded: the address of that process."""
NAMED: Final = (pb.HeartbeatRequest, pb.ShardRequest, pb.BarrierRequest)
"""Frequent requests, which name their worker: then the metadata need not be read."""

Request = TypeVar("Request", bound=Message)
Reply = TypeVar("Reply")
Context = grpc.aio.ServicerContext[Any, Any]
Handler = Callable[[Any, Context], Awaitable[Any]]

_log = log.get(__name__)


class Servicer:
    """What answers each call of the contract, in `operations` under the contract's name."""

    def __init__(
        self,
        service: CoordinatorService,
        authenticator: TokenAuthenticator,
        is_hop_broken: Callable[[str], Awaitable[bool]] | None = None,
    ) -> None:
        """`is_hop_broken` tells whether the process at an address, which forwarded a stream, may have broken it."""
        self._service = service
        self._authenticator = authenticator
        self._is_hop_broken = is_hop_broken
        self._hop_checks: set[asyncio.Task[None]] = set()
        self._released: tuple[BarrierState | None, bytes] = None, b""
        self._watches = JobWatches(service)
        self.heartbeats = heartbeats = HeartbeatHandler(service)
        self.roles: dict[str, frozenset[TokenRole]] = {}
        self.calls: Final[Mapping[str, Handler]] = {
            "RegisterWorker": self._serve("RegisterWorker", WORKER, self._register),
            "Heartbeat": self._serve("Heartbeat", WORKER, self._with_token_renewal(heartbeats.one)),
            "HeartbeatBatch": self._serve("HeartbeatBatch", WORKER, self._with_token_renewal(heartbeats.batch)),
            "GetNextShards": self._serve("GetNextShards", WORKER, self._next_shards),
            "AckDataset": self._serve("AckDataset", WORKER, self._ack_dataset),
            "Barrier": self._serve("Barrier", WORKER, self._barrier),
            "ReportCheckpoint": self._serve("ReportCheckpoint", WORKER, self._report),
            "RequestRecovery": self._serve("RequestRecovery", WORKER, self._recover),
            "LeaveWorker": self._serve("LeaveWorker", WORKER, self._leave),
            "Attach": self._serve("Attach", WORKER, self._ending_with_token(WORKER, self._attach)),
            "GetJob": self._serve("GetJob", ANY, self._get_job),
            "WatchJob": self._serve("WatchJob", ANY, self._ending_with_token(ANY, self._watch_job)),
            "IssueCommand": self._serve("IssueCommand", OPERATOR, self._issue),
            "ListJobs": self._serve("ListJobs", ANY, self._list_jobs),
            "CreateJob": self._serve("CreateJob", OPERATOR, self._create_job),
            "UpdateJob": self._serve("UpdateJob", OPERATOR, self._update_job),
            "ResetJob": self._serve("ResetJob", OPERATOR, self._reset_job),
            "DeleteJob": self._serve("DeleteJob", OPERATOR, self._delete_job),
            "ListEvents": self._serve("ListEvents", ANY, self._list_events),
        }

    def check_access(self, name: str, metadata: Metadata) -> None:
        """Raise unless the metadata may make this call; before its message is read."""
        if not self._authenticator.allows_anonymous:
            self._authenticator.identify(metadata, self.roles[name])

    def _serve(
        self,
        name: str,
        roles: frozenset[TokenRole],
        work: Callable[[Request, Identity, Context], Awaitable[Reply]],
    ) -> Handler:
        """The outermost handler of a call: an error leaves as a status, never as a traceback."""
        self.roles[name] = roles
        record, monotonic_s = self._service.metrics.rpc(name, stream=name in STREAMS), self._service.clock.monotonic_s

        async def answer(request: Request | StrataError, context: Context) -> Reply:
            started_s = monotonic_s()
            if isinstance(request, StrataError):
                record(STATUS_OF[request.code].name, 0.0)
                await self._abort(context, request)
            try:
                reply = await work(request, self._identify(request, context, roles), context)
            except grpc.aio.BaseError:
                record("CANCELLED", monotonic_s() - started_s)
                raise
            except Exception as error:
                code = error.code if isinstance(error, StrataError) else Code.INTERNAL
                record(STATUS_OF[code].name, monotonic_s() - started_s)
                await self._abort(context, error)
                raise AssertionError("abort always raises") from error
            record("OK", monotonic_s() - started_s)
            return reply

        return answer

    def _ending_with_token(
        self, roles: frozenset[TokenRole], work: Callable[[Request, Identity, Context], Awaitable[None]]
    ) -> Callable[[Request, Identity, Context], Awaitable[None]]:
        """A stream ends with the token that opened it, at its expiry or when it is revoked."""
        if self._authenticator.allows_anonymous:
            return work

        async def stream(request: Request, who: Identity, context: Context) -> None:
            metadata = cast(Metadata, context.invocation_metadata() or ())
            streaming = asyncio.ensure_future(work(request, who, context))
            try:
                while not (await asyncio.wait({streaming}, timeout=VALID_CHECK_S))[0]:
                    self._authenticator.identify(metadata, roles)
                streaming.result()
            finally:
                streaming.cancel()
                await asyncio.wait({streaming})

        return stream

    def _with_token_renewal(
        self, work: Callable[[Request, Identity, Context], Awaitable[Message | bytes]]
    ) -> Callable[[Request, Identity, Context], Awaitable[Message | bytes]]:
        """The reply to a heartbeat contains a renewed token once that is due."""
        if self._authenticator.allows_anonymous:
            return work

        async def renew(request: Request, who: Identity, context: Context) -> Message | bytes:
            reply = await work(request, who, context)
            token = self._authenticator.renewal(cast(Metadata, context.invocation_metadata() or ()))
            if token is None:
                return reply
            encoded = reply if isinstance(reply, bytes) else reply.SerializeToString()
            # Protobuf messages are merged by concatenation; both replies have the token in field 14.
            return encoded + pb.HeartbeatResponse(token=token).SerializeToString()

        return renew

    async def _abort(self, context: Context, error: Exception) -> NoReturn:
        if not isinstance(error, StrataError):
            correlation_id = self._service.ids.new("fault")
            with log.correlation(correlation_id):
                _log.error("unexpected_error", exc_info=error)
            error = StrataError(Code.INTERNAL, f"internal error; the log knows more under {correlation_id}")
        await context.abort(STATUS_OF[error.code], str(error), trailing(error))

    def _identify(self, request: Message, context: Context, roles: frozenset[TokenRole]) -> Identity:
        if self._authenticator.allows_anonymous and isinstance(request, NAMED) and request.job_id and request.worker_id:
            # The metadata matters only where the message names no worker, and reading it is not free.
            return ANONYMOUS
        return self._authenticator.identify(cast(Metadata, context.invocation_metadata() or ()), roles)

    async def _register(self, request: pb.WorkerInfo, who: Identity, _: Context) -> pb.WorkerConfig:
        registration = wire.worker(request, who, self._service.ids.new("incarnation"))
        job, assignment = await operations.register(self._service, registration)
        if request.sdk_version:
            self._service.telemetry.of(job.job).sdk_versions[registration.worker.worker_id] = request.sdk_version
        reply = wire.config(self._service.state, job, assignment)
        if request.include_members and assignment.generation:
            reply.members.extend(wire.members(job))
        if request.held_leases:
            reply.lost_leases.extend(operations.lost_leases(job, registration.worker.worker_id, request.held_leases))
        return reply

    async def _next_shards(self, request: pb.ShardRequest, who: Identity, _: Context) -> pb.ShardAssignment:
        shard_request = wire.next_shards(request, who)
        leased = await operations.next_shards(self._service, shard_request, min(request.wait_ms / 1000, MAX_WAIT_S))
        state = self._service.state
        job = state.jobs[shard_request.caller.job]
        dataset = job.datasets[shard_request.dataset_id].dataset
        ends = file_ends(state.indexes_of(job.job), dataset)
        generation = self._service.telemetry.of(job.job).generation
        return wire.assignment(leased, generation, request.epoch, dataset, ends)

    async def _ack_dataset(self, request: pb.DatasetInfo, who: Identity, _: Context) -> pb.DatasetAck:
        registered, ledger = await operations.confirm_dataset(
            self._service,
            wire.caller(request, who, request.generation),
            request.dataset_id,
            lambda known: wire.dataset(request, known),
        )
        return wire.dataset_ack(registered, ledger)

    async def _barrier(self, request: pb.BarrierRequest, who: Identity, context: Context) -> bytes:
        wait = request.wait if request.HasField("wait") else True
        # The headers of the reply are sent while the worker waits, so that a release has less to send.
        state = await operations.arrive(
            self._service, wire.arrive(request, who), wait=wait, on_wait=lambda: context.send_initial_metadata(())
        )
        # All released calls come here one after the other, with the very same state.
        released, encoded = self._released
        if state is not released:
            encoded = wire.barrier(state).SerializeToString()
            self._released = state, encoded
        return encoded

    async def _report(self, request: pb.CheckpointInfo, who: Identity, _: Context) -> pb.CheckpointAck:
        caller = wire.caller(request, who, request.generation)
        steps = self._service.telemetry.of(caller.job).steps if caller.job in self._service.state.jobs else {}
        found, step = await operations.report(
            self._service,
            caller,
            lambda job: wire.report(request, caller, job, steps.get(caller.worker_id, 0)),
        )
        return wire.checkpoint_ack(found, step)

    async def _recover(self, request: pb.RecoveryRequest, who: Identity, _: Context) -> pb.RecoveryResponse:
        caller = wire.caller(request, who)
        recovery_request = RequestRecovery(caller, request.observed_generation, request.bad_checkpoint_id or None)
        recovery = await operations.recover(self._service, recovery_request)
        return wire.recovery(recovery, self._service.state.leader_epoch)

    async def _leave(self, request: pb.LeaveWorkerRequest, who: Identity, _: Context) -> pb.LeaveWorkerResponse:
        caller = wire.caller(request, who)
        generation, rejected = await operations.leave(
            self._service, caller, request.reason, wire.acks(request.acks), finished=request.finished
        )
        return pb.LeaveWorkerResponse(generation=generation, rejected_leases=rejected)

    async def _attach(self, request: pb.AttachRequest, who: Identity, context: Context) -> None:
        caller: Caller = wire.caller(request, who)
        with open_presence(self._service, caller, self._on_broken_hop(context)) as presence:
            while True:
                update = await presence.next_update()
                await context.write(
                    pb.AttachResponse(
                        commands=map(wire.command, update.commands),
                        generation=update.generation,
                        leader_epoch=self._service.state.leader_epoch,
                        checkpoint_step=update.checkpoint_step,
                    )
                )

    def _on_broken_hop(self, context: Context) -> Callable[[Caller], None] | None:
        """None: the stream comes from the worker itself."""
        is_hop_broken = self._is_hop_broken
        address = forwarder_of(context) if is_hop_broken is not None else ""
        if is_hop_broken is None or not address:
            return None

        def check(caller: Caller) -> None:
            task = asyncio.create_task(suspect_unless(self._service, caller, lambda: is_hop_broken(address)))
            self._hop_checks.add(task)
            task.add_done_callback(self._hop_checks.discard)

        return check

    async def _get_job(self, request: pb.GetJobRequest, who: Identity, _: Context) -> pb.GetJobResponse:
        return await self._watches.describe(who.job_of(request.job_id), request)

    async def _watch_job(self, request: pb.WatchJobRequest, who: Identity, context: Context) -> None:
        pause_s = request.min_interval_ms / 1000 or WATCH_S
        job_id, limit = who.job_of(request.job_id), request.history_limit
        async with aclosing(self._watches.watch(job_id, limit, pause_s, deltas=request.deltas)) as responses:
            async for response in responses:
                await context.write(response)

    async def _list_events(self, request: pb.ListEventsRequest, who: Identity, _: Context) -> pb.ListEventsResponse:
        job_id = who.job_of(request.job_id)
        job = self._service.state.jobs.get(job_id)
        if job is None:
            raise unknown_job(job_id)
        kinds = frozenset(ours for ours, theirs in EVENT_KIND_OF.items() if theirs in request.kinds)
        limit = min(request.limit or EVENTS, MOST_EVENTS)
        events, before = find_events(job.history, kinds, request.search, request.before, limit)
        lost = open_cost(job.history, round(self._service.clock.wall_s() * 1000))
        shown = [
            msgspec.structs.replace(each, cost=each.cost.plus(lost)) if each.number == job.history.charged else each
            for each in events
        ]
        return pb.ListEventsResponse(events=map(job_event, shown), next_before=before)

    async def _issue(self, request: pb.IssueCommandRequest, who: Identity, _: Context) -> pb.IssueCommandResponse:
        command_id, workers = await operations.issue(self._service, wire.issue(request, who))
        return pb.IssueCommandResponse(command_id=command_id, worker_ids=workers)

    async def _list_jobs(self, _: pb.ListJobsRequest, who: Identity, __: Context) -> pb.ListJobsResponse:
        return pb.ListJobsResponse(jobs=self.list_jobs(who))

    def list_jobs(self, who: Identity) -> list[pb.JobSummary]:
        """Those that the caller's token allows, in order of name."""
        jobs = self._service.state.jobs
        return [summary(jobs[name]) for name in sorted(jobs) if who.token_job in ("", name)]

    async def _create_job(self, request: pb.CreateJobRequest, who: Identity, _: Context) -> pb.CreateJobResponse:
        name = who.job_of(request.job_id)
        await self._service.submit(CreateJob(name, created_config(request, self._service.settings.job)))
        return pb.CreateJobResponse(job=summary(self._service.state.jobs[name]))

    async def _update_job(self, request: pb.UpdateJobRequest, who: Identity, _: Context) -> pb.UpdateJobResponse:
        name = who.job_of(request.job_id)

        def update(state: CoordState) -> UpdateJob:
            return UpdateJob(name, updated_config(request, job_named(state, name).config))

        await self._service.submit(update)
        return pb.UpdateJobResponse(job=summary(self._service.state.jobs[name]))

    async def _reset_job(self, request: pb.ResetJobRequest, who: Identity, _: Context) -> pb.ResetJobResponse:
        name = who.job_of(request.job_id)
        await self._service.submit(ResetJob(name, request.run))
        return pb.ResetJobResponse(job=summary(self._service.state.jobs[name]))

    async def _delete_job(self, request: pb.DeleteJobRequest, who: Identity, _: Context) -> pb.DeleteJobResponse:
        await self._service.submit(DeleteJob(who.job_of(request.job_id)))
        return pb.DeleteJobResponse()


def forwarder_of(context: Context) -> str:
    """The address of the process that forwarded this call; empty: it comes from a client."""
    metadata = cast(Metadata, context.invocation_metadata() or ())
    return next((value for key, value in metadata if key == FORWARDED and isinstance(value, str)), "")
