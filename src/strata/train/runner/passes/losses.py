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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from strata.base.errors import Code, StrataError
from strata.train.core import ops
from strata.train.core.loss_graph import CustomLoss, LossInput
from strata.train.core.model_options import CLIP_HIGH as HIGH
from strata.train.core.model_options import CLIP_LOW as LOW
from strata.train.core.model_options import GAP_TOLERANCE, MASK_OUTLIERS, SEQUENCE_LEVEL, LossName
from strata.train.status.pass_metrics import SAMPLED, TOKENS

MASK: Final = "sequence_ratio_mask"
KNOWN_INPUTS: Final = frozenset({"target_tokens", "weights", "logprobs", "advantages", LOW, HIGH, MASK})
DENSE_LIMIT: Final = 1 << 26
"""The most numbers of one input. A sparse matrix can claim any shape in a few bytes, so the shape is limited."""
_NUMPY: Final = {ops.DType.F32: "<f4", ops.DType.I64: "<i8", ops.DType.I32: "<i4", ops.DType.BF16: "<u2"}

Array = NDArray[Any]


@dataclass(frozen=True)
class LossInputs:
    """One datum, validated, on the host. `targets` are (T,) or, for a distillation, (T, K)."""

    tokens: Array
    targets: Array
    weights: Array
    logprobs: Array | None
    advantages: Array | None
    low: Array | float
    high: Array | float
    beta: float
    mask: Array | None
    mask_outliers: float = 0.0
    sequence_level: float = 0.0
    gap_tolerance: float = 0.0
    custom: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """What a loss of the client reads, besides the log probabilities."""


