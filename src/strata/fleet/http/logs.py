"""Routes of logs and metrics of attempts: hosts append pieces by offset, people read, follow and plot them."""

from __future__ import annotations

from typing import Final

import msgspec

from strata.base.errors import Code, StrataError
from strata.fleet.core.series import CombinedSeries
from strata.fleet.http.context import HubCall, HubContext, resolve_job_id
from strata.fleet.records import AttemptRow
from strata.fleet.streams import Name
from strata.fleet.wire.streams import MetricSeries, MetricsQuery, MetricsReply, PieceQuery, PieceReply, StreamQuery
from strata.http.disconnect import until_disconnect
from strata.http.route import RawReply, Upload

POLL_S: Final = 2.0
"""How often a follower polls whether the attempt has ended."""


async def put_log(call: HubCall, body: Upload, query: PieceQuery) -> PieceReply:
    """Append a piece to the log of this host's attempt."""
    return await _append(call, "log", body, query)


async def put_metrics(call: HubCall, body: Upload, query: PieceQuery) -> PieceReply:
    """Append JSON lines to the metrics of this host's attempt."""
    return await _append(call, "metrics", body, query)


async def log(call: HubCall, query: StreamQuery) -> RawReply:
    """The log of an attempt from an offset on; with `wait_s`, as soon as there is more.

    `X-Strata-Offset` is where the body begins, `X-Strata-Next` where to go on; with `X-Strata-Ended` nothing follows.
    """
    return await _read(call, "log", query)


async def metrics(call: HubCall, query: MetricsQuery) -> MetricsReply | RawReply:
    """The metrics of an attempt, as JSON lines, read like a log; with `points`, as series that can be plotted."""
    if query.points:
        return await _series(call, query)
    return await _read(call, "metrics", query)


async def _series(call: HubCall, query: MetricsQuery) -> MetricsReply:
    history = call.context.metrics
    job_id = await resolve_job_id(call)
    attempts = await call.context.fleet.store.jobs.attempts(job_id)
    if query.attempt:
        attempts = [await _attempt(call.context, job_id, query.attempt) or attempts[0]]
    epochs = [each.epoch for each in attempts]
    names = [name for text in query.names for name in text.split(",") if name]
    series = await history.series(job_id, epochs, names, query.points)
    known = {name for epoch in epochs for name in (await history.attempt(job_id, epoch)).series}
    return MetricsReply(
        series=tuple(map(_plotted, series)),
        names=tuple(sorted(known)),
        attempts=tuple(each.attempt for each in attempts),
        progress=await history.progress(job_id, epochs[-1]) if epochs else None,
    )


def _plotted(series: CombinedSeries) -> MetricSeries:
    return MetricSeries(
        name=series.name,
        at_s=tuple(point.at_s for point in series.points),
        steps=tuple(point.step for point in series.points),
        values=tuple(point.value for point in series.points),
        last=series.last,
        count=series.reported,
        not_finite=series.not_finite,
    )


async def _append(call: HubCall, name: Name, body: Upload, query: PieceQuery) -> PieceReply:
    context = call.context
    job_id = await resolve_job_id(call)
    host_id = call.caller.require_host()
    if await context.attempts.host(context.fleet.store.jobs, job_id, query.epoch) != host_id:
        # An attempt of another host gets the same reply as none.
        raise StrataError(Code.NOT_FOUND, f"this host has no attempt of {job_id} with the epoch {query.epoch}")
    context.fleet.hosts.touch(host_id)
    piece = b"".join([part async for part in body])
    size = await context.streams.append(job_id, query.epoch, name, query.offset, piece, last=query.last)
    context.appends.notify((job_id, query.epoch, name), None)
    return PieceReply(size=size)


async def _read(call: HubCall, name: Name, query: StreamQuery) -> RawReply:
    context = call.context
    job_id = await resolve_job_id(call)
    attempt = await _attempt(context, job_id, query.attempt)
    content, ended = b"", True
    if attempt is not None:
        if query.tail:
            stored = await context.streams.size(attempt.job_id, attempt.epoch, name)
            query = msgspec.structs.replace(query, offset=max(0, stored - query.tail))
        content, ended = await _read_now(context, attempt, name, query)
        if not content and not ended and query.wait_s:
            content, ended = await until_disconnect(call, context.stopping, _follow(context, attempt, name, query))
            await call.reauthenticate()
    headers = {
        "X-Strata-Attempt": str(attempt.attempt if attempt else 0),
        "X-Strata-Offset": str(query.offset),
        "X-Strata-Next": str(query.offset + len(content)),
        "X-Strata-Ended": "true" if ended and not content else "false",
    }
    media_type = "text/plain; charset=utf-8" if name == "log" else "application/x-ndjson"
    return RawReply(content, media_type=media_type, headers=headers)


async def _attempt(context: HubContext, job_id: str, number: int) -> AttemptRow | None:
    """The attempt of this number, or the last one for 0; None if there was none yet."""
    attempts = await context.fleet.store.jobs.attempts(job_id)
    if not number:
        return attempts[-1] if attempts else None
    match = next((each for each in attempts if each.attempt == number), None)
    if match is None:
        raise StrataError(Code.NOT_FOUND, f"{job_id} has no attempt {number}")
    return match


async def _follow(context: HubContext, attempt: AttemptRow, name: Name, query: StreamQuery) -> tuple[bytes, bool]:
    until_s = context.clock.monotonic_s() + query.wait_s
    while True:
        with context.appends.subscribe((attempt.job_id, attempt.epoch, name)) as appended:
            now = await _attempt(context, attempt.job_id, attempt.attempt)
            content, ended = await _read_now(context, now or attempt, name, query)
            left_s = until_s - context.clock.monotonic_s()
            if content or ended or left_s <= 0:
                return content, ended
            await appended.wait(min(left_s, POLL_S))


async def _read_now(context: HubContext, attempt: AttemptRow, name: Name, query: StreamQuery) -> tuple[bytes, bool]:
    """The content, and whether nothing follows it: the attempt was read before, so its end was too."""
    content = await context.streams.read(attempt.job_id, attempt.epoch, name, query.offset, query.limit)
    return content, attempt.ended_at_s is not None
