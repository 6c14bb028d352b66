"""Reads TOML and finds the line of a key, with the wording of syntax errors.

The standard parser validates but keeps no positions, so a second, forgiving pass finds them: it may assume that the
text is valid TOML and only has to distinguish keys, strings and brackets. It runs when a line is first requested.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Final

from strata.base.errors import Code, StrataError

Key = str | int
"""A step of a path: the name of a key, or the index in an array."""


class TomlDocument:
    """Parsed TOML. `data` is what `tomllib` made of the text, `source` is what messages call the text."""

    def __init__(self, data: dict[str, Any], text: str, source: str) -> None:
        self.data = data
        self.source = source
        self._text = text

    @cached_property
    def _root(self) -> _LineNode:
        return _Scanner(self._text).scan()

    def line(self, path: Sequence[Key]) -> int | None:
        """The line of the last key of `path`, or of the nearest thing around it; None where only the document is."""
        place = self._root
        for key in path:
            inner = place.inner.get(key) if place.inner is not None else None
            if inner is None:
                break
            place = inner
        return place.line or None

    def where(self, path: Sequence[Key]) -> str:
        """`source:line` for a message, or the source alone."""
        line = self.line(path)
        return self.source if line is None else f"{self.source}:{line}"


def parse(text: str, source: str) -> TomlDocument:
    text = text.removeprefix("\ufeff")
    try:
        return TomlDocument(tomllib.loads(text), text, source)
    except tomllib.TOMLDecodeError as error:
        raise _syntax_error(str(error), text, source) from error
    except RecursionError as error:
        raise StrataError(Code.INVALID, f"{source}: arrays or tables are nested too deeply", source=source) from error
    except ValueError as error:
        # Python refuses to read integers of thousands of digits, and tomllib lets that through as it is.
        raise StrataError(Code.INVALID, f"{source}: not valid TOML: {error}", source=source) from error


_POSITION: Final = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")


def _syntax_error(message: str, text: str, source: str) -> StrataError:
    found = _POSITION.search(message)
    if found and found[1]:
        line, column = int(found[1]), int(found[2])
    else:
        line, column = text.count("\n") + 1, len(text) - text.rfind("\n")
    reason = message[: found.start()] if found else message
    return StrataError(
        Code.INVALID,
        f"{source}:{line}:{column}: not valid TOML: {reason}",
        source=source,
        line=line,
        column=column,
    )


# Possessive quantifiers throughout: no backtracking, so the pass stays linear on any text.
_BASIC: Final = r'"(?:[^"\\\n]++|\\.)*+"'
_LITERAL: Final = r"'[^'\n]*+'"
_LONG_BASIC: Final = r'"""(?:[^"\\]++|\\[\s\S]|"{1,2}(?!"))*+"{3,5}'
_LONG_LITERAL: Final = r"'''(?:[^']++|'{1,2}(?!'))*+'{3,5}"
_SCALAR: Final = re.compile(rf"{_LONG_BASIC}|{_LONG_LITERAL}|{_BASIC}|{_LITERAL}|[^,\]}}#\n]*+")
_KEY: Final = re.compile(rf"[ \t]*+([A-Za-z0-9_-]++|{_BASIC}|{_LITERAL})[ \t]*+(\.?)")
_BLANK: Final = re.compile(r"(?:[ \t\r\n]++|#[^\n]*+)*+")
_BETWEEN: Final = re.compile(r"(?:[ \t\r\n,]++|#[^\n]*+)*+")
_EQUALS: Final = re.compile(r"=[ \t]*+")


class _LineNode:
    """A key or an array element: the line it was written on (0 for the document) and what is inside it."""

    __slots__ = ("inner", "last", "line")

    def __init__(self, line: int) -> None:
        self.line = line
        self.inner: dict[Key, _LineNode] | None = None
        self.last: _LineNode | None = None
        """The newest element, if this is an array of tables: the one that later headers speak about."""

    def at(self, key: Key, line: int) -> _LineNode:
        if self.inner is None:
            self.inner = {}
        place = self.inner.get(key)
        if place is None:
            place = self.inner[key] = _LineNode(line)
        return place


class _Scanner:
    """One pass over valid TOML. Nesting is kept on a list, not on the call stack."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._pos = 0
        self._line = 1
        self._root = _LineNode(0)

    def scan(self) -> _LineNode:
        table = self._root
        while True:
            self._skip(_BLANK)
            if self._pos >= len(self._text):
                return self._root
            if self._text[self._pos] == "[":
                table = self._header()
            else:
                self._values(self._key(table))

    def _header(self) -> _LineNode:
        array = self._text.startswith("[[", self._pos)
        self._pos += 2 if array else 1
        place = self._root
        for name in self._names():
            place = (place.last or place).at(name, self._line)
        self._pos += 2 if array else 1
        if array:
            place.last = place.at(len(place.inner or ()), self._line)
            return place.last
        # `[a.b]` may come before `[a]`; the header that names the table itself is the better match.
        place.line = self._line
        return place

    def _key(self, table: _LineNode) -> _LineNode:
        place = table
        for name in self._names():
            place = place.at(name, self._line)
        self._take(_EQUALS)
        return place

    def _values(self, place: _LineNode) -> None:
        """Pass the value of `place` and everything nested in it."""
        # An open array with the index of its next element, or an open inline table with None.
        nesting: list[tuple[_LineNode, int | None]] = []
        while True:
            opening = self._text[self._pos : self._pos + 1]
            if opening in {"[", "{"}:
                self._pos += 1
                nesting.append((place, 0 if opening == "[" else None))
            else:
                self._skip(_SCALAR)
            following = self._next_in(nesting)
            if following is None:
                return
            place = following

    def _next_in(self, nesting: list[tuple[_LineNode, int | None]]) -> _LineNode | None:
        """Close what closes here; the place of the next value, or None when the outermost value is over."""
        while nesting:
            self._skip(_BETWEEN)
            if self._text[self._pos] in "]}":
                self._pos += 1
                nesting.pop()
                continue
            outer, index = nesting[-1]
            if index is None:
                return self._key(outer)
            nesting[-1] = (outer, index + 1)
            return outer.at(index, self._line)
        return None

    def _names(self) -> list[str]:
        names = []
        more = "."
        while more:
            found = self._take(_KEY)
            names.append(_unquote_key(found[1]))
            more = found[2]
        return names

    def _skip(self, pattern: re.Pattern[str]) -> None:
        start = self._pos
        self._line += self._text.count("\n", start, self._take(pattern).end())

    def _take(self, pattern: re.Pattern[str]) -> re.Match[str]:
        found = pattern.match(self._text, self._pos)
        assert found is not None, f"the scanner lost its place at line {self._line}"
        self._pos = found.end()
        return found


def _unquote_key(raw: str) -> str:
    if raw[0] == "'":
        return raw[1:-1]
    if raw[0] != '"':
        return raw
    if "\\" not in raw:
        return raw[1:-1]
    spelled = tomllib.loads(f"key = {raw}")["key"]
    assert isinstance(spelled, str)
    return spelled
