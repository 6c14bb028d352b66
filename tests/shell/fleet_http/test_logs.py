"""Logs and metrics: appended by offset, followed by long poll, complete at the end."""

from __future__ import annotations

import asyncio

import httpx

from strata.fleet.core.jobspec import JobSpec
from strata.fleet.wire.jobs import Job
from strata.fleet.wire.streams import PieceReply
from tests.shell.fleet_http.running import HostClient, Running, ok, refused


async def attempt(site: Running) -> tuple[HostClient, httpx.AsyncClient, str]:
    host, viewer = await site.host("anna"), await site.with_role("viewer")
    (job_id,) = await site.add(JobSpec(model="m"))
    await host.claim()
    return host, viewer, job_id


async def put(host: HostClient, job_id: str, offset: int, piece: bytes, name: str = "log") -> int:
    params = {"epoch": 1, "offset": offset}
    reply = await host.http.put(f"/v1/job/{job_id}/{name}", params=params, content=piece)
    return ok(reply, PieceReply).size


async def test_pieces_are_joined_whatever_is_sent_twice(site: Running) -> None:
    host, viewer, job_id = await attempt(site)
    assert await put(host, job_id, 0, b"one ") == 4
    assert await put(host, job_id, 0, b"one two ") == 8
    assert await put(host, job_id, 4, b"two three") == 13
    reply = await viewer.get(f"/v1/job/{job_id}/log")
    assert reply.content == b"one two three"
    assert (reply.headers["x-strata-next"], reply.headers["x-strata-ended"]) == ("13", "false")
    assert (await viewer.get(f"/v1/job/{job_id}/log", params={"offset": 4, "limit": 3})).content == b"two"


async def test_a_follower_gets_what_comes_and_learns_of_the_end(site: Running) -> None:
    host, viewer, job_id = await attempt(site)
    url = f"/v1/job/{job_id}/log"
    waiting = asyncio.create_task(viewer.get(url, params={"wait_s": 30}))
    done, _ = await asyncio.wait([waiting], timeout=0.2)
    assert not done
    await put(host, job_id, 0, b"hello")
    assert (await asyncio.wait_for(waiting, 10)).content == b"hello"
    await put(host, job_id, 5, b" world")
    ok(await host.http.post(f"/v1/job/{job_id}/complete", json={"epoch": 1}), Job)
    tail = await viewer.get(url, params={"offset": 5, "wait_s": 30})
    assert (tail.content, tail.headers["x-strata-ended"]) == (b" world", "false")
    end = await asyncio.wait_for(viewer.get(url, params={"offset": 11, "wait_s": 30}), 10)
    assert (end.content, end.headers["x-strata-ended"]) == (b"", "true")


async def test_metrics_are_a_stream_of_their_own(site: Running) -> None:
    host, viewer, job_id = await attempt(site)
    line = b'{"type":"metrics","at_s":1,"step":1,"values":{"loss":0.5}}\n'
    await put(host, job_id, 0, line, "metrics")
    reply = await viewer.get(f"/v1/job/{job_id}/metrics")
    assert (reply.content, reply.headers["content-type"]) == (line, "application/x-ndjson")
    assert (await viewer.get(f"/v1/job/{job_id}/log")).content == b""


async def test_a_job_that_never_ran_has_an_empty_log_and_unknown_attempts_none(site: Running) -> None:
    viewer = await site.with_role("viewer")
    (job_id,) = await site.add(JobSpec(model="m"))
    reply = await viewer.get(f"/v1/job/{job_id}/log")
    assert (reply.status_code, reply.content, reply.headers["x-strata-attempt"]) == (200, b"", "0")
    assert refused(await viewer.get(f"/v1/job/{job_id}/log", params={"attempt": 3})) == (404, "not_found")


async def test_a_host_that_was_replaced_still_writes_its_own_log_and_never_its_successors(site: Running) -> None:
    host, viewer, job_id = await attempt(site)
    bob = await site.host("bob")
    row = ok(await host.http.post(f"/v1/job/{job_id}/fail", json={"epoch": 1, "cause": "preempted"}), Job)
    await site.hub.context.fleet.store.leases.release_backoffs(row.not_before_s + 1)
    (lease,) = await bob.claim("c2", wait_s=10)
    assert lease.epoch == 2
    await put(host, job_id, 0, b"last words")
    second = await host.http.put(f"/v1/job/{job_id}/log", params={"epoch": 2, "offset": 0}, content=b"x")
    assert refused(second) == (404, "not_found")
    assert (await viewer.get(f"/v1/job/{job_id}/log", params={"attempt": 1})).content == b"last words"
