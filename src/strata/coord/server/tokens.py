"""Tokens of workers and operators of a job: format `strata1.CLAIMS.SIGNATURE`, signing, expiry, renewal, least length
of the secret, and the file of revoked ones.

A token is `strata1.CLAIMS.SIGNATURE`: claims as JSON and an HMAC-SHA256 of all before the last point, in base64url.
"""

from __future__ import annotations

import base64
import binascii
import hmac
from enum import StrEnum
from math import inf
from pathlib import Path
from typing import Final

import msgspec

from strata.base.clock import Clock
from strata.base.errors import Code, StrataError
from strata.base.secret import Secret

PREFIX: Final = "strata1"
ALL_JOBS: Final = "*"
"""The job of an operator's token that is for all jobs of a coordinator."""
MIN_SECRET: Final = 32
"""Characters: a shorter secret could be guessed from one token."""
MAX_TOKEN: Final = 4_096
REVOKED_CHECK_S: Final = 1.0


class TokenRole(StrEnum):
    WORKER = "worker"
    OPERATOR = "operator"


class Claims(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    job: str
    role: TokenRole
    expires_s: int
    """Wall time."""
    worker: str = ""
    """Empty: any worker of the job."""
    id: str = ""
    """The id that revokes it; a renewed token keeps it. Empty: it cannot be revoked."""
    issued_s: int = 0
    """Wall time."""
    renew_until_s: int = 0
    """Wall time: no renewal is good for longer than this. 0: it is not renewed."""

    def renewed(self, wall_s: float) -> Claims | None:
        """The claims of its successor, once half of its time has passed; None: not yet, or never."""
        halfway_s = (self.issued_s + self.expires_s) / 2
        expires_s = min(round(wall_s) + self.expires_s - self.issued_s, self.renew_until_s)
        if wall_s < halfway_s or expires_s <= self.expires_s:
            return None
        return msgspec.structs.replace(self, issued_s=round(wall_s), expires_s=expires_s)


_encode = msgspec.json.Encoder(order="deterministic").encode
_decode = msgspec.json.Decoder(Claims).decode


class Tokens:
    """Issues and verifies tokens of one secret."""

    def __init__(self, secret: Secret) -> None:
        key = secret.reveal()
        if len(key) < MIN_SECRET:
            raise StrataError(
                Code.INVALID,
                f"the secret of the tokens needs at least {MIN_SECRET} characters",
                hint="openssl rand -hex 32 > FILE; chmod 600 FILE",
            )
        self._key = key.encode()

    def issue(self, claims: Claims) -> str:
        if not claims.job:
            raise StrataError(Code.INVALID, "a token needs a job")
        if claims.job == ALL_JOBS and claims.role is not TokenRole.OPERATOR:
            raise StrataError(Code.INVALID, "only an operator's token can be for all jobs")
        if claims.worker and claims.role is not TokenRole.WORKER:
            raise StrataError(Code.INVALID, "only a worker's token can be bound to a worker")
        head = f"{PREFIX}.{_encode_base64(_encode(claims))}"
        return f"{head}.{_encode_base64(self._sign(head))}"

    def read(self, token: str, wall_s: float) -> Claims:
        """The claims of a token that is ours and has not expired; else UNAUTHENTICATED."""
        head, _, signature = token.rpartition(".")
        if len(token) > MAX_TOKEN or not head.startswith(f"{PREFIX}."):
            raise _not_ours()
        try:
            # The signature comes first: nothing of a forged token is ever parsed.
            if not hmac.compare_digest(self._sign(head), _decode_base64(signature)):
                raise _not_ours()
            claims = _decode(_decode_base64(head.removeprefix(f"{PREFIX}.")))
        except (binascii.Error, ValueError, msgspec.MsgspecError):
            raise _not_ours() from None
        if wall_s >= claims.expires_s:
            raise StrataError(Code.UNAUTHENTICATED, "the token has expired", hint="get a new one")
        return claims

    def _sign(self, head: str) -> bytes:
        return hmac.digest(self._key, head.encode("utf-8", "surrogatepass"), "sha256")


class RevokedTokens:
    """The ids in a file, one on a line, read again within a second of a change."""

    def __init__(self, file: Path, clock: Clock) -> None:
        self._file = file
        self._clock = clock
        self._checked_s = -inf
        self._stamp: tuple[int, int] | None = None
        self._ids: frozenset[str] = frozenset()
        self._reload()

    def __contains__(self, token_id: object) -> bool:
        if self._clock.monotonic_s() >= self._checked_s + REVOKED_CHECK_S:
            self._reload()
        return token_id in self._ids

    def _reload(self) -> None:
        """UNAVAILABLE, each time, as long as there is a file that cannot be read: it may revoke anyone."""
        now_s = self._clock.monotonic_s()
        try:
            status = self._file.stat()
            stamp = status.st_mtime_ns, status.st_size
            if stamp != self._stamp:
                self._ids = frozenset(self._file.read_text(encoding="utf-8").split())
                self._stamp = stamp
        except FileNotFoundError:
            # Nothing has been revoked yet. A file that vanishes later revokes what it did.
            pass
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text"
            raise StrataError(Code.UNAVAILABLE, f"cannot read the revoked tokens in {self._file}: {reason}") from error
        self._checked_s = now_s


def _not_ours() -> StrataError:
    return StrataError(Code.UNAUTHENTICATED, "the token is not one of ours")


def _encode_base64(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


def _decode_base64(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars="-_", validate=True)
