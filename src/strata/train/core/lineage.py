"""Counts what the weights of a model come from: the checkpoint that they began with, and the steps, passes, datums and
tokens trained since.

Counted from the results that the journal has anyway. A pass counts with the optimizer step that used its gradients:
what no step used is not in the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from msgspec.structs import replace

from strata.train.core import ops
from strata.train.core.state import TrainedCount, TrainState, WeightsLineage

IMPORTED_FROM: Final = "imported"
"""The parent of weights that were trained elsewhere."""


def record(state: TrainState, operation: ops.Operation | None, result: ops.Result, folder: str) -> None:
    """`folder` is that of the checkpoint which the operation loaded."""
    match operation, result:
        case ops.ForwardBackward(forward_only=False), ops.PassDone():
            count = TrainedCount(0, 1, len(operation.lengths), sum(operation.lengths), operation.sampled_tokens)
            _change(state, operation.model_id, lambda known: replace(known, pending=known.pending.plus(count)))
        case ops.OptimStep(), ops.StepDone():
            _change(state, operation.model_id, _stepped)
        case ops.AbortGradients(), ops.GradientsAborted():
            _change(state, operation.model_id, lambda known: replace(known, pending=TrainedCount()))
        case ops.LoadWeights(), ops.WeightsLoaded():
            state.models[operation.model_id].lineage = _loaded(state, operation, folder)
        case _:
            pass


def _change(state: TrainState, model_id: str, change: Callable[[WeightsLineage], WeightsLineage]) -> None:
    model = state.models[model_id]
    model.lineage = change(model.lineage)


def _stepped(known: WeightsLineage) -> WeightsLineage:
    trained = known.trained.plus(known.pending).plus(TrainedCount(steps=1))
    return replace(known, trained=trained, pending=TrainedCount())


def _loaded(state: TrainState, operation: ops.LoadWeights, folder: str) -> WeightsLineage:
    path = f"tinker://{operation.run_id}/{operation.kind}/{operation.name}"
    parent = state.checkpoints.get((operation.run_id, operation.kind, operation.name))
    if parent is None or parent.path != folder:
        # Another one was saved under this name meanwhile.
        return WeightsLineage(path)
    return WeightsLineage(path, before=parent.lineage.before.plus(parent.lineage.trained))
