"""Decodes the images of a pass with Pillow: from bytes that a client sent to the pixels that ranks get.

The bytes are hostile. Their header was read before (`wire/images`), and Pillow has to find the same size in it. Each
format has its own decoder, so that none is guessed. What is in an image besides its pixels is not used.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections import defaultdict
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

import msgspec

from strata.train.combinations import combination_of
from strata.train.core import ops
from strata.train.images import ImageForm, find_image_form
from strata.train.settings import ServerSettings
from strata.train.wire.images import PendingImage, unreadable
from strata.train.wire.pass_request import PassRequest

if TYPE_CHECKING:
    from PIL.Image import Image

_BROKEN: Final = (
    EOFError, IndexError, KeyError, OSError, OverflowError, SyntaxError, TypeError, ValueError, struct.error,
    zlib.error,
)  # fmt: skip
"""What Pillow raises for bytes that are no such image."""


def image_form(settings: ServerSettings) -> ImageForm | str:
    """Returns how this server takes images, or why it takes none."""
    form = find_image_form(settings.model.path, combination_of(settings))
    if isinstance(form, ImageForm) and find_spec("PIL") is None:
        return "Pillow is not installed: pip install 'strata-train[images]'"
    return form


def decode_images(request: PassRequest) -> PassRequest:
    """The request with the pixels of its images. INVALID, with the place, if one cannot be decoded."""
    images: defaultdict[int, list[ops.Image]] = defaultdict(list)
    for pending in request.images:
        height, width = pending.resized
        images[pending.datum].append(ops.Image(pending.start, height, width, _pixels(pending)))
    datums = [
        msgspec.structs.replace(datum, images=images[number]) if number in images else datum
        for number, datum in enumerate(request.datums)
    ]
    return replace(request, datums=datums, images=())


def _pixels(pending: PendingImage) -> bytes:
    from PIL.Image import Resampling
    from PIL.JpegImagePlugin import JpegImageFile
    from PIL.PngImagePlugin import PngImageFile

    chunk = pending.chunk
    decoder = {"png": PngImageFile, "jpeg": JpegImageFile}[chunk.format]
    try:
        with decoder(io.BytesIO(chunk.data)) as image:
            if image.size != pending.size[::-1]:
                raise unreadable(pending.path, chunk, "its header names several sizes")
            plain = _to_rgb(image)
    except _BROKEN as error:
        raise unreadable(pending.path, chunk, str(error)[:80]) from None
    return plain.resize(pending.resized[::-1], Resampling.BICUBIC).tobytes()


def _to_rgb(image: Image) -> Image:
    """Red, green and blue, on white where the image is transparent."""
    from PIL.Image import alpha_composite, new

    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    white = new("RGBA", image.size, (255, 255, 255, 255))
    return alpha_composite(white, image.convert("RGBA")).convert("RGB")
