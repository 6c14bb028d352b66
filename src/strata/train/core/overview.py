"""The state of the server at a glance. Never looks at all futures: there may be a great many that have ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import msgspec

from strata.train.core.future import Future
from strata.train.core.pace import Pace, at_ranks_s
from strata.train.core.state import Dispatch, Model, TrainState
from strata.train.core.status import OTHERS, RECENT, RunningStatus, TenantStatus, Timeline
from strata.train.core.views import tokens_of

NOBODY: Final = TenantStatus(tenant="")


def shown(rows: Sequence[TenantStatus], *, most: int, own: str | None = None) -> list[TenantStatus]:
    """Those that are told apart, at most so many; all others as one. With `own` only that one is."""
    kept = [each for each in rows if own in (None, each.tenant)][:most]
    rest = [each for each in rows if each not in kept]
    if not rest:
        return kept
    known = [each.eta_s for each in rest if each.waiting]
    return [
        *kept,
        TenantStatus(
            tenant=OTHERS,
            waiting=sum(each.waiting for each in rest),
            held=sum(each.held for each in rest),
            tokens=sum(each.tokens for each in rest),
            running=sum(each.running for each in rest),
            samples=sum(each.samples for each in rest),
            models=sum(each.models for each in rest),
            eta_s=max((each for each in known if each is not None), default=None) if None not in known else None,
        ),
    ]


def tenants(state: TrainState, pace: Pace) -> list[TenantStatus]:
    """All that have something here, the busiest first."""
    rows: dict[str, TenantStatus] = {}

    def add(tenant: str, **more: int) -> None:
        row = rows.get(tenant) or msgspec.structs.replace(NOBODY, tenant=tenant)
        changed = {name: getattr(row, name) + number for name, number in more.items()}
        rows[tenant] = msgspec.structs.replace(row, **changed)

    for tenant, waiting in state.futures.pending_by_tenant.items():
        add(tenant, waiting=waiting, held=waiting)
    for model in placed(state):
        add(model.tenant, models=1)
    for future in _known(state, (each for one in state.dispatches.values() for each in one.future_ids)):
        add(future.tenant, running=not one_of_samples(state, future))
    for future in _known(state, [*state.waiting, *state.sampling, *state.routed]):
        add(future.tenant, samples=1)
    running_s, order = at_ranks_s(state, pace), state.scheduler.foreseen().order
    queued: Counter[str] = Counter(entry.tenant for entry in order)
    tokens: Counter[str] = Counter()
    last_s: dict[str, float | None] = {}
    for entry, begins_s in zip(order, pace.begins_s(order), strict=True):
        tokens[entry.tenant] += entry.tokens
        last_s[entry.tenant] = begins_s
    for tenant, begins_s in last_s.items():
        add(tenant, tokens=tokens[tenant], held=-queued[tenant])
        eta_s = None if begins_s is None or running_s is None else running_s + begins_s
        rows[tenant] = msgspec.structs.replace(rows[tenant], eta_s=eta_s)
    busy = [each for each in rows.values() if each != msgspec.structs.replace(NOBODY, tenant=each.tenant)]
    return sorted(busy, key=lambda each: (-each.waiting - each.running - each.samples, each.tenant))


def one_of_samples(state: TrainState, future: Future) -> bool:
    return future.future_id in state.sampling


def placed(state: TrainState) -> Iterator[Model]:
    """Models that have a place at the ranks, or will have."""
    for model in state.models.values():
        if not model.unloaded and not model.refused:
            yield model


def _known(state: TrainState, future_ids: Iterable[str]) -> Iterator[Future]:
    yield from (future for each in future_ids if (future := state.futures.get(each)) is not None)


def running(state: TrainState, first_since_s: float | None, *, own: str | None = None) -> list[RunningStatus]:
    """The dispatches at the ranks, the one they are at first."""
    found = []
    for place, (_, dispatch) in enumerate(sorted(state.dispatches.items())):
        kind, names, tokens = _what(state, dispatch)
        seen = sorted({each if own in (None, each) else OTHERS for each in names})
        since_s = first_since_s if place == 0 else None
        found.append(RunningStatus(number=dispatch.number, kind=kind, tenants=seen, tokens=tokens, since_s=since_s))
    return found


def _what(state: TrainState, dispatch: Dispatch) -> tuple[str, set[str], int]:
    if dispatch.snapshot:
        return "snapshot", set(), 0
    if dispatch.quantum is not None:
        return "sample", {each.tenant for each in _known(state, state.sampling)}, 0
    futures = list(_known(state, dispatch.future_ids))
    tokens = sum(tokens_of(each.operation) for each in futures if each.operation is not None)
    return (futures[0].kind if futures else ""), {each.tenant for each in futures}, tokens


def recent(lines: Iterable[Timeline], *, own: str | None = None) -> list[Timeline]:
    """The last that ended, newest first."""
    ended = [each for each in lines if each.ended_at_s is not None and own in (None, each.tenant)]
    return sorted(ended, key=lambda each: each.ended_at_s or 0.0, reverse=True)[:RECENT]
