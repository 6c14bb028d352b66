"""Packs validated datums into a row: the order of documents, and everything that the row and its losses read, moved to
the device in one copy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from strata.train.core.loss_graph import CustomLoss
from strata.train.core.model_options import LossName
from strata.train.runner.lora.adapter import Adapter
from strata.train.runner.lora.hooks import Span
from strata.train.runner.model.attention_kernels import Documents, document_ends
from strata.train.runner.passes.logprobs import PackedRow, RowImage, RowPlaces
from strata.train.runner.passes.losses import BATCH_FIELDS, RULES, LossBatch, LossInputs
from strata.train.runner.passes.transfer import HostBuffer
from strata.train.runner.router_replay import join_routing

Place = tuple[int, int]
"""An item, and one of its datums or groups."""
_DTYPES: Final = {
    "segments": np.int64,
    "mask": np.bool_,
    "sampled": np.bool_,
    "marked": np.float64,
    "mask_outliers": np.bool_,
    "sequence_level": np.bool_,
}
"""Those of the fields of a batch; the others are float32."""


@dataclass(frozen=True)
class DatumImage:
    """An image of a datum, on the host."""

    pixels: NDArray[np.uint8]
    """(height, width, 3)."""
    places: NDArray[np.int64]
    """The tokens of the datum whose embeddings it gives."""


@dataclass(frozen=True)
class PackedDocument:
    """A datum in its row, ready to be computed."""

    item: int
    datum: int
    loss: LossName
    inputs: LossInputs
    adapter: Adapter | None
    custom: CustomLoss | None = None
    group_size: int = 1
    groups: int = 1
    """How many its item has."""
    split: bool = False
    images: Sequence[DatumImage] = ()
    routing: NDArray[Any] | None = None
    """What routers choose for its first tokens: (tokens, layers, experts of a token)."""

    @property
    def place(self) -> Place:
        return self.item, self.datum

    @property
    def group(self) -> Place:
        return self.item, self.datum // self.group_size


@dataclass(frozen=True)
class PackedBatch:
    """The documents of a row that have one of our losses."""

    loss: LossName
    documents: Sequence[PackedDocument]
    inputs: LossBatch
    counted: NDArray[np.int64]
    """How many targets of each document have a weight."""
    sampled: NDArray[np.int64] | None
    """How many of them have an advantage too; None if the loss has none."""


@dataclass(frozen=True)
class RowContents:
    """A row on the device, with what its losses read."""

    documents: Sequence[PackedDocument]
    row: PackedRow
    batches: Sequence[PackedBatch] = ()
    custom: Mapping[Place, Mapping[str, torch.Tensor]] = field(default_factory=dict)
    """What losses of clients read of each of their documents."""

    @property
    def sizes(self) -> list[int]:
        """The targets of each document."""
        return [document.inputs.targets.size for document in self.documents]

    def of_batches(self, logprobs: torch.Tensor) -> list[torch.Tensor]:
        """The log probabilities of the documents of each batch."""
        if len(self.batches) == 1 and not self.custom:
            return [logprobs]
        # Adjacent documents of one loss are one part: there are few, however many documents.
        kinds: list[LossName] = []
        sizes: list[int] = []
        for document, size in zip(self.documents, self.sizes, strict=True):
            if kinds and kinds[-1] is document.loss:
                sizes[-1] += size
            else:
                kinds.append(document.loss)
                sizes.append(size)
        parts: defaultdict[LossName, list[torch.Tensor]] = defaultdict(list)
        for kind, part in zip(kinds, torch.split(logprobs, sizes), strict=True):
            parts[kind].append(part)
        return [torch.cat(parts[batch.loss]) for batch in self.batches]


def group_by_adapter(documents: Sequence[PackedDocument]) -> list[PackedDocument]:
    """Documents of one adapter are adjacent, so that it is applied to them at once."""
    order: dict[int, int] = {}
    for document in documents:
        order.setdefault(id(document.adapter), len(order))
    return sorted(documents, key=lambda document: order[id(document.adapter)])


def pack_row(
    documents: Sequence[PackedDocument],
    device: torch.device,
    *,
    slices: int = 1,
    losses: bool = True,
    fillers: Sequence[DatumImage] = (),
) -> RowContents:
    """A row of these documents that so many ranks can divide. Without any, a row of one token. `losses` says whether
    losses are computed of it here. `fillers` are images beyond those of the documents."""
    lengths = [len(document.inputs.tokens) for document in documents] or [1]
    spans = _spans(documents)
    parts = [document.inputs.tokens for document in documents] or [np.zeros(1, np.int64)]
    replayed = [document.routing for document in documents] or [None]
    targets = [document.inputs.targets for document in documents] or [np.zeros(1, np.int64)]
    per_token = [each.size // length for each, length in zip(targets, lengths, strict=True)]
    indices = np.repeat(np.arange(sum(lengths)), np.repeat(per_token, lengths))
    if padding := -sum(lengths) % slices:
        lengths.append(padding)
        spans.append(Span(None, padding))
        parts.append(np.zeros(padding, np.int64))
        replayed.append(None)
    ends = document_ends(lengths)
    buffer = HostBuffer()
    buffer.add(parts, np.int64)
    buffer.add([np.arange(ends[-1]) - np.repeat(ends[:-1], lengths)], np.int64)
    buffer.add([indices], np.int64)
    buffer.add(targets, np.int64)
    buffer.add([ends], np.int32)
    batches = _add_batches(documents, buffer) if losses else []
    custom = _add_custom(documents, buffer) if losses else {}
    images = _add_images(documents, fillers, ends, buffer)
    routing = join_routing(replayed, lengths)
    place = None if routing is None else buffer.add([routing], np.int32, routing.shape)
    moved = buffer.move(device)
    tokens, positions, logit_indices, flat_targets, ends_there = moved[:5]
    row = PackedRow(
        tokens=tokens,
        documents=lengths,
        spans=spans,
        logit_indices=logit_indices,
        targets=flat_targets,
        images=[RowImage(moved[pixels], moved[places]) for pixels, places in images],
        known=RowPlaces(positions, Documents(lengths, ends_there), indices),
        routing=None if place is None else moved[place],
    )
    return RowContents(
        documents,
        row,
        [batch.packed(moved) for batch in batches],
        {place: {name: moved[number] for name, number in inputs.items()} for place, inputs in custom.items()},
    )


def _add_images(
    documents: Sequence[PackedDocument], fillers: Sequence[DatumImage], starts: NDArray[Any], buffer: HostBuffer
) -> list[Place]:
    """Returns where pixels and places of each image are in the buffer."""
    images = [
        (image.pixels, image.places + start)
        for document, start in zip(documents, starts, strict=False)
        for image in document.images
    ]
    images += [(filler.pixels, filler.places) for filler in fillers]
    return [(buffer.add([pixels], np.uint8, pixels.shape), buffer.add([places], np.int64)) for pixels, places in images]


def _spans(documents: Sequence[PackedDocument]) -> list[Span]:
    spans: list[Span] = []
    for document in documents:
        length = len(document.inputs.tokens)
        if spans and spans[-1].adapter is document.adapter:
            spans[-1] = Span(document.adapter, spans[-1].length + length)
        else:
            spans.append(Span(document.adapter, length))
    return spans or [Span(None, 1)]


@dataclass(frozen=True)
class _BatchOnHost:
    """A batch whose fields are in the buffer at these places."""

    loss: LossName
    documents: Sequence[PackedDocument]
    places: Mapping[str, int]
    counted: NDArray[np.int64]
    sampled: NDArray[np.int64] | None

    def packed(self, moved: Sequence[torch.Tensor]) -> PackedBatch:
        fields: dict[str, Any] = {name: moved[place] for name, place in self.places.items()}
        inputs = LossBatch(datums=len(self.documents), **fields)
        return PackedBatch(self.loss, self.documents, inputs, self.counted, self.sampled)


def _add_batches(documents: Sequence[PackedDocument], buffer: HostBuffer) -> list[_BatchOnHost]:
    by_loss: defaultdict[LossName, list[PackedDocument]] = defaultdict(list)
    for document in documents:
        if document.custom is None:
            by_loss[document.loss].append(document)
    return [_add_batch(loss, own, buffer) for loss, own in by_loss.items()]


def _add_batch(loss: LossName, documents: Sequence[PackedDocument], buffer: HostBuffer) -> _BatchOnHost:
    inputs = [document.inputs for document in documents]
    sizes = [each.targets.size for each in inputs]
    rule = RULES[loss]
    segments = np.repeat(np.arange(len(inputs)), sizes)
    weights = np.concatenate([each.weights.reshape(-1) for each in inputs])
    counted = np.bincount(segments[weights != 0], minlength=len(inputs))
    fields: dict[str, NDArray[Any]] = {"segments": segments, "weights": weights}
    of_sampled = None
    if rule.sampled:
        fields |= {name: _join(inputs, name, sizes) for name in ("logprobs", "advantages")}
        fields["sampled"] = (weights != 0) & (fields["advantages"] != 0)
        of_sampled = np.bincount(segments[fields["sampled"]], minlength=len(inputs))
    if rule.clips:
        fields |= {name: _join(inputs, name, sizes) for name in ("low", "high")}
    if "beta" in rule.config:
        fields["beta"] = _join(inputs, "beta", sizes)
    if rule.masked:
        fields["mask"] = _join(inputs, "mask", sizes) != 0
        fields["marked"] = np.bincount(segments[fields["mask"]], minlength=len(inputs))
    if any(each.mask_outliers or each.sequence_level or each.gap_tolerance for each in inputs):
        switches = {name: _join(inputs, name, sizes) != 0 for name in ("mask_outliers", "sequence_level")}
        fields |= {**switches, "gap_tolerance": _join(inputs, "gap_tolerance", sizes)}
    places = {
        name: buffer.add([fields[name]] if name in fields else [], _DTYPES.get(name, np.float32))
        for name in BATCH_FIELDS
    }
    return _BatchOnHost(loss, documents, places, counted, of_sampled)


def _join(inputs: Sequence[LossInputs], name: str, sizes: Sequence[int]) -> NDArray[np.float32]:
    """One input of all datums, target by target; a number holds for all targets of its datum."""
    values = [getattr(each, name) for each in inputs]
    # A number beyond float32 is infinite: as a limit it is none, and a loss that is not finite is refused.
    with np.errstate(over="ignore"):
        if not any(isinstance(value, np.ndarray) for value in values):
            return np.repeat(np.asarray(values, np.float32), sizes)
        pairs = zip(values, sizes, strict=True)
        return np.concatenate([np.broadcast_to(np.asarray(value, np.float32), size) for value, size in pairs])


def _add_custom(documents: Sequence[PackedDocument], buffer: HostBuffer) -> dict[Place, dict[str, int]]:
    places: dict[Place, dict[str, int]] = {}
    for document in documents:
        if document.custom is not None:
            inputs = {name: each.numpy() for name, each in document.inputs.custom.items()}
            places[document.place] = {name: buffer.add([each], each.dtype, each.shape) for name, each in inputs.items()}
    return places
