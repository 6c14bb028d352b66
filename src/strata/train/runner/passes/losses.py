"""The loss functions. Each is a sum over the tokens of a datum: a client that wants a mean divides itself.

Notation: p is the model, q the sampler the tokens came from, x the target tokens, w the weights (1 unless given, any
real number), A the advantages, r = p(x) / q(x) token by token, sg[·] stops the gradient, clip(v) = v clipped
to `low` and `high`. `low` and `high` come from the config, or token by token as an input of the datum.

Position i of a datum predicts target i: the client has already shifted the targets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final

import torch

from strata.train.core import ops
from strata.train.core.ops import LossName
from strata.train.runner.passes.tensors import invalid, read_tokens, to_tensor

LOW: Final = "clip_low_threshold"
HIGH: Final = "clip_high_threshold"
MASK: Final = "sequence_ratio_mask"
KNOWN_INPUTS: Final = frozenset({"target_tokens", "weights", "logprobs", "advantages", LOW, HIGH, MASK})


@dataclass(frozen=True)
class LossInputs:
    """One datum as tensors, all on the device of the rank. `targets` are (T,) or, for a distillation, (T, K)."""

    tokens: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor
    logprobs: torch.Tensor | None
    advantages: torch.Tensor | None
    low: torch.Tensor | float
    high: torch.Tensor | float
    beta: float
    mask: torch.Tensor | None

    def to(self, device: torch.device) -> LossInputs:
        moved: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            moved[field.name] = value.to(device) if isinstance(value, torch.Tensor) else value
        return replace(self, **moved)


@dataclass(frozen=True)
class LossTerms:
    """The loss of one datum: its sum, and per token the values that its metrics are computed from."""

    loss: torch.Tensor
    ratio: torch.Tensor | None = None
    clipped: torch.Tensor | None = None


Loss = Callable[[torch.Tensor, LossInputs], LossTerms]


def cross_entropy(logprobs: torch.Tensor, datum: LossInputs) -> LossTerms:
    """-Σ w · log p(x). With targets (T, K), the sum goes over all K targets of each token."""
    return LossTerms(-(datum.weights * logprobs).sum())


def importance_sampling(logprobs: torch.Tensor, datum: LossInputs) -> LossTerms:
    """-Σ w · r · A."""
    ratio, advantages = _ratio(logprobs, datum)
    return LossTerms(-(datum.weights * ratio * advantages).sum(), ratio.detach())


def ppo(logprobs: torch.Tensor, datum: LossInputs) -> LossTerms:
    """-Σ w · min(r · A, clip(r) · A), with low 0.8 and high 1.2 unless set: bounds of the ratio itself."""
    ratio, advantages = _ratio(logprobs, datum)
    return _clipped_objective(ratio, advantages, datum)


def cispo(logprobs: torch.Tensor, datum: LossInputs) -> LossTerms:
    """-Σ w · sg[clip(r)] · A · log p(x), with low 0 and high 4 unless set: every token keeps a gradient."""
    ratio, advantages = _ratio(logprobs.detach(), datum)
    clipped = _clip(ratio, datum)
    return LossTerms(-(datum.weights * clipped * advantages * logprobs).sum(), ratio, clipped != ratio)


def dro(logprobs: torch.Tensor, datum: LossInputs) -> LossTerms:
    """-Σ w · (log p(x) · A - β/2 · (log p(x) - log q(x))²), with β = 0.05 unless set.

    The quadratic term holds the model near the sampler (Richemond et al., 2024). The client provides soft advantages.
    """
    sampled, advantages = _sampled(datum)
    distance = logprobs - sampled
    objective = logprobs * advantages - 0.5 * datum.beta * distance.square()
    return LossTerms(-(datum.weights * objective).sum(), distance.detach().exp())


def gspo(logprobs: torch.Tensor, datum: LossInputs) -> LossTerms:
    """-Σ w · min(s · A, clip(s) · A) with one ratio for the whole sequence, s = exp(mean over M of log r).

    M are the tokens where `sequence_ratio_mask` is not zero. The token's ratio is sg[s] · p(x) / sg[p(x)]: the value of
    the sequence, the gradient of the token (Zheng et al., 2025, the token-level form). Bounds as for ppo.
    """
    sampled, advantages = _sampled(datum)
    assert datum.mask is not None
    ratio_of_sequence = (logprobs.detach() - sampled)[datum.mask != 0].mean()
    ratio = torch.exp(ratio_of_sequence + logprobs - logprobs.detach())
    return _clipped_objective(ratio, advantages, datum)


def _ratio(logprobs: torch.Tensor, datum: LossInputs) -> tuple[torch.Tensor, torch.Tensor]:
    sampled, advantages = _sampled(datum)
    return torch.exp(logprobs - sampled), advantages


def _sampled(datum: LossInputs) -> tuple[torch.Tensor, torch.Tensor]:
    assert datum.logprobs is not None
    assert datum.advantages is not None
    return datum.logprobs, datum.advantages


def _clip(ratio: torch.Tensor, datum: LossInputs) -> torch.Tensor:
    low = torch.as_tensor(datum.low, dtype=ratio.dtype, device=ratio.device)
    high = torch.as_tensor(datum.high, dtype=ratio.dtype, device=ratio.device)
    return torch.minimum(torch.maximum(ratio, low), high)


def _clipped_objective(ratio: torch.Tensor, advantages: torch.Tensor, datum: LossInputs) -> LossTerms:
    clipped = _clip(ratio, datum)
    objective = torch.minimum(ratio * advantages, clipped * advantages)
    is_clipped = clipped.detach() * advantages < ratio.detach() * advantages
    return LossTerms(-(datum.weights * objective).sum(), ratio.detach(), is_clipped)


@dataclass(frozen=True)
class LossRule:
    """A loss function and what it needs of a datum; `config` holds the defaults of its config."""

    loss: Loss
    sampled: bool
    """Whether it needs the sampler's log probabilities and advantages."""
    config: Mapping[str, float]
    masked: bool = False


