"""Samples that are lines of text and JSONL files, also compressed, and the `.strata-index` file beside the data: its
format, its grain and its digests. Only a line feed ends a line.

Where lines begin is in an index, a small file beside the data. It divides the data into segments of whole lines and has
the digest of each, so that what is read is what was indexed.
"""

from __future__ import annotations

import json
import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from hashlib import blake2b
from typing import Any, Final, TypeVar

import msgspec

from strata.base import log
from strata.base.errors import Code, StrataError
from strata.coord.worker.gunzip import Gunzipped, gunzipped_blocks
from strata.coord.worker.stores import Seen, Source, Stores

GRAIN: Final = 1 << 16
"""Least size of a segment but the last: a shard reads at most about so much more than its own lines."""
MOST_SEGMENTS: Final = 16_384
"""A larger file has larger segments: an index is never larger than 400 KB."""
SUFFIX: Final = ".strata-index"
MAGIC: Final = b"strata-index 1\n"
DIGEST_BYTES: Final = 8

T = TypeVar("T")
_log = log.get(__name__)


Content = Source | Gunzipped


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    size: int
    version: str
    """Time of the last change, or ETag: if only this differs, the content is compared."""
    segments: int


class LineIndex:
    """Segments of whole lines: the first line of each, its offset and its digest. Never changes."""

    def __init__(self, lines: array[int], offsets: array[int], digests: array[int], seek_points: bytes = b"") -> None:
        self.seek_points = seek_points
        """Where the library can begin to decompress a compressed file."""
        self._lines = lines
        self._offsets = offsets
        self._digests = digests

    @property
    def samples(self) -> int:
        """A last line without a line feed counts too."""
        return self._lines[-1]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LineIndex) and self._arrays() == other._arrays()

    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def build(cls, blocks: Iterable[bytes], grain: int = GRAIN, seek_points: bytes = b"") -> LineIndex:
        """Builds the index of a whole file, which is read once."""
        lines, offsets, digests = array("Q", [0]), array("Q", [0]), array("Q")
        counted = at = 0
        ends_open = False
        digest = blake2b(digest_size=DIGEST_BYTES)
        for block in blocks:
            view, here = memoryview(block), 0
            # A segment ends with the first line feed that makes it large enough.
            while end := block.find(b"\n", max(here, offsets[-1] + grain - 1 - at)) + 1:
                counted += block.count(b"\n", here, end)
                digest.update(view[here:end])
                lines.append(counted)
                offsets.append(at + end)
                digests.append(_number(digest.digest()))
                digest, here = blake2b(digest_size=DIGEST_BYTES), end
            counted += block.count(b"\n", here)
            digest.update(view[here:])
            at += len(block)
            ends_open = not block.endswith(b"\n")
        if offsets[-1] < at:
            lines.append(counted + ends_open)
            offsets.append(at)
            digests.append(_number(digest.digest()))
        return cls(lines, offsets, digests, seek_points)

    def read(
        self, source: Content, start: int, end: int, split: Callable[[bytes], list[T]]
    ) -> Iterator[tuple[int, list[T]]]:
        """The samples from `start` up to, without, `end`, or as many of them as there are, each list with the number of
        its first one. Reads whole segments, several in one request; `split` makes samples of one."""
        first = bisect_right(self._lines, start) - 1
        last = min(bisect_left(self._lines, end), len(self._digests))
        while first < last:
            until = max(first + 1, bisect_right(self._offsets, self._offsets[first] + source.block) - 1)
            until = min(until, last)
            base = self._offsets[first]
            content = memoryview(source.read(base, self._offsets[until]))
            found: list[T] = []
            for segment in range(first, until):
                piece = content[self._offsets[segment] - base : self._offsets[segment + 1] - base]
                if digest_of([piece]) != self._digests[segment]:
                    raise _changed(source.path, f"bytes {self._offsets[segment]} to {self._offsets[segment + 1] - 1}")
                found += split(bytes(piece))
            at = max(start, self._lines[first])
            wanted = found[at - self._lines[first] : end - self._lines[first]]
            if wanted:
                yield at, wanted
            first = until

    def encode(self, seen: Seen) -> bytes:
        header = msgspec.json.encode(_Header(seen.size, seen.version, len(self._digests)))
        body = MAGIC + header + b"\n" + b"".join(each.tobytes() for each in self._arrays(little=True))
        body += self.seek_points
        return body + blake2b(body, digest_size=DIGEST_BYTES).digest()

    @classmethod
    def decode(cls, content: bytes, path: str) -> tuple[LineIndex, Seen]:
        body, check = content[:-DIGEST_BYTES], content[-DIGEST_BYTES:]
        header, _, rest = body.removeprefix(MAGIC).partition(b"\n")
        try:
            _check_digest(body, check)
            known = msgspec.json.decode(header, type=_Header)
            parts = known.segments + 1
            marks = array("Q", rest[: 8 * (3 * parts - 1)])
            if sys.byteorder != "little":
                marks.byteswap()
        except ValueError as error:
            raise StrataError(
                Code.CORRUPT, f"{path} is no index, or damaged: {error}", hint=f"delete {path}", path=path
            ) from error
        arrays = marks[:parts], marks[parts : 2 * parts], marks[2 * parts :]
        return cls(*arrays, rest[8 * (3 * parts - 1) :]), Seen(known.size, known.version)

    def _arrays(self, *, little: bool = False) -> tuple[array[int], ...]:
        found = self._lines, self._offsets, self._digests
        if little and sys.byteorder != "little":
            found = self._lines[:], self._offsets[:], self._digests[:]
            for each in found:
                each.byteswap()
        return found


