"""Samples of a shard of MosaicML Streaming (MDS), each a dict by column.

A shard says itself which columns it has and where its samples begin: `index.json`, which lists the shards of a dataset,
is not read. It has an index beside it, like a file of lines: segments of whole samples, each with its digest.

All numbers are little-endian. A shard is the number of its samples, the offsets of them and of the end, the columns as
JSON, and the samples. A sample is the sizes of those columns that have none in the JSON, and the values.
"""

from __future__ import annotations

import json
import math
import struct
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from functools import partial
from itertools import accumulate, pairwise
from typing import Annotated, Any, Final

import msgspec

from strata.base.errors import Code, StrataError
from strata.coord.worker.lines import LineIndex, digest_of, grain_of, open_index
from strata.coord.worker.stores import Source, Stores, needs

WORD: Final = 4
"""Bytes of a count, an offset or a size."""
MOST_COLUMNS_BYTES: Final = 1 << 20
"""The largest JSON of the columns; that of a thousand columns is smaller."""
SCALARS: Final = {
    "uint8": "B",
    "int8": "b",
    "uint16": "H",
    "int16": "h",
    "float16": "e",
    "uint32": "I",
    "int32": "i",
    "float32": "f",
    "uint64": "Q",
    "int64": "q",
    "float64": "d",
}
"""Types of numbers, and what `struct` calls them."""
ARRAY_CODES: Final = {
    code: name for name, code in zip(SCALARS, (8, 9, 16, 17, 18, 32, 33, 34, 64, 65, 66), strict=True)
}
"""How an array names the type of its values."""

Decode = Callable[[bytes], Any]
Column = tuple[Decode, int | None]
"""How its values are decoded, and their size, if it is the same in every sample."""


def _scalar(form: str, content: bytes) -> Any:
    (value,) = struct.unpack(f"<{form}", content)
    return value


DECODERS: Final[Mapping[str, Decode]] = {
    # An image is what its file would be: decoding is up to who reads it, as in a tar archive.
    **dict.fromkeys(("bytes", "jpeg", "png"), bytes),
    "str": bytes.decode,
    "json": lambda content: json.loads(content.decode()),
    "str_int": int,
    "str_float": float,
    "str_decimal": lambda content: Decimal(content.decode()),
    "int": partial(_scalar, "q"),
    **{name: partial(_scalar, form) for name, form in SCALARS.items()},
}


class _Columns(msgspec.Struct, frozen=True):
    column_names: list[str]
    column_encodings: list[str]
    column_sizes: list[Annotated[int, msgspec.Meta(ge=0)] | None]


class MdsSamples:
    def __init__(self, source: Source, stores: Stores) -> None:
        self._columns = _read_columns(source)
        self._index = open_index(source, stores, partial(_build_index, columns=self._columns))

    @property
    def samples(self) -> int:
        return self._index.samples

    def read(self, source: Source, start: int, end: int) -> Iterator[list[Any]]:
        found = self._index.read(source, start, end, lambda segment: list(self._decode(segment, source.path)))
        return (samples for _, samples in found)

    def _decode(self, segment: bytes, path: str) -> Iterator[dict[str, Any]]:
        try:
            for start, sizes in _samples(segment, self._columns):
                ends = accumulate(sizes, initial=start)
                values = (segment[begin:end] for begin, end in pairwise(ends))
                columns = self._columns.items()
                yield {name: decode(value) for (name, (decode, _)), value in zip(columns, values, strict=True)}
        except (ValueError, RecursionError, InvalidOperation, struct.error) as error:
            raise _corrupt(path, f"a sample cannot be read: {error}") from error


def _samples(segment: bytes, columns: Mapping[str, Column]) -> Iterator[tuple[int, list[int]]]:
    """Yields where the values of each sample begin, and their sizes."""
    at = 0
    while at < len(segment):
        sizes: list[int] = []
        for _, fixed in columns.values():
            if fixed:
                sizes.append(fixed)
            else:
                sizes += struct.unpack_from("<I", segment, at)
                at += WORD
        yield at, sizes
        at += sum(sizes)
    if at > len(segment):
        raise ValueError("its values end beyond it")


