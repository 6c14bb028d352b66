"""Learning from a sampler that is wrong on purpose: `python -m bench gap`.

The task of examples/rl_arithmetic, by the advantages, the losses and the datums of the recipe `grpo`, on one rank in
this process: a tiny random model learns the digit that is the sum of two others, with three seeds. Noise is added to
the logits of the built-in sampler, other noise in each step, so its log probabilities are those of a noisy policy, as
an engine's would be that rounds badly. The reward is that of the model itself without noise, its probability of the
right digits; what a case is compared with is the same from an exact sampler.

- `gap.truncate.2`, `gap.truncate.8`, `gap.mask.8`: corrected by importance weights, with these limits. An answer has
  one token, so the level of the sequence is that of the token.
- `gap.none`: the same noise, uncorrected.
- `gap.step`: passes and optimizer steps over the same answers in a minute of processor time, without drawing them,
  beside the same with another forward pass, which put the trainer's log probabilities in the place of the sampler's.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp
from pathlib import Path
from statistics import fmean
from time import process_time
from typing import Final

import numpy as np
import torch

from bench.interleave import Comparison, interleave
from bench.report import Report
from bench.sampling import one_rank
from strata.sdk.operations import Datum, Sample
from strata.sdk.recipes.recipe import RecipeReinforcement
from strata.sdk.recipes.reinforcement import choose_loss, group_advantages
from strata.sdk.recipes.rollouts import PromptRow, Rollout
from strata.train.core import ops
from strata.train.core.model_options import AdamParams, LoraConfig, LossName
from strata.train.core.sampling import (
    AddedSample,
    SampledSequence,
    SampleOperation,
    SampleParams,
    SampleResult,
    SamplingSlice,
)
from strata.train.runner.collectives import RankGroup
from strata.train.runner.lora.hooks import Span
from strata.train.runner.model.base import BaseModel
from strata.train.runner.model.row_limit import RowMemory
from strata.train.runner.model.tiny import TinyModel, make
from strata.train.runner.model.trained import LoraModel
from strata.train.runner.passes.partition import ComputedDatum, PackedDatum, RankPass, RankPassItem
from strata.train.runner.passes.pass_runner import PassRunner
from strata.train.runner.sampling.engine import SamplingEngine
from strata.train.runner.sampling.request_validator import SamplerLimits
from strata.train.runner.settings import RunnerSettings

SEEDS: Final = (1, 2, 3)
PROBLEMS: Final = [(a, b) for a in range(4) for b in range(4)]
SAMPLES: Final = 16
RATE: Final = 5e-3
WARM_UP_STEPS: Final = 8
NOISE: Final = 1.0
"""The standard deviation of what is added to each logit."""
MODEL: Final = "learner"
LORA: Final = LoraConfig(rank=16, alpha=32.0)


@dataclass(frozen=True)
class Turns:
    rounds: int
    steps: int


QUICK: Final = Turns(rounds=4, steps=10)
LONG: Final = Turns(rounds=10, steps=40)
TIMED_STEPS: Final = 5
CORRECTED: Final = {
    "gap.truncate.2": RecipeReinforcement(),
    "gap.truncate.8": RecipeReinforcement(correction_limit=8.0),
    "gap.mask.8": RecipeReinforcement(correction="mask", correction_limit=8.0),
    "gap.none": RecipeReinforcement(correction="none"),
}


class Learner:
    """A model with a sampler, both on one rank."""

    def __init__(self, base: BaseModel, ranks: RankGroup, folder: Path, seed: int, noise: float) -> None:
        self._adapter = base.new_adapter(LORA, ranks.device)
        self._adapter.initialise(f"{MODEL} {seed}")
        self._model = LoraModel(ops.CreateModel(model_id=MODEL, base_model="", lora=LORA), self._adapter, ranks)
        self._passes = PassRunner(base, ranks, {MODEL: self._model}, RowMemory(base, ranks, folder))
        self._sampler = SamplingEngine(base, ranks, SamplerLimits(prefix_tokens=0))
        self._seed = seed
        self._chance = torch.Generator().manual_seed(seed)
        exact = self._sampler._model.logits

        def noisy(hidden: torch.Tensor, spans: Sequence[Span]) -> torch.Tensor:
            logits = exact(hidden, spans)
            return logits + noise * torch.randn(logits.shape, generator=self._chance)

        if noise:
            self._sampler._model.logits = noisy  # type: ignore[method-assign]

    def draw(self, step: int) -> list[list[Rollout]]:
        name = f"step {step}"
        self._sampler.open_adapter(name, self._adapter)
        added = [
            AddedSample(
                str(number), SampleOperation(name, number, _bytes(prompt), _params(self._seed, step, number), SAMPLES)
            )
            for number, prompt in enumerate(map(_prompt, PROBLEMS))
        ]
        scatter = self._sampler.scatter()
        groups: dict[str, list[Rollout]] = {}
        while len(groups) < len(PROBLEMS):
            done = scatter.merge([self._sampler.run(scatter.partition(SamplingSlice(1, added))[0])])
            added = []
            for ended in done.ended:
                assert isinstance(ended.outcome, SampleResult), ended.outcome
                prompt = PromptRow(_prompt(PROBLEMS[int(ended.request_id)]), {})
                groups[ended.request_id] = [Rollout(prompt, _sample(each)) for each in ended.outcome.sequences]
        self._sampler.close(name)
        return [groups[str(number)] for number in range(len(PROBLEMS))]

    def compute(
        self, data: Sequence[Datum], loss: str, config: Mapping[str, float], *, forward_only: bool = False
    ) -> list[ComputedDatum]:
        item = RankPassItem(MODEL, LossName(loss), config, datums=len(data))
        row = [PackedDatum(0, number, each.wire()) for number, each in enumerate(data)]
        report = self._passes.run(RankPass(forward_only, [item], [row]))
        assert not report.failures, report.failures
        return sorted(report.computed, key=lambda each: each.datum)

    def step(self, amount: float) -> None:
        for _ in self._model.step(AdamParams(learning_rate=RATE, grad_clip_norm=amount)):
            pass

    def warm_up(self) -> None:
        for _ in range(WARM_UP_STEPS):
            self.compute([_answered(problem) for problem in PROBLEMS], "cross_entropy", {})
            self.step(0.0)

    def reward(self) -> float:
        """The mean probability of the right digits."""
        computed = self.compute([_answered(each) for each in PROBLEMS], "cross_entropy", {}, forward_only=True)
        return fmean(exp(-each.metrics["loss:sum"]) for each in computed)

    def learn(self, groups: Sequence[Sequence[Rollout]], grpo: RecipeReinforcement, *, forward: bool = False) -> None:
        """With the trainer's log probabilities in the place of the sampler's if they are computed `forward`."""
        learned = [
            (rollout, advantage)
            for problem, group in zip(PROBLEMS, groups, strict=True)
            for rollout, advantage in zip(group, _advantages(problem, group), strict=True)
            if advantage
        ]
        logprobs: list[Sequence[float] | None] = [None] * len(learned)
        if forward:
            data = [Datum(each.tokens[:-1], each.tokens[1:]) for each, _ in learned]
            computed = self.compute(data, "cross_entropy", {}, forward_only=True)
            logprobs = [each.answer(_logprobs(one)) for (each, _), one in zip(learned, computed, strict=True)]
        if learned:
            data = [each.datum([advantage], own) for (each, advantage), own in zip(learned, logprobs, strict=True)]
            self.compute(data, *(("importance_sampling", {}) if forward else choose_loss(grpo)))
            self.step(float(len(learned)))


async def run(report: Report, *, quick: bool) -> None:
    turns = QUICK if quick else LONG
    with tempfile.TemporaryDirectory(prefix="strata-bench-") as name, one_rank(Path(name)) as ranks:
        folder = Path(name)
        make(folder / "model", TinyModel())
        base = BaseModel(RunnerSettings(model=str(folder / "model"), sleep_folder=folder / "asleep"), ranks)

        def learner(seed: int, noise: float) -> Learner:
            made = Learner(base, ranks, folder / "row", seed, noise)
            made.warm_up()
            return made

        def learn(grpo: RecipeReinforcement, noise: float) -> list[float]:
            rewards = []
            for seed in SEEDS:
                model = learner(seed, noise)
                for step in range(turns.steps):
                    model.learn(model.draw(step), grpo)
                rewards.append(model.reward())
            return rewards

        report.progress(f"{turns.steps} steps, {len(SEEDS)} seeds")
        exact = learn(RecipeReinforcement(), 0.0)
        for case, grpo in CORRECTED.items():
            found = Comparison(learn(grpo, NOISE), exact)
            rewards = ", ".join(f"{each:.3f}" for each in found.ours)
            report.add(case, "reward", found, note=f"{rewards} beside {', '.join(f'{each:.3f}' for each in exact)}")
        await steps_per_minute(report, learner(1, 0.0), turns)


async def steps_per_minute(report: Report, model: Learner, turns: Turns) -> None:
    # The same answers for both: they are drawn once, and drawing them costs both the same.
    groups = model.draw(0)

    async def measured(*, forward: bool) -> float:
        started = process_time()
        for _ in range(TIMED_STEPS):
            model.learn(groups, RecipeReinforcement(), forward=forward)
        return 60 * TIMED_STEPS / (process_time() - started)

    found = await interleave(lambda: measured(forward=False), lambda: measured(forward=True), turns.rounds)
    report.add("gap.step", "steps/min", found, note="of processor time, beside one forward pass more")


def _prompt(problem: tuple[int, int]) -> list[int]:
    return list("{}+{}=".format(*problem).encode())


def _answered(problem: tuple[int, int]) -> Datum:
    prompt = _prompt(problem)
    right = ord(str(sum(problem)))
    return Datum(prompt, [*prompt[1:], right], weights=[*[0.0] * (len(prompt) - 1), 1.0])


def _advantages(problem: tuple[int, int], group: Sequence[Rollout]) -> list[float]:
    right = ord(str(sum(problem)))
    return group_advantages([float(each.sample.tokens[0] == right) for each in group], normalise=False)


def _params(seed: int, step: int, number: int) -> SampleParams:
    return SampleParams(max_tokens=1, seed=1000 * (1000 * seed + step) + number, end_tokens=False)


def _bytes(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, "<i4").tobytes()


def _sample(sequence: SampledSequence) -> Sample:
    return Sample(
        np.frombuffer(sequence.tokens, "<i4").tolist(), np.frombuffer(sequence.logprobs, "<f4").tolist(), "length"
    )


def _logprobs(computed: ComputedDatum) -> list[float]:
    return [float(each) for each in np.frombuffer(computed.output.fields["logprobs"].data, "<f4")]
