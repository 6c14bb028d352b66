"""Prefetching: leases of the next shards while the loop trains on this one, and a thread that reads their samples up to
four batches ahead.

A prefetched shard is leased like any other and counts as unread until the training loop gets it. So nothing of it is
acked; when its worker leaves, dies or rewinds, it is leased again like everything that was not consumed.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final

from strata.base import log
from strata.base.errors import Code, StrataError
from strata.coord.worker.leases import HeldLease, LeaseTracker

BATCHES_AHEAD: Final = 4
"""Batches that are read ahead, of about a megabyte each, or four from S3."""
THREAD_JOIN_S: Final = 1.0

_log = log.get(__name__)

LeaseShards = Callable[[str, int, int], Awaitable[object]]
"""Dataset, epoch, how many: lease them, with one attempt only."""
Read = Callable[[HeldLease], Iterator[list[Any]]]


class ReadAhead:
    """Batches of samples, read by a thread of its own that is at most `BATCHES_AHEAD` in front of the reader."""

    def __init__(self, batches: Iterator[list[Any]]) -> None:
        self._batches = batches
        self._ready: deque[list[Any]] = deque()
        self._failure: StrataError | None = None
        self._over = False
        self._closed = False
        self.opened = False
        """A reader takes the batches, and will close it."""
        self._moved = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="strata-read-ahead", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[list[Any]]:
        """Iterates once. An error of the thread is raised here, after all that came before it. What went wrong in the
        thread is raised here, after all that came before it."""
        self.opened = True
        try:
            while (batch := self._take()) is not None:
                yield batch
        finally:
            self.close()

    def close(self) -> None:
        """The rest is not needed. The thread ends after its current read."""
        with self._moved:
            self._closed = True
            self._ready.clear()
            self._moved.notify_all()

    def join(self, within_s: float) -> None:
        self._thread.join(within_s)

    def _take(self) -> list[Any] | None:
        with self._moved:
            self._moved.wait_for(lambda: self._ready or self._over or self._closed)
            if self._ready:
                self._moved.notify_all()
                return self._ready.popleft()
            if self._failure is not None:
                raise self._failure
            if not self._over:
                raise StrataError(Code.GONE, "these samples are not this worker's to read any more")
            return None

    def _put(self, batch: list[Any]) -> bool:
        with self._moved:
            self._moved.wait_for(lambda: len(self._ready) < BATCHES_AHEAD or self._closed)
            if not self._closed:
                self._ready.append(batch)
                self._moved.notify_all()
            return not self._closed

    def _run(self) -> None:
        # A defect's exception goes to the thread's hook; the waiting reader must get an error all the same.
        failure: StrataError | None = StrataError(Code.INTERNAL, "reading ahead failed; standard error has the reason")
        try:
            for batch in self._batches:
                if not self._put(batch):
                    break
            failure = None
        except StrataError as error:
            failure = error
        finally:
            with self._moved:
                self._failure, self._over = failure, True
                self._moved.notify_all()


class Prefetch:
    """Keeps at most one request for leases on its way, beside the loop that trains, and the samples of what came of it.

    Used in the worker's event loop only.
    """

    def __init__(self, leases: LeaseTracker, lease: LeaseShards, read: Read) -> None:
        self._leases = leases
        self._lease = lease
        self._read = read
        self._leasing: asyncio.Task[None] | None = None
        self._ahead: dict[int, tuple[HeldLease, ReadAhead]] = {}

    def begin(self, dataset_id: str, epoch: int, count: int) -> None:
        """Have `count` shards ready before the loop requests them."""
        self._drop(lambda held: held.lost or held.is_finished)
        if self._leasing is None or self._leasing.done():
            self._leasing = asyncio.create_task(self._run(dataset_id, epoch, count), name="strata prefetch")

    async def arrive(self) -> None:
        """Wait for the pending request, if there is one: its shards need not be requested again."""
        if self._leasing is not None:
            await asyncio.wait([self._leasing])

    def take(self, held: HeldLease) -> ReadAhead | None:
        """The samples of a shard that the loop now gets. If it never opens them they are closed with the shard."""
        found = self._ahead.get(held.lease_id)
        return found[1] if found else None

    async def stop(self) -> None:
        """Everything that was fetched and not begun is forgotten; it is up to the caller to give up the leases."""
        if self._leasing is not None:
            self._leasing.cancel()
            await asyncio.wait([self._leasing])
            self._leasing = None
        left = [ahead for _, ahead in self._ahead.values() if not ahead.opened]
        self._drop(lambda _: True)
        for ahead in left:
            await asyncio.to_thread(ahead.join, THREAD_JOIN_S)

    async def _run(self, dataset_id: str, epoch: int, count: int) -> None:
        lacking = count - len(self._leases.unread(dataset_id, epoch))
        if lacking > 0:
            try:
                await self._lease(dataset_id, epoch, lacking)
            except StrataError as error:
                # The training loop will send the request itself and get the same error.
                _log.debug("prefetch_failed", code=error.code.value, reason=error.message)
                return
        for held in self._leases.unread(dataset_id, epoch)[:count]:
            if held.lease_id not in self._ahead and held.shard.slices:
                self._ahead[held.lease_id] = (held, ReadAhead(self._read(held)))

    def _drop(self, unwanted: Callable[[HeldLease], bool]) -> None:
        for lease_id, (held, ahead) in list(self._ahead.items()):
            if unwanted(held):
                del self._ahead[lease_id]
                if not ahead.opened:
                    ahead.close()
