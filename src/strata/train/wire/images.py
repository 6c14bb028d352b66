"""Images in passes of clients: size limits, formats (PNG, JPEG), the tokens that stand for an image, and the wording of
refusals.

Nothing is decoded here. The size of an image is read from its header, and with it all that the request may become is
known before any pixel is: `expected_tokens`, the length of the datum, the memory. An image comes as bytes; no path and
no address is followed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple

import numpy as np

from strata.base.errors import StrataError
from strata.train.images import ImageForm
from strata.train.wire.fields import invalid_field

MAX_PIXELS: Final = 1 << 24
"""Pixels of one image as it is sent: a photo of 4,000 by 4,000."""
MAX_REQUEST_PIXELS: Final = 1 << 26
"""Pixels of all images of a request, sent or resized, whichever are more."""
MAX_SEGMENTS: Final = 1000
"""Segments of a JPEG before its size."""
NO_IMAGES: Final = "the model takes no images here"
MAX_SCANS: Final = 100
"""Scans of a JPEG, each of which passes over the whole image; a progressive one has about ten."""
_PNG: Final = struct.Struct(">8sI4sII")
_SCAN: Final = b"\xff\xda"
_SIGNATURE: Final = b"\x89PNG\r\n\x1a\n"
_STARTS_OF_FRAME: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
Size = tuple[int, int]
"""Height and width."""


class ImageChunk(NamedTuple):
    """An image as a client sent it."""

    data: bytes
    format: str
    expected_tokens: int | None


class PendingImage(NamedTuple):
    """An image whose header was read, and that is to be decoded."""

    path: str
    """The place of its chunk in the request."""
    datum: int
    start: int
    """The first of its tokens in the datum."""
    chunk: ImageChunk
    size: Size
    resized: Size


class ImageChunks:
    """The images of one request."""

    def __init__(self, form: ImageForm | str) -> None:
        """`form` may be the reason why there are none."""
        self._form = form
        self._pixels = 0
        self.pending: list[PendingImage] = []

    def place(self, path: str, datum: int, start: int, chunk: ImageChunk) -> bytes:
        """The tokens of an image that begins at this token of a datum."""
        if isinstance(self._form, str):
            raise invalid_field(path, f"this server trains on tokens, not on image: {self._form}")
        size = read_size(path, chunk)
        resized = self._form.resized(*size)
        if not all(resized):
            raise invalid_field(path, f"an image of {_spelled(size)} is too narrow to be resized")
        tokens = self._form.tokens(*resized)
        if chunk.expected_tokens is not None and chunk.expected_tokens != len(tokens):
            raise invalid_field(
                path, f"expected_tokens is {chunk.expected_tokens}, and {_spelled(size)} are {len(tokens)} tokens"
            )
        self._pixels += max(size[0] * size[1], resized[0] * resized[1])
        if self._pixels > MAX_REQUEST_PIXELS:
            raise invalid_field(path, f"the images of a request have at most {MAX_REQUEST_PIXELS} pixels together")
        self.pending.append(PendingImage(path, datum, start, chunk, size, resized))
        return np.asarray(tokens, "<i4").tobytes()


def _spelled(size: Size) -> str:
    return f"{size[1]}x{size[0]} pixels"


def read_size(path: str, chunk: ImageChunk) -> Size:
    """The size in the header. INVALID if it is no such image, or too large."""
    if chunk.format not in _READERS:
        raise invalid_field(path, f"images are read as {' or '.join(_READERS)}, not as {chunk.format[:80]!r}")
    size = _READERS[chunk.format](chunk.data)
    if size is None or not all(size):
        raise unreadable(path, chunk)
    if size[0] * size[1] > MAX_PIXELS:
        raise invalid_field(path, f"the image has {_spelled(size)}; at most {MAX_PIXELS} pixels are read")
    return size


def unreadable(path: str, chunk: ImageChunk, why: str = "its header cannot be read") -> StrataError:
    return invalid_field(path, f"this is no image that can be decoded as {chunk.format}: {why}")


def _png_size(data: bytes) -> Size | None:
    if len(data) < _PNG.size:
        return None
    signature, _, kind, width, height = _PNG.unpack_from(data)
    return (height, width) if (signature, kind) == (_SIGNATURE, b"IHDR") else None


def _jpeg_size(data: bytes) -> Size | None:
    if data.count(_SCAN) > MAX_SCANS:
        return None
    for marker, at in _segments(data):
        if marker in _STARTS_OF_FRAME and at + 7 <= len(data):
            height, width = struct.unpack_from(">HH", data, at + 3)
            return height, width
    return None


def _segments(data: bytes) -> Iterator[tuple[int, int]]:
    """The markers of the first segments that have a length, and where that stands."""
    at = 2 if data.startswith(b"\xff\xd8") else len(data)
    for _ in range(MAX_SEGMENTS):
        if at + 4 > len(data) or data[at] != 0xFF:
            return
        marker = data[at + 1]
        yield marker, at + 2
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")


_READERS: Final[Mapping[str, Callable[[bytes], Size | None]]] = {"png": _png_size, "jpeg": _jpeg_size}
