"""A sampler on this process's rank, asked as the orchestrator would ask it, and what other means say of the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LogitsProcessorList
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from strata.train.core.model_options import LoraConfig
from strata.train.core.sampling import (
    AddedSample,
    DrawnSequence,
    SampledSequence,
    SampleOperation,
    SampleOutcome,
    SampleParams,
    SampleResult,
    SamplingSlice,
    SliceResult,
    TopLogprobs,
)
from strata.train.runner.collectives import RankGroup
from strata.train.runner.lora.adapter import Adapter
from strata.train.runner.lora.targets import targets_of
from strata.train.runner.model.base import BaseModel
from strata.train.runner.model.trained import local
from strata.train.runner.passes.logprobs import PackedRow
from strata.train.runner.sampling.engine import SamplingEngine
from strata.train.runner.sampling.request_validator import SamplerLimits
from strata.train.runner.sampling.scatter import decode_slice, decode_slice_result, encode
from strata.train.runner.settings import RunnerSettings

Array = np.ndarray[Any, Any]
BASE = "base"
END, SLICE, TRAIN = range(3)


def base_of(path: Path, ranks: RankGroup, **options: Any) -> BaseModel:
    return BaseModel(RunnerSettings(model=str(path), sleep_folder=path.parent / "asleep", **options), ranks)


class Stage:
    """Rank 0's part of a sampler on one rank or several: the others call `follow` as often as this calls `slice`."""

    def __init__(self, base: BaseModel, ranks: RankGroup, **limits: int) -> None:
        self.base = base
        self.ranks = ranks
        self.sampler = SamplingEngine(base, ranks, SamplerLimits(**limits))
        self.scatter = self.sampler.scatter()
        self.outcomes: dict[str, SampleOutcome] = {}

    def slice(
        self,
        steps: int,
        add: Mapping[str, SampleOperation] | None = None,
        cancel: Sequence[str] = (),
        *,
        eager: bool = False,
        share: str = "",
        weights: str = "",
        drawn: Mapping[str, Mapping[int, DrawnSequence]] | None = None,
        routing: bool = False,
    ) -> SliceResult:
        added = [
            AddedSample(request_id, sample, share, weights, (drawn or {}).get(request_id, {}), routing)
            for request_id, sample in (add or {}).items()
        ]
        parts = self.scatter.partition(SamplingSlice(steps, added, cancel, eager))
        encoded = [encode(part) for part in parts]
        if self.ranks.size > 1:
            self.ranks.broadcast_header(SLICE, [len(part) for part in encoded])
            self.ranks.scatter(encoded)
        report = encode(self.sampler.run(decode_slice(encoded[0])))
        done = self.scatter.merge([decode_slice_result(one) for one in self.ranks.gather(report)])
        assert done.running + done.free_sequences == self.sampler.limits.sequences * self.ranks.size
        cache = self.sampler._cache
        assert cache.allocated + cache.prefixes.tokens <= self.sampler.limits.cached_tokens
        self.outcomes |= {one.request_id: one.outcome for one in done.ended}
        return done

    def follow(self) -> None:
        """What every other rank does, until rank 0 has enough."""
        while True:
            kind, sizes = self.ranks.receive_header()
            if kind == END:
                return
            if kind == TRAIN:
                self._train()
            else:
                self.ranks.gather(encode(self.sampler.run(decode_slice(self.ranks.receive_scatter(sizes)))))

    def end(self) -> None:
        self.ranks.broadcast_header(END, [0] * self.ranks.size)

    def train(self) -> None:
        """A real pass there and back between two slices, and a step if the weights themselves are trained."""
        self.ranks.broadcast_header(TRAIN, [0] * self.ranks.size)
        self._train()

    def _train(self) -> None:
        tokens = torch.arange(4, 24)
        row = PackedRow(tokens=tokens, documents=[20], spans=(), logit_indices=tokens[:19] - 4, targets=tokens[1:])
        (-self.base.logprobs(row).sum()).backward()  # type: ignore[no-untyped-call]
        for parameter in self.base.lm.parameters():
            if parameter.grad is not None:
                local(parameter).sub_(local(parameter.grad), alpha=1e-3)
                parameter.grad = None

    def all(
        self, samples: Mapping[str, SampleOperation], steps: int = 8, *, routing: bool = False
    ) -> dict[str, SampleOutcome]:
        """Slice after slice, until all of these have ended."""
        done = self.slice(steps, samples, routing=routing)
        for _ in range(2000):
            if not done.requests:
                return {request_id: self.outcomes.pop(request_id) for request_id in samples}
            done = self.slice(steps)
        raise AssertionError(f"{done.requests} requests never ended")

    def one(self, sample: SampleOperation) -> SampleResult:
        found = self.all({"one": sample})["one"]
        assert isinstance(found, SampleResult), found
        return found

    def adapter(self, seed: int, config: LoraConfig, size: float = 0.2) -> Adapter:
        """One that changes the model: neither of its matrices is zero."""
        made = Adapter(config, targets_of(self.base.lm, config), self.ranks.device)
        made.flat.copy_(torch.randn(made.size, generator=torch.Generator().manual_seed(seed)) * size)
        return made


