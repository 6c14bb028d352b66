"""Trains a network with one hidden layer on two half moons, with the standard library only; reports loss and accuracy
after each epoch."""

from __future__ import annotations

import json
import math
import random
import time
from typing import Final

from strata.fleet.trainer import assigned, hyper, output_folder, progress, report

POINTS: Final = 160
BATCH: Final = 16
Point = tuple[float, float, int]


def make_moons(source: random.Random, count: int) -> list[Point]:
    """Points of two interlocking half circles, with noise."""
    points = []
    for number in range(count):
        angle, label = source.uniform(0, math.pi), number % 2
        x, y = (math.cos(angle), math.sin(angle)) if label == 0 else (1 - math.cos(angle), 0.5 - math.sin(angle))
        points.append((x + source.gauss(0, 0.15), y + source.gauss(0, 0.15), label))
    return points


class Network:
    """Two inputs, a layer of tanh, one logistic output."""

    def __init__(self, source: random.Random, hidden: int) -> None:
        self.inner = [[source.gauss(0, 1), source.gauss(0, 1), 0.0] for _ in range(hidden)]
        self.outer = [source.gauss(0, hidden**-0.5) for _ in range(hidden)] + [0.0]

    def predict(self, x: float, y: float) -> tuple[list[float], float]:
        """The hidden activations, and the probability of the second moon."""
        active = [math.tanh(a * x + b * y + c) for a, b, c in self.inner]
        score = sum(w * h for w, h in zip(self.outer, active, strict=False)) + self.outer[-1]
        return active, 1 / (1 + math.exp(-max(-30.0, min(30.0, score))))

    def train(self, batch: list[Point], learning_rate: float) -> None:
        """One step of gradient descent."""
        step = learning_rate / len(batch)
        for x, y, label in batch:
            active, probability = self.predict(x, y)
            error = probability - label
            for unit, h in enumerate(active):
                slope = error * self.outer[unit] * (1 - h * h)
                self.outer[unit] -= step * error * h
                for place, value in enumerate((x, y, 1.0)):
                    self.inner[unit][place] -= step * slope * value
            self.outer[-1] -= step * error


def evaluate(network: Network, points: list[Point]) -> tuple[float, float]:
    """The mean cross-entropy in nats, and the share of points that are classified correctly."""
    loss, right = 0.0, 0
    for x, y, label in points:
        _, probability = network.predict(x, y)
        loss -= math.log(max(probability if label else 1 - probability, 1e-12))
        right += (probability > 0.5) == bool(label)
    return loss / len(points), right / len(points)


def main() -> None:
    settings, source = hyper(), random.Random(assigned().seed)  # noqa: S311 - a seed makes the run repeatable
    epochs = int(settings["epochs"])
    epoch_s = float(settings["epoch_s"])  # at least: a person watches
    training, held_out = make_moons(source, POINTS), make_moons(source, POINTS)
    network = Network(source, int(settings["hidden"]))
    for epoch in range(1, epochs + 1):
        until_s = time.monotonic() + epoch_s
        source.shuffle(training)
        for first in range(0, POINTS, BATCH):
            network.train(training[first : first + BATCH], float(settings["learning_rate"]))
        loss, accuracy = evaluate(network, held_out)
        report(step=epoch, loss=loss, accuracy=accuracy)
        progress(epoch / epochs, f"epoch {epoch}")
        time.sleep(max(0.0, until_s - time.monotonic()))
    weights = {"inner": network.inner, "outer": network.outer}
    (output_folder() / "network.json").write_text(json.dumps(weights), encoding="utf-8")


if __name__ == "__main__":
    main()
