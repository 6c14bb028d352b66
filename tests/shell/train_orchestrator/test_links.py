"""Who can reach the sockets of a server, and what becomes of bytes that are no message."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import pytest
import zmq
import zmq.asyncio

from strata.base.errors import Code, StrataError
from strata.train.core import client_commands, commands
from strata.train.link import messages
from strata.train.link.api import ApiLink, OrchestratorClient
from strata.train.link.keys import LinkKeys, make_first_keys, make_keys, read_keys
from strata.train.link.messages import OrchestratorRequest
from strata.train.link.rank import ConnectRequest, RankConnection, RankLink, connect_rank
from strata.train.link.sockets import load_keys, own_address
from strata.train.settings import ServerSettings
from strata.train.status import queries
from tests.shell.train_orchestrator.stacks import Stack
from tests.support.ports import port_of, reserve_port

QUESTION = OrchestratorRequest("q", "alice", queries.DescribeServer())
REPLY_TIMEOUT_S = 20.0


@pytest.fixture
def over_tcp(tmp_path: Path) -> Iterator[ServerSettings]:
    with reserve_port() as listener, reserve_port() as one, reserve_port() as two:
        settings = Stack(
            tmp_path,
            server=f'transport = "tcp"\nrequests_port = {port_of(one)}\noutputs_port = {port_of(two)}',
            group=f'rank0 = "tcp://127.0.0.1:{port_of(listener)}"',
        ).settings
        make_keys(settings.keys)
        yield settings


@contextmanager
def rank0(settings: ServerSettings) -> Iterator[RankLink]:
    """Answers everything with the generation it was told, until it is told to shut down."""
    link = RankLink(settings)

    def serve() -> None:
        while (message := link.receive(REPLY_TIMEOUT_S)) is not None:
            link.send(commands.Fenced(message.generation, "heard"))
            if isinstance(message, commands.RankRequest):
                return

    thread = Thread(target=serve)
    thread.start()
    try:
        yield link
    finally:
        thread.join(2 * REPLY_TIMEOUT_S)
        link.close()


async def converse(context: zmq.asyncio.Context, endpoint: str, keys: LinkKeys | None, attempt: int) -> RankConnection:
    async with asyncio.timeout(REPLY_TIMEOUT_S):
        connection = await connect_rank(context, endpoint, keys, ConnectRequest(1, attempt))
        assert connection is not None
        return connection


async def heard(connection: RankConnection, generation: int) -> None:
    async with asyncio.timeout(REPLY_TIMEOUT_S):
        await connection.send(commands.Attach(generation, "run"))
        assert await connection.receive() == commands.Fenced(generation, "heard")


async def end(connection: RankConnection) -> None:
    await connection.send(commands.RankRequest(1, 1, commands.Shutdown()))
    async with asyncio.timeout(REPLY_TIMEOUT_S):
        await connection.receive()
    connection.close()


# Rank 0


async def test_conversation_follows_conversation_and_each_has_the_ranks_for_itself(tmp_path: Path) -> None:
    settings = Stack(tmp_path).settings
    context = zmq.asyncio.Context()
    left = []
    with rank0(settings) as link:
        for attempt in range(1, 60):
            connection = await converse(context, link.endpoint, None, attempt)
            await heard(connection, attempt)
            if attempt % 2:
                connection.close()
            else:
                left.append(connection)
        last = await converse(context, link.endpoint, None, 100)
        await end(last)
    for connection in left:
        connection.close()
    context.destroy(linger=0)


async def test_a_connect_request_that_arrives_late_does_not_end_the_connection(tmp_path: Path) -> None:
    settings = Stack(tmp_path).settings
    context = zmq.asyncio.Context()
    with rank0(settings) as link:
        connection = await converse(context, link.endpoint, None, 7)
        async with asyncio.timeout(REPLY_TIMEOUT_S):
            assert await connect_rank(context, link.endpoint, None, ConnectRequest(1, 6)) is None
            assert await connect_rank(context, link.endpoint, None, ConnectRequest(0, 99)) is None
        await heard(connection, 3)
        await end(connection)
    context.destroy(linger=0)


async def test_whoever_speaks_hears_when_the_ranks_are_gone(tmp_path: Path) -> None:
    settings = Stack(tmp_path).settings
    context = zmq.asyncio.Context()
    with rank0(settings) as link:
        connection = await converse(context, link.endpoint, None, 1)
        await connection.send(commands.RankRequest(1, 1, commands.Shutdown()))
        assert isinstance(await connection.receive(), commands.Fenced)
    async with asyncio.timeout(REPLY_TIMEOUT_S):
        await connection.lost()
    connection.close()
    context.destroy(linger=0)


async def test_bytes_that_are_no_message_do_not_disturb_rank_0(tmp_path: Path) -> None:
    settings = Stack(tmp_path).settings
    context = zmq.asyncio.Context()
    with rank0(settings) as link:
        stranger = context.socket(zmq.DEALER)
        stranger.connect(link.endpoint)
        for data in (b"", b"\xff" * 99, b"\x93\x01\x02\x03"):
            await stranger.send(data)
        await stranger.send_multipart([b"two", b"frames"])
        connection = await converse(context, link.endpoint, None, 1)
        for data in (b"", b"\xff" * 99):
            await connection._socket.send(data)
        await heard(connection, 5)
        await end(connection)
    context.destroy(linger=0)


async def test_rank_0_writes_its_address_into_a_file_if_it_has_to(tmp_path: Path) -> None:
    address = tmp_path / "far" / "rank0.address"
    settings = Stack(tmp_path, group=f'rank0 = "file:{address}"').settings
    make_keys(settings.keys)
    context = zmq.asyncio.Context()
    with rank0(settings) as link:
        assert address.read_text(encoding="utf-8").strip() == link.endpoint
        connection = await converse(context, link.endpoint, load_keys(settings), 1)
        await end(connection)
    context.destroy(linger=0)


# API server


async def test_an_api_server_and_an_orchestrator_speak_over_tcp_with_their_keys(over_tcp: ServerSettings) -> None:
    settings = over_tcp
    context = zmq.asyncio.Context()
    async with OrchestratorClient(settings) as client:
        asking = asyncio.create_task(client.request(QUESTION, timeout_s=REPLY_TIMEOUT_S))
        link = ApiLink(context, settings, 1)
        request = await link.receive()
        link.send(messages.OrchestratorOutputs(request.request_id, client_commands.Done()))
        assert await asking == client_commands.Done()
        assert client.generation == 1
        stranger = context.socket(zmq.DEALER)
        stranger.identity = b"orchestrator-99"
        stranger.probe_router = True
        stranger.connect(settings.requests)
        asking = asyncio.create_task(client.request(QUESTION, timeout_s=REPLY_TIMEOUT_S))
        request = await link.receive()
        link.send(messages.OrchestratorOutputs(request.request_id, client_commands.Done()))
        await asking
        assert client.generation == 1
        stranger.close(linger=0)
        link.close()
    context.destroy(linger=0)


async def test_bytes_that_are_no_message_end_neither_side(tmp_path: Path) -> None:
    settings = Stack(tmp_path).settings
    context = zmq.asyncio.Context()
    async with OrchestratorClient(settings) as client:
        link = ApiLink(context, settings, 4)
        for endpoint, kind in ((settings.requests, zmq.DEALER), (settings.outputs, zmq.PUSH)):
            stranger = context.socket(kind)
            stranger.connect(endpoint)
            for data in (b"", b"\xff\xff", b"\x81\xa1x\xa1y"):
                await stranger.send(data)
            stranger.close(linger=1000)
        asking = asyncio.create_task(client.request(QUESTION, timeout_s=REPLY_TIMEOUT_S))
        request = await link.receive()
        client._requests.send_multipart([b"orchestrator-4", b"\xff\xff"])
        link.send(messages.OrchestratorOutputs("nobody asked this", client_commands.Done()))
        link.send(messages.OrchestratorOutputs(request.request_id, client_commands.Done()))
        assert await asking == client_commands.Done()
        again = asyncio.create_task(client.request(QUESTION, timeout_s=REPLY_TIMEOUT_S))
        assert (await link.receive()).request_id == QUESTION.request_id
        again.cancel()
        link.close()
    context.destroy(linger=0)


async def test_an_orchestrator_whose_time_is_over_is_not_asked(tmp_path: Path) -> None:
    settings = Stack(tmp_path).settings
    context = zmq.asyncio.Context()
    async with OrchestratorClient(settings) as client:
        new = ApiLink(context, settings, 8)
        asking = asyncio.create_task(client.request(QUESTION, timeout_s=REPLY_TIMEOUT_S))
        request = await new.receive()
        old = ApiLink(context, settings, 7)
        new.send(messages.OrchestratorOutputs(request.request_id, client_commands.Done()))
        await asking
        asking = asyncio.create_task(client.request(QUESTION, timeout_s=REPLY_TIMEOUT_S))
        request = await new.receive()
        new.send(messages.OrchestratorOutputs(request.request_id, client_commands.Done()))
        await asking
        assert client.generation == 8
        for link in (old, new):
            link.close()
    context.destroy(linger=0)


async def test_a_question_nobody_answers_is_given_up_in_time(tmp_path: Path) -> None:
    async with OrchestratorClient(Stack(tmp_path).settings) as client:
        with pytest.raises(StrataError) as refused:
            await client.request(QUESTION, timeout_s=0.05)
        assert refused.value.code is Code.UNAVAILABLE


# Folders and keys


async def test_sockets_in_a_folder_that_others_can_reach_are_refused(tmp_path: Path) -> None:
    settings = Stack(tmp_path).settings
    settings.sockets.mkdir(parents=True)
    settings.sockets.chmod(0o755)
    with pytest.raises(StrataError, match="others could reach") as refused:
        async with OrchestratorClient(settings):
            pass
    assert refused.value.code is Code.INVALID


def test_keys_that_others_can_read_are_refused_and_never_shown(tmp_path: Path) -> None:
    keys = make_keys(tmp_path / "link.keys")
    assert (tmp_path / "link.keys").stat().st_mode & 0o777 == 0o600
    assert read_keys(tmp_path / "link.keys") == keys
    assert keys.server_secret not in repr(keys) + str(keys)
    (tmp_path / "link.keys").chmod(0o644)
    with pytest.raises(StrataError) as refused:
        read_keys(tmp_path / "link.keys")
    assert refused.value.code is Code.INVALID


def test_first_keys_are_made_once_and_never_in_place_of_others(tmp_path: Path) -> None:
    file = tmp_path / "data" / "link.keys"
    with pytest.raises(StrataError, match="no keys for the links"):
        read_keys(file)
    make_first_keys(file)
    made = read_keys(file)
    with pytest.raises(StrataError) as refused:
        make_first_keys(file)
    assert refused.value.code is Code.CONFLICT
    assert read_keys(file) == made


@pytest.mark.parametrize(
    ("known_as", "address"), [("10.0.0.7", "10.0.0.7"), ("127.0.0.1", None), ("localhost", None), ("no.invalid", None)]
)
def test_rank_0_is_found_where_the_other_ranks_found_it_unless_they_are_all_on_its_machine(
    known_as: str, address: str | None
) -> None:
    assert own_address(known_as) == (address or own_address())
