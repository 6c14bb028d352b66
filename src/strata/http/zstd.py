"""Decompresses zstd bodies within limits: ratio 100, 16 MiB free, 4,096 frames."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Final

from strata.base.errors import Code, StrataError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

__all__ = ["decompress_frames", "decompress_pieces", "decompressed_size", "zstd"]

MAX_RATIO: Final = 100
FREE_BYTES: Final = 16 << 20
"""Bytes up to which the ratio does not count: samples of one prompt repeat it, and compress far better than 100 to
1."""
MAX_FRAMES: Final = 4096
_WINDOW_LOG: Final = 27


def decompressed_size(body: bytes, limit: int) -> int:
    """Returns how large the content of the frames is: what their headers say, or the most that is allowed."""
    most = _most(body, limit)
    total = 0
    for frame in _frames(body):
        # The stubs of the module do not say that it may be unknown.
        size: int | None = zstd.get_frame_info(frame).decompressed_size
        if size is None:
            return most
        total += size
        if total > most:
            raise _too_much(most)
    return total


def decompress_frames(body: bytes, limit: int) -> bytes:
    """The content of all frames; never more than `limit` bytes of it are made, nor more than the ratio allows."""
    parts = [*decompress_pieces(body, limit, _most(body, limit) + 1)]
    if body and not parts:
        raise StrataError(Code.INVALID, "the zstd body is empty or cut off")
    return parts[0] if len(parts) == 1 else b"".join(parts)


def decompress_pieces(body: bytes, limit: int, piece: int = 1 << 20) -> Iterator[bytes]:
    """The content of all frames in pieces of at most so many bytes, and no more of it than is allowed."""
    most = _most(body, limit)
    received = 0
    try:
        for frame in _frames(body):
            decompressor = zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: _WINDOW_LOG})
            part = decompressor.decompress(frame, max_length=min(piece, most + 1 - received))
            while part or not decompressor.eof:
                received += len(part)
                if received > most:
                    raise _too_much(most)
                if not part and decompressor.needs_input:
                    raise StrataError(Code.INVALID, "the zstd body is cut off")
                yield part
                if decompressor.eof:
                    break
                part = decompressor.decompress(b"", max_length=min(piece, most + 1 - received))
    except zstd.ZstdError as error:
        raise StrataError(Code.INVALID, f"the body is not zstd: {error}") from None


def _most(body: bytes, limit: int) -> int:
    return min(limit, max(FREE_BYTES, MAX_RATIO * len(body)))


def _frames(body: bytes) -> list[memoryview]:
    frames: list[memoryview] = []
    rest = memoryview(body)
    while rest:
        if len(frames) == MAX_FRAMES:
            raise StrataError(Code.INVALID, f"the zstd body has more than {MAX_FRAMES} frames")
        try:
            size = zstd.get_frame_size(rest)
        except zstd.ZstdError as error:
            raise StrataError(Code.INVALID, f"the body is not zstd, or cut off: {error}") from None
        frames.append(rest[:size])
        rest = rest[size:]
    return frames


def _too_much(most: int) -> StrataError:
    return StrataError(Code.INVALID, f"the body has more than {most} bytes when it is unpacked")