@dataclass(frozen=True)
class LossBatch:
    """The inputs of all datums of a row that have one loss, target by target and one datum after the other, on the
    device of the rank. What the loss does not need is empty."""

    segments: torch.Tensor
    """The datum of each target: a number below `datums`."""
    datums: int
    weights: torch.Tensor
    logprobs: torch.Tensor
    advantages: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor
    beta: torch.Tensor
    mask: torch.Tensor
    marked: torch.Tensor
    """How many targets of each datum the mask marks."""
    sampled: torch.Tensor
    """Whether a target has a weight and an advantage."""
    mask_outliers: torch.Tensor
    """Empty, like the next ones, unless a datum of the batch sets one of them."""
    sequence_level: torch.Tensor
    gap_tolerance: torch.Tensor

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of each datum of the last dimension, in float64. No value reaches another datum's sum.

        On CUDA sums are added in an order that is not fixed, unless deterministic algorithms are on: they are the same
        again but for the rounding of float64.
        """
        sums = torch.zeros((*values.shape[:-1], self.datums), dtype=torch.float64, device=values.device)
        return sums.scatter_add_(-1, self.segments.expand(values.shape), values.to(torch.float64))

    def max(self, values: torch.Tensor) -> torch.Tensor:
        """The same for the largest value, which is NaN if any is."""
        largest = torch.full((*values.shape[:-1], self.datums), -torch.inf, dtype=values.dtype, device=values.device)
        return largest.scatter_reduce_(-1, self.segments.expand(values.shape), values, "amax")


BATCH_FIELDS: Final = tuple(each.name for each in fields(LossBatch) if each.name != "datums")


@dataclass(frozen=True)
class LossTerms:
    """Target by target: the terms of the loss, and the values that its metrics are computed from."""

    loss: torch.Tensor
    ratio: torch.Tensor | None = None
    clipped: torch.Tensor | None = None


Loss = Callable[[torch.Tensor, LossBatch], LossTerms]


def cross_entropy(logprobs: torch.Tensor, batch: LossBatch) -> LossTerms:
    """-Σ w · log p(x). With targets (T, K), the sum goes over all K targets of each token."""
    return LossTerms(-(batch.weights * logprobs))


def importance_sampling(logprobs: torch.Tensor, batch: LossBatch) -> LossTerms:
    """-Σ w · r · A."""
    ratio = torch.exp(logprobs - batch.logprobs)
    return LossTerms(-(batch.weights * ratio * batch.advantages), ratio.detach())


def ppo(logprobs: torch.Tensor, batch: LossBatch) -> LossTerms:
    """-Σ w · min(r · A, clip(r) · A), with low 0.8 and high 1.2 unless set: bounds of the ratio itself."""
    return _clipped_objective(torch.exp(logprobs - _sampler_logprobs(logprobs, batch)), batch)


def cispo(logprobs: torch.Tensor, batch: LossBatch) -> LossTerms:
    """-Σ w · sg[clip(r)] · A · log p(x), with low 0 and high 4 unless set: every token keeps a gradient.

    These are truncated importance weights. With `sequence_level` the weight is clip(Π r), the product over the datum's
    tokens with an advantage. With `mask_outliers` weights are not clipped: r is the weight where it is in the range,
    else 0; at the level of the sequence, where the geometric mean of r is in the range.
    """
    distance = logprobs.detach() - _sampler_logprobs(logprobs, batch)
    ratio = torch.exp(distance)
    if not batch.mask_outliers.numel():
        clipped = _clip(ratio, batch)
        return LossTerms(-(batch.weights * clipped * batch.advantages * logprobs), ratio, clipped != ratio)
    limited = torch.where(batch.sequence_level, _sequence_ratio(distance, batch), ratio)
    clipped = _clip(limited, batch)
    outside = clipped != limited
    weight = torch.where(batch.mask_outliers, torch.where(outside, 0.0, ratio), clipped)
    return LossTerms(-(batch.weights * weight * batch.advantages * logprobs), limited, outside)


def _sampler_logprobs(logprobs: torch.Tensor, batch: LossBatch) -> torch.Tensor:
    """Returns log q, and log p(x) where the two are no further apart than the tolerance.

    What a sampler computes is rounded as the requests in its batch happen to be. Within the tolerance this reaches no
    weight, so that a run can be repeated bit by bit.
    """
    if not batch.gap_tolerance.numel():
        return batch.logprobs
    own = logprobs.detach()
    return torch.where((own - batch.logprobs).abs() <= batch.gap_tolerance, own, batch.logprobs)


def _sequence_ratio(distance: torch.Tensor, batch: LossBatch) -> torch.Tensor:
    """The product of the ratios of each datum, or their geometric mean where outliers are masked, so that one range
    holds for answers of all lengths."""
    sums = batch.sum(torch.where(batch.sampled, distance, 0.0))
    counts = batch.sum(batch.sampled).clamp(min=1.0)
    masked = batch.mask_outliers
    exponents = torch.where(masked, (sums / counts)[batch.segments], sums[batch.segments])
    return torch.exp(exponents).to(distance.dtype)


def dro(logprobs: torch.Tensor, batch: LossBatch) -> LossTerms:
    """-Σ w · (log p(x) · A - β/2 · (log p(x) - log q(x))²), with β = 0.05 unless set.

    The quadratic term holds the model near the sampler (Richemond et al., 2024). The client provides soft advantages.
    """
    distance = logprobs - batch.logprobs
    objective = logprobs * batch.advantages - 0.5 * batch.beta * distance.square()
    return LossTerms(-(batch.weights * objective), distance.detach().exp())


def gspo(logprobs: torch.Tensor, batch: LossBatch) -> LossTerms:
    """-Σ w · min(s · A, clip(s) · A) with one ratio for the whole sequence, s = exp(mean over M of log r).

    M are the tokens where `sequence_ratio_mask` is not zero. The token's ratio is sg[s] · p(x) / sg[p(x)]: the value of
    the sequence, the gradient of the token (Zheng et al., 2025, the token-level form). Bounds as for ppo.
    """
    distances = torch.where(batch.mask, logprobs.detach() - batch.logprobs, 0.0)
    of_sequences = (batch.sum(distances) / batch.marked).to(logprobs.dtype)
    ratio = torch.exp(of_sequences[batch.segments] + logprobs - logprobs.detach())
    return _clipped_objective(ratio, batch)


def _clip(ratio: torch.Tensor, batch: LossBatch) -> torch.Tensor:
    return torch.minimum(torch.maximum(ratio, batch.low), batch.high)


def _clipped_objective(ratio: torch.Tensor, batch: LossBatch) -> LossTerms:
    plain, clipped = ratio * batch.advantages, _clip(ratio, batch) * batch.advantages
    is_clipped = clipped.detach() < plain.detach()
    return LossTerms(-(batch.weights * torch.minimum(plain, clipped)), ratio.detach(), is_clipped)


@dataclass(frozen=True)
class LossRule:
    """A loss function and what it needs of a datum; `config` holds the defaults of its config."""

    loss: Loss
    sampled: bool
    """Whether it needs the sampler's log probabilities and advantages."""
    config: Mapping[str, float]
    masked: bool = False

    @property
    def clips(self) -> bool:
        return LOW in self.config

    @property
    def required(self) -> tuple[str, ...]:
        """The inputs that a datum must have, besides `target_tokens`."""
        return (("logprobs", "advantages") if self.sampled else ()) + ((MASK,) if self.masked else ())


