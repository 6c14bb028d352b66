"""A forward or backward pass as requested, whatever its format: checks of sequence number, loss name and loss config,
with their wording.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from strata.base.errors import StrataError
from strata.base.suggest import did_you_mean
from strata.train.core import model_options, ops
from strata.train.core.loss_graph import CustomLoss
from strata.train.core.ops import MAX_CONFIG, MAX_NAME
from strata.train.wire.arrays import check_datums
from strata.train.wire.fields import invalid_field
from strata.train.wire.images import PendingImage

MAX_SEQ: Final = 2**31 - 1
LOSS_ID: Final = "loss_id"
UNPUBLISHED: Final = {
    "stable_reinforce": "its objective is not published; set another, such as loss_fn=importance_sampling, ppo, cispo "
    "or gspo, or your own by create_custom_loss"
}
"""Losses of the `tinker` SDK whose formula only its own server has."""


@dataclass(frozen=True, slots=True)
class PassRequest:
    """A validated request: a rank may trust its arrays."""

    model_id: str
    seq_id: int
    loss: model_options.LossName
    config: Mapping[str, float]
    forward_only: bool
    datums: Sequence[ops.Datum]
    loss_id: str = ""
    """The id of the loss, if that is `custom`."""
    custom: CustomLoss | None = None
    """The loss, once it was looked up."""
    sampled_tokens: int = 0
    """Sampled tokens of all datums, by their provenance."""
    images: Sequence[PendingImage] = ()
    """Those that are to be decoded: the datums have their tokens, and not yet their pixels."""

    @property
    def key(self) -> OperationKey:
        return OperationKey(self.model_id, self.seq_id)

    def encoded(self) -> bytes:
        """Returns what the payload holds."""
        return ops.encode_pass_data(ops.PassData(self.datums, self.custom))

    def operation(self, payload: ops.Payload) -> ops.ForwardBackward:
        return ops.ForwardBackward(
            model_id=self.model_id,
            seq_id=self.seq_id,
            loss=self.loss,
            config=self.config,
            forward_only=self.forward_only,
            lengths=[datum.length for datum in self.datums],
            payload=payload,
            sampled_tokens=self.sampled_tokens,
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
    if loss in UNPUBLISHED:
        raise invalid_field("loss_fn", f"this server has no loss {loss!r}: {UNPUBLISHED[loss]}")
    try:
        name = model_options.LossName(loss)
    except ValueError:
        near = did_you_mean(loss[:MAX_NAME], [each.value for each in model_options.LossName])
        raise invalid_field("loss_fn", f"this server has no loss {loss[:MAX_NAME]!r}{near}") from None
    loss_id = ""
    if name is model_options.LossName.CUSTOM:
        loss_id = _validate_loss_id(config, len(datums))
    elif ops.GROUP_SIZE in config:
        raise invalid_field(f"loss_fn_config.{ops.GROUP_SIZE}", f"the loss {name.value} has no groups; custom has")
    numbers = _validate_config({each: value for each, value in config.items() if not loss_id or each != LOSS_ID})
    check_datums(datums)
    return PassRequest(key.model_id, key.seq_id, name, numbers, forward_only, datums, loss_id)


def _validate_loss_id(config: Mapping[str, float | str], datums: int) -> str:
    """The id of the loss; INVALID if there is none, or the datums are not groups of the size that the config has."""
    loss_id = config.get(LOSS_ID)
    if not isinstance(loss_id, str) or not 0 < len(loss_id) <= MAX_NAME:
        raise invalid_field(f"loss_fn_config.{LOSS_ID}", "names the loss that create_custom_loss returned")
    size = config.get(ops.GROUP_SIZE, 1)
    if isinstance(size, str) or size not in range(1, ops.MAX_GROUP + 1):
        raise invalid_field(f"loss_fn_config.{ops.GROUP_SIZE}", f"is a number from 1 to {ops.MAX_GROUP}, not {size}")
    if datums % size:
        raise invalid_field("data", f"has {datums} datums, which are no groups of {size:g}")
    return loss_id


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
