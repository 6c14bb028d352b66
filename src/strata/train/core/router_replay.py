"""Router replay (R3) as values: which models ask for it, whose samples record their routing, and which samples a pass
may replay.

The routing of a sample is in its result. A pass names it by a payload of its own, from its acceptance on: so a replay
of its dispatch gives the same numbers, whatever became of the sample meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Final

import msgspec

from strata.train.core import ops
from strata.train.core.model_options import is_set
from strata.train.core.sampling import SampledRouting, SampleOperation
from strata.train.core.state import TrainState

ROUTER_REPLAY: Final = "router_replay"
"""A key in the metadata of a model: `true` replays the routing of its samples in its passes."""


class PassRouting(msgspec.Struct, frozen=True, array_like=True):
    """What a payload holds: for each datum of a pass the routing of its first tokens; None if it replays nothing."""

    datums: Sequence[SampledRouting | None]


encode_pass_routing: Final = msgspec.msgpack.Encoder().encode
decode_pass_routing: Final = msgspec.msgpack.Decoder(PassRouting).decode


def wants_router_replay(metadata: Mapping[str, str]) -> bool:
    return is_set(metadata, ROUTER_REPLAY)


def recorded_for(state: TrainState, sample: SampleOperation) -> str:
    """The model whose passes may replay the routing of this sample; empty if none does.

    Another tenant may sample from a public checkpoint: what it draws is no concern of the checkpoint's owner. In-flight
    samples have the routing of several versions, and of a lost one only what a later one computed: none is recorded.
    """
    sampler = state.samplers.get(sample.sampler_id)
    model = None if sampler is None else state.models.get(sampler.model_id)
    if sampler is None or sampler.inflight or model is None or model.tenant != sampler.tenant:
        return ""
    return model.model_id if wants_router_replay(model.create.user_metadata) else ""


def replayed_models(state: TrainState, tenant: str, operation: ops.ForwardBackward) -> Set[str]:
    """The models whose samples this pass may replay: its own, and the one whose weights it began with, so that a run
    that continues learns from its last answers as before. None if it asks for no replay, or came before."""
    model = state.models.get(operation.model_id)
    if model is None or model.tenant != tenant or not wants_router_replay(model.create.user_metadata):
        return frozenset()
    return {model.model_id, model.lineage.parent.removeprefix("tinker://").partition("/")[0]}


def recorded_samples(state: TrainState, tenant: str, models: Set[str]) -> Iterator[tuple[bytes, ops.Payload, int]]:
    """Samples of these models whose results are kept, oldest first: the digest of all tokens of each, the payload, and
    its place there."""
    for future in state.futures.recorded:
        result = future.result
        if isinstance(result, ops.RoutedSampleDone) and future.tenant == tenant and result.model_id in models:
            yield from ((digest, result.payload, place) for place, digest in enumerate(result.digests))
