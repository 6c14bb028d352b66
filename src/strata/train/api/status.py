"""Routes of observability: status for people, metrics for Prometheus, timelines and traces of operations."""

from __future__ import annotations

import asyncio

import msgspec

from strata.http.route import KIB, OPERATOR, VIEWER, RawReply, Route
from strata.identity.roles import Role
from strata.train.api.context import ApiCall
from strata.train.core import messages, status
from strata.train.metrics_registry import MEDIA_TYPE
from strata.train.wire.timeline import TimelineReply, chrome_trace, timeline_reply


def _sees_all_tenants(call: ApiCall) -> bool:
    """An operator sees all tenants. Everybody else sees itself, and all others in the sum."""
    return call.caller.role is not None and call.caller.role >= Role.OPERATOR


async def show(call: ApiCall) -> status.ServerStatus:
    """What the ranks do, who waits, how fast it goes, what ended last; others in the sum, for operators by name"""
    view = await call.request(messages.DescribeStatus(_sees_all_tenants(call)), status.StatusView)
    return view.status


async def timeline(call: ApiCall) -> TimelineReply:
    """When an operation was where: held, queued, packed, at the ranks; 410 once that is not kept any longer"""
    request = messages.DescribeTimeline(call.path["request_id"])
    return timeline_reply((await call.request(request, status.TimelineView)).timeline)


async def trace(call: ApiCall) -> RawReply:
    """The same of all operations that it is kept of, as a trace for Perfetto"""
    view = await call.request(messages.ListTimelines(), status.TimelinesView)
    return RawReply(await asyncio.to_thread(lambda: msgspec.json.encode(chrome_trace(view.timelines))))


async def metrics(call: ApiCall) -> RawReply:
    """Metrics for Prometheus; queues of other tenants as one, for operators by name"""
    view = await call.request(messages.ReadMetrics(_sees_all_tenants(call)), status.MetricsView)
    return RawReply(view.text + call.context.requests.expose(), media_type=MEDIA_TYPE)


ROUTES = (
    Route("GET", "/api/v1/status", VIEWER, show, KIB),
    Route("GET", "/api/v1/futures/{request_id}/timeline", VIEWER, timeline, KIB),
    Route("GET", "/api/v1/trace", OPERATOR, trace, KIB),
    Route("GET", "/metrics", VIEWER, metrics, KIB),
)
