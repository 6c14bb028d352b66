"""Supervises one process of a server: restart with backoff (0.1 to 10 s, none after 30 s of running), two failed starts
at most, events on its pipe, the last lines of its log as the error, and stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from strata.base import log
from strata.base.clock import Clock
from strata.base.errors import Code, StrataError
from strata.base.parent import end_with_parent
from strata.base.retry import Backoff, no_jitter

EVENTS: Final = "{events}"
"""Placeholder in the arguments for the file descriptor to which the process writes its events."""
BACKOFF: Final = Backoff(first_s=0.1, most_s=10.0)
STEADY_S: Final = 30.0
"""A process that ran so long before it died is restarted without backoff."""
MAX_FAILED_STARTS: Final = 2
"""How often a process that never became ready is started."""
LAST_LINES: Final = 5
LINE_CHARACTERS: Final = 300
LOG_TAIL_BYTES: Final = 32_768
_ERROR: Final = re.compile(r"\b[A-Za-z.]*(Error|Exception): ")
_log = log.get(__name__)


@dataclass(frozen=True)
class ProcessCommand:
    name: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    log: Path | None = None
    """The file for its output since its last start; unless set it shares that of the launcher."""
    reads_orders: bool = False
    """Whether it reads lines from its standard input (`write`)."""


class SupervisedProcess:
    """`on_event` is called with every line that the process writes to its event pipe, `on_start` before each start.
    A start waits until `wait_to_start` returns."""

    def __init__(
        self,
        command: ProcessCommand,
        clock: Clock,
        on_event: Callable[[str], None],
        on_start: Callable[[], None] = lambda: None,
        wait_to_start: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.command = command
        self._clock = clock
        self._on_event = on_event
        self._on_start = on_start
        self._wait_to_start = wait_to_start
        self._process: asyncio.subprocess.Process | None = None
        self._stop = asyncio.Event()
        self.was_ready = False
        """Whether it has been ready once. One that never was and dies again has a fault that no restart repairs."""
        self.starts = 0

    @property
    def name(self) -> str:
        return self.command.name

    def ranks_attached(self) -> None:
        self.was_ready = True

    @property
    def pid(self) -> int | None:
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    async def supervise(self) -> None:
        """Start the process, and restart it with backoff whenever it ends, until stopped."""
        failures = 1
        while not self._stop.is_set():
            if self._wait_to_start is not None:
                await self._wait_to_start()
                if self._stop.is_set():
                    return
            started_s = self._clock.monotonic_s()
            code = await self.run_once()
            if self._stop.is_set():
                return
            lasted_s = self._clock.monotonic_s() - started_s
            failures = 1 if lasted_s >= STEADY_S else failures + 1
            _log.warning("process_died", process=self.command.name, status=code, after_s=round(lasted_s, 1))
            if not self.was_ready and self.starts >= MAX_FAILED_STARTS:
                ready = "they were" if self.command.name.endswith("s") else "it was"
                message = (
                    f"the {self.command.name} died {MAX_FAILED_STARTS} times before {ready} ready, with status {code}"
                )
                raise StrataError(Code.UNAVAILABLE, f"{message}{self._last_words()}", hint=self._log_hint())
            await self._clock.sleep(BACKOFF.delay_s(failures, no_jitter()))

    def last_error(self) -> str:
        """The last line of its log that names an error; empty if it has no log of its own, or no such line."""
        return next((line for line in reversed(self._log_tail()) if _ERROR.search(line)), "")

    def _last_words(self) -> str:
        lines = self._log_tail()
        error = self.last_error()
        shown = lines[-LAST_LINES:]
        return "".join(f"\n    {line}" for line in ([error, "…"] if error and error not in shown else []) + shown)

    def _log_hint(self) -> str:
        return "the log above says why" if self.command.log is None else f"the whole log is {self.command.log}"

    def _log_tail(self) -> list[str]:
        """Returns what another program wrote, fit for a terminal."""
        if self.command.log is None or not self.command.log.is_file():
            return []
        with self.command.log.open("rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - LOG_TAIL_BYTES, 0))
            text = file.read().decode("utf-8", "replace")
        lines = ("".join(char for char in line if char.isprintable())[:LINE_CHARACTERS] for line in text.splitlines())
        return [line for line in lines if line.strip()]

    async def run_once(self) -> int:
        """Run the process from its start to its end; returns its exit status."""
        self._on_start()
        reading, writing = os.pipe()
        output = None if self.command.log is None else _open_log(self.command.log)
        arguments = [argument.replace(EVENTS, str(writing)) for argument in self.command.arguments]
        try:
            self._process = await asyncio.create_subprocess_exec(
                *arguments,
                env=dict(self.command.environment),
                stdin=asyncio.subprocess.PIPE if self.command.reads_orders else asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(writing,),
                start_new_session=True,
                preexec_fn=partial(end_with_parent, parent=os.getpid()),
            )
        except OSError as error:
            os.close(reading)
            raise StrataError(Code.UNAVAILABLE, f"cannot start {self.command.name}: {error.strerror}") from error
        finally:
            os.close(writing)
            if output is not None:
                os.close(output)
        self.starts += 1
        reader = asyncio.create_task(self._read_events(reading))
        try:
            status = await self._process.wait()
            # Its children do not outlive it: the next one needs their memory, their devices and their sockets.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            return status
        finally:
            reader.cancel()
            await asyncio.wait([reader])

    async def _read_events(self, reading: int) -> None:
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(reading, "rb")
        )
        try:
            async for line in reader:
                self._on_event(line.decode("utf-8", errors="replace").strip())
        finally:
            transport.close()

    def write(self, line: bytes) -> None:
        """Give a process that reads orders one; one that has ended needs none."""
        process = self._process
        if self.pid is not None and process is not None and process.stdin is not None:
            process.stdin.write(line + b"\n")

    def kill(self) -> None:
        """Kill it now, with all its descendants; `supervise` restarts it."""
        if self.pid is not None:
            for pid in [*descendants(self.pid), self.pid]:
                _signal(pid, signal.SIGKILL)

    def disable_restart(self) -> None:
        """Do not restart the process when it ends."""
        self._stop.set()

    async def stop(self, grace_s: float, number: signal.Signals = signal.SIGTERM, *, after_s: float = 0.0) -> None:
        """Signal it to end, after `after_s` in which it may end by itself; kill it after the grace period."""
        self.disable_restart()
        process = self._process
        if process is None or process.returncode is not None:
            return
        below = descendants(process.pid)
        if not await _ended(process, after_s):
            _signal(process.pid, number)
            if not await _ended(process, grace_s):
                _log.warning("process_killed_after_grace_period", process=self.command.name)
                self.kill()
                await process.wait()
        for pid in below:
            _signal(pid, signal.SIGKILL)


async def _ended(process: asyncio.subprocess.Process, timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            await process.wait()
    except TimeoutError:
        return False
    return True


def descendants(pid: int) -> list[int]:
    """The descendants of a process, the youngest first."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # The name of the program is in parentheses and may hold anything; the parent is the second field after it.
            after = (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        children.setdefault(int(after[1]), []).append(int(folder.name))
    collected, pending = [], [pid]
    while pending:
        below = children.get(pending.pop(), [])
        collected += below
        pending += below
    return collected[::-1]


def _open_log(file: Path) -> int:
    """A new file; that of the start before gets the suffix `.1`."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if file.exists():
        file.replace(file.with_name(f"{file.name}.1"))
    return os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
