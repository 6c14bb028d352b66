"""A pass as a client asked for it, however it was written down."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from strata.base.errors import StrataError
from strata.base.suggest import suggestion
from strata.train.core import ops
from strata.train.core.ops import MAX_CONFIG, MAX_NAME
from strata.train.wire.arrays import check_datums, refuse

MAX_SEQ: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class PassRequest:
    """Everything in it was checked: a rank may take its bytes for what they say they are."""

    model_id: str
    seq_id: int
    loss: ops.LossName
    config: Mapping[str, float]
    forward_only: bool
    datums: Sequence[ops.Datum]

    def encoded(self) -> bytes:
        """What the payload holds."""
        return ops.encode_pass_data(ops.PassData(self.datums))

    def operation(self, payload: ops.Payload) -> ops.ForwardBackward:
        return ops.ForwardBackward(
            model_id=self.model_id,
            seq_id=self.seq_id,
            loss=self.loss,
            config=self.config,
            forward_only=self.forward_only,
            lengths=[datum.length for datum in self.datums],
            payload=payload,
        )


@dataclass(frozen=True, slots=True)
class Place:
    """Which operation a body is: known before the rest of it is read."""

    model_id: str
    seq_id: int

    @classmethod
    def of(cls, model_id: str, seq_id: int | None) -> Place:
        if not 0 < len(model_id) <= MAX_NAME:
            raise refuse("model_id", f"needs 1 to {MAX_NAME} characters, not {len(model_id)}")
        if seq_id is None or not 0 < seq_id <= MAX_SEQ:
            raise refuse("seq_id", f"operations of a model are counted from 1, not {seq_id}")
        return cls(model_id, seq_id)

    def unreadable(self, error: StrataError) -> ops.MalformedOperation:
        return ops.MalformedOperation(model_id=self.model_id, seq_id=self.seq_id, message=str(error))


def checked(
    place: Place, loss: str, config: Mapping[str, float | str], datums: Sequence[ops.Datum], *, forward_only: bool
) -> PassRequest:
    try:
        name = ops.LossName(loss)
    except ValueError:
        near = suggestion(loss[:MAX_NAME], [each.value for each in ops.LossName])
        raise refuse("loss_fn", f"this server has no loss {loss[:MAX_NAME]!r}{near}") from None
    numbers = _checked_config(config)
    check_datums(datums)
    return PassRequest(place.model_id, place.seq_id, name, numbers, forward_only, datums)


def _checked_config(config: Mapping[str, float | str]) -> Mapping[str, float]:
    if len(config) > MAX_CONFIG:
        raise refuse("loss_fn_config", f"has {len(config)} parameters; no loss has more than {MAX_CONFIG}")
    numbers = {}
    for name, value in config.items():
        path = f"loss_fn_config.{name[:MAX_NAME]}"
        if isinstance(value, str):
            raise refuse(path, "takes a number, not a word")
        if not math.isfinite(value):
            raise refuse(path, f"{value} is not a number that a loss can use")
        numbers[name] = float(value)
    return numbers
