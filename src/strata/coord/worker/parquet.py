"""Samples that are rows of a Parquet file, each a dict by column. Only the row groups that are needed are read.

pyarrow is imported when the first Parquet file is: a worker that reads text does without it.
"""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from types import ModuleType
from typing import Any, Final

from strata.base.errors import Code, StrataError
from strata.coord.worker.stores import Source, needs

BATCH_BYTES: Final = 1 << 20
BATCH_ROWS: Final = 4_096


class RowIndex:
    """What the footer of a file says: which row group begins where. Kept, so that it is read once."""

    def __init__(self, source: Source) -> None:
        parquet = _pyarrow()
        with _readable(source), parquet.ParquetFile(_File(source)) as file:
            self.metadata: Any = file.metadata
        groups = range(self.metadata.num_row_groups)
        self._ends = list(accumulate(self.metadata.row_group(each).num_rows for each in groups))

    @property
    def rows(self) -> int:
        return self._ends[-1] if self._ends else 0

    def groups(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """The row groups with rows from `start` up to `end`, each with where those begin and end inside it."""
        for group in range(bisect_right(self._ends, start), len(self._ends)):
            begins = self._ends[group - 1] if group else 0
            if begins >= end:
                return
            if self._ends[group] > begins:
                yield group, max(0, start - begins), min(end, self._ends[group]) - begins

    def batch_rows(self, group: int) -> int:
        """About a megabyte, so that what is read ahead is bounded."""
        found = self.metadata.row_group(group)
        fitting: int = BATCH_BYTES * found.num_rows // max(1, found.total_byte_size)
        return max(1, min(BATCH_ROWS, fitting))


def rows(source: Source, index: RowIndex, start: int, end: int) -> Iterator[list[Any]]:
    """The rows from `start` up to, without, `end`, or as many of them as there are."""
    parquet = _pyarrow()
    # Buffering fetches the columns of one row group in a few large requests; groups are read one after the other.
    with _readable(source), parquet.ParquetFile(_File(source), metadata=index.metadata, pre_buffer=True) as file:
        for group, first, last in index.groups(start, end):
            at = 0
            for batch in file.iter_batches(index.batch_rows(group), row_groups=[group], use_threads=False):
                wanted = batch.slice(max(0, first - at), max(0, last - max(at, first)))
                at += batch.num_rows
                if wanted.num_rows:
                    yield wanted.to_pylist()
                if at >= last:
                    break


def _pyarrow() -> ModuleType:
    try:
        from pyarrow import parquet  # type: ignore[import-untyped]
    except ImportError:
        raise needs("pyarrow", "reading Parquet") from None
    module: ModuleType = parquet
    return module


@contextmanager
def _readable(source: Source) -> Iterator[None]:
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        said = str(error).partition("\n")[0]
        raise StrataError(Code.CORRUPT, f"{source.path} cannot be read as Parquet: {said}", path=source.path) from error


class _File(io.RawIOBase):
    """A source as pyarrow wants a file. Not buffered: pyarrow asks for what it needs, in large pieces."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._source.seen.size}[whence]
        self._at = base + offset
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._source.seen.size - self._at)
        take = left if size is None or size < 0 else min(size, left)
        content = self._source.read(self._at, self._at + take)
        self._at += len(content)
        return content
