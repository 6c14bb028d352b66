"""The start-up check against the unmodified Hugging Face model: its tolerances, lengths of documents, and the wording
of failures.

The reference is computed first, by the model as transformers has loaded it: its own eager attention and experts, its
own head, no hooks, one document at a time, in evaluation mode (no dropout, no noise in a router; training computes in
that mode too). If it is sharded already, its layers are gathered one after the other for that. Then the same model gets
its hooks, and the documents go through it packed in one row. So no second copy of the weights is needed. If the log
probabilities differ, a row for each document is tried, because layers that carry state over tokens carry it from a
document into the next of a row; and then the family's own attention with a row for each document. A model whose log
probabilities still differ is rejected: it would silently train with wrong numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from strata.base.errors import Code, StrataError
from strata.train.families import Rows
from strata.train.images import ImageForm
from strata.train.runner.collectives import RankGroup
from strata.train.runner.lora.hooks import slice_spans
from strata.train.runner.model.attention import LATER_TOKENS
from strata.train.runner.model.images import TowerEncoder
from strata.train.runner.model.process_memory import is_out_of_memory
from strata.train.runner.passes.logprobs import PackedRow, RowImage

TOLERANCE: Final = {"float64": 1e-3, "float32": 1e-3, "bfloat16": 0.5}
"""How far two computations of the same log probability may differ, in nats."""
MEAN_TOLERANCE: Final = {"float64": 1e-3, "float32": 1e-3, "bfloat16": 0.05}
"""How far they may differ on average: rounding errs to both sides, a missing feature does not."""
LENGTHS: Final = (17, 11, 1, 6)
"""Lengths of the documents. The slices of a context group, of whatever size, cut some of them."""
TARGETS: Final = 4
"""Tokens whose log probability is compared at each position, the most likely one among them."""
FAILURES: Final = (
    AssertionError,
    AttributeError,
    IndexError,
    KeyError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What the code of an architecture raises when it is used in a way that it does not support."""

Logits = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Reference:
    """Documents, and the unmodified model's log probabilities of them. The second is a prefix of the first."""

    row: PackedRow
    logprobs: torch.Tensor


@contextmanager
def unsupported_errors(arch: str) -> Iterator[None]:
    """Whatever the code of an unsupported architecture raises becomes one UNSUPPORTED error with one sentence."""
    try:
        yield
    except StrataError as error:
        if error.code is not Code.UNSUPPORTED or "cannot be" in error.message:
            raise
        raise StrataError(Code.UNSUPPORTED, f"{arch} cannot be trained here: {error.message}") from error
    except FAILURES as error:
        if is_out_of_memory(error) or isinstance(error, dist.DistError):
            raise
        reason = f"its code fails with {type(error).__name__}: {first_line(error)}"
        raise StrataError(Code.UNSUPPORTED, f"{arch} cannot be trained here: {reason}") from error


def first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else "no message"


