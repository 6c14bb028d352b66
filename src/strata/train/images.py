"""How a model takes images: what the files of its checkpoint say of sizes, tokens and colours, and why a server takes
none.

API servers and ranks read the same files, so that both know which tokens stand for an image.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from strata.base.errors import Code, StrataError
from strata.train.combinations import Combination, assess
from strata.train.hugging_face import CONFIG, find_folder
from strata.train.plan.model_files import read_config

T = TypeVar("T")
PREPROCESSOR: Final = "preprocessor_config.json"
PROCESSOR: Final = "processor_config.json"
TOKENIZER: Final = "tokenizer.json"
SPECIAL: Final = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
"""A square of an image, the end of a row, the end of the image."""
_BICUBIC: Final = 3
"""The number of the filter in Pillow, which transformers stores."""
Colour = tuple[float, float, float]


class ImageForm(msgspec.Struct, frozen=True, kw_only=True):
    """The images that a model takes: shrunk to `longest`, and cut into squares of `side` pixels that are a token each.
    A row of squares ends with a token, and the last one with another."""

    side: int
    longest: int
    token: int
    row_end: int
    image_end: int
    mean: Colour
    deviation: Colour

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """The height and width to which an image is resized; zero for one that is too narrow for any token."""
        ratio = max(height / self.longest, width / self.longest)
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        return -(-height // self.side) * self.side, -(-width // self.side) * self.side

    def tokens(self, height: int, width: int) -> Sequence[int]:
        """The tokens of a resized image."""
        row = [self.token] * (width // self.side) + [self.row_end]
        return [*(row * (height // self.side))[:-1], self.image_end]


class _VisionConfig(msgspec.Struct):
    patch_size: int = 14


class _Config(msgspec.Struct):
    """Defaults are those of the family."""

    vision_config: _VisionConfig
    spatial_merge_size: int = 2
    image_token_index: int = 10


class _ImageProcessor(msgspec.Struct):
    image_processor_type: str
    image_mean: Colour
    image_std: Colour
    size: Mapping[str, int | None]
    do_resize: bool = True
    do_rescale: bool = True
    do_normalize: bool = True
    do_convert_rgb: bool = True
    resample: int = _BICUBIC
    rescale_factor: float = 1 / 255


class _Processor(msgspec.Struct):
    image_processor: _ImageProcessor | None = None


class _Token(msgspec.Struct):
    id: int
    content: str


class _Tokenizer(msgspec.Struct):
    added_tokens: Sequence[_Token] = ()


def find_image_form(model: str, combination: Combination) -> ImageForm | str:
    """Returns how this model takes images in a server of these settings, or why it takes none."""
    folder = find_folder(model)
    if folder is None:
        return "the files of the model are not here"
    try:
        verdict = assess(msgspec.structs.replace(combination, images=True, config=read_config(folder)))
        if verdict.level == "refused":
            return verdict.why if verdict.features == ("images",) else verdict.message
        return read_image_form(folder)
    except StrataError as error:
        return error.message


def read_image_form(folder: Path) -> ImageForm:
    """UNSUPPORTED if a file is missing, or asks for what is not computed here."""
    config = _read(folder / CONFIG, _Config)
    has_processor = (folder / PROCESSOR).is_file()
    nested = _read(folder / PROCESSOR, _Processor).image_processor if has_processor else None
    processor = nested or _read(folder / PREPROCESSOR, _ImageProcessor)
    longest = processor.size.get("longest_edge")
    steps = (processor.do_resize, processor.do_rescale, processor.do_normalize, processor.do_convert_rgb)
    if (
        not processor.image_processor_type.startswith("PixtralImageProcessor")
        or not all(steps)
        or processor.resample != _BICUBIC
        or not math.isclose(processor.rescale_factor, 1 / 255)
        or not longest
    ):
        raise StrataError(Code.UNSUPPORTED, f"its {PREPROCESSOR} asks for what is not computed here")
    ids = {token.content: token.id for token in _read(folder / TOKENIZER, _Tokenizer).added_tokens}
    if missing := [name for name in SPECIAL if name not in ids]:
        raise StrataError(Code.UNSUPPORTED, f"its {TOKENIZER} has no token {missing[0]}")
    token, row_end, image_end = (ids[name] for name in SPECIAL)
    if token != config.image_token_index:
        raise StrataError(Code.UNSUPPORTED, f"its {TOKENIZER} and its {CONFIG} have different tokens for images")
    return ImageForm(
        side=config.vision_config.patch_size * config.spatial_merge_size,
        longest=longest,
        token=token,
        row_end=row_end,
        image_end=image_end,
        mean=processor.image_mean,
        deviation=processor.image_std,
    )


def _read(file: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError) as error:
        raise StrataError(Code.UNSUPPORTED, f"its {file.name} cannot be read: {error}") from None
