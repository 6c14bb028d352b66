"""The relay in front of a server on another machine than its hub: who may connect to whom, with real certificates."""

from __future__ import annotations

import asyncio
import ssl
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from strata.base.clock import SystemClock
from strata.base.errors import Code, StrataError
from strata.fleet.agent.server_relay import RelayTarget, ServerRelay, own_address
from strata.fleet.client.hub_client import TlsFiles
from strata.hub.gateway.proxy import ForwardedRequest, ServerProxy
from strata.identity.ca import Authority, HubClientCertificate, new_signing_request, serving_name


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="s-") as name:
        yield Path(name)


@pytest.fixture
def authority(folder: Path) -> Authority:
    return Authority.load_or_create(folder / "ca", "test", now_s())


def now_s() -> float:
    return SystemClock().wall_s()


def host_files(authority: Authority, folder: Path, host_id: str) -> tuple[TlsFiles, TlsFiles]:
    """What a host shows its hub when it is connected to, and when it connects."""
    key_pem, request_pem = new_signing_request()
    issued = authority.issue_host(host_id, request_pem, now_s())
    folder.mkdir()
    for name, content in (("key", key_pem), ("client", issued.certificate_pem), ("serving", issued.serving_pem)):
        (folder / name).write_bytes(content)
    (folder / "ca").write_bytes(authority.certificate_pem)
    return (
        TlsFiles(ca=folder / "ca", certificate=folder / "serving", key=folder / "key"),
        TlsFiles(ca=folder / "ca", certificate=folder / "client", key=folder / "key"),
    )


@asynccontextmanager
async def relayed(files: TlsFiles, folder: Path) -> AsyncIterator[str]:
    """The address of a relay to a server that says hello."""

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nconnection: close\r\n\r\nhello")
        writer.close()

    server = await asyncio.start_unix_server(reply, folder / "s")
    relay = await ServerRelay.open(files, RelayTarget(folder, "s"), "127.0.0.1")
    try:
        yield relay.address
    finally:
        await relay.close()
        server.close()


async def ask(proxy: ServerProxy, address: str, host_id: str) -> bytes:
    named = address.replace("tls://", f"tls://{serving_name(host_id)}@")
    request = ForwardedRequest(method="GET", target="/api/v1/status", headers={})
    reply = await proxy.send(named, request, key="", tenant=None)
    assert isinstance(reply.content, bytes)
    return reply.content


async def test_the_hub_reaches_the_server_of_this_host_and_no_other(authority: Authority, folder: Path) -> None:
    files, _ = host_files(authority, folder / "a", "host_a")
    proxy = ServerProxy(tls=HubClientCertificate(authority, folder, now_s()).context)
    async with relayed(files, folder) as address:
        assert await ask(proxy, address, "host_a") == b"hello"
        with pytest.raises(StrataError, match="cannot be reached") as refused:
            await ask(proxy, address, "host_b")
        assert refused.value.code is Code.UNAVAILABLE
    await proxy.close()


@pytest.mark.parametrize("shown", ["nothing", "another host", "another hub"])
async def test_nobody_but_the_hub_gets_through(authority: Authority, folder: Path, shown: str) -> None:
    files, _ = host_files(authority, folder / "a", "host_a")
    _, client = host_files(authority, folder / "b", "host_b")
    context = ssl.create_default_context(cafile=str(client.ca))
    if shown == "another host":
        assert client.certificate is not None
        context.load_cert_chain(client.certificate, client.key)
    if shown == "another hub":
        stranger = Authority.create("other", now_s())
        certificate_pem, key_pem = stranger.issue_hub_client(now_s())
        (folder / "strange.pem").write_bytes(key_pem + certificate_pem)
        context.load_cert_chain(folder / "strange.pem")
    async with relayed(files, folder) as address, httpx.AsyncClient(verify=context, trust_env=False) as anybody:
        url = address.replace("tls:", "https:")
        with pytest.raises(httpx.TransportError):
            await anybody.get(url, extensions={"sni_hostname": serving_name("host_a")})


def test_the_address_of_this_host_is_the_one_that_leads_to_the_hub() -> None:
    assert own_address("https://127.0.0.1:8443") == "127.0.0.1"
