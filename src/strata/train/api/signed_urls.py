"""Signed URLs: a client that has one can fetch a checkpoint without a key until the grant in it expires."""

from __future__ import annotations

import base64
import binascii
import hmac
import re
from typing import Final
from urllib.parse import urlencode

import msgspec
from starlette.datastructures import Headers

from strata.base.errors import Code, StrataError

_HOST: Final = re.compile(r"[A-Za-z0-9.\-_\[\]:]{1,255}")


class ArchiveGrant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    folder: str
    """Of a checkpoint, under that of all checkpoints."""
    file: str
    """One of its files; empty for all of it in an archive."""
    expires_at_s: float
    key_id: str = ""
    """Of the key that requested it; the URL ends with that key."""


def sign_token(grant: ArchiveGrant, key: bytes) -> str:
    content = msgspec.msgpack.encode(grant)
    return base64.urlsafe_b64encode(_mac(content, key) + content).decode().rstrip("=")


def verify_token(token: str, key: bytes, now_s: float) -> ArchiveGrant:
    """FORBIDDEN with the same message for everything that may be wrong."""
    refused = token_refused()
    try:
        raw = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise refused from None
    if not hmac.compare_digest(_mac(raw[32:], key), raw[:32]):
        raise refused
    grant = msgspec.msgpack.decode(raw[32:], type=ArchiveGrant)
    if grant.expires_at_s <= now_s:
        raise refused
    return grant


def token_refused() -> StrataError:
    return StrataError(Code.FORBIDDEN, "this address is not valid, or not any more", hint="request a new one")


def _mac(content: bytes, key: bytes) -> bytes:
    return hmac.digest(key, content, "sha256")


def signed_url(headers: Headers, path: str, **query: str) -> str:
    """A URL of this server, by the name that the caller reaches it by."""
    scheme = headers.get("x-forwarded-proto", "http")
    host = headers.get("host", "")
    if scheme not in ("http", "https") or not _HOST.fullmatch(host):
        raise StrataError(Code.INVALID, "the Host of the request is not a name of this server")
    return f"{scheme}://{host}{path}?{urlencode(query)}"
