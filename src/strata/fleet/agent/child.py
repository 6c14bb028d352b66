"""The child of an attempt, as the agent sees it: through the files of its waiter, whoever started that one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from strata.fleet.agent import waiter
from strata.fleet.agent.disk import read_json, write_json
from strata.fleet.agent.lock import is_locked

LOG: Final = "log"
_NEW_GROUP: Final = 0x200
"""CREATE_NEW_PROCESS_GROUP, which only Windows has the name of."""
_WAITER_ENV: Final = {"SYSTEMROOT": r"C:\Windows"} if sys.platform == "win32" else {}


class Run(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All the waiter needs."""

    command: Sequence[str]
    cwd: str
    env: Mapping[str, str]
    max_log_bytes: int
    timeout_s: float
    grace_s: float
    uid: int | None = None
    """None: as the agent's own user."""
    gid: int | None = None
    groups: Sequence[int] = ()


class Exit(msgspec.Struct, frozen=True, kw_only=True):
    started: bool
    error: str = ""
    """Why it could not be started."""
    setup: bool = False
    """It could not be started because its program, folder or environment cannot be used on this host."""
    status: int = 0
    """As subprocess has it: the exit code, or minus the signal."""
    stopped: bool = False
    """The agent wanted it to end."""
    timed_out: bool = False
    oom_kills: int = 0
    left_out: int = 0
    ran_s: float = 0.0
    max_rss_bytes: int = 0


class Pids(msgspec.Struct, frozen=True, kw_only=True):
    waiter: int
    waiter_started: str = ""
    child: int = 0
    child_started: str = ""


class Lost(msgspec.Struct, frozen=True):
    """The waiter is gone and has said nothing: killed, or the machine was restarted."""


class Running(msgspec.Struct, frozen=True):
    pid: int


class NotStarted(msgspec.Struct, frozen=True):
    pass


Seen = NotStarted | Running | Exit | Lost


def write(folder: Path, run: Run) -> None:
    write_json(folder / "waiter.json", run)


def start(folder: Path) -> subprocess.Popen[bytes]:
    """Start a waiter for what was written. From here on only its files count; if there is one already, this goes away.

    The process is for `look`, so that it does not stay a zombie.
    """
    flags = _NEW_GROUP if sys.platform == "win32" else 0
    with (folder / "waiter.err").open("ab") as complaints:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", waiter.__file__, str(folder)],
            # None of the agent's own variables, not even to the waiter.
            env=_WAITER_ENV,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=complaints,
            stderr=complaints,
            start_new_session=sys.platform != "win32",
            creationflags=flags,
        )


def look(folder: Path, process: subprocess.Popen[bytes] | None = None) -> Seen:
    gone = process is not None and process.poll() is not None
    # In this order: a waiter takes its lock before the first file and writes the last file before it lets go.
    known = pids(folder)
    alive = is_locked(folder / "waiter.lock")
    ended = read_json(folder / "exit.json", Exit)
    if ended is not None:
        return ended
    if known is None:
        # The one that went away may have made room for one that an earlier agent started, and that is not far yet.
        return Lost() if gone and not alive else NotStarted()
    return Running(known.child) if alive else Lost()


def is_watched(folder: Path, process: subprocess.Popen[bytes] | None) -> bool:
    """Whether a waiter lives, or has just been started; with it, a child may."""
    starting = process is not None and process.poll() is None
    return starting or is_locked(folder / "waiter.lock")


def pids(folder: Path) -> Pids | None:
    return read_json(folder / "pid.json", Pids)


def stop(folder: Path, grace_s: float) -> None:
    write_json(folder / "stop.json", _Stop(grace_s=grace_s))


def end_leftovers(folder: Path) -> None:
    """After the waiter was lost: what is left of the child's group, if the number is still that child's."""
    known = pids(folder)
    if known is None or not known.child or sys.platform == "win32":
        return
    if waiter.started_at(known.child) not in ("", known.child_started):
        return
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(known.child, signal.SIGKILL)


class _Stop(msgspec.Struct, frozen=True):
    grace_s: float
