"""Runs one attempt of a job on this host: the steps prepare, wait for room, run, watch, report, clean up, resumed where
an earlier agent left them; and how long a kill may take.

The files in the state folder say how far the attempt is, and each step can be repeated.
"""

from __future__ import annotations

import asyncio
import errno
import subprocess
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from strata.base import log, trace
from strata.base.errors import StrataError
from strata.base.failpoint import failpoint
from strata.fleet.agent import supervised
from strata.fleet.agent.attempt_folder import AttemptPaths, remove_folder
from strata.fleet.agent.attempt_report import AttemptReporter
from strata.fleet.agent.exec_session import ExecSession, RunningJob, stop_leftovers
from strata.fleet.agent.gang_member import RunningMember
from strata.fleet.agent.log_uploader import read_log_tail
from strata.fleet.agent.outcome import classify_exit
from strata.fleet.agent.prepare import HostContext, prepare_attempt
from strata.fleet.agent.retry import TRANSIENT, ThreadPools, retry, run_in
from strata.fleet.agent.server_publisher import ServerPublisher
from strata.fleet.agent.state import AgentState, AttemptOutcome, AttemptPhase, AttemptRecord, SavedRecord, StopOrder
from strata.fleet.agent.trainer_source import code_version
from strata.fleet.core.job import Cause
from strata.fleet.wire.leases import ExecPending

POLL_S: Final = 0.2
KILL_TIMEOUT_S: Final = 10.0
"""Time limit for ending a child that this host can no longer watch."""
ROOM_TIMEOUT_S: Final = 15.0
"""Time beyond the grace period that an attempt waits for jobs to end that the hub has ended already."""
_SOURCE_ERRNOS: Final = frozenset(
    {
        errno.ENAMETOOLONG,
        errno.EINVAL,
        errno.EILSEQ,
        errno.ELOOP,
        errno.EACCES,
        errno.EPERM,
        errno.ENOTDIR,
        errno.EISDIR,
    }
)
"""OS errors that names and links in a source can cause on a healthy host."""
_log = log.get(__name__)


