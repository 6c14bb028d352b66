"""Sends a worker's heartbeats, by the host's relay or directly, and holds its presence stream: what a heartbeat
contains and when it is sent early.
"""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Final

import grpc

from strata.base import log
from strata.base.errors import Code, StrataError
from strata.base.secret import Secret
from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.worker.hang_report import HangReporter
from strata.coord.worker.link import Deadline, to_strata_error
from strata.coord.worker.relay import RelayLink
from strata.coord.worker.step_clock import FIRST_REPORT, StepTimes
from strata.coord.worker.telemetry import Telemetry

if TYPE_CHECKING:
    from strata.coord.worker.session import WorkerSession

ANNOUNCE_S: Final = 2.0
"""How long a program waits for the coordinator to know that it makes no steps now."""

_log = log.get(__name__)


class LivenessReporter:
    def __init__(self, session: WorkerSession) -> None:
        self.status: pb.WorkerStatus.ValueType = pb.WORKER_STATUS_INITIALIZING
        self.busy = 0
        """How many announced phases without steps the program is in."""
        self.step: int | None = None
        self.step_times = StepTimes()
        self.interval_s = 5.0
        self.due = asyncio.Event()
        """Set when a heartbeat is not to wait for its interval."""
        self.attached = asyncio.Event()
        """The presence stream has been open."""
        self.hangs = HangReporter(lambda: self.step, self.due.set)
        self._session = session
        relay = session.settings.relay
        self._relay = RelayLink(relay, session.clock) if relay is not None else None
        self._usage = Telemetry()
        self._lock = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def close(self) -> None:
        self._usage.close()
        if self._relay is not None:
            await self._relay.close()

    def report_step(self, number: int, times: StepTimes) -> None:
        """The next heartbeat reports it. Called in the thread of the training loop."""
        self.step, self.step_times = number, times
        self.hangs.training_thread = threading.get_ident()
        self.status = pb.WORKER_STATUS_TRAINING
        if len(times.compute_ms) == FIRST_REPORT and self._loop is not None:
            # Enough to tell a slow worker: the coordinator learns it now, once in a generation.
            self._loop.call_soon_threadsafe(self.due.set)

    async def announce(self) -> None:
        """Send a heartbeat now: what the program does next may hold the GIL. Without a reply the next one says it."""
        try:
            # An earlier heartbeat must not arrive after this one: it may be in the relay still.
            async with self._lock:
                await self._session.attempt(lambda stub: stub.Heartbeat, self.message, timeout_s=ANNOUNCE_S)
        except StrataError as error:
            _log.debug("announcement_failed", code=error.code.value, reason=error.message)
            self.due.set()

    async def send_heartbeats(self) -> None:
        self._loop = asyncio.get_running_loop()
        attempt = 0
        while True:
            self.due.clear()
            try:
                attempt, wait_s = 0, await self._send()
            except StrataError as error:
                if self._session.failure is not None:
                    return
                wait_s = min(self.interval_s, self._session.link.backoff_s(attempt))
                attempt += 1
                _log.debug("heartbeat_failed", code=error.code.value, reason=error.message)
            try:
                # Not wait_for: that of Python 3.11 forgets a cancellation which comes together with what it waits for.
                async with asyncio.timeout(wait_s):
                    await self.due.wait()
            except TimeoutError:
                continue

    async def _send(self) -> float:
        """The seconds to the next one."""
        session, incarnation = self._session, self._session.incarnation
        try:
            async with self._lock:
                message = self.message()
                reply = await self._exchange(message)
        except StrataError as error:
            await session.on_heartbeat_error(error, incarnation)
            raise
        session.commands.to_ack.difference_update(message.acked_command_ids)
        if message.HasField("hang_report"):
            self.hangs.on_received(message.hang_report)
        if self.hangs.is_new(reply.hang_probe):
            session.spawn(self.hangs.report(reply.hang_probe), "hang report")
        if reply.token:
            session.link.use_token(Secret(reply.token))
        await session.on_heartbeat_reply(reply)
        return reply.heartbeat_interval_ms / 1000

    async def _exchange(self, message: pb.HeartbeatRequest) -> pb.HeartbeatResponse:
        """Sends a heartbeat by the relay of the host, else directly; one that comes twice changes nothing."""
        if self._relay is not None:
            relayed = await self._relay.heartbeat(message, self._session.link.metadata, self.interval_s)
            if relayed is not None:
                # Its interval is the time to the relay's next turn, too short to wait for a reply or after a failure.
                return relayed
        within = Deadline(max(1.0, self.interval_s), self.interval_s)
        reply = await self._session.link.call(lambda stub: stub.Heartbeat, message, within)
        self.interval_s = reply.heartbeat_interval_ms / 1000
        return reply

    def message(self) -> pb.HeartbeatRequest:
        session, agreement = self._session, self._session.agreement
        return pb.HeartbeatRequest(
            worker_id=session.worker_id,
            # To the coordinator, a worker that does something else than training cannot hang.
            status=pb.WORKER_STATUS_IDLE if self.busy and self.status == pb.WORKER_STATUS_TRAINING else self.status,
            resources=self._usage.usage(),
            job_id=session.job,
            incarnation=session.incarnation,
            generation=session.generation,
            step=self.step,
            step_time_ms=self.step_times.step_ms,
            compute_times_ms=self.step_times.compute_ms,
            # The results of a failed incarnation do not count.
            progress=() if self.status == pb.WORKER_STATUS_ERROR else session.leases.progress(),
            acked_command_ids=sorted(session.commands.to_ack),
            explicit_acks=True,
            checkpoint_step=agreement.step,
            checkpoint_asked_step=agreement.asked.last or 0,
            checkpoint_stride=agreement.asked.stride,
            hang_report=self.hangs.pending,
        )

    async def hold_presence(self) -> None:
        """A broken stream leads to an eviction after half a second: open the next one at once."""
        session, link = self._session, self._session.link
        attempt = 0
        while session.failure is None:
            index, incarnation = link.index, session.incarnation
            request = pb.AttachRequest(job_id=session.job, worker_id=session.worker_id, incarnation=incarnation)
            try:
                async for news in link.stub().Attach(request, metadata=link.metadata):
                    attempt = 0
                    self.attached.set()
                    session.on_job_update(news)
            except grpc.aio.AioRpcError as error:
                failure = to_strata_error(error)
                _log.debug("presence_lost", code=failure.code.value, reason=failure.message)
                if failure.code is Code.UNAVAILABLE:
                    link.fail_over(index)
                elif failure.code is Code.UNAUTHENTICATED and link.reload_token():
                    continue
                else:
                    # The next heartbeat finds out why.
                    self.due.set()
            await asyncio.sleep(min(0.5, link.backoff_s(attempt)))
            attempt += 1
