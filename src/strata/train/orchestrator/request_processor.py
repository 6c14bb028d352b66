"""From a dispatch of the core to what the ranks are told: payloads are read, rows fitted to the ranks there are."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final, TypeVar

from strata.base import log
from strata.base.clock import Clock
from strata.base.retry import Backoff, RetryPolicy, no_jitter, retry
from strata.train.core import commands, ops
from strata.train.core.pack import respread
from strata.train.core.sampling import (
    Added,
    Quantum,
    QuantumPlan,
    Sample,
    SampleFailed,
    SampleOutcome,
    encode_result,
)
from strata.train.core.state import Dispatch
from strata.train.payload import Payloads

AGAIN_S: Final = 1.0
"""Between two tries to reach something."""
_log = log.get(__name__)
Made = TypeVar("Made")
Bring = Callable[[str], Awaitable[None]]
"""Sees to it that the files of a checkpoint are in its folder, if they are anywhere."""


class RequestProcessor:
    def __init__(self, payloads: Payloads, checkpoints: Path, bring: Bring | None = None) -> None:
        self._payloads = payloads
        self._checkpoints = checkpoints
        self._bring = bring

    async def work(  # noqa: PLR0911 - one arm per kind
        self, dispatch: Dispatch, operations: Sequence[ops.Operation], ranks: int, tenants: Sequence[str] = ()
    ) -> commands.Work:
        """The same for the same dispatch, whenever it is asked for. NOT_FOUND or CORRUPT if a payload is lost."""
        passes = [each for each in operations if isinstance(each, ops.ForwardBackward)]
        if passes:
            return await self._pass(dispatch, passes, ranks)
        if dispatch.quantum is not None:
            return _quantum(dispatch, dispatch.quantum, operations, tenants)
        steps = [each for each in operations if isinstance(each, ops.OptimStep)]
        if steps:
            return commands.Steps(steps)
        (operation,) = operations
        path = str(self._checkpoints / dispatch.path)
        if self._bring is not None and dispatch.path and isinstance(operation, ops.LoadWeights | ops.OpenSampler):
            await self._bring(dispatch.path)
        match operation:
            case ops.SaveWeights():
                return commands.SaveState(operation, path)
            case ops.SyncWeights():
                return commands.SaveState(operation.save(), path)
            case ops.LoadWeights():
                return commands.LoadState(operation, path)
            case ops.SaveSampler() | ops.OpenSampler():
                return commands.MakeSampler(operation, path, dispatch.close)
            case ops.ForwardBackward() | ops.OptimStep() | ops.Unreadable() | Sample():
                raise AssertionError(f"{type(operation).__name__} is not dispatched alone")
            case _:
                return commands.Manage(operation)

    async def _pass(self, dispatch: Dispatch, passes: Sequence[ops.ForwardBackward], ranks: int) -> commands.Pass:
        items = []
        for future_id, operation in zip(dispatch.future_ids, passes, strict=True):
            data = await self._read(operation.payload)
            items.append(commands.PassItem(future_id, operation.model_id, operation.loss, operation.config, data))
        rows = dispatch.rows
        if len(rows) != ranks:
            rows = respread(rows, [each.lengths for each in passes], ranks)
        return commands.Pass(passes[0].forward_only, items, rows)

    async def _read(self, payload: ops.Payload) -> bytes:
        if isinstance(payload, ops.Inline):
            return payload.data
        return await asyncio.to_thread(self._payloads.read, payload)

    async def keep(self, result: ops.Result, *, inline_bytes: int) -> ops.Result:
        """A result as it is journaled: its payload in a file if it is large."""
        if not isinstance(result, ops.PassDone | ops.SampleDone) or not isinstance(result.payload, ops.Inline):
            return result
        data = result.payload.data
        if len(data) <= inline_bytes:
            return result
        return type(result)(await asyncio.to_thread(self._payloads.store, data))


async def waited_for(make: Callable[[], Awaitable[Made]], clock: Clock, limit_s: float) -> Made:
    """What comes of it. While something that it needs is UNAVAILABLE it is tried again, for so long."""
    return await retry(
        make,
        RetryPolicy(backoff=Backoff(first_s=AGAIN_S, most_s=AGAIN_S), give_up_after_s=limit_s),
        clock=clock,
        chance=no_jitter,
        on_retry=lambda error, _: _log.warning("waiting for what a dispatch needs", reason=str(error)),
    )


def _quantum(
    dispatch: Dispatch, plan: QuantumPlan, operations: Sequence[ops.Operation], tenants: Sequence[str]
) -> Quantum:
    added = []
    for future_id, operation, tenant in zip(dispatch.future_ids, operations, tenants, strict=True):
        assert isinstance(operation, Sample), f"{future_id} is no sample"
        added.append(Added(future_id, operation, tenant))
    return Quantum(plan.steps, added, plan.cancel, plan.eager)


def sampled(outcome: SampleOutcome) -> ops.Result:
    """As it is kept: the sequences encoded once, for whoever asks."""
    if isinstance(outcome, SampleFailed):
        return ops.Failed(outcome.category, outcome.message)
    return ops.SampleDone(ops.Inline(encode_result(outcome)))
