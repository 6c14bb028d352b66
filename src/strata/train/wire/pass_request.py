"""A forward or backward pass as a client requests it, independent of the format it was sent in."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from strata.base.errors import StrataError
from strata.base.suggest import did_you_mean
from strata.train.core import ops
from strata.train.core.ops import MAX_CONFIG, MAX_NAME
from strata.train.wire.arrays import check_datums, invalid_field

MAX_SEQ: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class PassRequest:
    """A validated request: a rank may trust its arrays."""

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
class OperationKey:
    """Identifies an operation in the order of its model; read before the rest of the body."""

    model_id: str
    seq_id: int

    @classmethod
    def of(cls, model_id: str, seq_id: int | None) -> OperationKey:
        if not 0 < len(model_id) <= MAX_NAME:
            raise invalid_field("model_id", f"needs 1 to {MAX_NAME} characters, not {len(model_id)}")
        if seq_id is None or not 0 < seq_id <= MAX_SEQ:
            raise invalid_field("seq_id", f"operations of a model are counted from 1, not {seq_id}")
        return cls(model_id, seq_id)

    def malformed(self, error: StrataError) -> ops.MalformedOperation:
        return ops.MalformedOperation(model_id=self.model_id, seq_id=self.seq_id, message=str(error))


def validate_pass(
    key: OperationKey, loss: str, config: Mapping[str, float | str], datums: Sequence[ops.Datum], *, forward_only: bool
) -> PassRequest:
    try:
        name = ops.LossName(loss)
    except ValueError:
        near = did_you_mean(loss[:MAX_NAME], [each.value for each in ops.LossName])
        raise invalid_field("loss_fn", f"this server has no loss {loss[:MAX_NAME]!r}{near}") from None
    numbers = _validate_config(config)
    check_datums(datums)
    return PassRequest(key.model_id, key.seq_id, name, numbers, forward_only, datums)


def _validate_config(config: Mapping[str, float | str]) -> Mapping[str, float]:
    if len(config) > MAX_CONFIG:
        raise invalid_field("loss_fn_config", f"has {len(config)} parameters; no loss has more than {MAX_CONFIG}")
    numbers = {}
    for name, value in config.items():
        path = f"loss_fn_config.{name[:MAX_NAME]}"
        if isinstance(value, str):
            raise invalid_field(path, "takes a number, not a word")
        if not math.isfinite(value):
            raise invalid_field(path, f"{value} is not a number that a loss can use")
        numbers[name] = float(value)
    return numbers
