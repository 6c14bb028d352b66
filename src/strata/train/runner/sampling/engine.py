"""`SamplingEngine`: the built-in sampler of a rank: opening and closing samplers, copies of weights, a time slice, and
what it reports.

Sequences with the same base weights run in one batch, each with its own adapter or none. The batches and the KV cache
stay as they are between two time slices.

The weights of an open sampler never change, whatever is trained meanwhile, unless it is in flight. They are the base
itself, a copy of an adapter, or in full fine-tuning a copy of the full model. The in-flight samplers of a model share a
copy of its adapter, which another one replaces between two slices. Each rank holds its shards of the full model, and of
an adapter all but the experts that other ranks hold.
The live weights of a full fine-tune are never sampled from: a sequence that began before an optimizer step would be
continued by another model after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from strata.base import log
from strata.base.errors import Code, StrataError
from strata.base.support import INFLIGHT, report_experimental
from strata.train.core.sampling import AddedSample, SampledPart
from strata.train.runner.collectives import RankGroup
from strata.train.runner.determinism import any_kernels
from strata.train.runner.lora.adapter import Adapter
from strata.train.runner.model.base import DTYPES, BaseModel
from strata.train.runner.model.trained import local
from strata.train.runner.sampling.continuous_batching import RunningBatch
from strata.train.runner.sampling.inference_model import InferenceModel, verify_decode_matches_training
from strata.train.runner.sampling.kv_cache import KVCache
from strata.train.runner.sampling.request_validator import RequestValidator, SamplerLimits
from strata.train.runner.sampling.scatter import RankSequences, RankSlice, RankSliceResult, SampleScatter, SliceOutcomes
from strata.train.runner.sampling.sequences import SequenceGroup, tokens_from

LIVE: Final = ""
"""The key of the live base's weights. No sampler has this name."""

_log = log.get(__name__)

ReportParts = Callable[[Sequence[tuple[str, SampledPart]]], None]
"""Reports tokens of streamed samples, by request."""


