"""A host that joined over TLS: the agent's own client knows the hub by its pin, and renews without cryptography."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from strata.base.errors import Code, StrataError
from strata.fleet.agent import identity
from strata.fleet.client.hub_api import HubApi
from strata.fleet.client.hub_client import HubClient, TlsFiles
from strata.fleet.core.capability import Capability
from strata.fleet.wire.identities import CertificateReply, InviteReply
from strata.fleet.wire.overview import HubHealth
from strata.hub.settings import HubTlsSettings
from strata.identity.ca import private_pem
from strata.identity.tokens import read_join_token
from tests.shell.fleet_http.running import Running, ok, running
from tests.shell.fleet_http.test_tls import new_key


@pytest.fixture
async def secure(tmp_path: Path) -> AsyncIterator[Running]:
    async with running(tmp_path / "hub", tls=HubTlsSettings(enabled=True)) as site:
        yield site


async def join(site: Running, state: Path) -> None:
    invited = ok(await (await site.operator()).post("/v1/invites", json={}), InviteReply)
    token = read_join_token(invited.token)
    key, request = new_key()
    body = {"invite_id": token.id, "secret": token.secret.reveal(), "name": "anna", "request_pem": request}
    reply = ok(await (await site.client()).post("/v1/join", json=body), CertificateReply)
    identity.save_certified(
        state, site.url, reply, key_pem=private_pem(key), request_pem=request.encode(), now_s=1000.0
    )


async def test_a_joined_host_registers_by_its_certificate_and_renews_it(secure: Running, tmp_path: Path) -> None:
    state = tmp_path / "state"
    await join(secure, state)
    assert [path.stat().st_mode & 0o077 for path in (state / "identity").iterdir()] == [0] * 6
    before = (state / "identity" / "host.pem").read_bytes()
    with identity.connect_to_hub(state) as client:
        calls = HubApi(client)
        reply = await asyncio.to_thread(calls.register, Capability(hostname="anna"))
        assert reply.name == "anna"
        renewed = await asyncio.to_thread(identity.renew_certificate, state, client, 2000.0)
        assert renewed.certified_at_s == 2000.0
        assert (state / "identity" / "host.pem").read_bytes() != before
        assert (await asyncio.to_thread(calls.renew, ())).verdicts == ()


async def test_a_hub_of_another_authority_is_not_talked_to(secure: Running, tmp_path: Path) -> None:
    async with running(tmp_path / "other", tls=HubTlsSettings(enabled=True)) as other:
        state = tmp_path / "state"
        await join(secure, state)
        folder = state / "identity"
        tls = TlsFiles(ca=folder / "ca.pem", certificate=folder / "host.pem", key=folder / "host.key")
        with HubClient(other.url, tls=tls) as client, pytest.raises(StrataError, match="not the hub this host joined"):
            await asyncio.to_thread(client.call, "GET", "/v1/health", HubHealth)


def test_a_host_that_has_not_joined_is_told_how(tmp_path: Path) -> None:
    with pytest.raises(StrataError, match="has not joined") as refused:
        identity.connect_to_hub(tmp_path)
    assert (refused.value.code, refused.value.hint) == (Code.PRECONDITION, "strata join")
