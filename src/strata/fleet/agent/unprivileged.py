"""Has a request of `job_input` done in a process of the job's user, and moves bytes to it or from it, unread."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, Final

import msgspec

from strata.base.errors import Code, StrataError
from strata.fleet.agent import job_input
from strata.fleet.agent.git import GIT_S
from strata.fleet.agent.job_input import Checkout, Refusal, Request
from strata.fleet.agent.workdir import Owner

_PIECE: Final = 1 << 20
_MAX_REASON: Final = 64 * 1024
_SPARE_S: Final = 60.0
_ENV: Final = {"SYSTEMROOT": r"C:\Windows"} if sys.platform == "win32" else {"LC_ALL": "C.UTF-8"}


def feed(request: Request, owner: Owner | None, pieces: Iterable[bytes] = ()) -> None:
    """Do the request with these bytes as its archive. `owner` None: as the agent's own user.

    StrataError if the source is to blame, OSError if the host is.
    """
    with _process(request, owner, stdout=subprocess.DEVNULL) as (process, finish):
        assert process.stdin is not None
        # A process that has refused reads no more; the reason is in what it wrote.
        for piece in pieces:
            try:
                process.stdin.write(piece)
            except BrokenPipeError:
                break
        with suppress(BrokenPipeError):
            process.stdin.close()
        finish()


def receive(request: Checkout, owner: Owner | None, max_bytes: int) -> Generator[bytes]:
    """What the request writes, at most so much; an error if it did not end well."""
    with _process(request, owner, stdout=subprocess.PIPE) as (process, finish):
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):
            process.stdin.close()
        deadline = threading.Timer(GIT_S + _SPARE_S, _kill, (process,))
        deadline.start()
        try:
            received = 0
            while piece := process.stdout.read(_PIECE):
                received += len(piece)
                if received > max_bytes:
                    raise StrataError(Code.PRECONDITION, f"the source has more than {max_bytes} bytes")
                yield piece
        finally:
            deadline.cancel()
        finish()


@contextmanager
def _process(
    request: Request, owner: Owner | None, *, stdout: int
) -> Iterator[tuple[subprocess.Popen[bytes], Callable[[], None]]]:
    command = [sys.executable, "-I", "-m", job_input.__name__]
    if owner is not None:
        command += [str(owner.uid), str(owner.gid), ",".join(map(str, owner.groups))]
    with tempfile.TemporaryFile() as complaints:
        process = subprocess.Popen(
            command,
            env=_ENV,
            cwd=os.sep,
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=complaints,
            start_new_session=sys.platform != "win32",
        )
        try:
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.write(msgspec.json.encode(request) + b"\n")
                process.stdin.flush()
            yield process, lambda: _check(process, complaints)
        finally:
            _kill(process)
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(BrokenPipeError):
                        pipe.close()


def _check(process: subprocess.Popen[bytes], complaints: IO[bytes]) -> None:
    status = _wait(process)
    if status == 0:
        return
    complaints.seek(0)
    reason = complaints.read(_MAX_REASON)
    try:
        refusal = msgspec.json.decode(reason, type=Refusal)
    except msgspec.DecodeError:
        said = reason.decode(errors="replace").strip()[-2000:]
        raise ChildProcessError(f"the process that prepares a source ended with status {status}: {said}") from None
    if refusal.errno:
        raise OSError(refusal.errno, refusal.message)
    raise StrataError(refusal.code, refusal.message, hint=refusal.hint)


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Its status; what it left running ends with it."""
    if sys.platform != "win32" and process.returncode is None:
        # Without taking the status away, so that the number of the group stays its own.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        _kill(process)
    return process.wait()


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.returncode is not None:
        return
    with suppress(ProcessLookupError, PermissionError):
        if sys.platform == "win32":
            process.kill()
        else:
            os.killpg(process.pid, signal.SIGKILL)
