"""Draws answers to prompts in groups, and makes datums of them with an advantage for each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from strata.sdk.operations import Datum, Sample, SamplingParams
from strata.sdk.recipes.batches import derive_seed
from strata.sdk.recipes.recipe import RecipeSampling
from strata.sdk.recipes.rows import Row
from strata.sdk.train import Model, Sampler


@dataclass(frozen=True)
class PromptRow:
    """A prompt as tokens, and the row that it came from."""

    tokens: Sequence[int]
    row: Row


@dataclass(frozen=True)
class Rollout:
    """An answer to a prompt."""

    prompt: PromptRow
    sample: Sample

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt.tokens, *self.sample.tokens]

    def datum(self, advantages: Sequence[float], logprobs: Sequence[float], reward: float | None = None) -> Datum:
        """Makes a datum with an advantage for each token of the answer, and its log probability when it was drawn.

        No loss reads the reward: it goes along for the rollouts that a server keeps.
        """
        before = [0.0] * (len(self.prompt.tokens) - 1)
        tokens = self.tokens
        return Datum(
            tokens[:-1],
            tokens[1:],
            weights=[*before, *([1.0] * len(self.sample.tokens))],
            advantages=[*before, *advantages],
            logprobs=[*before, *logprobs],
            more={} if reward is None else {"reward": [reward]},
        )

    def answer(self, values: Sequence[float]) -> list[float]:
        """Returns those values for all targets that belong to the answer."""
        return list(values[len(self.prompt.tokens) - 1 :])


def draw_groups(
    sampler: Sampler, prompts: Sequence[PromptRow], sampling: RecipeSampling, *seed: int | str
) -> list[list[Rollout]]:
    """A group of answers to each prompt. All are requested before the first is awaited, so that they share batches."""
    params = SamplingParams(max_tokens=sampling.max_tokens, temperature=sampling.temperature)
    return _draw(sampler, prompts, sampling, params, sampling.group_size, seed)


def draw_likeliest(sampler: Sampler, prompts: Sequence[PromptRow], sampling: RecipeSampling) -> list[Rollout]:
    """One answer to each prompt, at temperature 0."""
    params = SamplingParams(max_tokens=sampling.max_tokens, temperature=0.0)
    return [group[0] for group in _draw(sampler, prompts, sampling, params, 1, ("likeliest",))]


def _draw(
    sampler: Sampler,
    prompts: Sequence[PromptRow],
    sampling: RecipeSampling,
    params: SamplingParams,
    number: int,
    seed: Sequence[int | str],
) -> list[list[Rollout]]:
    if sampling.stop:
        params["stop"] = list(sampling.stop)
    futures = []
    for position, prompt in enumerate(prompts):
        chosen = SamplingParams(**params, seed=derive_seed("sample", *seed, position))
        futures.append(sampler.sample(prompt.tokens, number, **chosen))
    return [
        [Rollout(prompt, sample) for sample in future.result()] for prompt, future in zip(prompts, futures, strict=True)
    ]


def answer_logprobs(models: Sequence[Model], rollouts: Sequence[Rollout]) -> list[list[list[float]]]:
    """Returns log probabilities by each model, of each answer, of each token. The models may be on different servers.

    A pass over one batch rounds in the same way whenever it is run. What a sampler returns does not: it depends on the
    requests that shared its batch.
    """
    if not rollouts:
        return [[] for _ in models]
    data = [Datum(each.tokens[:-1], each.tokens[1:]) for each in rollouts]
    passes = [model.forward(data) for model in models]
    return [
        [each.answer(logprobs) for each, logprobs in zip(rollouts, done.result().logprobs, strict=True)]
        for done in passes
    ]
