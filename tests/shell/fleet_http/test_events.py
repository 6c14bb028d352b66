"""The event feed: no row is missed across reconnects, and a listener that is no longer welcome is cut off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import httpx
import pytest

from strata.base.errors import StrataError
from strata.fleet.core.jobspec import JobSpec
from strata.fleet.http import events as events_module
from strata.fleet.wire.events import EventsReply
from strata.http.anonymous import client_address
from strata.hub.settings import HubSettings
from tests.shell.fleet_http.running import Running, ok, refused, running

STREAM = {"Accept": "text/event-stream"}


async def cursors(client: httpx.AsyncClient, last: str, wanted: int) -> AsyncIterator[tuple[str, str]]:
    """Cursor and kind of each event, from one connection that is dropped after so many."""
    headers = STREAM | ({"Last-Event-ID": last} if last else {})
    async with client.stream("GET", "/v1/events", headers=headers) as reply:
        assert reply.status_code == 200
        assert reply.headers["content-type"].startswith("text/event-stream")
        cursor, seen = "", 0
        async for line in reply.aiter_lines():
            if line.startswith("id: "):
                cursor = line[4:]
            if line.startswith("event: "):
                yield cursor, line[7:]
                seen += 1
                if seen == wanted:
                    return


async def test_a_stream_misses_nothing_and_repeats_nothing_across_reconnects(site: Running) -> None:
    viewer = await site.with_role("viewer")

    async def write() -> None:
        for n in range(120):
            await site.add(JobSpec(model="m", seed=n))

    writing = asyncio.create_task(write())
    seen: list[str] = []
    kinds: list[str] = []
    wanted = 0
    while kinds.count("job.created") < 120:
        wanted = wanted % 13 + 1
        async for cursor, kind in cursors(viewer, seen[-1] if seen else "", wanted):
            seen.append(cursor)
            kinds.append(kind)
            if kinds.count("job.created") == 120:
                break
    await writing
    page = ok(await viewer.get("/v1/events", params={"limit": 1000}), EventsReply)
    assert seen == [event.cursor for event in page.events][: len(seen)]
    assert len(set(seen)) == len(seen)


async def test_a_listener_hears_of_a_change_without_asking_again(site: Running) -> None:
    viewer = await site.with_role("viewer")
    newest = ok(await viewer.get("/v1/events", params={"after": "newest"}), EventsReply)
    assert newest.events == ()
    stream = cursors(viewer, newest.cursor, 1)
    first = asyncio.ensure_future(anext(stream))
    done, _ = await asyncio.wait([first], timeout=0.2)
    assert not done
    researcher = await site.with_role("researcher")
    del researcher
    cursor, kind = await asyncio.wait_for(first, 10)
    assert kind == "key.made"
    assert cursor != newest.cursor
    await stream.aclose()  # type: ignore[attr-defined]


async def test_a_long_poll_of_events_wakes_up(site: Running) -> None:
    viewer = await site.with_role("viewer")
    after = ok(await viewer.get("/v1/events", params={"after": "newest"}), EventsReply).cursor
    waiting = asyncio.create_task(viewer.get("/v1/events", params={"after": after, "wait_s": 30}))
    done, _ = await asyncio.wait([waiting], timeout=0.2)
    assert not done
    (job_id,) = await site.add(JobSpec(model="m"))
    reply = ok(await asyncio.wait_for(waiting, 10), EventsReply)
    assert [(event.kind, event.subject) for event in reply.events if event.subject == job_id]


async def test_one_subject_can_be_followed_alone(site: Running) -> None:
    viewer = await site.with_role("viewer")
    one, other = await site.add(JobSpec(model="m"), JobSpec(model="n"))
    page = ok(await viewer.get("/v1/events", params={"subject": one}), EventsReply)
    assert {event.subject for event in page.events} == {one}
    assert other not in {event.subject for event in page.events}


@pytest.mark.parametrize("headers", [{}, STREAM])
async def test_a_cursor_that_is_none_is_refused(site: Running, headers: dict[str, str]) -> None:
    viewer = await site.with_role("viewer")
    reply = await viewer.get("/v1/events", params={"after": "yesterday"}, headers=headers)
    assert refused(reply) == (400, "invalid")


async def test_a_quiet_stream_is_kept_alive_and_a_revoked_listener_is_cut_off(
    site: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events_module, "HEARTBEAT_S", 0.1)
    viewer, operator = await site.with_role("viewer"), await site.operator()
    params = {"after": "newest", "subject": "nothing-has-this-name"}
    async with viewer.stream("GET", "/v1/events", params=params, headers=STREAM) as reply:
        lines = reply.aiter_lines()
        while not (await asyncio.wait_for(anext(lines), 10)).startswith(": still here"):
            pass
        key_id = viewer.headers["Authorization"].split("-")[1]
        assert (await operator.post(f"/v1/key/{key_id}/revoke")).status_code == 204
        with pytest.raises(httpx.RemoteProtocolError):
            await asyncio.wait_for(read_on(lines), 10)
    assert site.hub.context.feed.listeners == 0


async def read_on(lines: AsyncIterator[str]) -> None:
    async for _ in lines:
        pass


async def test_there_is_a_bound_on_listeners(site: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "MAX_LISTENERS", 0)
    viewer = await site.with_role("viewer")
    reply = await viewer.get("/v1/events", headers=STREAM)
    assert refused(reply) == (429, "exhausted")
    assert reply.headers["retry-after"] == "1"


async def test_a_feed_serves_the_same_rows_from_memory_and_from_the_table(site: Running) -> None:
    feed = site.hub.context.feed
    start = await feed.newest()
    await feed.catch_up()
    await site.add(*(JobSpec(model="m", seed=n) for n in range(30)))
    await feed.catch_up()
    table = await site.hub.context.fleet.store.events.read(start, 1000)
    assert [each.cursor for each in await feed.after(start, 1000)] == [each.cursor for each in table]
    middle = table[10].cursor
    assert list(await feed.after(middle, 5)) == list(table[11:16])
    with pytest.raises(StrataError):
        await feed.after("nonsense", 5)


async def recorded(client: httpx.AsyncClient, kind: str) -> dict[str, str]:
    """The addresses of all events of this kind, by actor."""
    events = ok(await client.get("/v1/events", params={"limit": 500}), EventsReply).events
    return {event.actor.partition(":")[0]: event.address for event in events if event.kind == kind}


def submission(model: str) -> dict[str, Any]:
    trainer = {"name": "t", "command": ["true"], "bundle": "0" * 64}
    return {"spec": {"model": model, "trainer": "t"}, "trainer": trainer}


async def test_an_event_has_the_address_that_the_request_came_from(site: Running) -> None:
    anna, operator = await site.with_role("researcher", "anna"), await site.operator()
    # Nobody is believed who is no trusted proxy.
    forged = {"X-Forwarded-For": "203.0.113.9"}
    assert (await anna.post("/v1/jobs", json=submission("a"), headers=forged)).is_success
    assert (await operator.post("/v1/jobs", json=submission("b"), headers=forged)).is_success
    assert await recorded(operator, "job.created") == {"key": "127.0.0.1", "operator": "unix"}
    assert await recorded(operator, "key.made") == {"operator": "unix"}
    assert await recorded(anna, "job.created") == {"key": "127.0.0.1", "operator": ""}
    assert await recorded(await site.with_role("viewer"), "job.created") == {"key": "", "operator": ""}
    await site.hub.context.fleet.leases.tick()
    await site.add(JobSpec(model="m"))
    assert (await recorded(operator, "job.created"))["test"] == ""


async def test_behind_a_trusted_proxy_the_address_is_the_one_it_saw(tmp_path: Path) -> None:
    async with running(tmp_path / "hub", trusted_proxies=("127.0.0.0/8", "10.0.0.0/8")) as site:
        anna, operator = await site.with_role("researcher", "anna"), await site.operator()
        headers = [("X-Forwarded-For", "203.0.113.9, 198.51.100.7"), ("X-Forwarded-For", "10.1.1.1")]
        assert (await anna.post("/v1/jobs", json=submission("a"), headers=headers)).is_success
        assert await recorded(operator, "job.created") == {"key": "198.51.100.7"}


@pytest.mark.parametrize(
    ("peer", "forwarded", "address"),
    [
        ("192.0.2.1", "203.0.113.9", "192.0.2.1"),
        ("10.0.0.1", "", "10.0.0.1"),
        ("10.0.0.1", "203.0.113.9", "203.0.113.9"),
        ("10.0.0.1", "1.1.1.1, 203.0.113.9, 10.0.0.2", "203.0.113.9"),
        ("10.0.0.1", "10.0.0.3, 10.0.0.2", "10.0.0.3"),
        ("10.0.0.1", "203.0.113.9, <script>, 10.0.0.2", "10.0.0.2"),
        ("::ffff:10.0.0.1", "2001:DB8::1", "2001:db8::1"),
        ("not an address", "203.0.113.9", "not an address"),
    ],
)
def test_the_last_address_that_is_no_proxys_is_the_clients(peer: str, forwarded: str, address: str) -> None:
    scope = {"client": (peer, 1), "headers": [(b"x-forwarded-for", forwarded.encode())] if forwarded else []}
    assert client_address(scope, [ip_network("10.0.0.0/8")]) == address


def test_a_proxy_that_is_no_network_is_refused_with_the_settings() -> None:
    with pytest.raises(StrataError, match="trusted_proxies"):
        HubSettings(trusted_proxies=("everywhere",))