def _build_index(source: Source, columns: Mapping[str, Column]) -> LineIndex:
    """All of the shard is read: its samples have to begin where it says."""
    starts = _read_offsets(source)
    counts, offsets, digests = array("Q", [0]), array("Q", [starts[0]]), array("Q")
    grain = grain_of(source.seen.size)
    for number, start in enumerate(starts[1:], start=1):
        if start - offsets[-1] < grain and number < len(starts) - 1:
            continue
        segment = source.read(offsets[-1], start)
        _check_starts(segment, columns, [each - offsets[-1] for each in starts[counts[-1] : number + 1]], source.path)
        counts.append(number)
        offsets.append(start)
        digests.append(digest_of([segment]))
    return LineIndex(counts, offsets, digests)


def _check_starts(segment: bytes, columns: Mapping[str, Column], starts: Sequence[int], path: str) -> None:
    try:
        ends = [at + sum(sizes) for at, sizes in _samples(segment, columns)]
    except (ValueError, struct.error) as error:
        raise _corrupt(path, f"a sample cannot be read: {error}") from error
    if [0, *ends] != starts:
        raise _corrupt(path, "its samples do not begin where it says")


def _read_offsets(source: Source) -> array[int]:
    """Reads the offset of each sample, and where the last one ends."""
    size = source.seen.size
    count = _word(source, 0)
    head = WORD * (count + 2)
    if head > size:
        raise _corrupt(source.path, f"it is too short for {count} samples")
    starts = array("I", source.read(WORD, head))
    if sys.byteorder != "little":
        starts.byteswap()
    if any(first >= last for first, last in pairwise((head, *starts))) or starts[-1] != size:
        raise _corrupt(source.path, "its offsets are none of a shard of this size")
    return starts


def _read_columns(source: Source) -> dict[str, Column]:
    begin, end = WORD * (_word(source, 0) + 2), _word(source, WORD)
    if not begin < end <= min(source.seen.size, begin + MOST_COLUMNS_BYTES):
        raise _corrupt(source.path, "there is no room for its columns")
    try:
        columns = msgspec.json.decode(source.read(begin, end), type=_Columns)
        named = [*zip(columns.column_names, columns.column_encodings, columns.column_sizes, strict=True)]
        found = {name: (_decoder(encoding, source.path), size) for name, encoding, size in named}
    except ValueError as error:
        raise _corrupt(source.path, f"its columns cannot be read: {error}") from error
    if not found or len(found) < len(named):
        raise _corrupt(source.path, "it has no columns, or two of one name")
    return found


def _decoder(encoding: str, path: str) -> Decode:
    if encoding in DECODERS:
        return DECODERS[encoding]
    kind, *given = encoding.split(":")
    if kind != "ndarray" or len(given) > 2:
        raise StrataError(
            Code.UNSUPPORTED,
            f"{path} has a column of the encoding {encoding!r}, which is not read",
            hint=f"readable are {', '.join(DECODERS)} and ndarray",
            path=path,
        )
    name = given[0] if given else None
    if name is not None and name not in SCALARS:
        raise ValueError(f"an array of {name}")
    shape = tuple(map(int, given[1].split(","))) if len(given) == 2 else None
    return partial(_array, name, shape)


def _array(name: str | None, shape: tuple[int, ...] | None, content: bytes) -> Any:
    """Returns what the column does not say stands before the values: their type, and the dimensions with their size."""
    try:
        import numpy as np
    except ImportError:
        raise needs("numpy", "reading arrays") from None
    at = 0
    if name is None:
        code = content[at] if content else -1
        if code not in ARRAY_CODES:
            raise ValueError(f"an array of the type {code}")
        name, at = ARRAY_CODES[code], at + 1
    if shape is None:
        (head,) = struct.unpack_from("<B", content, at)
        form = "BHIQ"[head & 3]
        shape = struct.unpack_from(f"<{head >> 2}{form}", content, at + 1)
        at += 1 + (head >> 2) * struct.calcsize(form)
    values = np.frombuffer(content, np.dtype(name).newbyteorder("<"), offset=at)
    if values.size != math.prod(shape):
        raise ValueError(f"an array of {values.size} values and not {math.prod(shape)}")
    return values.reshape(shape)


def _word(source: Source, at: int) -> int:
    if source.seen.size < at + WORD:
        raise _corrupt(source.path, "it is too short")
    return int.from_bytes(source.read(at, at + WORD), "little")


def _corrupt(path: str, why: str) -> StrataError:
    return StrataError(Code.CORRUPT, f"{path} is no MDS shard, or damaged: {why}", path=path)
