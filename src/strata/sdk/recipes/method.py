"""What the loop needs of a kind of training. Each kind has a module that implements it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from strata.sdk.train import Future, Model

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


class TrainingMethod(Protocol):
    @property
    def curve(self) -> str:
        """The metric of a step that shows what is learned."""

    @property
    def judged(self) -> str:
        """The metric of an evaluation by which one is better than another."""

    @property
    def higher_is_better(self) -> bool: ...

    @property
    def count(self) -> int:
        """Examples, pairs or prompts to train on."""

    @property
    def evaluates(self) -> bool:
        """Says whether there is anything to evaluate with."""

    def step(self, context: StepContext) -> ReadMetrics:
        """Send the passes and the optimizer steps of one step. The next one may be sent before its metrics are read."""

    def evaluate(self, model: Model) -> Metrics: ...


def read_after(passes: Sequence[Future[Any]], metrics: Metrics) -> ReadMetrics:
    """Metrics that are known already, once these passes have succeeded."""

    def read() -> Metrics:
        for each in passes:
            each.result()
        return metrics

    return read
