"""Computes the rows of status reports from the state: tenants, models, running dispatches, last operations,
checkpoints, endpoints.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from strata.train.core.future import OperationFuture
from strata.train.core.ops import SavedWeights, tokens_of
from strata.train.core.replay_stops import describe_stop, stopped_models
from strata.train.core.state import Dispatch, ModelCheckpoint, ModelRecord, TrainState, resident_models
from strata.train.status.learning_curves import CurvePoint, LearningCurve, LearningCurves
from strata.train.status.reports import (
    MAX_ACTIVE_MODELS,
    OTHER_TENANTS,
    RECENT,
    CheckpointStatus,
    CurveSeries,
    DeviceTurnStatus,
    EndpointStatus,
    GapStatus,
    HighGapStatus,
    ModelCurves,
    ModelStatus,
    PublishedStatus,
    RunningStatus,
    StoppedStatus,
    TenantStatus,
    Timeline,
)
from strata.train.status.throughput import ThroughputEstimate, in_flight_s

_COUNTS: Final = ("waiting", "held", "tokens", "running", "samples", "models")
"""The fields of a row that add up."""


def fold_tenants(rows: Sequence[TenantStatus], *, most: int, own: str | None = None) -> list[TenantStatus]:
    """Returns at most `most` rows by name and all other tenants folded into one. With `own`, only that tenant has its
    name."""
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
        counts[future.tenant]["running"] += future.future_id not in state.sampling
    for future in _existing(state, [*state.waiting, *state.sampling, *state.routed]):
        counts[future.tenant]["samples"] += 1
    return counts


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
    if dispatch.slice is not None:
        return "sample", {each.tenant for each in _existing(state, state.sampling)}, 0
    futures = list(_existing(state, dispatch.future_ids))
    tokens = sum(tokens_of(each.operation) for each in futures if each.operation is not None)
    return (futures[0].kind if futures else ""), {each.tenant for each in futures}, tokens


def recently_ended(lines: Iterable[Timeline], *, own: str | None = None) -> list[Timeline]:
    """The timelines of the operations that ended last, newest first."""
    ended = [each for each in lines if each.ended_at_s is not None and own in (None, each.tenant)]
    return sorted(ended, key=lambda each: each.ended_at_s or 0.0, reverse=True)[:RECENT]


def last_operations(lines: Iterable[Timeline], most: int, *, own: str | None = None) -> list[Timeline]:
    """The operations that were accepted last, newest first."""
    seen = [each for each in lines if own in (None, each.tenant)]
    return sorted(seen, key=lambda each: each.accepted_at_s, reverse=True)[:most]


def model_rows(
    state: TrainState, curves: LearningCurves, gaps: Mapping[str, GapStatus], *, own: str | None = None
) -> list[ModelStatus]:
    """The models that were used last, the newest first."""
    models = [each for each in state.models.values() if own in (None, each.tenant) and not each.refused]
    models.sort(key=lambda each: each.last_request_at_s, reverse=True)
    newest = _newest_checkpoints(state)
    return [
        _model_row(each, curves.get(each.model_id), newest.get(each.model_id), gaps.get(each.model_id))
        for each in models[:MAX_ACTIVE_MODELS]
    ]


def stopped_rows(state: TrainState, *, own: str | None = None) -> list[StoppedStatus]:
    """The models that are stopped because their replay differed."""
    return [
        StoppedStatus(
            model_id=model.model_id,
            tenant=model.tenant,
            since_s=stop.at_s,
            dispatch=stop.number,
            differences=stop.differences,
            reason=describe_stop(model, stop),
        )
        for model, stop in stopped_models(state)
        if own in (None, model.tenant)
    ]


def device_turn_status(state: TrainState) -> DeviceTurnStatus | None:
    turn = state.current_turn
    if turn is None:
        return None
    return DeviceTurnStatus(side=turn.side, since_s=turn.at_s or None, leaving=turn.leaving)


def high_gaps(state: TrainState, gaps: Mapping[str, GapStatus], *, own: str | None = None) -> list[HighGapStatus]:
    """The models whose sampler and trainer differ by more than the alarm."""
    high = [(state.models.get(model_id), gap) for model_id, gap in gaps.items() if gap.high]
    return [
        HighGapStatus(model_id=model.model_id, tenant=model.tenant, gap=gap)
        for model, gap in high
        if model is not None and own in (None, model.tenant)
    ]


def _model_row(
    model: ModelRecord, curve: LearningCurve | None, checkpoint: ModelCheckpoint | None, gap: GapStatus | None
) -> ModelStatus:
    last = _last_point(curve)
    return ModelStatus(
        model_id=model.model_id,
        tenant=model.tenant,
        rank=None if model.create.lora is None else model.create.lora.rank,
        created_at_s=model.created_at_s,
        used_at_s=model.last_request_at_s,
        unloaded=model.unloaded,
        done=model.done,
        waiting=max(model.line.released - model.done, 0) + len(model.line.held),
        stepped_at_s=None if last is None else last.at_s,
        values={} if last is None else last.values,
        checkpoint=None if checkpoint is None else _checkpoint_status(checkpoint),
        gap=gap,
        evaluation={} if curve is None else curve.evaluation,
    )


def _last_point(curve: LearningCurve | None) -> CurvePoint | None:
    points = () if curve is None else curve.points()
    return points[-1] if points else None


def _newest_checkpoints(state: TrainState) -> dict[str, ModelCheckpoint]:
    newest: dict[str, ModelCheckpoint] = {}
    for (run_id, _, _), each in state.checkpoints.items():
        if run_id not in newest or newest[run_id].saved_at_s <= each.saved_at_s:
            newest[run_id] = each
    return newest


def _checkpoint_status(checkpoint: ModelCheckpoint) -> CheckpointStatus:
    saved = checkpoint.operation
    return CheckpointStatus(
        path=SavedWeights(saved.model_id, saved.kind, saved.name).path,
        saved_at_s=checkpoint.saved_at_s,
        expires_at_s=checkpoint.expires_at_s,
    )


def endpoint_rows(state: TrainState, curves: LearningCurves, *, own: str | None = None) -> list[EndpointStatus]:
    """The inference endpoints, with the weights that were pushed to them last."""
    pushing = {name for push in state.pushes.values() for name in push.endpoints}
    rows = []
    for name, endpoint in sorted(state.endpoints.items()):
        published = []
        for each in state.published.values():
            model = state.models.get(each.model_id)
            if name in each.endpoints and model is not None and own in (None, model.tenant):
                last = _last_point(curves.get(each.model_id))
                published.append(
                    PublishedStatus(
                        model_id=each.model_id,
                        version=each.version,
                        behind=max(model.done - each.seq_id, 0),
                        sampler_gap=None if last is None else last.values.get("sampler_gap"),
                    )
                )
        rows.append(
            EndpointStatus(
                name=name,
                engine=endpoint.engine,
                added_at_s=endpoint.added_at_s,
                pushing=name in pushing,
                published=published,
            )
        )
    return rows


def model_curves(curves: LearningCurves, model_id: str, points: int, names: Sequence[str]) -> ModelCurves:
    """The metrics of a model over its steps: of each at most so many points, and only these names if there are any."""
    curve = curves.get(model_id)
    found = [] if curve is None else list(curve.points())
    skip = -(-len(found) // max(points, 1))
    # From the end, so that the newest is always there.
    kept = found[::-1][:: max(skip, 1)][::-1]
    wanted = names or sorted({name for each in kept for name in each.values})
    return ModelCurves(
        model_id=model_id,
        steps_per_point=1 if curve is None else curve.stride,
        series=[_series(kept, name) for name in wanted],
    )


def _series(points: Sequence[CurvePoint], name: str) -> CurveSeries:
    of_name = [each for each in points if name in each.values]
    return CurveSeries(
        name=name,
        steps=[each.seq_id for each in of_name],
        at_s=[each.at_s for each in of_name],
        values=[each.values[name] for each in of_name],
    )
