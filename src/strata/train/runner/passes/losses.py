"""The loss functions (cross_entropy, importance_sampling, ppo, cispo, dro, gspo), their config and defaults (clip
thresholds), inputs, metrics, and the errors of wrong inputs.

Each is a sum over the tokens of a datum: a client that wants a mean divides it. A malformed input is rejected by
its name.

Notation: p is the model, q the sampler the tokens came from, x the target tokens, w the weights (1 unless given, any
real number), A the advantages, r = p(x) / q(x) token by token, sg[·] stops the gradient, clip(v) = v clipped
to `low` and `high`. `low` and `high` come from the config, or token by token as an input of the datum.

Position i of a datum predicts target i: the client has already shifted the targets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

import numpy as np
import torch

from strata.base.errors import Code, StrataError
from strata.train.core import ops
from strata.train.core.loss_graph import CustomLoss, LossInput
from strata.train.core.model_options import LossName
from strata.train.status.pass_metrics import SAMPLED, TOKENS

LOW: Final = "clip_low_threshold"
HIGH: Final = "clip_high_threshold"
MASK: Final = "sequence_ratio_mask"
KNOWN_INPUTS: Final = frozenset({"target_tokens", "weights", "logprobs", "advantages", LOW, HIGH, MASK})
DENSE_LIMIT: Final = 1 << 26
"""The most numbers of one input. A sparse matrix can claim any shape in a few bytes, so the shape is limited."""
_NUMPY: Final = {ops.DType.F32: "<f4", ops.DType.I64: "<i8", ops.DType.I32: "<i4", ops.DType.BF16: "<i2"}


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
    custom: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """What a loss of the client reads, besides the log probabilities."""

    def to(self, device: torch.device) -> LossInputs:
        moved: dict[str, Any] = {"custom": {name: tensor.to(device) for name, tensor in self.custom.items()}}
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, torch.Tensor):
                moved[each.name] = value.to(device)
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
    counted = datum.mask != 0
    ratio_of_sequence = torch.where(counted, logprobs.detach() - sampled, 0.0).sum() / counted.sum()
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

    @property
    def required(self) -> tuple[str, ...]:
        """The inputs that a datum must have, besides `target_tokens`."""
        return (("logprobs", "advantages") if self.sampled else ()) + ((MASK,) if self.masked else ())


RULES: Final[Mapping[LossName, LossRule]] = {
    LossName.CROSS_ENTROPY: LossRule(cross_entropy, sampled=False, config={}),
    LossName.IMPORTANCE_SAMPLING: LossRule(importance_sampling, sampled=True, config={}),
    LossName.PPO: LossRule(ppo, sampled=True, config={LOW: 0.8, HIGH: 1.2}),
    LossName.CISPO: LossRule(cispo, sampled=True, config={LOW: 0.0, HIGH: 4.0}),
    LossName.DRO: LossRule(dro, sampled=True, config={"beta": 0.05}),
    LossName.GSPO: LossRule(gspo, sampled=True, config={LOW: 0.8, HIGH: 1.2}, masked=True),
}


def check_config(name: LossName, config: Mapping[str, float]) -> None:
    defaults = {ops.GROUP_SIZE: 1.0} if name is LossName.CUSTOM else RULES[name].config
    unknown = sorted(set(config) - set(defaults))
    if unknown:
        allowed = ", ".join(defaults) or "nothing"
        raise _invalid(f"the loss {name.value} knows no {unknown[0]!r} in its config; it takes {allowed}")


def read_inputs(name: LossName, config: Mapping[str, float], datum: ops.Datum, vocabulary: int) -> LossInputs:
    """The inputs of a loss, validated. An INVALID error names the input that does not fit."""
    rule = RULES[name]
    settings = {**rule.config, **config}
    inputs = {key: _to_tensor(key, tensor) for key, tensor in datum.inputs.items() if key in KNOWN_INPUTS}
    tokens = _token_ids("tokens", _numbers(datum.tokens, ops.DType.I32), vocabulary)
    targets = _read_targets(tokens, inputs.pop("target_tokens", None), rule, vocabulary)
    per_token = {key: _per_token(key, tensor, targets) for key, tensor in inputs.items()}
    for key in rule.required:
        if key not in per_token:
            raise _invalid(f"{key} is missing, which the loss {name.value} needs")
    needed = {key: per_token[key] for key in rule.required}
    if rule.masked and not bool((needed[MASK] != 0).any()):
        raise _invalid(f"{MASK} marks no token")
    return LossInputs(
        tokens=tokens,
        targets=targets,
        weights=per_token.get("weights", torch.ones(targets.shape)),
        logprobs=needed.get("logprobs"),
        advantages=needed.get("advantages"),
        low=per_token.get(LOW, settings.get(LOW, 0.0)),
        high=per_token.get(HIGH, settings.get(HIGH, 0.0)),
        beta=settings.get("beta", 0.0),
        mask=needed.get(MASK),
    )


def read_custom_inputs(loss: CustomLoss, datum: ops.Datum, vocabulary: int) -> LossInputs:
    """Returns what a loss of the client reads of a datum, each with the rank that it declared."""
    tokens = _token_ids("tokens", _numbers(datum.tokens, ops.DType.I32), vocabulary)
    given = datum.inputs.get("target_tokens")
    targets = _read_targets(
        tokens, None if given is None else _to_tensor("target_tokens", given), RULES[LossName.CROSS_ENTROPY], vocabulary
    )
    if targets.ndim != loss.inputs[0].rank:
        raise _invalid(
            f"target_tokens has the rank {targets.ndim} where the loss {loss.name!r} takes {loss.inputs[0].rank}"
        )
    custom = {each.name: _read_custom(loss, each, datum, len(tokens)) for each in loss.inputs[1:]}
    return LossInputs(
        tokens=tokens,
        targets=targets,
        weights=torch.ones(targets.shape),
        logprobs=None,
        advantages=None,
        low=0.0,
        high=0.0,
        beta=0.0,
        mask=None,
        custom=custom,
    )


def _read_custom(loss: CustomLoss, declared: LossInput, datum: ops.Datum, tokens: int) -> torch.Tensor:
    name, given = declared.name, datum.inputs.get(declared.name)
    if given is None:
        raise _invalid(f"{name} is missing, which the loss {loss.name!r} takes")
    tensor = _to_tensor(name, given)
    if declared.rank == 0 and tensor.numel() == 1:
        # A number has no shape on the wire, and arrives as a list of one.
        return tensor.reshape(())
    if tensor.ndim != declared.rank or tensor.shape[:1] != (tokens,):
        raise _invalid(
            f"{name} has the shape {tuple(tensor.shape)} where the loss {loss.name!r} takes the rank {declared.rank} "
            f"beside {tokens} tokens"
        )
    return tensor


def _read_targets(tokens: torch.Tensor, targets: torch.Tensor | None, rule: LossRule, vocabulary: int) -> torch.Tensor:
    if not len(tokens):
        raise _invalid("it has no tokens")
    if targets is None:
        raise _invalid("target_tokens is missing")
    ids = _token_ids("target_tokens", targets, vocabulary)
    if ids.shape[:1] != tokens.shape or ids.ndim > (1 if rule.sampled else 2):
        raise _invalid(f"target_tokens has the shape {tuple(ids.shape)} where there are {len(tokens)} tokens")
    return ids


def _token_ids(name: str, ids: torch.Tensor, vocabulary: int) -> torch.Tensor:
    if ids.is_floating_point():
        raise _invalid(f"{name} are numbers of tokens, not real numbers")
    if bool(((ids < 0) | (ids >= vocabulary)).any()):
        raise _invalid(f"{name} holds a token that is not one of the {vocabulary} of the vocabulary")
    return ids


def _per_token(name: str, tensor: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    if tensor.shape != targets.shape:
        raise _invalid(f"{name} has the shape {tuple(tensor.shape)} where target_tokens has {tuple(targets.shape)}")
    return tensor.to(torch.float32)


def _invalid(message: str) -> StrataError:
    return StrataError(Code.INVALID, message)


def _to_tensor(name: str, tensor: ops.Tensor) -> torch.Tensor:
    """A dense tensor of float32 or int64."""
    size = math.prod(tensor.shape)
    if any(length < 0 for length in tensor.shape) or size > DENSE_LIMIT:
        raise _invalid(f"{name} has the shape {tuple(tensor.shape)}, which is not one of at most {DENSE_LIMIT} numbers")
    try:
        values = _numbers(tensor.data, tensor.dtype)
        dense = values.reshape(tensor.shape) if isinstance(tensor, ops.Dense) else _densify(name, tensor, values)
    except (ValueError, RuntimeError) as error:
        raise _invalid(f"{name} does not hold what its shape {tuple(tensor.shape)} says") from error
    if dense.is_floating_point() and not bool(torch.isfinite(dense).all()):
        raise _invalid(f"{name} holds a number that is not finite")
    return dense


def _numbers(data: bytes, dtype: ops.DType) -> torch.Tensor:
    # frombuffer alone would share read-only memory, which torch warns of.
    plain = torch.from_numpy(np.frombuffer(data, dtype=_NUMPY[dtype]).copy())
    match dtype:
        case ops.DType.BF16:
            return plain.view(torch.bfloat16).to(torch.float32)
        case ops.DType.I32:
            return plain.to(torch.int64)
        case _:
            return plain


def _densify(name: str, tensor: ops.Sparse, values: torch.Tensor) -> torch.Tensor:
    rows, columns = tensor.shape
    crow = _numbers(tensor.crow, ops.DType.I64)
    col = _numbers(tensor.col, ops.DType.I64)
    counts = crow.diff()
    well_formed = (
        crow.shape == (rows + 1,)
        and col.shape == values.shape
        and int(crow[0]) == 0
        and int(crow[-1]) == len(values)
        and bool((counts >= 0).all())
        and bool(((col >= 0) & (col < columns)).all())
    )
    if not well_formed:
        raise _invalid(f"{name} is not a matrix in compressed row format (CSR)")
    dense = torch.zeros((rows, columns), dtype=values.dtype)
    dense[torch.arange(rows).repeat_interleave(counts), col] = values
    return dense


def measure_loss(terms: LossTerms, datum: LossInputs, logprobs: torch.Tensor) -> dict[str, torch.Tensor]:
    """The metrics of one datum, on the device and not read yet: `read_metrics` reads those of many datums at once.

    Ratios and clips are over the tokens that have an advantage: those of a prompt came from no sampler. Nothing here
    may wait for the device, so no tokens are selected by a mask.
    """
    counted = datum.weights != 0
    measured = {"loss:sum": terms.loss.detach(), TOKENS: counted.sum()}
    if datum.logprobs is None or datum.advantages is None:
        return measured
    sampled = counted & (datum.advantages != 0)
    measured[SAMPLED] = sampled.sum()
    if terms.ratio is not None:
        measured |= {
            "ratio:mean": torch.where(sampled, terms.ratio, 0.0).sum() / measured[SAMPLED],
            "ratio:min": torch.where(sampled, terms.ratio, torch.inf).min(),
            "ratio:max": torch.where(sampled, terms.ratio, -torch.inf).max(),
        }
    if terms.clipped is not None:
        measured["clipped_tokens:sum"] = (terms.clipped & sampled).sum()
    return measured | _sampler_gap(logprobs.detach() - datum.logprobs, sampled)


def _sampler_gap(distance: torch.Tensor, sampled: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns how far the sampler's log probabilities are from the trainer's, over the tokens that have an advantage.

    If both had the same weights, the gap is the numerical difference between two programs; after an optimizer step it
    also holds what was learned. `kl` estimates KL(q‖p) by r - 1 - log r, which is unbiased and never negative.
    """
    distance = torch.where(sampled, distance.double(), 0.0)
    return {
        "sampler_gap:sum": distance.abs().sum(),
        "sampler_gap:max": distance.abs().max(),
        "sampler_kl:sum": (distance.expm1() - distance).sum(),
    }


def read_metrics(measured: Sequence[Mapping[str, torch.Tensor]]) -> list[dict[str, float]]:
    """The metrics of each datum, by one copy to the host; see `combine_metrics` for those of an operation."""
    if not measured:
        return []
    tensors = [tensor.to(torch.float64) for each in measured for tensor in each.values()]
    numbers: Iterator[float] = iter(torch.stack(tensors).tolist())
    metrics = [dict(zip(each, numbers, strict=False)) for each in measured]
    return [_without_undefined(each) for each in metrics]


def _without_undefined(metrics: dict[str, float]) -> dict[str, float]:
    """Ratio and gap have no value if no token was sampled."""
    undefined = () if metrics.get(SAMPLED) else ("ratio:", "sampler_")
    return {name: value for name, value in metrics.items() if not name.startswith(undefined)}
