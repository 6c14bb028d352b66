"""Has a request of `job_input` done in a process of the job's user, and moves bytes to it or from it, unread."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, Final

import msgspec

from strata.base.errors import Code, StrataError
from strata.fleet.agent import job_input
from strata.fleet.agent.git import GIT_S
from strata.fleet.agent.job_input import Checkout, Refusal, Request
from strata.fleet.agent.workdir import Owner

WAIT_S: Final = GIT_S + 60.0
"""How long one process is waited for in all, besides what its bytes take at `_SLOWEST`. Waiting for the hub is not
counted: other jobs of the same user can stop this process, and nobody the hub."""
_SLOWEST: Final = 4 << 20
"""Bytes a second."""
_PIECE: Final = 1 << 20
_MAX_REASON: Final = 64 * 1024
_ENV: Final = {"SYSTEMROOT": r"C:\Windows"} if sys.platform == "win32" else {"LC_ALL": "C.UTF-8"}


def feed(request: Request, owner: Owner | None, pieces: Iterable[bytes] = ()) -> None:
    """Do the request with these bytes as its archive. `owner` None: as the agent's own user.

    StrataError if the source is to blame, OSError if the host is.
    """
    with _process(request, owner, stdout=subprocess.DEVNULL) as process:
        # A process that has refused reads no more; the reason is in what it wrote.
        for piece in pieces:
            if not process.write(piece):
                break
        process.finish()


def receive(request: Checkout, owner: Owner | None, max_bytes: int) -> Generator[bytes]:
    """What the request writes, at most so much; an error if it did not end well."""
    with _process(request, owner, stdout=subprocess.PIPE) as process:
        process.end_input()
        received = 0
        while piece := process.read():
            received += len(piece)
            if received > max_bytes:
                raise StrataError(Code.PRECONDITION, f"the source has more than {max_bytes} bytes")
            yield piece
        process.finish()


@contextmanager
def _process(request: Request, owner: Owner | None, *, stdout: int) -> Iterator[_Process]:
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
            made = _Process(process, complaints)
            made.write(msgspec.json.encode(request) + b"\n")
            yield made
        finally:
            _kill(process)
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(BrokenPipeError):
                        pipe.close()


class _Process:
    """A process that is waited for no longer than it is allowed to take in all; then it is killed."""

    def __init__(self, process: subprocess.Popen[bytes], complaints: IO[bytes]) -> None:
        self._process = process
        self._complaints = complaints
        self._allowed_s = self._left_s = WAIT_S

    def write(self, piece: bytes) -> bool:
        """Whether it still reads."""
        assert self._process.stdin is not None
        try:
            with self._waiting():
                self._process.stdin.write(piece)
                self._process.stdin.flush()
        except BrokenPipeError:
            return False
        self._allow(len(piece))
        return True

    def end_input(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def read(self) -> bytes:
        """Empty at the end."""
        assert self._process.stdout is not None
        with self._waiting():
            piece = self._process.stdout.read(_PIECE)
        self._allow(len(piece))
        return piece

    def finish(self) -> None:
        self.end_input()
        status = self._status()
        if status == 0:
            return
        if self._left_s <= 0:
            raise ChildProcessError(f"the process that prepares a source took more than {self._allowed_s:.0f} s")
        self._complaints.seek(0)
        reason = self._complaints.read(_MAX_REASON)
        try:
            refusal = msgspec.json.decode(reason, type=Refusal)
        except msgspec.DecodeError:
            said = reason.decode(errors="replace").strip()[-2000:]
            raise ChildProcessError(f"the process that prepares a source ended with status {status}: {said}") from None
        if refusal.errno:
            raise OSError(refusal.errno, refusal.message)
        raise StrataError(refusal.code, refusal.message, hint=refusal.hint)

    def _status(self) -> int:
        """How it ended; what it left running ends with it."""
        with self._waiting():
            if sys.platform == "win32":
                return self._process.wait()
            if self._process.returncode is None:
                # Without taking the status away, so that the number of the group stays its own.
                os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        _kill(self._process)
        return self._process.wait()

    def _allow(self, size: int) -> None:
        """More time for what was moved, unless there is none left."""
        if self._left_s > 0:
            self._left_s += size / _SLOWEST
            self._allowed_s += size / _SLOWEST

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        began_s = time.monotonic()
        deadline = threading.Timer(max(0.0, self._left_s), _kill, (self._process,))
        deadline.start()
        try:
            yield
        finally:
            deadline.cancel()
            # Before its number can be another's.
            deadline.join()
            self._left_s -= time.monotonic() - began_s


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.returncode is not None:
        return
    with suppress(ProcessLookupError, PermissionError):
        if sys.platform == "win32":
            process.kill()
        else:
            os.killpg(process.pid, signal.SIGKILL)
