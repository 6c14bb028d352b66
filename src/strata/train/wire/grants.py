"""Signed URLs of the training server: what a grant allows (archive, trace), its token, expiry and signature."""

from __future__ import annotations

import base64
import hmac
from typing import Final

import msgspec

from strata.base.errors import Code, StrataError

_MAC: Final = 32
"""Bytes of the signature at the beginning of a token."""


class ArchiveGrant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, tag="archive"):
    folder: str
    """The folder of a checkpoint, under that of all checkpoints."""
    file: str
    """One of its files; empty for all of it in an archive."""
    expires_at_s: float
    key_id: str = ""
    """The key that requested it, which a hub in front of the server checks."""

    @property
    def subject(self) -> str:
        """Returns what it is about: the id of its model begins with that of a session."""
        return self.folder


class TraceGrant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, tag="trace"):
    session_id: str
    tenant: str
    expires_at_s: float
    key_id: str = ""
    """The key, as above."""

    @property
    def subject(self) -> str:
        return self.session_id


Grant = ArchiveGrant | TraceGrant
_grants: Final[msgspec.msgpack.Decoder[Grant]] = msgspec.msgpack.Decoder(Grant)


def sign_token(grant: Grant, key: bytes) -> str:
    content = msgspec.msgpack.encode(grant)
    return base64.urlsafe_b64encode(_mac(content, key) + content).decode().rstrip("=")


def verify_token(token: str, key: bytes, now_s: float) -> Grant:
    """FORBIDDEN with the same message for everything that may be wrong."""
    raw = _unpack(token)
    # Before anything of it is read.
    grant = read_grant(token) if hmac.compare_digest(_mac(raw[_MAC:], key), raw[:_MAC]) else None
    if grant is None or grant.expires_at_s <= now_s:
        raise token_refused()
    return grant


def read_grant(token: str) -> Grant | None:
    """Returns what a token claims, without a check of its signature; None if it is no token."""
    try:
        return _grants.decode(_unpack(token)[_MAC:])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _unpack(token: str) -> bytes:
    try:
        return base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
    except ValueError:
        return b""


def token_refused() -> StrataError:
    return StrataError(Code.FORBIDDEN, "this address is not valid, or not any more", hint="request a new one")


def _mac(content: bytes, key: bytes) -> bytes:
    return hmac.digest(key, content, "sha256")
