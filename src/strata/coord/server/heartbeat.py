"""Heartbeats: the most frequent call, answered from memory unless it makes facts.

An immediate reply contains only committed values: its generation and its commands come from `JobTelemetry`, not from
the core's state, which may be ahead by facts that are not durable yet. An error may rest on an uncommitted eviction;
the worker then registers again, which is harmless.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Final

from strata.base.errors import Code, StrataError
from strata.coord.core import members
from strata.coord.core.inputs import Caller, Heartbeat, HeartbeatReply
from strata.coord.core.state import PendingCommand, StepProgress
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

BUSY: Final = frozenset(
    (
        pb.WORKER_STATUS_INITIALIZING,
        pb.WORKER_STATUS_IDLE,
        pb.WORKER_STATUS_LOADING_DATA,
        pb.WORKER_STATUS_CHECKPOINTING,
        pb.WORKER_STATUS_RECOVERING,
    )
)
"""What takes its time and is no step."""


def plain(
    service: CoordinatorService, message: pb.HeartbeatRequest, job_id: str, worker_id: str, now_s: float
) -> SharedReply | None:
    """The answer to nearly every beat, so it must cost nearly nothing. None: another one, and `at_once` has it."""
    state, watch = service.state_if_leading, service.observed.get(job_id)
    status = message.status
    if state is None or watch is None or watch.delivered or status == pb.WORKER_STATUS_ERROR or message.progress:
        return None
    progress = _step_progress(message, status) if message.HasField("step") else None
    if not members.fast_heartbeat(state, job_id, worker_id, message.incarnation, progress, now_s):
        return None
    watch.heartbeats[worker_id] = message
    if progress is not None:
        watch.record_step(worker_id, progress.step)
    return watch.shared_reply or _pulse(service, watch, job_id)


def at_once(
    service: CoordinatorService, message: pb.HeartbeatRequest, job_id: str, worker_id: str, now_s: float
) -> SharedReply | pb.HeartbeatResponse | Heartbeat:
    """The answer, or the beat if it makes facts: `after_commit` has its answer."""
    found = plain(service, message, job_id, worker_id, now_s)
    if found is not None:
        return found
    watch = service.observed.get(job_id)
    once = not message.explicit_acks
    acked: tuple[int, ...] = ()
    if not once:
        acked = tuple(message.acked_command_ids)
    elif watch is not None and watch.delivered:
        acked = watch.delivered.get(worker_id, ())
    failed = message.status == pb.WORKER_STATUS_ERROR
    progress = _step_progress(message, message.status) if message.HasField("step") else None
    read_until = tuple((each.lease_id, each.consumed_until) for each in message.progress) if message.progress else None
    beat = Heartbeat(Caller(job_id, worker_id, message.incarnation), failed, acked, progress, read_until)
    facts, pulse = members.heartbeat(service.state, beat, now_s)
    if facts:
        return beat
    if watch is None:
        # The job is so new that its first fact is being written: there is nothing committed to tell.
        watch = service.telemetry_of(job_id)
    _remember(watch, message, worker_id)
    return _answer(service, watch, beat.caller, pulse.commands, once=once)


async def after_commit(
    service: CoordinatorService, message: pb.HeartbeatRequest, beat: Heartbeat
) -> pb.HeartbeatResponse:
    outcome = await service.submit(beat)
    reply = outcome.reply
    assert isinstance(reply, HeartbeatReply)
    watch = service.telemetry_of(beat.caller.job)
    if beat.failed:
        response = pb.HeartbeatResponse()
        response.CopyFrom(_pulse(service, watch, beat.caller.job).message)
        response.command = pb.COMMAND_KIND_STOP
        return response
    _remember(watch, message, beat.caller.worker_id)
    return _answer(service, watch, beat.caller, reply.commands, once=not message.explicit_acks)


def _remember(watch: JobTelemetry, message: pb.HeartbeatRequest, worker_id: str) -> None:
    watch.heartbeats[worker_id] = message
    if message.HasField("step"):
        watch.record_step(worker_id, message.step)


def _step_progress(message: pb.HeartbeatRequest, status: pb.WorkerStatus.ValueType) -> StepProgress:
    time_s = message.step_time_ms / 1000 if message.HasField("step_time_ms") else None
    return StepProgress(message.step, time_s, status in BUSY, message.generation)


def _answer(
    service: CoordinatorService,
    watch: JobTelemetry,
    caller: Caller,
    open_commands: Sequence[PendingCommand],
    *,
    once: bool,
) -> pb.HeartbeatResponse:
    """`once`: the worker acknowledges commands by its next beat."""
    pulse = _pulse(service, watch, caller.job).message
    commands = [each for each in open_commands if each.command_id <= watch.last_command]
    if not (commands and once):
        watch.delivered.pop(caller.worker_id, None)
    if not commands:
        return pulse
    if once:
        watch.delivered[caller.worker_id] = tuple(each.command_id for each in commands)
    response = pb.HeartbeatResponse()
    response.CopyFrom(pulse)
    response.commands.extend(map(command, commands))
    response.command = min((each.kind for each in response.commands), key=URGENCY.index)
    return response


def _pulse(service: CoordinatorService, watch: JobTelemetry, job_id: str) -> SharedReply:
    if watch.shared_reply is None:
        message = pb.HeartbeatResponse(
            generation=watch.generation,
            heartbeat_interval_ms=interval_ms(service.state, service.state.jobs[job_id]),
            leader_epoch=service.state.leader_epoch,
        )
        watch.shared_reply = SharedReply(message, message.SerializeToString())
    return watch.shared_reply


class HeartbeatHandler:
    def __init__(self, service: CoordinatorService) -> None:
        self._service = service

    def plain(self, request: pb.HeartbeatRequest) -> bytes | None:
        """The answer to nearly every heartbeat where nobody needs a token; None: `one` has it."""
        service = self._service
        # A call that leaves its names to the metadata finds no job without a name here.
        found = plain(service, request, request.job_id, request.worker_id, service.clock.monotonic_s())
        return None if found is None else found.encoded

    async def one(self, request: pb.HeartbeatRequest, who: Identity, _: object) -> pb.HeartbeatResponse | bytes:
        job_id, worker_id = who.job_of(request.job_id), who.worker_of(request.worker_id)
        found = at_once(self._service, request, job_id, worker_id, self._service.clock.monotonic_s())
        if isinstance(found, SharedReply):
            return found.encoded
        return found if not isinstance(found, Heartbeat) else await after_commit(self._service, request, found)

    async def batch(self, request: pb.HeartbeatBatchRequest, who: Identity, _: object) -> bytes:
        """Most beats make no facts and are answered in this one turn of the loop."""
        heartbeats = request.heartbeats
        if len(heartbeats) > MAX_BATCH:
            raise StrataError(Code.INVALID, f"a batch has at most {MAX_BATCH} heartbeats")
        service = self._service
        if not service.leads:
            raise not_leading()
        # A repeated field on the wire is its elements one after the other.
        parts: list[bytes] = []
        rest: list[tuple[int, pb.HeartbeatOutcome]] = []
        later: list[Awaitable[None]] = []
        now_s = service.clock.monotonic_s()
        for message in heartbeats:
            name, job_id = message.worker_id, message.job_id
            outcome: pb.HeartbeatOutcome | None = None
            try:
                job_id, worker_id = who.job_of(job_id), who.worker_of(name)
                found = at_once(service, message, job_id, worker_id, now_s)
                if isinstance(found, SharedReply):
                    parts.append(found.outcomes.get(name) or _keep(found, name, job_id))
                    continue
                outcome = pb.HeartbeatOutcome(worker_id=name, job_id=job_id)
                if isinstance(found, Heartbeat):
                    later.append(self._later(message, found, outcome))
                else:
                    outcome.response.CopyFrom(found)
            except StrataError as error:
                outcome = outcome or pb.HeartbeatOutcome(worker_id=name, job_id=job_id)
                _refuse(outcome, error)
            rest.append((len(parts), outcome))
            parts.append(b"")
        if later:
            await asyncio.gather(*later)
        for at, outcome in rest:
            parts[at] = _field(outcome)
        return b"".join(parts)

    async def _later(self, message: pb.HeartbeatRequest, beat: Heartbeat, outcome: pb.HeartbeatOutcome) -> None:
        try:
            outcome.response.CopyFrom(await after_commit(self._service, message, beat))
        except StrataError as error:
            _refuse(outcome, error)


def _keep(plain: SharedReply, name: str, job_id: str) -> bytes:
    made = _field(pb.HeartbeatOutcome(worker_id=name, job_id=job_id, response=plain.message))
    # An empty name is that of whoever the metadata says: not the same worker every time, but the same bytes.
    plain.outcomes[name] = made
    return made


def _field(outcome: pb.HeartbeatOutcome) -> bytes:
    return pb.HeartbeatBatchResponse(outcomes=(outcome,)).SerializeToString()


def _refuse(outcome: pb.HeartbeatOutcome, error: StrataError) -> None:
    outcome.status_code = number(STATUS_OF[error.code])
    outcome.status_message = str(error)
