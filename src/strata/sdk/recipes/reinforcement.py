"""Recipe `grpo`: groups of answers, advantages over the group's mean, KL to the reference, substeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Final

from strata.sdk.operations import Datum, Pass
from strata.sdk.recipes.method import Metrics, ReadMetrics, StepContext, TrainingMethod, read_after
from strata.sdk.recipes.rendering import Renderer
from strata.sdk.recipes.rewards import Reward
from strata.sdk.recipes.rollouts import PromptRow, Rollout, answer_logprobs, draw_groups, draw_likeliest
from strata.sdk.train import Future, Model
from strata.train.core.sampling import cut_at_stop

SMALLEST_DEVIATION: Final = 1e-6


@dataclass(frozen=True, kw_only=True)
class ReinforcementTraining(TrainingMethod[PromptRow]):
    renderer: Renderer
    reward: Reward
    reference: Model | None
    """The model that training began with, if moving away from it has a price."""
    curve: str = "reward"
    judged: str = "eval_reward"
    higher_is_better: bool = True

    def step(self, context: StepContext) -> ReadMetrics:
        train = self.recipe.train
        prompts = self.batch(context.step)
        sampler = context.model.sampler().result()
        groups = draw_groups(sampler, prompts, self.recipe.sampling, train.seed, context.step)
        rewards = [[self.reward_of(each) for each in group] for group in groups]
        drawn = [each for group in groups for each in group]
        metrics = {
            "reward": fmean(value for group in rewards for value in group),
            "answer_tokens": fmean(len(each.sample.tokens) for each in drawn),
        }
        advantages = [value for group in rewards for value in group_advantages(group, normalise=self._normalise)]
        earned = [value for group in rewards for value in group]
        learned = [
            (each, advantage, reward if self.recipe.output.keep_rollouts else None)
            for each, advantage, reward in zip(drawn, advantages, earned, strict=True)
            if each.sample.tokens and (advantage or self.reference is not None)
        ]
        own, prices = self._logprobs(context.model, [each for each, _, _ in learned])
        if self.reference is not None:
            metrics["kl"] = fmean([fmean(each) for each in prices] or [0.0])
        context.model.report(**metrics)
        data = [
            (each.datum([advantage - self.recipe.grpo.kl * price for price in paid], logprobs, reward), len(logprobs))
            for (each, advantage, reward), logprobs, paid in zip(learned, own, prices, strict=True)
        ]
        return read_after(self._learn(context, data), metrics)

    def evaluate(self, model: Model) -> Metrics:
        answers = draw_likeliest(model.sampler().result(), self.evaluation, self.recipe.sampling)
        return {self.judged: fmean(self.reward_of(each) for each in answers)}

    @property
    def _normalise(self) -> bool:
        return self.recipe.grpo.normalise

    def reward_of(self, rollout: Rollout) -> float:
        """Rewards the answer without the text that has stopped it."""
        text = self.renderer.text(rollout.sample.tokens)
        return self.reward(cut_at_stop(text, self.recipe.sampling.stop), rollout.prompt.row)

    def _logprobs(self, model: Model, drawn: Sequence[Rollout]) -> tuple[list[list[float]], list[list[float]]]:
        """Returns the log probabilities of the tokens of the answers, and by how much they exceed those of the
        reference."""
        models = [model] if self.reference is None else [model, self.reference]
        own, *before = answer_logprobs(models, drawn)
        if not before:
            return own, [[0.0] * len(each) for each in own]
        return own, [[now - was for now, was in zip(*pair, strict=True)] for pair in zip(own, before[0], strict=True)]

    def _learn(self, context: StepContext, data: Sequence[tuple[Datum, int]]) -> list[Future[Pass]]:
        """An optimizer step for each part of the answers. Where all rewards of all groups are equal there is none."""
        passes = []
        substeps = min(self.recipe.grpo.substeps, len(data))
        for number in range(substeps):
            part = data[number::substeps]
            passes.append(context.model.forward_backward([datum for datum, _ in part], self.recipe.grpo.loss))
            context.optimise(sum(tokens for _, tokens in part))
        return passes


def group_advantages(rewards: Sequence[float], *, normalise: bool) -> list[float]:
    """Returns how much better each answer is than the mean of its group."""
    mean = fmean(rewards)
    scale = max(pstdev(rewards), SMALLEST_DEVIATION) if normalise else 1.0
    return [(each - mean) / scale for each in rewards]
