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


def ppo(lp: Array, d: Mapping[str, Array], c: Mapping[str, float]) -> float:
    low, high = c.get("clip_low_threshold", 0.8), c.get("clip_high_threshold", 1.2)
    total = 0.0
    for w, p, q, a in _tokens(lp, d):
        ratio = exp(p - q)
        total -= w * min(ratio * a, min(max(ratio, low), high) * a)
    return total


def cispo(lp: Array, d: Mapping[str, Array], c: Mapping[str, float]) -> float:
    low, high = c.get("clip_low_threshold", 0.0), c.get("clip_high_threshold", 4.0)
    return -sum(w * min(max(exp(p - q), low), high) * a * p for w, p, q, a in _tokens(lp, d))


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
    "ppo": ({}, {"clip_low_threshold": 0.95, "clip_high_threshold": 1.05}),
    "cispo": ({}, {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}),
    "dro": ({}, {"beta": 0.7}),
    "gspo": ({}, {"clip_low_threshold": 0.99, "clip_high_threshold": 1.01}),
}
