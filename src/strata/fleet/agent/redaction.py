"""Replaces the values of secrets (8 characters or more) by asterisks in logs, metrics and errors before they are
uploaded.

Metrics are JSON, and logs often: a value is also found as any JSON library spells it, with `\\/` and `\\u003c` too. It
is replaced by as many asterisks, so that offsets in a log stay what they are and a line of JSON stays one.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import Final

MIN_LENGTH: Final = 8
"""Parts of a value that are shorter would damage the text around them."""
_MASK: Final = b"*"
_HIGH: Final = rb"u[dD][89abAB][0-9a-fA-F]{2}"
_HALF: Final = _HIGH + rb"(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?)?\Z"
"""A character outside the Basic Multilingual Plane is two escapes, of which the second is not written to its end."""
_ESCAPE: Final = re.compile(
    rb"\\(?:" + _HIGH + rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?!" + _HALF + rb")u[0-9a-fA-F]{4}|[\"\\/bfnrt])"
)
_LONGEST_ESCAPE: Final = 6
"""Bytes for one unit of UTF-16."""
_CUT: Final = re.compile(rb"\\(?:" + _HALF + rb"|(?:u[0-9a-fA-F]{0,3})?\Z)")
"""The beginning of an escape at the end, whose rest is not written yet."""
_SHORT: Final = {b'\\"': b'"', b"\\\\": b"\\", b"\\/": b"/"} | {
    b"\\b": b"\b", b"\\f": b"\f", b"\\n": b"\n", b"\\r": b"\r", b"\\t": b"\t"
}  # fmt: skip


class Redactor:
    """Knows the values; without any it changes nothing."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        values = {value for text in secrets for value in (text, *text.splitlines()) if len(value) >= MIN_LENGTH}
        encoded = {value.encode(errors="surrogateescape") for value in values}
        self._values = sorted(encoded, key=len, reverse=True)
        units = max((len(value.encode("utf-16-le", "surrogatepass")) // 2 for value in values), default=0)
        self.reach = max(_LONGEST_ESCAPE * units - 1, 0)
        """How many bytes before and after a place decide whether it belongs to a value."""

    def redact(self, content: bytes) -> bytes:
        masked = bytearray(content)
        for start, end in self._occurrences(content):
            masked[start:end] = _MASK * (end - start)
        for unescaped in self._readings(content):
            for start, end in self._occurrences(unescaped.text):
                first, last = unescaped.place(start)[0], unescaped.place(end - 1)[1]
                masked[first:last] = _MASK * (last - first)
        return bytes(masked)

    def redact_text(self, text: str) -> str:
        return self.redact(text.encode(errors="surrogateescape")).decode(errors="surrogateescape")

    def unfinished(self, content: bytes) -> int:
        """Returns how many bytes at the end may be the beginning of a value whose rest is not written yet."""
        unfinished = self._begun(content)
        for unescaped in self._readings(content):
            end = unescaped.find_cut()
            text = unescaped.text[: len(unescaped.text) - (len(content) - end)]
            begun = self._begun(text)
            start = unescaped.place(len(text) - begun)[0] if begun else end
            unfinished = max(unfinished, len(content) - start)
        return unfinished

    def _occurrences(self, text: bytes) -> Iterator[tuple[int, int]]:
        """Every one, also one that overlaps another: the result does not depend on where the text begins."""
        for value in self._values:
            start = text.find(value)
            while start >= 0:
                yield start, start + len(value)
                start = text.find(value, start + 1)

    def _begun(self, text: bytes) -> int:
        return max((_common(text, value) for value in self._values), default=0)

    def _readings(self, content: bytes) -> Iterator[_Unescaped]:
        if self._values and b"\\" in content:
            yield _Unescaped(content, 0)
            if content.startswith(b"\\"):
                # It may be the second half of an escape.
                yield _Unescaped(content, 1)


class _Unescaped:
    """A text in which each escape of JSON stands for its character, and where its bytes come from."""

    def __init__(self, content: bytes, start: int) -> None:
        self.text = content[:start] + _ESCAPE.sub(lambda escape: _character(escape[0]), content[start:])
        self._content = content
        self._start = start
        self._places: list[tuple[int, int, int]] | None = None

    def find_cut(self) -> int:
        """Returns where an escape begins whose rest is not written yet; else the end of the content."""
        last = self._start
        for escape in _ESCAPE.finditer(self._content, self._start):
            last = escape.end()
        cut = _CUT.search(self._content, last)
        return len(self._content) if cut is None else cut.start()

    def place(self, index: int) -> tuple[int, int]:
        """Returns where the byte of the text at `index` begins and ends in the content; with the rest of its escape."""
        if self._places is None:
            self._places = list(self._find_places())
        at, begin, end = self._places[bisect_right(self._places, index, key=lambda each: each[0]) - 1]
        return (begin, end) if end else (begin + index - at, begin + index - at + 1)

    def _find_places(self) -> Iterator[tuple[int, int, int]]:
        """Index in the text, beginning in the content, and the end of an escape; 0 for a run of other bytes."""
        at = position = 0
        yield 0, 0, 0
        for escape in _ESCAPE.finditer(self._content, self._start):
            at += escape.start() - position
            yield at, escape.start(), escape.end()
            at, position = at + len(_character(escape[0])), escape.end()
            yield at, position, 0


def _character(escape: bytes) -> bytes:
    short = _SHORT.get(escape)
    if short is not None:
        return short
    units = bytes.fromhex(escape.replace(b"\\u", b"").decode())
    return units.decode("utf-16-be", "surrogatepass").encode(errors="surrogatepass")


def _common(content: bytes, value: bytes) -> int:
    """The length of the longest proper prefix of the value that the content ends with."""
    return next((size for size in range(min(len(value) - 1, len(content)), 0, -1) if content.endswith(value[:size])), 0)
