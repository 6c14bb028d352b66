"""CURVE keys of the links over TCP: making, reading and checking them; a listener accepts one client key.

The keys lie in a file of the owner alone and are never in an argument, a log or an environment.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import zmq
import zmq.auth.thread
from zmq.auth import Authenticator

from strata.base.atomic import write_json
from strata.base.errors import Code, StrataError
from strata.base.secret import read_secret

DOMAIN: Final = "strata"
T = TypeVar("T")


class ClientKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a process needs to connect: Z85 texts. `repr` shows none of them."""

    server_public: str
    client_public: str
    client_secret: str

    def __repr__(self) -> str:
        return "ClientKeys(***)"

    def secure_client(self, socket: zmq.Socket[Any]) -> None:
        """Secures a socket that connects."""
        socket.curve_serverkey = self.server_public.encode()
        socket.curve_secretkey = self.client_secret.encode()
        socket.curve_publickey = self.client_public.encode()


class LinkKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Those of a process that listens as well. `repr` shows none of them."""

    server_public: str
    server_secret: str
    client_public: str
    client_secret: str

    def __repr__(self) -> str:
        return "LinkKeys(***)"

    @property
    def of_clients(self) -> ClientKeys:
        return ClientKeys(self.server_public, self.client_public, self.client_secret)

    def secure_client(self, socket: zmq.Socket[Any]) -> None:
        self.of_clients.secure_client(socket)

    def secure_listener(self, socket: zmq.Socket[Any]) -> None:
        """Secures a socket that listens. Its context needs `start_authenticator` as well."""
        socket.curve_server = True
        socket.curve_secretkey = self.server_secret.encode()
        socket.curve_publickey = self.server_public.encode()
        socket.zap_domain = DOMAIN.encode()

    def start_authenticator(self, context: zmq.Context[Any]) -> zmq.auth.thread.ThreadAuthenticator:
        """Start a thread that accepts clients, for a context with listeners. `stop` it before the context ends."""
        authenticator = zmq.auth.thread.ThreadAuthenticator(context)
        authenticator.start()
        self.accept_clients(authenticator)
        return authenticator

    def accept_clients(self, authenticator: Authenticator) -> None:
        """Accept only the client key."""
        authenticator.configure_curve_callback(DOMAIN, _OneClientKey(self.client_public.encode()))


class _OneClientKey:
    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return domain == DOMAIN and key == self._public


def make_keys(path: Path) -> LinkKeys:
    """New keys in place of those that may be there."""
    server_public, server_secret = zmq.curve_keypair()
    client_public, client_secret = zmq.curve_keypair()
    keys = LinkKeys(server_public.decode(), server_secret.decode(), client_public.decode(), client_secret.decode())
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_json(path, keys)
    return keys


def make_first_keys(path: Path) -> None:
    """CONFLICT if there are keys: machines that have a copy of those could not connect any more."""
    if path.exists():
        raise StrataError(Code.CONFLICT, f"there are keys in {path} already", hint="remove them to make others")
    make_keys(path)


def read_keys(path: Path) -> LinkKeys:
    """INVALID if there are none, or if others can read the file."""
    if not path.exists():
        raise StrataError(
            Code.INVALID,
            f"there are no keys for the links in {path}",
            hint="`strata serve CONFIG --make-keys` makes them; every machine needs the same ones",
        )
    return _decode_keys(path, LinkKeys)


def read_invite(path: Path) -> ClientKeys:
    """Read the file that the first host has written for the others."""
    return _decode_keys(path, ClientKeys)


def _decode_keys(path: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(read_secret(path).reveal().encode(), type=kind)
    except msgspec.MsgspecError:
        # Without the cause: it would carry the keys into a traceback.
        raise StrataError(Code.INVALID, f"{path} does not hold the keys of a link") from None
