"""The agent's side of a supervised child: the spec that a supervisor reads, starting one, reading the child's status,
asking it to stop, and removing orphans.

The agent sees the child only through the files that its supervisor writes (`supervisor` lists them), so it makes no
difference whether this agent started the supervisor or an earlier one did. The next version of the agent
reads them too.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal

import msgspec

from strata.base.atomic import read_json, write_json
from strata.base.file_lock import is_locked
from strata.fleet.agent import cgroup, job_limits, supervisor

LOG: Final = "log"
REMOVAL_S: Final = 60.0
_NEW_GROUP: Final = 0x200
"""CREATE_NEW_PROCESS_GROUP: the subprocess module has the name only on Windows."""
_SUPERVISOR_ENV: Final = {"SYSTEMROOT": r"C:\Windows"} if sys.platform == "win32" else {}


class LimitsSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The limits of a job; 0 and empty: none. `job_limits` applies them."""

    memory_bytes: int = 0
    memory_set_by: str = ""
    """The setting, and whose it is, that the limit of memory comes from, in words."""
    processes: int = 0
    cores: float = 0.0
    cpu_weight: float = 0.0
    """Its share, in cores, of a host on which all jobs want more. Only control groups can give it."""
    disk_bytes: int = 0
    disk_folders: Sequence[str] = ()
    """What counts: the folder of the attempt and, of a server, that of its data."""
    groups: Sequence[str] = ()
    """Control groups of this job alone, which its supervisor creates and removes."""
    watch_memory: bool = False
    """No control group limits the memory: the supervisor measures it."""
    watch_processes: bool = False
    watch_cpu: bool = False
    limit_user: bool = False
    """No control group limits the processes: their number is limited for the job's user."""
    network_rules: str = ""
    """Rules for nft, while the job runs."""
    network_table: str = ""


class SupervisorSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the supervisor runs and within which limits: `supervisor.json`."""

    command: Sequence[str]
    cwd: str
    env: Mapping[str, str]
    max_log_bytes: int
    timeout_s: float
    grace_s: float
    uid: int | None = None
    """None: the agent's own user."""
    gid: int | None = None
    groups: Sequence[int] = ()
    wrapper: Sequence[str] = ()
    """The program that makes the sandbox, with its options; the command is executed inside. Empty: no sandbox."""
    filter: bytes = b""
    """The filter of system calls that the wrapper loads (`seccomp`). Empty: there is none."""
    switch_inside: bool = False
    """The wrapper starts as root, and the command inside becomes the job's user."""
    limits: LimitsSpec = LimitsSpec()
    removal: Sequence[str] = ()
    """The command that ends and removes the container in which the job runs. Empty: there is none."""


class ChildExit(msgspec.Struct, frozen=True, kw_only=True):
    """How the child ended: `exit.json`."""

    started: bool
    error: str = ""
    """Why the child could not be started."""
    setup: bool = False
    """The child could not be started because its program, folder or environment cannot be used on this host."""
    status: int = 0
    """The exit code, or minus the signal, as subprocess reports it."""
    stopped: bool = False
    """The agent requested the stop."""
    timed_out: bool = False
    oom_kills: int = 0
    left_out: int = 0
    """Bytes of output that the log does not hold."""
    ran_s: float = 0.0
    max_rss_bytes: int = 0
    exceeded: Literal["", "memory", "disk", "processes", "cpu"] = ""
    """The supervisor killed the child because it took more of this than its limit."""
    exceeded_bytes: int = 0
    """What it took; -1: its folders are nested too deeply to be measured."""
    exceeded_count: float = 0.0
    """The processes and threads, or the cores, that it took."""


class ProcessIds(msgspec.Struct, frozen=True, kw_only=True):
    """The supervisor and its child: `pid.json`."""

    supervisor: int
    supervisor_started: str = ""
    child: int = 0
    child_started: str = ""


class SupervisorLost(msgspec.Struct, frozen=True):
    """The supervisor ended without a report: it was killed, or the machine was restarted."""


class ChildRunning(msgspec.Struct, frozen=True):
    pid: int


class ChildNotStarted(msgspec.Struct, frozen=True):
    pass


ChildStatus = ChildNotStarted | ChildRunning | ChildExit | SupervisorLost


def write_spec(folder: Path, spec: SupervisorSpec) -> None:
    write_json(folder / "supervisor.json", spec)


def read_spec(folder: Path) -> SupervisorSpec | None:
    return read_json(folder / "supervisor.json", SupervisorSpec)


def start_supervisor(folder: Path) -> subprocess.Popen[bytes]:
    """Start a supervisor for the spec in the folder. If the folder has one already, the new one exits at once.

    Pass the process to `read_status`, which reaps it when it has ended.
    """
    flags = _NEW_GROUP if sys.platform == "win32" else 0
    with (folder / "supervisor.err").open("ab") as stderr:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", supervisor.__file__, str(folder)],
            # None of the agent's own variables, not even for the supervisor.
            env=_SUPERVISOR_ENV,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=stderr,
            stderr=stderr,
            start_new_session=sys.platform != "win32",
            creationflags=flags,
        )


def read_status(folder: Path, process: subprocess.Popen[bytes] | None = None) -> ChildStatus:
    process_ended = process is not None and process.poll() is not None
    # In this order: a supervisor takes its lock before the first file and writes the last file before it releases it.
    pids = read_pids(folder)
    alive = is_locked(folder / "supervisor.lock")
    child_exit = read_json(folder / "exit.json", ChildExit)
    if child_exit is not None:
        return child_exit
    if pids is None:
        # The process that ended may have yielded to a supervisor of an earlier agent that has not written pid.json yet.
        return SupervisorLost() if process_ended and not alive else ChildNotStarted()
    return ChildRunning(pids.child) if alive else SupervisorLost()


def is_supervised(folder: Path, process: subprocess.Popen[bytes] | None) -> bool:
    """Says whether a supervisor lives or has just been started, so that a child may live too."""
    starting = process is not None and process.poll() is None
    return starting or is_locked(folder / "supervisor.lock")


def read_pids(folder: Path) -> ProcessIds | None:
    return read_json(folder / "pid.json", ProcessIds)


def request_stop(folder: Path, grace_s: float) -> None:
    write_json(folder / "stop.json", _StopRequest(grace_s=grace_s))


def kill_orphans(folder: Path) -> None:
    """Kills, after the supervisor was lost, all that is in the job's control groups, and the child's process group.

    The process group only if the pid still belongs to that child.
    """
    spec = read_spec(folder)
    if spec is not None:
        groups = [Path(group) for group in spec.limits.groups]
        cgroup.kill_groups(groups)
        cgroup.remove_groups(groups)
        if spec.limits.network_table:
            with suppress(OSError):
                job_limits.run_nft(f"delete table inet {spec.limits.network_table}")
    pids = read_pids(folder)
    if pids is None or not pids.child or sys.platform == "win32":
        return
    if supervisor.started_at(pids.child) not in ("", pids.child_started):
        return
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pids.child, signal.SIGKILL)


def remove_container(folder: Path) -> None:
    """Removes the job's container after the supervisor was lost: it belongs to no process group of ours and would run
    on."""
    spec = read_spec(folder)
    if spec is None or not spec.removal:
        return
    with suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(
            list(spec.removal),
            env=dict(spec.env),
            cwd=os.sep,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=REMOVAL_S,
            check=False,
        )


class _StopRequest(msgspec.Struct, frozen=True):
    grace_s: float
