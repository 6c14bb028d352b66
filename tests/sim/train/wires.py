"""Connections as ZMQ has them: in order, nothing twice, and what is under way is lost when the connection is."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable

from tests.support.simloop import Process
from tests.support.world import Faults, World

NOTICED_S = 0.05
"""About how long a side takes to notice that the other is gone."""
Deliver = Callable[[bytes], None]


class Direction:
    def __init__(self, world: TrainWorld, to: Process, deliver: Deliver) -> None:
        self._world = world
        self._to = to
        self._deliver = deliver
        self._last_s = 0.0
        self.broken = False

    def send(self, data: bytes) -> None:
        loop, faults, rng = self._world.loop, self._world.faults, self._world.rng
        mean_s = faults.slow_delay_s if self._world.hurts(faults.slow_message) else faults.delay_s
        # Never before what was sent before it.
        self._last_s = max(self._last_s, loop.time() + rng.expovariate(1 / mean_s))
        loop.call_at(self._last_s, self._arrive, data, context=contextvars.Context())

    def _arrive(self, data: bytes) -> None:
        if not self.broken and not self._to.crashed:
            self._deliver(data)


class Connection:
    """Between two processes. `lost` is set for the first of them when it has noticed the end."""

    def __init__(self, world: TrainWorld, ends: tuple[Process, Process], delivers: tuple[Deliver, Deliver]) -> None:
        self.ends = ends
        self.to_first = Direction(world, ends[0], delivers[0])
        self.to_second = Direction(world, ends[1], delivers[1])
        self.lost = asyncio.Event()
        self._world = world
        self.after: Callable[[], None] | None = None
        """Called when the end was noticed."""

    @property
    def broken(self) -> bool:
        return self.to_first.broken

    def cut(self) -> None:
        if self.broken:
            return
        self.to_first.broken = self.to_second.broken = True
        later_s = self._world.rng.expovariate(1 / NOTICED_S)
        self._world.loop.call_later(later_s, self._noticed, context=contextvars.Context())

    def _noticed(self) -> None:
        self.lost.set()
        if self.after is not None:
            self.after()


class TrainWorld(World):
    """A world whose processes hold connections: they break with either end, or by themselves."""

    def __init__(self, seed: int, faults: Faults, *, keep_trace: bool = False) -> None:
        super().__init__(seed, faults, keep_trace=keep_trace)
        self._connections: list[Connection] = []
        self.violations: list[str] = []

    def violated(self, what: str) -> None:
        self.trace.note(f"violated: {what}")
        self.violations.append(f"at {self.loop.time():.3f} s: {what}")

    def life(self, name: str) -> Process:
        return self._lives[name]

    def connect(self, ends: tuple[Process, Process], delivers: tuple[Deliver, Deliver]) -> Connection:
        connection = Connection(self, ends, delivers)
        self._connections = [each for each in self._connections if not each.broken]
        self._connections.append(connection)
        if ends[0].crashed or ends[1].crashed:
            connection.cut()
        return connection

    def crash(self, name: str) -> None:
        process = self._lives[name]
        super().crash(name)
        for connection in self._connections:
            if process in connection.ends:
                connection.cut()

    def hurts(self, probability: float) -> bool:
        """Chance, until everything heals."""
        return self._chance(probability)

    def kill(self, name: str) -> None:
        """Crash it, and start it again after a while."""
        self._crash_and_restart(name)

    async def cut_connections(self, gap_s: float) -> None:
        """One after the other, for ever."""
        while True:
            await asyncio.sleep(self.rng.expovariate(1 / gap_s))
            alive = [each for each in self._connections if not each.broken]
            if alive:
                self.trace.note("cut a connection")
                self.rng.choice(alive).cut()
