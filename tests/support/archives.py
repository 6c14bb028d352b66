"""Tar files byte by byte, with headers that no program would write."""

from __future__ import annotations

_BLOCK = 512


def header(name: str, size: int, *, kind: bytes = b"0") -> bytes:
    """One header with a right checksum."""
    length = b"%011o\0" % size if size < 8**11 else b"\x80" + size.to_bytes(11)
    block = bytearray(name.encode().ljust(100, b"\0"))
    block += b"0000644\0" + b"0000000\0" * 2 + length + b"00000000000\0" + b" " * 8 + kind + bytes(100)
    block += b"ustar\x0000" + bytes(_BLOCK - len(block) - 8)
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def pax_archive(records: bytes, *, kind: bytes = b"x") -> bytes:
    """An archive of one empty file, with this in the header before it."""
    padding = bytes(-len(records) % _BLOCK)
    return header("pax", len(records), kind=kind) + records + padding + header("a", 0) + bytes(2 * _BLOCK)
