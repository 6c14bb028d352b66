"""Where the hub sends requests to servers: to their own sockets, by paths that mean one thing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from strata.base.errors import Code, StrataError
from strata.base.unix_socket import format_unix_address
from strata.hub.gateway.proxy import ForwardedRequest, ServerProxy, check_target
from tests.shell.fleet_http.running import replying

REQUEST = ForwardedRequest(method="GET", target="/api/v1/status?x=1", headers={})


@pytest.fixture
async def proxy() -> AsyncIterator[ServerProxy]:
    made = ServerProxy()
    yield made
    await made.close()


async def send(proxy: ServerProxy, path: Path, request: ForwardedRequest = REQUEST) -> bytes:
    content = (await proxy.send(format_unix_address(path), request, key="", tenant=None)).content
    assert isinstance(content, bytes)
    return content


async def test_a_link_leads_to_no_other_socket(proxy: ServerProxy, tmp_path: Path) -> None:
    own = tmp_path / "work" / "servers" / "0a1b"
    own.mkdir(parents=True)
    (own / "s").symlink_to(tmp_path / "other" / "s")
    (own / "run").symlink_to(tmp_path / "other")
    async with replying(tmp_path / "other" / "s", b"other") as got:
        for path in (own / "s", own / "run" / "s"):
            with pytest.raises(StrataError) as refused:
                await send(proxy, path)
            assert refused.value.code is Code.UNAVAILABLE
        assert await send(proxy, tmp_path / "other" / "s") == b"other", "by its own name"
    assert got == [b"GET /api/v1/status?x=1 HTTP/1.1"]


async def test_a_link_to_the_folder_of_the_agent_is_followed(proxy: ServerProxy, tmp_path: Path) -> None:
    (tmp_path / "work").symlink_to(tmp_path / "disk")
    async with replying(tmp_path / "disk" / "servers" / "0a1b" / "run" / "api", b"served"):
        assert await send(proxy, tmp_path / "work" / "servers" / "0a1b" / "run" / "api") == b"served"


async def test_a_server_that_makes_its_socket_again_is_reached(proxy: ServerProxy, tmp_path: Path) -> None:
    path = tmp_path / "servers" / "0a1b" / "s"
    for content in (b"first", b"second"):
        async with replying(path, content):
            assert await send(proxy, path) == content
        path.unlink(missing_ok=True)
    with pytest.raises(StrataError) as gone:
        await send(proxy, path)
    assert gone.value.code is Code.UNAVAILABLE


async def test_a_head_without_success_holds_no_connection(
    proxy: ServerProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strata.hub.gateway.proxy.CONNECTIONS", 1)
    path = tmp_path / "servers" / "0a1b" / "s"
    head = ForwardedRequest(method="HEAD", target="/hf/m/resolve/main/x.json", headers={})
    async with replying(path, b"not here", b"404 Not Found") as got, asyncio.timeout(60.0):
        # The replies are dropped unread, as when another server is tried.
        for _ in range(3):
            assert (await proxy.send(format_unix_address(path), head, key="", tenant=None)).status == 404
    assert len(got) == 3


@pytest.mark.parametrize(
    "target",
    ["/api/v1/../../x", "/api/v1/%2e%2E/x", "/api/v1/.%2e/x", "/api/v1/a%2Fb", "/api/v1/..\\x", "/api/v1/x/..", "/./x"],
)
async def test_a_path_that_can_be_read_as_another_one_is_refused(
    proxy: ServerProxy, tmp_path: Path, target: str
) -> None:
    async with replying(tmp_path / "servers" / "0a1b" / "s", b"reached") as got:
        with pytest.raises(StrataError) as refused:
            await send(
                proxy, tmp_path / "servers" / "0a1b" / "s", ForwardedRequest(method="GET", target=target, headers={})
            )
    assert (refused.value.code, got) == (Code.INVALID, [])


@pytest.mark.parametrize("target", ["/api/v1/training_runs/session_1.ab%3Atrain%3A0/checkpoints/weights/v1.0?a=../b"])
def test_other_paths_are_sent_as_they_are(target: str) -> None:
    check_target(target)
