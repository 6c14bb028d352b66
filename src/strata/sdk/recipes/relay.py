"""The way from programs that a run starts to the completions of its server: connections (256), body (4 MiB), routes.

Such a program is others' code. It gets an address and no key: the relay adds the run's own, and lets through what
samples and nothing else. A path leads somewhere until what it was given for has ended: a random one, or one with a key.
"""

from __future__ import annotations

import hmac
import re
import secrets
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any, Final, NamedTuple

import msgspec

from strata.base.digest import sha256_hex
from strata.base.errors import StrataError
from strata.sdk.recipes.batches import derive_seed
from strata.sdk.server_calls import SendRequest, ServerCalls

ROUTES: Final = frozenset({("POST", "/chat/completions"), ("POST", "/completions"), ("GET", "/models")})
COMPLETIONS: Final = "/v1"
MAX_BODY: Final = 4 << 20
MAX_CONNECTIONS: Final = 256
IDLE_S: Final = 600.0
"""How long a connection may stay silent."""
WRITTEN_S: Final = 10.0
"""How long the end of a path waits for replies that are being written."""
_PASSED: Final = ("Content-Type", "Accept")
_REPLY_ID: Final = re.compile(rb'"id":"((?:chatcmpl|cmpl)-[^"]+)"')
"""Texts inside JSON have no quotation marks of their own."""
_JSON: Final = "application/json"
_STREAM_ERROR: Final = b'data: {"error"'
_IDS: Final = frozenset({"model", "id", "tool_call_id"})
"""What is another one in each run."""

Write = Callable[[int, str, bytes], None]
"""Writes a reply (status, media type, content) to who has asked."""


class RelayAddress(NamedTuple):
    url: str
    key: str


@dataclass
class _Way:
    """Where a path leads."""

    base_path: str
    model: str
    """The only one that may be asked, in a session; empty where there is none."""
    key: str
    """Empty: the path is the key."""
    delivered: set[str] = field(default_factory=set)
    writing: int = 0


class Relay:
    """Serves on a socket that listens, in threads, until it is closed."""

    def __init__(self, calls: ServerCalls, listener: socket.socket) -> None:
        self._calls = calls
        self._ways: dict[str, _Way] = {}
        self._changed = threading.Condition()
        self._server = _RelayServer(self, listener)
        self._thread = threading.Thread(target=self._server.serve_forever, name="relay", daemon=True)
        self._thread.start()

    def new_path(self) -> str:
        """A path that leads nowhere yet."""
        return f"/{secrets.token_urlsafe(16)}"

    def lead(self, path: str, base_path: str, *, model: str = "", key: str = "") -> None:
        """Makes a path lead to this one of the server: for this model alone, and with this key as a bearer token."""
        self._ways[path.removeprefix("/")] = _Way(base_path, model, key)

    def end(self, path: str) -> set[str]:
        """Makes a path lead nowhere. Returns the ids of the replies that have reached who asked: another one
        was lost on its way, and sampled again."""
        way = self._ways.pop(path.removeprefix("/"))
        with self._changed:
            # Who has a reply may act on it before the thread that wrote it has noted this.
            self._changed.wait_for(lambda: not way.writing, WRITTEN_S)
            return set(way.delivered)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, method: str, path: str, body: bytes, headers: dict[str, str], key: str, write: Write) -> None:
        """Asks the server what a program asks at this path, and writes its reply."""
        ticket, slash, route = path.removeprefix("/").partition("/")
        way = self._ways.get(ticket)
        if way is None or (method, slash + route) not in ROUTES or (way.model and method == "GET"):
            write(404, _JSON, _problem("there is nothing at this path"))
            return
        if way.key and not hmac.compare_digest(key.encode(errors="replace"), f"Bearer {way.key}".encode()):
            write(401, _JSON, _problem("this path needs its key as a bearer token"))
            return
        if way.model:
            changed = _turn_body(body, way.model)
            if changed is None:
                write(404, _JSON, _problem("a body is a JSON object whose model is that of the episode"))
                return
            body = changed
        request = SendRequest(method, f"{way.base_path}{slash}{route}", body, headers, timeout_s=IDLE_S)
        self._deliver(way, write, *self._send(request))

    def _send(self, request: SendRequest) -> tuple[int, str, bytes]:
        try:
            reply = self._calls.send(request)
        except StrataError as error:
            return 503, _JSON, _problem(error.message)
        return reply.status_code, reply.headers.get("content-type", _JSON), reply.content

    def _deliver(self, way: _Way, write: Write, status: int, media_type: str, content: bytes) -> None:
        found = None if _STREAM_ERROR in content else _REPLY_ID.search(content)
        with self._changed:
            way.writing += 1
        written = False
        try:
            write(status, media_type, content)
            written = True
        finally:
            with self._changed:
                way.writing -= 1
                if written and found is not None:
                    way.delivered.add(found[1].decode())
                self._changed.notify_all()


def _turn_body(body: bytes, model: str) -> bytes | None:
    """The body of one turn of an episode, with a seed of its own; None if it is none for this model.

    With one seed for all turns, token k of each would be drawn with the same random number.
    """
    try:
        asked = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return None
    if not isinstance(asked, dict) or asked.get("model") != model:
        return None
    seed = asked.get("seed")
    if isinstance(seed, int):
        asked["seed"] = derive_seed("turn", seed, sha256_hex(msgspec.json.encode(_without_ids(asked))))
    # Written anew: the server reads what was compared here.
    return msgspec.json.encode(asked)


def _without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_ids(each) for name, each in value.items() if name not in _IDS}
    return [_without_ids(each) for each in value] if isinstance(value, list) else value


@contextmanager
def loopback_relay(calls: ServerCalls) -> Iterator[RelayAddress]:
    """The address of the server's completions, and the key to it, for a program that is given both, until the block
    ends. An address is in arguments, which all users of the machine see."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        relay = Relay(calls, listener)
        try:
            key = secrets.token_urlsafe(16)
            relay.lead(COMPLETIONS, COMPLETIONS, key=key)
            yield RelayAddress(f"http://127.0.0.1:{listener.getsockname()[1]}{COMPLETIONS}", key)
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
        key = self.headers.get("Authorization", "")
        self.server.relay.answer(self.command, self.path, body, headers, key, self._reply)

    def _reply(self, status: int, media_type: str, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", media_type)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def _problem(message: str) -> bytes:
    return msgspec.json.encode({"error": {"message": message, "type": "relay_error", "code": None, "param": None}})
