"""Chooses the reader of a file by its suffix (text, JSONL, Parquet, Arrow, tar, compressed), counts samples, and reads
the slices of a shard; with the batch size and how many open files are kept.

The suffix of a path says what a sample is; indexes count samples from the beginning of a file. Each format is one class
with the number of samples of a file and a method that reads a range of them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Final, Protocol

from strata.base.errors import Code, StrataError
from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.worker.archives import TarSamples
from strata.coord.worker.columns import ArrowRows, ParquetRows
from strata.coord.worker.lines import TextLines, parse_json
from strata.coord.worker.stores import LOCAL_BLOCK, S3Settings, Seen, Source, Stores


class SampleReader(Protocol):
    """A file in its format. Made once for each file and used while the file is the same, by several threads."""

    @property
    def samples(self) -> int: ...

    def read(self, source: Source, start: int, end: int) -> Iterator[list[Any]]:
        """The samples from `start` up to, without, `end`, or as many of them as there are, in lists of bounded size."""


TEXT: Final = (".txt", ".text", ".md", ".csv", ".tsv")
JSON_LINES: Final = (".jsonl", ".ndjson")
FORMATS: Final[Mapping[str, Callable[[Source, Stores], SampleReader]]] = {
    **dict.fromkeys(TEXT, TextLines),
    **dict.fromkeys(JSON_LINES, partial(TextLines, parse=parse_json)),
    **dict.fromkeys((f"{each}.gz" for each in TEXT), partial(TextLines, gzip=True)),
    **dict.fromkeys((f"{each}.gz" for each in JSON_LINES), partial(TextLines, parse=parse_json, gzip=True)),
    **dict.fromkeys((".parquet", ".pq"), ParquetRows),
    **dict.fromkeys((".arrow", ".feather"), ArrowRows),
    ".tar": TarSamples,
}
"""The reader by the last suffix of a path, or by the last two of a compressed file."""
SOURCE_BATCH: Final = 64
"""Samples that are requested of a library's dataset at once."""
FILES_KEPT: Final = 1_024
"""The number of files of which it is remembered where their samples are."""


@dataclass(frozen=True)
class _Known:
    seen: Seen
    reader: SampleReader


class Readers:
    """Reads samples, and remembers of each file where they are. Several threads may read at once."""

    def __init__(self, s3: S3Settings | None = None, *, local_block: int = LOCAL_BLOCK) -> None:
        self._settings = s3, local_block
        self.stores = Stores(s3, local_block=local_block)
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Callable[..., Readers], tuple[S3Settings | None, int]]:
        """Makes a reader in another process learn for itself where samples are, from their index."""
        return _new_readers, self._settings

    def count(self, path: str | Path) -> int:
        """The samples of a file. The first process that counts lines reads all of them and writes their index."""
        place = str(path)
        with self._open(place) as source:
            return self._reader(source).samples

    def read(self, slices: Iterable[pb.FileSlice]) -> Iterator[Any]:
        """The samples of all slices, in order."""
        for batch in self.batches(slices):
            yield from batch

    def batches(self, slices: Iterable[pb.FileSlice]) -> Iterator[list[Any]]:
        """The same in lists, none of them empty, of about a megabyte each or, from S3, four."""
        for piece in slices:
            taken = 0
            with self._open(piece.path) as source:
                for batch in self._reader(source).read(source, piece.start_index, piece.end_index):
                    taken += len(batch)
                    yield batch
            if taken < piece.end_index - piece.start_index:
                raise StrataError(
                    Code.CORRUPT,
                    f"{piece.path} has fewer samples than were registered: no sample {piece.start_index + taken}",
                    path=piece.path,
                )

    def _open(self, path: str) -> AbstractContextManager[Source]:
        _format(path)
        with self._lock:
            known = self._known.get(path)
        return self.stores.open(path, known.seen if known else None)

    def _reader(self, source: Source) -> SampleReader:
        with self._lock:
            known = self._known.get(source.path)
        if known is None:
            # Outside the lock: it may have to read the file, and other threads read other files meanwhile.
            known = _Known(source.seen, _format(source.path)(source, self.stores))
        with self._lock:
            self._known[source.path] = known
            self._known.move_to_end(source.path)
            if len(self._known) > FILES_KEPT:
                self._known.popitem(last=False)
        return known.reader


class MapStyle(Protocol):
    """A dataset of a library: Hugging Face `datasets`, any map-style dataset of torch."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class DatasetReader:
    """Reads samples of one dataset, in any process: it has no lease and no connection."""

    readers: Readers
    source: MapStyle | None = None
    """Instead of files."""

    def batches(self, slices: Iterable[pb.FileSlice], start: int, end: int) -> Iterator[list[Any]]:
        """The samples from `start` up to, without, `end`, which lie in these slices of files."""
        if self.source is None:
            pieces = tuple(slices)
            if not pieces and start < end:
                raise StrataError(
                    Code.PRECONDITION,
                    f"samples {start} to {end - 1} lie in no file: the dataset is registered by its number of samples",
                    hint="read them by their numbers, or call worker.dataset(…, source=…) in this process",
                )
            yield from self.readers.batches(pieces)
            return
        get_many = getattr(self.source, "__getitems__", None)
        for at in range(start, end, SOURCE_BATCH):
            wanted = range(at, min(at + SOURCE_BATCH, end))
            yield list(get_many([*wanted])) if get_many else [self.source[index] for index in wanted]


def _new_readers(s3: S3Settings | None, local_block: int) -> Readers:
    return Readers(s3, local_block=local_block)


def count_samples(path: str | Path) -> int:
    """The samples of a file, for a dataset that is described by hand; writes the index if there is none."""
    return Readers().count(path)


def _format(path: str) -> Callable[[Source, Stores], SampleReader]:
    suffixes = PurePosixPath(path.lower()).suffixes
    suffix = "".join(suffixes[-2:] if suffixes[-1:] == [".gz"] else suffixes[-1:])
    if suffix not in FORMATS:
        raise StrataError(
            Code.UNSUPPORTED,
            f"cannot read {path}: no reader for {suffix or 'a file without a suffix'}",
            hint=f"readable are {', '.join(FORMATS)}; or read the shard's slices yourself",
        )
    return FORMATS[suffix]
