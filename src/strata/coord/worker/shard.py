"""A shard in the hands of the loop that trains."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.worker import readers
from strata.coord.worker.held import Held


@dataclass(frozen=True)
class FileSlice:
    """Samples of one file, counted from its beginning."""

    path: str
    start: int
    end: int


class Shard:
    """A range of samples of a dataset, leased to this worker: samples from `start` up to, without, `end`."""

    def __init__(self, held: Held) -> None:
        self._held = held
        self.start = held.at
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
        """It is somebody else's now."""
        return self._held.lost

    @property
    def slices(self) -> tuple[FileSlice, ...]:
        return tuple(FileSlice(each.path, each.start_index, each.end_index) for each in self._pieces())

    def open(self) -> Iterator[Any]:
        """The samples: the lines of text, the values of JSONL."""
        return readers.read(self._pieces())

    def done(self) -> None:
        """All of it is consumed. Asking for the next shard says the same."""
        self._held.consume(self.end)

    def progress(self, until: int) -> None:
        """Samples before this index are consumed: after a death, and in a checkpoint, only the rest is left."""
        self._held.consume(until)

    def fail(self, reason: str) -> None:
        """The rest cannot be read: somebody else shall try, and after several failures it is put aside."""
        self._held.failure = reason

    def _pieces(self) -> list[pb.FileSlice]:
        """Without the samples that were consumed since the lease began."""
        skip = self.start - self._held.shard.start_index
        pieces: list[pb.FileSlice] = []
        for piece in self._held.shard.slices:
            start = min(piece.start_index + skip, piece.end_index)
            skip -= start - piece.start_index
            if start < piece.end_index:
                pieces.append(pb.FileSlice(path=piece.path, start_index=start, end_index=piece.end_index))
        return pieces