RULES: Final[Mapping[LossName, LossRule]] = {
    LossName.CROSS_ENTROPY: LossRule(cross_entropy, sampled=False, config={}),
    LossName.IMPORTANCE_SAMPLING: LossRule(importance_sampling, sampled=True, config={}),
    LossName.PPO: LossRule(ppo, sampled=True, config={LOW: 0.8, HIGH: 1.2, GAP_TOLERANCE: 0.0}),
    LossName.CISPO: LossRule(
        cispo, sampled=True, config={LOW: 0.0, HIGH: 4.0, MASK_OUTLIERS: 0.0, SEQUENCE_LEVEL: 0.0, GAP_TOLERANCE: 0.0}
    ),
    LossName.DRO: LossRule(dro, sampled=True, config={"beta": 0.05}),
    LossName.GSPO: LossRule(gspo, sampled=True, config={LOW: 0.8, HIGH: 1.2}, masked=True),
}


def check_config(name: LossName, config: Mapping[str, float]) -> None:
    defaults = {ops.GROUP_SIZE: 1.0} if name is LossName.CUSTOM else RULES[name].config
    unknown = sorted(set(config) - set(defaults))
    if unknown:
        allowed = ", ".join(defaults) or "nothing"
        raise _invalid(f"the loss {name.value} knows no {unknown[0]!r} in its config; it takes {allowed}")
    for switch in (MASK_OUTLIERS, SEQUENCE_LEVEL):
        if config.get(switch, 0.0) not in (0.0, 1.0):
            raise _invalid(f"{switch} is {config[switch]:g} where the loss {name.value} takes 0 or 1")


def read_inputs(name: LossName, config: Mapping[str, float], datum: ops.Datum, vocabulary: int) -> LossInputs:
    """The inputs of a loss, validated. An INVALID error names the input that does not fit."""
    rule = RULES[name]
    settings = {**rule.config, **config}
    inputs = {key: _to_array(key, tensor) for key, tensor in datum.inputs.items() if key in KNOWN_INPUTS}
    tokens = _token_ids("tokens", _numbers(datum.tokens, ops.DType.I32), vocabulary)
    targets = _read_targets(tokens, inputs.pop("target_tokens", None), rule, vocabulary)
    per_token = {key: _per_token(key, tensor, targets) for key, tensor in inputs.items()}
    for key in rule.required:
        if key not in per_token:
            raise _invalid(f"{key} is missing, which the loss {name.value} needs")
    needed = {key: per_token[key] for key in rule.required}
    if rule.masked and not needed[MASK].any():
        raise _invalid(f"{MASK} marks no token")
    return LossInputs(
        tokens=tokens,
        targets=targets,
        weights=per_token["weights"] if "weights" in per_token else np.ones(targets.shape, np.float32),
        logprobs=needed.get("logprobs"),
        advantages=needed.get("advantages"),
        low=per_token.get(LOW, settings.get(LOW, 0.0)),
        high=per_token.get(HIGH, settings.get(HIGH, 0.0)),
        beta=settings.get("beta", 0.0),
        mask=needed.get(MASK),
        mask_outliers=settings.get(MASK_OUTLIERS, 0.0),
        sequence_level=settings.get(SEQUENCE_LEVEL, 0.0),
        gap_tolerance=settings.get(GAP_TOLERANCE, 0.0),
    )


