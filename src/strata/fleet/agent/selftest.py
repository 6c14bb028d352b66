"""What a host must be able to do before it asks for jobs. A host that cannot would fail them one after the other."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import msgspec

from strata.base.errors import StrataError
from strata.fleet.agent import child
from strata.fleet.agent.disk import private_folder
from strata.fleet.agent.workdir import Owner

GIB: Final = 1024**3
STARTING_S: Final = 20.0
_SLEEPER: Final = "import time; print('alive', flush=True); time.sleep(600)"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    what: str
    ok: bool
    reason: str = ""


def self_test(
    state: Path,
    work: Path,
    *,
    min_free_gib: float,
    max_skew_s: float,
    ahead_s: float | None = None,
    owner: Owner | None = None,
) -> list[Finding]:
    """Every finding, good or bad; `ahead_s` is what the hub's clock told, if it was reached."""
    return [
        _writable("state folder", state),
        _writable("work folder", work),
        room(work, min_free_gib),
        _runs_and_ends(state, work, owner),
        *([] if ahead_s is None else [skew(ahead_s, max_skew_s)]),
    ]


def room(work: Path, min_free_gib: float) -> Finding:
    try:
        free_gib = shutil.disk_usage(work).free / GIB
    except OSError as error:
        return Finding(what="disk space", ok=False, reason=f"{work}: {error.strerror}")
    if free_gib < min_free_gib:
        return Finding(
            what="disk space",
            ok=False,
            reason=f"{work} has {free_gib:.1f} GiB free, and min_free_gib is {min_free_gib:g}",
        )
    return Finding(what="disk space", ok=True, reason=f"{free_gib:.1f} GiB free")


def skew(ahead_s: float, max_skew_s: float) -> Finding:
    side = "ahead of" if ahead_s > 0 else "behind"
    told = f"this clock is {abs(ahead_s):.0f} s {side} the hub's"
    return Finding(what="clock", ok=abs(ahead_s) <= max_skew_s, reason=told)


def _writable(what: str, folder: Path) -> Finding:
    probe = folder / f".probe-{secrets.token_hex(4)}"
    try:
        probe.write_bytes(b"written")
        with probe.open("rb") as file:
            os.fsync(file.fileno())
        probe.unlink()
    except (OSError, StrataError) as error:
        return Finding(what=what, ok=False, reason=f"{folder} cannot be written: {error}")
    return Finding(what=what, ok=True, reason=str(folder))


def _runs_and_ends(state: Path, work: Path, owner: Owner | None) -> Finding:
    """A real child, started and ended as a job would be."""
    name = f".selftest-{secrets.token_hex(4)}"
    what = "child process"
    process: subprocess.Popen[bytes] | None = None
    place = work / name
    folder = state / name
    try:
        private_folder(folder)
        place.mkdir(mode=0o700)
        if owner is not None:
            os.lchown(place, owner.uid, owner.gid)
        run = child.Run(
            command=[sys.executable, "-I", "-S", "-c", _SLEEPER],
            cwd=str(place),
            env={},
            max_log_bytes=4096,
            timeout_s=STARTING_S,
            grace_s=0,
            uid=None if owner is None else owner.uid,
            gid=None if owner is None else owner.gid,
            groups=() if owner is None else owner.groups,
        )
        child.write(folder, run)
        process = child.start(folder)
        ended = _ended_when_alive(folder, process)
    except (OSError, StrataError) as error:
        return Finding(what=what, ok=False, reason=str(error))
    finally:
        if process is not None:
            _wait(process)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(place, ignore_errors=True)
    if isinstance(ended, child.Exit) and ended.stopped:
        return Finding(what=what, ok=True, reason="starts and ends")
    return Finding(what=what, ok=False, reason=_reason(ended))


def _ended_when_alive(folder: Path, process: subprocess.Popen[bytes]) -> child.Seen:
    until_s = time.monotonic() + STARTING_S
    asked = False
    seen: child.Seen = child.NotStarted()
    while time.monotonic() < until_s:
        seen = child.look(folder, process)
        if isinstance(seen, child.Exit | child.Lost):
            break
        log = folder / child.LOG
        if not asked and log.exists() and b"alive" in log.read_bytes():
            child.stop(folder, 0.0)
            asked = True
        time.sleep(0.05)
    return seen


def _reason(ended: child.Seen) -> str:
    if isinstance(ended, child.Exit) and ended.error:
        return ended.error
    if isinstance(ended, child.Exit):
        return f"a child ended by itself with status {ended.status}"
    return "a child did not start, or did not end when it was told to"


def _wait(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(STARTING_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
