"""Recipe `dpo` (direct preference optimisation): loss, weights of pairs, margins, metrics.

With m the margin by which the chosen answer gained more than the rejected one since training began, the loss of a pair
is -log sigmoid(beta·m). Its gradient reaches the model through the log probabilities of the answers' tokens alone: it
is -beta·sigmoid(-beta·m) for each token of the chosen answer, and the same with the other sign for the rejected one.
`cross_entropy` is -Σ w·log p with any real weights, so these are the weights to send.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from strata.sdk.operations import Pass
from strata.sdk.recipes.method import Metrics, ReadMetrics, StepContext, TrainingMethod, read_after
from strata.sdk.recipes.recipe import RecipePreference
from strata.sdk.recipes.rendering import TokenExample
from strata.sdk.recipes.supervised import EVALUATED_TOGETHER
from strata.sdk.train import Model

Pair = tuple[TokenExample, TokenExample]
"""The chosen answer and the rejected one."""


@dataclass(frozen=True, kw_only=True)
class PreferenceTraining(TrainingMethod[Pair]):
    reference: Model
    """The model that training began with; it is never trained."""

    def step(self, context: StepContext) -> ReadMetrics:
        pairs = self.batch(context.step)
        gains, likelier = self._gains(context.model, pairs)
        metrics = self._metrics(gains, likelier)
        context.model.report(preference_loss=metrics["loss"], margin=metrics["margin"], accuracy=metrics["accuracy"])
        data = []
        for (chosen, rejected), margin in zip(pairs, gains, strict=True):
            pull = preference_weight(margin, self.recipe.dpo)
            data += [chosen.datum(pull), rejected.datum(-pull)]
        done = context.model.forward_backward(data)
        context.optimise(len(pairs))
        return read_after([done], metrics)

    def evaluate(self, model: Model) -> Metrics:
        parts = [
            self._gains(model, self.evaluation[at : at + EVALUATED_TOGETHER])
            for at in range(0, len(self.evaluation), EVALUATED_TOGETHER)
        ]
        gains = [each for part, _ in parts for each in part]
        metrics = self._metrics(gains, [each for _, part in parts for each in part])
        return {f"eval_{name}": value for name, value in metrics.items()}

    def _gains(self, model: Model, pairs: Sequence[Pair]) -> tuple[list[float], list[bool]]:
        """The margin of each pair, and whether its chosen answer is the likelier one now."""
        answers = [answer for pair in pairs for answer in pair]
        data = [answer.datum() for answer in answers]
        passes = [model.forward(data), self.reference.forward(data)]
        now, before = (_totals(answers, each.result()) for each in passes)
        moved = [one - other for one, other in zip(now, before, strict=True)]
        gains = [chosen - rejected for chosen, rejected in zip(moved[::2], moved[1::2], strict=True)]
        return gains, [chosen > rejected for chosen, rejected in zip(now[::2], now[1::2], strict=True)]

    def _metrics(self, gains: Sequence[float], likelier: Sequence[bool]) -> Metrics:
        losses = [preference_loss(each, self.recipe.dpo) for each in gains]
        return {"loss": fmean(losses), "margin": fmean(gains), "accuracy": fmean(map(float, likelier))}


def preference_loss(margin: float, dpo: RecipePreference) -> float:
    right, wrong = _softplus(-dpo.beta * margin), _softplus(dpo.beta * margin)
    return (1 - dpo.label_smoothing) * right + dpo.label_smoothing * wrong


def preference_weight(margin: float, dpo: RecipePreference) -> float:
    """Minus the derivative of the loss by the log probability of the chosen answer."""
    right, wrong = _sigmoid(-dpo.beta * margin), _sigmoid(dpo.beta * margin)
    return dpo.beta * ((1 - dpo.label_smoothing) * right - dpo.label_smoothing * wrong)


def _totals(answers: Sequence[TokenExample], done: Pass) -> list[float]:
    """The log probability of each answer, from those of all tokens."""
    return [
        math.fsum(each for each, learned in zip(logprobs, answer.learned[1:], strict=True) if learned)
        for answer, logprobs in zip(answers, done.logprobs, strict=True)
    ]


def _softplus(value: float) -> float:
    """log(1 + exp(value)), also where exp would overflow."""
    return max(value, 0.0) + math.log1p(math.exp(-abs(value)))


def _sigmoid(value: float) -> float:
    return math.exp(-_softplus(-value))
