"""Receives heartbeats, singly or in a batch: checks and limits of their fields (step, compute times, stack frames), the
reply from memory, and the wait for a commit when one makes facts.

An immediate reply contains only committed values: its generation and its commands come from `JobTelemetry`, not from
the core's state, which may be ahead by facts that are not durable yet. An error may rest on an uncommitted eviction;
the worker then registers again, which is harmless.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from math import inf
from typing import Final

from strata.base.errors import Code, StrataError
from strata.base.log_values import printable
from strata.coord.core.hang_diagnosis import FRAMES, HangReport
from strata.coord.core.inputs import Caller, Heartbeat, HeartbeatReply, Outcome
from strata.coord.core.liveness import observe_plain_heartbeat
from strata.coord.core.state import CoordState, JobState, PendingCommand, StepProgress
from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.server.grpc_handler import MAX_BATCH, STATUS_OF, number
from strata.coord.server.service import CoordinatorService, not_leading
from strata.coord.server.telemetry import JobTelemetry, SharedReply
from strata.coord.server.wire import Identity, command, interval_ms

URGENCY: Final = (
    pb.COMMAND_KIND_STOP,
    pb.COMMAND_KIND_DRAIN,
    pb.COMMAND_KIND_CHECKPOINT_NOW,
    pb.COMMAND_KIND_REBALANCE,
    pb.COMMAND_KIND_RELOAD,
)

PROBE_BITS: Final = 32
"""The number of a probe, below the epoch of the leader that asks it."""
FRAME_CHARACTERS: Final = 200
COMPUTE_TIMES: Final = 32
"""The most computing times of one heartbeat."""

MOST_STEP: Final = 1 << 48
"""Steps are added and multiplied, and what comes of it must fit into a fact."""
BUSY: Final = frozenset(
    (
        pb.WORKER_STATUS_INITIALIZING,
        pb.WORKER_STATUS_IDLE,
        pb.WORKER_STATUS_LOADING_DATA,
        pb.WORKER_STATUS_CHECKPOINTING,
        pb.WORKER_STATUS_RECOVERING,
    )
)
"""States in which a worker makes no steps."""


class HeartbeatHandler:
    """Serves single heartbeats and batches of them."""

    def __init__(self, service: CoordinatorService) -> None:
        self._service = service

    async def one(self, request: pb.HeartbeatRequest, who: Identity, _: object) -> pb.HeartbeatResponse | bytes:
        job_id, worker_id = who.job_of(request.job_id), who.worker_of(request.worker_id)
        self._service.metrics.heartbeats += 1
        service = self._service
        reply = receive(service, service.state_if_leading, request, job_id, worker_id, service.clock.monotonic_s())
        if isinstance(reply, SharedReply):
            return reply.encoded
        return reply if isinstance(reply, pb.HeartbeatResponse) else await reply

    async def batch(self, request: pb.HeartbeatBatchRequest, who: Identity, _: object) -> bytes:
        """Most heartbeats make no facts and are answered in this one turn of the loop."""
        heartbeats = request.heartbeats
        if len(heartbeats) > MAX_BATCH:
            raise StrataError(Code.INVALID, f"a batch has at most {MAX_BATCH} heartbeats")
        service = self._service
        state = service.state_if_leading
        if state is None:
            raise not_leading()
        service.metrics.heartbeats += len(heartbeats)
        # On the wire, a repeated field is the concatenation of its elements.
        parts: list[bytes] = []
        other: list[tuple[int, pb.HeartbeatOutcome]] = []
        pending: list[Awaitable[None]] = []
        now_s = service.clock.monotonic_s()
        for message in heartbeats:
            name, job_id = message.worker_id, message.job_id
            try:
                job_id, worker_id = who.job_of(job_id), who.worker_of(name)
                reply = receive(service, state, message, job_id, worker_id, now_s)
                if isinstance(reply, SharedReply):
                    parts.append(reply.outcomes.get(name) or _encode_outcome(reply, name, job_id))
                    continue
                outcome = pb.HeartbeatOutcome(worker_id=name, job_id=job_id)
                if isinstance(reply, pb.HeartbeatResponse):
                    outcome.response.CopyFrom(reply)
                else:
                    pending.append(_fill_in(outcome, reply))
            except StrataError as error:
                outcome = pb.HeartbeatOutcome(worker_id=name, job_id=job_id)
                _set_error(outcome, error)
            other.append((len(parts), outcome))
            parts.append(b"")
        if pending:
            await asyncio.gather(*pending)
        for index, outcome in other:
            parts[index] = _field(outcome)
        return b"".join(parts)


def receive(
    service: CoordinatorService,
    state: CoordState | None,
    message: pb.HeartbeatRequest,
    job_id: str,
    worker_id: str,
    now_s: float,
) -> SharedReply | pb.HeartbeatResponse | Awaitable[pb.HeartbeatResponse]:
    """The reply, at once unless the heartbeat makes facts. Nearly every one gets a `SharedReply`, so that is cheap."""
    telemetry = service.telemetry.jobs.get(job_id)
    status = message.status
    failed = status == pb.WORKER_STATUS_ERROR
    progress = _step_progress(message, status) if message.HasField("step") else None
    read_until = _read_until(message) if message.progress else None
    if (
        state is not None
        and telemetry is not None
        and not telemetry.delivered
        and not failed
        and not (telemetry.hang_probe and message.HasField("hang_report"))
        and observe_plain_heartbeat(state, job_id, worker_id, message.incarnation, progress, read_until, now_s)
    ):
        telemetry.heartbeats[worker_id] = message
        if progress is not None:
            telemetry.record_step(worker_id, progress.step)
        return telemetry.shared_reply or _shared_reply(service, telemetry, job_id)
    caller = Caller(job_id, worker_id, message.incarnation)
    hang_report = (
        _hang_report(message, state.jobs.get(job_id), state.leader_epoch)
        if state is not None and message.HasField("hang_report")
        else None
    )
    acked = _acked_commands(message, telemetry, worker_id)
    request = Heartbeat(caller, failed, acked, progress, read_until, hang_report)
    return _decide(service, message, request)


def _decide(
    service: CoordinatorService, message: pb.HeartbeatRequest, request: Heartbeat
) -> pb.HeartbeatResponse | Awaitable[pb.HeartbeatResponse]:
    outcome, committed = service.submit_heartbeat(request)
    if committed is None:
        return _reply(service, message, request, outcome)
    return _reply_after_commit(service, message, request, committed)


def _step_progress(message: pb.HeartbeatRequest, status: pb.WorkerStatus.ValueType) -> StepProgress:
    """Reading a field is a tenth of the whole, so those that belong to another are read only with it."""
    step, time_s, times_ms = message.step, message.step_time_ms / 1000, message.compute_times_ms
    compute_s = tuple(ms / 1000 for ms in times_ms[-COMPUTE_TIMES:] if 0 < ms < inf) if times_ms else ()
    checkpoint_step, asked_step, stride = None, 0, 1
    if message.HasField("checkpoint_step"):
        checkpoint_step, asked_step = message.checkpoint_step, message.checkpoint_asked_step
        stride = message.checkpoint_stride or 1
    if step > MOST_STEP or asked_step > MOST_STEP or stride > MOST_STEP:
        raise StrataError(Code.INVALID, f"a step is at most {MOST_STEP:,}")
    # No time at all means that none was measured.
    return StepProgress(
        step, time_s or None, status in BUSY, message.generation, compute_s, checkpoint_step, asked_step, stride
    )


def _hang_report(
    message: pb.HeartbeatRequest, job: JobState | None, leader_epoch: int
) -> tuple[int, HangReport] | None:
    """None: of another leader's probe or of another generation."""
    report = message.hang_report
    if report.probe >> PROBE_BITS != leader_epoch or job is None or message.generation != job.generation:
        return None
    found = HangReport(
        report.waits,
        report.busy or message.status in BUSY,
        report.collective if report.HasField("collective") else None,
        report.cpu_s if report.HasField("cpu_s") else None,
        # Workers wrote this, and terminals and pages show it.
        tuple(printable(frame[:FRAME_CHARACTERS]) for frame in report.frames[:FRAMES]),
        printable(report.operation[:FRAME_CHARACTERS]),
    )
    return report.probe & ((1 << PROBE_BITS) - 1), found


