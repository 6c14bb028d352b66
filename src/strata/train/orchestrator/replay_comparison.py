"""`ReplayComparison`: compares the numbers of replayed passes and steps with those that the journal has of the first.

Nothing is kept for it: results are journaled for clients, and the files of large ones stay as long as the journal has
their facts. So memory holds the first results of the dispatches at the ranks, `limits.max_running_requests` of them. A
result whose file is gone, or that was lost with an orchestrator before it was durable, is counted as not compared.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final, TypeGuard

import msgspec
import numpy as np

from strata.base import log
from strata.base.errors import Code, StrataError
from strata.train.core import ops
from strata.train.core.replay import CompletedDispatch
from strata.train.core.replay_differences import (
    LARGEST,
    OperationDifference,
    RankNumerics,
    ReplayDifferences,
    pass_difference,
    promise_same_bits,
    step_difference,
)
from strata.train.payload import Payloads

LOSS: Final = "loss:sum"
NORM: Final = "grad_norm"
LOGPROBS: Final = "logprobs"
_log = log.get(__name__)


class ReplayComparison:
    """What one replay found, by model."""

    def __init__(self, payloads: Payloads, numerics: RankNumerics) -> None:
        """`numerics` are those of the ranks that replay."""
        self._payloads = payloads
        self._numerics = numerics
        self._dtype = numerics.dtype
        self.models: dict[str, ReplayDifferences] = {}

    async def add(self, completed: CompletedDispatch, results: Sequence[ops.Result]) -> None:
        """Compare the results of a replayed dispatch; a failure has no numbers."""
        number, same = completed.dispatch.number, promise_same_bits(completed.numerics, self._numerics)
        for operation, first, failed, now in zip(
            completed.operations, completed.results, completed.failed, results, strict=True
        ):
            if not failed and _has_numbers(operation):
                difference = await asyncio.to_thread(self._compare, operation, first, now)
                self._add(operation.model_id, number, difference, same=same)

    def add_lost(self, operations: Sequence[ops.Operation]) -> None:
        """Operations whose first results, if there were any, are lost."""
        for operation in operations:
            if _has_numbers(operation):
                self._add(operation.model_id, 0, None, same=False)

    def _add(self, model_id: str, number: int, difference: OperationDifference | None, *, same: bool) -> None:
        found = self.models.get(model_id, ReplayDifferences())
        self.models[model_id] = found.with_operation(number, difference, same=same)

    def _compare(
        self, operation: ops.ForwardBackward | ops.OptimStep, first: ops.Result | None, now: ops.Result
    ) -> OperationDifference | None:
        match first, now:
            case ops.StepDone(), ops.StepDone():
                if NORM in first.metrics and NORM in now.metrics:
                    return step_difference(first.metrics[NORM], now.metrics[NORM], self._dtype)
            case ops.PassDone(), ops.PassDone():
                before, after = self._read(first), self._read(now)
                if before is not None and after is not None:
                    losses = before.metrics[LOSS], after.metrics[LOSS]
                    return pass_difference(
                        losses, _logprob_distance(before, after), ops.tokens_of(operation), self._dtype
                    )
            case _:
                pass
        return None

    def _read(self, result: ops.PassDone) -> ops.PassResult | None:
        """None if its file is gone, or it has no loss."""
        try:
            payload = result.payload
            data = payload.data if isinstance(payload, ops.InlinePayload) else self._payloads.read(payload)
            decoded = ops.decode_pass_result(data)
        except (StrataError, msgspec.MsgspecError) as error:
            if isinstance(error, StrataError) and error.code not in (Code.NOT_FOUND, Code.CORRUPT):
                raise
            _log.warning("replay_result_lost", reason=str(error))
            return None
        return decoded if LOSS in decoded.metrics else None


def report_differences(models: Mapping[str, ReplayDifferences], stopped: Sequence[str]) -> None:
    """Log a line for each model whose replay differs, or of which nothing is known."""
    for model_id, found in models.items():
        fields = msgspec.structs.asdict(found)
        if model_id in stopped:
            _log.error("model_stopped", model_id=model_id, **fields)
        elif found.above:
            _log.warning("replay_differs", model_id=model_id, **fields)
        elif found.loss or found.gradient_norm or found.logprobs or found.not_compared:
            _log.info("replay_compared", model_id=model_id, **fields)


def _has_numbers(operation: ops.Operation) -> TypeGuard[ops.ForwardBackward | ops.OptimStep]:
    """Passes that changed no model are not replayed."""
    return isinstance(operation, ops.ForwardBackward | ops.OptimStep)


def _logprob_distance(first: ops.PassResult, now: ops.PassResult) -> float:
    """The largest difference of a token."""
    if len(first.outputs) != len(now.outputs):
        return LARGEST
    pairs = zip(first.outputs, now.outputs, strict=True)
    return max((_array_distance(one.fields.get(LOGPROBS), two.fields.get(LOGPROBS)) for one, two in pairs), default=0.0)


def _array_distance(first: ops.Dense | None, now: ops.Dense | None) -> float:
    if first == now or first is None or now is None:
        return 0.0 if first == now else LARGEST
    if first.shape != now.shape or first.dtype is not ops.DType.F32 or now.dtype is not ops.DType.F32:
        return LARGEST
    one, two = (np.frombuffer(each.data, "<f4").astype(np.float64) for each in (first, now))
    same = (one == two) | (np.isnan(one) & np.isnan(two))
    with np.errstate(invalid="ignore"):
        differences = np.where(same, 0.0, np.abs(one - two))
    largest = float(differences.max(initial=0.0))
    return min(largest, LARGEST) if np.isfinite(largest) else LARGEST
