"""The self-test of a host before it claims jobs: disk space, clock skew, GPUs, child processes, folders, reachability;
its checks and their wording.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from strata.base.errors import Code, StrataError
from strata.base.private import private_folder
from strata.fleet.agent import supervised
from strata.fleet.agent.attempt_folder import AttemptPaths, JobUser, make_passable
from strata.fleet.agent.environment_variables import for_user
from strata.fleet.agent.privsep import run_with_input
from strata.fleet.agent.privsep_worker import CheckFolderExists
from strata.fleet.agent.probe import ProbeResult
from strata.fleet.agent.sandbox import UNCONFINED, HostSandbox
from strata.fleet.agent.settings import AgentSettings
from strata.fleet.client.hub_client import MAX_SKEW_S

GIB: Final = 1024**3
CHILD_TIMEOUT_S: Final = 20.0
_MAX_LINE: Final = 200
_SLEEPER: Final = "import time; print('alive', flush=True); time.sleep(600)"


class SelfTestResult(msgspec.Struct, frozen=True, kw_only=True):
    check: str
    ok: bool
    reason: str = ""


def run_self_test(
    settings: AgentSettings,
    allowed: Mapping[str, str],
    *,
    ahead_s: float | None = None,
    sandbox: HostSandbox = UNCONFINED,
) -> list[SelfTestResult]:
    """Every check with its result. `allowed` are the variables that jobs inherit; `ahead_s` is this clock's lead over
    the hub's, if the hub was reached."""
    state, work = settings.state_folder, settings.work_folder
    return [
        _check_writable("state folder", state),
        _check_writable("work folder", work),
        check_disk_space(work, settings.min_free_gib),
        _check_child_process(settings, allowed, sandbox),
        SelfTestResult(check="sandbox", ok=True, reason=sandbox.describe()),
        *([] if ahead_s is None else [check_clock_skew(ahead_s)]),
    ]


def check_disk_space(work: Path, min_free_gib: float) -> SelfTestResult:
    try:
        free_gib = shutil.disk_usage(work).free / GIB
    except OSError as error:
        return SelfTestResult(check="disk space", ok=False, reason=f"{work}: {error.strerror}")
    if free_gib < min_free_gib:
        return SelfTestResult(
            check="disk space",
            ok=False,
            reason=f"{work} has {free_gib:.1f} GiB free, and min_free_gib is {min_free_gib:g}",
        )
    return SelfTestResult(check="disk space", ok=True, reason=f"{free_gib:.1f} GiB free")


def check_clock_skew(ahead_s: float) -> SelfTestResult:
    side = "ahead of" if ahead_s > 0 else "behind"
    reason = f"this clock is {abs(ahead_s):.0f} s {side} the hub's"
    return SelfTestResult(check="clock", ok=abs(ahead_s) <= MAX_SKEW_S, reason=reason)


def check_gpus(probed: ProbeResult) -> list[SelfTestResult]:
    """Nothing for a host without cards."""
    gpus = probed.capability.gpus
    if not gpus:
        return []
    computes = f"torch {probed.capability.torch} computes on all {len(gpus)}"
    return [SelfTestResult(check="GPUs", ok=not probed.unproven, reason=probed.unproven or computes)]


def _check_writable(check: str, folder: Path) -> SelfTestResult:
    probe = folder / f".probe-{secrets.token_hex(4)}"
    try:
        probe.write_bytes(b"written")
        with probe.open("rb") as file:
            os.fsync(file.fileno())
        probe.unlink()
    except (OSError, StrataError) as error:
        return SelfTestResult(check=check, ok=False, reason=f"{folder} cannot be written: {error}")
    return SelfTestResult(check=check, ok=True, reason=str(folder))


def _check_child_process(settings: AgentSettings, allowed: Mapping[str, str], sandbox: HostSandbox) -> SelfTestResult:
    """Start and stop a real child as a job would be, with the Python of jobs that name none."""
    state, work, job_user = settings.state_folder, settings.work_folder, sandbox.job_user
    interpreter = settings.interpreter or sys.executable
    name = f".selftest-{secrets.token_hex(4)}"
    check = "child process"
    process: subprocess.Popen[bytes] | None = None
    paths = AttemptPaths(work / name)
    folder = state / name
    try:
        private_folder(folder)
        for each in (paths.folder, paths.tmp, paths.home):
            each.mkdir(mode=0o700)
            if job_user is not None:
                os.lchown(each, job_user.uid, job_user.gid)
        make_passable(paths.tmp)
        _check_reachable(work, paths.folder, job_user)
        spec = supervised.SupervisorSpec(
            command=[interpreter, "-I", "-S", "-c", _SLEEPER],
            cwd=str(paths.folder),
            env=for_user(allowed, "" if job_user is None else job_user.home),
            max_log_bytes=4096,
            timeout_s=CHILD_TIMEOUT_S,
            grace_s=0,
            uid=None if job_user is None else job_user.uid,
            gid=None if job_user is None else job_user.gid,
            groups=() if job_user is None else job_user.groups,
        )
        supervised.write_spec(folder, sandbox.confine(spec, paths))
        process = supervised.start_supervisor(folder)
        status = _stop_when_running(folder, process)
        output = _output(folder)
    except (OSError, StrataError) as error:
        return SelfTestResult(check=check, ok=False, reason=str(error))
    finally:
        if process is not None:
            _wait(process)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(paths.folder, ignore_errors=True)
    if isinstance(status, supervised.ChildExit) and status.stopped:
        return SelfTestResult(check=check, ok=True, reason="starts and ends")
    reason = f"{interpreter} does not run as jobs do: {_describe(status)}"
    if job_user is not None and isinstance(status, supervised.ChildExit):
        reason += f"; can the jobs' user (uid {job_user.uid}) reach it? Set interpreter to a Python that it can"
    return SelfTestResult(check=check, ok=False, reason="; ".join(filter(None, (reason, output))))


def _check_reachable(work: Path, folder: Path, job_user: JobUser | None) -> None:
    """PRECONDITION unless the jobs' user, who prepares attempts outside of a sandbox, can enter the work folder."""
    try:
        run_with_input(CheckFolderExists(path=str(folder)), job_user)
    except StrataError:
        raise StrataError(
            Code.PRECONDITION,
            f"the jobs' user cannot enter {work}: set work to a folder below which it may go, or run_as",
        ) from None


def _stop_when_running(folder: Path, process: subprocess.Popen[bytes]) -> supervised.ChildStatus:
    until_s = time.monotonic() + CHILD_TIMEOUT_S
    stop_requested = False
    status: supervised.ChildStatus = supervised.ChildNotStarted()
    while time.monotonic() < until_s:
        status = supervised.read_status(folder, process)
        if isinstance(status, supervised.ChildExit | supervised.SupervisorLost):
            break
        log = folder / supervised.LOG
        if not stop_requested and log.exists() and b"alive" in log.read_bytes():
            supervised.request_stop(folder, 0.0)
            stop_requested = True
        time.sleep(0.05)
    return status


def _output(folder: Path) -> str:
    """The last line that the child wrote: why a Python ended that found its program and not its library."""
    log = folder / supervised.LOG
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return lines[-1][:_MAX_LINE] if lines and lines[-1] != "alive" else ""


def _describe(status: supervised.ChildStatus) -> str:
    if isinstance(status, supervised.ChildExit) and status.error:
        return status.error
    if isinstance(status, supervised.ChildExit):
        return f"a child ended by itself with status {status.status}"
    return "a child process did not start, or did not end on request"


def _wait(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(CHILD_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