class Attempt:
    def __init__(
        self,
        record: AttemptRecord,
        state: AgentState,
        host: HostContext,
        pools: ThreadPools,
        *,
        has_room: Callable[[AttemptRecord], bool] = lambda _: True,
        on_started: Callable[[], None] = lambda: None,
    ) -> None:
        self._saved = SavedRecord(record, state)
        self._host = host
        self._pools = pools
        self._has_room = has_room
        """Whether what this attempt takes of the host is free of other children."""
        self._on_started = on_started
        """Called when the child has started, so that the hub learns of it soon."""
        self._folder = self._saved.folder
        self._paths = AttemptPaths(host.attempts / record.key)
        self._process: subprocess.Popen[bytes] | None = None
        self._child_ended = asyncio.Event()
        self._execs: dict[str, asyncio.Task[None]] = {}
        """Commands of people that run beside the child, by their id."""
        self._dropped = asyncio.Event()
        """The hub expects no report: retries are cancelled."""
        lease = record.lease
        self._reporter = AttemptReporter(self._saved, self._paths, host, pools, self._dropped)
        self._server = ServerPublisher(lease, self._paths, host, pools) if lease.spec.kind == "server" else None
        self.member = RunningMember(lease, self._paths, host, pools) if lease.gang is not None else None

    @property
    def record(self) -> AttemptRecord:
        return self._saved.record

    @property
    def running(self) -> bool:
        outcome = self.record.outcome
        return self.record.phase is AttemptPhase.RUNNING or (outcome is not None and "exit" in outcome.facts)

    @property
    def ended(self) -> bool:
        """The child has ended, or there was none; only the report is left."""
        return self.record.phase is AttemptPhase.ENDED

    @property
    def occupies(self) -> bool:
        """Its child may live."""
        return self.record.phase in (AttemptPhase.STARTING, AttemptPhase.RUNNING)

    @property
    def dropped(self) -> bool:
        """Dropped by this agent process: one that died after saving the order may not have ended the child."""
        return self._dropped.is_set()

    @property
    def supervisor_pid(self) -> int:
        pids = supervised.read_pids(self._folder)
        return 0 if pids is None else pids.supervisor

    async def run(self) -> None:
        """Returns when the hub has the outcome and nothing of the attempt is left on this host."""
        lease = self.record.lease
        # Its task was started inside the span of the claim, and continues that trace.
        with trace.span("attempt", job=lease.job_id, epoch=lease.epoch):
            await self._run()

    async def _run(self) -> None:
        try:
            if self.record.phase is AttemptPhase.PREPARING and (failed := await self._prepare()) is not None:
                stop = self.record.stop
                if stop is not None:
                    failed = AttemptOutcome(cause=stop.cause, error=stop.reason, drop=stop.drop)
                self._saved.change(phase=AttemptPhase.ENDED, outcome=failed)
            if self.occupies:
                stop_leftovers(self._folder)
                await self._watch()
            outcome = self.record.outcome
            assert outcome is not None, "an attempt that is over has an outcome"
        except Exception as error:  # noqa: BLE001 - the outermost handler of an attempt: reported now, another host takes it
            # A full or missing disk, or a bug in the agent: in either case not the job's fault.
            _log.exception("attempt_failed_on_host", job=self.record.lease.job_id)
            await self._kill_child()
            outcome = AttemptOutcome(cause=Cause.INFRA, error=f"the host failed: {error!r}")
        await self._reporter.report(outcome)
        self._child_ended.set()
        if self._execs:
            await asyncio.wait(self._execs.values())
        self._clean_up()

    def start_exec(self, pending: ExecPending) -> None:
        """Run a command of a person beside the child. The hub repeats it in each heartbeat until it has ended."""
        if self.record.phase is not AttemptPhase.RUNNING or pending.id in self._execs:
            return
        job = RunningJob(self.record.lease, self._folder, self._paths, self._reporter.redactor, self._child_ended)
        task = asyncio.create_task(ExecSession(pending, job, self._host, self._pools).run(), name=pending.id)
        self._execs[pending.id] = task
        task.add_done_callback(lambda _: self._execs.pop(pending.id))

    def stop(self, stop: StopOrder, grace_s: float) -> None:
        """End the child. Of two orders the first one counts, unless the second drops the attempt."""
        earlier = self.record.stop
        if earlier is None or (stop.drop and not earlier.drop):
            self._saved.change(stop=stop)
            failpoint("agent.stop.written")
        if self.record.phase is AttemptPhase.ENDED and not stop.drop:
            return
        if stop.drop:
            self._dropped.set()
        self._request_stop(grace_s)

    def _request_stop(self, grace_s: float) -> None:
        if self._folder.exists():
            supervised.request_stop(self._folder, grace_s)

    async def _kill_child(self) -> None:
        """Kills the child before the hub may give the job to another host; also on a disk where the stop request cannot
        be written."""
        for _ in range(round(KILL_TIMEOUT_S / POLL_S)):
            with suppress(OSError, StrataError):
                self._request_stop(0.0)
            with suppress(OSError, StrataError):
                supervised.kill_orphans(self._folder)
            if not supervised.is_supervised(self._folder, self._process):
                await run_in(self._pools.work, supervised.remove_container, self._folder)
                return
            await asyncio.sleep(POLL_S)
        _log.error("child_not_killed", job=self.record.lease.job_id)

    async def _prepare(self) -> AttemptOutcome | None:
        """Starts the child. Returns the outcome if that cannot be done here."""
        lease, traceparent = self.record.lease, trace.traceparent()
        busy = AttemptOutcome(cause=Cause.INFRA, error="jobs that the hub has ended still run on this host")
        # The preparation of a server replaces its data folder, in which an earlier attempt may still run.
        if self._server is not None and not await self._wait_for_room():
            return busy
        try:
            prepared = await retry(
                self._pools.prepare,
                "prepare",
                lambda: prepare_attempt(
                    self._host,
                    lease,
                    self._paths,
                    self.record.devices,
                    lambda: self.record.stop is None,
                    traceparent=traceparent,
                ),
                cancelled=self._dropped,
            )
        except StrataError as error:
            # A hub or network that is away is retried; everything else is missing on this host.
            cause = Cause.INFRA if error.code in TRANSIENT else Cause.SETUP_ERROR
            return AttemptOutcome(cause=cause, error=f"cannot prepare: {error}")
        except OSError as error:
            if error.errno not in _SOURCE_ERRNOS:
                raise
            return AttemptOutcome(cause=Cause.SETUP_ERROR, error=f"cannot prepare: {error}")
        has_room = await self._wait_for_room()
        if self.record.stop is not None or not has_room:
            return busy
        # Nothing is awaited until the phase is saved: of two attempts that wait for the same room one gets it.
        supervised.write_spec(self._folder, prepared.spec)
        code = code_version(lease.trainer) if lease.trainer else ""
        self._saved.change(phase=AttemptPhase.STARTING, code=code, prepared=prepared.facts)
        failpoint("agent.attempt.starting")
        self._process = supervised.start_supervisor(self._folder)
        failpoint("agent.attempt.started")
        return None

    async def _wait_for_room(self) -> bool:
        """Says whether there is room now. The hub gives away what an ended job had before its child has ended."""
        polls = round((self._host.settings.grace_s + ROOM_TIMEOUT_S) / POLL_S)
        while not self._has_room(self.record) and self.record.stop is None and polls:
            polls -= 1
            await asyncio.sleep(POLL_S)
        return self._has_room(self.record)

    async def _watch(self) -> None:
        moving = [asyncio.create_task(self._reporter.upload_until(self._child_ended))]
        if self.member is not None:
            moving.append(asyncio.create_task(self.member.fetch_until(self._child_ended)))
        try:
            status = await self._until_ended()
            tail = await run_in(self._pools.work, read_log_tail, self._folder / supervised.LOG)
            spec = await run_in(self._pools.work, supervised.read_spec, self._folder)
            outcome = classify_exit(
                status,
                tail,
                stop=self.record.stop,
                timeout_s=self.record.lease.spec.timeout_s,
                limits=None if spec is None else spec.limits,
            )
            if outcome.cause is None and self._server is not None:
                outcome = AttemptOutcome(cause=Cause.USER_ERROR, error="the server has ended", facts=outcome.facts)
            self._saved.change(phase=AttemptPhase.ENDED, outcome=outcome)
            failpoint("agent.attempt.ended")
        finally:
            self._child_ended.set()
            if self._server is not None:
                await self._server.close()
            await asyncio.gather(*moving)

    async def _until_ended(self) -> supervised.ChildExit | supervised.SupervisorLost:
        while True:
            status = supervised.read_status(self._folder, self._process)
            match status:
                case supervised.ChildExit():
                    return status
                case supervised.SupervisorLost():
                    supervised.kill_orphans(self._folder)
                    await run_in(self._pools.work, supervised.remove_container, self._folder)
                    return status
                case supervised.ChildNotStarted() if self._process is None:
                    # An earlier agent died just before or after it started the supervisor.
                    self._process = supervised.start_supervisor(self._folder)
                case supervised.ChildRunning() if self.record.phase is not AttemptPhase.RUNNING:
                    failpoint("agent.attempt.seen")
                    self._saved.change(phase=AttemptPhase.RUNNING)
                    self._on_started()
                case supervised.ChildRunning() if self._server is not None:
                    await self._server.publish()
                case _:
                    pass
            await asyncio.sleep(POLL_S)

    def _clean_up(self) -> None:
        self._saved.remove()
        try:
            remove_folder(self._paths.folder)
        except StrataError as error:
            _log.warning("attempt_folder_not_removed", job=self.record.lease.job_id, reason=error.message)