RULES: Final[Mapping[LossName, LossRule]] = {
    LossName.CROSS_ENTROPY: LossRule(cross_entropy, sampled=False, config={}),
    LossName.IMPORTANCE_SAMPLING: LossRule(importance_sampling, sampled=True, config={}),
    LossName.PPO: LossRule(ppo, sampled=True, config={LOW: 0.8, HIGH: 1.2}),
    LossName.CISPO: LossRule(cispo, sampled=True, config={LOW: 0.0, HIGH: 4.0}),
    LossName.DRO: LossRule(dro, sampled=True, config={"beta": 0.05}),
    LossName.GSPO: LossRule(gspo, sampled=True, config={LOW: 0.8, HIGH: 1.2}, masked=True),
}


def check_config(name: LossName, config: Mapping[str, float]) -> None:
    defaults = RULES[name].config
    unknown = sorted(set(config) - set(defaults))
    if unknown:
        allowed = ", ".join(defaults) or "nothing"
        raise invalid(f"the loss {name.value} knows no {unknown[0]!r} in its config; it takes {allowed}")


def read_inputs(name: LossName, config: Mapping[str, float], datum: ops.Datum, vocabulary: int) -> LossInputs:
    """The inputs of a loss, validated. An INVALID error names the input that does not fit."""
    rule = RULES[name]
    settings = {**rule.config, **config}
    inputs = {key: to_tensor(key, tensor) for key, tensor in datum.inputs.items() if key in KNOWN_INPUTS}
    tokens = _token_ids("tokens", read_tokens(datum), vocabulary)
    if not len(tokens):
        raise invalid("it has no tokens")
    if "target_tokens" not in inputs:
        raise invalid("target_tokens is missing")
    targets = _token_ids("target_tokens", inputs.pop("target_tokens"), vocabulary)
    if targets.shape[:1] != tokens.shape or targets.ndim > (1 if rule.sampled else 2):
        raise invalid(f"target_tokens has the shape {tuple(targets.shape)} where there are {len(tokens)} tokens")
    per_token = {key: _per_token(key, tensor, targets) for key, tensor in inputs.items()}
    for key in (("logprobs", "advantages") if rule.sampled else ()) + ((MASK,) if rule.masked else ()):
        if key not in per_token:
            raise invalid(f"{key} is missing, which the loss {name.value} needs")
    if rule.masked and not bool((per_token[MASK] != 0).any()):
        raise invalid(f"{MASK} marks no token")
    return LossInputs(
        tokens=tokens,
        targets=targets,
        weights=per_token.get("weights", torch.ones(targets.shape)),
        logprobs=per_token.get("logprobs") if rule.sampled else None,
        advantages=per_token.get("advantages") if rule.sampled else None,
        low=per_token.get(LOW, settings.get(LOW, 0.0)),
        high=per_token.get(HIGH, settings.get(HIGH, 0.0)),
        beta=settings.get("beta", 0.0),
        mask=per_token.get(MASK) if rule.masked else None,
    )


