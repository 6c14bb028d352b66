"""The HTTP client against servers that misbehave, which a hub does not."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from strata.base.errors import Code, StrataError
from strata.base.secret import Secret
from strata.fleet.client.hub_client import HubClient, transfer
from strata.fleet.wire.overview import HubHealth
from tests.support.ports import port_of, reserve_port

OK = (
    b"HTTP/1.1 200 OK\r\nContent-Length: 31\r\nDate: Thu, 01 Jan 1970 00:00:00 GMT\r\n\r\n"
    b'{"status":"ok","version":"1.2"} '
)


@contextmanager
def server(answer: Callable[[socket.socket, int], None]) -> Iterator[str]:
    """Calls `answer` with each connection and its number, from 0."""
    listener = socket.create_server(("127.0.0.1", 0))
    held: list[tuple[socket.socket, threading.Thread]] = []

    def reply(connection: socket.socket, number: int) -> None:
        # Whoever asked may be gone before it is told.
        with suppress(OSError):
            answer(connection, number)

    def serve() -> None:
        number = 0
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            replying = threading.Thread(target=reply, args=(connection, number), daemon=True)
            held.append((connection, replying))
            replying.start()
            number += 1

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()
        for connection, replying in held:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            replying.join()
            connection.close()


def health(client: HubClient, timeout_s: float = 10.0) -> HubHealth:
    return client.call("GET", "/v1/health", HubHealth, timeout_s=timeout_s)


def always(reply: bytes) -> Callable[[socket.socket, int], None]:
    def answer(connection: socket.socket, number: int) -> None:
        while connection.recv(65_536):
            connection.sendall(reply)

    return answer


def test_a_connection_is_used_again_and_the_clocks_are_compared() -> None:
    numbers: list[int] = []

    def answer(connection: socket.socket, number: int) -> None:
        while connection.recv(65_536):
            numbers.append(number)
            connection.sendall(OK)

    with server(answer) as url, HubClient(url) as client:
        assert health(client).version == "1.2"
        assert health(client).version == "1.2"
        assert client.ahead_s is not None
        assert client.ahead_s > 1e9
    assert numbers == [0, 0]


def test_a_connection_that_was_closed_meanwhile_is_replaced() -> None:
    def answer(connection: socket.socket, number: int) -> None:
        connection.recv(65_536)
        connection.sendall(OK)
        if number == 0:
            connection.recv(65_536)
            connection.shutdown(socket.SHUT_RDWR)
        else:
            connection.recv(65_536)

    with server(answer) as url, HubClient(url) as client:
        assert health(client).version == "1.2"
        assert health(client).version == "1.2"


def test_a_server_that_falls_silent_on_a_connection_in_use_is_unavailable() -> None:
    def answer(connection: socket.socket, number: int) -> None:
        connection.recv(65_536)
        connection.sendall(OK)
        while connection.recv(65_536):
            pass

    with server(answer) as url, HubClient(url) as client:
        assert health(client).version == "1.2"
        with pytest.raises(StrataError) as refused:
            health(client, timeout_s=0.05)
    assert refused.value.code is Code.UNAVAILABLE


@pytest.mark.parametrize("reply", [b"", b"garbage\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort"])
def test_a_server_that_breaks_off_is_unavailable(reply: bytes) -> None:
    def answer(connection: socket.socket, number: int) -> None:
        connection.recv(65_536)
        connection.sendall(reply)
        # The test may be over by now, and the connection with it.
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    with server(answer) as url, HubClient(url) as client, pytest.raises(StrataError) as refused:
        health(client)
    assert refused.value.code is Code.UNAVAILABLE


BUSY = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n"


@pytest.mark.parametrize("first", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort", BUSY])
def test_a_client_that_may_repeat_requests_sends_one_again_after_its_connection_broke(first: bytes) -> None:
    numbers: list[int] = []

    def answer(connection: socket.socket, number: int) -> None:
        connection.recv(65_536)
        numbers.append(number)
        connection.sendall(OK if number == 2 else first)
        connection.shutdown(socket.SHUT_RDWR)

    with server(answer) as url, HubClient(url, retry_for_s=60.0) as client:
        assert health(client).version == "1.2"
    assert numbers == [0, 1, 2]


def test_what_is_not_idempotent_is_sent_once() -> None:
    numbers: list[int] = []

    def answer(connection: socket.socket, number: int) -> None:
        connection.recv(65_536)
        numbers.append(number)
        connection.shutdown(socket.SHUT_RDWR)

    with server(answer) as url, HubClient(url, retry_for_s=60.0) as client, pytest.raises(StrataError) as refused:
        client.call_once("POST", "/v1/keys", HubHealth)
    assert (refused.value.code, refused.value.hint) == (
        Code.UNAVAILABLE,
        "it may have been done: look before you try again",
    )
    assert numbers == [0]


def test_what_was_sent_once_may_have_been_done_when_no_reply_comes_in_time() -> None:
    with (
        server(lambda connection, _: None) as url,
        HubClient(url, timeout_s=0.2) as client,
        pytest.raises(StrataError, match="timed out") as silent,
    ):
        client.call_once("POST", "/v1/keys", HubHealth)
    assert silent.value.hint == "it may have been done: look before you try again"
    with (
        reserve_port() as guard,
        HubClient(f"http://127.0.0.1:{port_of(guard)}") as client,
        pytest.raises(StrataError, match="nothing listens on port") as absent,
    ):
        client.call_once("POST", "/v1/keys", HubHealth)
    assert "may have been done" not in (absent.value.hint or "")


@pytest.mark.parametrize("status", [b"404 Not Found", b"410 Gone"])
def test_what_a_broken_request_has_removed_is_removed(status: bytes) -> None:
    def answer(connection: socket.socket, number: int) -> None:
        connection.recv(65_536)
        if number:
            connection.sendall(b"HTTP/1.1 " + status + b"\r\nContent-Length: 0\r\n\r\n")
        connection.shutdown(socket.SHUT_RDWR)

    with server(answer) as url, HubClient(url, retry_for_s=60.0) as client:
        client.call("DELETE", "/v1/secret/a", type(None))
        with pytest.raises(StrataError, match=status[:3].decode()):
            client.call("DELETE", "/v1/secret/a", type(None))


def test_an_address_where_no_process_listens_is_reported_at_once() -> None:
    with (
        reserve_port() as guard,
        HubClient(f"http://127.0.0.1:{port_of(guard)}", retry_for_s=600.0) as client,
        pytest.raises(StrataError, match="nothing listens on port"),
    ):
        health(client)


def test_a_server_that_does_not_answer_is_given_up_in_time() -> None:
    with (
        server(lambda connection, _: None) as url,
        HubClient(url) as client,
        pytest.raises(StrataError, match="timed out"),
    ):
        health(client, timeout_s=0.2)


def test_closing_the_client_ends_a_long_poll() -> None:
    begun = threading.Event()

    def answer(connection: socket.socket, number: int) -> None:
        connection.recv(65_536)
        begun.set()

    refusals: list[StrataError] = []
    with server(answer) as url:
        client = HubClient(url)

        def poll() -> None:
            try:
                health(client, timeout_s=600.0)
            except StrataError as error:
                refusals.append(error)

        thread = threading.Thread(target=poll)
        thread.start()
        assert begun.wait(10)
        client.close()
        thread.join(10)
        assert not thread.is_alive()
    assert [error.code for error in refusals] == [Code.UNAVAILABLE]


@pytest.mark.parametrize(
    ("status", "code"),
    [(502, Code.UNAVAILABLE), (401, Code.UNAUTHENTICATED), (413, Code.INVALID), (302, Code.INTERNAL)],
)
def test_what_a_proxy_says_becomes_one_of_our_codes(status: int, code: Code) -> None:
    reply = f"HTTP/1.1 {status} X\r\nContent-Length: 6\r\nLocation: http://example.org\r\n\r\n<html>".encode()
    with server(always(reply)) as url, HubClient(url) as client, pytest.raises(StrataError) as refused:
        health(client)
    assert refused.value.code is code


def test_a_reply_of_another_version_is_said_to_be_one() -> None:
    reply = b'HTTP/1.1 200 OK\r\nContent-Length: 14\r\n\r\n{"status":"no"}'[:-1]
    with server(always(reply)) as url, HubClient(url) as client, pytest.raises(StrataError) as refused:
        health(client)
    assert refused.value.code is Code.UNSUPPORTED


def test_the_secret_goes_to_the_hub_and_never_to_an_object_store() -> None:
    heads: list[bytes] = []

    def answer(connection: socket.socket, number: int) -> None:
        heads.append(connection.recv(65_536))
        connection.sendall(OK)

    with server(answer) as url, HubClient(url, bearer=Secret("tml-x")) as client:
        health(client)
        transfer("PUT", f"{url}/bucket/chunk?signature=abc", b"bytes")
    assert b"Authorization: Bearer tml-x" in heads[0]
    assert heads[1].startswith(b"PUT /bucket/chunk?signature=abc HTTP/1.1")
    assert b"tml-x" not in heads[1]


def test_a_signature_is_not_repeated_in_an_error() -> None:
    reply = b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n"
    with server(always(reply)) as url, pytest.raises(StrataError) as refused:
        transfer("GET", f"{url}/chunk?signature=abc")
    assert "abc" not in refused.value.message
