"""Starts one request of `privsep_worker` in a process of the job's user, with its limits of time, bytes and memory. The
agent moves bytes and never parses them.

The agent moves bytes to that process or from it and never parses them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final

import msgspec

from strata.base.errors import Code, StrataError
from strata.fleet.agent import cgroup, job_limits, privsep_worker
from strata.fleet.agent.attempt_folder import JobUser
from strata.fleet.agent.git import GIT_S
from strata.fleet.agent.privsep_worker import BuildEnvironment, OutputRequest, WorkerError, WorkerRequest
from strata.fleet.agent.supervised import LimitsSpec
from strata.fleet.agent.uv import BUILD_S
from strata.fleet.bubblewrap import load_filter

WAIT_S: Final = GIT_S + 60.0
"""Time limit for one process, plus the time its bytes take at `_MIN_BYTES_PER_S`. Waiting for the hub does not count:
other jobs of the same user can stop this process, but not the hub."""
_MIN_BYTES_PER_S: Final = 4 << 20
_PIECE: Final = 1 << 20
_WANTED_POLL_S: Final = 0.2
_MAX_REASON: Final = 64 * 1024
_ENV: Final = {"SYSTEMROOT": r"C:\Windows"} if sys.platform == "win32" else {"LC_ALL": "C.UTF-8"}


@dataclass(frozen=True, slots=True)
class WorkerSandbox:
    """Namespaces and limits for a worker that runs code of others. All its processes end with it."""

    wrapper: Sequence[str]
    """Bubblewrap, with its options; empty: no namespaces."""
    filter: bytes
    """The filter of system calls that it loads; empty: none."""
    switch_inside: bool
    """Bubblewrap starts as root, and the worker becomes the job's user inside."""
    limits: LimitsSpec = field(default_factory=LimitsSpec)


def run_with_input(request: WorkerRequest, job_user: JobUser | None, pieces: Iterable[bytes] = ()) -> None:
    """Run the request with these bytes as its archive. `job_user` None: as the agent's own user.

    StrataError if the source is at fault, OSError if the host is.
    """
    with _start_worker(request, job_user, stdout=subprocess.DEVNULL) as process:
        # A worker that has failed reads no more; `finish` raises its error.
        for piece in pieces:
            if not process.write(piece):
                break
        process.finish()


def stream_output(
    request: OutputRequest,
    job_user: JobUser | None,
    max_bytes: int,
    wanted: Callable[[], bool] = lambda: True,
    sandbox: WorkerSandbox | None = None,
) -> Generator[bytes]:
    """Run the request and yield what it writes, at most `max_bytes`; raises its error if it fails.

    STALE when the output is no longer `wanted`: the process is killed.
    """
    with _start_worker(request, job_user, stdout=subprocess.PIPE, sandbox=sandbox) as process:
        process.end_input()
        received = 0
        with _killed_unless(process, wanted):
            while piece := process.read():
                received += len(piece)
                if received > max_bytes:
                    raise StrataError(Code.PRECONDITION, f"the source has more than {max_bytes} bytes")
                yield piece
        if not wanted():
            raise StrataError(Code.STALE, "the attempt was stopped while it was prepared")
        process.finish()