def open_index(source: Source, stores: Stores, build: Callable[[Source], LineIndex]) -> LineIndex:
    """Opens the index in the file beside the data; the first process that misses it writes it, while others of its host
    wait."""
    place = source.path + SUFFIX
    known = _load(place, stores)
    if known is not None and known[1] == source.seen:
        return known[0]
    with source.locked():
        known = _load(place, stores)
        if known is not None and known[1] == source.seen:
            return known[0]
        if known is not None and known[1].size != source.seen.size:
            raise _changed(source.path, f"it has {source.seen.size} bytes and not {known[1].size}")
        built = build(source)
        source.check_unchanged()
        if known is not None and known[0] != built:
            raise _changed(source.path, "its content differs")
        try:
            stores.put(place, built.encode(source.seen))
        except StrataError as error:
            # The index is right without its file; only the next process has to read everything again.
            _log.warning("line_index_not_saved", path=place, reason=error.message)
        return built


def _build_index(source: Source, *, gzip: bool) -> LineIndex:
    if gzip:
        # How large the content is shows at its end; text is seldom compressed to less than a tenth.
        grain = max(GRAIN, 10 * source.seen.size // MOST_SEGMENTS)
        points = Gunzipped(source).export_seek_points()
        return LineIndex.build(gunzipped_blocks(source), grain, points)
    size = source.seen.size
    return LineIndex.build(blocks_of(source, 0, size), grain_of(size))


def blocks_of(source: Source, start: int, end: int) -> Iterator[bytes]:
    """The bytes from `start` up to, without, `end`."""
    return (source.read(at, min(at + source.block, end)) for at in range(start, end, source.block))


def digest_of(blocks: Iterable[bytes | memoryview]) -> int:
    """Returns the digest of a segment, as the index has it."""
    digest = blake2b(digest_size=DIGEST_BYTES)
    for block in blocks:
        digest.update(block)
    return _number(digest.digest())


def grain_of(size: int) -> int:
    """The least size of the segments of so much content."""
    return max(GRAIN, -(-size // MOST_SEGMENTS))


def _load(place: str, stores: Stores) -> tuple[LineIndex, Seen] | None:
    content = stores.get(place)
    return None if content is None else LineIndex.decode(content, place)


class TextLines:
    """The lines of a file without their line feeds, or what `parse` makes of them; of a compressed one with `gzip`."""

    def __init__(
        self, source: Source, stores: Stores, *, parse: Callable[[bytes], Any] = bytes.decode, gzip: bool = False
    ) -> None:
        self._parse = parse
        self._gzip = gzip
        self._index = open_index(source, stores, partial(_build_index, gzip=gzip))

    @property
    def samples(self) -> int:
        return self._index.samples

    def read(self, source: Source, start: int, end: int) -> Iterator[list[Any]]:
        view = Gunzipped(source, self._index.seek_points) if self._gzip else source
        return _parsed(view, self._index.read(view, start, end, split_lines), self._parse)


def split_lines(segment: bytes) -> list[bytes]:
    return segment.removesuffix(b"\n").split(b"\n")


def parse_json(line: bytes) -> Any:
    return json.loads(line.decode())


def _parsed(
    source: Content, found: Iterable[tuple[int, list[bytes]]], parse: Callable[[bytes], Any]
) -> Iterator[list[Any]]:
    for first, lines in found:
        samples: list[Any] = []
        try:
            # What was parsed before an error stays in the list.
            samples.extend(map(parse, lines))
        except (ValueError, RecursionError) as error:
            if samples:
                yield samples
            where = f"line {first + len(samples) + 1} of {source.path}"
            raise StrataError(Code.CORRUPT, f"{where} cannot be read: {error}", path=source.path) from error
        yield samples


def _check_digest(body: bytes, digest: bytes) -> None:
    if not body.startswith(MAGIC) or blake2b(body, digest_size=DIGEST_BYTES).digest() != digest:
        raise ValueError("its digest is wrong")


def _number(digest: bytes) -> int:
    return int.from_bytes(digest, "little")


def _changed(path: str, how: str) -> StrataError:
    return StrataError(
        Code.CORRUPT,
        f"{path} has changed since its index was written: {how}",
        hint=f"delete {path}{SUFFIX} if the new content is meant, and give its dataset another name",
        path=path,
    )
