"""One process that the launcher keeps: started, listened to, ended, and started again when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from strata.base import log
from strata.base.clock import Clock
from strata.base.errors import Code, StrataError
from strata.base.retry import Backoff, no_jitter

EVENTS: Final = "{events}"
"""Stands in the arguments for the number of the pipe that the process tells its events through."""
BACKOFF: Final = Backoff(first_s=0.1, most_s=10.0)
STEADY_S: Final = 30.0
"""A process that ran so long before it died is started again at once."""
TRIES: Final = 2
_PR_SET_PDEATHSIG: Final = 1

_log = log.get(__name__)


@dataclass(frozen=True)
class Command:
    name: str
    arguments: Sequence[str]
    environment: Mapping[str, str]


class Child:
    """`heard` is called with every line the process tells."""

    def __init__(self, command: Command, clock: Clock, heard: Callable[[str], None]) -> None:
        self.command = command
        self._clock = clock
        self._heard = heard
        self._process: asyncio.subprocess.Process | None = None
        self._stop = asyncio.Event()
        self.proven = False
        """It has worked once. One that never did and dies again and again has a mistake that no restart mends."""
        self.starts = 0

    @property
    def pid(self) -> int | None:
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    async def keep(self) -> None:
        """Start it, and again whenever it ends, with a growing pause if it does not stay; until stopped."""
        failures = 1
        while not self._stop.is_set():
            started_s = self._clock.monotonic_s()
            code = await self.run_once()
            if self._stop.is_set():
                return
            lasted_s = self._clock.monotonic_s() - started_s
            failures = 1 if lasted_s >= STEADY_S else failures + 1
            _log.warning("a process died", process=self.command.name, status=code, after_s=round(lasted_s, 1))
            if not self.proven and self.starts >= TRIES:
                ready = "they were" if self.command.name.endswith("s") else "it was"
                message = f"the {self.command.name} died {TRIES} times before {ready} ready, with status {code}"
                raise StrataError(Code.UNAVAILABLE, message, hint="the log above says why")
            await self._clock.sleep(BACKOFF.delay_s(failures, no_jitter()))

    async def run_once(self) -> int:
        """From its start to its end. Nothing of it is left behind, not even what it started itself."""
        reading, writing = os.pipe()
        arguments = [each.replace(EVENTS, str(writing)) for each in self.command.arguments]
        try:
            self._process = await asyncio.create_subprocess_exec(
                *arguments,
                env=dict(self.command.environment),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(writing,),
                start_new_session=True,
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,
            )
        except OSError as error:
            os.close(reading)
            raise StrataError(Code.UNAVAILABLE, f"cannot start {self.command.name}: {error.strerror}") from error
        finally:
            os.close(writing)
        self.starts += 1
        listening = asyncio.create_task(self._listen(reading))
        try:
            return await self._process.wait()
        finally:
            listening.cancel()
            await asyncio.wait([listening])

    async def _listen(self, reading: int) -> None:
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(reading, "rb")
        )
        try:
            async for line in reader:
                self._heard(line.decode("utf-8", errors="replace").strip())
        finally:
            transport.close()

    def kill(self) -> None:
        """Now, with all it started; `keep` starts it again."""
        if self.pid is not None:
            for pid in [*descendants(self.pid), self.pid]:
                _signal(pid, signal.SIGKILL)

    def let_end(self) -> None:
        """Do not start it again when it ends."""
        self._stop.set()

    async def stop(self, patience_s: float, number: signal.Signals = signal.SIGTERM, *, after_s: float = 0.0) -> None:
        """Ask it to end, after a while in which it may do so by itself; insist when it takes too long."""
        self.let_end()
        process = self._process
        if process is None or process.returncode is not None:
            return
        below = descendants(process.pid)
        if not await _ended(process, after_s):
            _signal(process.pid, number)
            if not await _ended(process, patience_s):
                _log.warning("a process does not end and is killed", process=self.command.name)
                self.kill()
                await process.wait()
        for pid in below:
            _signal(pid, signal.SIGKILL)


async def _ended(process: asyncio.subprocess.Process, within_s: float) -> bool:
    try:
        async with asyncio.timeout(within_s):
            await process.wait()
    except TimeoutError:
        return False
    return True


def descendants(pid: int) -> list[int]:
    """Of a process, the youngest generation first. torchrun puts each rank into a session of its own, so that a signal
    to its group reaches none of them."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # The name of the program is in parentheses and may hold anything; the parent is the second word after it.
            after = (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        children.setdefault(int(after[1]), []).append(int(folder.name))
    found, waiting = [], [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found[::-1]


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _die_with_parent() -> None:
    """A launcher that is killed takes its processes along: nobody would restart or stop them any more."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
