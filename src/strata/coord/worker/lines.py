"""Samples that are lines: text and JSONL. Only a line feed ends a line; texts may contain other separators."""

from __future__ import annotations

import json
import threading
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import Any, Final

from strata.base.errors import Code, StrataError
from strata.coord.worker.stores import Source

MARKS: Final = 65_536
"""Beyond this an index forgets every second mark: a file of any size costs at most a megabyte of memory."""


class LineIndex:
    """Where lines begin: one mark for each block of the file, as far as it was read.

    What is looked for beyond the last mark is found by reading on from there, once; counting reads to the end.
    """

    def __init__(self) -> None:
        self._lines = array("Q", [0])
        self._offsets = array("Q", [0])
        self._read = 0
        """Up to here lines are counted."""
        self._counted = 0
        self._ends_open = False
        """The last line has no line feed."""
        self._reading = threading.Lock()

    def count(self, source: Source) -> int:
        self._read_on(source, None)
        return self._counted + self._ends_open

    def begin(self, source: Source, line: int) -> tuple[int, int]:
        """The last marked line that is not after `line`, and its offset."""
        self._read_on(source, line)
        with self._reading:
            at = bisect_right(self._lines, line) - 1
            return self._lines[at], self._offsets[at]

    def end(self, line: int, size: int) -> int:
        """An offset that is not before the end of the line before `line`; the size, if that part was not read yet."""
        with self._reading:
            at = bisect_right(self._lines, line - 1)
            return self._offsets[at] if at < len(self._lines) else size

    def _read_on(self, source: Source, until: int | None) -> None:
        with self._reading:
            while self._read < source.seen.size and (until is None or self._counted <= until):
                block = source.read(self._read, min(self._read + source.block, source.seen.size))
                self._counted += block.count(b"\n")
                after = block.rfind(b"\n") + 1
                if after:
                    self._mark(self._counted, self._read + after)
                self._ends_open = after < len(block)
                self._read += len(block)

    def _mark(self, line: int, offset: int) -> None:
        self._lines.append(line)
        self._offsets.append(offset)
        if len(self._lines) > MARKS:
            self._lines = self._lines[::2]
            self._offsets = self._offsets[::2]


def text(source: Source, index: LineIndex, start: int, end: int) -> Iterator[list[Any]]:
    """The lines from `start` up to, without, `end`, or as many of them as there are; without their line feeds."""
    return _parsed(source, index, start, end, bytes.decode)


def json_lines(source: Source, index: LineIndex, start: int, end: int) -> Iterator[list[Any]]:
    """The same, as decoded JSON values."""
    return _parsed(source, index, start, end, lambda line: json.loads(line.decode()))


def _parsed(
    source: Source, index: LineIndex, start: int, end: int, parse: Callable[[bytes], Any]
) -> Iterator[list[Any]]:
    for lines in _raw(source, index, start, end):
        samples: list[Any] = []
        try:
            samples += map(parse, lines)
        except (ValueError, RecursionError) as error:
            good = _before(lines, parse)
            if good:
                yield good
            where = f"line {start + len(good) + 1} of {source.path}"
            raise StrataError(Code.CORRUPT, f"{where} cannot be read: {error}", path=source.path) from error
        yield samples
        start += len(samples)


def _before(lines: list[bytes], parse: Callable[[bytes], Any]) -> list[Any]:
    """What can be read of them before the first that cannot."""
    good: list[Any] = []
    for line in lines:
        try:
            good.append(parse(line))
        except (ValueError, RecursionError):
            break
    return good


def _raw(source: Source, index: LineIndex, start: int, end: int) -> Iterator[list[bytes]]:
    line, offset = index.begin(source, start)
    stop = index.end(end, source.seen.size)
    unfinished: list[bytes] = []
    while line < end and offset < stop:
        block = source.read(offset, min(offset + source.block, stop))
        offset += len(block)
        first, *others = block.split(b"\n")
        unfinished.append(first)
        if not others:
            # A line longer than a block: joined once, at its end.
            continue
        *whole, rest = b"".join(unfinished), *others
        unfinished = [rest]
        wanted = whole[max(0, start - line) : max(0, end - line)]
        line += len(whole)
        if wanted:
            yield wanted
    last = b"".join(unfinished)
    if start <= line < end and last:
        yield [last]
