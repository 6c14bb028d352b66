"""Computes log probabilities of target tokens for a packed row: positions, documents, chunks of logits, decoder and
head.

A packed row holds several documents one after the other, none of which attends to another. Attention runs document by
document (`model/attention.py`), so that a document's numbers do not depend on its neighbours. Position ids restart with
each document.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from strata.base.errors import Code, StrataError
from strata.train.runner.lora.hooks import Adapters, Span, slice_spans
from strata.train.runner.model.attention import ATTENTION, whole_row
from strata.train.runner.model.attention_kernels import Documents
from strata.train.runner.model.context_parallel import ContextParallel
from strata.train.runner.model.pipeline_parallel import PipelineStage
from strata.train.runner.router_replay import NOT_REPLAYED


@dataclass(frozen=True)
class RowPlaces:
    """Where the tokens of a row are in their documents, and which tokens its targets belong to: made on the host."""

    positions: torch.Tensor
    """The place of each token in its document, on the device of the row."""
    attended: Documents
    indices: NDArray[np.int64]
    """The same numbers as `logit_indices`, on the host: nothing has to wait for the device to know them."""


@dataclass(frozen=True)
class RowImage:
    """An image of a row, on its device."""

    pixels: torch.Tensor
    """(height, width, 3), a byte for each colour."""
    places: torch.Tensor
    """The tokens of the row that it is. None, if it is there for the collectives of other ranks, which have more
    images."""


@dataclass(frozen=True)
class PackedRow:
    """Documents, and the targets whose log probabilities are wanted: target i is scored by the logits of the token
    `logit_indices[i]`. Targets are in the order of their tokens."""

    tokens: torch.Tensor
    documents: Sequence[int]
    """Lengths, in order."""
    spans: Sequence[Span]
    logit_indices: torch.Tensor
    targets: torch.Tensor
    start: int = 0
    """The first token of this slice of a row, whose documents `documents` then are."""
    images: Sequence[RowImage] = ()
    known: RowPlaces | None = None
    """Those of this row if whoever made it knows them. Otherwise they are found out when they are needed, once."""
    routing: torch.Tensor | None = None
    """The experts that routers choose, (tokens, layers, experts of a token): see `router_replay`."""

    @cached_property
    def places(self) -> RowPlaces:
        if self.known is not None:
            return self.known
        positions = np.concatenate([np.arange(length) for length in self.documents])
        own = torch.from_numpy(positions[self.start : self.start + len(self.tokens)])
        indices = self.logit_indices.to("cpu").numpy()
        return RowPlaces(own.to(self.tokens.device), Documents(self.documents), indices)

    def targets_of(self, bounds: Sequence[int]) -> list[slice]:
        """The targets of the tokens between each of these bounds and the next."""
        firsts: list[int] = np.searchsorted(self.places.indices, bounds).tolist()
        return [slice(first, last) for first, last in pairwise(firsts)]

    def slice_for(self, rank: int, ranks: int) -> tuple[PackedRow, slice]:
        """The slice of one of so many ranks, and which of the targets it has. Slices are equally long: a document
        without targets pads the row."""
        if ranks == 1:
            return self, slice(None)
        length = -(-len(self.tokens) // ranks)
        padding = ranks * length - len(self.tokens)
        start, end = rank * length, (rank + 1) * length
        (own,) = self.targets_of([start, end])
        places, tokens, positions = self.places, self.tokens, self.places.positions
        if padding:
            tokens, positions = pad(tokens, (0, padding)), pad(positions, (0, padding))
        known = RowPlaces(
            positions=positions[start:end],
            attended=Documents([*self.documents, padding]) if padding else places.attended,
            indices=places.indices[own] - start,
        )
        part = PackedRow(
            tokens=tokens[start:end],
            documents=known.attended.lengths,
            spans=slice_spans([*self.spans, Span(None, padding)], start, end),
            logit_indices=self.logit_indices[own] - start,
            targets=self.targets[own],
            start=start,
            known=known,
            routing=self._slice_routing(start, end),
        )
        return part, own

    def _slice_routing(self, start: int, end: int) -> torch.Tensor | None:
        if self.routing is None:
            return None
        part = self.routing[start:end]
        return pad(part, (0, 0, 0, 0, 0, end - start - len(part)), value=NOT_REPLAYED)


class GatherLogprobs(torch.autograd.Function):
    """Log probabilities of targets under rows of logits. It makes one float32 copy of the logits, and no second one in
    the backward pass: the copy becomes the gradient."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, indices: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logprobs = torch.log_softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        ctx.save_for_backward(logprobs, indices, targets)
        ctx.dtype = logits.dtype
        return logprobs[indices, targets]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (grad,) = grads
        logprobs, indices, targets = ctx.saved_tensors
        of_row = torch.zeros(len(logprobs), dtype=grad.dtype, device=grad.device).index_add_(0, indices, grad)
        of_logits = logprobs.exp_().mul_(of_row.neg_()[:, None])
        of_logits.index_put_((indices, targets), grad, accumulate=True)
        return of_logits.to(ctx.dtype), None, None


