"""Sampler: one quantum of sampling on a rank. The ModelRunner of every rank has one, and they run together.

Sequences that have the same base weights run in one batch, each with its own adapter or none. The batches, and what
their sequences remember, stay where they are between two quanta.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from strata.base.errors import Code, StrataError
from strata.train.core.sampling import Sample
from strata.train.runner.collectives import RankGroup
from strata.train.runner.lora.adapter import Adapter
from strata.train.runner.model.base import DTYPES, BaseModel
from strata.train.runner.sampling.batch import Batch, Outcomes
from strata.train.runner.sampling.inference_model import InferenceModel, put_together
from strata.train.runner.sampling.kv_cache import KVCache
from strata.train.runner.sampling.request_validator import SamplerLimits, Terms
from strata.train.runner.sampling.sampler_weights import SamplerWeights
from strata.train.runner.sampling.scatter import RankAdded, RankQuantum, RankSampled, SampleScatter
from strata.train.runner.sampling.self_check import verify_decode_matches_training
from strata.train.runner.sampling.sequences import Request, tokens_from


class Sampler:
    """All ranks make one together. An architecture that cannot be sampled here is refused when a sampler is opened."""

    def __init__(self, base: BaseModel, ranks: RankGroup, limits: SamplerLimits) -> None:
        self.limits = limits
        self._base = base
        self._ranks = ranks
        self._twin = InferenceModel(base.lm, base.decoder, DTYPES[base.settings.dtype], base.settings.logits_bytes)
        self._trouble = verify_decode_matches_training(self._twin, base, ranks.device)
        self._samplers = SamplerWeights(base, limits.samplers)
        self._terms = Terms(base, limits)
        self._cache = KVCache(limits.sequences, limits.cached_tokens)
        self._batches: dict[str, Batch] = {}
        self._closed: list[tuple[str, str]] = []

    def __contains__(self, sampler_id: str) -> bool:
        return sampler_id in self._samplers

    def open_base(self, sampler_id: str) -> None:
        self.check_architecture()
        self._samplers.open_base(sampler_id)

    def open_adapter(self, sampler_id: str, adapter: Adapter) -> None:
        """Of the adapter as it is now."""
        self.check_architecture()
        self._samplers.open_adapter(sampler_id, adapter)

    def open_whole(self, sampler_id: str, parameters: Mapping[str, torch.Tensor] | None = None) -> None:
        """Of these parameters, else of the live ones, as they are now; sharded as the live ones are."""
        self.check_architecture()
        self._samplers.open_whole(sampler_id, parameters)

    def close(self, sampler_id: str) -> None:
        """Requests that still run fail with the next quantum."""
        self._samplers.close(sampler_id)
        for batch in self._batches.values():
            gone = {one.request_id for one in batch.requests() if one.sample.sampler_id == sampler_id}
            with torch.inference_mode():
                batch.drop(gone)
            self._closed += [(request_id, "its sampler was closed") for request_id in sorted(gone)]
        self._batches.pop(sampler_id, None)

    def spread(self) -> SampleScatter:
        """For rank 0: how requests come to the ranks."""
        return SampleScatter(self._ranks.size, self.cost, self.limits.requests)

    def cost(self, sample: Sample) -> int:
        """The tokens that are reserved for each sequence of a request; an error if it cannot be sampled."""
        if sample.sampler_id not in self._samplers:
            raise StrataError(Code.NOT_FOUND, f"there is no sampler {sample.sampler_id!r}")
        self._terms.check(sample)
        return self._terms.place_length(sample)

    def run(self, work: RankQuantum) -> RankSampled:
        """All ranks together: they meet where weights are put together, and nowhere in between."""
        outcomes = Outcomes()
        outcomes.failed, self._closed = self._closed, []
        with torch.inference_mode():
            for added in work.add:
                self._add(added)
            for batch in self._batches.values():
                batch.drop(set(work.cancel))
        open_ones = [sampler_id for sampler_id in work.samplers if sampler_id in self._samplers]
        for key in dict.fromkeys(self._samplers.key(sampler_id) for sampler_id in open_ones):
            with torch.no_grad():
                weights = put_together(self._samplers.parameters(key), self._twin.dtype)
            if key in self._batches:
                with self._twin.with_weights(weights), torch.inference_mode():
                    _run(self._batches[key], work, outcomes)
        if not self._cache.sequences:
            self._cache.trim()
        return self._report(outcomes)

    def _report(self, outcomes: Outcomes) -> RankSampled:
        batches = self._batches.values()
        return RankSampled(
            sequences=outcomes.sequences,
            prompts=outcomes.prompts,
            failed=outcomes.failed,
            running=sum(len(batch.running) for batch in batches),
            waiting=sum(batch.waiting for batch in batches),
            free_sequences=self.limits.sequences - self._cache.sequences,
            free_tokens=self.limits.cached_tokens - self._cache.tokens,
            sampled_tokens=outcomes.sampled_tokens,
            prompt_tokens=outcomes.prompt_tokens,
        )

    def _add(self, added: RankAdded) -> None:
        sample = added.sample
        params = sample.params
        key = self._samplers.key(sample.sampler_id)
        if key not in self._batches:
            self._batches[key] = Batch(key, self._cache, self._twin, self.limits.prompt_tokens)
        request = Request(
            request_id=added.request_id,
            sample=sample,
            prompt=tokens_from(sample.prompt).to(self._ranks.device),
            adapter=self._samplers.adapter(sample.sampler_id),
            limit=self._terms.limit(sample),
            place_length=self._terms.place_length(sample),
            stops=frozenset(params.stop_tokens) | (self._terms.ends if params.end_tokens else frozenset()),
            decode=self._terms.decoder() if params.stop_strings else None,
            wants_prompt=added.prompt and sample.wants_prompt,
            share=added.share,
        )
        self._batches[key].add(request, added.indices)

    def kept(self) -> Iterator[tuple[str, Adapter | None, Mapping[str, torch.Tensor] | None]]:
        """Every sampler with its adapter, or its whole model, or neither if it is the base."""
        yield from self._samplers.kept()

    def check_architecture(self) -> None:
        """UNSUPPORTED if nothing can be sampled from this model."""
        if self._trouble:
            raise StrataError(Code.UNSUPPORTED, self._trouble)

    def tensors(self) -> Iterator[torch.Tensor]:
        """All that it keeps on the device."""
        yield from self._cache.tensors()
        yield from self._samplers.tensors()


def _run(batch: Batch, work: RankQuantum, outcomes: Outcomes) -> None:
    for _ in range(work.steps):
        if not batch.running and not batch.waiting:
            return
        before = len(outcomes.sequences) + len(outcomes.failed)
        batch.step(outcomes)
        if work.eager and len(outcomes.sequences) + len(outcomes.failed) > before:
            return
