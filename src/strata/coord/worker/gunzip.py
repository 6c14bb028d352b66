"""Reads a gzip file as its content with indexed_gzip, from seek points every 4 MiB."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from strata.base.errors import Code, StrataError
from strata.coord.worker.stores import Source, SourceFile, needs

SPACING: Final = 4 << 20
"""Decompressed bytes between two seek points, each of which costs up to 32 KiB in the index."""


class Gunzipped:
    """A file whose decompressed bytes are read from any place."""

    def __init__(self, source: Source, seek_points: bytes = b"") -> None:
        """Decompresses all of it once to find seek points if none are given."""
        try:
            import indexed_gzip  # type: ignore[import-not-found, import-untyped, unused-ignore]
        except ImportError:
            raise needs("indexed_gzip", "reading compressed text") from None
        self.path = source.path
        self.block = source.block
        self._raw = SourceFile(source)
        with _readable(self._raw):
            self._file: Any = indexed_gzip.IndexedGzipFile(fileobj=self._raw, spacing=SPACING)
            if seek_points:
                self._file.import_index(fileobj=io.BytesIO(seek_points))
            else:
                self._file.build_full_index()

    def read(self, start: int, end: int) -> bytes:
        with _readable(self._raw):
            self._file.seek(start)
            content: bytes = self._file.read(end - start)
        return content

    def export_seek_points(self) -> bytes:
        with io.BytesIO() as points:
            self._file.export_index(fileobj=points)
            return points.getvalue()


def gunzipped_blocks(source: Source) -> Iterator[bytes]:
    """All decompressed bytes, by Python's own library: it notices a file that was cut off."""
    raw = SourceFile(source)
    file = gzip.GzipFile(fileobj=io.BufferedReader(raw, source.block))
    while True:
        with _readable(raw):
            block = file.read(source.block)
        if not block:
            return
        yield block


@contextmanager
def _readable(raw: SourceFile) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, EOFError, zlib.error) as error:
        # The library hides what its file raises.
        if raw.failure is not None:
            raise raw.failure from error
        path = raw.source.path
        raise StrataError(Code.CORRUPT, f"{path} cannot be decompressed: {error}", path=path) from error