def _read_until(message: pb.HeartbeatRequest) -> tuple[tuple[int, int], ...]:
    return tuple((each.lease_id, each.consumed_until) for each in message.progress)


def _acked_commands(message: pb.HeartbeatRequest, telemetry: JobTelemetry | None, worker_id: str) -> tuple[int, ...]:
    """A worker without explicit acks acknowledges, by its next heartbeat, the commands of the last reply."""
    if message.explicit_acks:
        return tuple(message.acked_command_ids)
    return telemetry.delivered.get(worker_id, ()) if telemetry is not None else ()


async def _reply_after_commit(
    service: CoordinatorService, message: pb.HeartbeatRequest, request: Heartbeat, committed: Awaitable[Outcome]
) -> pb.HeartbeatResponse:
    return _reply(service, message, request, await committed)


def _reply(
    service: CoordinatorService, message: pb.HeartbeatRequest, request: Heartbeat, outcome: Outcome
) -> pb.HeartbeatResponse:
    assert isinstance(outcome.reply, HeartbeatReply)
    # A job may be so new that its first fact is being written: then there is no telemetry of it yet.
    telemetry = service.telemetry.of(request.caller.job)
    shared = _shared_reply(service, telemetry, request.caller.job).message
    if request.failed:
        return _copy_with(shared, (), pb.COMMAND_KIND_STOP)
    worker_id = request.caller.worker_id
    telemetry.heartbeats[worker_id] = message
    if message.HasField("step"):
        telemetry.record_step(worker_id, message.step)
    commands = [each for each in outcome.reply.commands if each.command_id <= telemetry.last_command]
    if commands and not message.explicit_acks:
        telemetry.delivered[worker_id] = tuple(each.command_id for each in commands)
    else:
        telemetry.delivered.pop(worker_id, None)
    return _copy_with(shared, commands) if commands else shared


