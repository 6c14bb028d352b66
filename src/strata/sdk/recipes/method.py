"""The port of a kind of training: batch, step, evaluate, names of its curve and of the judged metric."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from strata.sdk.recipes.batches import batch_at
from strata.sdk.recipes.pipeline import RolloutPipeline
from strata.sdk.recipes.recipe import Recipe
from strata.sdk.train import Future, Model

Example = TypeVar("Example")
Metrics = Mapping[str, float]
ReadMetrics = Callable[[], Metrics]
"""Waits for what a step has sent, and returns its metrics."""


@dataclass(frozen=True)
class StepContext:
    """One step of the loop."""

    model: Model
    step: int
    """Steps before this one."""
    optimise: Callable[[float], None]
    """Send an optimizer step for gradients that are sums over so many tokens or pairs."""
    rollouts: RolloutPipeline


@dataclass(frozen=True, kw_only=True)
class TrainingMethod(ABC, Generic[Example]):
    examples: Sequence[Example]
    """Examples, pairs or prompts to train on."""
    evaluation: Sequence[Example]
    """Those to evaluate with, if there are any."""
    recipe: Recipe
    curve: str = "loss"
    """The metric of a step that shows what is learned."""
    judged: str = "eval_loss"
    """The metric of an evaluation by which one is better than another."""
    higher_is_better: bool = False

    def batch(self, step: int) -> list[Example]:
        return [self.examples[each] for each in batch_at(step, len(self.examples), self.recipe.train)]

    @abstractmethod
    def step(self, context: StepContext) -> ReadMetrics:
        """Send the passes and the optimizer steps of one step. The next one may be sent before its metrics are read."""

    @abstractmethod
    def evaluate(self, model: Model) -> Metrics: ...

    def stop_reason(self, _steps: Sequence[Metrics]) -> str:
        """Says why another step would teach nothing, by the metrics of those until now; empty if it may."""
        return ""

    def outcome(self, _steps: Sequence[Metrics]) -> str:
        """Says what a reader of the metrics should not miss at the end; mostly empty."""
        return ""


def read_after(passes: Sequence[Future[Any]], metrics: Metrics) -> ReadMetrics:
    """Metrics that are known already, once these passes have succeeded."""

    def read() -> Metrics:
        for each in passes:
            each.result()
        return metrics

    return read