def prompt_of(seed: int, length: int) -> bytes:
    return np.random.default_rng(seed).integers(4, 260, length).astype("<i4").tobytes()


def ask(prompt: bytes, sampler_id: str = BASE, *, seq_id: int = 0, num: int = 1, **options: Any) -> SampleOperation:
    """Fields of the sample and of its parameters side by side."""
    own = {name: options.pop(name) for name in list(options) if name in SampleOperation.__struct_fields__}
    return SampleOperation(sampler_id, seq_id, prompt, SampleParams(**options), num_samples=num, **own)


def greedy(prompt: bytes, sampler_id: str = BASE, tokens: int = 12, **options: Any) -> SampleOperation:
    return ask(prompt, sampler_id, temperature=0.0, max_tokens=tokens, **options)


def tokens_in(found: SampledSequence | bytes) -> list[int]:
    data = found if isinstance(found, bytes) else found.tokens
    return [int(token) for token in np.frombuffer(data, "<i4")]


def logprobs_in(found: SampledSequence | bytes) -> Array:
    return np.frombuffer(found if isinstance(found, bytes) else found.logprobs, "<f4")


def top_in(found: TopLogprobs | None) -> tuple[Array, Array]:
    assert found is not None
    shape = (found.length, found.k)
    return np.frombuffer(found.tokens, "<i4").reshape(shape), np.frombuffer(found.logprobs, "<f4").reshape(shape)


def only(outcome: SampleOutcome) -> SampledSequence:
    assert isinstance(outcome, SampleResult), outcome
    (sequence,) = outcome.sequences
    return sequence


@dataclass(frozen=True)
class Reference:
    """Hugging Face's own model, one sequence at a time."""

    model: Any

    @classmethod
    def load(cls, path: Path, adapter: Adapter | None = None) -> Reference:
        """With the adapter added to the weights themselves."""
        model: Any = AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32)
        parameters = dict(model.named_parameters())
        for name, (a, b) in adapter.pairs.items() if adapter is not None else ():
            weight = parameters[name] if name in parameters else parameters[f"{name}.weight"]
            weight.data += adapter.scale * (b.detach() @ a.detach())  # type: ignore[union-attr]
        return cls(model)

    @torch.no_grad()
    def greedy(self, prompt: bytes, tokens: int, **options: Any) -> list[int]:
        ids = torch.tensor([tokens_in(prompt)])
        found = self.model.generate(ids, max_new_tokens=tokens, do_sample=False, **options)
        return [int(token) for token in found[0, ids.shape[1] :]]

    @torch.no_grad()
    def distributions(self, prompt: bytes, tokens: Sequence[int], params: SampleParams | None = None) -> torch.Tensor:
        """Before each of the tokens, under the transform; without one, before every token but the first of all."""
        ids = torch.tensor([[*tokens_in(prompt), *tokens]])
        logits = self.model(ids).logits[0].float()
        if params is None:
            return torch.log_softmax(logits[:-1], -1)
        logits = logits[len(tokens_in(prompt)) - 1 : -1]
        return torch.log_softmax(warpers(params)(ids, logits), -1)


def warpers(params: SampleParams) -> Callable[[Any, Any], torch.Tensor]:
    """Hugging Face has no penalties for presence and frequency: those are OpenAI's formula."""
    found: Any = LogitsProcessorList()
    if params.logit_bias:
        found.append(SequenceBiasLogitsProcessor([[[token], bias] for token, bias in params.logit_bias]))
    if params.repetition_penalty != 1:
        found.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.temperature:
        found.append(TemperatureLogitsWarper(params.temperature))
        if params.min_p:
            found.append(MinPLogitsWarper(params.min_p))
        if params.top_k > 0:
            found.append(TopKLogitsWarper(params.top_k))
        if params.top_p < 1:
            found.append(TopPLogitsWarper(params.top_p))
    return found  # type: ignore[no-any-return]


def surprising(observed: Array, expected: Array) -> float:
    """How many standard deviations the chi-square statistic is above what chance gives (Wilson and Hilferty)."""
    used = expected > 0
    assert not observed[~used].any()
    degrees = int(used.sum()) - 1
    statistic = float(((observed[used] - expected[used]) ** 2 / expected[used]).sum())
    return float(((statistic / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / np.sqrt(2 / (9 * degrees)))
