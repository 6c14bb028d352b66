"""Picks the shard that a worker gets next: returned ranges first, then shards of its own buckets in canonical order,
then it steals from any bucket. Nothing is granted here (that is `shards`).

An index over a ledger, rebuilt when needed and never journaled: the cursors are the truth, and an entry that disagrees
with them is stale and skipped.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from strata.coord.core.facts import Dataset
from strata.coord.core.ledger import EpochLedger, ShardRange
from strata.coord.core.permutation import order_of

_Entry = tuple[int, int, int]
"""Canonical position of a bucket's next shard, the bucket, and the cursor it was read at."""


class Picker:
    """Picks shards of one epoch of one dataset; it takes eight bytes for each shard."""

    def __init__(self, dataset: Dataset, epoch: int) -> None:
        self._dataset = dataset
        order = order_of(dataset.dataset_id, dataset.seed, epoch, dataset.shards, shuffle=dataset.shuffle)
        shards = order.items(0, dataset.shards)
        # Bucket after bucket, and in each the canonical order: a stable sort keeps it.
        positions = (shards % dataset.buckets).astype("uint16").argsort(kind="stable")
        self._positions = positions.astype("uint32")
        self._shards = shards[positions].astype("uint32")
        self._own: dict[str, list[_Entry]] = {}
        self._anybodys: list[_Entry] | None = None
        self._version = (-1, 0)
        self._advanced: list[tuple[list[_Entry], int, int]] = []
        """What the last pick changed: each heap and bucket that it advanced, and the cursor that it picked."""

    def pick(
        self,
        ledger: EpochLedger,
        worker_id: str,
        version: tuple[int, int],
        count: int,
        buckets: Callable[[], Sequence[int]],
    ) -> list[tuple[ShardRange, bool]]:
        """Picks up to `count` ranges for a worker, and says whether each is fresh.

        `buckets` returns the ones it owns; with another `version` of the placement it is called again for every worker.
        """
        self._undo_unused(ledger)
        if version != self._version:
            self._own.clear()
            self._version = version
        picked: list[tuple[ShardRange, bool]] = [(shard_range, False) for shard_range in ledger.returned[:count]]
        taken: dict[int, int] = {}
        if worker_id not in self._own:
            self._own[worker_id] = self._heap(ledger, buckets())
        while len(picked) < count and (shard := self._next(self._own[worker_id], ledger, taken)) is not None:
            picked.append((ShardRange(shard, *self._dataset.bounds(shard)), True))
        while len(picked) < count and (shard := self._steal(ledger, taken)) is not None:
            picked.append((ShardRange(shard, *self._dataset.bounds(shard)), True))
        return picked

    def _undo_unused(self, ledger: EpochLedger) -> None:
        """A pick that was not granted is offered again: a decision may be repeated before its facts are applied."""
        unused = {id(heap): heap for heap, bucket, cursor in self._advanced if ledger.cursors[bucket] <= cursor}
        for heap in unused.values():
            buckets = {bucket for each, bucket, cursor in self._advanced if each is heap}
            heap[:] = [entry for entry in heap if entry[1] not in buckets]
            heap += [
                self._entry(bucket, cursor)
                for bucket in buckets
                if (cursor := ledger.cursors[bucket]) < self._size(bucket)
            ]
            heapq.heapify(heap)
        self._advanced.clear()

    def _steal(self, ledger: EpochLedger, taken: dict[int, int]) -> int | None:
        if self._anybodys is None:
            self._anybodys = self._heap(ledger, range(self._dataset.buckets))
        return self._next(self._anybodys, ledger, taken)

    def _next(self, heap: list[_Entry], ledger: EpochLedger, taken: dict[int, int]) -> int | None:
        while heap:
            _, bucket, cursor = heap[0]
            now = ledger.cursors[bucket] + taken.get(bucket, 0)
            if cursor == now:
                taken[bucket] = taken.get(bucket, 0) + 1
                self._advanced.append((heap, bucket, cursor))
                self._advance(heap, bucket, now + 1)
                return int(self._shards[self._place(bucket, cursor)])
            self._advance(heap, bucket, now)
        return None

    def _advance(self, heap: list[_Entry], bucket: int, cursor: int) -> None:
        if cursor < self._size(bucket):
            heapq.heapreplace(heap, self._entry(bucket, cursor))
        else:
            heapq.heappop(heap)

    def _heap(self, ledger: EpochLedger, buckets: Sequence[int]) -> list[_Entry]:
        entries = [
            self._entry(bucket, cursor) for bucket in buckets if (cursor := ledger.cursors[bucket]) < self._size(bucket)
        ]
        heapq.heapify(entries)
        return entries

    def _entry(self, bucket: int, cursor: int) -> _Entry:
        return int(self._positions[self._place(bucket, cursor)]), bucket, cursor

    def _size(self, bucket: int) -> int:
        """Returns how many shards a bucket has: `bucket_of` deals them out in turn."""
        full, extra = divmod(self._dataset.shards, self._dataset.buckets)
        return full + (bucket < extra)

    def _place(self, bucket: int, cursor: int) -> int:
        full, extra = divmod(self._dataset.shards, self._dataset.buckets)
        return bucket * full + min(bucket, extra) + cursor
