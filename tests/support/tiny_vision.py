"""A tiny random model of the family mistral3 with tower, processor and tokenizer, and what transformers makes of images
for it."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from PIL import Image
from tinker import types
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

from strata.train.images import SPECIAL
from strata.train.runner.model.tiny import train_tokenizer
from tests.shell.train_runner import tiny_families

TOKEN, ROW_END, IMAGE_END = range(300, 303)
VOCABULARY: Final = 304
SIDE: Final = 32
"""Pixels of a token: two patches of 16."""
LONGEST: Final = 128
_MEAN: Final = (0.48145466, 0.4578275, 0.40821073)
_DEVIATION: Final = (0.26862954, 0.26130258, 0.27577711)
Piece = Sequence[int] | Image.Image
PROCESSOR: Final = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": _MEAN,
    "image_processor_type": "PixtralImageProcessorFast",
    "image_std": _DEVIATION,
    "patch_size": {"height": 16, "width": 16},
    "processor_class": "PixtralProcessor",
    "resample": 3,
    "rescale_factor": 0.00392156862745098,
    "size": {"longest_edge": LONGEST},
}
"""As checkpoints of the family have it in `preprocessor_config.json`."""


def make(folder: Path) -> None:
    tokenizer = train_tokenizer(TOKEN)
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL)) == [TOKEN, ROW_END, IMAGE_END]
    text = tiny_families.config_of("mistral", vocab_size=VOCABULARY)
    tiny_families.make("mistral3", folder, text_config=text, image_token_index=TOKEN)
    tokenizer.save_pretrained(str(folder))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR), encoding="utf-8")


def photo(seed: int, width: int, height: int, mode: str = "RGB") -> Image.Image:
    """Random colours that are smooth enough for a JPEG."""
    noise = np.random.default_rng(seed).integers(0, 256, (4, 4, 4), dtype=np.uint8)
    return Image.fromarray(noise, "RGBA").resize((width, height), Image.Resampling.BICUBIC).convert(mode)


def encoded(image: Image.Image, form: str = "png", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def processed(image: Image.Image, **options: Any) -> Any:
    """What the processor of transformers makes of an image."""
    processor = PixtralImageProcessorPil(
        size={"longest_edge": LONGEST}, patch_size={"height": SIDE, "width": SIDE}, **options
    )
    return processor(images=[image], return_tensors="pt")


def tokens_of(image: Image.Image) -> list[int]:
    """The tokens of an image in a prompt of the family: rows that end with a token, the last one with another."""
    ((height, width),) = processed(image)["image_sizes"].tolist()
    rows = [[TOKEN] * (width // SIDE) + [ROW_END] for _ in range(height // SIDE)]
    rows[-1][-1] = IMAGE_END
    return [token for row in rows for token in row]


def prompt_of(pieces: Sequence[Piece]) -> list[int]:
    tokens: list[int] = []
    for piece in pieces:
        tokens += tokens_of(piece) if isinstance(piece, Image.Image) else piece
    return tokens


def chunk_of(image: Image.Image) -> types.ImageChunk:
    return types.ImageChunk(data=encoded(image), format="png", expected_tokens=len(tokens_of(image)))


def datum_of(pieces: Sequence[Piece]) -> types.Datum:
    """A datum of the SDK whose targets are its own next tokens; those of images have no weight."""
    chunks: list[types.ModelInputChunk] = [
        chunk_of(piece) if isinstance(piece, Image.Image) else types.EncodedTextChunk(tokens=piece) for piece in pieces
    ]
    prompt = prompt_of(pieces)
    weights = [0.0 if token >= TOKEN else 1.0 for token in prompt[1:]] + [0.0]
    inputs: Any = {"target_tokens": [*prompt[1:], 0], "weights": weights}
    return types.Datum(model_input=types.ModelInput(chunks=chunks), loss_fn_inputs=inputs)
