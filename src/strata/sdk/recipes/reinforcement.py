"""Recipe `grpo`: groups of answers, advantages over the group's mean, KL to the reference, substeps, and the correction
of the gap between sampler and trainer by importance weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb
from statistics import fmean, pstdev
from typing import Final, assert_never

import msgspec

from strata.sdk.operations import Datum, Pass
from strata.sdk.recipes.environment import Environment
from strata.sdk.recipes.method import Metrics, ReadMetrics, StepContext, TrainingMethod
from strata.sdk.recipes.pipeline import DrawStep
from strata.sdk.recipes.recipe import Recipe, RecipeReinforcement
from strata.sdk.recipes.rendering import Renderer
from strata.sdk.recipes.rewards import Reward
from strata.sdk.recipes.rollouts import (
    DrawGroups,
    Groups,
    PromptRow,
    Rollout,
    answer_logprobs,
    draw_groups,
    draw_likeliest,
)
from strata.sdk.train import Future, Model, Sampler
from strata.train.core.model_options import CLIP_HIGH, CLIP_LOW, GAP_TOLERANCE, MASK_OUTLIERS, SEQUENCE_LEVEL, LossName
from strata.train.core.sampling import cut_at_stop

SMALLEST_DEVIATION: Final = 1e-6
TOLERANCE_NATS: Final = 1e-3
"""A smaller gap is rounding, whose correction changes a weight by a thousandth. It is not corrected: what rounds
otherwise in each run would make each run another one."""
JUDGED: Final = "judged"
"""Stands for a step in the seeds of the answers that say how many pass."""
REPORTED_DECIMALS: Final = 4
NO_SIGNAL: Final = "no_signal_share"
"""The share of the groups whose answers all earned the same: their advantages are 0, and no pass has them, unless
moving away from the reference has a price."""


@dataclass(frozen=True, kw_only=True)
class ReinforcementTraining(TrainingMethod[PromptRow]):
    renderer: Renderer
    reward: Reward
    draw: DrawGroups
    reference: Model | None
    """The model that training began with, if moving away from it has a price."""
    environment: Environment | None = None
    curve: str = "reward"
    judged: str = "eval_reward"
    higher_is_better: bool = True

    def step(self, context: StepContext) -> ReadMetrics:

        in_flight = self.recipe.grpo.pipeline == "in-flight"

        def copy_weights() -> DrawStep:
            copied = context.model.sampler(inflight=in_flight)
            return lambda step: self.draw(copied.result(), self.batch(step), step)

        groups, staleness = context.rollouts.take(context.step, self.batch(context.step), copy_weights)
        rewards = [[self.reward_of(each) for each in group] for group in groups]
        drawn = [each for group in groups for each in group]
        metrics = {
            "reward": fmean(value for group in rewards for value in group),
            NO_SIGNAL: fmean(min(group) == max(group) for group in rewards),
            "answer_tokens": fmean(sum(branch.learned_tokens for branch in each.branches) for each in drawn),
        }
        if self.recipe.grpo.staleness:
            metrics["staleness"] = float(staleness)
        if in_flight:
            metrics["updated_share"] = fmean(len({span.version for span in each.sample.versions}) > 1 for each in drawn)
        advantages = [value for group in rewards for value in group_advantages(group, normalise=self._normalise)]
        earned = [value for group in rewards for value in group]
        learned = [
            (branch, advantage, reward if self.recipe.output.keep_rollouts else None)
            for each, advantage, reward in zip(drawn, advantages, earned, strict=True)
            for branch in each.branches
            if branch.learned_tokens and (advantage or self.reference is not None)
        ]
        prices = self._prices(context.model, [each for each, _, _ in learned])
        if self.reference is not None:
            metrics["kl"] = fmean(
                [each.mean(paid) for (each, _, _), paid in zip(learned, prices, strict=True)] or [0.0]
            )
        context.model.report(**metrics)
        data = [
            (
                each.datum([advantage - self.recipe.grpo.kl * price for price in paid], reward=reward),
                each.learned_tokens,
            )
            for (each, advantage, reward), paid in zip(learned, prices, strict=True)
        ]
        passes = self._learn(context, data)
        return lambda: {**metrics, **gap_metrics([each.result().metrics for each in passes], self.recipe.grpo)}

    def evaluate(self, model: Model) -> Metrics:
        sampler = model.sampler().result()
        if self.environment is not None:
            answers = self.environment.draw_likeliest(sampler, self.evaluation)
        else:
            answers = draw_likeliest(sampler, self.evaluation, self.recipe.sampling)
        return {self.judged: fmean(self.reward_of(each) for each in answers), **self._pass_rates(sampler)}

    def _pass_rates(self, sampler: Sampler) -> Metrics:
        wanted = self.recipe.eval
        if wanted is None or not wanted.pass_at:
            return {}
        number = wanted.pass_samples or max(wanted.pass_at)
        if self.environment is not None:
            groups = self.environment.draw(sampler, self.evaluation, JUDGED, number)
        else:
            sampling = msgspec.structs.replace(self.recipe.sampling, group_size=number)
            groups = draw_groups(sampler, self.evaluation, sampling, self.recipe.train.seed, JUDGED)
        passed = [sum(self.reward_of(each) >= wanted.pass_reward for each in group) for group in groups]
        return {f"eval_pass_at_{k}": fmean(pass_rate(number, each, k) for each in passed) for k in wanted.pass_at}

    def stop_reason(self, steps: Sequence[Metrics]) -> str:
        patience = self.recipe.grpo.patience
        last = steps[-patience:]
        if not 0 < patience <= len(steps) or any(each[NO_SIGNAL] < 1.0 for each in last):
            return ""
        reward = fmean(each["reward"] for each in last)
        same = f"in {patience} steps all answers to a prompt earned the same, {reward:g} in the mean"
        return f"nothing to learn from: {same}"

    def outcome(self, steps: Sequence[Metrics]) -> str:
        quarter = len(steps) // 4
        if not quarter:
            return ""
        first, last = (fmean(each["reward"] for each in part) for part in (steps[:quarter], steps[-quarter:]))
        if last > first:
            return ""
        return f"the reward did not rise: {first:.3g} in the first quarter of the steps, {last:.3g} in the last"

    @property
    def _normalise(self) -> bool:
        return self.recipe.grpo.normalise

    def reward_of(self, rollout: Rollout) -> float:
        """Rewards the answer without the text that has stopped it, unless its environment has rewarded it."""
        if rollout.reward is not None:
            return rollout.reward
        text = self.renderer.text(rollout.sample.tokens)
        return self.reward(cut_at_stop(text, self.recipe.sampling.stop), rollout.prompt.row)

    def _prices(self, model: Model, drawn: Sequence[Rollout]) -> list[list[float]]:
        """Returns by how much the log probabilities of the tokens of the answers exceed those of the reference.

        They are the trainer's: those of the sampler would add the gap to the price.
        """
        if self.reference is None:
            return [[0.0] * len(each.sample.tokens) for each in drawn]
        own, before = answer_logprobs([model, self.reference], drawn)
        return [[now - was for now, was in zip(*pair, strict=True)] for pair in zip(own, before, strict=True)]

    def _learn(self, context: StepContext, data: Sequence[tuple[Datum, int]]) -> list[Future[Pass]]:
        """An optimizer step for each part of the answers. Where all rewards of all groups are equal there is none."""
        passes = []
        loss, config = choose_loss(self.recipe.grpo)
        substeps = min(self.recipe.grpo.substeps, len(data))
        for number in range(substeps):
            part = data[number::substeps]
            passes.append(context.model.forward_backward([datum for datum, _ in part], loss, **config))
            context.optimise(sum(tokens for _, tokens in part))
        return passes


def draw_answers(recipe: Recipe) -> DrawGroups:
    """Draws groups of one answer after the prompt."""

    def draw(sampler: Sampler, prompts: Sequence[PromptRow], step: int) -> Groups:
        return draw_groups(sampler, prompts, recipe.sampling, recipe.train.seed, step)

    return draw


def choose_loss(grpo: RecipeReinforcement) -> tuple[str, Mapping[str, float]]:
    """Returns the loss of the passes, and its config.

    The gradient of `importance_sampling` is that of log p(x) with r as its weight. `cispo` is the same with the weight
    limited, so it computes all corrections.
    """
    if grpo.loss != "importance_sampling":
        return grpo.loss, {GAP_TOLERANCE: TOLERANCE_NATS}
    limit = grpo.correction_limit
    match grpo.correction:
        case "none":
            return LossName.CISPO.value, {CLIP_LOW: 1.0, CLIP_HIGH: 1.0}
        case "truncate":
            config = {CLIP_LOW: 0.0, CLIP_HIGH: limit, GAP_TOLERANCE: TOLERANCE_NATS}
        case "mask":
            config = {CLIP_LOW: 1 / limit, CLIP_HIGH: limit, MASK_OUTLIERS: 1.0, GAP_TOLERANCE: TOLERANCE_NATS}
        case _:
            assert_never(grpo.correction)
    return LossName.CISPO.value, config | ({SEQUENCE_LEVEL: 1.0} if grpo.correction_level == "sequence" else {})


def gap_metrics(passes: Sequence[Mapping[str, float]], grpo: RecipeReinforcement) -> Metrics:
    """Returns the mean distance of the sampler from the trainer in nats, and the share of the tokens whose weight was
    truncated, masked or clipped.

    Later substeps train other weights than those that were sampled: the distance is that of the first.
    """
    tokens = [each["sampled_tokens:sum"] for each in passes]
    if not sum(tokens[:1]):
        return {}
    metrics = {"sampler_gap": round(passes[0]["sampler_gap:sum"] / tokens[0], REPORTED_DECIMALS)}
    if grpo.loss != "importance_sampling" or grpo.correction != "none":
        metrics["limited_share"] = sum(each["clipped_tokens:sum"] for each in passes) / sum(tokens)
    return metrics


def pass_rate(number: int, passed: int, k: int) -> float:
    """Returns how likely one of k answers passes, when so many of a number of answers do: without bias, over all
    choices of k of them."""
    return 1.0 - comb(number - passed, k) / comb(number, k)


def group_advantages(rewards: Sequence[float], *, normalise: bool) -> list[float]:
    """Returns how much better each answer is than the mean of its group; 0 if all are equal, whatever the rounding of
    the mean."""
    if min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    mean = fmean(rewards)
    scale = max(pstdev(rewards), SMALLEST_DEVIATION) if normalise else 1.0
    return [(each - mean) / scale for each in rewards]
