"""Admission: rejects operations, samples, models, sessions and imports beyond the queue's length or a tenant's quota,
with the wording of these errors. The limits come from the settings.
"""

from __future__ import annotations

from strata.base.errors import Code, StrataError
from strata.train.core.state import IMPORTED, ClientSession, TrainState, resident_models


def admit(state: TrainState, tenant: str) -> None:
    """Admit an operation. EXHAUSTED if the queue, or the share of the tenant, is full."""
    rules, pending = state.rules, state.futures.pending()
    if pending >= rules.max_pending:
        raise _over_quota(f"the queue is full: {pending} operations are waiting")
    own = state.futures.pending(tenant)
    if own >= rules.tenant_quota:
        raise _over_quota(f"the quota of {tenant} is full: {own} operations are waiting")


def admit_sample(state: TrainState, tenant: str) -> None:
    waiting, quota = state.waiting, state.rules.sample_quota
    if len(waiting) >= state.rules.max_pending_samples:
        raise _over_quota(f"the queue is full: {len(waiting)} requests wait to be sampled")
    # Counted only when the whole queue is longer than the quota.
    own = len(waiting) if len(waiting) < quota else sum(state.futures.tenant_of(each) == tenant for each in waiting)
    if own >= quota:
        raise _over_quota(f"the quota of {tenant} is full: {own} requests wait to be sampled")


def admit_model(state: TrainState, tenant: str) -> None:
    most = state.rules.max_models_per_tenant
    if most is not None and sum(model.tenant == tenant for model in resident_models(state)) >= most:
        raise StrataError(
            Code.PRECONDITION, f"the quota of {tenant} is full: it has {most} models", hint="unload one first"
        )


def admit_session(state: TrainState, tenant: str) -> None:
    most = state.rules.max_sessions_per_tenant
    if sum(each.tenant == tenant and each.finished is None for each in state.sessions.values()) >= most:
        raise StrataError(
            Code.PRECONDITION, f"the quota of {tenant} is full: it has {most} sessions", hint="finish one first"
        )


def admit_import(state: TrainState, tenant: str) -> None:
    most = state.rules.max_imports_per_tenant
    runs = (state.models[run_id] for run_id, _, _ in state.checkpoints if run_id.startswith(IMPORTED))
    if sum(run.tenant == tenant for run in runs) >= most:
        raise StrataError(
            Code.PRECONDITION,
            f"the quota of {tenant} is full: it has {most} checkpoints that were imported or copied",
            hint="delete one first",
        )


def forgettable_sessions(state: TrainState, now_s: float) -> tuple[str, ...]:
    """Ended sessions whose TTL is over, and the oldest beyond the number of one tenant.

    A session stays while it has a model, a sampler, or a result that can be retrieved: their ids name it.
    """
    rules = state.rules
    ended: dict[str, list[ClientSession]] = {}
    for session in sorted(state.sessions.values(), key=lambda each: each.finished_at_s):
        if session.finished is not None and not session.models:
            ended.setdefault(session.tenant, []).append(session)
    overdue = [
        session.session_id
        for sessions in ended.values()
        for place, session in enumerate(sessions)
        if len(sessions) - place > rules.max_ended_sessions
        or now_s - session.finished_at_s >= rules.ended_session_ttl_s
    ]
    if not overdue:
        return ()
    named = {sampler.session_id for sampler in state.samplers.values()}
    named.update(future.future_id.partition(":")[0] for future in state.futures)
    return tuple(session_id for session_id in overdue if session_id not in named)


def _over_quota(message: str) -> StrataError:
    return StrataError(Code.EXHAUSTED, message, hint="send it again later")
