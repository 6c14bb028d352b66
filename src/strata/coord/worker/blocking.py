"""`Worker`, the blocking form of `AsyncWorker`: an event loop on a thread of its own, so that heartbeats go on while
the training blocks.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from strata.base.describe import refuse_describe
from strata.base.errors import Code, StrataError
from strata.coord.worker.checkpoints import Manifest
from strata.coord.worker.client import AsyncWorker
from strata.coord.worker.reasons import RECOVERABLE, reason_of
from strata.coord.worker.shard import Shard

Result = TypeVar("Result")
Args = ParamSpec("Args")


class LoopThread:
    """An event loop in a thread of its own, which runs while the caller blocks."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="strata-worker", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result; a caller that is interrupted takes its work with it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        finally:
            if not future.done():
                future.cancel()

    def close(self) -> None:
        self.run(self._loop.shutdown_default_executor())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _enter(phase: AbstractAsyncContextManager[None]) -> None:
    await phase.__aenter__()


async def _leave(phase: AbstractAsyncContextManager[None]) -> None:
    await phase.__aexit__(None, None, None)


class _Value(Generic[Result]):
    """A property of `AsyncWorker` by the same name."""

    def __init__(self, read: Callable[[AsyncWorker], Result]) -> None:
        self._read = read

    def __set_name__(self, owner: type[Worker], name: str) -> None:
        self.__doc__ = getattr(AsyncWorker, name).__doc__

    def __get__(self, worker: Worker | None, owner: type[Worker]) -> Result:
        if worker is None:
            raise AttributeError("a value of one worker, not of the class")
        return self._read(worker._open())


def _wait(
    method: Callable[Concatenate[AsyncWorker, Args], Coroutine[Any, Any, Result]],
) -> Callable[Concatenate[Worker, Args], Result]:
    """The method as one that blocks until its coroutine ends."""

    @wraps(method)
    def blocking(self: Worker, /, *args: Args.args, **kwargs: Args.kwargs) -> Result:
        return self._run(method(self._open(), *args, **kwargs))

    return blocking


def _call(method: Callable[Concatenate[AsyncWorker, Args], Result]) -> Callable[Concatenate[Worker, Args], Result]:
    """The method as it is, in the caller's thread."""

    @wraps(method)
    def direct(self: Worker, /, *args: Args.args, **kwargs: Args.kwargs) -> Result:
        return method(self._open(), *args, **kwargs)

    return direct


def _call_in_loop(
    method: Callable[Concatenate[AsyncWorker, Args], Result],
) -> Callable[Concatenate[Worker, Args], Result]:
    """The method inside the loop, where nothing else happens meanwhile."""

    @wraps(method)
    def inside(self: Worker, /, *args: Args.args, **kwargs: Args.kwargs) -> Result:
        worker = self._open()

        async def call() -> Result:
            return method(worker, *args, **kwargs)

        return self._run(call())

    return inside


class Worker:
    """One worker of a job, between `with`. Every name is the one of `AsyncWorker`."""

    def __init__(self, make: Callable[[], AsyncWorker]) -> None:
        refuse_describe("Worker")
        self._make = make
        self._thread: LoopThread | None = None
        self._worker: AsyncWorker | None = None

    def __enter__(self) -> Self:
        self._thread = LoopThread()
        begun = False
        try:
            self._worker = self._thread.run(self._begin())
            begun = True
        finally:
            if not begun:
                self._thread.close()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        worker, thread = self._open(), self._thread
        assert thread is not None
        self._worker = self._thread = None
        try:
            thread.run(worker.__aexit__(kind, error, trace))
        finally:
            thread.close()

    async def _begin(self) -> AsyncWorker:
        return await self._make().__aenter__()

    def _open(self) -> AsyncWorker:
        if self._worker is None:
            raise StrataError(Code.PRECONDITION, "the worker is not joined", hint="with strata.join() as worker")
        return self._worker

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        assert self._thread is not None
        return self._thread.run(work)

    checkpoint_root = _Value(lambda worker: worker.checkpoint_root)
    worker_id = _Value(lambda worker: worker.worker_id)
    job = _Value(lambda worker: worker.job)
    incarnation = _Value(lambda worker: worker.incarnation)
    generation = _Value(lambda worker: worker.generation)
    rank = _Value(lambda worker: worker.rank)
    world_size = _Value(lambda worker: worker.world_size)
    is_stale = _Value(lambda worker: worker.is_stale)
    run_id = _Value(lambda worker: worker.run_id)
    parameters = _Value(lambda worker: worker.parameters)
    should_stop = _Value(lambda worker: worker.should_stop)
    start = _Value(lambda worker: worker.start)

    members = _wait(AsyncWorker.members)
    lost_a_member = _wait(AsyncWorker.lost_a_member)
    dataset = _wait(AsyncWorker.dataset)
    next_shard = _wait(AsyncWorker.next_shard)
    step_shards = _wait(AsyncWorker.step_shards)
    flush = _wait(AsyncWorker.flush)
    barrier = _wait(AsyncWorker.barrier)
    checkpoint_due = _wait(AsyncWorker.checkpoint_due)
    report_checkpoint = _wait(AsyncWorker.report_checkpoint)
    checkpoint = _wait(AsyncWorker.checkpoint)
    sweep = _wait(AsyncWorker.sweep)
    recover = _wait(AsyncWorker.recover)
    follow = _wait(AsyncWorker.follow)

    commands = _call(AsyncWorker.commands)
    epochs = _call(AsyncWorker.epochs)
    reader = _call(AsyncWorker.reader)
    is_finished = _call(AsyncWorker.is_finished)
    step = _call(AsyncWorker.step)
    give_up_checkpoint = _call(AsyncWorker.give_up_checkpoint)

    # A prefetched lease may just come, and leases must not come or go while a checkpoint begins.
    restart = _call_in_loop(AsyncWorker.restart)
    begin_checkpoint = _call_in_loop(AsyncWorker.begin_checkpoint)

    def run(self, train: Callable[[Manifest | None], Result]) -> Result:
        start, failure = self.start, ""
        while True:
            try:
                start = self.recover(failure) if failure else start
                return train(start)
            except StrataError as error:
                if reason_of(error) not in RECOVERABLE:
                    raise
                failure = error.message
            except RuntimeError as error:
                if not self.lost_a_member(error):
                    raise
                failure = f"a collective failed: {error!r}"

    def shards(self, dataset_id: str, epoch: int, *, at_once: int = 1, prefetch: int = 0) -> Iterator[Shard]:
        # Not `AsyncWorker.shards`: abandoning an async generator from another thread would leave it to that loop.
        self.restart(dataset_id, epoch)
        while (shard := self.next_shard(dataset_id, epoch, at_once=at_once, prefetch=prefetch)) is not None:
            yield shard
            shard.done()

    @contextmanager
    def busy(self) -> Iterator[None]:
        phase = self._open().busy()
        self._run(_enter(phase))
        try:
            yield
        finally:
            self._run(_leave(phase))
