"""Strangers at the sockets of a training server over TCP: CURVE lets in who has the keys, and nobody else."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import pytest
import zmq
import zmq.asyncio

from strata.base.errors import Code, StrataError
from strata.train.core import client_commands
from strata.train.link import messages
from strata.train.link.api import ApiLink, OrchestratorClient
from strata.train.link.keys import LinkKeys, make_keys
from strata.train.link.rank import ConnectRequest, RankLink, connect_rank
from strata.train.link.sockets import load_keys
from strata.train.settings import ServerSettings
from tests.shell.train_orchestrator.stacks import Stack
from tests.shell.train_orchestrator.test_links import QUESTION, converse, end, heard, over_tcp, rank0
from tests.support.ports import port_of, reserve_port

pytestmark = pytest.mark.timeout(120)
AREA: Final = "links of the training server"
NOT_HEARD_S: Final = 0.4
Tries = Callable[[int], None]
__all__ = ["over_tcp"]


@pytest.fixture
async def context() -> AsyncIterator[zmq.asyncio.Context]:
    made = zmq.asyncio.Context()
    yield made
    made.destroy(linger=0)


def right(settings: ServerSettings) -> LinkKeys:
    keys = load_keys(settings)
    assert keys is not None
    return keys


async def is_not_heard(context: zmq.asyncio.Context, link: RankLink, keys: LinkKeys | None) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(NOT_HEARD_S):
            await connect_rank(context, link.endpoint, keys, ConnectRequest(1 << 40, 1))


async def still_answers(context: zmq.asyncio.Context, link: RankLink, settings: ServerSettings) -> None:
    """Whoever has the keys is let in, also after strangers: the knocks of those were not even counted."""
    connection = await converse(context, link.endpoint, right(settings), 2)
    await heard(connection, 2)
    await end(connection)


@pytest.mark.proves("Never: rank 0's socket is open to the network")
@pytest.mark.attack(AREA, "rank 0 without CURVE")
async def test_a_stranger_without_keys_is_not_heard(over_tcp: ServerSettings, context: zmq.asyncio.Context) -> None:
    with rank0(over_tcp) as link:
        await is_not_heard(context, link, None)
        await still_answers(context, link, over_tcp)


@pytest.mark.proves("Never: rank 0's socket is open to the network")
@pytest.mark.attack(AREA, "rank 0 with CURVE keys of another server")
async def test_a_stranger_with_other_keys_is_not_heard(
    over_tcp: ServerSettings, context: zmq.asyncio.Context, tmp_path: Path
) -> None:
    with rank0(over_tcp) as link:
        await is_not_heard(context, link, make_keys(tmp_path / "other.keys"))
        await still_answers(context, link, over_tcp)


@pytest.mark.attack(AREA, "rank 0 with the right server key and a strange client key")
async def test_a_stranger_who_knows_the_servers_public_key_is_not_heard(
    over_tcp: ServerSettings, context: zmq.asyncio.Context, tmp_path: Path
) -> None:
    keys, other = right(over_tcp), make_keys(tmp_path / "other.keys")
    with rank0(over_tcp) as link:
        strange = LinkKeys(keys.server_public, keys.server_secret, other.client_public, other.client_secret)
        await is_not_heard(context, link, strange)
        await still_answers(context, link, over_tcp)


@pytest.mark.attack(AREA, "a client that was given the key of another server does not speak to this one")
async def test_a_client_does_not_speak_to_a_server_with_another_key(
    over_tcp: ServerSettings, context: zmq.asyncio.Context, tmp_path: Path
) -> None:
    keys, other = right(over_tcp), make_keys(tmp_path / "other.keys")
    with rank0(over_tcp) as link:
        wrong = LinkKeys(other.server_public, other.server_secret, keys.client_public, keys.client_secret)
        await is_not_heard(context, link, wrong)
        await still_answers(context, link, over_tcp)


@pytest.mark.attack(AREA, "rank 0 with a name and a password (PLAIN)")
async def test_a_password_is_no_key(over_tcp: ServerSettings, context: zmq.asyncio.Context) -> None:
    with rank0(over_tcp) as link:
        stranger = context.socket(zmq.DEALER)
        stranger.plain_username, stranger.plain_password = b"admin", b"admin"
        stranger.connect(link.endpoint)
        await stranger.send(b"hello")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(NOT_HEARD_S):
                await stranger.recv()
        stranger.close(linger=0)
        await still_answers(context, link, over_tcp)


@pytest.mark.attack(AREA, "bytes at random and protocols of others at the port of rank 0")
async def test_bytes_at_random_do_not_disturb(
    over_tcp: ServerSettings, context: zmq.asyncio.Context, tries: Tries
) -> None:
    sent = (b"GET / HTTP/1.1\r\n\r\n", b"\0" * 512, b"\xff\0\0\0\0\0\0\0\1\x7f" + b"\xff" * 64, bytes(range(256)))
    with rank0(over_tcp) as link:
        place = urlsplit(link.endpoint)
        for data in sent:
            with socket.create_connection((place.hostname or "", place.port or 0), timeout=5) as plain:
                plain.sendall(data)
            tries(1)
        await still_answers(context, link, over_tcp)


@pytest.mark.attack(AREA, "an API server's socket: an orchestrator without the keys")
async def test_an_orchestrator_without_the_keys_is_not_asked(
    over_tcp: ServerSettings, context: zmq.asyncio.Context, tmp_path: Path
) -> None:
    """It would hear the requests of all tenants, and answer them."""
    async with OrchestratorClient(over_tcp) as client:
        asking = asyncio.create_task(client.request(QUESTION, timeout_s=20))
        stranger = context.socket(zmq.DEALER)
        stranger.connect(over_tcp.requests)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(NOT_HEARD_S):
                await stranger.recv()
        stranger.close(linger=0)
        link = ApiLink(context, over_tcp, 1)
        request = await link.receive()
        link.send(messages.OrchestratorOutputs(request.request_id, client_commands.Done()))
        assert await asking == client_commands.Done()
        link.close()


@pytest.mark.attack(AREA, "a server over TCP without keys")
def test_a_server_over_tcp_without_keys_does_not_listen(tmp_path: Path) -> None:
    with reserve_port() as door:
        settings = Stack(tmp_path, group=f'rank0 = "tcp://127.0.0.1:{port_of(door)}"').settings
        with pytest.raises(StrataError) as refused:
            RankLink(settings)
    assert refused.value.code in (Code.NOT_FOUND, Code.INVALID, Code.PRECONDITION, Code.UNAVAILABLE)
