"""The route `GET /metrics` of the hub, and the counts that it refreshes before a scrape."""

from __future__ import annotations

import asyncio
import shutil

from strata.base.errors import StrataError
from strata.fleet.http.context import HubCall, HubContext
from strata.http.metrics import FRESH_S, MEDIA_TYPE
from strata.http.route import RawReply


async def expose(call: HubCall) -> RawReply:
    """Metrics for Prometheus; jobs and hosts by state are a few seconds old at most."""
    context = call.context
    metrics = context.hub_metrics
    await _refresh(context)
    metrics.listeners.set(context.feed.listeners)
    metrics.writable.set(not context.writing.fails)
    metrics.auth_failures.inc(context.limits.failures.take_count())
    return RawReply(metrics.render(), media_type=MEDIA_TYPE)


async def _refresh(context: HubContext) -> None:
    """Read what is not counted while it happens, once for all scrapes of a few seconds."""
    metrics, now_s = context.hub_metrics, context.clock.monotonic_s()
    if now_s - metrics.read_at_s < FRESH_S:
        return
    metrics.read_at_s = now_s
    try:
        metrics.set_counts(await context.fleet.counts())
    except StrataError:
        # The series that say why the database does not answer are worth a scrape with old counts.
        metrics.read_at_s = float("-inf")
    if context.data is not None:
        usage = await asyncio.to_thread(shutil.disk_usage, context.data)
        metrics.disk_free.set(usage.free)
    metrics.set_backups(await asyncio.to_thread(context.backups))
