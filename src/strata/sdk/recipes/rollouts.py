"""Draws answers to prompts in groups, keeps them for a run that continues, and makes datums of them with an advantage
for each token.
"""

from __future__ import annotations

import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from strata.base.atomic import write_file
from strata.sdk.operations import Datum, Sample, SamplingParams
from strata.sdk.recipes.batches import derive_seed
from strata.sdk.recipes.recipe import RecipeSampling
from strata.sdk.recipes.rows import Row
from strata.sdk.train import Model, Sampler
from strata.train.core.sampling import VersionSpans


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
    reward: float | None = None
    """That of an environment; None where the recipe's own reward judges the answer."""
    sampled: Sequence[bool] | None = None
    """Which tokens the model has sampled; None: all of the answer. What tools and users say is among the others."""
    others: Sequence[Rollout] = ()
    """The other branches of its episode, where what was said before has been changed."""

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt.tokens, *self.sample.tokens]

    @property
    def branches(self) -> Sequence[Rollout]:
        return (self, *self.others)

    @property
    def mask(self) -> list[float]:
        """1 for each token of the answer that is learned from, 0 for the others."""
        return [1.0] * len(self.sample.tokens) if self.sampled is None else [float(each) for each in self.sampled]

    @property
    def learned_tokens(self) -> int:
        return round(sum(self.mask))

    def mean(self, values: Sequence[float]) -> float:
        """The mean of values of the answer's tokens over those that are learned from."""
        return sum(each * weight for each, weight in zip(values, self.mask, strict=True)) / max(1, self.learned_tokens)

    def datum(
        self, advantages: Sequence[float], logprobs: Sequence[float] | None = None, reward: float | None = None
    ) -> Datum:
        """Makes a datum with an advantage for each token of the answer, and the log probability that it was drawn with,
        unless others are given.

        No loss reads the reward: it goes along for the rollouts that a server keeps.
        """
        before = [0.0] * len(self.prompt.tokens)
        tokens, mask = self.tokens, self.mask
        weighted = [weight * each for weight, each in zip(mask, advantages, strict=True)]
        return Datum(
            tokens[:-1],
            tokens[1:],
            weights=[*before, *mask][1:],
            advantages=[*before, *weighted][1:],
            logprobs=[*before, *(self.sample.logprobs if logprobs is None else logprobs)][1:],
            more={} if reward is None else {"reward": [reward]},
        )

    def answer(self, values: Sequence[float]) -> list[float]:
        """Returns those values for all targets that belong to the answer. Nothing is known of a sequence's first
        token."""
        return [0.0, *values][len(self.prompt.tokens) :]


class KeptSample(msgspec.Struct, frozen=True, array_like=True):
    tokens: bytes
    """32-bit integers, and log probabilities as 32-bit floats: what a datum has of them."""
    logprobs: bytes
    stop_reason: str
    versions: VersionSpans = ()
    sampled: bytes | None = None
    """A byte for each token, 0 or 1, of an environment's episode; its reward; its other branches."""
    reward: float | None = None
    others: Sequence[KeptSample] = ()

    @classmethod
    def of(cls, rollout: Rollout) -> KeptSample:
        sample = rollout.sample
        tokens, logprobs = array.array("i", sample.tokens), array.array("f", sample.logprobs)
        sampled = None if rollout.sampled is None else bytes(rollout.sampled)
        others = [cls.of(each) for each in rollout.others]
        versions = tuple(sample.versions)
        return cls(tokens.tobytes(), logprobs.tobytes(), sample.stop_reason, versions, sampled, rollout.reward, others)

    def rollout(self, prompt: PromptRow) -> Rollout:
        tokens, logprobs = array.array("i", self.tokens).tolist(), array.array("f", self.logprobs).tolist()
        sampled = None if self.sampled is None else [bool(each) for each in self.sampled]
        others = tuple(each.rollout(prompt) for each in self.others)
        return Rollout(prompt, Sample(tokens, logprobs, self.stop_reason, self.versions), self.reward, sampled, others)


Groups = list[list[Rollout]]
"""The answers to each prompt of a step."""
DrawGroups = Callable[[Sampler, Sequence[PromptRow], int], Groups]
"""Draws the groups of a step, whose number comes last, and waits for them.

A pipeline calls it in threads of its own, for several steps at once.
"""


class RolloutLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    step: int
    drawn_at: int
    """Steps that the weights had learned which drew these answers."""
    groups: Sequence[Sequence[KeptSample]]


class RolloutFile:
    """The answers of the steps after the last saved state, in a file that has a line for each step.

    What a sampler returns depends, by rounding, on the requests that shared its batch. So a run that continues learns
    from the answers that it drew before, instead of drawing them again.
    """

    def __init__(self, path: Path, kept: dict[int, RolloutLine]) -> None:
        self._path = path
        self._kept = kept

    @classmethod
    def open(cls, path: Path, step: int | None) -> RolloutFile:
        """The answers from this step on; None for a run that begins, which has none."""
        lines = [] if step is None or not path.exists() else _read_whole_lines(path)
        kept = {line.step: line for line in lines if step is not None and line.step >= step}
        if path.exists():
            write_file(path, b"".join(map(_encode_line, kept.values())))
        return cls(path, kept)

    @property
    def steps(self) -> Collection[int]:
        """Those with kept answers that were not taken yet."""
        return self._kept.keys()

    def keep(self, step: int, groups: Groups, drawn_at: int) -> None:
        line = RolloutLine(step, drawn_at, [[KeptSample.of(each) for each in group] for group in groups])
        with self._path.open("ab") as file:
            file.write(_encode_line(line))
        self._kept[step] = line

    def take(self, step: int, prompts: Sequence[PromptRow]) -> tuple[Groups, int]:
        """Returns the kept answers of a step, and how many steps the weights had learned that drew them."""
        line = self._kept.pop(step)
        pairs = zip(prompts, line.groups, strict=True)
        return [[each.rollout(prompt) for each in group] for prompt, group in pairs], line.drawn_at

    def clear(self) -> None:
        """Forget all answers: a saved state has what was learned from them."""
        self._path.unlink(missing_ok=True)


def _encode_line(line: RolloutLine) -> bytes:
    return msgspec.json.encode(line) + b"\n"


def _read_whole_lines(path: Path) -> list[RolloutLine]:
    """A last line that was not written to its end is left out."""
    content = path.read_bytes()
    lines = content[: content.rfind(b"\n") + 1].splitlines()
    return [msgspec.json.decode(line, type=RolloutLine) for line in lines]


def draw_groups(sampler: Sampler, prompts: Sequence[PromptRow], sampling: RecipeSampling, *seed: int | str) -> Groups:
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
) -> Groups:
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
