"""Learning curves: the metrics of each model by optimizer step, at most 400 points of 64 models, and 16 metrics that
a client reports.

A step gets the metrics of all passes since the one before, combined as their names say, and what the client reported
since then: a reward, for example, which only the client knows. When a curve is full, each two
neighbours become their mean: so it covers the whole run, and a long one more coarsely.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from strata.base.errors import Code, StrataError
from strata.train.status.pass_metrics import COUNTED, TOKENS, combine_metrics

MAX_MODELS: Final = 64
"""The models that stepped last."""
MAX_POINTS: Final = 400
MAX_REPORTED: Final = 16
"""Names of metrics that the client of one model may report."""
EVALUATION: Final = "eval_"
"""How names of metrics of an evaluation begin."""
MAX_UNUSED: Final = 64
"""Reports of a model whose step has not come yet."""


class CurvePoint(msgspec.Struct, frozen=True):
    seq_id: int
    """The last step in it: numbers of a model's operations go on over restarts."""
    at_s: float
    values: Mapping[str, float]


class LearningCurve(msgspec.Struct):
    """The learning curve of one model."""

    stride: int = 1
    """Steps in each point; the last one may have fewer."""
    whole: list[CurvePoint] = []
    last: list[CurvePoint] = []
    """Steps that make no whole point yet."""
    passes: list[Mapping[str, float]] = []
    reported: list[tuple[int, Mapping[str, float]]] = []
    """What the client measured, by the number of the operation that it was to send next."""
    names: set[str] = set()
    """Names that the client has reported."""
    evaluation: dict[str, float] = {}
    """The newest of those that are about an evaluation, which no step may come after."""

    def report(self, seq_id: int, values: Mapping[str, float]) -> None:
        """Metrics of the client for the first step from this number on. EXHAUSTED for too many names."""
        names = self.names | values.keys()
        if len(names) > MAX_REPORTED:
            raise StrataError(Code.EXHAUSTED, f"a client reports at most {MAX_REPORTED} metrics of a model")
        self.names = names
        self.evaluation = self.evaluation | {
            name: value for name, value in values.items() if name.startswith(EVALUATION) and math.isfinite(value)
        }
        self.reported = [*self.reported, (seq_id, values)][-MAX_UNUSED:]

    def add_pass(self, metrics: Mapping[str, float]) -> None:
        self.passes = [combine_metrics([*self.passes, metrics])]

    def add_late(self, seq_id: int, metrics: Mapping[str, float]) -> None:
        """Sums and maxima of a pass that were computed after its result: the step after it may be there already."""
        for points in (self.whole, self.last):
            for place, point in enumerate(points):
                if point.seq_id > seq_id:
                    points[place] = _with_pass(point, metrics)
                    return
        self.add_pass(metrics)

    def add_step(self, seq_id: int, at_s: float, metrics: Mapping[str, float]) -> None:
        if (newest := [*self.whole[-1:], *self.last]) and newest[-1].seq_id >= seq_id:
            # Its result was not committed when the process ended, and the ranks computed it and its passes again.
            self.passes = []
            return
        measured = {name: value for each in self.passes for name, value in _per_token(each).items()}
        reported = {name: value for seq, each in self.reported if seq <= seq_id for name, value in each.items()}
        values = reported | measured | dict(metrics)
        self.passes, self.reported = [], [each for each in self.reported if each[0] > seq_id]
        # JSON has no other numbers.
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        self.last.append(CurvePoint(seq_id, at_s, finite))
        if len(self.last) >= self.stride:
            self.whole.append(_mean(self.last))
            self.last = []
        if len(self.whole) > MAX_POINTS:
            self.whole = [_mean(self.whole[first : first + 2]) for first in range(0, len(self.whole), 2)]
            self.stride *= 2

    def points(self) -> Sequence[CurvePoint]:
        """Oldest first."""
        return [*self.whole, *([_mean(self.last)] if self.last else [])]


class LearningCurves:
    """The curves of all models, the one that stepped last at the end."""

    def __init__(self) -> None:
        self._curves: dict[str, LearningCurve] = {}
        self.changes = 0
        """Changes since the start: whether a copy is the newest."""

    def encode(self) -> bytes:
        return _encoder.encode(self._curves)

    def restore(self, content: bytes) -> None:
        """Go on from what another process has encoded. `msgspec.MsgspecError` if it is nothing of the kind."""
        self._curves = _decoder.decode(content)

    def get(self, model_id: str) -> LearningCurve | None:
        return self._curves.get(model_id)

    def report(self, model_id: str, seq_id: int, values: Mapping[str, float]) -> None:
        self._of(model_id).report(seq_id, values)

    def add_pass(self, model_id: str, metrics: Mapping[str, float]) -> None:
        self._of(model_id).add_pass(metrics)

    def add_late(self, model_id: str, seq_id: int, metrics: Mapping[str, float]) -> None:
        """Adds metrics of a pass whose result was sent before. Does not bring back a curve that was dropped
        meanwhile."""
        if model_id in self._curves:
            self.changes += 1
            self._curves[model_id].add_late(seq_id, metrics)

    def add_step(self, model_id: str, seq_id: int, at_s: float, metrics: Mapping[str, float]) -> None:
        self._of(model_id).add_step(seq_id, at_s, metrics)

    def _of(self, model_id: str) -> LearningCurve:
        self.changes += 1
        curve = self._curves.pop(model_id, None) or LearningCurve()
        self._curves[model_id] = curve
        if len(self._curves) > MAX_MODELS:
            del self._curves[next(iter(self._curves))]
        return curve


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(dict[str, LearningCurve])


def _per_token(metrics: Mapping[str, float]) -> dict[str, float]:
    """Sums become means over their tokens: what a person compares between steps."""
    found = {}
    for name, value in metrics.items():
        stem, _, reduction = name.rpartition(":")
        if name == TOKENS:
            found["tokens"] = value
        elif reduction == "sum" and not stem.endswith("_tokens"):
            found[stem] = value / max(metrics.get(COUNTED.get(name, TOKENS), 0.0), 1.0)
        else:
            found[stem if reduction in ("sum", "mean") else name.replace(":", "_")] = value
    return found


def _with_pass(point: CurvePoint, metrics: Mapping[str, float]) -> CurvePoint:
    values = dict(point.values)
    for name, value in _per_token(metrics).items():
        before = values.get(name)
        counted = COUNTED.get(f"{name}:sum", "").removesuffix(":sum")
        if before is None or name.endswith("_max"):
            values[name] = value if before is None else max(before, value)
        elif counted:
            old, new = point.values.get(counted, 0.0), metrics[f"{counted}:sum"]
            values[name] = (before * old + value * new) / max(old + new, 1.0)
        else:
            values[name] = before + value
    finite = {name: value for name, value in values.items() if math.isfinite(value)}
    return CurvePoint(point.seq_id, point.at_s, finite)


def _mean(points: Sequence[CurvePoint]) -> CurvePoint:
    names = dict.fromkeys(name for each in points for name in each.values)
    values = {name: _plain_mean(each.values[name] for each in points if name in each.values) for name in names}
    return CurvePoint(points[-1].seq_id, points[-1].at_s, values)


def _plain_mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)