def read_custom_inputs(loss: CustomLoss, datum: ops.Datum, vocabulary: int) -> LossInputs:
    """Returns what a loss of the client reads of a datum, each with the rank that it declared."""
    tokens = _token_ids("tokens", _numbers(datum.tokens, ops.DType.I32), vocabulary)
    given = datum.inputs.get("target_tokens")
    targets = _read_targets(
        tokens, None if given is None else _to_array("target_tokens", given), RULES[LossName.CROSS_ENTROPY], vocabulary
    )
    if targets.ndim != loss.inputs[0].rank:
        raise _invalid(
            f"target_tokens has the rank {targets.ndim} where the loss {loss.name!r} takes {loss.inputs[0].rank}"
        )
    custom = {each.name: _read_custom(loss, each, datum, len(tokens)) for each in loss.inputs[1:]}
    return LossInputs(
        tokens=tokens,
        targets=targets,
        weights=np.ones(targets.shape, np.float32),
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
    # A copy: what was received is read-only memory, which torch warns of.
    tensor = torch.from_numpy(_to_array(name, given).copy())
    if declared.rank == 0 and tensor.numel() == 1:
        # A number has no shape on the wire, and arrives as a list of one.
        return tensor.reshape(())
    if tensor.ndim != declared.rank or tensor.shape[:1] != (tokens,):
        raise _invalid(
            f"{name} has the shape {tuple(tensor.shape)} where the loss {loss.name!r} takes the rank {declared.rank} "
            f"beside {tokens} tokens"
        )
    return tensor


def _read_targets(tokens: Array, targets: Array | None, rule: LossRule, vocabulary: int) -> Array:
    if not len(tokens):
        raise _invalid("it has no tokens")
    if targets is None:
        raise _invalid("target_tokens is missing")
    ids = _token_ids("target_tokens", targets, vocabulary)
    if ids.shape[:1] != tokens.shape or ids.ndim > (1 if rule.sampled else 2):
        raise _invalid(f"target_tokens has the shape {ids.shape} where there are {len(tokens)} tokens")
    return ids


def _token_ids(name: str, ids: Array, vocabulary: int) -> Array:
    if ids.dtype.kind == "f":
        raise _invalid(f"{name} are numbers of tokens, not real numbers")
    if ((ids < 0) | (ids >= vocabulary)).any():
        raise _invalid(f"{name} holds a token that is not one of the {vocabulary} of the vocabulary")
    return ids


def _per_token(name: str, tensor: Array, targets: Array) -> Array:
    if tensor.shape != targets.shape:
        raise _invalid(f"{name} has the shape {tensor.shape} where target_tokens has {targets.shape}")
    return tensor.astype(np.float32, copy=False)


def _invalid(message: str) -> StrataError:
    return StrataError(Code.INVALID, message)


def _to_array(name: str, tensor: ops.Tensor) -> Array:
    """A dense array of float32 or int64."""
    size = math.prod(tensor.shape)
    if any(length < 0 for length in tensor.shape) or size > DENSE_LIMIT:
        raise _invalid(f"{name} has the shape {tuple(tensor.shape)}, which is not one of at most {DENSE_LIMIT} numbers")
    try:
        values = _numbers(tensor.data, tensor.dtype)
        dense = values.reshape(tensor.shape) if isinstance(tensor, ops.Dense) else _densify(name, tensor, values)
    except ValueError as error:
        raise _invalid(f"{name} does not hold what its shape {tuple(tensor.shape)} says") from error
    if dense.dtype.kind == "f" and not np.isfinite(dense).all():
        raise _invalid(f"{name} holds a number that is not finite")
    return dense


def _numbers(data: bytes, dtype: ops.DType) -> Array:
    plain = np.frombuffer(data, dtype=_NUMPY[dtype])
    match dtype:
        case ops.DType.BF16:
            # The upper half of a float32.
            return (plain.astype("<u4") << 16).view("<f4")
        case ops.DType.I32:
            return plain.astype(np.int64)
        case _:
            return plain


def _densify(name: str, tensor: ops.Sparse, values: Array) -> Array:
    rows, columns = tensor.shape
    crow = _numbers(tensor.crow, ops.DType.I64)
    col = _numbers(tensor.col, ops.DType.I64)
    counts = np.diff(crow)
    well_formed = (
        crow.shape == (rows + 1,)
        and col.shape == values.shape
        and crow[0] == 0
        and crow[-1] == len(values)
        and (counts >= 0).all()
        and ((col >= 0) & (col < columns)).all()
    )
    if not well_formed:
        raise _invalid(f"{name} is not a matrix in compressed row format (CSR)")
    dense = np.zeros((rows, columns), dtype=values.dtype)
    dense[np.repeat(np.arange(rows), counts), col] = values
    return dense


def measure_loss(terms: LossTerms, batch: LossBatch, logprobs: torch.Tensor) -> torch.Tensor:
    """The metrics of each datum of a batch, on the device: one row of numbers for each, which `read_metrics` names.

    Ratios and clips are over the tokens that have an advantage: those of a prompt came from no sampler. Nothing here
    may wait for the device, so no tokens are selected by a mask.

    The gap says how far the sampler's log probabilities are from the trainer's. If both had the same weights, it is the
    numerical difference between two programs; after an optimizer step it also holds what was learned. `kl` estimates
    KL(q‖p) by r - 1 - log r, which is unbiased and never negative.
    """
    loss = terms.loss.detach()
    if terms.ratio is None:
        return batch.sum(loss[None])
    ratio, sampled = terms.ratio, batch.sampled
    distance = torch.where(sampled, (logprobs.detach() - batch.logprobs).double(), 0.0)
    gap = distance.abs()
    sums = [loss, torch.where(sampled, ratio, 0.0), gap, distance.expm1() - distance]
    if terms.clipped is not None:
        sums.append(terms.clipped & sampled)
    maxima = [gap, torch.where(sampled, ratio, -torch.inf), torch.where(sampled, -ratio, -torch.inf)]
    double = [[each.double() for each in group] for group in (maxima, sums)]
    return torch.cat([batch.max(torch.stack(double[0])), batch.sum(torch.stack(double[1]))])


def read_metrics(numbers: Array, counted: Array, sampled: Array | None) -> list[dict[str, float]]:
    """The metrics of each datum of a batch, from what `measure_loss` returned and the numbers of its targets that have
    a weight, and that have an advantage too. See `combine_metrics` for those of an operation."""
    if sampled is None:
        return [
            {"loss:sum": loss, TOKENS: float(count)} for loss, count in zip(numbers[0].tolist(), counted, strict=True)
        ]
    return [
        _name_metrics(of_datum, *counts)
        for of_datum, *counts in zip(numbers.T.tolist(), counted.tolist(), sampled.tolist(), strict=True)
    ]


def _name_metrics(numbers: Sequence[float], counted: int, sampled: int) -> dict[str, float]:
    """Ratio and gap have no value if no token was sampled."""
    largest_gap, largest, smallest, loss, ratio, gap, kl, *clipped = numbers
    metrics = {"loss:sum": loss, TOKENS: float(counted), SAMPLED: float(sampled)}
    if sampled:
        metrics |= {"ratio:mean": ratio / sampled, "ratio:min": -smallest, "ratio:max": largest}
    if clipped:
        metrics["clipped_tokens:sum"] = clipped[0]
    if sampled:
        metrics |= {"sampler_gap:sum": gap, "sampler_gap:max": largest_gap, "sampler_kl:sum": kl}
    return metrics
