"""Runs one `strata exec` command beside a job: its time limit, how much of its output is kept (1 MiB of the beginning,
and the end), polls, and what the hub gets when it ends.

A supervisor of its own runs the command in the job's sandbox (`join`). The command ends with the job, with its time
limit, and when the hub no longer wants it. It does not outlive a restart of the agent: the next agent stops it.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from strata.base import log
from strata.base.atomic import write_json
from strata.base.errors import Code, StrataError
from strata.base.failpoint import failpoint
from strata.base.private import private_folder
from strata.fleet import seccomp
from strata.fleet.agent import cgroup, containers, supervised, supervisor
from strata.fleet.agent.attempt_folder import AttemptPaths
from strata.fleet.agent.log_uploader import StreamUploader
from strata.fleet.agent.path_names import EXEC, exec_name
from strata.fleet.agent.prepare import HostContext
from strata.fleet.agent.redaction import Redactor
from strata.fleet.agent.retry import TRANSIENT, ThreadPools, retry, run_in
from strata.fleet.agent.sandbox import is_root
from strata.fleet.agent.supervised import LimitsSpec, SupervisorSpec
from strata.fleet.wire.execs import ExecEndRequest, ExecGiven
from strata.fleet.wire.leases import ExecPending, LeaseGiven

MAX_OUTPUT: Final = 1024 * 1024
"""Bytes of the beginning of the output; of more the end is kept as well."""
POLL_S: Final = 0.1
CONTACT_S: Final = 2.0
"""How often the hub is asked whether a silent command is still wanted."""
LAST_S: Final = 20.0
"""Time limit for the rest of the output and the report, after the job has ended."""
_GRACE_S: Final = 2.0
_MAX_REASON: Final = 1000
_PROGRAM: Final = str(Path(__file__).with_name("exec_in_sandbox.py"))
"""Not imported: it is a program, and for Linux."""
_log = log.get(__name__)


class SandboxExec(msgspec.Struct, frozen=True, kw_only=True):
    """What `join` reads: whose sandbox, and what to execute there."""

    pid: int
    started: str
    """When that process started, in ticks since boot."""
    control_groups: Sequence[str]
    filter: bytes
    """The filter of system calls, as the job has one, but debuggers work. Empty: none."""
    uid: int | None
    """None: the agent's own user."""
    gid: int | None
    groups: Sequence[int]
    command: Sequence[str]
    env: Mapping[str, str]
    cwd: str


@dataclass(frozen=True, slots=True)
class RunningJob:
    """The attempt in which commands run."""

    lease: LeaseGiven
    folder: Path
    """The folder of its supervisor's files."""
    paths: AttemptPaths
    redactor: Redactor
    ended: asyncio.Event


@dataclass(frozen=True, slots=True)
class _Outcome:
    status: int | None = None
    error: str = ""


class ExecSession:
    def __init__(self, pending: ExecPending, job: RunningJob, host: HostContext, pools: ThreadPools) -> None:
        self._pending = pending
        self._job = job
        self._host = host
        self._pools = pools
        self._run_id = secrets.token_hex(8)
        self._unwanted = ""
        """Why the command is stopped; empty if it is not."""
        self._folder = job.folder / exec_name(pending.id)
        self._output = StreamUploader(
            host.hub, job.lease, f"exec/{pending.id}", self._folder / supervised.LOG, job.redactor
        )

    async def run(self) -> None:
        """Returns when the hub knows how the command ended, or does not want to know."""
        hub, lease, pending = self._host.hub, self._job.lease, self._pending
        try:
            given = await retry(
                self._pools.work,
                "exec_start",
                lambda: hub.start_exec(lease, pending.id, self._run_id),
                cancelled=self._job.ended,
            )
        except StrataError as error:
            _log.info("exec_not_started", job=lease.job_id, exec=pending.id, reason=error.message)
            return
        _log.info("exec_started", job=lease.job_id, exec=pending.id)
        try:
            outcome = await self._run(given)
        except (StrataError, OSError) as error:
            outcome = _Outcome(error=str(error))
        finally:
            await run_in(self._pools.work, lambda: shutil.rmtree(self._folder, ignore_errors=True))
        body = ExecEndRequest(run=self._run_id, status=outcome.status, error=outcome.error[:_MAX_REASON])
        with suppress(TimeoutError, StrataError):
            await self._deliver("exec_end", lambda: hub.end_exec(lease, pending.id, body))
        _log.info("exec_ended", job=lease.job_id, exec=pending.id, status=outcome.status, reason=outcome.error)

    async def _run(self, given: ExecGiven) -> _Outcome:
        process = await run_in(self._pools.work, self._start, given)
        child_exit = await self._until_ended(process)
        try:
            await self._deliver("exec_output", lambda: self._output.upload_new(last=True))
        except (StrataError, TimeoutError) as error:
            self._unwanted = self._unwanted or f"its output could not be sent: {error}"
        return _outcome(child_exit, self._unwanted, given.timeout_s)

    async def _deliver(self, operation: str, call: Callable[[], object]) -> None:
        """Repeats the call until the hub has it or refuses it, and after the end of the job for a short time only.

        Another session for the same exec would have another run id: the hub would end it without its exit status.
        """
        try:
            await retry(self._pools.work, operation, call, cancelled=self._job.ended)
        except StrataError as error:
            if error.code not in TRANSIENT:
                raise
            async with asyncio.timeout(LAST_S):
                await retry(self._pools.work, operation, call, cancelled=asyncio.Event())

    def _start(self, given: ExecGiven) -> subprocess.Popen[bytes]:
        private_folder(self._folder)
        request, limits = sandbox_request(self._host, self._job, given.command)
        path = self._folder / "request.json"
        write_json(path, request)
        spec = SupervisorSpec(
            command=[sys.executable, "-I", "-S", _PROGRAM, str(path)],
            cwd="/",
            env={},
            max_log_bytes=MAX_OUTPUT,
            timeout_s=given.timeout_s,
            grace_s=_GRACE_S,
            limits=limits,
        )
        supervised.write_spec(self._folder, spec)
        started = supervised.start_supervisor(self._folder)
        failpoint("agent.exec.started")
        return started

    async def _until_ended(self, process: subprocess.Popen[bytes]) -> supervised.ChildExit | supervised.SupervisorLost:
        loop = asyncio.get_running_loop()
        contact_at_s = loop.time() + CONTACT_S
        while True:
            status = supervised.read_status(self._folder, process)
            if isinstance(status, supervised.ChildExit | supervised.SupervisorLost):
                return status
            if self._job.ended.is_set():
                self._unwanted = self._unwanted or "the job has ended"
            if self._unwanted:
                supervised.request_stop(self._folder, 0.0)
            elif await self._send(contact=loop.time() >= contact_at_s):
                contact_at_s = loop.time() + CONTACT_S
            await asyncio.sleep(POLL_S)

    async def _send(self, *, contact: bool) -> bool:
        """Says whether the hub was reached. A hub that is away gets the rest later."""
        try:
            sent = await run_in(self._pools.work, self._output.upload_new)
            if contact and not sent:
                await run_in(self._pools.work, self._output.check_wanted)
        except StrataError as error:
            if error.code not in TRANSIENT:
                self._unwanted = error.message
            return False
        return sent or contact