class DecoderAndHead:
    """A causal language model in two halves: its decoder, and what its family does from hidden states to logits.

    The second half is the family's own code (scales, caps, a norm before the head): its `forward` runs with a decoder
    that returns the given hidden states. So logits can be computed of some tokens of a row at a time.
    """

    def __init__(self, lm: PreTrainedModel, decoder: str) -> None:
        self._lm = lm
        self._decoder: Any = lm.get_submodule(decoder)
        self._output: Any = None

    def hidden(self, **inputs: Any) -> torch.Tensor:
        """The last hidden state of each token of a row."""
        output = self._decoder(**inputs, use_cache=False)
        self._output = type(output)
        hidden = output.last_hidden_state
        assert isinstance(hidden, torch.Tensor)
        return hidden[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        calls = 0

        def return_hidden(*unused: Any, **options: Any) -> Any:
            del unused, options
            nonlocal calls
            calls += 1
            return self._output(last_hidden_state=hidden[None])

        self._decoder.forward = return_hidden
        try:
            tokens = torch.zeros((1, len(hidden)), dtype=torch.int64, device=hidden.device)
            logits = self._lm(input_ids=tokens, use_cache=False).logits
        finally:
            del self._decoder.forward
        if calls != 1:
            raise StrataError(Code.UNSUPPORTED, "its logits are not computed from its decoder's output alone")
        assert isinstance(logits, torch.Tensor)
        return logits[0]


class ImageEncoder(Protocol):
    """What a rank computes of images before the decoder (`model/images`)."""

    def embed(self, tokens: torch.Tensor, images: Sequence[RowImage]) -> torch.Tensor:
        """The embeddings of a row, (1, tokens, width), with those of its images in their places."""
        ...

    def attention(self, kernel: str) -> dict[str, str]:
        """Returns by which attention each part of the model computes, if its decoder has this one."""
        ...


class PackedModel(nn.Module):
    """The base model as a function from a packed row to log probabilities of its targets.

    It is the root module of the sharding, so that everything which reads a sharded weight happens in its `forward`.
    """

    def __init__(
        self, lm: PreTrainedModel, decoder: str, stage: PipelineStage, context: ContextParallel, logits_bytes: int
    ) -> None:
        """`context` are the ranks that have the other slices of the rows."""
        super().__init__()
        self.lm = lm
        self._split = DecoderAndHead(lm, decoder)
        self.adapters = Adapters()
        self.stage = stage
        self.context = context
        self._own_attention = True
        self.images: ImageEncoder | None = None
        """Set if rows may have images."""
        config = lm.config.get_text_config(decoder=True)
        self._vocabulary, self._width = int(config.vocab_size), int(config.hidden_size)
        self._chunk = max(1, logits_bytes // (4 * self._vocabulary))
        """Tokens whose logits are in memory at once."""

    def unmodified_logits(self, document: torch.Tensor, **images: Any) -> torch.Tensor:
        """The logits of one document, by the model's own `forward`, or stage by stage by that of its decoder. `images`
        are what its `forward` takes beside the tokens."""
        if not self.stage.is_only:
            return self._logits_of_stages(document)
        logits = self.lm(input_ids=document[None], use_cache=False, **images).logits
        assert isinstance(logits, torch.Tensor)
        return logits[0]

    def _logits_of_stages(self, document: torch.Tensor) -> torch.Tensor:
        hidden = self._split.hidden(**self._inputs(document))
        if self.stage.is_last:
            return self.stage.share(self._split.logits(hidden).float())
        self.stage.send(hidden[None], 0)
        return self.stage.share(torch.empty(len(document), self._vocabulary, device=document.device))

    def _inputs(self, tokens: torch.Tensor, images: Sequence[RowImage] = ()) -> dict[str, torch.Tensor]:
        """Returns what the decoder begins with: tokens, embeddings if some of them are images, or what the previous
        stage has made of them."""
        if self.images is not None and images:
            return {"inputs_embeds": self.images.embed(tokens, images)}
        if self.stage.is_first:
            return {"input_ids": tokens[None]}
        return {"inputs_embeds": self.stage.receive((1, len(tokens), self._width), tokens.device)}

    def use_attention(self, *, own: bool) -> None:
        """Computes with ours, which follows the documents of a row, or with the family's own, which takes one."""
        if self._own_attention != own:
            kernel = "eager" if own else ATTENTION
            self.lm.set_attn_implementation(kernel if self.images is None else self.images.attention(kernel))
            self._own_attention = own

    def forward(self, row: PackedRow) -> torch.Tensor:
        """The float32 log probability of each target of the row. Only the last stage has them; others return zeros."""
        chunks = self._chunks(row)
        hidden = self._split.hidden(
            **self._inputs(row.tokens, row.images), **({} if self._own_attention else self._places(row))
        )
        if not self.stage.is_last:
            return self.stage.send(hidden[None], len(row.targets))
        if len(chunks) == 1:
            return self._logprobs(hidden, row.logit_indices, row.targets, row.spans)
        computed = []
        for tokens, targets in chunks:
            computed.append(
                checkpoint(
                    self._logprobs,
                    hidden[tokens],
                    row.logit_indices[targets] - tokens.start,
                    row.targets[targets],
                    slice_spans(row.spans, tokens.start, tokens.stop),
                    use_reentrant=False,
                    preserve_rng_state=False,
                )
            )
        return torch.cat(computed)

    def _places(self, row: PackedRow) -> dict[str, Any]:
        return {
            "attention_mask": whole_row(row.tokens),
            "position_ids": row.places.positions[None],
            "documents": row.places.attended,
            "context": self.context,
        }

    def _chunks(self, row: PackedRow) -> list[tuple[slice, slice]]:
        """Tokens whose logits are computed together, and their targets."""
        length = len(row.tokens)
        if self._chunk >= length:
            return [(slice(0, length), slice(0, len(row.targets)))]
        bounds = [*range(0, length, self._chunk), length]
        tokens = [slice(start, end) for start, end in pairwise(bounds)]
        return list(zip(tokens, row.targets_of(bounds), strict=True))

    def _logprobs(
        self, hidden: torch.Tensor, indices: torch.Tensor, targets: torch.Tensor, spans: Sequence[Span]
    ) -> torch.Tensor:
        self.adapters.head_row = spans
        logits = self._split.logits(hidden)
        return GatherLogprobs.apply(logits, indices, targets)  # type: ignore[no-any-return, no-untyped-call]
