"""Recipe `sft`: cross entropy of the learned tokens, and its evaluation 32 examples at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from strata.sdk.recipes.method import Metrics, ReadMetrics, StepContext, TrainingMethod
from strata.sdk.recipes.rendering import TokenExample
from strata.sdk.train import Model

EVALUATED_TOGETHER: Final = 32
"""Examples of one pass of an evaluation."""


class SupervisedTraining(TrainingMethod[TokenExample]):
    def step(self, context: StepContext) -> ReadMetrics:
        return learn_examples(context, self.batch(context.step))

    def evaluate(self, model: Model) -> Metrics:
        return {self.judged: mean_loss(model, self.evaluation)}


def learn_examples(context: StepContext, batch: Sequence[TokenExample]) -> ReadMetrics:
    """The loss that the server minimises is a sum; the metric is its mean over the tokens to learn."""
    tokens = max(1, sum(each.learned_tokens for each in batch))
    done = context.model.forward_backward([each.datum() for each in batch])
    context.optimise(tokens)
    return lambda: {"loss": done.result().loss / tokens}


def mean_loss(model: Model, examples: Sequence[TokenExample]) -> float:
    """Returns the mean loss over the tokens to learn."""
    parts = [examples[at : at + EVALUATED_TOGETHER] for at in range(0, len(examples), EVALUATED_TOGETHER)]
    passes = [model.forward([each.datum() for each in part]) for part in parts]
    tokens = max(1, sum(each.learned_tokens for each in examples))
    return sum(each.result().loss for each in passes) / tokens
