"""In-flight samplers: the weights that those of a model share, what is durable of their running samples, when a sample
is too stale, and which shared weights no sampler has any more.

A version is the sequence number of the save that published it. The ranks replace the weights between two slices, in the
order of the operations of the model, so every slice draws with one version. At the end of a slice its tokens become
durable: ranks that are lost cost a sample the tokens of one slice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final

import msgspec

from strata.train.core import ops
from strata.train.core.facts import Fact, OperationFinished, SliceEnded
from strata.train.core.sampling import AddedSample, DrawnPart, DrawnSequence, SampledPart, SampleOperation
from strata.train.core.state import Dispatch, DrawnSample, TrainState

RECOMPUTE: Final = "inflight_cache"
"""A key in the metadata of a model: `recompute` has the keys and values of running samples computed again by each new
version. Otherwise they are kept."""
MAX_PARTS_BYTES: Final = 256 << 10
"""What one slice makes durable: a fact of the journal has room for four times as much."""
MAX_DRAWN_BYTES: Final = 16 << 20
"""What is durable of all running samples together, a part of the saved state."""
_SEQUENCE_BYTES: Final = 64
_SPAN_BYTES: Final = 16
ONLY_ADAPTERS: Final = "in-flight samplers are of LoRA adapters: of a full fine-tune, a version is a copy of the model"


def weights_name(model_id: str) -> str:
    """Names, for the ranks, the weights that the in-flight samplers of a model share. No sampler has this name."""
    return f"{model_id}:inflight"


def recomputes(metadata: Mapping[str, str]) -> bool:
    return metadata.get(RECOMPUTE, "") == "recompute"


def added_sample(state: TrainState, future_id: str, sample: SampleOperation, *, routing: bool) -> AddedSample:
    """A sample as a slice brings it to the ranks: an in-flight one goes on from what is durable of it."""
    sampler = state.samplers.get(sample.sampler_id)
    model_id = sampler.inflight_model if sampler is not None else ""
    drawn = state.drawn.get(future_id, DrawnSample())
    return AddedSample(
        future_id,
        sample,
        state.futures.tenant_of(future_id),
        weights_name(model_id) if model_id else "",
        drawn.sequences,
        routing,
    )


def durable_parts(
    state: TrainState, parts: Mapping[str, Sequence[DrawnPart]], ended: Collection[str]
) -> Mapping[str, Sequence[DrawnPart]]:
    """Returns what a slice added to samples that run on. Parts that do not follow what is durable are left out, and
    those that there is no room for: the result has their tokens, and new ranks draw them again."""
    known = sum(_size(each) for drawn in state.drawn.values() for each in drawn.sequences.values())
    room = min(MAX_PARTS_BYTES, MAX_DRAWN_BYTES - known)
    kept: dict[str, list[DrawnPart]] = {}
    for future_id, of_sample in parts.items():
        if future_id not in state.sampling or future_id in ended:
            continue
        for part in of_sample:
            size = _size(part.added)
            if size <= room and _follows(state, future_id, part):
                kept.setdefault(future_id, []).append(part)
                room -= size
    return kept


def _size(drawn: DrawnSequence) -> int:
    top = 0 if drawn.top is None else len(drawn.top.tokens) + len(drawn.top.logprobs)
    return _SEQUENCE_BYTES + len(drawn.tokens) + len(drawn.logprobs) + _SPAN_BYTES * len(drawn.versions) + top


def _follows(state: TrainState, future_id: str, part: DrawnPart) -> bool:
    known = state.drawn.get(future_id, DrawnSample()).sequences.get(part.index, DrawnSequence())
    return part.start == known.length and not known.stop_reason


def record_parts(state: TrainState, parts: Mapping[str, Sequence[DrawnPart]]) -> None:
    for future_id, of_sample in parts.items():
        before = state.drawn.get(future_id, DrawnSample())
        sequences = dict(before.sequences)
        for part in of_sample:
            sequences[part.index] = sequences.get(part.index, DrawnSequence()).plus(part.added)
        state.drawn[future_id] = DrawnSample(sequences, before.saves)


def streamed_parts(state: TrainState, facts: Sequence[Fact]) -> Iterator[tuple[str, SampledPart]]:
    """Yields what became durable of samples that clients read while they run. The last token of a sequence comes with
    its result: it may be one that is not shown."""
    slices = [fact.drawn for fact in facts if isinstance(fact, SliceEnded)]
    for future_id, parts in (each for drawn in slices for each in drawn.items()):
        sample = state.sampling.get(future_id)
        for part in parts if sample is not None and sample.stream else ():
            added, count = part.added, part.added.length - bool(part.added.stop_reason)
            if count:
                top = added.top and added.top.first(count)
                end = 4 * count
                yield future_id, SampledPart(part.index, part.start, added.tokens[:end], added.logprobs[:end], top)


def cancel_stale(
    state: TrainState, dispatch: Dispatch, results: Sequence[ops.Result], at_s: float
) -> Sequence[OperationFinished]:
    """The samples that the in-flight save of this dispatch makes staler than their clients allow."""
    future = state.futures.get(dispatch.future_ids[0]) if dispatch.future_ids else None
    save = future.operation if future is not None else None
    if not isinstance(save, ops.SaveSampler) or not save.inflight or not isinstance(results[0], ops.SamplerOpened):
        return ()
    stale = []
    for future_id, sample in _drawn_samples(state, save.model_id):
        limit, saves = sample.max_staleness, state.drawn[future_id].saves + 1
        if limit is not msgspec.UNSET and saves > limit:
            reason = f"its first token is {saves} in-flight saves old, and max_staleness is {limit}; draw it again"
            stale.append(OperationFinished(future_id, ops.Failed("cancelled", reason), at_s))
    return stale


def count_save(state: TrainState, save: ops.SaveSampler) -> None:
    for future_id, _ in _drawn_samples(state, save.model_id):
        drawn = state.drawn[future_id]
        state.drawn[future_id] = DrawnSample(drawn.sequences, drawn.saves + 1)


def _drawn_samples(state: TrainState, model_id: str) -> Iterator[tuple[str, SampleOperation]]:
    """Samples from the in-flight weights of a model that have durable tokens."""
    for future_id in list(state.drawn):
        sample = state.sampling.get(future_id) or state.waiting.get(future_id)
        if sample is not None and state.samplers[sample.sampler_id].inflight_model == model_id:
            yield future_id, sample


def unused_weights(state: TrainState, evicted: Collection[str]) -> list[str]:
    """The shared weights of which no sampler is left when these are evicted."""
    left = {each.inflight_model for each in state.samplers.values() if each.sampler_id not in evicted}
    gone = {state.samplers[each].inflight_model for each in evicted} - left - {""}
    return [weights_name(each) for each in sorted(gone)]
