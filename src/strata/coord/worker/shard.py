"""A shard as the training loop sees it (`open`, `progress`, `done`, `fail`), and the options of a dataset: seed,
shuffle, buckets, shards of a global batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.worker.leases import HeldLease
from strata.coord.worker.prefetch import ReadAhead
from strata.coord.worker.readers import DatasetReader


@dataclass(frozen=True)
class DatasetOptions:
    """How the shards of a dataset are handed out."""

    seed: int = 0
    shuffle: bool = True
    buckets: int = 0
    """Units of placement; 0 leaves it to the coordinator."""
    global_batch_shards: int = 0
    """Not 0: the dataset is DETERMINISTIC, and all workers together take so many shards in a step."""

    def write(self, message: pb.DatasetInfo) -> None:
        message.seed, message.shuffle, message.buckets = self.seed, self.shuffle, self.buckets
        message.global_batch_shards = self.global_batch_shards
        deterministic = self.global_batch_shards > 0
        message.mode = pb.DATASET_MODE_DETERMINISTIC if deterministic else pb.DATASET_MODE_LEASED


@dataclass(frozen=True)
class FileSlice:
    """Samples of one file, counted from its beginning."""

    path: str
    start: int
    end: int


class Shard:
    """A range of samples of a dataset, leased to this worker: samples from `start` up to, without, `end`."""

    def __init__(self, held: HeldLease, reader: DatasetReader, ahead: ReadAhead | None = None) -> None:
        self._held = held
        self._reader = reader
        self._ahead = ahead
        self.start = held.position
        self.end = held.shard.end_index
        """What was consumed before, by this worker or another, is not part of it."""

    def __repr__(self) -> str:
        return f"Shard({self.shard_id!r}, {self.start}, {self.end})"

    def __len__(self) -> int:
        return self.end - self.start

    @property
    def shard_id(self) -> str:
        return self._held.shard.shard_id

    @property
    def dataset_id(self) -> str:
        return self._held.dataset_id

    @property
    def epoch(self) -> int:
        return self._held.epoch

    @property
    def lease_id(self) -> int:
        return self._held.lease_id

    @property
    def lost(self) -> bool:
        """Its lease belongs to another worker now."""
        return self._held.lost

    @property
    def settled(self) -> bool:
        """The coordinator knows that all of it is consumed."""
        return self._held.acked == self.end

    @property
    def slices(self) -> tuple[FileSlice, ...]:
        return tuple(FileSlice(each.path, each.start_index, each.end_index) for each in self._pieces())

    def open(self) -> Iterator[Any]:
        """The samples: lines of text, values of JSONL, rows of Parquet and Arrow, or those of a library's dataset."""
        for batch in self._batches():
            yield from batch

    async def open_async(self) -> AsyncIterator[Any]:
        """The same where nothing may block: files are read in a thread."""
        batches = iter(self._batches())
        while (batch := await asyncio.to_thread(next, batches, None)) is not None:
            for sample in batch:
                yield sample

    def done(self) -> None:
        """All of it is consumed. To request the next shard has the same effect."""
        self._held.consume(self.end)

    def progress(self, until: int) -> None:
        """Samples before this index are consumed: after a death, and in a checkpoint, only the rest is left."""
        self._held.consume(until)

    def fail(self, reason: str) -> None:
        """The rest cannot be read: another worker gets it, and after several failures it is quarantined."""
        self._held.failure = reason

    def _batches(self) -> Iterator[list[Any]]:
        """Samples that were read ahead can be taken once; a second `open` reads them again."""
        ahead, self._ahead = self._ahead, None
        return iter(ahead) if ahead is not None else self._reader.batches(self._pieces(), self.start, self.end)

    def _pieces(self) -> list[pb.FileSlice]:
        return pieces(self._held.shard, self.start)


def pieces(shard: pb.Shard, start: int) -> list[pb.FileSlice]:
    """The slices of a shard without the samples before `start`, which were consumed since the lease began."""
    skip = start - shard.start_index
    found: list[pb.FileSlice] = []
    for piece in shard.slices:
        first = min(piece.start_index + skip, piece.end_index)
        skip -= first - piece.start_index
        if first < piece.end_index:
            found.append(pb.FileSlice(path=piece.path, start_index=first, end_index=piece.end_index))
    return found