def _token_ids(name: str, ids: torch.Tensor, vocabulary: int) -> torch.Tensor:
    if ids.is_floating_point():
        raise invalid(f"{name} are numbers of tokens, not real numbers")
    if bool(((ids < 0) | (ids >= vocabulary)).any()):
        raise invalid(f"{name} holds a token that is not one of the {vocabulary} of the vocabulary")
    return ids


def _per_token(name: str, tensor: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    if tensor.shape != targets.shape:
        raise invalid(f"{name} has the shape {tuple(tensor.shape)} where target_tokens has {tuple(targets.shape)}")
    return tensor.to(torch.float32)


def metrics_of(terms: LossTerms, datum: LossInputs, logprobs: torch.Tensor) -> dict[str, float]:
    """The metrics of one datum; see `combine_metrics` for an operation. A mean is over the tokens with a weight."""
    counted = datum.weights != 0
    metrics = {"loss:sum": float(terms.loss.detach()), "tokens:sum": float(counted.sum())}
    if terms.ratio is not None and bool(counted.any()):
        ratio = terms.ratio[counted]
        metrics |= {"ratio:mean": float(ratio.mean()), "ratio:min": float(ratio.min()), "ratio:max": float(ratio.max())}
    if terms.clipped is not None:
        metrics["clipped_tokens:sum"] = float((terms.clipped & counted).sum())
    return metrics | _sampler_gap(logprobs.detach(), datum)


def _sampler_gap(logprobs: torch.Tensor, datum: LossInputs) -> dict[str, float]:
    """How far the sampler's log probabilities are from the trainer's, over the tokens that have an advantage.

    If both had the same weights, the gap is the numerical difference between two programs; after an optimizer step it
    also holds what was learned. `kl` estimates KL(q‖p) by r - 1 - log r, which is unbiased and never negative.
    """
    if datum.logprobs is None or datum.advantages is None:
        return {}
    sampled = (datum.advantages != 0) & (datum.weights != 0)
    distance = (logprobs - datum.logprobs)[sampled].double()
    metrics = {"sampled_tokens:sum": float(len(distance))}
    if len(distance):
        metrics |= {
            "sampler_gap:sum": float(distance.abs().sum()),
            "sampler_gap:max": float(distance.abs().max()),
            "sampler_kl:sum": float((distance.expm1() - distance).sum()),
        }
    return metrics


def combine_metrics(of_datums: list[Mapping[str, float]]) -> dict[str, float]:
    """Reduce the metrics of datums, in their order, as their names say. Rows and ranks make no difference."""
    total: dict[str, float] = {}
    for name in dict.fromkeys(key for metrics in of_datums for key in metrics):
        having = [metrics for metrics in of_datums if name in metrics]
        values = [metrics[name] for metrics in having]
        match name.rpartition(":")[2]:
            case "sum":
                total[name] = sum(values)
            case "min":
                total[name] = min(values)
            case "max":
                total[name] = max(values)
            case _:
                tokens = [metrics["tokens:sum"] for metrics in having]
                total[name] = sum(value * count for value, count in zip(values, tokens, strict=True)) / sum(tokens)
    return total
