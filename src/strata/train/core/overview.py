"""Summaries of the state for status reports. Never iterates over all futures: a great many may have ended."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from strata.train.core.future import OperationFuture
from strata.train.core.state import Dispatch, ModelRecord, TrainState
from strata.train.core.status import OTHER_TENANTS, RECENT, RunningStatus, TenantStatus, Timeline
from strata.train.core.throughput import ThroughputEstimate, in_flight_s
from strata.train.core.views import tokens_of

_COUNTS: Final = ("waiting", "held", "tokens", "running", "samples", "models")
"""The fields of a row that add up."""


def fold_tenants(rows: Sequence[TenantStatus], *, most: int, own: str | None = None) -> list[TenantStatus]:
    """At most `most` rows by name and all other tenants folded into one. With `own`, only that tenant has its name."""
    kept = [each for each in rows if own in (None, each.tenant)][:most]
    rest = [each for each in rows if each not in kept]
    if not rest:
        return kept
    summed = {name: sum(getattr(each, name) for each in rest) for name in _COUNTS}
    return [*kept, TenantStatus(tenant=OTHER_TENANTS, eta_s=_latest_eta_s(rest), **summed)]


def _latest_eta_s(rows: Iterable[TenantStatus]) -> float | None:
    """None if there is no estimate for a tenant that waits."""
    of_waiting = [row.eta_s for row in rows if row.waiting]
    known = [eta_s for eta_s in of_waiting if eta_s is not None]
    return max(known, default=None) if len(known) == len(of_waiting) else None


def tenant_rows(state: TrainState, throughput: ThroughputEstimate) -> list[TenantStatus]:
    """A row for every tenant that has work or models here, the busiest first."""
    counts = _count_by_tenant(state)
    etas_s: dict[str, float | None] = {}
    running_s, order = in_flight_s(state, throughput), state.scheduler.forecast().order
    for entry, begins_s in zip(order, throughput.start_times_s(order), strict=True):
        counts[entry.tenant]["tokens"] += entry.tokens
        counts[entry.tenant]["held"] -= 1
        etas_s[entry.tenant] = None if begins_s is None or running_s is None else running_s + begins_s
    rows = [TenantStatus(tenant=tenant, eta_s=etas_s.get(tenant), **numbers) for tenant, numbers in counts.items()]
    busy = [row for row in rows if row != TenantStatus(tenant=row.tenant)]
    return sorted(busy, key=lambda each: (-each.waiting - each.running - each.samples, each.tenant))


def _count_by_tenant(state: TrainState) -> defaultdict[str, Counter[str]]:
    """All that waits counts as held; the queue of the scheduler is not subtracted yet."""
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for tenant, waiting in state.futures.pending_by_tenant.items():
        counts[tenant].update(waiting=waiting, held=waiting)
    for model in resident_models(state):
        counts[model.tenant]["models"] += 1
    for future in _existing(state, (each for one in state.dispatches.values() for each in one.future_ids)):
        counts[future.tenant]["running"] += not is_sampling(state, future)
    for future in _existing(state, [*state.waiting, *state.sampling, *state.routed]):
        counts[future.tenant]["samples"] += 1
    return counts


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
