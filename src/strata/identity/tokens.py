"""The formats of credentials (`tml-` API keys, `hst-` host secrets, `fj1.` join tokens): prefixes, lengths, hashes, and
the required strength of an operator token.

`tml-ID-SECRET`, `hst-ID-SECRET`, `fj1.CA_SHA256.ID.SECRET`. The id finds the row; the row keeps a hash of the secret.
A secret has 160 random bits, so a plain SHA-256 of it cannot be reversed by guessing, and costs nothing per request.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass
from typing import Final

from strata.base.errors import Code, StrataError
from strata.base.secret import Secret

KEY_PREFIX: Final = "tml"
HOST_PREFIX: Final = "hst"
PRIVILEGED: Final = "op_"
"""How the id of a key of an operator or an admin begins."""
_SECRET_BYTES: Final = 20
_ID_BYTES: Final = 6
_FEWEST_CHARACTERS: Final = 20
_FEWEST_DIFFERENT: Final = 8
_BEARER: Final = re.compile(rf"({KEY_PREFIX}|{HOST_PREFIX})-([0-9a-z_]{{4,64}})-([0-9a-f]{{40}})")
_JOIN: Final = re.compile(r"fj1\.([0-9a-f]{64})\.([0-9a-f]{12})\.([0-9a-f]{40})")


@dataclass(frozen=True)
class Bearer:
    """The parsed bearer token of an Authorization header."""

    kind: str
    id: str
    secret_hash: str


@dataclass(frozen=True)
class JoinToken:
    ca_sha256: str
    """Pin of the hub's authority: compared before anything secret is sent."""
    id: str
    secret: Secret

    def spell(self) -> str:
        return f"fj1.{self.ca_sha256}.{self.id}.{self.secret.reveal()}"


def new_id() -> str:
    return secrets.token_hex(_ID_BYTES)


def new_secret() -> Secret:
    return Secret(secrets.token_hex(_SECRET_BYTES))


def hash_secret(secret: Secret) -> str:
    return hashlib.sha256(secret.reveal().encode()).hexdigest()


def same_hash(one: str, other: str) -> bool:
    return hmac.compare_digest(one, other)


def check_strength(token: Secret) -> Secret:
    """INVALID for an operator token that could be guessed: a person may have chosen it."""
    text = token.reveal()
    if len(text) < _FEWEST_CHARACTERS or len(set(text)) < _FEWEST_DIFFERENT:
        raise StrataError(
            Code.INVALID,
            f"the operator token can be guessed: it needs {_FEWEST_CHARACTERS} characters, {_FEWEST_DIFFERENT} of them"
            " different",
            hint="leave it out, and one is made; or take the output of: openssl rand -hex 24",
        )
    return token


def new_key_id(*, privileged: bool) -> str:
    """Makes an id. That of a key that may do more than a researcher says so, so that a client can tell before it sends
    the key."""
    return (PRIVILEGED if privileged else "") + new_id()


def is_scoped_key(secret: Secret) -> bool:
    """A key of a viewer or a researcher; not one of an operator, nor a host's secret, nor the operator token."""
    text = secret.reveal()
    return text.startswith(f"{KEY_PREFIX}-") and not text.startswith(f"{KEY_PREFIX}-{PRIVILEGED}")


def spell_key(id_: str, secret: Secret) -> str:
    return f"{KEY_PREFIX}-{id_}-{secret.reveal()}"


def spell_host_secret(host_id: str, secret: Secret) -> str:
    return f"{HOST_PREFIX}-{host_id}-{secret.reveal()}"


def read_bearer(text: str) -> Bearer | None:
    """None when it is not of our form at all; whether it is valid is for its row to say."""
    found = _BEARER.fullmatch(text)
    return None if found is None else Bearer(found[1], found[2], hash_secret(Secret(found[3])))


def read_join_token(text: str) -> JoinToken:
    found = _JOIN.fullmatch(text.strip())
    if found is None:
        # The text itself stays out of the message: it may be a real token with one character missing.
        raise StrataError(Code.INVALID, "this is not a join token", hint="copy all that `strata invite` printed")
    return JoinToken(found[1], found[2], Secret(found[3]))
