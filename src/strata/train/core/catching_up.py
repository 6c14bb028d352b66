"""Ranks that do again what others did before them: who may go on, what is left out, and whether it came out the same.

A group counts as the server's own (`TrainState.group`) from when it has caught up. Until then it may have gone another
way than the group before it without anybody having heard, and nobody goes on with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from strata.base.errors import Code, StrataError
from strata.train.core import ops
from strata.train.core.state import Dispatch, TrainState


class Past(NamedTuple):
    """A dispatch that has its results."""

    dispatch: Dispatch
    operations: Sequence[ops.Operation]
    failed: Sequence[bool]
    """Of each operation, whether its client was told that it failed."""


def unfit(state: TrainState, group: str, applied: int) -> str | None:
    """Why a group of ranks that has applied all up to this dispatch must not be spoken to."""
    if state.spoiled and group == state.group:
        return "it was given up"
    if applied > state.dispatched:
        return f"it has applied dispatch {applied}, and the journal knows of {state.dispatched}"
    if 0 < applied < state.cut:
        return f"it has applied dispatch {applied}, and what came after that was let go"
    if applied and group != state.group:
        return f"it has applied dispatch {applied}, and another took its place or nobody saw it catch up"
    return None


def is_told_all_the_same(operations: Sequence[ops.Operation]) -> bool:
    """Although it was given up: a model that is gone for its client would keep its place at the ranks for ever."""
    return all(isinstance(each, ops.UnloadModel) for each in operations)


def left_out(past: Past) -> bool:
    """Failed for the disk or a limit as they were then, without a trace: today it might succeed, and nobody knows.

    So did one of which nothing is left, because nothing of it fitted into the memory of the ranks. Whatever else failed
    does so again, or its failing was a change, as that of a step that throws a gradient away.
    """
    if not past.operations:
        return True
    passing = ops.CreateModel | ops.LoadWeights | ops.Sleep | ops.AbortGradients
    return all(past.failed) and isinstance(past.operations[0], passing)


def astray(past: Past, results: Sequence[ops.Result]) -> StrataError | None:
    """What there is to say if the models are others now than those that clients were told of.

    EXHAUSTED if these ranks lacked the memory: others may have it. CORRUPT if it would come out so again.
    """
    dispatch = past.dispatch
    if len(results) != len(past.operations):
        wrong = f"the ranks gave {len(results)} results for {len(past.operations)} operations"
        results = [ops.Failed("server", wrong)] * len(past.operations)
    for operation, failed, result in zip(past.operations, past.failed, results, strict=True):
        fails = isinstance(result, ops.Failed)
        # What else failed once and succeeds now has changed no model, or would have been left out.
        matters = fails if not failed else not fails and isinstance(operation, ops.ForwardBackward | ops.OptimStep)
        if not matters or (remedy := _remedy(operation, dispatch.path)) is None:
            continue
        if isinstance(result, ops.Failed) and result.memory:
            return StrataError(Code.EXHAUSTED, f"dispatch {dispatch.number} once succeeded: {result.message}")
        before, now = ("failed", "succeeded") if failed else ("succeeded", "failed")
        what = f"{operation.__struct_config__.tag} of {getattr(operation, 'model_id', '')!r}"
        why = f": {result.message}" if isinstance(result, ops.Failed) else ""
        return StrataError(
            Code.CORRUPT,
            f"dispatch {dispatch.number}, {what}, once {before} and {now} when new ranks did it again, so nothing is "
            f"trained{why}",
            hint=f"{remedy}; it is tried again whenever the server or its ranks start",
        )
    return None


def _remedy(operation: ops.Operation, path: str) -> str | None:
    """What somebody can do about it; None if no model is another one for it."""
    match operation:
        case ops.CreateModel():
            return "give the server the room back that it had: max_models and max_lora_rank of [model]"
        case ops.LoadWeights():
            return f"bring the files of checkpoint {path} back, from a backup or the object store"
        case ops.SaveWeights() | ops.SyncWeights():
            return f"see that the folder of checkpoint {path} can be written and its disk has room"
        case ops.ForwardBackward() if operation.forward_only:
            return None
        case ops.ForwardBackward() | ops.OptimStep() | ops.AbortGradients():
            return "start the server with the model and the settings that it had"
        case _:
            return None