@torch.no_grad()
def compute_reference(logits: Logits, vocabulary: int, device: torch.device) -> Reference:
    """The reference of a model as it was loaded. `logits` are those of one document."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randint(vocabulary, (LENGTHS[0],), generator=generator)
    others = [torch.randint(vocabulary, (length,), generator=generator) for length in LENGTHS[2:]]
    documents = [document.to(device) for document in (first, first[: LENGTHS[1]], *others)]
    of_documents = [torch.log_softmax(logits(document), dim=-1, dtype=torch.float32) for document in documents]
    logprobs = torch.cat(of_documents)
    if not bool(logprobs.isfinite().all()):
        raise StrataError(Code.UNSUPPORTED, "its log probabilities are not finite")
    leak = float((logprobs[: LENGTHS[1]] - logprobs[LENGTHS[0] : LENGTHS[0] + LENGTHS[1]]).abs().max())
    if leak > 1e-2:
        raise StrataError(Code.UNSUPPORTED, f"its tokens look at later ones (off by {leak:.2g} nats)")
    drawn = torch.randint(vocabulary, (len(logprobs), TARGETS - 1), generator=generator).to(device)
    targets = torch.cat([logprobs.argmax(dim=-1, keepdim=True), drawn], dim=1)
    row = PackedRow(
        tokens=torch.cat(documents),
        documents=list(LENGTHS),
        spans=(),
        logit_indices=torch.arange(len(logprobs), device=device).repeat_interleave(TARGETS),
        targets=targets.flatten(),
    )
    return Reference(row, logprobs[row.logit_indices, row.targets])


@torch.no_grad()
def compute_image_reference(logits: Callable[..., torch.Tensor], encoder: TowerEncoder, row: PackedRow) -> Reference:
    """The reference of one document with an image."""
    (image,) = row.images
    of_document = logits(row.tokens, **encoder.inputs(image.pixels))
    logprobs = torch.log_softmax(of_document, dim=-1, dtype=torch.float32)
    return Reference(row, logprobs[row.logit_indices, row.targets])


def image_row(form: ImageForm, vocabulary: int, device: torch.device) -> PackedRow:
    """A document with an image of two rows and three columns of tokens between words."""
    generator = torch.Generator().manual_seed(0)
    height, width = 2 * form.side, 3 * form.side
    words = torch.randint(vocabulary - 1, (LENGTHS[1],), generator=generator)
    # None of them is the token of images.
    words += words >= form.token
    own = torch.tensor(form.tokens(height, width))
    tokens = torch.cat([words[:4], own, words[4:]])
    pixels = torch.randint(256, (height, width, 3), dtype=torch.uint8, generator=generator)
    places = 4 + (own == form.token).nonzero()[:, 0]
    return PackedRow(
        tokens=tokens.to(device),
        documents=[len(tokens)],
        spans=(),
        logit_indices=torch.arange(len(tokens), device=device).repeat_interleave(TARGETS),
        targets=torch.randint(vocabulary, (len(tokens) * TARGETS,), generator=generator).to(device),
        images=[RowImage(pixels.to(device), places.to(device))],
    )


class _DecoderCalledError(Exception):
    """Ends a forward pass: what comes after the decoder does not matter."""


def find_decoder(skeleton: Any) -> str:
    """The name of the outermost model that the model's own `forward` calls: it computes hidden states, and logits are
    computed from these alone. The model needs no memory for this."""
    called: list[str] = []

    def stop(name: str) -> None:
        called.append(name)
        raise _DecoderCalledError

    hooks = [
        module.register_forward_pre_hook(lambda *_, name=name: stop(name))
        for name, module in skeleton.named_modules()
        if name and isinstance(module, PreTrainedModel)
    ]
    try:
        with torch.no_grad(), suppress(_DecoderCalledError):
            skeleton(input_ids=torch.zeros((1, 1), dtype=torch.int64, device=skeleton.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    if not called:
        raise StrataError(Code.UNSUPPORTED, "it has no decoder apart from its head")
    return called[0]


@torch.no_grad()
def find_rows(
    reference: Reference,
    compute: Callable[[PackedRow, Rows], torch.Tensor],
    dtype: str,
    ranks: RankGroup,
    forms: Sequence[Rows],
) -> Rows:
    """Returns the first of these forms of rows with which the model is the unmodified one. UNSUPPORTED if it is with
    none, with the reason of the last. All ranks call this together and decide alike."""
    failure: StrataError | None = None
    for form in forms:
        rows = [reference.row] if form == "packed" else list(unpack_row(reference.row))
        try:
            failure = _difference(torch.cat([compute(row, form) for row in rows]), reference.logprobs, dtype)
        except StrataError as error:
            if error.code is not Code.UNSUPPORTED or LATER_TOKENS in error.message:
                raise
            failure = error
        if not ranks.all_reduce_any([failure is not None])[0]:
            return form
    raise failure or StrataError(Code.UNSUPPORTED, "another rank computes other log probabilities")


@torch.no_grad()
def why_no_images(
    reference: Reference, compute: Callable[[PackedRow], torch.Tensor], dtype: str, ranks: RankGroup
) -> str:
    """Says why the model takes no images, if it does not compute one as the unmodified one. All ranks call it."""
    try:
        failure = _difference(compute(reference.row), reference.logprobs, dtype)
    except StrataError as error:
        if error.code is not Code.UNSUPPORTED:
            raise
        failure = error
    differs = ranks.all_reduce_any([failure is not None])[0]
    return f"with an image, {failure.message if failure else 'another rank differs'}" if differs else ""


def _difference(computed: torch.Tensor, expected: torch.Tensor, dtype: str) -> StrataError | None:
    if within_tolerance(computed, expected, dtype):
        return None
    what = "its log probabilities are not those of the unmodified model"
    return StrataError(Code.UNSUPPORTED, f"{what} (off by {float((computed - expected).abs().max()):.2g} nats)")


def within_tolerance(computed: torch.Tensor, expected: torch.Tensor, dtype: str) -> bool:
    difference = (computed - expected).abs()
    largest, mean = float(difference.max()), float(difference.mean())
    return math.isfinite(largest) and largest <= TOLERANCE[dtype] and mean <= MEAN_TOLERANCE[dtype]


def unpack_row(row: PackedRow) -> Iterator[PackedRow]:
    """Each document as a row of its own."""
    start = 0
    for length in row.documents:
        here = (row.logit_indices >= start) & (row.logit_indices < start + length)
        yield PackedRow(
            tokens=row.tokens[start : start + length],
            documents=[length],
            spans=slice_spans(row.spans, start, start + length),
            logit_indices=row.logit_indices[here] - start,
            targets=row.targets[here],
        )
        start += length
