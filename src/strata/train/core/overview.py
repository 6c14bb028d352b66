"""Summaries of the state for status reports. Never iterates over all futures: a great many may have ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import msgspec

from strata.train.core.future import OperationFuture
from strata.train.core.state import Dispatch, ModelRecord, TrainState
from strata.train.core.status import OTHER_TENANTS, RECENT, RunningStatus, TenantStatus, Timeline
from strata.train.core.throughput import ThroughputEstimate, in_flight_s
from strata.train.core.views import tokens_of

IDLE_TENANT: Final = TenantStatus(tenant="")


def fold_tenants(rows: Sequence[TenantStatus], *, most: int, own: str | None = None) -> list[TenantStatus]:
    """At most `most` rows by name and all other tenants folded into one. With `own`, only that tenant has its name."""
    kept = [each for each in rows if own in (None, each.tenant)][:most]
    rest = [each for each in rows if each not in kept]
    if not rest:
        return kept
    known = [each.eta_s for each in rest if each.waiting]
    return [
        *kept,
        TenantStatus(
            tenant=OTHER_TENANTS,
            waiting=sum(each.waiting for each in rest),
            held=sum(each.held for each in rest),
            tokens=sum(each.tokens for each in rest),
            running=sum(each.running for each in rest),
            samples=sum(each.samples for each in rest),
            models=sum(each.models for each in rest),
            eta_s=max((each for each in known if each is not None), default=None) if None not in known else None,
        ),
    ]


def tenant_rows(state: TrainState, throughput: ThroughputEstimate) -> list[TenantStatus]:
    """A row for every tenant that has work or models here, the busiest first."""
    rows: dict[str, TenantStatus] = {}

    def add(tenant: str, **more: int) -> None:
        row = rows.get(tenant) or msgspec.structs.replace(IDLE_TENANT, tenant=tenant)
        changed = {name: getattr(row, name) + number for name, number in more.items()}
        rows[tenant] = msgspec.structs.replace(row, **changed)

    for tenant, waiting in state.futures.pending_by_tenant.items():
        add(tenant, waiting=waiting, held=waiting)
    for model in resident_models(state):
        add(model.tenant, models=1)
    for future in _existing(state, (each for one in state.dispatches.values() for each in one.future_ids)):
        add(future.tenant, running=not is_sampling(state, future))
    for future in _existing(state, [*state.waiting, *state.sampling, *state.routed]):
        add(future.tenant, samples=1)
    running_s, order = in_flight_s(state, throughput), state.scheduler.forecast().order
    queued: Counter[str] = Counter(entry.tenant for entry in order)
    tokens: Counter[str] = Counter()
    last_s: dict[str, float | None] = {}
    for entry, begins_s in zip(order, throughput.start_times_s(order), strict=True):
        tokens[entry.tenant] += entry.tokens
        last_s[entry.tenant] = begins_s
    for tenant, begins_s in last_s.items():
        add(tenant, tokens=tokens[tenant], held=-queued[tenant])
        eta_s = None if begins_s is None or running_s is None else running_s + begins_s
        rows[tenant] = msgspec.structs.replace(rows[tenant], eta_s=eta_s)
    busy = [each for each in rows.values() if each != msgspec.structs.replace(IDLE_TENANT, tenant=each.tenant)]
    return sorted(busy, key=lambda each: (-each.waiting - each.running - each.samples, each.tenant))


def is_sampling(state: TrainState, future: OperationFuture) -> bool:
    return future.future_id in state.sampling


def resident_models(state: TrainState) -> Iterator[ModelRecord]:
    """Models that occupy a slot of the ranks, or will."""
    for model in state.models.values():
        if not model.unloaded and not model.refused:
            yield model


def _existing(state: TrainState, future_ids: Iterable[str]) -> Iterator[OperationFuture]:
    yield from (future for each in future_ids if (future := state.futures.get(each)) is not None)


def running_dispatches(
    state: TrainState, first_since_s: float | None, *, own: str | None = None
) -> list[RunningStatus]:
    """The dispatches in flight, the running one first."""
    found = []
    for place, (_, dispatch) in enumerate(sorted(state.dispatches.items())):
        kind, names, tokens = _describe_dispatch(state, dispatch)
        seen = sorted({each if own in (None, each) else OTHER_TENANTS for each in names})
        since_s = first_since_s if place == 0 else None
        found.append(RunningStatus(number=dispatch.number, kind=kind, tenants=seen, tokens=tokens, since_s=since_s))
    return found


def _describe_dispatch(state: TrainState, dispatch: Dispatch) -> tuple[str, set[str], int]:
    if dispatch.snapshot:
        return "snapshot", set(), 0
    if dispatch.quantum is not None:
        return "sample", {each.tenant for each in _existing(state, state.sampling)}, 0
    futures = list(_existing(state, dispatch.future_ids))
    tokens = sum(tokens_of(each.operation) for each in futures if each.operation is not None)
    return (futures[0].kind if futures else ""), {each.tenant for each in futures}, tokens


def recently_ended(lines: Iterable[Timeline], *, own: str | None = None) -> list[Timeline]:
    """The timelines of the operations that ended last, newest first."""
    ended = [each for each in lines if each.ended_at_s is not None and own in (None, each.tenant)]
    return sorted(ended, key=lambda each: each.ended_at_s or 0.0, reverse=True)[:RECENT]
