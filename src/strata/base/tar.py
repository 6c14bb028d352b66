"""Reads a tar stream from an untrusted sender: limits of headers (64 KiB, 8 in a row), kinds of members, decompression,
and refusals.

`tarfile` is for archives of our own. It reads a pax header or a long name into memory whatever its size, follows a
chain of them by recursion, and that of CPython 3.11.7 matches them with regular expressions of quadratic time. Here the
length of such a header is checked before any of it is read. Sparse files are refused: they are longer than what was
sent.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import re
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import BinaryIO, Final, cast

from strata.base.errors import Code, StrataError

BLOCK: Final = 512
MAX_HEADER_BYTES: Final = 64 * 1024
"""The most bytes of one pax header or long name: a path of 4096 bytes, its link and extended attributes fit."""
MAX_EXTENSIONS: Final = 8
"""Headers in a row that only describe the member after them."""
_PIECE: Final = 1 << 20
_MAX_SIZE: Final = 2**63 - 1
_OCTAL: Final = re.compile(rb"[0-7]{1,12}")
_UTF8: Final = ("ISO-IR 10646 2000 UTF-8", "BINARY")
_PAX, _PAX_GLOBAL, _LONG_NAME, _LONG_LINK = (b"x", b"X"), b"g", b"L", b"K"
_SIGNED: Final = struct.Struct("512b")


class TarKind(Enum):
    FILE = "file"
    FOLDER = "folder"
    LINK = "symbolic link"
    HARD_LINK = "hard link"
    OTHER = "device, pipe or unknown"


_KINDS: Final = {
    b"0": TarKind.FILE,
    b"\0": TarKind.FILE,
    b"7": TarKind.FILE,
    b"1": TarKind.HARD_LINK,
    b"2": TarKind.LINK,
    b"5": TarKind.FOLDER,
}


@dataclass(frozen=True, slots=True)
class TarMember:
    name: str
    kind: TarKind
    size: int = 0
    """The size of a file; 0 for everything else. 0 for everything else."""
    mode: int = 0
    target: str = ""
    """What a link points at."""


def decompress_stream(stream: io.BufferedReader) -> BinaryIO:
    """The archive itself, whether it is sent as it is or compressed with gzip, bzip2 or xz."""
    magic = stream.peek(6)[:6]
    if magic.startswith(b"\x1f\x8b"):
        return cast("BinaryIO", gzip.GzipFile(fileobj=stream, mode="rb"))
    if magic.startswith(b"BZh"):
        return cast("BinaryIO", bz2.BZ2File(stream, "rb"))
    if magic.startswith((b"\xfd7zXZ\0", b"\x5d\0\0")):
        return cast("BinaryIO", lzma.LZMAFile(stream, "rb"))
    return stream


class TarReader:
    """Iterate over the members; `pieces` is the content of the member that came last."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._left = 0
        """Bytes of the last member's content that were not read yet."""
        self._padding = 0

    def __iter__(self) -> Iterator[TarMember]:
        count = 0
        while (member := self._next()) is not None:
            yield member
            count += 1
        if not count:
            raise _refusal("there is no file in it")

    def pieces(self) -> Iterator[bytes]:
        while self._left:
            piece = self._read(min(self._left, _PIECE))
            self._left -= len(piece)
            yield piece

    def _next(self) -> TarMember | None:
        described: dict[str, str] = {}
        for _ in range(MAX_EXTENSIONS):
            self._skip()
            block = self._header()
            if block is None:
                return None
            kind = block[156:157]
            if kind in _PAX:
                described |= _records(self._extension(block, "pax header"))
            elif kind == _PAX_GLOBAL:
                _check_global(_records(self._extension(block, "pax header")))
            elif kind in (_LONG_NAME, _LONG_LINK):
                key = "path" if kind == _LONG_NAME else "linkpath"
                described[key] = _text(self._extension(block, "long name"))
            else:
                return self._member(block, described)
        raise _refusal(f"more than {MAX_EXTENSIONS} headers in a row describe one file")

    def _member(self, block: bytes, described: Mapping[str, str]) -> TarMember:
        kind = _KINDS.get(block[156:157], TarKind.OTHER)
        if block[156:157] == b"S" or any(key.startswith("GNU.sparse") for key in described):
            raise _refusal("it has a sparse file")
        name = described.get("path") or _name(block)
        if kind is TarKind.FILE and name.endswith("/"):
            kind = TarKind.FOLDER
        size = 0
        if kind is TarKind.FILE:
            size = _size(described["size"]) if "size" in described else _number(block[124:136])
            self._left, self._padding = size, -size % BLOCK
        return TarMember(
            name=name,
            kind=kind,
            size=size,
            mode=_number(block[100:108]),
            target=described.get("linkpath") or _text(block[157:257]),
        )

    def _header(self) -> bytes | None:
        """The next block, or None at the end of the archive."""
        block = self._read(BLOCK, may_end=True)
        if not block or not block.strip(b"\0"):
            return None
        checksum = _number(block[148:156])
        others = sum(block[:148]) + sum(block[156:]) + 8 * ord(" ")
        signed = _SIGNED.unpack(block)
        if checksum not in (others, sum(signed[:148]) + sum(signed[156:]) + 8 * ord(" ")):
            raise _refusal("a header is damaged, or the archive is compressed in a way that is not known here")
        return block

    def _extension(self, block: bytes, what: str) -> bytes:
        size = _number(block[124:136])
        if size > MAX_HEADER_BYTES:
            raise _refusal(f"a {what} has {size} bytes; at most {MAX_HEADER_BYTES} are allowed")
        content = self._read(size)
        self._padding = -size % BLOCK
        return content

    def _skip(self) -> None:
        for _ in self.pieces():
            pass
        padding, self._padding = self._padding, 0
        self._read(padding)

    def _read(self, size: int, *, may_end: bool = False) -> bytes:
        """Exactly so many bytes; or none, at the end of the stream."""
        parts: list[bytes] = []
        missing = size
        while missing:
            try:
                part = self._stream.read(missing)
            except (OSError, EOFError, ValueError, lzma.LZMAError, zlib.error) as error:
                raise _refusal(str(error) or "it cannot be read") from error
            if not part:
                break
            parts.append(part)
            missing -= len(part)
        if missing and not (may_end and missing == size):
            raise _refusal("it ends in the middle")
        return b"".join(parts)


