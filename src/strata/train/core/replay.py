"""Decides which group of ranks may be used, which dispatches a replay skips, and whether its outcome diverges; words
the remedy.

A group becomes the server's own (`TrainState.group`) when its replay is finished. Before that its models may have
diverged from those of the group before it without any report, so a session never resumes with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from strata.base.errors import Code, StrataError
from strata.train.core import ops
from strata.train.core.replay_differences import RankNumerics
from strata.train.core.state import Dispatch, TrainState


class CompletedDispatch(NamedTuple):
    """A dispatch that has results, with the operations that it had."""

    dispatch: Dispatch
    operations: Sequence[ops.Operation]
    failed: Sequence[bool]
    """Whether the first result of each operation was a failure."""
    results: Sequence[ops.Result | None] = ()
    """The first results; None where the journal has another fact of its end."""
    numerics: RankNumerics | None = None
    """Those of the ranks that computed the results."""


def reject_reason(state: TrainState, group: str, applied: int) -> str | None:
    """Says why a group of ranks that has applied all dispatches up to `applied` must not be used; None if it may."""
    if state.tainted and group == state.group:
        return "it has applied a dispatch that was failed since"
    if applied > state.dispatched:
        return f"it has applied dispatch {applied}, and the journal knows of {state.dispatched}"
    if 0 < applied < state.truncated_through:
        return f"it has applied dispatch {applied}, and the journal was truncated after that"
    if applied and group != state.group:
        return f"it has applied dispatch {applied}, and another group took over, or its replay never finished"
    return None


def always_replayed(operations: Sequence[ops.Operation]) -> bool:
    """Even if the orchestrator failed it: else a model that its client unloaded would occupy its slot for ever."""
    return all(isinstance(each, ops.UnloadModel) for each in operations)


def skip_on_replay(past: CompletedDispatch) -> bool:
    """It failed for the disk or a limit of then and changed nothing: today it might succeed and diverge.

    A dispatch without operations is skipped too: none of them fitted into the memory of the ranks. So is a pass that is
    only forward: it changes no model, whatever came of it. Any other failure either repeats itself, or changed a model,
    as that of a step that discards a gradient.
    """
    if all(isinstance(each, ops.ForwardBackward) and each.forward_only for each in past.operations):
        return True
    passing = ops.CreateModel | ops.LoadWeights | ops.Sleep | ops.AbortGradients
    return all(past.failed) and isinstance(past.operations[0], passing)


def divergence(past: CompletedDispatch, results: Sequence[ops.Result]) -> StrataError | None:
    """An error if the replay gave other models than those that clients have results of; None if it did not.

    EXHAUSTED if these ranks lacked the memory: another group may have it. CORRUPT if another replay would diverge too.
    """
    dispatch = past.dispatch
    if len(results) != len(past.operations):
        wrong = f"the ranks gave {len(results)} results for {len(past.operations)} operations"
        results = [ops.Failed("server", wrong)] * len(past.operations)
    for operation, failed, result in zip(past.operations, past.failed, results, strict=True):
        remedy = _remedy(operation, dispatch.path)
        if remedy is None or not _differs(operation, result, failed=failed):
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


def _differs(operation: ops.Operation, result: ops.Result, *, failed: bool) -> bool:
    """Says whether this outcome may leave another model than the first one, which `failed` or did not."""
    fails = isinstance(result, ops.Failed)
    # Any other operation that failed once and succeeds now has changed no model, or would have been skipped.
    return fails if not failed else not fails and isinstance(operation, ops.ForwardBackward | ops.OptimStep)


def _remedy(operation: ops.Operation, path: str) -> str | None:
    """Returns what an operator can do about it; None if the operation changes no model."""
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