@contextmanager
def _killed_unless(worker: _WorkerProcess, wanted: Callable[[], bool]) -> Iterator[None]:
    """Kill the worker as soon as its output is no longer wanted."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(_WANTED_POLL_S):
            if not wanted():
                worker.kill()
                return

    watcher = threading.Thread(target=watch, name="wanted", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        # Before the pid can be reused.
        watcher.join()


@contextmanager
def _start_worker(
    request: WorkerRequest, job_user: JobUser | None, *, stdout: int, sandbox: WorkerSandbox | None = None
) -> Iterator[_WorkerProcess]:
    command = [sys.executable, "-I", "-m", privsep_worker.__name__]
    # None: subprocess keeps what this process has.
    user: JobUser | None = None
    if job_user is not None and (sandbox is None or not sandbox.wrapper or sandbox.switch_inside):
        command += [str(job_user.uid), str(job_user.gid), ",".join(map(str, job_user.groups))]
    else:
        user = job_user
    # Another user than the agent's could not join the groups.
    limits = sandbox.limits if sandbox is not None and user is None else LimitsSpec()
    with (
        load_filter(b"" if sandbox is None else sandbox.filter) as (options, passed),
        _control_groups(limits),
        tempfile.TemporaryFile() as stderr,
    ):
        if sandbox is not None and sandbox.wrapper:
            command = [*sandbox.wrapper, *options, "--", *command]
        if limits.groups:
            command = [sys.executable, "-I", "-S", cgroup.__file__, *limits.groups, "--", *command]
        process = subprocess.Popen(
            command,
            env=_ENV,
            cwd=os.sep,
            pass_fds=passed,
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=stderr,
            start_new_session=sys.platform != "win32",
            user=None if user is None else user.uid,
            group=None if user is None else user.gid,
            extra_groups=None if user is None else user.groups,
        )
        try:
            limit_s = WAIT_S + (BUILD_S if isinstance(request, BuildEnvironment) else 0.0)
            worker = _WorkerProcess(process, stderr, limit_s)
            worker.write(msgspec.json.encode(request) + b"\n")
            yield worker
        finally:
            _kill(process)
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(BrokenPipeError):
                        pipe.close()


@contextmanager
def _control_groups(limits: LimitsSpec) -> Iterator[None]:
    """The control groups of the worker, with its limits and rules. PRECONDITION if it failed for lack of memory."""
    groups = [Path(group) for group in limits.groups]
    try:
        cgroup.create_groups(groups, memory_bytes=limits.memory_bytes, processes=limits.processes)
        if limits.network_rules:
            job_limits.run_nft(limits.network_rules)
        yield
    except (StrataError, OSError) as error:
        if cgroup.oom_kills(groups):
            had = f"{limits.memory_bytes / (1 << 30):.3g} GiB"
            raise StrataError(
                Code.PRECONDITION, f"it took more memory than this host gives to a job ({had}): {error}"
            ) from error
        raise
    finally:
        cgroup.kill_groups(groups)
        cgroup.remove_groups(groups)
        if limits.network_table:
            with suppress(OSError):
                job_limits.run_nft(f"delete table inet {limits.network_table}")


class _WorkerProcess:
    """A worker with a total time limit for all waits; then it is killed."""

    def __init__(self, process: subprocess.Popen[bytes], stderr: IO[bytes], limit_s: float) -> None:
        self._process = process
        self._stderr = stderr
        self._allowed_s = self._left_s = limit_s

    def kill(self) -> None:
        _kill(self._process)

    def write(self, piece: bytes) -> bool:
        """Says whether the worker still reads."""
        assert self._process.stdin is not None
        try:
            with self._deadline():
                self._process.stdin.write(piece)
                self._process.stdin.flush()
        except BrokenPipeError:
            return False
        self._extend(len(piece))
        return True

    def end_input(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def read(self) -> bytes:
        """The next piece; empty at the end."""
        assert self._process.stdout is not None
        with self._deadline():
            piece = self._process.stdout.read(_PIECE)
        self._extend(len(piece))
        return piece

    def finish(self) -> None:
        self.end_input()
        status = self._wait_for_exit()
        if status == 0:
            return
        if self._left_s <= 0:
            raise ChildProcessError(f"the process that prepares a source took more than {self._allowed_s:.0f} s")
        self._stderr.seek(0)
        reason = self._stderr.read(_MAX_REASON)
        try:
            failure = msgspec.json.decode(reason, type=WorkerError)
        except msgspec.DecodeError:
            message = reason.decode(errors="replace").strip()[-2000:]
            raise ChildProcessError(
                f"the process that prepares a source ended with status {status}: {message}"
            ) from None
        if failure.errno:
            raise OSError(failure.errno, failure.message)
        raise StrataError(failure.code, failure.message, hint=failure.hint)

    def _wait_for_exit(self) -> int:
        """The exit status. Processes that the worker left running are killed."""
        with self._deadline():
            if sys.platform == "win32":
                return self._process.wait()
            if self._process.returncode is None:
                # WNOWAIT: the worker is not reaped yet, so its process group id cannot be reused.
                os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        _kill(self._process)
        return self._process.wait()

    def _extend(self, size: int) -> None:
        """Extend the time limit by what the bytes may take, unless it is over already."""
        if self._left_s > 0:
            self._left_s += size / _MIN_BYTES_PER_S
            self._allowed_s += size / _MIN_BYTES_PER_S

    @contextmanager
    def _deadline(self) -> Iterator[None]:
        began_s = time.monotonic()
        timer = threading.Timer(max(0.0, self._left_s), _kill, (self._process,))
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            # Before the pid can be reused.
            timer.join()
            self._left_s -= time.monotonic() - began_s


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.returncode is not None:
        return
    with suppress(ProcessLookupError, PermissionError):
        if sys.platform == "win32":
            process.kill()
        else:
            os.killpg(process.pid, signal.SIGKILL)
