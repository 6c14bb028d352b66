"""Who is let in: no tenant alone can take all the room that others would need."""

from __future__ import annotations

from strata.base.errors import Code, StrataError
from strata.train.core.overview import placed
from strata.train.core.state import TrainState


def admit(state: TrainState, tenant: str) -> None:
    """An operation."""
    rules, pending = state.rules, state.futures.pending()
    if pending >= rules.max_pending:
        raise _full(f"{pending} operations are waiting, which is all that may")
    own = state.futures.pending(tenant)
    if own >= rules.tenant_quota:
        raise _full(f"{own} operations of {tenant} are waiting, which is all that may")


def admit_sample(state: TrainState, tenant: str) -> None:
    waiting, quota = state.waiting, state.rules.sample_quota
    if len(waiting) >= state.rules.max_pending_samples:
        raise _full(f"{len(waiting)} requests wait to be sampled, which is all that may")
    # Nobody has more than there are.
    own = len(waiting) if len(waiting) < quota else sum(state.futures.tenant_of(each) == tenant for each in waiting)
    if own >= quota:
        raise _full(f"{own} requests of {tenant} wait to be sampled, which is all that may")


def admit_model(state: TrainState, tenant: str) -> None:
    most = state.rules.max_models_per_tenant
    if most is not None and sum(model.tenant == tenant for model in placed(state)) >= most:
        raise StrataError(
            Code.PRECONDITION, f"{tenant} has {most} models, which is all that it may", hint="unload one first"
        )


def _full(message: str) -> StrataError:
    return StrataError(Code.EXHAUSTED, message, hint="send it again later")
