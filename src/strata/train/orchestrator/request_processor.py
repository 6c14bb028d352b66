"""`RequestProcessor`: builds the work of the ranks from a dispatch: reads payloads and checkpoints (retried every
second), and fits rows to the ranks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from strata.base import log
from strata.base.clock import Clock
from strata.base.retry import Backoff, RetryPolicy, no_jitter, retry
from strata.train.core import commands, ops
from strata.train.core.pack import redistribute
from strata.train.core.sampling import (
    AddedSample,
    SampleFailed,
    SampleOperation,
    SampleOutcome,
    SamplingSlice,
    encode_result,
)
from strata.train.core.state import Dispatch
from strata.train.payload import Payloads

RETRY_S: Final = 1.0
"""Time between two attempts."""
_log = log.get(__name__)
T = TypeVar("T")
FetchCheckpoint = Callable[[str], Awaitable[None]]
"""Restores the files of a checkpoint to its folder, if they are in the object store."""


class RequestProcessor:
    def __init__(self, payloads: Payloads, checkpoints: Path, fetch: FetchCheckpoint | None = None) -> None:
        self._payloads = payloads
        self._checkpoints = checkpoints
        self._fetch = fetch

    async def work(
        self, dispatch: Dispatch, operations: Sequence[ops.Operation], ranks: int, added: Sequence[AddedSample] = ()
    ) -> commands.Work:
        """Deterministic: the same for the same dispatch. NOT_FOUND or CORRUPT if a payload is lost."""
        if passes := [each for each in operations if isinstance(each, ops.ForwardBackward)]:
            return await self._pass(dispatch, passes, ranks)
        if dispatch.slice is not None:
            plan = dispatch.slice
            return SamplingSlice(plan.steps, added, plan.cancel, plan.eager)
        if steps := [each for each in operations if isinstance(each, ops.OptimStep)]:
            return commands.StepsCommand(steps)
        (operation,) = operations
        if isinstance(operation, ops.LoadWeights | ops.OpenSampler):
            await self._restore_files(dispatch.path)
        return _single(dispatch, operation, str(self._checkpoints / dispatch.path))

    async def _restore_files(self, path: str) -> None:
        """Restores the files of the checkpoint at this path, if it is only in the object store."""
        if self._fetch is not None and path:
            await self._fetch(path)

    async def _pass(
        self, dispatch: Dispatch, passes: Sequence[ops.ForwardBackward], ranks: int
    ) -> commands.PassCommand:
        items = []
        for future_id, operation in zip(dispatch.future_ids, passes, strict=True):
            data = await self._read(operation.payload)
            item = commands.PassItem(future_id, operation.model_id, operation.loss, operation.config, data)
            if isinstance(operation, ops.RoutedForwardBackward):
                item = msgspec.structs.replace(item, routing=await self._read(operation.routing))
            items.append(item)
        rows = dispatch.rows
        if len(rows) != ranks:
            rows = redistribute(rows, [each.lengths for each in passes], ranks)
        return commands.PassCommand(passes[0].forward_only, items, rows)

    async def _read(self, payload: ops.Payload) -> bytes:
        if isinstance(payload, ops.InlinePayload):
            return payload.data
        return await asyncio.to_thread(self._payloads.read, payload)

    async def keep(self, result: ops.Result, *, inline_bytes: int) -> ops.Result:
        """A result as it is journaled: a large payload goes into a file."""
        if not isinstance(result, ops.PassDone | ops.SampleDone) or not isinstance(result.payload, ops.InlinePayload):
            return result
        data = result.payload.data
        if len(data) <= inline_bytes:
            return result
        return msgspec.structs.replace(result, payload=await asyncio.to_thread(self._payloads.store, data))


async def retry_unavailable(make: Callable[[], Awaitable[T]], clock: Clock, limit_s: float) -> T:
    """The result of `make`, retried while something that it needs is UNAVAILABLE, for at most `limit_s`."""
    return await retry(
        make,
        RetryPolicy(backoff=Backoff(first_s=RETRY_S, most_s=RETRY_S), give_up_after_s=limit_s),
        clock=clock,
        chance=no_jitter,
        on_retry=lambda error, _: _log.warning("dispatch_input_unavailable", reason=str(error)),
    )


def _single(dispatch: Dispatch, operation: ops.Operation, path: str) -> commands.Work:
    """The work of an operation that is dispatched alone."""
    match operation:
        case ops.SaveWeights():
            return commands.SaveState(operation, path)
        case ops.SyncWeights():
            return commands.SaveState(operation.save(), path)
        case ops.LoadWeights():
            return commands.LoadState(operation, path)
        case ops.SaveSampler() | ops.OpenSampler():
            return commands.MakeSampler(operation, path if dispatch.path else "", dispatch.close)
        case ops.ForwardBackward() | ops.OptimStep() | ops.MalformedOperation() | SampleOperation():
            raise AssertionError(f"{type(operation).__name__} is not dispatched alone")
        case _:
            return commands.ManageModel(operation)


def sample_result(outcome: SampleOutcome) -> ops.Result:
    """The result of a sample as it is stored: its sequences are encoded once for all readers."""
    if isinstance(outcome, SampleFailed):
        return ops.Failed(outcome.category, outcome.message)
    return ops.SampleDone(ops.InlinePayload(encode_result(outcome)), outcome.sampled_tokens)
