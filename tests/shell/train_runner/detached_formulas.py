"""The formulas with what carries no gradient held where it is: what their differences are taken of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tests.shell.train_runner.formulas import FORMULAS, importance_weights, ppo

Array = np.ndarray[Any, Any]


def held_fixed(
    name: str, at: Array, inputs: Mapping[str, Array], config: Mapping[str, float]
) -> Callable[[Array], float]:
    match name:
        case "cispo":
            held = np.array(importance_weights(at, inputs, config))
            return lambda lp: float(-(inputs["weights"] * held * inputs["advantages"] * lp).sum())
        case "ppo":
            return lambda lp: ppo(lp, inputs, config, at)
        case "gspo":
            low, high = config.get("clip_low_threshold", 0.8), config.get("clip_high_threshold", 1.2)
            mean = float((at - inputs["logprobs"])[inputs["sequence_ratio_mask"] != 0].mean())

            def loss(lp: Array) -> float:
                ratio = np.exp(mean + lp - at)
                gain = inputs["advantages"]
                return float(-(inputs["weights"] * np.minimum(ratio * gain, np.clip(ratio, low, high) * gain)).sum())

            return loss
        case _:
            return lambda lp: FORMULAS[name](lp, inputs, config)
