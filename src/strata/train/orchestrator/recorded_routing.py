"""Router replay in the orchestrator: the routing of a pass, found by the tokens of its datums.

A datum replays the longest of its models' samples that it begins with: all tokens of the sample, prompt and answer. So
no client names a sample. Where it ends in a datum follows from what the loss learns from: at the end of the datum, or
of a run of targets that count.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Final

import msgspec
import numpy as np

from strata.base import log
from strata.base.errors import StrataError
from strata.train.core import ops
from strata.train.core.router_replay import (
    PassRouting,
    encode_pass_routing,
    recorded_for,
    recorded_samples,
    replayed_models,
)
from strata.train.core.sampling import EndedSample, SampledRouting, SampleOperation, SampleResult, decode_result
from strata.train.core.state import TrainState
from strata.train.orchestrator.sampler_gap import digest_beginnings, digest_tokens, read_array
from strata.train.payload import Payloads

Recorded = Mapping[bytes, tuple[ops.Payload, int]]
"""The result of each recorded sample, and its place there, by the digest of its tokens."""
MAX_ROUTING_BYTES: Final = 1 << 30
"""The most of a pass, which travels to the ranks in one piece. More is not replayed."""
_log = log.get(__name__)


def name_recorded(state: TrainState, ended: EndedSample, result: ops.Result) -> ops.Result:
    """The result of a sample, with the digests that it is found by if its routing was recorded."""
    future, outcome = state.futures.get(ended.request_id), ended.outcome
    sample = None if future is None else future.operation
    if not (isinstance(sample, SampleOperation) and isinstance(outcome, SampleResult)):
        return result
    model_id = recorded_for(state, sample)
    if not model_id or not isinstance(result, ops.SampleDone) or any(not each.routing for each in outcome.sequences):
        return result
    digests = [digest_tokens(sample.prompt, each.tokens) for each in outcome.sequences]
    return ops.RoutedSampleDone(result.payload, result.tokens, model_id, digests)


async def with_routing(
    state: TrainState, payloads: Payloads, reading: asyncio.Lock, tenant: str, operation: ops.ForwardBackward
) -> ops.ForwardBackward:
    """The pass with the routing that it replays; as it is if it replays none, or was accepted before. One at a time is
    read for: what is rejected later costs its reading too."""
    models = replayed_models(state, tenant, operation)
    if not models or state.futures.get(f"{operation.model_id}:{operation.seq_id}") is not None:
        return operation
    # Of two samples with the same tokens, the later one.
    recorded = {digest: (payload, place) for digest, payload, place in recorded_samples(state, tenant, models)}
    if not recorded:
        return operation
    async with reading:
        routing = await asyncio.to_thread(_find_routing, payloads, recorded, operation)
    if routing is None:
        return operation
    return ops.RoutedForwardBackward(**msgspec.structs.asdict(operation), routing=routing)


def _find_routing(payloads: Payloads, recorded: Recorded, operation: ops.ForwardBackward) -> ops.Payload | None:
    """Returns None if nothing is replayed, also if a payload cannot be read: the pass itself may fail of it later."""
    last: tuple[ops.Payload, SampleResult] | None = None
    found: list[SampledRouting | None] = []
    size = 0
    try:
        for datum in ops.decode_pass_data(payloads.read(operation.payload)).datums:
            matches = (recorded.get(digest) for digest in _digests_of_beginnings(datum))
            match = next((match for match in matches if match is not None), None)
            if match is None:
                found.append(None)
                continue
            payload, place = match
            # Datums of one request are adjacent: the results of a pass need not all be in memory.
            if last is None or last[0] != payload:
                last = payload, decode_result(payloads.read(payload))
            routing = last[1].sequences[place].routing
            found.append(routing)
            size += 0 if routing is None else len(routing.experts)
            if size > MAX_ROUTING_BYTES:
                _log.warning("routing_too_large", model_id=operation.model_id, seq_id=operation.seq_id)
                return None
    except (StrataError, msgspec.MsgspecError) as error:
        _log.warning("routing_not_read", model_id=operation.model_id, seq_id=operation.seq_id, reason=str(error))
        return None
    if not any(found):
        return None
    return payloads.keep(encode_pass_routing(PassRouting(found)))


def _digests_of_beginnings(datum: ops.Datum) -> Iterator[bytes]:
    """Yields digests of beginnings of a datum that a sample may be, the longest first."""
    targets = read_array(datum, "target_tokens")
    if targets is None or len(targets) != datum.length or not datum.length:
        return
    tokens = datum.tokens + targets[-1:].astype("<i4").tobytes()
    counts = np.ones(datum.length, bool)
    for name in ("weights", "advantages"):
        values = read_array(datum, name)
        if values is not None and values.shape == counts.shape:
            counts &= values != 0
    ends = np.flatnonzero(counts[:-1] & ~counts[1:]) + 2
    yield from reversed(digest_beginnings(tokens, [*ends.tolist(), datum.length + 1]))
