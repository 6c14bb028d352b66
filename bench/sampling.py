"""The built-in sampler against Hugging Face's `generate`, on a tiny random model, one rank: `python -m bench sampling`.

- `sample.tokens`: eight requests at once, sampled at temperature 1, in time slices as an orchestrator sends them. Bare
  is `generate` of the same requests one by one, which samples too.
- `sample.tokens.many`: 32 requests of mixed lengths where 16 run at once; the others wait for a slot of the KV cache.
- `sample.tokens.adapters`: eight requests, each with its own adapter; bare has no adapter at all.
- `sample.tokens.padded`: the eight requests against one `generate` of all of them as one batch of equal lengths: the
  best case of that side. It has no goal.
- `sample.first.prefix`: from a request to its first token, where the first 512 of 528 tokens are those of an earlier
  prompt. Bare is this sampler without its prefix cache; the other cases run without it too, as their prompts repeat.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from bench.interleave import Measure, interleave
from bench.report import Report
from strata.train.core.model_options import LoraConfig
from strata.train.core.sampling import AddedSample, SampleOperation, SampleParams, SampleResult, SamplingSlice
from strata.train.runner.collectives import RankGroup
from strata.train.runner.lora.adapter import Adapter
from strata.train.runner.lora.targets import targets_of
from strata.train.runner.model.base import BaseModel
from strata.train.runner.model.tiny import TinyModel, make
from strata.train.runner.sampling.engine import SamplingEngine
from strata.train.runner.sampling.request_validator import SamplerLimits
from strata.train.runner.settings import RunnerSettings

GOAL: Final = 1.5
STEPS: Final = 16
"""Of a slice."""
PROMPT: Final = 32
SHARED: Final = 512
OWN: Final = 16
LORA: Final = LoraConfig(rank=8, alpha=16.0)
MODEL: Final = TinyModel(family="llama", layers=4, hidden=256, vocabulary=4096, context=1024)


@dataclass(frozen=True)
class Turns:
    rounds: int
    tokens: int
    """That each sequence gets."""


QUICK: Final = Turns(rounds=6, tokens=48)
LONG: Final = Turns(rounds=16, tokens=128)


async def run(report: Report, *, quick: bool) -> None:
    turns = QUICK if quick else LONG
    with tempfile.TemporaryDirectory(prefix="strata-bench-") as folder, one_rank(Path(folder)) as ranks:
        path = Path(folder) / "model"
        parameters = make(path, MODEL)
        base = BaseModel(RunnerSettings(model=str(path), sleep_folder=Path(folder)), ranks)
        bare: Any = AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32)
        size = f"{parameters / 1e6:.1f} M parameters"
        report.progress(f"sampling, {size}")
        await cases(report, base, ranks, bare, turns, size)


@contextmanager
def one_rank(folder: Path) -> Iterator[RankGroup]:
    threads = torch.get_num_threads()
    # As a rank has it.
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
    try:
        yield RankGroup(torch.device("cpu"))
    finally:
        dist.destroy_process_group()
        torch.set_num_threads(threads)


async def cases(report: Report, base: BaseModel, ranks: RankGroup, bare: Any, turns: Turns, size: str) -> None:
    sampler = SamplingEngine(base, ranks, SamplerLimits(sequences=16, prefix_tokens=0))
    sampler.open_base("base")
    for number in range(8):
        sampler.open_adapter(f"adapter {number}", _adapter(base, number))
    even = [_sample("base", number, PROMPT, turns.tokens) for number in range(8)]
    mixed = [_sample("base", number, 8 + 5 * number, turns.tokens // 2 + 2 * number) for number in range(32)]
    own = [_sample(f"adapter {number}", number, PROMPT, turns.tokens) for number in range(8)]
    for case, samples, note in (
        ("sample.tokens", even, "8 requests"),
        ("sample.tokens.many", mixed, "32 requests, 16 at once"),
        ("sample.tokens.adapters", own, "8 requests with 8 adapters beside none"),
    ):

        async def ours(samples: Sequence[SampleOperation] = samples) -> float:
            return sampled(sampler, samples)

        async def one_by_one(samples: Sequence[SampleOperation] = samples) -> float:
            return generated(bare, samples)

        found = await interleave(ours, one_by_one, turns.rounds)
        report.add(case, "tokens/s", found, goal=GOAL, note=f"{size}, {note}")

    async def together() -> float:
        return generated_together(bare, even)

    async def ours_even() -> float:
        return sampled(sampler, even)

    found = await interleave(ours_even, together, turns.rounds)
    report.add("sample.tokens.padded", "tokens/s", found, note=f"{size}, 8 requests beside one batch of them")
    await first_tokens(report, base, ranks, turns, size)


async def first_tokens(report: Report, base: BaseModel, ranks: RankGroup, turns: Turns, size: str) -> None:
    numbers = itertools.count()
    shared = _sample("base", 0, SHARED, 1).prompt

    def measure(prefix_tokens: int) -> Measure:
        sampler = SamplingEngine(base, ranks, SamplerLimits(sequences=16, prefix_tokens=prefix_tokens))
        sampler.open_base("base")

        async def first_token() -> float:
            number = next(numbers)
            own = _sample("base", number, OWN, 1)
            return sampled(sampler, [msgspec.structs.replace(own, prompt=shared + own.prompt)])

        return first_token

    found = await interleave(measure(SamplerLimits().prefix_tokens), measure(0), 4 * turns.rounds)
    note = f"{size}, {SHARED} of {SHARED + OWN} tokens of the prompt shared, beside no prefix cache"
    report.add("sample.first.prefix", "first tokens/s", found, note=note)


def _adapter(base: BaseModel, number: int) -> Adapter:
    adapter = Adapter(LORA, targets_of(base.lm, LORA), torch.device("cpu"))
    adapter.initialise(f"bench {number}")
    return adapter


def _sample(sampler_id: str, number: int, length: int, tokens: int) -> SampleOperation:
    prompt = np.random.default_rng(number).integers(4, 256, length).astype("<i4").tobytes()
    return SampleOperation(sampler_id, number, prompt, SampleParams(max_tokens=tokens, seed=number, end_tokens=False))


def sampled(sampler: SamplingEngine, samples: Sequence[SampleOperation]) -> float:
    started = time.perf_counter()
    scatter = sampler.scatter()
    add = [AddedSample(str(number), sample) for number, sample in enumerate(samples)]
    tokens = 0
    while True:
        done = scatter.merge([sampler.run(scatter.partition(SamplingSlice(STEPS, add))[0])])
        add = []
        for one in done.ended:
            assert isinstance(one.outcome, SampleResult), one.outcome
            tokens += len(one.outcome.sequences[0].tokens) // 4
        if not done.requests:
            break
    assert tokens == _wanted(samples)
    return tokens / (time.perf_counter() - started)


def generated(model: Any, samples: Sequence[SampleOperation]) -> float:
    started = time.perf_counter()
    tokens = 0
    for sample in samples:
        tokens += _generate(model, torch.tensor([_tokens(sample)]), sample)
    assert tokens == _wanted(samples)
    return tokens / (time.perf_counter() - started)


def generated_together(model: Any, samples: Sequence[SampleOperation]) -> float:
    started = time.perf_counter()
    tokens = _generate(model, torch.tensor([_tokens(sample) for sample in samples]), samples[0])
    assert tokens == _wanted(samples)
    return tokens / (time.perf_counter() - started)


@torch.inference_mode()
def _generate(model: Any, ids: torch.Tensor, sample: SampleOperation) -> int:
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=sample.params.max_tokens,
        do_sample=True,
        top_k=0,
        eos_token_id=None,
    )
    return int(found.shape[0] * (found.shape[1] - ids.shape[1]))


def _tokens(sample: SampleOperation) -> list[int]:
    return [int(token) for token in np.frombuffer(sample.prompt, "<i4")]


def _wanted(samples: Sequence[SampleOperation]) -> int:
    return sum(sample.params.max_tokens or 0 for sample in samples)
