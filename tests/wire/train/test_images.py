"""Images of clients: sizes and tokens are those of the processor of transformers, and hostile bytes are refused by
their place before they cost anything."""

from __future__ import annotations

import io
import json
import struct
import zlib
from contextlib import suppress
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tinker import types
from tinker.proto import tinker_public_pb2 as theirs
from tinker.proto.request_conv import forward_backward_request_to_proto

from strata.base.errors import Code, StrataError
from strata.train.api.images import decode_images
from strata.train.core import ops
from strata.train.core.model_options import LossName
from strata.train.images import ImageForm
from strata.train.wire import native, tinker, tinker_json
from strata.train.wire.images import MAX_PIXELS, ImageChunk, ImageChunks, read_size
from strata.train.wire.pass_request import PassRequest
from tests.support.tiny_vision import IMAGE_END, LONGEST, ROW_END, SIDE, TOKEN, encoded, photo, processed, tokens_of

FORM: Final = ImageForm(
    side=SIDE,
    longest=LONGEST,
    token=TOKEN,
    row_end=ROW_END,
    image_end=IMAGE_END,
    mean=(0.5, 0.5, 0.5),
    deviation=(0.5, 0.5, 0.5),
)
PICTURE: Final = photo(1, 100, 40)


def body(*chunks: types.ModelInputChunk, tokens: int) -> bytes:
    inputs: Any = {"target_tokens": [1] * tokens, "weights": [1.0] * tokens}
    datum = types.Datum(model_input=types.ModelInput(chunks=list(chunks)), loss_fn_inputs=inputs)
    batch = types.ForwardBackwardInput(data=[datum], loss_fn="cross_entropy", loss_fn_config=None)
    request = types.ForwardBackwardRequest(forward_backward_input=batch, model_id="s:train:0", seq_id=7)
    return forward_backward_request_to_proto(request).SerializeToString()


def text(*tokens: int) -> types.EncodedTextChunk:
    return types.EncodedTextChunk(tokens=list(tokens))


def image(data: bytes, form: Any = "png", expected: int | None = None) -> types.ImageChunk:
    return types.ImageChunk(data=data, format=form, expected_tokens=expected)


def read(content: bytes) -> PassRequest:
    request = tinker.read_pass(content, FORM)
    assert isinstance(request, PassRequest), request
    return request


def pixels_of(data: bytes, form: str = "png") -> Any:
    request = read(body(image(data, form), tokens=len(tokens_of(Image.open(io.BytesIO(data))))))
    (datum,) = decode_images(request).datums
    (found,) = datum.images
    return np.frombuffer(found.pixels, np.uint8).reshape(found.height, found.width, 3)


