"""Losses that clients create in a session: the quota of bytes of a tenant, and their lookup. Their format is checked in
`loss_graph`.
"""

from __future__ import annotations

import msgspec

from strata.base.errors import Code, StrataError
from strata.train.core.client_commands import Accepted, CreateCustomLoss
from strata.train.core.facts import CustomLossCreated
from strata.train.core.inputs import Decision
from strata.train.core.lookup import find_session
from strata.train.core.loss_graph import CustomLoss, check_loss
from strata.train.core.state import CustomLossRecord, TrainState


def create(state: TrainState, tenant: str, command: CreateCustomLoss, at_s: float) -> Decision:
    """The loss is its own future: it is done when it is durable."""
    session = find_session(state, tenant, command.loss_id.partition(":")[0])
    check_loss(command.loss)
    accepted = Accepted(command.loss_id, "")
    existing = state.custom_losses.get(command.loss_id)
    if existing is not None:
        if existing.loss != command.loss:
            raise StrataError(Code.CONFLICT, f"{command.loss_id!r} was created before, with another graph")
        return Decision(accepted)
    if session.finished is not None:
        raise StrataError(Code.PRECONDITION, f"session {session.session_id!r} is finished")
    most = state.rules.max_loss_bytes
    own = sum(_encoded_bytes(each.loss) for each in state.custom_losses.values() if each.tenant == tenant)
    if own + _encoded_bytes(command.loss) > most:
        raise StrataError(
            Code.PRECONDITION,
            f"the quota of {tenant} is full: its custom losses have {own:,} of {most:,} bytes",
            hint="finish a session that has some",
        )
    return Decision(accepted, (CustomLossCreated(command.loss_id, tenant, command.loss, at_s),))


def _encoded_bytes(loss: CustomLoss) -> int:
    """Returns what it takes in the saved state and in the journal."""
    return len(msgspec.msgpack.encode(loss))


def find(state: TrainState, tenant: str, loss_id: str) -> CustomLossRecord:
    record = state.custom_losses.get(loss_id)
    if record is None or record.tenant != tenant:
        raise StrataError(
            Code.NOT_FOUND, f"there is no loss {loss_id[:200]!r}", hint="a loss ends with the session that created it"
        )
    return record
