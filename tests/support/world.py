"""The simulation world: processes, disks, clocks and a network that go wrong in every way, repeatably from one seed.

Real cores and real `async` shells run in it on virtual time. A scenario registers processes by a `boot` function, lets
faults happen, does its work and heals. All that happens goes into a trace; the same seed gives the same trace hash.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import random
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, TypeVar

import msgspec

from strata.base.errors import Code, StrataError
from tests.support.simhost import SimClock, SimDisk
from tests.support.simloop import PROCESS, Process, SimLoop

T = TypeVar("T")
Boot = Callable[[], Coroutine[Any, Any, None]]
Handler = Callable[[str, bytes], Awaitable[bytes]]
Fault = Callable[[list[str]], Awaitable[None]]


class Faults(msgspec.Struct, frozen=True):
    """How bad the world is: probabilities per message, and mean virtual seconds between faults of a kind."""

    delay_s: float = 0.002
    slow_message: float = 0.02
    slow_delay_s: float = 0.5
    lost: float = 0.02
    duplicated: float = 0.02
    crash_gap_s: float = 2.0
    down_s: float = 0.4
    pause_gap_s: float = 3.0
    paused_s: float = 1.5
    partition_gap_s: float = 5.0
    partition_s: float = 1.0
    clock_gap_s: float = 5.0
    clock_offset_s: float = 30.0
    sync_s: float = 0.01
    power_cut: float = 0.01
    """Per sync: the process dies in the middle of it."""

    def drawn(self, rng: random.Random) -> Faults:
        """A world of its own for each seed: some kinds of fault absent, others several times as strong.

        Faults hide each other (a system that is always down cannot err); leaving some out finds more.
        """
        changes: dict[str, float] = {}
        for name in ("slow_message", "lost", "duplicated", "power_cut"):
            changes[name] = getattr(self, name) * rng.choice([0.0, 0.5, 1.0, 4.0])
        for name in ("crash_gap_s", "pause_gap_s", "partition_gap_s", "clock_gap_s"):
            changes[name] = getattr(self, name) * rng.choice([0.5, 1.0, 1.0, 1e6])
        for name in ("delay_s", "sync_s", "down_s", "paused_s", "partition_s"):
            changes[name] = getattr(self, name) * rng.choice([0.3, 1.0, 3.0])
        return msgspec.structs.replace(self, **changes)


CALM: Final = Faults(slow_message=0.0, lost=0.0, duplicated=0.0, clock_offset_s=0.0, power_cut=0.0)


class Trace:
    """What happened, in order, as a running hash and, if requested, as text."""

    def __init__(self, loop: SimLoop, *, keep: bool) -> None:
        self._loop = loop
        self._hash = hashlib.sha256()
        self._keep = keep
        self._ended = False
        self.lines: list[str] = []

    def end(self) -> None:
        """What is still noted while the world is taken down counts no more."""
        self._ended = True

    def note(self, what: str) -> None:
        if self._ended:
            return
        line = f"{self._loop.time():.6f} {what}"
        self._hash.update(line.encode())
        if self._keep:
            self.lines.append(line)

    def digest(self) -> str:
        return self._hash.hexdigest()


class _Reply(msgspec.Struct, frozen=True):
    payload: bytes = b""
    code: Code | None = None
    message: str = ""
    detail: dict[str, Any] = {}


class World:
    def __init__(self, seed: int, faults: Faults, *, keep_trace: bool = False) -> None:
        self.rng = random.Random(seed)
        self.faults = faults
        self.loop = SimLoop(random.Random(self.rng.random()))  # type: ignore[abstract]  # sockets are left out on purpose
        self.trace = Trace(self.loop, keep=keep_trace)
        self._boots: dict[str, Boot] = {}
        self._lives: dict[str, Process] = {}
        self._handlers: dict[Process, Handler] = {}
        self._disks: dict[str, SimDisk] = {}
        self._clocks: dict[str, SimClock] = {}
        self._blocked: set[tuple[str, str]] = set()
        self._healed = False

    def run(self, scenario: Coroutine[Any, Any, T]) -> T:
        """Run to the end of the scenario. An exception that no task looked at fails the run."""
        try:
            result = self.loop.run_until_complete(scenario)
            unseen = list(self.loop.errors)
        finally:
            self.trace.end()
            self.loop.close()
        for context in unseen:
            raise AssertionError(f"unseen failure: {context.get('message')}") from context.get("exception")
        return result

    # Processes

    def add(self, name: str, boot: Boot) -> None:
        """Register and start a process. `boot` is its main function; each restart calls it again."""
        self._boots[name] = boot
        self._clocks[name] = SimClock(self.loop, self.rng.uniform(-1, 1) * self.faults.clock_offset_s)
        self._disks[name] = SimDisk(self.rng, self.faults.sync_s, lambda: self._maybe_cut_power(name))
        self.start(name)

    def start(self, name: str) -> None:
        before = self._lives.get(name)
        process = Process(name, before.incarnation + 1 if before else 1)
        self._lives[name] = process
        self.trace.note(f"start {process}")
        self._spawn(process, self._boots[name]())

    def crash(self, name: str) -> None:
        process = self._lives[name]
        self.trace.note(f"crash {process}")
        process.crashed = True
        self._handlers.pop(process, None)
        self._disks[name].crash()

    def pause(self, name: str) -> None:
        """As SIGSTOP or a long garbage collection: it notices nothing, and goes on where it was."""
        self.trace.note(f"pause {self._lives[name]}")
        self._lives[name].paused = True

    def resume(self, name: str) -> None:
        self.trace.note(f"resume {self._lives[name]}")
        self._lives[name].paused = False

    def disk(self, name: str) -> SimDisk:
        return self._disks[name]

    def world_clock(self) -> SimClock:
        """The right time, for what runs in no process."""
        return SimClock(self.loop, 0.0)

    def clock(self, name: str) -> SimClock:
        return self._clocks[name]

    def holder(self) -> str:
        """The name of this incarnation of the calling process."""
        return repr(PROCESS.get())

    # Network

    def listen(self, handler: Handler) -> None:
        """Answer calls to the calling process."""
        self._handlers[PROCESS.get()] = handler

    async def call(self, to: str, payload: bytes, timeout_s: float) -> bytes:
        """Ask and wait. UNAVAILABLE if no reply came in time: then it may or may not have been done, once or twice."""
        caller = PROCESS.get()
        replied: asyncio.Future[_Reply] = self.loop.create_future()

        def arrive(reply: _Reply) -> None:
            if not caller.crashed and not replied.done():
                replied.set_result(reply)

        self._send(caller.name, to, lambda: self._deliver(caller.name, to, payload, arrive))
        try:
            async with asyncio.timeout(timeout_s):
                reply = await replied
        except TimeoutError:
            raise StrataError(Code.UNAVAILABLE, f"{to} did not answer") from None
        if reply.code is not None:
            raise StrataError(reply.code, reply.message, **reply.detail)
        return reply.payload

    def _deliver(self, sender: str, to: str, payload: bytes, arrive: Callable[[_Reply], None]) -> None:
        process = self._lives[to]
        handler = self._handlers.get(process)
        self.trace.note(f"deliver {sender}>{process} {hashlib.sha256(payload).hexdigest()[:8]} {handler is not None}")
        if handler is not None and not process.crashed:
            self._spawn(process, self._serve_call(handler, sender, payload, arrive))

    async def _serve_call(
        self, handler: Handler, sender: str, payload: bytes, arrive: Callable[[_Reply], None]
    ) -> None:
        try:
            reply = _Reply(await handler(sender, payload))
        except StrataError as error:
            reply = _Reply(code=error.code, message=error.message, detail=dict(error.detail))
        self._send(PROCESS.get().name, sender, lambda: arrive(reply))

    def _send(self, sender: str, to: str, deliver: Callable[[], None]) -> None:
        if (sender, to) in self._blocked or self._chance(self.faults.lost):
            self.trace.note(f"lose {sender}>{to}")
            return
        for _ in range(2 if self._chance(self.faults.duplicated) else 1):
            mean_s = self.faults.slow_delay_s if self._chance(self.faults.slow_message) else self.faults.delay_s
            # In no process's context: a message in flight outlives its sender.
            self.loop.call_later(self.rng.expovariate(1 / mean_s), deliver, context=contextvars.Context())

    def _chance(self, probability: float) -> bool:
        return not self._healed and self.rng.random() < probability

    def _spawn(self, process: Process, main: Coroutine[Any, Any, None]) -> None:
        context = contextvars.Context()
        context.run(PROCESS.set, process)
        self.loop.create_task(main, context=context).add_done_callback(_raise_failure, context=contextvars.Context())

    # Faults

    async def inject_faults(self, names: list[str], seconds: float) -> None:
        """Let crashes, pauses, partitions and clock jumps happen to these processes for a while; then heal."""
        faults = [
            (self.faults.crash_gap_s, self._crash_for_a_while),
            (self.faults.pause_gap_s, self._pause_for_a_while),
            (self.faults.partition_gap_s, self._partition_for_a_while),
            (self.faults.clock_gap_s, self._jump_clock),
        ]
        tasks = [self.loop.create_task(self._repeat(gap_s, fault, names)) for gap_s, fault in faults]
        await asyncio.sleep(seconds)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        self.heal()

    def heal(self) -> None:
        self.trace.note("heal")
        self._healed = True
        self._blocked.clear()
        for name, process in list(self._lives.items()):
            process.paused = False
            if process.crashed:
                self.start(name)

    async def _repeat(self, gap_s: float, fault: Callable[[list[str]], Awaitable[None]], names: list[str]) -> None:
        while True:
            await asyncio.sleep(self.rng.expovariate(1 / gap_s))
            await fault(names)

    async def _crash_for_a_while(self, names: list[str]) -> None:
        self._crash_and_restart(self.rng.choice(names))

    def _maybe_cut_power(self, name: str) -> None:
        if self._chance(self.faults.power_cut):
            self._crash_and_restart(name)

    def _crash_and_restart(self, name: str) -> None:
        if self._lives[name].crashed:
            return
        self.crash(name)
        down_s = self.rng.expovariate(1 / self.faults.down_s)
        self.loop.call_later(down_s, self._restart, name, context=contextvars.Context())

    def _restart(self, name: str) -> None:
        if self._lives[name].crashed:
            self.start(name)

    async def _pause_for_a_while(self, names: list[str]) -> None:
        name = self.rng.choice(names)
        self.pause(name)
        await asyncio.sleep(self.rng.expovariate(1 / self.faults.paused_s))
        self.resume(name)

    async def _partition_for_a_while(self, names: list[str]) -> None:
        """Some processes cannot reach the others; sometimes in one direction only."""
        everyone = list(self._lives)
        aside = self.rng.sample(names, self.rng.randint(1, max(1, len(names) // 2)))
        one_way = self.rng.random() < 0.3
        self.trace.note(f"partition {aside} one_way={one_way}")
        for inside in aside:
            for outside in everyone:
                if outside not in aside:
                    self._blocked.add((inside, outside))
                    if not one_way:
                        self._blocked.add((outside, inside))
        await asyncio.sleep(self.rng.expovariate(1 / self.faults.partition_s))
        self._blocked.clear()

    async def _jump_clock(self, names: list[str]) -> None:
        name = self.rng.choice(names)
        self._clocks[name].offset_s = self.rng.uniform(-1, 1) * self.faults.clock_offset_s
        self.trace.note(f"clock {name} {self._clocks[name].offset_s:.3f}")


def _raise_failure(task: asyncio.Task[None]) -> None:
    """A process whose main function raised is a finding: the loop keeps it, and the run fails."""
    if not task.cancelled() and (failure := task.exception()) is not None:
        raise failure
