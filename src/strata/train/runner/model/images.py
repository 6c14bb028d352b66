"""Images in rows: validation of those of a datum, and what the frozen tower and projector of the model compute of them.

Each image is computed alone, so that its numbers do not depend on its neighbours. Tower and projector have no gradient:
adapters are in the text model alone. What comes out takes the place of the embeddings of the image's tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from transformers import PreTrainedModel

from strata.base.errors import Code, StrataError
from strata.train.core import ops
from strata.train.images import ImageForm
from strata.train.runner.passes.logprobs import RowImage
from strata.train.runner.passes.packed_row import DatumImage

CHANNELS: Final = 3
TOWER_ATTENTION: Final = "sdpa"
"""Eager attention would have a matrix of all patches for each head in memory."""


def read_images(datum: ops.Datum, form: ImageForm | str) -> Sequence[DatumImage]:
    """The images of a datum. UNSUPPORTED if the model takes none, INVALID if its tokens are not those of its images."""
    if not datum.images:
        return ()
    if isinstance(form, str):
        raise StrataError(Code.UNSUPPORTED, f"it has images: {form}")
    tokens = np.frombuffer(datum.tokens, "<i4")
    return [_read_image(image, tokens, form) for image in datum.images]


def _read_image(image: ops.Image, tokens: np.ndarray[Any, Any], form: ImageForm) -> DatumImage:
    fits = len(image.pixels) == CHANNELS * image.height * image.width > 0
    expected = form.tokens(image.height, image.width) if fits else ()
    start, end = image.start, image.start + len(expected)
    is_cut = image.height % form.side == image.width % form.side == 0
    if not expected or not is_cut or start < 0 or tokens[start:end].tolist() != expected:
        raise StrataError(Code.INVALID, f"the image at token {start} is not what its tokens say")
    pixels = np.frombuffer(image.pixels, np.uint8).reshape(image.height, image.width, CHANNELS)
    return DatumImage(pixels, start + np.flatnonzero(np.asarray(expected) == form.token))


def filler(form: ImageForm) -> DatumImage:
    """The smallest image, which is no token of any datum."""
    return DatumImage(np.zeros((form.side, form.side, CHANNELS), np.uint8), np.zeros(0, np.int64))


class TowerEncoder:
    """The tower and the projector of a model of the family mistral3."""

    def __init__(self, lm: PreTrainedModel, form: ImageForm) -> None:
        """UNSUPPORTED if the model has other sizes and tokens than its files say."""
        config: Any = lm.config
        side = config.vision_config.patch_size * config.spatial_merge_size
        if (side, config.image_token_id) != (form.side, form.token):
            raise StrataError(Code.UNSUPPORTED, "its configuration has other images than its processor")
        self._lm: Any = lm
        self._form = form

    def attention(self, kernel: str) -> dict[str, str]:
        return {"": kernel, "text_config": kernel, "vision_config": TOWER_ATTENTION}

    def inputs(self, pixels: torch.Tensor, count: int = 1) -> dict[str, Any]:
        """Returns what the model's own `forward` takes of so many copies of an image."""
        form = self._form
        mean = torch.tensor(form.mean, device=pixels.device)
        deviation = torch.tensor(form.deviation, device=pixels.device)
        # As the processor of transformers rounds.
        colours = ((pixels.to(torch.float64) * (1 / 255)).to(torch.float32) - mean) / deviation
        return {
            "pixel_values": colours.permute(2, 0, 1).expand(count, -1, -1, -1),
            "image_sizes": [tuple(pixels.shape[:2])] * count,
        }

    def embed(self, tokens: torch.Tensor, images: Sequence[RowImage]) -> torch.Tensor:
        embeddings: torch.Tensor = self._lm.get_input_embeddings()(tokens[None])
        with torch.no_grad():
            # Of an image without a place nothing is kept.
            features = [self._features(image.pixels)[: len(image.places)] for image in images]
        places = torch.cat([image.places for image in images])
        return embeddings.index_copy(1, places, torch.cat(features)[None].to(embeddings.dtype))

    def _features(self, pixels: torch.Tensor) -> torch.Tensor:
        # The code of the family loses a dimension of an image that is a single token and alone.
        count = 2 if max(pixels.shape[:2]) == self._form.side else 1
        features: torch.Tensor = self._lm.get_image_features(**self.inputs(pixels, count)).pooler_output[0]
        return features
