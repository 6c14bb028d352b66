"""Samples that are rows as dicts by column: Parquet, read by row groups in batches of 4,096 rows, and Arrow files,
mapped into memory.

pyarrow is imported with the first such file: a worker that reads text does without it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from types import ModuleType
from typing import Any, Final

from strata.base.errors import Code, StrataError
from strata.coord.worker.stores import LocalFile, Source, SourceFile, Stores, local_path, needs

BATCH_BYTES: Final = 1 << 20
BATCH_ROWS: Final = 4_096
FILE_MAGIC: Final = b"ARROW1"


class ParquetRows:
    """Keeps what the footer of a file says: which row group begins where. So it is read once."""

    def __init__(self, source: Source, _stores: Stores) -> None:
        parquet = _pyarrow().parquet
        with _readable(source), parquet.ParquetFile(SourceFile(source)) as file:
            self._metadata: Any = file.metadata
        groups = range(self._metadata.num_row_groups)
        self._ends = list(accumulate(self._metadata.row_group(each).num_rows for each in groups))

    @property
    def samples(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, source: Source, start: int, end: int) -> Iterator[list[Any]]:
        parquet = _pyarrow().parquet
        # Buffering fetches the columns of one row group in a few large requests; groups are read one after the other.
        with (
            _readable(source),
            parquet.ParquetFile(SourceFile(source), metadata=self._metadata, pre_buffer=True) as file,
        ):
            for group, first, last in self._groups(start, end):
                at = 0
                for batch in file.iter_batches(self._batch_rows(group), row_groups=[group], use_threads=False):
                    wanted = batch.slice(max(0, first - at), max(0, last - max(at, first)))
                    at += batch.num_rows
                    if wanted.num_rows:
                        yield wanted.to_pylist()
                    if at >= last:
                        break

    def _groups(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """The row groups with rows from `start` up to `end`, each with where those begin and end inside it."""
        for group in range(bisect_right(self._ends, start), len(self._ends)):
            begins = self._ends[group - 1] if group else 0
            if begins >= end:
                return
            if self._ends[group] > begins:
                yield group, max(0, start - begins), min(end, self._ends[group]) - begins

    def _batch_rows(self, group: int) -> int:
        """Returns the rows of about a megabyte, so that what is read ahead is bounded."""
        found = self._metadata.row_group(group)
        fitting: int = BATCH_BYTES * found.num_rows // max(1, found.total_byte_size)
        return max(1, min(BATCH_ROWS, fitting))


class ArrowRows:
    """A file that Arrow or Hugging Face `datasets` has written, as a stream or as a file of record batches. Only the
    pages that are touched are read, and processes of a host share them."""

    def __init__(self, source: Source, _stores: Stores) -> None:
        pyarrow = _pyarrow()
        if not isinstance(source, LocalFile):
            raise StrataError(Code.UNSUPPORTED, f"cannot read {source.path}: Arrow files have to be local")
        with _readable(source):
            mapped = pyarrow.memory_map(str(local_path(source.path)))
            is_file = source.read(0, min(len(FILE_MAGIC), source.seen.size)) == FILE_MAGIC
            self._table: Any = (pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream)(mapped).read_all()

    @property
    def samples(self) -> int:
        count: int = self._table.num_rows
        return count

    def read(self, source: Source, start: int, end: int) -> Iterator[list[Any]]:
        rows = max(1, min(BATCH_ROWS, BATCH_BYTES * self.samples // max(1, source.seen.size)))
        with _readable(source):
            for at in range(start, min(end, self.samples), rows):
                yield self._table.slice(at, min(rows, end - at)).to_pylist()


def _pyarrow() -> ModuleType:
    try:
        import pyarrow  # type: ignore[import-untyped]
        import pyarrow.ipc  # type: ignore[import-untyped]
        import pyarrow.parquet  # type: ignore[import-untyped]
    except ImportError:
        raise needs("pyarrow", "reading Parquet and Arrow") from None
    module: ModuleType = pyarrow
    return module


@contextmanager
def _readable(source: Source) -> Iterator[None]:
    pyarrow = _pyarrow()
    try:
        yield
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        said = str(error).partition("\n")[0]
        raise StrataError(Code.CORRUPT, f"{source.path} cannot be read: {said}", path=source.path) from error