def _records(content: bytes) -> dict[str, str]:
    """`LENGTH KEY=VALUE\\n`, one after the other; the length counts the whole record."""
    found: dict[str, str] = {}
    at = 0
    while at < len(content):
        space = content.find(b" ", at, at + 8)
        digits = content[at:space] if space > at else b""
        end = at + int(digits) if digits.isdigit() else at
        if not at < space < end - 2 or end > len(content) or content[end - 1 : end] != b"\n":
            raise _refusal("a pax header is damaged")
        key, equals, value = content[space + 1 : end - 1].partition(b"=")
        if not equals:
            raise _refusal("a pax header is damaged")
        found[key.decode(errors="replace")] = value.decode(errors="surrogateescape")
        at = end
    if found.get("hdrcharset", _UTF8[0]) not in _UTF8:
        raise _refusal("a pax header is not in UTF-8")
    return found


def _check_global(records: Mapping[str, str]) -> None:
    """A comment, as git writes one, or times and owners, which are not kept; nothing that names or measures files."""
    for key in records:
        if key in ("path", "linkpath", "size") or key.startswith("GNU.sparse"):
            raise _refusal(f"a global pax header has {key!r}")


def _name(block: bytes) -> str:
    name = _text(block[:100])
    prefix = _text(block[345:500]) if block[257:263] == b"ustar\0" else ""
    return f"{prefix}/{name}" if prefix else name


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode(errors="surrogateescape")


def _size(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise _refusal("a size is not a number")
    return _bounded(int(text))


def _number(field: bytes) -> int:
    """Parse a number in octal digits, or in binary after a byte 0x80."""
    if field[0] == 0x80:
        return _bounded(int.from_bytes(field[1:]))
    digits = field.strip(b"\0 ")
    if not digits:
        return 0
    if not _OCTAL.fullmatch(digits):
        raise _refusal("a number in a header is damaged or negative")
    return int(digits, 8)


def _bounded(number: int) -> int:
    if number > _MAX_SIZE:
        raise _refusal("a number in a header is too large")
    return number


def _refusal(reason: str) -> StrataError:
    return StrataError(Code.INVALID, f"not a tar file that can be read: {reason}")
