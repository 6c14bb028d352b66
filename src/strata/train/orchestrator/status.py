"""Answers status queries: server, health (ranks are probed for 5 s), timelines, throughput, usage, activity, curves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from strata.base.errors import Code, StrataError
from strata.train.core import client_commands, commands
from strata.train.core.lookup import find_future, find_model, find_session
from strata.train.core.state import resident_models
from strata.train.endpoints.engine_report import engine_statuses
from strata.train.orchestrator.rank_session import OrchestratorContext
from strata.train.status import queries, reports, views
from strata.train.status.overview import (
    device_turn_status,
    endpoint_rows,
    fold_tenants,
    high_gaps,
    last_operations,
    model_curves,
    model_rows,
    recently_ended,
    running_dispatches,
    stopped_rows,
    tenant_rows,
)

HEALTH_S: Final = 5.0


async def describe_server(context: OrchestratorContext, _: str, __: queries.DescribeServer) -> views.ServerView:
    state, attached, base, settings = context.store.state, context.attached, context.base, context.settings.model
    return views.ServerView(
        base_model=settings.base_model,
        max_context=base.max_context if base else 0,
        full=settings.training == "full",
        world_size=attached.world_size if attached else 0,
        arch=base.arch if base else "",
        ready=attached is not None,
        pending=state.futures.pending(),
        running=len(state.dispatches),
        dispatched=state.dispatched,
        snapshot=state.snapshots[-1].number if state.snapshots else 0,
    )


async def check_health(context: OrchestratorContext, _: str, __: queries.CheckHealth) -> views.HealthReport:
    if context.attached is None:
        return views.HealthReport("starting", (), "the ranks are starting")
    try:
        reply = await context.backend.request(commands.HealthCheck(), HEALTH_S)
    except StrataError as error:
        running = context.store.state.dispatches
        if error.code is Code.DEADLINE and running:
            # Rank 0 replies between two dispatches; the session has a timeout for one that takes too long.
            return views.HealthReport("healthy", (), f"busy with dispatch {min(running)}")
        return views.HealthReport("unhealthy", (), str(error))
    return views.HealthReport("healthy", reply.ranks, "all ranks answered")


async def describe_timeline(
    context: OrchestratorContext, tenant: str, query: queries.DescribeTimeline
) -> reports.TimelineView:
    find_future(context.store.state, tenant, query.future_id)
    timeline = context.store.telemetry.timelines.get(query.future_id)
    if timeline is None:
        raise StrataError(Code.GONE, f"the times of {query.future_id} are not kept any longer")
    return reports.TimelineView(timeline)


async def list_timelines(
    context: OrchestratorContext, tenant: str, query: queries.ListTimelines
) -> reports.TimelinesView:
    lines = list(context.store.telemetry.timelines)
    if query.session_id:
        session = find_session(context.store.state, tenant, query.session_id)
        lines = [line for line in lines if line.future_id.startswith(f"{session.session_id}:")]
    return reports.TimelinesView(lines)


async def read_metrics(context: OrchestratorContext, tenant: str, query: queries.ReadMetrics) -> reports.MetricsView:
    """Metrics are scraped all the time: the ranks are not asked for them."""
    report, telemetry = _server_status(context, (), None if query.everything else tenant), context.store.telemetry
    # Of all tenants: it names none.
    telemetry.metrics.gap_high.set(sum(gap.high for gap in telemetry.rollouts.gaps.by_model.values()))
    return reports.MetricsView(telemetry.metrics.render(report))


async def report_metrics(
    context: OrchestratorContext, tenant: str, query: queries.ReportMetrics
) -> client_commands.Done:
    find_model(context.store.state, tenant, query.model_id)
    context.store.telemetry.curves.report(query.model_id, query.seq_id, query.values)
    return client_commands.Done()


async def read_throughput(context: OrchestratorContext, _: str, __: queries.ReadThroughput) -> reports.ThroughputView:
    points = context.store.telemetry.throughput.points(context.store.clock.wall_s())
    return reports.ThroughputView(reports.ThroughputReport(points=points))


async def read_usage(context: OrchestratorContext, tenant: str, query: queries.ReadUsage) -> views.UsageView:
    return views.UsageView(context.store.state.usage.of(tenant, query.from_s, query.until_s))


async def describe_status(
    context: OrchestratorContext, tenant: str, query: queries.DescribeStatus
) -> reports.StatusView:
    healthy = await _check_ranks(context)
    return reports.StatusView(_server_status(context, healthy, None if query.everything else tenant))


def _server_status(
    context: OrchestratorContext, healthy: Sequence[int] | str, only: str | None
) -> reports.ServerStatus:
    """`healthy` are the ranks that passed a health check just now, or why they did not.

    `only` is the tenant of the request if it may not see others by name.
    """
    state, settings, telemetry = context.store.state, context.settings, context.store.telemetry
    now_s, model = context.store.clock.wall_s(), context.base
    return reports.ServerStatus(
        now_s=now_s,
        leading_since_s=telemetry.leading_since_s,
        generation=context.store.leader_epoch,
        base_model=settings.model.base_model,
        arch=model.arch if model else "",
        training=settings.model.training,
        parameters=model.parameters if model else 0,
        one_document_per_row=model is not None and model.one_document_per_row,
        ranks=_describe_ranks(context, healthy),
        models=sum(1 for _ in resident_models(state)),
        slots=model.slots if model else settings.model.slots,
        samplers=len(state.samplers),
        sampler_places=state.rules.max_samplers,
        waiting=state.futures.pending(),
        max_waiting=state.rules.max_pending,
        samples_waiting=len(state.waiting),
        samples_running=len(state.sampling) + len(state.routed),
        running=running_dispatches(state, telemetry.begun_at_s(min(state.dispatches, default=0)), own=only),
        dispatched=state.dispatched,
        trained_tokens_per_s=telemetry.trained.per_s(now_s),
        sampled_tokens_per_s=telemetry.sampled.per_s(now_s),
        snapshot=telemetry.newest_snapshot(state),
        recoveries=telemetry.recoveries,
        recovery_s=telemetry.recovery_s,
        tenants=fold_tenants(tenant_rows(state, context.throughput), most=reports.MAX_TENANT_ROWS, own=only),
        recent=recently_ended(telemetry.timelines, own=only),
        recovered=list(telemetry.recovered),
        stopped=stopped_rows(state, own=only),
        stopped_models=len(stopped_rows(state)),
        gap_alarm_nats=telemetry.rollouts.gaps.alarm_nats,
        high_gaps=high_gaps(state, telemetry.rollouts.gaps.by_model, own=only),
        # The reason may be a line of an engine's log, about a request of another tenant.
        engines=[
            each if only is None else msgspec.structs.replace(each, reason="") for each in engine_statuses(settings)
        ],
        unroutable=dict(telemetry.unroutable),
        device_turn=device_turn_status(state),
    )


async def describe_activity(
    context: OrchestratorContext, tenant: str, query: queries.DescribeActivity
) -> reports.ActivityView:
    state, telemetry, now_s = context.store.state, context.store.telemetry, context.store.clock.wall_s()
    only = None if query.everything else tenant
    return reports.ActivityView(
        reports.ServerActivity(
            now_s=now_s,
            operations=last_operations(telemetry.timelines, query.operations, own=only),
            models=model_rows(state, telemetry.curves, telemetry.rollouts.gaps.by_model, own=only),
            endpoints=endpoint_rows(state, telemetry.curves, own=only),
        )
    )


async def read_curves(context: OrchestratorContext, tenant: str, query: queries.ReadCurves) -> reports.CurvesView:
    state = context.store.state
    if not query.everything or query.model_id not in state.models:
        find_model(state, tenant, query.model_id)
    return reports.CurvesView(model_curves(context.store.telemetry.curves, query.model_id, query.points, query.names))


def _describe_ranks(context: OrchestratorContext, healthy: Sequence[int] | str) -> reports.RanksStatus:
    state, attached = context.store.state, context.attached
    if attached is None:
        return reports.RanksStatus(state="starting", reason="the ranks are starting")
    phase, reason = "ready", "all ranks answered"
    if isinstance(healthy, str):
        phase, reason = "unhealthy", healthy
    elif not context.store.replayed:
        phase, reason = "catching up", "they replay what ranks before them had done"
    elif state.dispatches:
        phase, reason = "busy", f"with dispatch {min(state.dispatches)}"
    elif state.current_turn is not None and state.current_turn.side == "engines":
        phase, reason = "asleep", "engines have their devices"
    elif state.asleep:
        phase, reason = "asleep", "wake them with POST /wake_up"
    return reports.RanksStatus(
        state=phase,
        reason=reason,
        size=attached.world_size,
        answered=() if isinstance(healthy, str) else healthy,
        group=attached.group,
        attached_at_s=context.store.telemetry.attached_at_s,
    )


async def _check_ranks(context: OrchestratorContext) -> Sequence[int] | str:
    """The ranks that pass a health check, or why they do not. Busy ranks are not asked: they would answer too late."""
    store = context.store
    if context.attached is None or not store.replayed or store.state.dispatches:
        return ()
    try:
        return (await context.backend.request(commands.HealthCheck(), HEALTH_S)).ranks
    except StrataError as error:
        return () if store.state.dispatches else str(error)
