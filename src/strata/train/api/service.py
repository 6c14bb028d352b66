"""Routes of the server itself: client configuration, capabilities, health, status, throughput, curves, rollouts,
metrics, traces, sleep and wake.
"""

from __future__ import annotations

import asyncio

import msgspec

from strata.base.errors import Code, StrataError
from strata.http.metrics import MEDIA_TYPE
from strata.http.route import KIB, MIB, OPERATOR, PUBLIC, READS, RESEARCHER, VIEWER, RawReply, Route
from strata.identity.roles import CallerKind, Role
from strata.train.api.context import ApiCall
from strata.train.api.front import SEES_ALL
from strata.train.api.text import ModelText
from strata.train.core import client_commands, ops
from strata.train.grammar import CALL_START
from strata.train.images import ImageForm
from strata.train.status import queries, views
from strata.train.status.reports import (
    ActivityView,
    CurvesView,
    MetricsView,
    ModelCurves,
    ServerActivity,
    ServerStatus,
    StatusView,
    ThroughputReport,
    ThroughputView,
    TimelinesView,
    TimelineView,
)
from strata.train.status.rollouts import RolloutFilter, RolloutsView, RolloutView
from strata.train.wire import bodies, replies
from strata.train.wire.rollouts import RolloutReply, RolloutsQuery, RolloutsReply, rollout_reply, rollouts_reply
from strata.train.wire.timeline import TimelineReply, chrome_trace, timeline_reply


async def client_config(call: ApiCall, body: bodies.ClientConfigBody) -> replies.ClientConfigReply:
    """Returns how clients of the `tinker` SDK are to behave towards this server."""
    del body
    # Over loopback compressing costs more than it saves.
    host = call.headers.get("host", "").rpartition(":")[0]
    return replies.ClientConfigReply(proto_compress_fwdbwd=host not in ("127.0.0.1", "localhost", "[::1]"))


async def dynamic_config(call: ApiCall, body: bodies.ClientConfigBody) -> replies.DynamicConfig:
    """The same for what may change while a client runs."""
    del call, body
    return replies.DynamicConfig()


async def capabilities(call: ApiCall) -> replies.Capabilities:
    """The models that can be trained here."""
    server = await call.request(queries.DescribeServer(), views.ServerView)
    model = replies.SupportedModel(
        model_name=server.base_model,
        max_context_length=server.max_context,
        trainable=True,
        sampleable=True,
        images=isinstance(call.context.images, ImageForm),
    )
    return replies.Capabilities(supported_models=[model])


async def alive(call: ApiCall) -> replies.Alive:
    """Returns whether this process is alive."""
    del call
    return replies.Alive()


async def health(call: ApiCall) -> RawReply:
    """Returns whether every rank is healthy; 503 if not, with the reason."""
    report = await call.request(queries.CheckHealth(), views.HealthReport)
    server = await call.request(queries.DescribeServer(), views.ServerView)
    reply = replies.ServerHealthReply(
        status=report.status,
        ranks=report.ranks,
        reason=report.reason,
        pending=server.pending,
        running=server.running,
        dispatched=server.dispatched,
    )
    return RawReply(msgspec.json.encode(reply), 200 if report.status == "healthy" else 503)


async def telemetry(call: ApiCall) -> replies.AcceptedReply:
    """Accepted and discarded: this server collects no telemetry."""
    del call
    return replies.AcceptedReply()


async def sleep(call: ApiCall) -> RawReply:
    """Free what the models hold on the devices. Samples wait; what trains fails, but models can be unloaded."""
    return await _manage(call, ops.Sleep())


async def wake_up(call: ApiCall) -> RawReply:
    """Bring back what `sleep` put away."""
    return await _manage(call, ops.Wake())


async def _manage(call: ApiCall, operation: ops.Sleep | ops.Wake) -> RawReply:
    accepted = await call.submit(operation)
    outcome = await call.watch(accepted.future_id, call.context.settings.server.poll_s)
    if isinstance(outcome, views.QueuePosition):
        pending = replies.TryAgain(
            request_id=accepted.future_id, queue_state=outcome.queue_state, queue_state_reason=outcome.reason
        )
        return RawReply(msgspec.json.encode(pending), 202)
    if isinstance(outcome.result, ops.Failed):
        raise StrataError(Code.UNAVAILABLE, outcome.result.message)
    return RawReply(msgspec.json.encode(outcome.result))


def _sees_all_tenants(call: ApiCall) -> bool:
    """An operator sees all tenants, and so does one of a hub in front. Everybody else sees itself, and others in the
    sum."""
    if call.caller.kind is CallerKind.TENANT:
        return call.headers.get(SEES_ALL) == "yes"
    return call.caller.role is not None and call.caller.role >= Role.OPERATOR


async def status(call: ApiCall) -> ServerStatus:
    """Returns what the ranks do, who waits, how fast it goes, what ended last; others in the sum, for operators by
    name"""
    view = await call.request(queries.DescribeStatus(_sees_all_tenants(call)), StatusView)
    return view.status


async def activity(call: ApiCall, query: bodies.ActivityQuery) -> ServerActivity:
    """The last operations with their times, models, endpoints and throughput; of all tenants for operators"""
    request = queries.DescribeActivity(_sees_all_tenants(call), query.operations)
    return (await call.request(request, ActivityView)).activity


async def throughput(call: ApiCall) -> ThroughputReport:
    """Tokens that were trained and sampled per second, over the last hour"""
    return (await call.request(queries.ReadThroughput(), ThroughputView)).throughput


