"""The session of a worker: registering, rejoining a new generation or raising the error, leaving, and after how many
silent seconds or heartbeats the worker counts itself as lost.

It decides whether to recover from an error itself (a new generation of an elastic job, a rejoin) or to raise it in the
training loop. Heartbeats are in `liveness`; data, barriers and checkpoints in `client`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from strata.base import log
from strata.base.clock import Clock
from strata.base.errors import Code, StrataError
from strata.base.ids import Ids
from strata.coord.core.checkpoint_requests import STEP
from strata.coord.core.facts import IF_HUNG, KILL, CommandKind
from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.pb import coordinator_pb2_grpc as pb_grpc
from strata.coord.worker.checkpoint_agreement import CheckpointAgreement
from strata.coord.worker.commands import Commands, OnCommand
from strata.coord.worker.leases import LeaseTracker
from strata.coord.worker.link import CoordinatorLink, Deadline, Reply, Request, UnaryCall, registration_message
from strata.coord.worker.liveness import LivenessReporter
from strata.coord.worker.reasons import Reason, evicted, membership_changed, rank_differs, reason_of, too_few_members
from strata.coord.worker.settings import WorkerSettings

ATTEMPT_S: Final = 10.0
"""A reply that takes longer than this got lost."""
LEAVE_TIMEOUT_S: Final = 2.0
PRESENCE_S: Final = 2.0
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
        self.leases, self.commands = LeaseTracker(), Commands(settings.drained)
        self.link = CoordinatorLink(settings, self.worker_id, clock)
        self.failure: StrataError | None = None
        """What ended the session; the training loop gets it."""
        self._on_command, self._flush_returned = on_command, flush_returned
        self._job_generation = 0
        """The generation of the job as last received; the worker's own may be older."""
        self._leader_epoch = 0
        self._reattach_to = 0
        self._registered = False
        self._registering = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self.liveness = LivenessReporter(self)
        self.agreement = CheckpointAgreement(self, self.liveness.due.set)

    # Beginning and end

    async def start(self) -> None:
        """Register, and wait until there are enough members for a generation."""
        await self._register(adopt=True, wait_for=self.settings.wait_for)
        self.liveness.status = pb.WORKER_STATUS_IDLE
        try:
            # From here on a crash is noticed at once. During a failover this may take longer than the timeout.
            async with asyncio.timeout(PRESENCE_S):
                await self.liveness.attached.wait()
        except TimeoutError:
            _log.warning("presence_not_open")

    async def close(self, *, failed: bool, reason: str = "") -> None:
        """Leave with the last acks, or report that this incarnation failed; then close everything."""
        try:
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)
            if self.failure is None and self._registered:
                await (self._report_failure() if failed else self._leave(reason))
        finally:
            await self.liveness.close()
            await self.link.close()

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
            reply = await self.link.call(lambda stub: stub.LeaveWorker, request, Deadline(ATTEMPT_S, patience_s))
        except StrataError as error:
            if sent:
                raise
            _log.warning("leave_failed", code=error.code.value, reason=error.message)
            return
        self.leases.confirm(sent, reply.rejected_leases)
        self.leases.check()

    async def _report_failure(self) -> None:
        self.liveness.status = pb.WORKER_STATUS_ERROR
        try:
            within = Deadline(LEAVE_TIMEOUT_S, LEAVE_TIMEOUT_S)
            await self.link.call(lambda stub: stub.Heartbeat, self.liveness.message(), within)
        except StrataError as error:
            _log.warning("failure_report_failed", code=error.code.value, reason=error.message)

    def spawn(self, work: Awaitable[None], name: str) -> None:
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        task.set_name(name)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        """A background task ends when it is cancelled, or by a defect, which the training loop must get."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and self.failure is None:
            _log.error("background_task_failed", task=task.get_name(), reason=repr(error))
            self.failure = StrataError(Code.INTERNAL, f"the worker's {task.get_name()} failed: {error!r}")

    # Calls under the current identity

    def check(self) -> None:
        """A safe point: raise what the training loop has to know."""
        self.check_failure()
        self.leases.check()
        if not self.settings.elastic and self._job_generation > self.generation:
            raise membership_changed(self.generation, self._job_generation)

    def check_failure(self) -> None:
        if self.failure is not None:
            raise self.failure

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
        if self.failure is None and self._job_generation > self.generation:
            await self._register(adopt=True)

    async def call(
        self,
        method: Callable[[pb_grpc.CoordinatorAsyncStub], UnaryCall[Request, Reply]],
        make: Callable[[], Request],
        *,
        timeout_s: float | None = ATTEMPT_S,
        settled: bool = True,
        even_stale: bool = False,
    ) -> Reply:
        """Call under the current identity; `make` is called again after a change. Not `settled`: in any generation.

        `even_stale` leaves it to the coordinator to refuse what comes from a generation that is over.
        """
        while True:
            if settled and not even_stale:
                await self.sync_generation()
            else:
                self.check_failure()
                if even_stale:
                    self.leases.check()
            even_stale = False
            incarnation = self.incarnation
            try:
                return await self.link.call(method, make(), Deadline(timeout_s, self.settings.patience_s))
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
        return await self.link.call(method, make(), Deadline(timeout_s, 0.0))

    async def _handle_call_error(self, error: StrataError, incarnation: str) -> None:
        """Returns if it makes sense to call again; raises what the caller has to know."""
        reason = error.detail.get("reason")
        if reason == Reason.MEMBERSHIP_CHANGED.value:
            self._job_generation = max(self._job_generation, int(error.detail["generation"]))
        elif reason == Reason.REPLACED.value:
            await self._on_replaced(error, incarnation)
        elif reason == "not-registered" or (error.code is Code.NOT_FOUND and not await self._is_member(incarnation)):
            await self._on_evicted(error, incarnation)
        elif self.failure is None and self.incarnation == incarnation:
            raise error

    def mark_stale(self, generation: int) -> None:
        """The worker's generation is over, even if the next one has not formed yet; its number is known."""
        self._job_generation = max(self._job_generation, generation, self.generation + 1)

    async def _is_member(self, incarnation: str) -> bool:
        """NOT_FOUND may mean the worker or the requested object: for a heartbeat it can only mean the worker."""
        try:
            within = Deadline(ATTEMPT_S, self.settings.patience_s)
            reply = await self.link.call(lambda stub: stub.Heartbeat, self.liveness.message(), within)
        except StrataError as error:
            if error.code is Code.NOT_FOUND:
                return False
            if reason_of(error) is not Reason.REPLACED:
                raise
            await self._on_replaced(error, incarnation)
        else:
            self.on_job_update(reply)
        return True

    async def _on_evicted(self, error: StrataError, incarnation: str) -> None:
        """The session ends, or continues as a new incarnation without leases; not after a stop command."""
        if self.generation == 0:
            # Evicted while it joined; the registration is retried.
            return
        if not self.settings.rejoin or self.commands.stopping:
            if self.failure is None:
                self.leases.mark_all_lost()
                self.leases.pop_lost()
                self.failure = evicted(error.message)
            return
        await self._register(adopt=self.settings.elastic, instead_of=incarnation)

    async def _on_replaced(self, error: StrataError, incarnation: str) -> None:
        """The session ends, unless this process replaced that incarnation itself; a pending registration decides."""
        async with self._registering:
            if self.failure is None and self.incarnation == incarnation:
                self.failure = error

    async def rejoin_generation(self) -> None:
        """Takes the current generation without a rewind; the one after it may have begun."""
        self.check_failure()
        await self._join_current_generation()

    def adopt(self, generation: int, rank: int, world_size: int) -> None:
        """Raises if a launcher gave this worker another rank: collectives would mix up what belongs to whom."""
        self._job_generation = max(self._job_generation, generation)
        if not self.settings.expects(rank, world_size):
            raise rank_differs((rank, world_size), self.settings)
        if generation != self.generation:
            self.liveness.hangs.generation_began_ns = round(self.clock.wall_s() * 1e9)
        self.generation, self.rank, self.world_size = generation, rank, world_size
        self.agreement.end()

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
                if (is_formed and self.settings.expects(found.rank, found.world_size)) or not adopt:
                    break
                if self.clock.monotonic_s() > until_s:
                    if is_formed:
                        raise rank_differs((found.rank, found.world_size), self.settings)
                    raise too_few_members(found.world_size, wait_for, self.settings.patience_s)
                if found.generation:
                    await asyncio.sleep(WAIT_FOR_POLL_S)
            if adopt:
                self.adopt(found.generation, found.rank, found.world_size)

    def _on_registered(self, found: pb.WorkerConfig) -> None:
        if not self._registered:
            # Also while the job has too few members for a generation.
            self._registered = True
            self.spawn(self.liveness.send_heartbeats(), "strata heartbeat")
            self.spawn(self.liveness.hold_presence(), "strata presence")
        self.job, self.incarnation = found.job_id, found.incarnation
        self.parameters = dict(found.training_parameters)
        self.recover_first = found.recover_first
        self.run_id = found.run
        self.liveness.interval_s = found.heartbeat_interval_ms / 1000
        self._leader_epoch = self._reattach_to = max(self._leader_epoch, found.leader_epoch)
        self.leases.mark_unless_finished(found.lost_leases)
        self._job_generation = max(self._job_generation, found.generation)

    async def _register_incarnation(self, incarnation: str, *, include_members: bool = False) -> pb.WorkerConfig:
        until_s = self.clock.monotonic_s() + self.settings.patience_s
        while True:
            message = registration_message(self.settings, self.job, incarnation, self.leases.ids())
            message.include_members = include_members
            try:
                return await self.link.call(
                    lambda stub: stub.RegisterWorker,
                    message,
                    Deadline(ATTEMPT_S, self.settings.patience_s),
                )
            except StrataError as error:
                # Evicted as silent while it waited for the others.
                if error.code is not Code.NOT_FOUND or self.clock.monotonic_s() > until_s:
                    raise

    async def on_heartbeat_reply(self, reply: pb.HeartbeatResponse) -> None:
        self.on_job_update(reply)
        if self._reattach_to > self._leader_epoch:
            # Another coordinator leads: report the held leases to it, and learn which of them are lost.
            await self._register(adopt=False)

    async def on_heartbeat_error(self, error: StrataError, incarnation: str) -> None:
        """A rejected heartbeat means that this incarnation is not a member any more."""
        if error.code is Code.NOT_FOUND or error.detail.get("reason") == "not-registered":
            await self._on_evicted(error, incarnation)
        elif reason_of(error) is Reason.REPLACED:
            await self._on_replaced(error, incarnation)
        elif error.code in (Code.UNAUTHENTICATED, Code.FORBIDDEN, Code.INVALID):
            self.failure = error

    async def wait_until_stale(self) -> bool:
        """A collective failed: whether a member is known to be lost, as soon as the coordinator can know it."""
        until_s = self.clock.monotonic_s() + max(LOST_S, LOST_BEATS * self.liveness.interval_s)
        while not self.is_stale and self.failure is None and self.clock.monotonic_s() < until_s:
            self.liveness.due.set()
            await asyncio.sleep(WAIT_FOR_POLL_S * 5)
        return self.is_stale or self.failure is not None

    def on_job_update(self, update: pb.HeartbeatResponse | pb.AttachResponse) -> None:
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
                self.spawn(self._flush_returned(), "return of leases")
            if command.kind is CommandKind.STOP and command.arguments.get(IF_HUNG) == KILL:
                self.spawn(self.liveness.hangs.end_if_hung(command.reason), "end of a hung process")
            if self._on_command is not None:
                self.spawn(
                    self.commands.run(self._on_command, command, self.liveness.due.set),
                    f"command {command.command_id}",
                )
        if self.commands.to_ack or self._reattach_to > self._leader_epoch:
            self.liveness.due.set()
        self.agreement.changed.set()
