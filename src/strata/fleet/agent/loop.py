"""The agent's loops and their intervals: claim, heartbeat, maintenance (10 s), samples (15 s), probe (600 s), drain and
stop. `attempt` runs one job.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, Final

import msgspec

from strata.base import log, trace
from strata.base.clock import Clock
from strata.base.errors import Code, StrataError
from strata.base.failpoint import failpoint
from strata.base.loop import every
from strata.fleet.agent import identity, preemption
from strata.fleet.agent.attempt import Attempt
from strata.fleet.agent.metrics import AgentCounts, expose_metrics
from strata.fleet.agent.prepare import GIB, HostContext, prune_work_folder
from strata.fleet.agent.probe import CpuMeter, ProbeResult, new_incarnation, probe_host, sample_host
from strata.fleet.agent.retry import BACKOFF, TRANSIENT, ThreadPools, retry, run_in, wait_or_timeout
from strata.fleet.agent.selftest import check_disk_space
from strata.fleet.agent.state import AgentState, AttemptRecord, PendingClaim, StopOrder
from strata.fleet.core.amounts import Room
from strata.fleet.core.capability import Capability, profile
from strata.fleet.core.job import Cause
from strata.fleet.core.samples import HostSample
from strata.fleet.wire.leases import ExecPending, LeaseGiven, LeaseHeld, LeaseVerdict

MAINTENANCE_EVERY_S: Final = 10.0
PROBE_EVERY_S: Final = 600.0
SAMPLE_EVERY_S: Final = 15.0
DRAIN_REPORT_S: Final = 20.0
"""While draining, after the last child has ended: how long reports are retried before the next agent gets them."""
STOP_REPORT_S: Final = 5.0
"""The same for an agent that was stopped twice."""
_AGENT_STOPPED: Final = StopOrder(cause=Cause.PREEMPTED, reason="the agent of this host was stopped")
_MAX_CLAIM_COUNT: Final = 16
_log = log.get(__name__)


class Agent:
    def __init__(self, host: HostContext, state: AgentState, clock: Clock, capability: Capability) -> None:
        self._host = host
        self._settings = host.settings
        self._state = state
        self._clock = clock
        self._capability = capability
        self._pools = ThreadPools()
        self._attempts: dict[str, Attempt] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._stopping = asyncio.Event()
        self._stop_now = asyncio.Event()
        """Stopped a second time."""
        self._stop_at_s = host.settings.stop_at_s(clock.wall_s())
        self._on_stop = host.settings.on_stop
        self._changed = asyncio.Event()
        """There may be room for a job: an attempt is over, or the machine is no longer in local use."""
        self._heartbeat_now = asyncio.Event()
        self._renew_every_s = 10.0
        self._sample: HostSample | None = None
        """Not sent yet."""
        self._probed_at_s = clock.monotonic_s()
        self._claims_paused = ""
        """Why nothing is claimed at the moment; empty if claims go on."""
        self._counts = AgentCounts()
        self._incarnation = new_incarnation()
        self._cpu_meter = CpuMeter()

    async def run(self) -> None:
        """Returns when the agent was stopped and has drained."""
        ending = asyncio.create_task(self._stop_in_time())
        try:
            async with expose_metrics(self._settings, self._counts):
                await self._run()
        finally:
            ending.cancel()

    async def _stop_in_time(self) -> None:
        # In steps: the wall clock goes on while a machine is suspended.
        while (left_s := self._stop_at_s - self._clock.wall_s()) > 0:
            await self._clock.sleep(min(left_s, MAINTENANCE_EVERY_S))
        if not self._stopping.is_set():
            _log.info("host_time_over", until=self._settings.until)
            self.stop()

    async def _run(self) -> None:
        await self._register()
        await self._adopt_attempts()
        await self._check_host_availability()
        loops: list[Coroutine[Any, Any, None]] = [
            self._run_forever(self._heartbeat_once),
            self._run_forever(self._claim_once),
            every(MAINTENANCE_EVERY_S, self._maintain_once, clock=self._clock),
            every(SAMPLE_EVERY_S, self._sample_once, clock=self._clock),
        ]
        tasks = [asyncio.create_task(loop) for loop in loops]
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait([stopping, *tasks], return_when=asyncio.FIRST_COMPLETED)
            if not stopping.done():
                # A bug ended a loop. Better an agent that is restarted than one that does half of its work.
                await asyncio.gather(*(task for task in tasks if task.done()))
            await self._drain()
            if self._host.is_ephemeral and self._on_stop != "leave":
                await run_in(self._pools.work, leave_fleet, self._host)
        finally:
            stopping.cancel()
            for task in (*tasks, *self._tasks.values()):
                task.cancel()
            self._host.hub.client.close()
            await asyncio.wait([*tasks, *self._tasks.values()])
            self._pools.close()

    def stop(self) -> None:
        """First call: stop as the setting `on_stop` says. Second call: stop at once."""
        if self._stopping.is_set():
            self._stop_now.set()
        self._stopping.set()
        self._changed.set()

    def hand_over(self) -> None:
        """Exit now and leave the jobs to the next agent. An agent that is stopping already keeps to its `on_stop`."""
        if not self._stopping.is_set():
            self._on_stop = "leave"
            self.stop()

    # Registering

    async def _register(self) -> None:
        reply = await retry(
            self._pools.work,
            "register",
            lambda: self._host.hub.register(self._capability),
            cancelled=self._stopping,
        )
        self._renew_every_s = reply.renew_every_s
        _log.info("host_registered", host=reply.name, state=reply.state, reason=reply.state_reason)

    async def _adopt_attempts(self) -> None:
        """Resume the attempts that an earlier agent left. The first heartbeat tells which the hub still wants."""
        records = await run_in(self._pools.work, lambda: list(self._state.records()))
        failpoint("agent.adopt.read")
        await run_in(
            self._pools.work, prune_work_folder, self._host, {record.key for record in records}, self._clock.wall_s()
        )
        for record in records:
            _log.info("attempt_resumed", job=record.lease.job_id, epoch=record.lease.epoch, phase=record.phase)
            self._start_attempt(record)
        failpoint("agent.adopt.begun")
        self._heartbeat_now.set()

    # Claiming

    async def _claim_once(self) -> None:
        self._changed.clear()
        claim = self._state.pending_claim() or self._next_claim()
        if claim is None or self._stopping.is_set():
            await self._changed.wait()
            return
        self._state.save_claim(claim)
        failpoint("agent.claim.written")
        with trace.span("claim", kind="client"):
            leases = await self._send_claim(claim)
            failpoint("agent.claim.replied")
            for lease in leases:
                self._accept_lease(lease)
        failpoint("agent.claim.taken")
        # Only now: after a crash before this line the same claim is sent again, and saved leases start only once.
        self._state.clear_claim()

    async def _send_claim(self, claim: PendingClaim) -> tuple[LeaseGiven, ...]:
        try:
            leases = await run_in(
                self._pools.claims, self._host.hub.claim, claim.claim_id, claim.count, self._settings.poll_s
            )
        except StrataError as error:
            self._counts.claims["failed"] += 1
            if error.code not in TRANSIENT:
                # A retry would fail again; the next claim gets a new id.
                self._state.clear_claim()
            raise
        self._counts.claims["granted" if leases else "empty"] += 1
        return leases

    def _next_claim(self) -> PendingClaim | None:
        # The hub counts what fits; an agent that has no room for any job whatever does not bother it.
        held = (attempt.record.lease.taken for attempt in self._attempts.values())
        if self._claims_paused or Room(profile(self._capability).capacity, held).full:
            return None
        return PendingClaim(claim_id=f"claim-{secrets.token_hex(12)}", count=_MAX_CLAIM_COUNT)

    def _accept_lease(self, lease: LeaseGiven) -> None:
        devices = None if lease.taken.whole else lease.taken.cards
        record = AttemptRecord(lease=lease, claimed_at_s=self._clock.wall_s(), devices=devices)
        if self._state.add(record):
            _log.info("job_claimed", job=lease.job_id, epoch=lease.epoch, label=lease.spec.label)
            self._counts.leases += 1
            self._start_attempt(record)
            if self._stopping.is_set() and self._on_stop != "leave":
                # It was granted to a claim that waited at the hub when the agent was stopped.
                self._attempts[record.key].stop(_AGENT_STOPPED, 0.0)

    def _start_attempt(self, record: AttemptRecord) -> None:
        attempt = Attempt(
            record,
            self._state,
            self._host,
            self._pools,
            has_room=self._has_room,
            on_started=self._heartbeat_now.set,
        )
        if not self._has_room(record):
            # The hub has ended a job here whose child still runs: the order to stop it comes with the heartbeat.
            _log.info("attempt_waits_for_room", job=record.lease.job_id, epoch=record.lease.epoch)
            self._heartbeat_now.set()
        task = asyncio.create_task(attempt.run(), name=record.key)
        self._attempts[record.key] = attempt
        self._tasks[record.key] = task
        self._counts.running = len(self._attempts)
        task.add_done_callback(lambda _: self._on_attempt_done(record.key, task))

    def _has_room(self, record: AttemptRecord) -> bool:
        """Says whether what this attempt takes is free of the children of others, and an earlier child of its job
        ended."""
        held = [other.record.lease for key, other in self._attempts.items() if key != record.key and other.occupies]
        if any(lease.job_id == record.lease.job_id for lease in held):
            return False
        room = Room(profile(self._capability).capacity, [lease.taken for lease in held])
        return not held or room.admits(record.lease.taken)

    def _on_attempt_done(self, key: str, task: asyncio.Task[None]) -> None:
        ended = self._attempts.pop(key)
        del self._tasks[key]
        self._counts.running = len(self._attempts)
        if ended.record.outcome is not None:
            self._counts.attempts[ended.record.outcome.cause or "completed"] += 1
        if not task.cancelled() and task.exception() is not None:
            # A bug: the record stays, and the next agent resumes the attempt.
            _log.error("attempt_crashed", attempt=key, reason=repr(task.exception()))
        self._changed.set()

    # Heartbeats

    async def _heartbeat_once(self) -> None:
        self._heartbeat_now.clear()
        now_s = self._clock.monotonic_s()
        held = tuple(
            LeaseHeld(
                job_id=attempt.record.lease.job_id,
                epoch=attempt.record.lease.epoch,
                running=attempt.running,
                renew_token=attempt.member is not None and attempt.occupies and attempt.member.needs_token(now_s),
            )
            for attempt in self._attempts.values()
        )
        sample, self._sample = self._sample, None
        try:
            reply = await run_in(self._pools.heartbeats, self._host.hub.renew, held, sample, self._incarnation)
        except StrataError:
            self._counts.heartbeats["failed"] += 1
            raise
        self._counts.heartbeats["answered"] += 1
        for verdict in reply.verdicts:
            if verdict.verdict == "stop" or verdict.yield_as:
                self._apply_lease_verdict(verdict)
            elif verdict.token:
                for attempt in self._holders(verdict):
                    if attempt.member is not None:
                        await attempt.member.renew_token(verdict.token, now_s)
        for pending in reply.execs:
            self._start_exec(pending)
        await wait_or_timeout(self._heartbeat_now, self._renew_every_s)

    def _apply_lease_verdict(self, verdict: LeaseVerdict) -> None:
        for attempt in self._holders(verdict):
            lease = attempt.record.lease
            if verdict.yield_as:
                stop = StopOrder(cause=Cause(verdict.yield_as), reason=verdict.reason)
                attempt.stop(stop, self._settings.grace_s)
                continue
            if verdict.cause == "ended" and attempt.ended:
                # Perhaps by our own report, whose reply was lost: it is sent again and gets the same reply.
                continue
            # Usually a person cancelled the job, which is no reason for a warning.
            write_log = _log.info if verdict.cause == "ended" else _log.warning
            write_log("lease_lost", job=lease.job_id, epoch=lease.epoch, reason=verdict.reason)
            stop = StopOrder(cause=Cause.CANCELLED, reason=verdict.reason, drop=True)
            attempt.stop(stop, self._settings.grace_s if verdict.cause == "ended" else 0.0)

    def _start_exec(self, pending: ExecPending) -> None:
        """One of an attempt that this host does not have ends at the hub, with the lease."""
        for attempt in self._attempts.values():
            lease = attempt.record.lease
            if (lease.job_id, lease.epoch) == (pending.job_id, pending.epoch):
                attempt.start_exec(pending)

    def _holders(self, verdict: LeaseVerdict) -> list[Attempt]:
        """The attempt that the verdict is about, unless it is dropped already."""
        key = verdict.job_id, verdict.epoch
        return [
            attempt
            for attempt in self._attempts.values()
            if (attempt.record.lease.job_id, attempt.record.lease.epoch) == key and not attempt.dropped
        ]

    async def _sample_once(self) -> None:
        """The next heartbeat carries it; a driver that hangs holds up no heartbeat."""
        self._sample = self._counts.sample = await run_in(self._pools.work, self._take_sample)

    def _take_sample(self) -> HostSample:
        host = self._host
        return msgspec.structs.replace(
            sample_host(host.environ, self._cpu_meter, with_cards=bool(self._capability.gpus)),
            disk_free_gib=shutil.disk_usage(host.settings.work_folder).free / GIB,
            environments_gib=host.environments.entries.size_bytes() / GIB,
            data_gib=host.data.size_bytes() / GIB,
        )

    # Maintenance

    async def _maintain_once(self) -> None:
        await self._renew_certificate()
        await self._check_host_availability()
        if self._clock.monotonic_s() - self._probed_at_s >= PROBE_EVERY_S:
            self._probed_at_s = self._clock.monotonic_s()
            probed = await run_in(self._pools.work, self.probe)
            if probed.capability != self._capability:
                self._capability = probed.capability
                await self._register()

    async def _renew_certificate(self) -> None:
        folder, now_s = self._settings.state_folder, self._clock.wall_s()
        if await run_in(self._pools.work, identity.renewal_due, folder, now_s):
            client = self._host.hub.client
            renewed = await run_in(self._pools.work, identity.renew_certificate, folder, client, now_s)
            _log.info("certificate_renewed", valid_for_s=round(renewed.valid_for_s))

    async def _check_host_availability(self) -> None:
        """Pause or resume claims: by the free disk space, and by local use of the machine."""
        disk = await run_in(self._pools.work, check_disk_space, self._settings.work_folder, self._settings.min_free_gib)
        local_use = ""
        if self._settings.yield_to_people != "never":
            supervisors = [pid for attempt in self._attempts.values() if (pid := attempt.supervisor_pid)]
            use = await run_in(self._pools.work, preemption.observe_local_use, self._host.environ, supervisors)
            local_use = preemption.local_use_reason(use)
        self._pause_claims("" if disk.ok else disk.reason, local_use)

    def _pause_claims(self, disk_full: str, local_use: str) -> None:
        """Reasons, empty if they do not apply; without a reason claims resume."""
        reason = disk_full or local_use
        if reason and reason != self._claims_paused:
            _log.info("claims_paused", reason=reason)
        elif self._claims_paused and not reason:
            _log.info("claims_resumed")
        self._claims_paused = reason
        self._counts.claims_paused = bool(reason)
        if not reason:
            self._changed.set()
        if local_use and self._settings.yield_to_people == "jobs":
            for attempt in self._attempts.values():
                attempt.stop(StopOrder(cause=Cause.PREEMPTED, reason=local_use), self._settings.grace_s)

    def probe(self) -> ProbeResult:
        sandbox = self._host.sandbox
        return probe_host(self._host.environ, self._settings, sandbox.level, sandbox.lacks, sandbox.limits)

    # Draining

    async def _drain(self) -> None:
        mode = self._on_stop
        _log.info("agent_stopping", mode=mode, attempts=len(self._attempts))
        if mode == "leave":
            return
        if mode == "preempt":
            self._stop_all(self._settings.grace_s)
        await self._wait_until(lambda: all(attempt.ended for attempt in self._attempts.values()), self._stop_now)
        if self._stop_now.is_set():
            self._stop_all(0.0)
            await self._wait_until(lambda: all(attempt.ended for attempt in self._attempts.values()), asyncio.Event())
        hurried = self._stop_now.is_set()
        with suppress(TimeoutError):
            # An ephemeral host has no next agent: it reports for as long as it is left alone.
            limit_s = STOP_REPORT_S if hurried else None if self._host.is_ephemeral else DRAIN_REPORT_S
            async with asyncio.timeout(limit_s):
                await self._wait_until(lambda: not self._attempts, asyncio.Event() if hurried else self._stop_now)
        if self._attempts:
            _log.warning("reports_left_to_next_agent", attempts=len(self._attempts))

    def _stop_all(self, grace_s: float) -> None:
        for attempt in self._attempts.values():
            attempt.stop(_AGENT_STOPPED, grace_s)

    async def _wait_until(self, condition: Callable[[], bool], interrupted: asyncio.Event) -> None:
        while not condition() and not interrupted.is_set():
            await wait_or_timeout(interrupted, 0.1)

    async def _run_forever(self, run_once: Callable[[], Awaitable[None]]) -> None:
        """Run again at once, after a failure with backoff. `every` is for work that has an interval of its own."""
        failures = 0
        while True:
            try:
                await run_once()
                failures = 0
            except (StrataError, OSError) as error:
                failures += 1
                if failures == 1 or failures % 20 == 0:
                    _log.warning("agent_loop_retried", loop=run_once.__name__, failures=failures, reason=str(error))
                if isinstance(error, StrataError) and error.code is Code.NOT_FOUND:
                    # The hub no longer knows this host, perhaps because it was restored from a backup.
                    await self._register()
                await asyncio.sleep(min(BACKOFF.delay_s(failures, 0.5), self._renew_every_s))


def leave_fleet(host: HostContext) -> None:
    """Remove this host from its fleet. What it could not report ends with its leases."""
    try:
        host.hub.leave()
    except StrataError as error:
        if error.code not in (Code.UNAUTHENTICATED, Code.FORBIDDEN):
            raise
        # Its credentials have ended already, perhaps by a request whose reply was lost.
        _log.warning("host_left_before", reason=error.message)
    identity.remove_membership(host.settings.state_folder)
    _log.info("host_left")


def handle_signals(agent: Agent) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        if sys.platform == "win32":
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(agent.stop))
        else:
            loop.add_signal_handler(number, agent.stop)
    if sys.platform != "win32":
        loop.add_signal_handler(signal.SIGUSR1, agent.hand_over)
