"""Samples of a dataset's files: what a shard's slices mean, whatever the format and wherever the files are.

A sample is a line of text, the value that a line of JSONL says, or a row of a Parquet file as a dict. The suffix of a
path says which; indexes count samples from the beginning of a file.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

from strata.base.errors import Code, StrataError
from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.worker import lines, parquet
from strata.coord.worker.lines import LineIndex
from strata.coord.worker.parquet import RowIndex
from strata.coord.worker.stores import LOCAL_BLOCK, S3Settings, Seen, Source, Stores

TEXT: Final = (".txt", ".text", ".md", ".csv", ".tsv")
JSON_LINES: Final = (".jsonl", ".ndjson")
PARQUET: Final = (".parquet", ".pq")
FILES_KEPT: Final = 1_024
"""Of so many files it is remembered where their samples are."""


@dataclass(frozen=True)
class _Known:
    seen: Seen
    index: LineIndex | RowIndex


class Readers:
    """Reads samples, and remembers of each file where they are. Several threads may read at once."""

    def __init__(self, s3: S3Settings | None = None, *, local_block: int = LOCAL_BLOCK) -> None:
        self.stores = Stores(s3, local_block=local_block)
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._learning = threading.Lock()

    def count(self, path: str | Path) -> int:
        """The samples of a file. Of text and JSONL that reads all of it; a last line without a line feed counts too."""
        place = str(path)
        _suffix(place)
        with self.stores.open(place, self._seen(place)) as source:
            index = self._index(source)
            return index.count(source) if isinstance(index, LineIndex) else index.rows

    def read(self, slices: Iterable[pb.FileSlice]) -> Iterator[Any]:
        """The samples of all slices, in order."""
        for batch in self.batches(slices):
            yield from batch

    def batches(self, slices: Iterable[pb.FileSlice]) -> Iterator[list[Any]]:
        """The same in lists, none of them empty, of about a megabyte each or, from S3, four."""
        for piece in slices:
            taken = 0
            for batch in self._piece(piece):
                taken += len(batch)
                yield batch
            if taken < piece.end_index - piece.start_index:
                raise StrataError(
                    Code.CORRUPT,
                    f"{piece.path} has fewer samples than were registered: no sample {piece.start_index + taken}",
                    path=piece.path,
                )

    def _piece(self, piece: pb.FileSlice) -> Iterator[list[Any]]:
        suffix = _suffix(piece.path)
        with self.stores.open(piece.path, self._seen(piece.path)) as source:
            index = self._index(source)
            start, end = piece.start_index, piece.end_index
            if isinstance(index, RowIndex):
                yield from parquet.rows(source, index, start, end)
            elif suffix in JSON_LINES:
                yield from lines.json_lines(source, index, start, end)
            else:
                yield from lines.text(source, index, start, end)

    def _seen(self, path: str) -> Seen | None:
        with self._learning:
            known = self._known.get(path)
        return known.seen if known else None

    def _index(self, source: Source) -> LineIndex | RowIndex:
        with self._learning:
            known = self._known.get(source.path)
            if known is None:
                index = RowIndex(source) if _suffix(source.path) in PARQUET else LineIndex()
                known = self._known[source.path] = _Known(source.seen, index)
                if len(self._known) > FILES_KEPT:
                    self._known.popitem(last=False)
            self._known.move_to_end(source.path)
        return known.index


def count_samples(path: str | Path) -> int:
    """The samples of a file, for a dataset that is described by hand."""
    return Readers().count(path)


def _suffix(path: str) -> str:
    suffix = PurePosixPath(path).suffix.lower()
    known = (*TEXT, *JSON_LINES, *PARQUET)
    if suffix not in known:
        raise StrataError(
            Code.UNSUPPORTED,
            f"cannot read {path}: no reader for {suffix or 'a file without a suffix'}",
            hint=f"readable are {', '.join(known)}; or read the shard's slices yourself",
        )
    return suffix