async def curves(call: ApiCall, query: bodies.CurvesQuery) -> ModelCurves:
    """The metrics of a model over its optimizer steps: loss, gradients, distance of the sampler"""
    names = tuple(name for name in query.names.split(",") if name)
    request = queries.ReadCurves(call.path["run_id"], _sees_all_tenants(call), query.points, names)
    return (await call.request(request, CurvesView)).curves


async def rollouts(call: ApiCall, query: RolloutsQuery) -> RolloutsReply:
    """The rollouts that the caller chose to keep: those that match, with text if the server has the tokenizer"""
    view = await call.request(queries.ListRollouts(_filter_of(query), query.limit), RolloutsView)
    return await asyncio.to_thread(rollouts_reply, view, await _tokenizer(call))


async def rollout(call: ApiCall, query: RolloutFilter) -> RolloutReply:
    """A kept rollout of the caller, token by token, and its neighbours among those that match"""
    view = await call.request(queries.ReadRollout(call.path["rollout_id"], _filter_of(query)), RolloutView)
    return await asyncio.to_thread(rollout_reply, view, await _tokenizer(call), CALL_START)


def _filter_of(query: RolloutFilter) -> RolloutFilter:
    """Leaves out what a query has beside the filter."""
    return msgspec.convert(query, RolloutFilter, from_attributes=True)


async def _tokenizer(call: ApiCall) -> ModelText | None:
    try:
        return await call.context.text.load()
    except StrataError as error:
        if error.code is not Code.UNSUPPORTED:
            raise
        return None


async def report(call: ApiCall, body: bodies.ReportBody) -> None:
    """Metrics that the client of a model measured, such as a reward, for the curves of its next step"""
    await call.request(queries.ReportMetrics(call.path["run_id"], body.seq_id, body.values), client_commands.Done)


async def resolve(call: ApiCall, body: bodies.ResolveBody) -> replies.ResolvedReply:
    """Resume a stopped model: accept the numbers of the replay that differed, or load its last checkpoint"""
    request = client_commands.ResolveReplay(call.path["run_id"], body.action, _sees_all_tenants(call))
    accepted = await call.resolve_replay(request)
    return replies.ResolvedReply(request_id="" if accepted is None else accepted.future_id)


async def timeline(call: ApiCall) -> TimelineReply:
    """Returns when an operation was where: held, queued, packed, at the ranks; 410 once that is not kept any longer"""
    request = queries.DescribeTimeline(call.path["request_id"])
    return timeline_reply((await call.request(request, TimelineView)).timeline)


async def trace(call: ApiCall) -> RawReply:
    """The same of all operations that it is kept of, as a trace for Perfetto"""
    view = await call.request(queries.ListTimelines(), TimelinesView)
    return RawReply(await asyncio.to_thread(lambda: msgspec.json.encode(chrome_trace(view.timelines))))


async def metrics(call: ApiCall) -> RawReply:
    """Metrics for Prometheus; queues of other tenants as one, for operators by name"""
    view = await call.request(queries.ReadMetrics(_sees_all_tenants(call)), MetricsView)
    return RawReply(view.text + call.context.metrics.expose(), media_type=MEDIA_TYPE)


ROUTES = (
    Route("POST", "/api/v1/client/config", VIEWER, client_config, owner=READS),
    Route("POST", "/api/v1/client/dynamic_config", VIEWER, dynamic_config, owner=READS),
    Route("GET", "/api/v1/get_server_capabilities", VIEWER, capabilities),
    Route("GET", "/api/v1/healthz", PUBLIC, alive, KIB),
    Route("GET", "/healthz", PUBLIC, alive, KIB),
    Route("GET", "/health", VIEWER, health, KIB),
    Route("POST", "/api/v1/telemetry", VIEWER, telemetry, 4 * MIB, owner="none: it is discarded"),
    Route("POST", "/sleep", OPERATOR, sleep),
    Route("POST", "/wake_up", OPERATOR, wake_up),
    Route("GET", "/api/v1/status", VIEWER, status, KIB, operation="status.show"),
    Route("GET", "/api/v1/activity", VIEWER, activity, KIB, operation="status.activity"),
    Route("GET", "/api/v1/throughput", VIEWER, throughput, KIB, operation="status.throughput"),
    Route("GET", "/api/v1/training_runs/{run_id}/curves", VIEWER, curves, KIB, operation="status.curves"),
    Route(
        "POST",
        "/api/v1/training_runs/{run_id}/curves",
        RESEARCHER,
        report,
        4 * KIB,
        owner="tenant",
        operation="status.report",
    ),
    Route(
        "POST",
        "/api/v1/training_runs/{run_id}/replay",
        RESEARCHER,
        resolve,
        KIB,
        owner="tenant",
        operation="runs.resolve",
    ),
    Route("GET", "/api/v1/rollouts", VIEWER, rollouts, KIB, operation="rollouts.list"),
    Route("GET", "/api/v1/rollouts/{rollout_id}", VIEWER, rollout, KIB, operation="rollouts.show"),
    Route("GET", "/api/v1/futures/{request_id}/timeline", VIEWER, timeline, KIB, operation="status.timeline"),
    Route("GET", "/api/v1/trace", OPERATOR, trace, KIB, operation="status.trace"),
    Route("GET", "/metrics", VIEWER, metrics, KIB, operation="status.metrics"),
)
