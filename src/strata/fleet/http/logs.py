"""Logs and metrics of attempts: hosts append by offset, people read and follow."""

from __future__ import annotations

from typing import Final

from strata.base.errors import Code, StrataError
from strata.fleet import wire
from strata.fleet.http.call import Call
from strata.fleet.http.naming import job_of
from strata.fleet.http.site import Site
from strata.fleet.http.watch import either, patiently
from strata.fleet.streams import Name
from strata.http.declare import Answer, Upload

POLL_S: Final = 2.0
"""How often a follower looks by itself whether the attempt has ended."""


async def put_log(site: Site, call: Call, body: Upload, query: wire.PieceQuery) -> wire.PieceReply:
    """Append a piece to the log of this host's attempt."""
    return await _append(site, call, "log", body, query)


async def put_metrics(site: Site, call: Call, body: Upload, query: wire.PieceQuery) -> wire.PieceReply:
    """Append JSON lines to the metrics of this host's attempt."""
    return await _append(site, call, "metrics", body, query)


async def log(site: Site, call: Call, query: wire.StreamQuery) -> Answer:
    """The log of an attempt from an offset on; with `wait_s`, as soon as there is more.

    `X-Strata-Offset` is where the body begins, `X-Strata-Next` where to go on; with `X-Strata-Ended` nothing follows.
    """
    return await _read(site, call, "log", query)


async def metrics(site: Site, call: Call, query: wire.StreamQuery) -> Answer:
    """The metrics of an attempt, as JSON lines; read like a log."""
    return await _read(site, call, "metrics", query)


async def _append(site: Site, call: Call, name: Name, body: Upload, query: wire.PieceQuery) -> wire.PieceReply:
    job_id = await job_of(site, call)
    host_id = call.caller.need_host()
    if await site.attempts.host(site.fleet.store, job_id, query.epoch) != host_id:
        # Somebody else's attempt is no different from none.
        raise StrataError(Code.NOT_FOUND, f"this host has no attempt {query.epoch} of {job_id}")
    site.fleet.heard(host_id)
    piece = b"".join([part async for part in body])
    size = await site.streams.append(job_id, query.epoch, name, query.offset, piece, last=query.last)
    site.watch.tell((job_id, query.epoch, name))
    return wire.PieceReply(size=size)


async def _read(site: Site, call: Call, name: Name, query: wire.StreamQuery) -> Answer:
    job_id = await job_of(site, call)
    row = await site.fleet.store.job(job_id)
    epoch = query.epoch or row.epoch
    content, ended = b"", True
    if epoch:
        content, ended = await _look(site, job_id, epoch, name, query)
        if not content and not ended and query.wait_s:
            following = _follow(site, job_id, epoch, name, query)
            content, ended = await patiently(call, site.stopping, following)
    headers = {
        "X-Strata-Epoch": str(epoch),
        "X-Strata-Offset": str(query.offset),
        "X-Strata-Next": str(query.offset + len(content)),
        "X-Strata-Ended": "true" if ended and not content else "false",
    }
    media_type = "text/plain; charset=utf-8" if name == "log" else "application/x-ndjson"
    return Answer(content, media_type=media_type, headers=headers)


async def _follow(site: Site, job_id: str, epoch: int, name: Name, query: wire.StreamQuery) -> tuple[bytes, bool]:
    until_s = site.clock.monotonic_s() + query.wait_s
    while True:
        appended = site.watch.next((job_id, epoch, name))
        content, ended = await _look(site, job_id, epoch, name, query)
        left_s = until_s - site.clock.monotonic_s()
        if content or ended or left_s <= 0:
            return content, ended
        await either(appended, min(left_s, POLL_S))


async def _look(site: Site, job_id: str, epoch: int, name: Name, query: wire.StreamQuery) -> tuple[bytes, bool]:
    """What is there, and whether nothing follows it. In this order: what comes before the end is not missed."""
    attempts = await site.fleet.store.attempts(job_id)
    attempt = next((each for each in attempts if each.epoch == epoch), None)
    if attempt is None:
        raise StrataError(Code.NOT_FOUND, f"{job_id} has no attempt {epoch}")
    content = await site.streams.read(job_id, epoch, name, query.offset, query.limit)
    return content, attempt.ended_at_s is not None
