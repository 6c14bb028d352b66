"""Finds what a client names (future, session, model, sampler, checkpoint) and words the errors when it does not exist,
has expired, or belongs to another tenant.
"""

from __future__ import annotations

from strata.base.errors import Code, StrataError
from strata.train.core import ops
from strata.train.core.future import OperationFuture
from strata.train.core.state import (
    INITIAL,
    INITIAL_LOAD,
    ClientSession,
    ModelCheckpoint,
    ModelRecord,
    SamplerState,
    TrainState,
)


def find_session(state: TrainState, tenant: str, session_id: str) -> ClientSession:
    session = state.sessions.get(session_id)
    if session is None or session.tenant != tenant:
        raise StrataError(Code.NOT_FOUND, f"there is no session {session_id!r}")
    return session


def find_model(state: TrainState, tenant: str, model_id: str) -> ModelRecord:
    model = state.models.get(model_id)
    if model is None or model.tenant != tenant:
        raise StrataError(Code.NOT_FOUND, f"there is no model {model_id!r}")
    return model


def find_sampler(state: TrainState, tenant: str, sampler_id: str) -> SamplerState:
    sampler = state.samplers.get(sampler_id)
    if sampler is None or sampler.tenant != tenant:
        raise StrataError(
            Code.NOT_FOUND,
            f"there is no sampler {sampler_id!r}",
            hint="one that is not used makes room for new ones; create it again",
        )
    return sampler


def check_sampler_owner(state: TrainState, tenant: str, sampler_id: str) -> None:
    """NOT_FOUND unless it is, or was before its eviction, this tenant's: its results outlive it."""
    session = state.sessions.get(sampler_id.partition(":sample:")[0])
    if sampler_id in state.samplers or session is None or session.tenant != tenant:
        find_sampler(state, tenant, sampler_id)


def find_future(state: TrainState, tenant: str, future_id: str) -> OperationFuture:
    """GONE for an expired one: a client must not take it for a future that never existed."""
    future = state.futures.get(future_id)
    if future is not None and future.tenant == tenant:
        return future
    if future is None and _existed(state, tenant, future_id):
        raise StrataError(Code.GONE, f"the result of {future_id} was kept as long as promised, and is gone")
    raise StrataError(Code.NOT_FOUND, f"there is no future {future_id!r}")


def _existed(state: TrainState, tenant: str, future_id: str) -> bool:
    """Ids tell what they belong to, so nothing of expired futures has to be stored."""
    owner, _, which = future_id.rpartition(":")
    if owner == "op":
        return which.isdecimal() and 1 <= int(which) <= state.server_operations
    session_id, sampled, _ = owner.partition(":sample:")
    if sampled:
        # Samplers are evicted and sessions stay: any id within a session of the tenant may have existed.
        session = state.sessions.get(session_id)
        return session is not None and session.tenant == tenant
    model = state.models.get(owner)
    return model is not None and model.tenant == tenant and _was_accepted(model, which)


def _was_accepted(model: ModelRecord, which: str) -> bool:
    """Says whether the model ever had the operation that this last part of a future's id names."""
    if which in ("create", INITIAL, INITIAL_LOAD):
        return True
    if which == "unload":
        return model.unloading
    # Those that were held when the model was unloaded existed, too.
    return which.isdecimal() and (1 <= int(which) <= model.line.released or int(which) in model.line.held)


def find_checkpoint(state: TrainState, tenant: str, run_id: str, kind: ops.WeightsKind, name: str) -> ModelCheckpoint:
    """Returns a checkpoint of this tenant: it may change and delete the checkpoint."""
    checkpoint = find_readable_checkpoint(state, tenant, run_id, kind, name)
    if state.models[run_id].tenant != tenant:
        raise _no_checkpoint(run_id, kind, name)
    return checkpoint


def find_readable_checkpoint(
    state: TrainState, tenant: str, run_id: str, kind: ops.WeightsKind, name: str
) -> ModelCheckpoint:
    """Returns a checkpoint of this tenant, or a public one."""
    checkpoint = state.checkpoints.get((run_id, kind, name))
    if checkpoint is None or not may_read(state, tenant, checkpoint):
        raise _no_checkpoint(run_id, kind, name)
    return checkpoint


def may_read(state: TrainState, tenant: str, checkpoint: ModelCheckpoint) -> bool:
    """Says whether it belongs to this tenant, or is public."""
    owner = state.models.get(checkpoint.operation.model_id)
    return owner is not None and (owner.tenant == tenant or checkpoint.public)


def _no_checkpoint(run_id: str, kind: ops.WeightsKind, name: str) -> StrataError:
    return StrataError(
        Code.NOT_FOUND,
        f"there is no checkpoint tinker://{run_id}/{kind}/{name}",
        hint="one that was deleted, or whose time was over, is gone",
    )


def checkpoints_of(state: TrainState, tenant: str, model_id: str | None) -> list[ModelCheckpoint]:
    if model_id is not None:
        find_model(state, tenant, model_id)
    return [
        each
        for (run_id, _, _), each in state.checkpoints.items()
        if (model_id in (None, run_id)) and state.models[run_id].tenant == tenant
    ]
