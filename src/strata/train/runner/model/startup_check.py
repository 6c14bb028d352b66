"""The start-up check: our passes beside an unmodified Hugging Face model, before anybody's data goes through them.

The reference is computed first, by the model as transformers has read it: its own eager attention and experts, its own
head, no hook of ours, one document at a time, in evaluation mode (no dropout, no noise in a router; that is the mode
that training computes too). Then the same model is adapted and sharded, and the documents go through it packed in one
row. So no second copy of the weights is needed. A model whose log-probabilities are not the same is refused: it would
train on silently with wrong numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from strata.base.errors import Code, StrataError
from strata.train.runner.model.memory import is_out_of_memory
from strata.train.runner.passes.logprobs import Row

TOLERANCE: Final = {"float32": 1e-3, "bfloat16": 0.5}
"""How far two ways of computing the same log-probability may be apart, in nats."""
MEAN_TOLERANCE: Final = {"float32": 1e-3, "bfloat16": 0.05}
"""How far they may be apart on average: rounding errs to both sides, a feature left out does not."""
LENGTHS: Final = (17, 11, 1, 5)
TARGETS: Final = 4
"""Tokens whose log-probability is compared at each place, the most likely one among them."""
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
"""What an architecture that is used in a way it was not made for raises."""


@dataclass(frozen=True)
class Reference:
    """Documents, and what the unmodified model says of them. The second is the beginning of the first."""

    row: Row
    logprobs: torch.Tensor
    decoder: str
    """The name of the module that makes hidden states of tokens; logits are made of these alone."""


@contextmanager
def refusing(arch: str) -> Iterator[None]:
    """An architecture that cannot be computed is refused in one sentence, whatever its code raises."""
    try:
        yield
    except StrataError as error:
        if error.code is not Code.UNSUPPORTED or "cannot be" in error.message:
            raise
        raise StrataError(Code.UNSUPPORTED, f"{arch} cannot be trained here: {error.message}") from error
    except FAILURES as error:
        if is_out_of_memory(error) or isinstance(error, dist.DistError):
            raise
        why = f"its code fails with {type(error).__name__}: {first_line(error)}"
        raise StrataError(Code.UNSUPPORTED, f"{arch} cannot be trained here: {why}") from error


def first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else "no message"


@torch.no_grad()
def compute_reference(lm: PreTrainedModel, vocabulary: int, device: torch.device) -> Reference:
    """Of a model as it was read, on its device."""
    lm.train(mode=False)
    generator = torch.Generator().manual_seed(0)
    first = torch.randint(vocabulary, (LENGTHS[0],), generator=generator)
    others = [torch.randint(vocabulary, (length,), generator=generator) for length in LENGTHS[2:]]
    documents = [document.to(device) for document in (first, first[: LENGTHS[1]], *others)]
    decoder = _find_decoder(lm, documents[0])
    logprobs = torch.cat([_logprobs(lm, document) for document in documents])
    if not bool(logprobs.isfinite().all()):
        raise StrataError(Code.UNSUPPORTED, "its log-probabilities are not finite")
    later = float((logprobs[: LENGTHS[1]] - logprobs[LENGTHS[0] : LENGTHS[0] + LENGTHS[1]]).abs().max())
    if later > 1e-2:
        raise StrataError(Code.UNSUPPORTED, f"its tokens look at later ones (off by {later:.2g} nats)")
    drawn = torch.randint(vocabulary, (len(logprobs), TARGETS - 1), generator=generator).to(device)
    targets = torch.cat([logprobs.argmax(dim=-1, keepdim=True), drawn], dim=1)
    row = Row(
        tokens=torch.cat(documents),
        documents=list(LENGTHS),
        spans=(),
        places=torch.arange(len(logprobs), device=device).repeat_interleave(TARGETS),
        targets=targets.flatten(),
    )
    return Reference(row, logprobs[row.places, row.targets], decoder)


def _logprobs(lm: Any, document: torch.Tensor) -> torch.Tensor:
    logits = lm(input_ids=document[None], use_cache=False).logits[0]
    return torch.log_softmax(logits, dim=-1, dtype=torch.float32)


def _find_decoder(lm: PreTrainedModel, document: torch.Tensor) -> str:
    """The outermost model that the model's own `forward` calls."""
    called: list[str] = []
    hooks = [
        module.register_forward_pre_hook(lambda *_, name=name: called.append(name))
        for name, module in lm.named_modules()
        if name and isinstance(module, PreTrainedModel)
    ]
    try:
        _logprobs(lm, document)
    finally:
        for hook in hooks:
            hook.remove()
    if not called:
        raise StrataError(Code.UNSUPPORTED, "it has no decoder apart from its head")
    return called[0]


@torch.no_grad()
def compare(reference: Reference, logprobs: Callable[[Row], torch.Tensor], dtype: str) -> None:
    """UNSUPPORTED, with what is off and by how much. All ranks call this together."""
    row = reference.row
    together = logprobs(row)
    if _agree(together, reference.logprobs, dtype):
        return
    alone = torch.cat([logprobs(part) for part in _split(row)])
    if _agree(alone, reference.logprobs, dtype):
        what, other = "neighbours in a row change a document", alone
    else:
        what, other = "its log-probabilities are not those of the unmodified model", reference.logprobs
    apart = float((together - other).abs().max())
    raise StrataError(Code.UNSUPPORTED, f"{what} (off by {apart:.2g} nats)")


def _agree(ours: torch.Tensor, theirs: torch.Tensor, dtype: str) -> bool:
    apart = (ours - theirs).abs()
    largest, mean = float(apart.max()), float(apart.mean())
    return math.isfinite(largest) and largest <= TOLERANCE[dtype] and mean <= MEAN_TOLERANCE[dtype]


def _split(row: Row) -> Iterator[Row]:
    """Each document as a row of its own."""
    start = 0
    for length in row.documents:
        here = (row.places >= start) & (row.places < start + length)
        yield Row(
            tokens=row.tokens[start : start + length],
            documents=[length],
            spans=(),
            places=row.places[here] - start,
            targets=row.targets[here],
        )
        start += length
