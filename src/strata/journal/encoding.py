"""Encodes a batch of facts as one blob with a checksum, and words the errors of corrupt ones.

A commit stores a single row however many facts it carries. That is what lets a batch append outrun one row per fact,
and a replay of a million facts take seconds. msgpack's array of byte strings is the frame; crc32 finds bytes that
changed at rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

import msgspec

from strata.base.errors import Code, StrataError
from strata.journal.port import Batch, Snapshot

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[bytes]).decode


def pack(facts: Sequence[bytes]) -> tuple[bytes, int]:
    """The blob of a batch and its checksum."""
    blob = _encode(facts)
    return blob, crc32(blob)


def unpack(stream: str, first: int, epoch: int, blob: bytes, checksum: int) -> Batch:
    if crc32(blob) != checksum:
        raise _corrupt(stream, f"the batch at position {first}")
    return Batch(first, epoch, _decode(blob))


def checksum_of(state: bytes) -> int:
    return crc32(state)


def checked_snapshot(stream: str, position: int, epoch: int, state: bytes, checksum: int) -> Snapshot:
    if crc32(state) != checksum:
        raise _corrupt(stream, f"the snapshot at position {position}")
    return Snapshot(position, epoch, state)


def _corrupt(stream: str, what: str) -> StrataError:
    return StrataError(
        Code.CORRUPT,
        f"{what} of stream {stream!r} is not what was written: its checksum differs",
        hint="restore the database from a backup; nothing was changed",
        stream=stream,
    )