def _copy_with(
    shared: pb.HeartbeatResponse, commands: Sequence[PendingCommand], urgent: pb.CommandKind.ValueType | None = None
) -> pb.HeartbeatResponse:
    response = pb.HeartbeatResponse()
    response.CopyFrom(shared)
    response.commands.extend(map(command, commands))
    response.command = urgent or min((each.kind for each in response.commands), key=URGENCY.index)
    return response


def _shared_reply(service: CoordinatorService, telemetry: JobTelemetry, job_id: str) -> SharedReply:
    if telemetry.shared_reply is None:
        message = pb.HeartbeatResponse(
            generation=telemetry.generation,
            heartbeat_interval_ms=interval_ms(service.state, service.state.jobs[job_id]),
            leader_epoch=service.state.leader_epoch,
            checkpoint_step=telemetry.checkpoint_step,
            hang_probe=_probe(service, telemetry),
        )
        telemetry.shared_reply = SharedReply(message, message.SerializeToString())
    return telemetry.shared_reply


def _probe(service: CoordinatorService, telemetry: JobTelemetry) -> int:
    number = telemetry.hang_probe
    return service.state.leader_epoch << PROBE_BITS | number if number else 0


async def _fill_in(outcome: pb.HeartbeatOutcome, reply: Awaitable[pb.HeartbeatResponse]) -> None:
    try:
        outcome.response.CopyFrom(await reply)
    except StrataError as error:
        _set_error(outcome, error)


def _encode_outcome(shared: SharedReply, name: str, job_id: str) -> bytes:
    encoded = _field(pb.HeartbeatOutcome(worker_id=name, job_id=job_id, response=shared.message))
    # An empty name stands for the worker that the metadata names: several workers, but the same bytes.
    shared.outcomes[name] = encoded
    return encoded


def _field(outcome: pb.HeartbeatOutcome) -> bytes:
    return pb.HeartbeatBatchResponse(outcomes=(outcome,)).SerializeToString()


def _set_error(outcome: pb.HeartbeatOutcome, error: StrataError) -> None:
    outcome.status_code = number(STATUS_OF[error.code])
    outcome.status_message = str(error)
