"""CURVE keys of the links over TCP: making, reading and checking them; a listener accepts one client key.

The keys lie in a file of the owner alone and are never in an argument, a log or an environment.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec
import zmq
import zmq.auth.thread

from strata.base.atomic import write_json
from strata.base.errors import Code, StrataError
from strata.base.secret import read_secret

DOMAIN: Final = "strata"


class LinkKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Z85 texts. `repr` shows none of them."""

    server_public: str
    server_secret: str
    client_public: str
    client_secret: str

    def __repr__(self) -> str:
        return "LinkKeys(***)"

    def secure_listener(self, socket: zmq.Socket[Any]) -> None:
        """Secures a socket that listens. Its context needs `start_authenticator` as well."""
        socket.curve_server = True
        socket.curve_secretkey = self.server_secret.encode()
        socket.curve_publickey = self.server_public.encode()
        socket.zap_domain = DOMAIN.encode()

    def secure_client(self, socket: zmq.Socket[Any]) -> None:
        """Secures a socket that connects."""
        socket.curve_serverkey = self.server_public.encode()
        socket.curve_secretkey = self.client_secret.encode()
        socket.curve_publickey = self.client_public.encode()

    def start_authenticator(self, context: zmq.Context[Any]) -> zmq.auth.thread.ThreadAuthenticator:
        """Accept only the client key, for a context with listeners. `stop` it before the context ends."""
        authenticator = zmq.auth.thread.ThreadAuthenticator(context)
        authenticator.start()
        authenticator.configure_curve_callback(DOMAIN, _OneClientKey(self.client_public.encode()))
        return authenticator


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
    try:
        return msgspec.json.decode(read_secret(path).reveal().encode(), type=LinkKeys)
    except msgspec.MsgspecError:
        # Without the cause: it would carry the keys into a traceback.
        raise StrataError(Code.INVALID, f"{path} does not hold the keys of a link") from None
