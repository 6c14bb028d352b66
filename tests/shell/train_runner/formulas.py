"""The losses once more, in numpy and token by token, written from their definitions and not from our code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import exp, log
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def cross_entropy(lp: Array, d: Mapping[str, Array], c: Mapping[str, float]) -> float:
    return -sum(float(w) * float(one) for w, one in zip(d["weights"].flat, lp.flat, strict=True))


def importance_sampling(lp: Array, d: Mapping[str, Array], c: Mapping[str, float]) -> float:
    return -sum(w * exp(p - q) * a for w, p, q, a in _tokens(lp, d))


def ppo(lp: Array, d: Mapping[str, Array], c: Mapping[str, float], at: Array | None = None) -> float:
    low, high = c.get("clip_low_threshold", 0.8), c.get("clip_high_threshold", 1.2)
    total = 0.0
    for w, p, q, a in _tokens(lp, within_tolerance(lp if at is None else at, d, c)):
        ratio = exp(p - q)
        total -= w * min(ratio * a, min(max(ratio, low), high) * a)
    return total


def cispo(lp: Array, d: Mapping[str, Array], c: Mapping[str, float]) -> float:
    return -sum(k * w * a * p for k, (w, p, _, a) in zip(importance_weights(lp, d, c), _tokens(lp, d), strict=True))


def within_tolerance(lp: Array, d: Mapping[str, Array], c: Mapping[str, float]) -> Mapping[str, Array]:
    """The same with the model's log probability for the sampler's, where the two are near each other."""
    most, pairs = c.get("gap_tolerance", 0.0), zip(lp, d["logprobs"], strict=True)
    return {**d, "logprobs": np.array([p if abs(p - q) <= most else q for p, q in pairs])}


def importance_weights(lp: Array, d: Mapping[str, Array], c: Mapping[str, float]) -> list[float]:
    """Truncated or masked, token by token or for the whole answer: its tokens are those that are learned from."""
    low, high = c.get("clip_low_threshold", 0.0), c.get("clip_high_threshold", 4.0)
    ratios, limited = token_ratios(lp, d, c), limited_ratios(lp, d, c)
    if c.get("mask_outliers"):
        return [ratio if low <= one <= high else 0.0 for ratio, one in zip(ratios, limited, strict=True)]
    return [min(max(one, low), high) for one in limited]


def token_ratios(lp: Array, d: Mapping[str, Array], c: Mapping[str, float]) -> list[float]:
    return [exp(p - q) for _, p, q, _ in _tokens(lp, within_tolerance(lp, d, c))]


def limited_ratios(lp: Array, d: Mapping[str, Array], c: Mapping[str, float]) -> list[float]:
    ratios = token_ratios(lp, d, c)
    if not c.get("sequence_level"):
        return ratios
    learned = [ratio for ratio, (w, _, _, a) in zip(ratios, _tokens(lp, d), strict=True) if w and a]
    product = 1.0
    for ratio in learned:
        product *= ratio
    shared = product ** (1 / max(len(learned), 1)) if c.get("mask_outliers") else product
    return [shared] * len(ratios)


def dro(lp: Array, d: Mapping[str, Array], c: Mapping[str, float]) -> float:
    beta = c.get("beta", 0.05)
    return -sum(w * (p * a - beta / 2 * (p - q) ** 2) for w, p, q, a in _tokens(lp, d))


def gspo(lp: Array, d: Mapping[str, Array], c: Mapping[str, float]) -> float:
    low, high = c.get("clip_low_threshold", 0.8), c.get("clip_high_threshold", 1.2)
    marked = [(p - q) for (_, p, q, _), m in zip(_tokens(lp, d), d["sequence_ratio_mask"], strict=True) if m]
    product = 1.0
    for one in marked:
        product *= exp(one)
    ratio = exp(log(product) / len(marked))
    return -sum(w * min(ratio * a, min(max(ratio, low), high) * a) for w, _, _, a in _tokens(lp, d))


def _tokens(lp: Array, d: Mapping[str, Array]) -> list[tuple[float, float, float, float]]:
    columns = (d["weights"], lp, d["logprobs"], d["advantages"])
    return [(float(w), float(p), float(q), float(a)) for w, p, q, a in zip(*columns, strict=True)]


FORMULAS: Mapping[str, Callable[[Array, Mapping[str, Array], Mapping[str, float]], float]] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
    "gspo": gspo,
}
CONFIGS: Mapping[str, tuple[Mapping[str, float], ...]] = {
    "cross_entropy": ({},),
    "importance_sampling": ({},),
    "ppo": (
        {},
        {"clip_low_threshold": 0.95, "clip_high_threshold": 1.05},
        {"clip_low_threshold": 0.95, "clip_high_threshold": 1.05, "gap_tolerance": 0.2},
    ),
    "cispo": (
        {},
        {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
        {"clip_low_threshold": 0.8, "clip_high_threshold": 1.25, "mask_outliers": 1.0},
        {"clip_high_threshold": 1.1, "sequence_level": 1.0},
        {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1, "mask_outliers": 1.0, "sequence_level": 1.0},
        {"clip_high_threshold": 1.1, "gap_tolerance": 0.2},
    ),
    "dro": ({}, {"beta": 0.7}),
    "gspo": ({}, {"clip_low_threshold": 0.99, "clip_high_threshold": 1.01}),
}
