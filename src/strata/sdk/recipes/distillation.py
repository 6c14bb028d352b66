"""Recipe `distill`, on and off policy: advantages from the teacher's log probabilities, evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from strata.sdk.recipes.method import Metrics, ReadMetrics, StepContext, TrainingMethod, read_after
from strata.sdk.recipes.rendering import TokenExample
from strata.sdk.recipes.rollouts import PromptRow, Rollout, answer_logprobs, draw_groups
from strata.sdk.recipes.supervised import learn_examples, mean_loss
from strata.sdk.train import Model

HELD_OUT: Final = "evaluation"


@dataclass(frozen=True, kw_only=True)
class OnPolicyDistillation(TrainingMethod[PromptRow]):
    teacher: Model
    curve: str = "kl"
    judged: str = "eval_kl"

    def step(self, context: StepContext) -> ReadMetrics:
        prompts = self.batch(context.step)
        drawn, own, gaps = self._judge(context.model, prompts, context.step)
        metrics = {"kl": _mean_gap(gaps), "answer_tokens": fmean(len(each.sample.tokens) for each in drawn)}
        context.model.report(**metrics)
        data = [
            each.datum([-gap for gap in values], logprobs)
            for each, logprobs, values in zip(drawn, own, gaps, strict=True)
        ]
        done = context.model.forward_backward(data, "importance_sampling")
        context.optimise(sum(len(values) for values in gaps))
        return read_after([done], metrics)

    def evaluate(self, model: Model) -> Metrics:
        return {self.judged: _mean_gap(self._judge(model, self.evaluation, HELD_OUT)[2])}

    def _judge(
        self, model: Model, prompts: Sequence[PromptRow], step: int | str
    ) -> tuple[list[Rollout], list[list[float]], list[list[float]]]:
        """Answers, their tokens' log probabilities, and by how much these exceed those of the teacher."""
        sampler = model.sampler().result()
        groups = draw_groups(sampler, prompts, self.recipe.sampling, self.recipe.train.seed, step)
        drawn = [each for group in groups for each in group if each.sample.tokens]
        own, taught = answer_logprobs([model, self.teacher], drawn)
        gaps = [[now - other for now, other in zip(*pair, strict=True)] for pair in zip(own, taught, strict=True)]
        return drawn, own, gaps


@dataclass(frozen=True, kw_only=True)
class OffPolicyDistillation(TrainingMethod[PromptRow]):
    teacher: Model

    def step(self, context: StepContext) -> ReadMetrics:
        return learn_examples(context, self._taught(self.batch(context.step), context.step))

    def evaluate(self, model: Model) -> Metrics:
        return {self.judged: mean_loss(model, self._taught(self.evaluation, HELD_OUT))}

    def _taught(self, prompts: Sequence[PromptRow], step: int | str) -> list[TokenExample]:
        sampler = self.teacher.sampler().result()
        groups = draw_groups(sampler, prompts, self.recipe.sampling, self.recipe.train.seed, step)
        return [
            TokenExample(each.tokens, [False] * len(each.prompt.tokens) + [True] * len(each.sample.tokens))
            for group in groups
            for each in group
        ]


def _mean_gap(gaps: Sequence[Sequence[float]]) -> float:
    values = [value for each in gaps for value in each]
    return fmean(values) if values else 0.0