class SamplingEngine:
    """All ranks construct it together. An architecture that cannot be sampled is rejected when a sampler is opened."""

    def __init__(self, base: BaseModel, ranks: RankGroup, limits: SamplerLimits) -> None:
        self.limits = limits
        self._base = base
        self._ranks = ranks
        self._model = InferenceModel(base, ranks)
        self._unsupported = verify_decode_matches_training(self._model, base, ranks.device)
        if self._unsupported and ranks.is_rank0:
            _log.warning("sampling_unsupported", reason=self._unsupported)
        self._samplers = SamplerWeights(base, limits.samplers)
        self._validator = RequestValidator(base, limits)
        self._cache = KVCache(limits.sequences, limits.cached_tokens, limits.prefix_tokens)
        self._batches: dict[str, RunningBatch] = {}
        self._aborted: list[tuple[str, str]] = []

    def __contains__(self, sampler_id: str) -> bool:
        return sampler_id in self._samplers

    def open_base(self, sampler_id: str) -> None:
        self.check_architecture()
        self._samplers.open_base(sampler_id)

    def open_adapter(self, sampler_id: str, adapter: Adapter) -> None:
        """Sample from a copy of the adapter as it is now."""
        self.check_architecture()
        self._samplers.open_adapter(sampler_id, adapter)

    def open_full(self, sampler_id: str, parameters: Mapping[str, torch.Tensor] | None = None) -> None:
        """Sample from a copy of these parameters, or of the live ones; sharded as the live ones are."""
        self.check_architecture()
        self._samplers.open_full(sampler_id, parameters)

    def publish(self, weights: str, adapter: Adapter, version: int, *, recompute: bool) -> None:
        """Let in-flight samplers sample from a copy of the adapter as it is now. Their running samples go on with it;
        with `recompute` after their keys and values were computed again."""
        self.check_architecture()
        if weights not in self._samplers and self._ranks.is_rank0:
            report_experimental((INFLIGHT,))
        copy = self._samplers.publish(weights, adapter, version)
        for batch in self._batches.values():
            batch.replace_weights(weights, copy, version, recompute=recompute)

    def close(self, sampler_id: str) -> None:
        """Requests that still run fail in the next time slice. In-flight weights are closed by their name."""
        self._samplers.close(sampler_id)
        self._cache.prefixes.drop(sampler_id)
        for batch in self._batches.values():
            aborted = {group.request_id for group in batch.groups() if group.weights == sampler_id}
            with torch.inference_mode():
                batch.drop(aborted)
            self._aborted += [(request_id, "its sampler was closed") for request_id in sorted(aborted)]
        self._batches.pop(sampler_id, None)

    def scatter(self) -> SampleScatter:
        """Makes for rank 0 what distributes requests over the ranks."""
        return SampleScatter(self._ranks.size, self.cost, self.limits.requests)

    def cost(self, added: AddedSample) -> int:
        """The tokens that each sequence of a request reserves; an error if the request cannot be sampled."""
        sample = added.sample
        if added.weights_name not in self._samplers:
            raise StrataError(Code.NOT_FOUND, f"there is no sampler {sample.sampler_id!r}")
        self._validator.check(sample, self._model.routers.token_bytes if added.routing else 0)
        drawn = max((each.length for each in added.drawn.values() if not each.stop_reason), default=0)
        if drawn >= self._validator.limit(sample):
            # The ranks that drew these had other limits.
            raise StrataError(Code.INVALID, f"{drawn} tokens of it are drawn, and there is no room for one more")
        return self._validator.slot_length(sample)

    @any_kernels()
    def run(self, work: RankSlice, report: ReportParts | None = None) -> RankSliceResult:
        """Run one time slice. The ranks communicate only to gather weights, and never between two steps.

        Tokens of streamed samples are reported after each step; without `report` they are part of the result.
        """
        outcomes = SliceOutcomes()
        outcomes.failed, self._aborted = self._aborted, []
        with torch.inference_mode():
            for added in work.add:
                self._add(added)
            for batch in self._batches.values():
                batch.drop(set(work.cancel))
        sampled_weights = [name for name in work.weights if name in self._samplers]
        for key in dict.fromkeys(self._samplers.key(name) for name in sampled_weights):
            sampled = [self._samplers.adapter(name) for name in sampled_weights if self._samplers.key(name) == key]
            adapters = [adapter for adapter in sampled if adapter is not None]
            with self._model.with_weights(self._samplers.parameters(key), adapters), torch.inference_mode():
                if key in self._batches:
                    _run_steps(self._batches[key], work, outcomes, report)
                    self._batches[key].take_drawn(outcomes)
        if not self._cache.sequences:
            self._cache.trim()
        return self._report(outcomes)

    def _report(self, outcomes: SliceOutcomes) -> RankSliceResult:
        batches = self._batches.values()
        return RankSliceResult(
            outcomes=outcomes,
            running=sum(len(batch.running) for batch in batches),
            waiting=sum(batch.waiting for batch in batches),
            free_sequences=self.limits.sequences - self._cache.sequences,
            free_tokens=self.limits.cached_tokens - self._cache.tokens,
        )

    def _add(self, added: RankSequences) -> None:
        sample = added.sample
        params = sample.params
        weights = added.weights or sample.sampler_id
        key = self._samplers.key(weights)
        if key not in self._batches:
            self._batches[key] = RunningBatch(key, self._cache, self._model, self.limits.prompt_tokens)
        prompt = tokens_from(sample.prompt).to(self._ranks.device)
        group = SequenceGroup(
            request_id=added.request_id,
            sample=sample,
            prompt=prompt,
            adapter=self._samplers.adapter(weights),
            limit=self._validator.limit(sample),
            slot_length=self._validator.slot_length(sample),
            stops=frozenset(params.stop_tokens) | (self._validator.end_tokens if params.end_tokens else frozenset()),
            decode=self._validator.decoder() if params.stop_strings else None,
            wants_prompt=added.prompt and sample.wants_prompt,
            share=added.share,
            weights=weights,
            version=self._samplers.version(weights),
            drawn=added.drawn,
            routers=self._model.routers if added.routing else None,
            new_shape=self._validator.shape_maker(params, prompt),
        )
        self._batches[key].add(group, added.indices)

    def entries(self) -> Iterator[tuple[str, Adapter | None, Mapping[str, torch.Tensor] | None, int | None]]:
        """Every sampler with its adapter, or its full model, or neither if it samples from the base; and the version of
        in-flight weights."""
        yield from self._samplers.entries()

    def check_architecture(self) -> None:
        """UNSUPPORTED if this architecture cannot be sampled."""
        if self._unsupported:
            raise StrataError(Code.UNSUPPORTED, self._unsupported)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Everything it holds on the device."""
        yield from self._cache.tensors()
        yield from self._samplers.tensors()


def _run_steps(batch: RunningBatch, work: RankSlice, outcomes: SliceOutcomes, report: ReportParts | None) -> None:
    for _ in range(work.steps):
        if not batch.running and not batch.waiting:
            return
        ended = outcomes.ended
        batch.step(outcomes)
        if report is not None and outcomes.streamed:
            report(outcomes.streamed)
            outcomes.streamed = []
        if work.eager and outcomes.ended > ended:
            return


@dataclass(frozen=True)
class _Weights:
    """An adapter or none on the live base, or all parameters of a full model, sharded as the live ones are."""

    adapter: Adapter | None = None
    full: Mapping[str, torch.Tensor] | None = None
    version: int | None = None


class SamplerWeights:
    """The open samplers. All ranks open and close the same ones, at the same place among their commands."""

    def __init__(self, base: BaseModel, capacity: int) -> None:
        self._base = base
        self._capacity = capacity
        self._samplers: dict[str, _Weights] = {}

    def __contains__(self, sampler_id: str) -> bool:
        return sampler_id in self._samplers

    def open_base(self, sampler_id: str) -> None:
        if self._base.settings.full:
            raise StrataError(Code.UNSUPPORTED, "this server trains the full model and keeps no copy of its base")
        self._check_capacity(sampler_id)
        self._samplers[sampler_id] = _Weights()

    def open_adapter(self, sampler_id: str, adapter: Adapter) -> None:
        """A copy of the adapter as it is now."""
        self._check_capacity(sampler_id)
        self._samplers[sampler_id] = _Weights(adapter=self._base.copy_for_sampling(adapter))

    def publish(self, name: str, adapter: Adapter, version: int) -> Adapter:
        """Replaces weights that in-flight samplers share by a copy of the adapter, which is returned."""
        if name not in self._samplers:
            self._check_capacity(name)
        copy = self._base.copy_for_sampling(adapter)
        self._samplers[name] = _Weights(adapter=copy, version=version)
        return copy

    def open_full(self, sampler_id: str, parameters: Mapping[str, torch.Tensor] | None = None) -> None:
        """A copy of these parameters, or of the live ones as they are now."""
        self._check_capacity(sampler_id)
        source = dict(self._base.lm.named_parameters()) if parameters is None else parameters
        self._samplers[sampler_id] = _Weights(full=_copy_weights(source, DTYPES[self._base.settings.dtype]))

    def close(self, sampler_id: str) -> None:
        if self._samplers.pop(sampler_id, None) is None:
            raise StrataError(Code.NOT_FOUND, f"there is no sampler {sampler_id!r}")

    def key(self, sampler_id: str) -> str:
        """Returns the key of the base weights that the sampler has. Sequences with the same key run in one batch."""
        return LIVE if self._samplers[sampler_id].full is None else sampler_id

    def adapter(self, sampler_id: str) -> Adapter | None:
        return self._samplers[sampler_id].adapter

    def version(self, sampler_id: str) -> int | None:
        return self._samplers[sampler_id].version

    def parameters(self, key: str) -> Mapping[str, torch.Tensor]:
        full = None if key == LIVE else self._samplers[key].full
        return dict(self._base.lm.named_parameters()) if full is None else full

    def entries(self) -> Iterator[tuple[str, Adapter | None, Mapping[str, torch.Tensor] | None, int | None]]:
        """Every sampler with its adapter or its full model, in the order in which they were opened."""
        for name, weights in self._samplers.items():
            yield name, weights.adapter, weights.full, weights.version

    def tensors(self) -> Iterator[torch.Tensor]:
        for weights in self._samplers.values():
            if weights.adapter is not None:
                yield from (block.padded for block in weights.adapter.blocks)
            yield from (local(shard) for shard in (weights.full or {}).values())

    def _check_capacity(self, sampler_id: str) -> None:
        if not sampler_id or sampler_id in self._samplers:
            raise StrataError(Code.CONFLICT, f"there is a sampler {sampler_id!r} already")
        if len(self._samplers) >= self._capacity:
            raise StrataError(
                Code.EXHAUSTED, f"{self._capacity} samplers are open, which is the limit; close one first"
            )


def _copy_weights(parameters: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Copy this rank's shards in the dtype of the arithmetic."""
    return {name: parameter.detach().to(dtype, copy=True) for name, parameter in parameters.items()}
