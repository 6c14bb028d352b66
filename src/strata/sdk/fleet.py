"""The client's side of a hub: settings `[client]` (STRATA_URL …), contexts in `contexts.json`, tokens in files, pins of
authorities.

`contexts.json` names addresses and files; a token lies in a file of its own that only its owner can read, so the list
can be shown to anybody. STRATA_URL and STRATA_OPERATOR_TOKEN, or STRATA_OPERATOR_TOKEN_FILE, stand above all contexts.
"""

from __future__ import annotations

import hashlib
import http.client
import re
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from strata.base.atomic import read_json, write_file, write_json
from strata.base.errors import Code, StrataError
from strata.base.private import private_folder
from strata.base.secret import Secret, read_secret
from strata.base.settings import load
from strata.fleet.client.hub_client import RETRY_FOR_S, HubClient, TlsFiles, exchange
from strata.http import otel

SECTION: Final = "client"
ALIASES: Final = {
    "STRATA_URL": "url",
    "STRATA_OPERATOR_TOKEN": "token",
    "STRATA_OPERATOR_TOKEN_FILE": "token_path",
    "XDG_CONFIG_HOME": "config_home",
    "APPDATA": "config_home",
    "XDG_DATA_HOME": "data_home",
    "LOCALAPPDATA": "data_home",
}
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class ClientSettings(msgspec.Struct, frozen=True, kw_only=True):
    url: str = ""
    """The URL of the hub. Empty: that of the context."""
    token: Secret | None = None
    """An API key or the operator token."""
    token_path: Path | None = None
    """A file with the token."""
    ca: Path | None = None
    """PEM file: the hub's authority. Unset: that of the context, or the system's."""
    context: str = ""
    """Empty: the one that was chosen last."""
    config_home: Path = Path("~/.config")
    """The folder in which `strata` has the contexts."""
    data_home: Path = Path("~/.local/share")
    """The folder in which `strata` has data, such as those of `strata up`."""

    @property
    def folder(self) -> Path:
        return self.config_home.expanduser() / "strata"

    @property
    def data(self) -> Path:
        return self.data_home.expanduser() / "strata"


class ClientContext(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    url: str
    token_file: str = ""
    ca: str = ""


class Contexts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    current: str = ""
    contexts: dict[str, ClientContext] = {}


def client_settings(**flags: Any) -> ClientSettings:
    settings = load(ClientSettings, section=SECTION, file=None, flags=flags, aliases=ALIASES)
    if flags.get("token_path") is None:
        return settings
    # A file that is named for this call: a token in the environment is for another server, and must not go to this one.
    return msgspec.structs.replace(settings, token=None)


def read_contexts(settings: ClientSettings) -> Contexts:
    return read_json(settings.folder / "contexts.json", Contexts) or Contexts()


def save_context(settings: ClientSettings, name: str, context: ClientContext, *, choose: bool = True) -> None:
    """Add or replace one; from now on it is the one that is used, if `choose`."""
    _check_name(name)
    there = read_contexts(settings)
    contexts = there.contexts | {name: context}
    changed = Contexts(current=name if choose else there.current, contexts=contexts)
    write_json(private_folder(settings.folder) / "contexts.json", changed)


def choose_context(settings: ClientSettings, name: str) -> None:
    there = read_contexts(settings)
    if name not in there.contexts:
        raise _unknown(name, there)
    write_json(private_folder(settings.folder) / "contexts.json", msgspec.structs.replace(there, current=name))


def keep_secret(settings: ClientSettings, name: str, secret: Secret) -> Path:
    path = private_folder(private_folder(settings.folder) / "tokens") / _check_name(name)
    write_file(path, f"{secret.reveal()}\n".encode())
    return path


def keep_authority(settings: ClientSettings, name: str, pem: bytes) -> Path:
    path = private_folder(private_folder(settings.folder) / "authorities") / f"{_check_name(name)}.pem"
    write_file(path, pem)
    return path


def current_context(settings: ClientSettings) -> ClientContext:
    """Returns what the settings and the contexts say together."""
    there = read_contexts(settings)
    name = settings.context or ("" if settings.url else there.current)
    if name:
        context = there.contexts.get(name)
        if context is None:
            raise _unknown(name, there)
        return msgspec.structs.replace(context, url=settings.url or context.url)
    if not settings.url:
        raise StrataError(
            Code.INVALID, "no hub is chosen", hint="strata up starts one here; strata login URL chooses another"
        )
    # What is known of that address: its token must not go anywhere else, its authority is no secret.
    matches = [each for each in there.contexts.values() if each.url == settings.url]
    return matches[0] if matches else ClientContext(url=settings.url)


def connect(
    settings: ClientSettings, *, timeout_s: float = 30.0, server: str = "hub", retry_for_s: float = RETRY_FOR_S
) -> HubClient:
    otel.follow_program()
    context = current_context(settings)
    ca = authority_of(settings, context)
    tls = TlsFiles(ca=ca) if ca is not None and context.url.startswith("https:") else None
    bearer = token_of(settings, context)
    return HubClient(context.url, bearer=bearer, tls=tls, timeout_s=timeout_s, server=server, retry_for_s=retry_for_s)


def authority_of(settings: ClientSettings, context: ClientContext) -> Path | None:
    return settings.ca or (Path(context.ca) if context.ca else None)


def token_of(settings: ClientSettings, context: ClientContext) -> Secret | None:
    """The credential for the server of the context."""
    if settings.token is not None:
        return settings.token
    if settings.token_path is not None:
        return read_secret(settings.token_path)
    return read_secret(Path(context.token_file)) if context.token_file else None


def fetch_authority(url: str, *, timeout_s: float = 10.0) -> bytes:
    """The certificate of the authority that a hub names. Nothing about it is proven: compare its pin."""
    at = urlsplit(url)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        connection = http.client.HTTPSConnection(at.hostname or "", at.port, timeout=timeout_s, context=context)
        try:
            reply = exchange(connection, "GET", at.path.rstrip("/") + "/v1/ca", None, {})
        finally:
            connection.close()
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise StrataError(Code.UNAVAILABLE, f"the hub at {at.netloc} cannot be reached: {error}") from error
    if reply.status != 200:
        raise StrataError(Code.UNAVAILABLE, f"{at.netloc} has no authority to show: status {reply.status}")
    return reply.content


def pin_of(pem: bytes) -> str:
    """SHA-256 of the certificate, as join tokens carry it."""
    try:
        return hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem.decode("ascii"))).hexdigest()
    except ValueError:
        raise StrataError(Code.INVALID, "this is not a certificate in PEM") from None


def check_pin(pem: bytes, pin: str, url: str) -> None:
    if pin_of(pem) != pin.lower().replace(":", ""):
        raise StrataError(
            Code.FORBIDDEN,
            f"{urlsplit(url).netloc} is not the hub that was meant: its authority has another pin",
            hint="another machine may intercept the connection; compare the pin with the hub's operator",
        )


def shown_contexts(settings: ClientSettings) -> list[Mapping[str, Any]]:
    there = read_contexts(settings)
    return [
        {"name": name, "url": context.url, "current": name == there.current, "token_file": context.token_file or None}
        for name, context in sorted(there.contexts.items())
    ]


def _check_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise StrataError(Code.INVALID, f"{name[:80]!r} cannot be the name of a context", hint="letters, digits, .-_")
    return name


def _unknown(name: str, there: Contexts) -> StrataError:
    known = ", ".join(sorted(there.contexts)) or "none"
    return StrataError(Code.INVALID, f"there is no context {name[:80]!r}", hint=f"there are: {known}")
