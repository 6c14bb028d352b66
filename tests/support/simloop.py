"""An asyncio event loop with virtual time and seeded scheduling: ordinary `async` code runs in it, repeatably.

There is no selector, no thread and no real clock. When nothing is ready, time jumps to the next timer. Every callback
belongs to a *process* (carried in its context). Within a process callbacks run first in, first out, as in asyncio;
which process runs next is a seeded choice: each seed is another interleaving, and the same seed is the same one again.

A crashed process never runs again, not even its `finally` blocks: that is what SIGKILL is. A paused one waits.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Final, TypeVar

T = TypeVar("T")
Context = contextvars.Context
AnyCoroutine = Coroutine[Any, Any, T] | Generator[Any, None, T]


class Process:
    """One incarnation of a simulated process: a restart makes a new object."""

    def __init__(self, name: str, incarnation: int) -> None:
        self.name = name
        self.incarnation = incarnation
        self.crashed = False
        self.paused = False

    def __repr__(self) -> str:
        return f"{self.name}#{self.incarnation}"


OUTSIDE = Process("world", 0)
"""What runs in no simulated process: the network, the faults, the scenario itself."""

PROCESS: contextvars.ContextVar[Process] = contextvars.ContextVar("process", default=OUTSIDE)


_LAST_WORDS: Final = 100
"""How often a task may refuse to be cancelled at the end."""


class SimulationStuckError(AssertionError):
    """Nothing is ready and no timer is set, yet the main task has not finished."""


class SimLoop(asyncio.AbstractEventLoop):
    """Only what tasks, futures, locks, queues and timeouts need: no sockets, signals and real threads, on purpose."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._now_s = 0.0
        self._ready: dict[Process, deque[asyncio.Handle]] = {}
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._order = itertools.count()
        self._tasks: list[asyncio.Task[Any]] = []
        self._errors: list[dict[str, Any]] = []
        self._running = False
        self._ending = False
        self._closed = False
        self.steps = 0

    def time(self) -> float:
        return self._now_s

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._enqueue(handle)
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now_s + max(delay, 0.0), callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._order), timer))
        return timer

    def run_in_executor(  # type: ignore[override]
        self, executor: object, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """There are no threads: it is a task like any other, done in one go."""
        del executor

        async def called() -> T:
            return func(*args)

        return self.create_task(called())

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: AnyCoroutine[T], **kwargs: Any) -> asyncio.Task[T]:
        task: asyncio.Task[T] = asyncio.Task(coro, loop=self, **kwargs)
        # Kept until the end: a collected coroutine would run its `finally` blocks, which no crash does.
        self._tasks.append(task)
        return task

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return self._closed

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self._errors.append(context)

    @property
    def is_ending(self) -> bool:
        """Whether the world is being taken down, and what runs now is only the end of tasks."""
        return self._ending

    @property
    def errors(self) -> list[dict[str, Any]]:
        """Exceptions that no task retrieved: each is a finding."""
        return self._errors

    def run_until_complete(self, future: AnyCoroutine[T]) -> T:  # type: ignore[override]
        asyncio._set_running_loop(self)
        self._running = True
        try:
            main = self.create_task(future)
            while not main.done():
                self._run_one()
            return main.result()
        finally:
            self._running = False
            asyncio._set_running_loop(None)

    def close(self) -> None:
        """End every task that is left, those of crashed processes too, so that nothing runs when it is collected."""
        asyncio._set_running_loop(self)
        self._ending = True
        try:
            for _ in range(_LAST_WORDS):
                self._tasks = [task for task in self._tasks if not task.done()]
                for task in self._tasks:
                    task.cancel()
                while self._ready:
                    self._run_one()
        finally:
            asyncio._set_running_loop(None)
            self._closed = True

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Cancelled timers stay in the heap and are skipped when due."""

    def _enqueue(self, handle: asyncio.Handle) -> None:
        process = handle._context.get(PROCESS, OUTSIDE)  # type: ignore[attr-defined]
        self._ready.setdefault(process, deque()).append(handle)

    def _run_one(self) -> None:
        while not (runnable := self._runnable()):
            self._advance()
        process = runnable[self._rng.randrange(len(runnable))] if len(runnable) > 1 else runnable[0]
        waiting = self._ready[process]
        handle = waiting.popleft()
        if not waiting:
            del self._ready[process]
        if not handle.cancelled():
            self.steps += 1
            handle._run()

    def _runnable(self) -> list[Process]:
        if self._ending:
            return list(self._ready)
        return [process for process in self._ready if not (process.crashed or process.paused)]

    def _advance(self) -> None:
        due_s: float | None = None
        while self._timers and (due_s is None or self._timers[0][0] <= due_s):
            when_s, _, timer = heapq.heappop(self._timers)
            if not timer.cancelled():
                due_s = self._now_s = max(self._now_s, when_s)
                self._enqueue(timer)
        if due_s is None:
            raise SimulationStuckError("nothing is left to happen, but the scenario has not finished")
