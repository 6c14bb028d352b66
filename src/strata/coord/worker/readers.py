"""Samples from files: one for each line of text and of JSONL. Local paths only, so far."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Final

from strata.base.errors import Code, StrataError
from strata.coord.pb import coordinator_pb2 as pb

TEXT: Final = (".txt", ".text", ".md", ".csv", ".tsv")
JSON_LINES: Final = (".jsonl", ".ndjson")
_BLOCK: Final = 1 << 20


def count_samples(path: str | Path) -> int:
    """The lines of a file; a last one without a line break counts too."""
    file = _local(str(path))
    lines, last = 0, b"\n"
    try:
        with file.open("rb") as content:
            while block := content.read(_BLOCK):
                lines += block.count(b"\n")
                last = block[-1:]
    except OSError as error:
        raise StrataError(Code.INVALID, f"cannot read {file}: {error.strerror}") from error
    return lines + (last != b"\n")


def read(slices: Iterable[pb.FileSlice]) -> Iterator[Any]:
    """The samples of a shard in order: a text without its line break, or what a line of JSON says."""
    for piece in slices:
        file = _local(piece.path)
        parse = file.suffix.lower() in JSON_LINES
        taken = 0
        try:
            # Only "\n" ends a line: `count_samples` counts those, and texts may contain other separators.
            with file.open(encoding="utf-8", newline="\n") as lines:
                for line in islice(lines, piece.start_index, piece.end_index):
                    taken += 1
                    yield json.loads(line) if parse else line.removesuffix("\n")
        except OSError as error:
            raise StrataError(Code.INVALID, f"cannot read {file}: {error.strerror}") from error
        except ValueError as error:
            where = f"line {piece.start_index + taken} of {file}"
            raise StrataError(Code.CORRUPT, f"{where} cannot be read: {error}") from error
        if taken < piece.end_index - piece.start_index:
            raise StrataError(Code.CORRUPT, f"{file} has fewer samples than were registered", path=str(file))


def _local(path: str) -> Path:
    if "://" in path and not path.startswith("file://"):
        raise StrataError(Code.UNSUPPORTED, f"cannot read {path}: only local files can be read so far")
    file = Path(path.removeprefix("file://"))
    if file.suffix.lower() not in (*TEXT, *JSON_LINES):
        raise StrataError(
            Code.UNSUPPORTED,
            f"cannot read {file}: no reader for {file.suffix or 'a file without a suffix'}",
            hint=f"readable are {', '.join((*TEXT, *JSON_LINES))}; or read the shard's slices yourself",
        )
    return file