def png(width: int, height: int, content: bytes = b"") -> bytes:
    """A PNG that says it has this size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(content)) + chunk(b"IEND", b"")


def test_an_image_becomes_its_tokens_between_those_of_the_text() -> None:
    tokens = tokens_of(PICTURE)
    assert tokens == [*[TOKEN] * 4, ROW_END, *[TOKEN] * 4, IMAGE_END]
    chunks = (text(5, 6), image(encoded(PICTURE), expected=10), text(7), image(encoded(PICTURE)))
    request = decode_images(read(body(*chunks, tokens=23)))
    (datum,) = request.datums
    assert np.frombuffer(datum.tokens, "<i4").tolist() == [5, 6, *tokens, 7, *tokens]
    assert [(each.start, each.height, each.width) for each in datum.images] == [(2, 64, 128), (13, 64, 128)]
    assert request.operation(ops.InlinePayload(b"")).lengths == [23]
    assert ops.decode_pass_data(request.encoded()).datums == [datum]


def test_a_batch_in_json_is_the_same() -> None:
    chunks = [text(5), image(encoded(PICTURE), expected=10)]
    datum = {
        "model_input": {"chunks": [chunk.model_dump(mode="json") for chunk in chunks]},
        "loss_fn_inputs": {
            "target_tokens": {"data": [1] * 11, "dtype": "int64", "shape": [11]},
            "weights": {"data": [1.0] * 11, "dtype": "float32", "shape": [11]},
        },
    }
    batch = {"data": [datum], "loss_fn": "cross_entropy"}
    sent = {"forward_backward_input": batch, "model_id": "s:train:0", "seq_id": 7}
    request = tinker_json.read_pass(json.dumps(sent).encode(), FORM, forward_only=False)
    assert isinstance(request, PassRequest), request
    same = read(body(text(5), image(encoded(PICTURE), expected=10), tokens=11))
    assert decode_images(request).encoded() == decode_images(same).encoded()


def test_a_datum_without_images_is_the_bytes_that_it_was() -> None:
    request = read(body(text(5, 6), tokens=2))
    assert b"images" not in request.encoded()


@pytest.mark.parametrize("size", [(1, 1), (32, 32), (33, 32), (128, 128), (129, 50), (50, 200), (1000, 999), (127, 4)])
@pytest.mark.parametrize("form", ["png", "jpeg"])
def test_sizes_tokens_and_pixels_are_those_of_the_processor_of_transformers(form: str, size: tuple[int, int]) -> None:
    data = encoded(photo(3, *size), form)
    expected = processed(Image.open(io.BytesIO(data)), do_rescale=False, do_normalize=False)["pixel_values"][0]
    assert np.array_equal(pixels_of(data, form), expected.permute(1, 2, 0).numpy())


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "I;16", "CMYK"])
def test_colours_and_transparency_are_those_of_the_processor(mode: str) -> None:
    form = "jpeg" if mode == "CMYK" else "png"
    source = photo(4, 90, 70, "L").convert("I") if mode == "I;16" else photo(4, 90, 70, "RGBA").convert(mode)
    data = encoded(source.convert(mode), form, **({"transparency": 0} if mode == "P" else {}))
    expected = processed(Image.open(io.BytesIO(data)), do_rescale=False, do_normalize=False)["pixel_values"][0]
    assert np.array_equal(pixels_of(data, form), expected.permute(1, 2, 0).numpy())


def test_the_header_of_a_progressive_jpeg_with_metadata_is_read() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded(photo(5, 90, 70), "jpeg", progressive=True, exif=exif, comment=b"x" * 60_000)
    assert read_size("", ImageChunk(data, "jpeg", None)) == (70, 90)


BOMB: Final = png(40_000, 40_000, bytes(10_000_000))
WHOLE: Final = encoded(photo(6, 80, 80))


@pytest.mark.parametrize(
    ("chunk", "reason"),
    [
        (image(BOMB), f"the image has 40000x40000 pixels; at most {MAX_PIXELS} pixels are read"),
        (image(png(2**31 - 1, 2**31 - 1)), "at most"),
        (image(png(4096, 4096)), "this is no image that can be decoded as png"),
        (image(png(0, 5)), "its header cannot be read"),
        (image(png(100_000, 100)), "an image of 100000x100 pixels is too narrow to be resized"),
        (image(WHOLE[:20]), "its header cannot be read"),
        (image(WHOLE[: len(WHOLE) // 2]), "this is no image that can be decoded as png"),
        (image(WHOLE[:60] + bytes(40) + WHOLE[100:]), "this is no image that can be decoded as png"),
        (image(WHOLE, "jpeg"), "this is no image that can be decoded as jpeg: its header cannot be read"),
        (image(encoded(PICTURE, "jpeg")), "this is no image that can be decoded as png"),
        (image(encoded(PICTURE, "jpeg")[:300], "jpeg"), "this is no image that can be decoded as jpeg"),
        (image(b"\xff\xd8" + 2000 * b"\xff\xe0\x00\x02" + encoded(PICTURE, "jpeg")[2:], "jpeg"), "header"),
        (image(encoded(PICTURE, "jpeg") + 101 * b"\xff\xda\x00\x08\x01\x01\x00\x00\x3f\x00", "jpeg"), "its header"),
        (image(b""), "its header cannot be read"),
        (image(b"<svg/>"), "its header cannot be read"),
        (image(WHOLE, expected=3), "expected_tokens is 3, and 80x80 pixels are 12 tokens"),
    ],
)  # fmt: skip
def test_a_wrong_image_is_refused_with_its_place_and_the_reason(chunk: types.ImageChunk, reason: str) -> None:
    said = complaint(chunk)
    assert said.startswith("data[0].model_input[1]: ")
    assert reason in said


def complaint(chunk: types.ImageChunk) -> str:
    """Targets as many as the tokens, so that nothing but the image is wrong."""
    chunks = ImageChunks(FORM)
    try:
        tokens = len(chunks.place("", 0, 0, ImageChunk(chunk.data, chunk.format, None))) // 4
    except StrataError:
        tokens = 1
    request = tinker.read_pass(body(text(1), chunk, tokens=1 + tokens), FORM)
    if isinstance(request, ops.MalformedOperation):
        return request.message
    with pytest.raises(StrataError) as caught:
        decode_images(request)
    assert caught.value.code is Code.INVALID
    return caught.value.message


def test_other_formats_and_addresses_are_refused() -> None:
    message = theirs.ForwardBackwardRequest()
    message.ParseFromString(body(text(1), image(encoded(PICTURE, "gif")), tokens=1))
    message.data[0].model_input[1].image.format = "gif"
    refused = tinker.read_pass(message.SerializeToString(), FORM)
    assert isinstance(refused, ops.MalformedOperation)
    assert "data[0].model_input[1]: images are read as png or jpeg, not as 'gif'" in refused.message
    pointer = {"type": "image_asset_pointer", "format": "png", "location": "file:///etc/passwd", "expected_tokens": 3}
    sent = {
        "forward_backward_input": {
            "data": [{"model_input": {"chunks": [pointer]}, "loss_fn_inputs": {}}],
            "loss_fn": "cross_entropy",
        },
        "model_id": "s:train:0",
        "seq_id": 7,
    }
    pointed = tinker_json.read_pass(json.dumps(sent).encode(), FORM, forward_only=False)
    assert isinstance(pointed, ops.MalformedOperation)
    assert "data[0].model_input.chunks[0]: this server trains on tokens, not on image_asset_pointer" in pointed.message


def test_many_images_of_one_request_are_refused_together() -> None:
    chunks = ImageChunks(FORM)
    large = ImageChunk(png(4096, 4096), "png", None)
    for number in range(4):
        chunks.place(f"data[{number}]", number, 0, large)
    with pytest.raises(StrataError, match=r"data\[4\]: the images of a request have at most 67108864 pixels together"):
        chunks.place("data[4]", 4, 0, large)
    tiny, smallest = ImageChunks(FORM), ImageChunk(png(1, 1), "png", None)
    for _ in range((1 << 26) // SIDE**2):
        tiny.place("data[0]", 0, 0, smallest)
    with pytest.raises(StrataError, match="together"):
        tiny.place("data[0]", 0, 0, smallest)


def test_a_model_without_images_refuses_them_as_it_did_with_the_reason() -> None:
    refused = tinker.read_pass(body(text(1), image(WHOLE), tokens=1), "llama takes no images here")
    assert isinstance(refused, ops.MalformedOperation)
    said = "data[0].model_input[1]: this server trains on tokens, not on image: llama takes no images here"
    assert refused.message == said


def test_pixels_that_a_client_made_itself_are_refused() -> None:
    datum = ops.Datum(b"\x01\x00\x00\x00", {}, [ops.Image(0, 32, 32, bytes(3072))])
    sent = native.encode(native.PassBody(model_id="m", seq_id=1, loss="cross_entropy", datums=[datum]))
    refused = native.read_pass(sent)
    assert isinstance(refused, ops.MalformedOperation)
    assert "images are taken as chunks of the tinker protocol alone" in refused.message


@given(st.binary(max_size=200), st.sampled_from(["png", "jpeg"]), st.booleans())
def test_no_bytes_have_a_header_that_breaks_the_reader(data: bytes, form: str, begun: bool) -> None:
    start = {"png": WHOLE[:16], "jpeg": b"\xff\xd8\xff"}[form] if begun else b""
    with suppress(StrataError):
        height, width = read_size("x", ImageChunk(start + data, form, None))
        assert 0 < height * width <= MAX_PIXELS


@given(st.data(), st.sampled_from(["png", "jpeg"]))
def test_no_damage_to_an_image_ends_in_another_error(data: st.DataObject, form: str) -> None:
    damaged = bytearray(encoded(photo(7, 40, 30), form))
    for place in data.draw(st.lists(st.integers(0, len(damaged) - 1), min_size=1, max_size=8)):
        damaged[place] = data.draw(st.integers(0, 255))
    chunks = ImageChunks(FORM)
    with suppress(StrataError):
        chunks.place("x", 0, 0, ImageChunk(bytes(damaged), form, None))
        decode_images(
            PassRequest("m", 1, LossName.CROSS_ENTROPY, {}, False, [ops.Datum(b"", {})], images=chunks.pending)
        )
