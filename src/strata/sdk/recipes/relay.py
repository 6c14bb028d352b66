"""The way from programs that a run starts to the completions of its server: connections (256), body (4 MiB), routes.

Such a program is others' code. It gets an address and no key: the relay adds the run's own, and lets through what
samples and nothing else. Paths of addresses are random, and lead nowhere when what they were given for has ended.
"""

from __future__ import annotations

import re
import secrets
import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any, Final

import msgspec

from strata.base.errors import StrataError
from strata.sdk.server_calls import SendRequest, ServerCalls

ROUTES: Final = frozenset({("POST", "/chat/completions"), ("POST", "/completions"), ("GET", "/models")})
COMPLETIONS: Final = "/v1"
MAX_BODY: Final = 4 << 20
MAX_CONNECTIONS: Final = 256
IDLE_S: Final = 600.0
"""How long a connection may stay silent."""
_PASSED: Final = ("Content-Type", "Accept")
_REPLY_ID: Final = re.compile(rb'"id":"((?:chatcmpl|cmpl)-[^"]+)"')
"""Texts inside JSON have no quotation marks of their own."""
_JSON: Final = "application/json"


class Relay:
    """Serves on a socket that listens, in threads, until it is closed."""

    def __init__(self, calls: ServerCalls, listener: socket.socket) -> None:
        self._calls = calls
        self._bases: dict[str, str] = {}
        self._delivered: dict[str, set[str]] = {}
        self._server = _RelayServer(self, listener)
        self._thread = threading.Thread(target=self._server.serve_forever, name="relay", daemon=True)
        self._thread.start()

    def new_path(self) -> str:
        """A path that leads nowhere yet."""
        return f"/{secrets.token_urlsafe(16)}"

    def lead(self, path: str, base_path: str) -> None:
        """Makes a path lead to this one of the server; an empty one: nowhere. What was asked before is answered."""
        self._bases[path.removeprefix("/")] = base_path
        self._delivered[base_path] = set()

    def delivered(self, base_path: str) -> set[str]:
        """The ids of the replies that have come from there. Another one was lost on its way, and sampled again."""
        return self._delivered.pop(base_path)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def request_for(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> SendRequest | None:
        """The request to the server; None if this path leads nowhere."""
        ticket, slash, route = path.removeprefix("/").partition("/")
        base = self._bases.get(ticket)
        if not base or (method, slash + route) not in ROUTES:
            return None
        return SendRequest(method, f"{base}{slash}{route}", body, headers, timeout_s=IDLE_S)

    def send(self, request: SendRequest) -> tuple[int, str, bytes]:
        try:
            reply = self._calls.send(request)
        except StrataError as error:
            return 503, _JSON, _problem(error.message)
        base = request.path.removesuffix("/chat/completions").removesuffix("/completions")
        if (found := _REPLY_ID.search(reply.content)) is not None and base in self._delivered:
            self._delivered[base].add(found[1].decode())
        return reply.status_code, reply.headers.get("content-type", _JSON), reply.content


@contextmanager
def loopback_relay(calls: ServerCalls) -> Iterator[str]:
    """The address of the server's completions for a program that is given it, until the block ends."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        relay = Relay(calls, listener)
        try:
            path = relay.new_path()
            relay.lead(path, COMPLETIONS)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}{path}"
        finally:
            relay.close()


class _RelayServer(socketserver.ThreadingMixIn, socketserver.BaseServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, relay: Relay, listener: socket.socket) -> None:
        super().__init__(listener.getsockname(), _Handler)
        self.relay = relay
        self._listener = listener
        self._room = threading.BoundedSemaphore(MAX_CONNECTIONS)

    def fileno(self) -> int:
        return self._listener.fileno()

    def get_request(self) -> tuple[socket.socket, Any]:
        return self._listener.accept()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        del request, client_address
        return self._room.acquire(blocking=False)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def shutdown_request(self, request: Any) -> None:
        request.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing: a connection that its program has closed is no news."""

    def server_close(self) -> None:
        self._listener.close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = IDLE_S
    server: _RelayServer

    def do_GET(self) -> None:
        self._relay(b"")

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MAX_BODY:
            self.close_connection = True
            self._reply(413, _JSON, _problem(f"a request has a Content-Length of at most {MAX_BODY} bytes"))
            return
        self._relay(self.rfile.read(int(length)))

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing: the server has the log."""

    def _relay(self, body: bytes) -> None:
        headers = {name: value for name in _PASSED if (value := self.headers.get(name)) is not None}
        request = self.server.relay.request_for(self.command, self.path, body, headers)
        if request is None:
            self._reply(404, _JSON, _problem("there is nothing at this path"))
            return
        self._reply(*self.server.relay.send(request))

    def _reply(self, status: int, media_type: str, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", media_type)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def _problem(message: str) -> bytes:
    return msgspec.json.encode({"error": {"message": message, "type": "relay_error", "code": None, "param": None}})
