"""The session of a worker with the coordinator: registration, heartbeats, presence, and calls under the right identity.

It decides whether to recover from an error itself (a new generation of an elastic job, a rejoin) or to raise it in the
training loop. Data, barriers and checkpoints are in `client`.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import grpc

from strata.base import log
from strata.base.clock import Clock
from strata.base.errors import Code, StrataError
from strata.base.ids import Ids
from strata.base.secret import Secret
from strata.coord.core.checkpoint_requests import STEP
from strata.coord.core.facts import IF_HUNG, KILL, CommandKind
from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.pb import coordinator_pb2_grpc as pb_grpc
from strata.coord.worker.checkpoint_agreement import CheckpointAgreement
from strata.coord.worker.commands import Commands, OnCommand
from strata.coord.worker.hang_report import HangReporter
from strata.coord.worker.leases import LeaseTracker
from strata.coord.worker.link import (
    CoordinatorLink,
    Deadline,
    Reply,
    Request,
    UnaryCall,
    registration_message,
    to_strata_error,
)
from strata.coord.worker.reasons import (
    Reason,
    evicted,
    lease_lost,
    membership_changed,
    rank_differs,
    reason_of,
    too_few_members,
)
from strata.coord.worker.relay import RelayLink
from strata.coord.worker.settings import WorkerSettings
from strata.coord.worker.step_clock import FIRST_REPORT, StepTimes
from strata.coord.worker.telemetry import Telemetry

ATTEMPT_S: Final = 10.0
"""A reply that takes longer than this got lost."""
LEAVE_TIMEOUT_S: Final = 2.0
PRESENCE_S: Final = 2.0
ANNOUNCE_S: Final = 2.0
"""How long a program waits for the coordinator to know that it makes no steps now."""
LOST_S: Final = 25.0
LOST_BEATS: Final = 9
"""A coordinator knows after so long, or so many heartbeats, that a member is lost: the six that may be missing, and two
more after a change of the leader."""
WAIT_FOR_POLL_S: Final = 0.1
"""Time between two looks at a generation that has too few members for this worker."""

_log = log.get(__name__)


@dataclass(frozen=True)
class MemberAddress:
    """One worker of the generation, and where the others reach it."""

    worker_id: str
    rank: int
    ip: str
    """Empty and port 0: it has not said."""
    port: int
    gpus: int
    hostname: str


class WorkerSession:
    """The worker's identity and background tasks; `generation` changes only in calls of the training loop."""

    def __init__(
        self,
        settings: WorkerSettings,
        clock: Clock,
        on_command: OnCommand | None = None,
        flush_returned: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.settings = settings
        self.clock = clock
        self.ids = Ids(clock)
        self.worker_id = settings.worker_id
        self.job = settings.job
        self.incarnation = self.ids.new("incarnation")
        self.generation = self.rank = self.world_size = 0
        self.parameters: dict[str, str] = {}
        self.run_id = 0
        self.recover_first = False
        """Whether the last registration requires this incarnation to recover before its first shard."""
        self.leases, self.commands = LeaseTracker(), Commands(self._mark_drained)
        self.status: pb.WorkerStatus.ValueType = pb.WORKER_STATUS_INITIALIZING
        self._heartbeat_lock = asyncio.Lock()
        self.busy = 0
        """How many announced phases without steps the program is in."""
        self.step: int | None = None
        self.step_times = StepTimes()
        self._link = CoordinatorLink(settings, self.worker_id, clock)
        self._relay = RelayLink(settings.relay, clock) if settings.relay is not None else None
        self._on_command, self._flush_returned = on_command, flush_returned
        self._telemetry = Telemetry()
        self._job_generation = 0
        """The generation of the job as last received; the worker's own may be older."""
        self._leader_epoch = 0
        self._reattach_to = 0
        self._interval_s = 5.0
        self._registered = False
        self._failure: StrataError | None = None
        self._registering = asyncio.Lock()
        self._heartbeat_due = asyncio.Event()
        self._attached = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._hangs = HangReporter(lambda: self.step, self._heartbeat_due.set)
        self.agreement = CheckpointAgreement(self, self._heartbeat_due.set)

    # Beginning and end

    async def start(self) -> None:
        """Register, and wait until there are enough members for a generation."""
        self._loop = asyncio.get_running_loop()
        await self._register(adopt=True, wait_for=self.settings.wait_for)
        self.status = pb.WORKER_STATUS_IDLE
        try:
            # From here on a crash is noticed at once. During a failover this may take longer than the timeout.
            async with asyncio.timeout(PRESENCE_S):
                await self._attached.wait()
        except TimeoutError:
            _log.warning("presence_not_open")

    async def close(self, *, failed: bool, reason: str = "") -> None:
        """Leave with the last acks, or report that this incarnation failed; then close everything."""
        try:
            await self._stop_tasks()
            if self._failure is None and self._registered:
                await (self._report_failure() if failed else self._leave(reason))
        finally:
            self._telemetry.close()
            if self._relay is not None:
                await self._relay.close()
            await self._link.close()

    async def _stop_tasks(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _leave(self, reason: str) -> None:
        self.leases.capture = None
        sent = self.leases.pending_acks()
        request = pb.LeaveWorkerRequest(
            job_id=self.job,
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            reason=reason,
            acks=[each.message for each in sent],
            # A worker that was interrupted or got a stop command is not finished.
            finished=not (reason or self.commands.stopping or self.commands.draining),
        )
        patience_s = self.settings.patience_s if sent else LEAVE_TIMEOUT_S
        try:
            reply = await self._link.call(lambda stub: stub.LeaveWorker, request, Deadline(ATTEMPT_S, patience_s))
        except StrataError as error:
            if sent:
                raise
            _log.warning("leave_failed", code=error.code.value, reason=error.message)
            return
        self.leases.confirm(sent, reply.rejected_leases)
        if lost := self.leases.pop_lost():
            raise lease_lost(lost)

    def _mark_drained(self) -> None:
        """Marks the worker as drained at once, not when it leaves: its launcher may end it before."""
        if self.settings.drained is None:
            return
        try:
            (self.settings.drained / str(os.getpid())).touch()
        except OSError as error:
            _log.warning("drain_not_marked", folder=str(self.settings.drained), reason=str(error))

    async def _report_failure(self) -> None:
        self.status = pb.WORKER_STATUS_ERROR
        try:
            await self._link.call(
                lambda stub: stub.Heartbeat, self._heartbeat_message(), Deadline(LEAVE_TIMEOUT_S, LEAVE_TIMEOUT_S)
            )
        except StrataError as error:
            _log.warning("failure_report_failed", code=error.code.value, reason=error.message)

    def _spawn(self, work: Awaitable[None], name: str) -> None:
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        task.set_name(name)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        """A background task ends when it is cancelled, or by a defect, which the training loop must get."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and self._failure is None:
            _log.error("background_task_failed", task=task.get_name(), reason=repr(error))
            self._failure = StrataError(Code.INTERNAL, f"the worker's {task.get_name()} failed: {error!r}")

    # Calls under the current identity

    def check(self) -> None:
        """A safe point: raise what the training loop has to know."""
        self.check_failure()
        self.check_leases()
        if not self.settings.elastic and self._job_generation > self.generation:
            raise membership_changed(self.generation, self._job_generation)

    def check_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def check_leases(self) -> None:
        if lost := self.leases.pop_lost():
            raise lease_lost(lost)

    async def sync_generation(self) -> None:
        self.check()
        if self._job_generation > self.generation:
            await self._join_current_generation()
            self.check()

    async def _join_current_generation(self) -> None:
        """Registering would silently revive an evicted incarnation, so check the membership first."""
        incarnation = self.incarnation
        if not await self._is_member(incarnation):
            await self._on_evicted(StrataError(Code.NOT_FOUND, "the others have gone on without it"), incarnation)
        if self._failure is None and self._job_generation > self.generation:
            await self._register(adopt=True)

    async def call(
        self,
        method: Callable[[pb_grpc.CoordinatorAsyncStub], UnaryCall[Request, Reply]],
        make: Callable[[], Request],
        *,
        timeout_s: float | None = ATTEMPT_S,
        settled: bool = True,
    ) -> Reply:
        """Call under the current identity; `make` is called again after a change. Not `settled`: in any generation."""
        while True:
            if settled:
                await self.sync_generation()
            elif self._failure is not None:
                raise self._failure
            incarnation = self.incarnation
            try:
                return await self._link.call(method, make(), Deadline(timeout_s, self.settings.patience_s))
            except StrataError as error:
                await self._handle_call_error(error, incarnation)

    async def attempt(
        self,
        method: Callable[[pb_grpc.CoordinatorAsyncStub], UnaryCall[Request, Reply]],
        make: Callable[[], Request],
        *,
        timeout_s: float | None = ATTEMPT_S,
    ) -> Reply:
        """One attempt, beside the training loop, which will get the same error itself."""
        return await self._link.call(method, make(), Deadline(timeout_s, 0.0))

    async def _handle_call_error(self, error: StrataError, incarnation: str) -> None:
        """Returns if it makes sense to call again; raises what the caller has to know."""
        reason = error.detail.get("reason")
        if reason == Reason.MEMBERSHIP_CHANGED.value:
            self._job_generation = max(self._job_generation, int(error.detail["generation"]))
        elif reason == Reason.REPLACED.value:
            await self._on_replaced(error, incarnation)
        elif reason == "not-registered" or (error.code is Code.NOT_FOUND and not await self._is_member(incarnation)):
            await self._on_evicted(error, incarnation)
        elif self._failure is None and self.incarnation == incarnation:
            raise error

    def mark_stale(self, generation: int) -> None:
        """The worker's generation is over, even if the next one has not formed yet; its number is known."""
        self._job_generation = max(self._job_generation, generation, self.generation + 1)

    async def _is_member(self, incarnation: str) -> bool:
        """NOT_FOUND may mean the worker or the requested object: for a heartbeat it can only mean the worker."""
        try:
            within = Deadline(ATTEMPT_S, self.settings.patience_s)
            reply = await self._link.call(lambda stub: stub.Heartbeat, self._heartbeat_message(), within)
        except StrataError as error:
            if error.code is Code.NOT_FOUND:
                return False
            if reason_of(error) is not Reason.REPLACED:
                raise
            await self._on_replaced(error, incarnation)
        else:
            self._on_job_update(reply)
        return True

    async def _on_evicted(self, error: StrataError, incarnation: str) -> None:
        """The session ends, or continues as a new incarnation without leases; not after a stop command."""
        if self.generation == 0:
            # Evicted while it joined; the registration is retried.
            return
        if not self.settings.rejoin or self.commands.stopping:
            if self._failure is None:
                self.leases.mark_all_lost()
                self.leases.pop_lost()
                self._failure = evicted(error.message)
            return
        await self._register(adopt=self.settings.elastic, instead_of=incarnation)

    async def _on_replaced(self, error: StrataError, incarnation: str) -> None:
        """The session ends, unless this process replaced that incarnation itself; a pending registration decides."""
        async with self._registering:
            if self._failure is None and self.incarnation == incarnation:
                self._failure = error

    async def follow(self) -> None:
        """Take the current generation without a rewind."""
        await self.rejoin_generation()
        self.check()

    async def rejoin_generation(self) -> None:
        """The same; the generation after it may have begun."""
        self.check_failure()
        await self._join_current_generation()

    def adopt(self, generation: int, rank: int, world_size: int) -> None:
        """Raises if a launcher gave this worker another rank: collectives would mix up what belongs to whom."""
        self._job_generation = max(self._job_generation, generation)
        if not self._is_expected(rank, world_size):
            raise self._rank_differs(rank, world_size)
        if generation != self.generation:
            self._hangs.generation_began_ns = round(self.clock.wall_s() * 1e9)
        self.generation, self.rank, self.world_size = generation, rank, world_size
        self.agreement.end()

    def _is_expected(self, rank: int, world_size: int) -> bool:
        return self.settings.rank is None or (rank, world_size) == (self.settings.rank, self.settings.wait_for)

    def _rank_differs(self, rank: int, world_size: int) -> StrataError:
        assert self.settings.rank is not None
        return rank_differs((rank, world_size), (self.settings.rank, self.settings.wait_for))

    @property
    def is_stale(self) -> bool:
        """Says whether the job is known to have gone on from this worker's generation."""
        return self._job_generation > self.generation

    async def members(self) -> tuple[MemberAddress, ...]:
        while True:
            await self.sync_generation()
            found = await self._register_incarnation(self.incarnation, include_members=True)
            if found.generation == self.generation:
                return tuple(
                    MemberAddress(each.worker_id, each.rank, each.ip, each.port, each.gpu_count, each.hostname)
                    for each in found.members
                )
            self.mark_stale(found.generation)

    async def _register(self, *, adopt: bool, instead_of: str | None = None, wait_for: int = 0) -> None:
        """`adopt`: take the rank in the new generation, of at least `wait_for` members; else only learn its number.

        `instead_of` is an evicted incarnation: a new one begins, unless it did already.
        """
        async with self._registering:
            if instead_of not in (None, self.incarnation):
                return
            incarnation = self.incarnation
            if instead_of is not None:
                _log.warning("rejoining_after_eviction")
                self.leases.mark_all_lost()
                incarnation = self.ids.new("incarnation")
            until_s = self.clock.monotonic_s() + self.settings.patience_s
            while True:
                found = await self._register_incarnation(incarnation)
                self._on_registered(found)
                is_formed = found.generation and found.world_size >= wait_for
                if (is_formed and self._is_expected(found.rank, found.world_size)) or not adopt:
                    break
                if self.clock.monotonic_s() > until_s:
                    if is_formed:
                        raise self._rank_differs(found.rank, found.world_size)
                    raise too_few_members(found.world_size, wait_for, self.settings.patience_s)
                if found.generation:
                    await asyncio.sleep(WAIT_FOR_POLL_S)
            if adopt:
                self.adopt(found.generation, found.rank, found.world_size)

    def _on_registered(self, found: pb.WorkerConfig) -> None:
        self._start_background_tasks()
        self.job, self.incarnation = found.job_id, found.incarnation
        self.parameters = dict(found.training_parameters)
        self.recover_first = found.recover_first
        self.run_id = found.run
        self._interval_s = found.heartbeat_interval_ms / 1000
        self._leader_epoch = self._reattach_to = max(self._leader_epoch, found.leader_epoch)
        self.leases.mark_unless_finished(found.lost_leases)
        self._job_generation = max(self._job_generation, found.generation)

    async def _register_incarnation(self, incarnation: str, *, include_members: bool = False) -> pb.WorkerConfig:
        until_s = self.clock.monotonic_s() + self.settings.patience_s
        while True:
            message = registration_message(self.settings, self.job, incarnation, self.leases.ids())
            message.include_members = include_members
            try:
                return await self._link.call(
                    lambda stub: stub.RegisterWorker,
                    message,
                    Deadline(ATTEMPT_S, self.settings.patience_s),
                )
            except StrataError as error:
                # Evicted as silent while it waited for the others.
                if error.code is not Code.NOT_FOUND or self.clock.monotonic_s() > until_s:
                    raise

    def _start_background_tasks(self) -> None:
        """Starts tasks at the first registration, also while the job has too few members for a generation."""
        if not self._registered:
            self._registered = True
            self._spawn(self._heartbeat_loop(), "strata heartbeat")
            self._spawn(self._presence_loop(), "strata presence")

    # Heartbeats and presence

    def report_step(self, number: int, times: StepTimes) -> None:
        """The next heartbeat reports it. Called in the thread of the training loop."""
        self.step, self.step_times = number, times
        self._hangs.training_thread = threading.get_ident()
        self.status = pb.WORKER_STATUS_TRAINING
        if len(times.compute_ms) == FIRST_REPORT and self._loop is not None:
            # Enough to tell a slow worker: the coordinator learns it now, once in a generation.
            self._loop.call_soon_threadsafe(self._heartbeat_due.set)

    async def announce(self) -> None:
        """Send a heartbeat now: what the program does next may hold the GIL. Without a reply the next one says it."""
        try:
            # An earlier heartbeat must not arrive after this one: it may be in the relay still.
            async with self._heartbeat_lock:
                await self.attempt(lambda stub: stub.Heartbeat, self._heartbeat_message, timeout_s=ANNOUNCE_S)
        except StrataError as error:
            _log.debug("announcement_failed", code=error.code.value, reason=error.message)
            self._heartbeat_due.set()

    async def _heartbeat_loop(self) -> None:
        attempt = 0
        while True:
            self._heartbeat_due.clear()
            try:
                attempt, wait_s = 0, await self._send_heartbeat()
            except StrataError as error:
                if self._failure is not None:
                    return
                wait_s = min(self._interval_s, self._link.backoff_s(attempt))
                attempt += 1
                _log.debug("heartbeat_failed", code=error.code.value, reason=error.message)
            try:
                # Not wait_for: that of Python 3.11 forgets a cancellation which comes together with what it waits for.
                async with asyncio.timeout(wait_s):
                    await self._heartbeat_due.wait()
            except TimeoutError:
                continue

    async def _send_heartbeat(self) -> float:
        """The seconds to the next one."""
        incarnation = self.incarnation
        try:
            async with self._heartbeat_lock:
                message = self._heartbeat_message()
                reply = await self._exchange_heartbeat(message)
        except StrataError as error:
            await self._handle_heartbeat_error(error, incarnation)
            raise
        self.commands.to_ack.difference_update(message.acked_command_ids)
        if message.HasField("hang_report"):
            self._hangs.on_received(message.hang_report)
        if self._hangs.is_new(reply.hang_probe):
            self._spawn(self._hangs.report(reply.hang_probe), "hang report")
        if reply.token:
            self._link.use_token(Secret(reply.token))
        self._on_job_update(reply)
        if self._reattach_to > self._leader_epoch:
            # Another coordinator leads: report the held leases to it, and learn which of them are lost.
            await self._register(adopt=False)
        return reply.heartbeat_interval_ms / 1000

    async def _exchange_heartbeat(self, message: pb.HeartbeatRequest) -> pb.HeartbeatResponse:
        """Sends a heartbeat by the relay of the host, else directly; one that comes twice changes nothing."""
        if self._relay is not None:
            relayed = await self._relay.heartbeat(message, self._link.metadata, self._interval_s)
            if relayed is not None:
                # Its interval is the time to the relay's next turn, too short to wait for a reply or after a failure.
                return relayed
        within = Deadline(max(1.0, self._interval_s), self._interval_s)
        reply = await self._link.call(lambda stub: stub.Heartbeat, message, within)
        self._interval_s = reply.heartbeat_interval_ms / 1000
        return reply

    async def _handle_heartbeat_error(self, error: StrataError, incarnation: str) -> None:
        """A rejected heartbeat means that this incarnation is not a member any more."""
        if error.code is Code.NOT_FOUND or error.detail.get("reason") == "not-registered":
            await self._on_evicted(error, incarnation)
        elif reason_of(error) is Reason.REPLACED:
            await self._on_replaced(error, incarnation)
        elif error.code in (Code.UNAUTHENTICATED, Code.FORBIDDEN, Code.INVALID):
            self._failure = error

    def _heartbeat_message(self) -> pb.HeartbeatRequest:
        return pb.HeartbeatRequest(
            worker_id=self.worker_id,
            # To the coordinator, a worker that does something else than training cannot hang.
            status=pb.WORKER_STATUS_IDLE if self.busy and self.status == pb.WORKER_STATUS_TRAINING else self.status,
            resources=self._telemetry.usage(),
            job_id=self.job,
            incarnation=self.incarnation,
            generation=self.generation,
            step=self.step,
            step_time_ms=self.step_times.step_ms,
            compute_times_ms=self.step_times.compute_ms,
            # The results of a failed incarnation do not count.
            progress=() if self.status == pb.WORKER_STATUS_ERROR else self.leases.progress(),
            acked_command_ids=sorted(self.commands.to_ack),
            explicit_acks=True,
            checkpoint_step=self.agreement.step,
            checkpoint_asked_step=self.agreement.asked.last or 0,
            checkpoint_stride=self.agreement.asked.stride,
            hang_report=self._hangs.pending,
        )

    async def wait_until_stale(self) -> bool:
        """A collective failed: whether a member is known to be lost, as soon as the coordinator can know it."""
        until_s = self.clock.monotonic_s() + max(LOST_S, LOST_BEATS * self._interval_s)
        while not self.is_stale and self._failure is None and self.clock.monotonic_s() < until_s:
            self._heartbeat_due.set()
            await asyncio.sleep(WAIT_FOR_POLL_S * 5)
        return self.is_stale or self._failure is not None

    def _on_job_update(self, update: pb.HeartbeatResponse | pb.AttachResponse) -> None:
        self._job_generation = max(self._job_generation, update.generation)
        self._reattach_to = max(self._reattach_to, update.leader_epoch)
        if update.checkpoint_step:
            self.agreement.reached = (update.generation, update.checkpoint_step)
        for command in self.commands.receive(update.commands):
            _log.info("command_received", command=command.kind.name, reason=command.reason)
            if command.kind is CommandKind.CHECKPOINT_NOW and STEP in command.arguments:
                self.agreement.promise(int(command.arguments[STEP]))
                continue
            if command.kind is CommandKind.REBALANCE and self._flush_returned is not None:
                self.leases.return_unread()
                self._spawn(self._flush_returned(), "return of leases")
            if command.kind is CommandKind.STOP and command.arguments.get(IF_HUNG) == KILL:
                self._spawn(self._hangs.end_if_hung(command.reason), "end of a hung process")
            if self._on_command is not None:
                self._spawn(
                    self.commands.run(self._on_command, command, self._heartbeat_due.set),
                    f"command {command.command_id}",
                )
        if self.commands.to_ack or self._reattach_to > self._leader_epoch:
            self._heartbeat_due.set()
        self.agreement.changed.set()

    async def _presence_loop(self) -> None:
        """A broken stream leads to an eviction after half a second: open the next one at once."""
        attempt = 0
        while self._failure is None:
            index, incarnation = self._link.index, self.incarnation
            request = pb.AttachRequest(job_id=self.job, worker_id=self.worker_id, incarnation=incarnation)
            try:
                async for news in self._link.stub().Attach(request, metadata=self._link.metadata):
                    attempt = 0
                    self._attached.set()
                    self._on_job_update(news)
            except grpc.aio.AioRpcError as error:
                failure = to_strata_error(error)
                _log.debug("presence_lost", code=failure.code.value, reason=failure.message)
                if failure.code is Code.UNAVAILABLE:
                    self._link.fail_over(index)
                elif failure.code is Code.UNAUTHENTICATED and self._link.reload_token():
                    continue
                else:
                    # The next heartbeat finds out why.
                    self._heartbeat_due.set()
            await asyncio.sleep(min(0.5, self._link.backoff_s(attempt)))
            attempt += 1
