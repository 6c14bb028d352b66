"""What a hostile training server replies, on the origin of the hub: no browser may take it for a page of the hub."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from strata.http.route import Route
from strata.hub.gateway import server_views, servers
from tests.shell.fleet_http.running import Running, refused, replying, running
from tests.shell.fleet_http.test_servers import key_of, serve, signed

Tries = Callable[[int], None]
AREA = "hub: replies of training servers"
SCRIPT = b"<script xmlns='http://www.w3.org/1999/xhtml'>fetch('/people')</script>"
HOSTILE = ("text/html; charset=utf-8", "text/xml", "image/svg+xml")
UNKNOWN = (
    "text/html", "TEXT/HTML", "application/xml", "application/xhtml+xml", "text/xsl", "application/pdf",
    "multipart/x-mixed-replace; boundary=x", "text/javascript", "application/json, text/html", "x", "",
)  # fmt: skip
HARMLESS = {
    "application/json", "application/octet-stream", "application/x-protobuf", "application/x-strata-msgpack",
    "application/x-tar", "text/event-stream; charset=utf-8", "text/plain; charset=utf-8",
}  # fmt: skip
PARAMETERS = {
    "session_id": "session_1", "rest": "status", "repository": "tiny", "revision": "main", "file": "tokenizer.json",
    "model": "tiny", "run_id": "r", "rollout_id": "r",
}  # fmt: skip


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Running]:
    async with running(tmp_path / "hub") as started:
        yield started


def address(route: Route, job: str) -> str:
    return route.path.replace(":path", "").format(id=job, **PARAMETERS)


async def sent(client: httpx.AsyncClient, route: Route, job: str) -> httpx.Response:
    body: dict[str, Any] = {"model": "tiny", "prompt": "x", "session_id": "session_1"}
    body |= {"messages": [{"role": "user", "content": "x"}]} if "chat" in route.path else {}
    content = msgspec.json.encode(body) if route.method in ("POST", "PUT") else None
    headers = {"Content-Type": "application/json"} if content else {}
    query = signed(job, key_of(client)) if route.path.endswith("/archive") else None
    return await client.request(route.method, address(route, job), params=query, content=content, headers=headers)


async def assert_harmless_everywhere(site: Running, path: Path, job: str, head: bytes, tries: Tries) -> None:
    client, relayed = await site.with_role("researcher"), 0
    async with replying(path, SCRIPT, head):
        for route in (*servers.ROUTES, *server_views.ROUTES):
            tries(1)
            reply = await sent(client, route, job)
            where = (route.method, route.path, head, dict(reply.headers))
            assert reply.status_code == 204 or reply.headers["content-type"] in HARMLESS, where
            assert reply.headers["x-content-type-options"] == "nosniff", where
            assert reply.headers["content-security-policy"] == "sandbox; default-src 'none'", where
            assert {"set-cookie", "location", "refresh", "link"}.isdisjoint(reply.headers), where
            relayed += SCRIPT in reply.content
    assert relayed >= 7, "these routes pass on what the server replies"


@pytest.mark.attack(AREA, "pages, XML, SVG and unknown media types, with cookies, on every route that is forwarded")
async def test_no_reply_of_a_server_is_a_page_of_the_hub(site: Running, tmp_path: Path, tries: Tries) -> None:
    path = tmp_path / "servers" / "0a" / "s"
    job = await serve(site, path=path)
    more = (
        b"set-cookie: a=b\r\nrefresh: 0;url=//evil.example\r\nlink: </x>; rel=preload\r\nlocation: https://evil.example"
    )
    for kind in HOSTILE:
        head = b"200 OK\r\ncontent-type: %s\r\n%s" % (kind.encode(), more)
        await assert_harmless_everywhere(site, path, job, head, tries)


@pytest.mark.attack(AREA, "a page behind a link to weights that anybody can make")
async def test_what_the_hub_does_not_know_is_downloaded_and_not_shown(
    site: Running, tmp_path: Path, tries: Tries
) -> None:
    path = tmp_path / "servers" / "0a" / "s"
    job = await serve(site, path=path)
    anybody, query = await site.client(), signed(job, key_of(await site.with_role("viewer")))
    for kind in (*HOSTILE, *UNKNOWN):
        tries(1)
        head = b"200 OK\r\ncontent-type: %s\r\ncontent-disposition: inline" % kind.encode()
        async with replying(path, SCRIPT, head):
            reply = await anybody.get("/api/v1/archive", params=query)
        shown = reply.headers["content-type"], reply.headers["content-disposition"]
        assert shown == ("application/octet-stream", "attachment"), kind
    for kind in ("application/json;, text/html", "text/plain; charset=utf-7, text/html"):
        tries(1)
        async with replying(path, SCRIPT, b"200 OK\r\ncontent-type: %s" % kind.encode()):
            reply = await anybody.get("/api/v1/archive", params=query)
        assert reply.headers["content-type"] in HARMLESS, kind


@pytest.mark.attack(AREA, "redirects away from the hub, and to its other routes")
async def test_a_server_redirects_to_an_archive_of_this_hub_and_to_nothing_else(
    site: Running, tmp_path: Path, tries: Tries
) -> None:
    path = tmp_path / "servers" / "0a" / "s"
    await serve(site, path=path)
    client = await site.with_role("researcher")
    own = f"{site.url}/api/v1/archive?token=x"
    elsewhere = (
        "https://evil.example/api/v1/archive?token=x", "//evil.example/api/v1/archive", f"{site.url}@evil.example/",
        f"{site.url}/people", f"{site.url}/api/v1/archive/../../../people", "/people", "javascript:alert(1)", "",
        own.replace("http:", "ftp:"), f"{own}#x", own.replace("archive", "archive;x"), own + ", https://evil.example",
    )  # fmt: skip
    for status in (b"301 Moved", b"302 Found", b"303 See Other", b"307 T", b"308 P"):
        for target in (own, *elsewhere):
            tries(1)
            async with replying(path, SCRIPT, b"%s\r\nlocation: %s" % (status, target.encode())):
                reply = await client.get("/api/v1/training_runs/r/checkpoints/c/archive")
            if (status[:3], target) == (b"302", own):
                assert (reply.status_code, reply.headers["location"]) == (302, own)
            else:
                assert (refused(reply), "location" in reply.headers) == ((503, "unavailable"), False), (status, target)


@pytest.mark.attack(AREA, "a reply of the hub's own API, or an error, that is shown as a page")
async def test_replies_of_the_api_are_sandboxed_and_pages_are_not(site: Running) -> None:
    viewer = await site.with_role("viewer")
    for path in ("/v1/jobs", "/v1/nothing", "/v1/openapi.json", "/metrics", "/v1/ca"):
        assert (await viewer.get(path)).headers["content-security-policy"] == "sandbox; default-src 'none'", path
    page = await (await site.client()).get("/login")
    assert "script-src 'self'" in page.headers["content-security-policy"]


@pytest.mark.attack(AREA, "L1: a signed URL after the key that requested it was revoked, or with another one beside it")
async def test_a_signed_url_ends_with_the_key_that_requested_it(site: Running, tmp_path: Path, tries: Tries) -> None:
    path = tmp_path / "servers" / "0a" / "s"
    job = await serve(site, path=path)
    anybody, operator = await site.client(), await site.operator()
    anna, rob = await site.with_role("researcher", "anna"), await site.with_role("researcher", "rob")
    hers, his = signed(job, key_of(anna)), signed(job, key_of(rob))
    heads: list[bytes] = []
    async with replying(path, b"weights", heads=heads):
        assert (await anna.get("/api/v1/status")).status_code == 200
        assert f"x-strata-key: {key_of(anna)}".encode() in heads.pop()
        assert (await anybody.get("/api/v1/archive", params=hers)).content == b"weights"
        heads.clear()
        assert (await operator.post(f"/v1/key/{key_of(anna)}/revoke")).status_code == 204
        token, other = hers["token"], his["token"]
        for query in (
            f"token={token}", f"token={other}&token={token}", f"token={token}&token={other}",
            f"xtoken={other}&token={token}",
            f"token={token}&x={other}", f"token={other}%26token={token}", f"token={token}=", f"token={token}.{other}",
            "token=", "", f"token={signed(job)['token']}",
        ):  # fmt: skip
            tries(1)
            assert refused(await anybody.get(f"/api/v1/archive?{query}")) == (403, "forbidden"), query
        assert heads == [], "the server was asked nothing"
        assert (await anybody.get("/api/v1/archive", params=his)).content == b"weights"
