"""The OpenAI-compatible endpoints of training servers, at the one URL of their hub."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from strata.base.unix_socket import listen_unix
from strata.hub.gateway.dispatch import tag_of
from tests.shell.fleet_http.running import Running, refused, replying
from tests.shell.fleet_http.test_servers import row, serve, sleeping

CHAT = "/v1/chat/completions"


async def test_a_completion_goes_to_the_server_of_its_model_and_of_no_text_in_it(site: Running, tmp_path: Path) -> None:
    alice = await site.with_role("researcher", "alice")
    heads: dict[str, list[bytes]] = {"a": [], "b": []}
    async with (
        replying(tmp_path / "a" / "s", b'"a"', heads=heads["a"]),
        replying(tmp_path / "b" / "s", b'"b"', heads=heads["b"]),
    ):
        jobs = {name: await serve(site, name, path=tmp_path / name / "s") for name in ("a", "b")}
        paths = {name: f"tinker://session_1.{tag_of(job)}:train:0/sampler_weights/w" for name, job in jobs.items()}
        for name, other in (("a", "b"), ("b", "a")):
            for model in (name, paths[name]):
                for path, text in ((CHAT, "messages"), ("/v1/completions", "prompt")):
                    reply = await alice.post(path, json={text: paths[other], "model": model})
                    assert (reply.status_code, reply.text) == (200, f'"{name}"')
            shown = await alice.get(f"/v1/models/{paths[name].replace('/', '%2F')}")
            assert (shown.status_code, shown.text) == (200, f'"{name}"')
            assert heads[name][-1].startswith(f"GET /v1/models/{paths[name]} ".encode())
    (first, *_) = heads["a"]
    assert b"x-strata-tenant: alice" in first, "whose tenant it is, the hub says"
    assert f".{tag_of(jobs['a'])}".encode() in next(line for line in first.splitlines() if b"x-strata-session" in line)
    assert b"authorization" not in first.lower()


async def test_the_models_of_all_servers_are_listed_also_of_those_that_sleep(site: Running, tmp_path: Path) -> None:
    viewer = await site.with_role("viewer")
    listed = b'{"object": "list", "data": [{"id": "awake", "object": "model"}]}'
    async with replying(tmp_path / "a" / "s", listed):
        await serve(site, "awake", path=tmp_path / "a" / "s")
        job = await sleeping(site, "tired")
        reply = (await viewer.get("/v1/models")).json()
    assert (reply["object"], [each["id"] for each in reply["data"]]) == ("list", ["awake", "tired"])
    assert (await row(site, job)).state == "asleep"


@pytest.mark.parametrize("content", [b"{", b"[]", b"{}", b'{"model": 5}', b'{"model": "a"', b"[" * 100_000])
async def test_a_body_that_names_no_model_is_refused(site: Running, content: bytes) -> None:
    await serve(site)
    alice = await site.with_role("researcher")
    headers = {"content-type": "application/json"}
    assert refused(await alice.post(CHAT, content=content, headers=headers)) == (400, "invalid")


async def test_errors_of_the_hub_have_the_form_of_openai(site: Running) -> None:
    alice, viewer = await site.with_role("researcher"), await site.with_role("viewer")
    body = {"model": "tiny", "messages": []}
    for client, status, kind, code in (
        (alice, 404, "not_found_error", "model_not_found"),
        (viewer, 403, "permission_error", "forbidden"),
        (await site.client(), 401, "authentication_error", "invalid_api_key"),
    ):
        reply = await client.post(CHAT, json=body)
        error = json.loads(reply.text)["error"]
        assert (reply.status_code, error["type"], error["code"]) == (status, kind, code)
        assert error.keys() == {"message", "type", "param", "code"}
    for model in ("a", "b"):
        await serve(site, model)
    assert (await alice.post(CHAT, json=body)).json()["error"]["message"].startswith("no training server of this hub")


async def test_a_viewer_wakes_no_server_by_a_completion(site: Running) -> None:
    job = await sleeping(site)
    viewer = await site.with_role("viewer")
    assert refused(await viewer.post(CHAT, json={"model": "tiny"})) == (403, "forbidden")
    assert refused(await viewer.get("/v1/models/tiny")) == (403, "forbidden")
    assert (await row(site, job)).state == "asleep"


@asynccontextmanager
async def streaming(path: Path) -> AsyncIterator[asyncio.Semaphore]:
    """A server whose streams do not end; the semaphore counts those that the hub has closed."""
    closed = asyncio.Semaphore(0)

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        writer.write(head + b"b\r\n: waiting\n\n\r\n")
        while await reader.read(65536):
            pass
        writer.close()
        closed.release()

    path.parent.mkdir(parents=True, mode=0o700)
    async with await asyncio.start_unix_server(reply, sock=listen_unix(path)):
        yield closed


async def test_one_tenant_does_not_take_all_connections_to_a_server(site: Running, tmp_path: Path) -> None:
    site.hub.context.proxy.completions.limit = 2
    alice, bob = [await site.with_role("researcher", name) for name in ("alice", "bob")]
    async with (
        streaming(tmp_path / "a" / "s") as closed,
        replying(tmp_path / "b" / "s", b'"b"'),
        AsyncExitStack() as bobs,
        asyncio.timeout(30.0),
    ):
        for name in ("a", "b"):
            await serve(site, name, path=tmp_path / name / "s")
        async with AsyncExitStack() as streams:
            for _ in range(2):
                reply = await streams.enter_async_context(alice.stream("POST", CHAT, json={"model": "a"}))
                assert reply.status_code == 200
            full = await alice.post(CHAT, json={"model": "b"})
            assert (full.status_code, full.json()["error"]["type"]) == (429, "rate_limit_error")
            assert full.headers["retry-after"]
            reply = await bobs.enter_async_context(bob.stream("POST", CHAT, json={"model": "a"}))
            assert reply.status_code == 200
        for _ in range(2):
            await closed.acquire()
        while (await alice.post(CHAT, json={"model": "b"})).status_code == 429:
            await asyncio.sleep(0.02)
        for _ in range(5):
            assert (await alice.post(CHAT, json={"model": "b"})).status_code == 200, "one that has ended does not count"