def stop_leftovers(folder: Path) -> None:
    """Stop the commands that an earlier agent has left beside this job."""
    for left in folder.glob(f"{EXEC}*"):
        with suppress(OSError):
            supervised.request_stop(left, 0.0)


def sandbox_request(host: HostContext, job: RunningJob, command: Sequence[str]) -> tuple[SandboxExec, LimitsSpec]:
    """Returns how the command gets into the sandbox of the job, and the limits that it does not find there.

    PRECONDITION if it cannot get there.
    """
    if sys.platform != "linux":
        raise StrataError(Code.PRECONDITION, "commands can be run in jobs on Linux only")
    spec = supervised.read_spec(job.folder)
    pids = supervised.read_pids(job.folder)
    if spec is None or pids is None or not pids.child:
        raise StrataError(Code.PRECONDITION, "the job is not running any more")
    trainer = job.lease.trainer
    user = host.job_user
    if trainer is not None and trainer.environment is not None and trainer.environment.image:
        runtime = containers.find_runtime(host.settings.containers, host.environ, is_root=is_root())
        container = containers.inspect_container(runtime, job.paths)
        pid, cwd, env = container.pid, container.cwd, container.env
        groups: Sequence[str] = cgroup.groups_of(pid)
        limits = LimitsSpec()
        filtered = seccomp.is_supported()
    else:
        pid, cwd, env, groups = _first_inside(spec, pids.child), spec.cwd, dict(spec.env), spec.limits.groups
        filtered = bool(spec.filter)
        # The control groups of the job limit the command too; what they do not limit is limited for it by itself.
        limits = LimitsSpec(
            memory_bytes=spec.limits.memory_bytes if spec.limits.watch_memory else 0,
            watch_memory=spec.limits.watch_memory,
            processes=spec.limits.processes if spec.limits.limit_user else 0,
            limit_user=spec.limits.limit_user,
        )
    request = SandboxExec(
        pid=pid,
        started=supervisor.started_at(pid).rpartition(":")[2],
        control_groups=groups,
        filter=seccomp.build_filter(debugging=True) if filtered else b"",
        uid=None if user is None else user.uid,
        gid=None if user is None else user.gid,
        groups=() if user is None else user.groups,
        command=command,
        env={name: value for name, value in env.items() if name not in job.lease.secrets},
        cwd=cwd,
    )
    return request, limits


def _first_inside(spec: SupervisorSpec, child: int) -> int:
    """The first process in the namespaces of the job: the only child of bubblewrap."""
    if not spec.wrapper:
        return child
    inside = [pid for pid, parent, _ in supervisor.processes() if parent == child]
    if len(inside) != 1:
        raise StrataError(Code.PRECONDITION, "the job is not running any more")
    return inside[0]


def _outcome(child_exit: supervised.ChildExit | supervised.SupervisorLost, unwanted: str, timeout_s: float) -> _Outcome:
    if isinstance(child_exit, supervised.SupervisorLost):
        return _Outcome(error="it was killed on its host")
    if not child_exit.started:
        return _Outcome(error=child_exit.error)
    if child_exit.timed_out:
        return _Outcome(error=f"it was stopped after {timeout_s:g} s")
    if child_exit.stopped or child_exit.exceeded:
        return _Outcome(error=unwanted or f"it was stopped: too much {child_exit.exceeded or 'of the host'}")
    return _Outcome(status=child_exit.status if child_exit.status >= 0 else 128 - child_exit.status)
