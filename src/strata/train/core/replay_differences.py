"""How far a replay may be from the first run: tolerances by dtype (float32 3e-5, bfloat16 1/16), what is compared, and
the differences of a model as they are journaled.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

import msgspec

TOLERANCES: Final[Mapping[str, float]] = {"float64": 1e-9, "float32": 3e-5, "bfloat16": 2.0**-4}
"""Nats of a log probability, by the dtype of the arithmetic. float32: the bound within which the ranks agree with
Hugging Face in our tests, so what two correct kernels differ by. bfloat16: the distance of two neighbours from 8 to 16,
where logits are: a sum in another order moves one by about so much. float64: that of float32 with a wide margin."""
LARGEST: Final = 1e30
"""Stands for a difference that is no number: one side is not finite, or has other shapes."""


class RankNumerics(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What the numbers of a group of ranks depend on beside its input."""

    mesh: str = ""
    """Ranks, sizes of the mesh, device and version of torch."""
    dtype: str = "float32"
    deterministic: bool = False
    """Whether it has only deterministic kernels."""


class OperationDifference(NamedTuple):
    """Absolute differences between the first result of an operation and that of its replay."""

    loss: float = 0.0
    gradient_norm: float = 0.0
    logprobs: float = 0.0
    above: bool = False
    """Whether one of them is above the tolerance."""


class ReplayDifferences(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a replay found of one model: the largest differences of its passes and steps."""

    compared: int = 0
    """Passes and steps whose first numbers were there."""
    not_compared: int = 0
    """Those whose first numbers are lost. Nothing is known of them."""
    loss: float = 0.0
    gradient_norm: float = 0.0
    logprobs: float = 0.0
    """Nats."""
    above: int = 0
    """The first dispatch with a difference above the tolerance; 0 if there is none."""
    stops_at: int = 0
    """The first such dispatch that ran on the same mesh, both times with deterministic kernels; 0 if there is none."""

    def with_operation(self, number: int, difference: OperationDifference | None, *, same: bool) -> ReplayDifferences:
        """`same`: the first run and the replay promise the same bits. None: the first numbers are lost."""
        if difference is None:
            return msgspec.structs.replace(self, not_compared=self.not_compared + 1)
        above = number if difference.above else 0
        return ReplayDifferences(
            self.compared + 1,
            self.not_compared,
            max(self.loss, difference.loss),
            max(self.gradient_norm, difference.gradient_norm),
            max(self.logprobs, difference.logprobs),
            self.above or above,
            self.stops_at or (above if same else 0),
        )

    def describe(self) -> str:
        """The figures, for people."""
        figures = f"log probabilities by {self.logprobs:.2g} nats, losses by {self.loss:.2g}"
        return f"{figures}, gradient norms by {self.gradient_norm:.2g}"


KINDS: Final = ("loss", "gradient_norm", "logprobs")


def sum_differences(found: Iterable[ReplayDifferences]) -> ReplayDifferences:
    """The counts of all models, and their largest differences."""
    models = list(found)
    return ReplayDifferences(
        sum(each.compared for each in models),
        sum(each.not_compared for each in models),
        **{kind: max((getattr(each, kind) for each in models), default=0.0) for kind in KINDS},
        above=min((each.above for each in models if each.above), default=0),
        stops_at=min((each.stops_at for each in models if each.stops_at), default=0),
    )


def promise_same_bits(first: RankNumerics | None, now: RankNumerics | None) -> bool:
    """None, for the first run: an earlier version did not record it."""
    return first is not None and first == now and first.deterministic


def distance(first: float, now: float) -> float:
    """Two values that are not finite in the same way are equal."""
    if first == now or (math.isnan(first) and math.isnan(now)):
        return 0.0
    difference = abs(first - now)
    return min(difference, LARGEST) if math.isfinite(difference) else LARGEST


def pass_difference(losses: tuple[float, float], logprobs: float, tokens: int, dtype: str) -> OperationDifference:
    """`losses` are the first and the replayed sum; `logprobs` the largest difference of its tokens.

    A loss is a weighted sum over the tokens: its tolerance grows with their number, and with weights above 1 with the
    loss itself.
    """
    loss = distance(*losses)
    tolerance = TOLERANCES[dtype]
    scale = max(1.0, tokens, abs(losses[0]) if math.isfinite(losses[0]) else 0.0)
    above = logprobs > tolerance or loss > tolerance * scale
    return OperationDifference(loss=loss, logprobs=logprobs, above=above)


def step_difference(first: float, now: float, dtype: str) -> OperationDifference:
    """The tolerance of a gradient norm is relative to it, from 1 on."""
    norm = distance(first, now)
    scale = max(1.0, abs(first) if math.isfinite(first) else 0.0)
    return OperationDifference(gradient_norm=norm, above=norm > TOLERANCES[dtype] * scale)
