"""Collects log probabilities and metrics of the rows of a pass: copies that nobody waits for until the pass is over."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch

from strata.base.errors import Code
from strata.train.core import ops
from strata.train.runner.passes.losses import read_metrics
from strata.train.runner.passes.packed_row import PackedBatch, PackedDocument, Place, RowContents
from strata.train.runner.passes.partition import ComputedDatum, ItemFailure
from strata.train.runner.passes.transfer import start_copy

REPLAYED_TOKENS: Final = "router_replay_tokens:sum"


@dataclass
class RowLosses:
    """Metrics of the datums of a row."""

    measured: list[torch.Tensor] = field(default_factory=list)
    """Those of each batch, still on the device."""
    of_groups: dict[Place, Mapping[str, float]] = field(default_factory=dict)
    """Metrics of the losses of clients, which are computed group by group."""


@dataclass(frozen=True)
class RowResults:
    """What a row has computed, on its way to the host: to be read once all copies have arrived."""

    documents: Sequence[PackedDocument]
    batches: Sequence[PackedBatch]
    of_groups: Mapping[Place, Mapping[str, float]]
    logprobs: torch.Tensor
    measured: Sequence[torch.Tensor]

    @classmethod
    def start(cls, contents: RowContents, logprobs: torch.Tensor, losses: RowLosses) -> RowResults:
        """Start the copies: one of log probabilities, and one of metrics for each kind of loss in the row."""
        measured = [start_copy(each) for each in losses.measured]
        return cls(contents.documents, contents.batches, losses.of_groups, start_copy(logprobs), measured)

    def read(self) -> Iterator[ComputedDatum | ItemFailure]:
        """The result of each document; a failure if its loss is not finite."""
        metrics = {**self.of_groups, **self._metrics()}
        if not metrics:
            return
        logprobs = self.logprobs.numpy().astype(np.float32, copy=False)
        start = 0
        for document in self.documents:
            shape = document.inputs.targets.shape
            end = start + document.inputs.targets.size
            own = metrics.get(document.place)
            if own is None:
                pass
            elif math.isfinite(own["loss:sum"]):
                dense = ops.Dense(ops.DType.F32, shape, logprobs[start:end].tobytes())
                if document.routing is not None:
                    own = {**own, REPLAYED_TOKENS: float(len(document.routing))}
                yield ComputedDatum(document.item, document.datum, ops.DatumOutput({"logprobs": dense}), own)
            else:
                message = f"its loss is {own['loss:sum']}"
                yield ItemFailure(document.item, document.datum, Code.INVALID, message)
            start = end

    def _metrics(self) -> dict[Place, dict[str, float]]:
        metrics: dict[Place, dict[str, float]] = {}
        for batch, measured in zip(self.batches, self.measured, strict=True):
            of_documents = read_metrics(measured.numpy(), batch.counted, batch.sampled)
            metrics |= {document.place: own for document, own in zip(batch.documents, of_documents, strict=True)}
        return metrics
