"""`Worker`: `AsyncWorker` on an event loop of its own thread, so that heartbeats go on while the training blocks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from strata.base.describe import refuse_describe
from strata.base.errors import Code, StrataError
from strata.coord.worker.checkpoints import Manifest, Reported
from strata.coord.worker.client import AsyncWorker
from strata.coord.worker.commands import Command
from strata.coord.worker.garbage_collector import Swept
from strata.coord.worker.leases import Capture
from strata.coord.worker.readers import DatasetReader, MapStyle
from strata.coord.worker.reasons import RECOVERABLE, reason_of
from strata.coord.worker.session import MemberAddress
from strata.coord.worker.shard import DatasetOptions, Shard

Result = TypeVar("Result")


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


class Worker:
    """One worker of a job, between `with`. Every call is the one of the same name of `AsyncWorker`."""

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

    @property
    def checkpoint_root(self) -> str:
        return self._open().checkpoint_root

    @property
    def worker_id(self) -> str:
        return self._open().worker_id

    @property
    def job(self) -> str:
        return self._open().job

    @property
    def incarnation(self) -> str:
        return self._open().incarnation

    @property
    def generation(self) -> int:
        return self._open().generation

    @property
    def rank(self) -> int:
        return self._open().rank

    @property
    def world_size(self) -> int:
        return self._open().world_size

    @property
    def is_stale(self) -> bool:
        return self._open().is_stale

    def members(self) -> tuple[MemberAddress, ...]:
        return self._run(self._open().members())

    @property
    def run_id(self) -> int:
        return self._open().run_id

    @property
    def parameters(self) -> dict[str, str]:
        return self._open().parameters

    @property
    def should_stop(self) -> bool:
        return self._open().should_stop

    @property
    def start(self) -> Manifest | None:
        return self._open().start

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

    def lost_a_member(self, error: RuntimeError) -> bool:
        return self._run(self._open().lost_a_member(error))

    def commands(self) -> list[Command]:
        return self._open().commands()

    def dataset(
        self,
        dataset_id: str,
        files: Sequence[str | Path] = (),
        *,
        samples: int | Sequence[int] | None = None,
        shard_size: int = 0,
        options: DatasetOptions | None = None,
        source: MapStyle | None = None,
    ) -> int:
        work = self._open().dataset(
            dataset_id, files, samples=samples, shard_size=shard_size, options=options, source=source
        )
        return self._run(work)

    def epochs(self, count: int) -> Iterator[int]:
        return self._open().epochs(count)

    def shards(self, dataset_id: str, epoch: int, *, at_once: int = 1, prefetch: int = 0) -> Iterator[Shard]:
        # Not `AsyncWorker.shards`: abandoning an async generator from another thread would leave it to that loop.
        self.restart(dataset_id, epoch)
        while (shard := self.next_shard(dataset_id, epoch, at_once=at_once, prefetch=prefetch)) is not None:
            yield shard
            shard.done()

    def reader(self, dataset_id: str) -> DatasetReader:
        return self._open().reader(dataset_id)

    def restart(self, dataset_id: str, epoch: int) -> None:
        async def restart() -> None:
            self._open().restart(dataset_id, epoch)

        # Inside the loop: a prefetched lease may just come.
        self._run(restart())

    def is_finished(self, dataset_id: str, epoch: int) -> bool:
        return self._open().is_finished(dataset_id, epoch)

    def next_shard(
        self, dataset_id: str, epoch: int, *, at_once: int = 1, wait: bool = True, prefetch: int = 0
    ) -> Shard | None:
        work = self._open().next_shard(dataset_id, epoch, at_once=at_once, wait=wait, prefetch=prefetch)
        return self._run(work)

    def step_shards(self, dataset_id: str, step: int) -> list[Shard]:
        return self._run(self._open().step_shards(dataset_id, step))

    def flush(self) -> None:
        self._run(self._open().flush())

    def barrier(self, barrier_id: str, *, timeout_s: float = 0.0, expected: int = 0) -> None:
        self._run(self._open().barrier(barrier_id, timeout_s=timeout_s, expected=expected))

    def step(self, number: int, *, compute_s: float | None = None) -> None:
        self._open().step(number, compute_s=compute_s)

    @contextmanager
    def busy(self) -> Iterator[None]:
        phase = self._open().busy()
        self._run(_enter(phase))
        try:
            yield
        finally:
            self._run(_leave(phase))

    def checkpoint_due(self) -> bool:
        return self._run(self._open().checkpoint_due())

    def begin_checkpoint(self, step: int) -> Capture:
        async def begin() -> Capture:
            return self._open().begin_checkpoint(step)

        # Inside the loop: leases must not come or go meanwhile.
        return self._run(begin())

    def give_up_checkpoint(self, capture: Capture) -> None:
        self._open().give_up_checkpoint(capture)

    def report_checkpoint(
        self, capture: Capture, path: str | Path, *, digest: str | None = None, size: int | None = None
    ) -> Reported:
        return self._run(self._open().report_checkpoint(capture, path, digest=digest, size=size))

    def checkpoint(
        self,
        step: int,
        path: str | Path,
        *,
        digest: str | None = None,
        size: int | None = None,
        commit_within_s: float | None = None,
    ) -> Reported:
        work = self._open().checkpoint(step, path, digest=digest, size=size, commit_within_s=commit_within_s)
        return self._run(work)

    def sweep(self, reported: Reported) -> Swept:
        return self._run(self._open().sweep(reported))

    def recover(self, reason: str = "", *, bad_checkpoint_id: str = "") -> Manifest | None:
        return self._run(self._open().recover(reason, bad_checkpoint_id=bad_checkpoint_id))

    def follow(self) -> None:
        self._run(self._open().follow())
