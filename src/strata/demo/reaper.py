"""Runs one command in a session of its own; when the command or the parent ends, or a signal comes, kills everything
below it. Removes the demo's folder, unless the command ended by itself: then the parent reads its log.

    python -m strata.demo.reaper PARENT FOLDER COMMAND…

Supervisors of jobs outlive their agent on purpose, each in a session of its own. This process adopts them, so that the
end of a demo, however it comes, leaves no process and no file.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

from strata.base.parent import adopt_orphans, end_with_parent, name_process

_STOPS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_KILL_AGAIN_S: Final = 0.02


def main(arguments: list[str]) -> int:
    parent, folder, *command = arguments
    # Blocked, they are not lost before this process waits for them; what it starts gets them as usual.
    awaited = {*_STOPS, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    end_with_parent(signal.SIGTERM, parent=int(parent))
    adopt_orphans()
    name_process("strata-demo")
    try:
        status = _run(command, awaited)
    finally:
        kill_descendants()
    if status is None:
        shutil.rmtree(Path(folder), ignore_errors=True)
        return 0
    return status


def _run(command: list[str], awaited: set[signal.Signals]) -> int | None:
    """The status of the command; None if a signal came first."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        # This process has one thread.
        preexec_fn=partial(_tie, os.getpid(), awaited),  # noqa: PLW1509
        start_new_session=True,
    )
    while True:
        if signal.sigwait(awaited) != signal.SIGCHLD:
            return None
        # Orphans that it adopted may end too; Popen looks for its own child alone.
        status = process.poll()
        if status is not None:
            return status if status >= 0 else 128 - status


def _tie(parent: int, awaited: set[signal.Signals]) -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, awaited)
    end_with_parent(signal.SIGKILL, parent=parent)


def kill_descendants() -> None:
    """Kill all processes below this one, and return when none is left. For a process that adopts orphans."""
    while True:
        for pid in descendants(os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(_KILL_AGAIN_S)


def descendants(pid: int) -> list[int]:
    """The processes below this one, as /proc has them at this moment."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                # The name of the program may have blanks and parentheses: state and parent come after the last one.
                fields = (entry / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    below, waiting = [], [pid]
    while waiting:
        following = children.get(waiting.pop(), [])
        below += following
        waiting += following
    return below


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
