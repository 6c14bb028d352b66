"""Secrets of jobs, encrypted (AES-256-GCM) in the database: key file, at most 1,000 of a scope, SQL, and errors about
the key.

A secret belongs to an owner of jobs (its scope is `owner:NAME`) or to a project (`project:NAME`).
Each value is sealed with AES-256-GCM under its scope and name, so that a row cannot be passed off as another one. The
key is in a backup too, unless `hub.secrets_key` names another file for it.
"""

from __future__ import annotations

import base64
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from strata.base import log
from strata.base.atomic import create_file
from strata.base.errors import Code, StrataError
from strata.base.secret import Secret, read_secret
from strata.database.migrations import Component
from strata.database.transaction import Database
from strata.fleet.records import StoredSecret

KEY_FILE: Final = "secrets.key"
MAX_SECRETS: Final = 1000
"""The most secrets in one scope."""
_NONCE: Final = 12
_KEY: Final = re.compile(r"[0-9a-f]{64}")
POSTGRES: Final = Component(
    "secret",
    1,
    (
        """
        CREATE TABLE secret (
          scope text NOT NULL, name text NOT NULL, sealed text NOT NULL, changed_at double precision NOT NULL,
          changed_by text NOT NULL, PRIMARY KEY (scope, name)
        );
        """,
    ),
)
SQLITE: Final = POSTGRES.in_sqlite()
_COLUMNS: Final = "scope, name, sealed, changed_at, changed_by"
_log = log.get(__name__)


class SecretRows:
    """The table, of sealed values."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def select(self, scopes: Sequence[str]) -> Sequence[tuple[Any, ...]]:
        query = f"SELECT {_COLUMNS} FROM secret WHERE scope = ANY(:scopes) ORDER BY scope, name"
        return await self._database.rows(query, {"scopes": list(scopes)})

    async def upsert(self, row: Sequence[Any]) -> None:
        await self._database.changed(
            f"INSERT INTO secret ({_COLUMNS}) VALUES (:scope, :name, :sealed, :changed_at, :changed_by)"
            " ON CONFLICT (scope, name) DO UPDATE SET"
            " sealed = excluded.sealed, changed_at = excluded.changed_at, changed_by = excluded.changed_by",
            dict(zip(_COLUMNS.split(", "), row, strict=True)),
        )

    async def delete(self, scope: str, name: str) -> bool:
        query = "DELETE FROM secret WHERE scope = :scope AND name = :name"
        return await self._database.changed(query, {"scope": scope, "name": name}) > 0

    async def exist(self) -> bool:
        """Says whether there is any."""
        return bool(await self._database.rows("SELECT 1 FROM secret LIMIT 1"))


class SecretVault:
    """The secrets of a hub: values go in and come out, and the database sees neither."""

    def __init__(self, rows: SecretRows, key: Secret) -> None:
        self._rows = rows
        self._cipher = AESGCM(bytes.fromhex(key.reveal()))
        self._unreadable: set[tuple[str, str]] = set()
        """Those that the log has named."""

    async def put(self, scope: str, name: str, value: str, *, actor: str, now_s: float) -> None:
        there = await self._rows.select([scope])
        if len(there) >= MAX_SECRETS and name not in {row[1] for row in there}:
            raise StrataError(Code.EXHAUSTED, f"there are {MAX_SECRETS} secrets already", hint="strata secrets rm NAME")
        nonce = secrets.token_bytes(_NONCE)
        sealed = nonce + self._cipher.encrypt(nonce, value.encode(), _context(scope, name))
        await self._rows.upsert((scope, name, base64.b64encode(sealed).decode(), now_s, actor))

    async def names(self, scopes: Sequence[str]) -> Sequence[StoredSecret]:
        return [
            StoredSecret(scope=scope, name=name, changed_at_s=changed_at, changed_by=changed_by)
            for scope, name, _, changed_at, changed_by in await self._rows.select(scopes)
        ]

    async def remove(self, scope: str, name: str) -> bool:
        return await self._rows.delete(scope, name)

    async def reveal(self, scopes: Sequence[str], names: Sequence[str]) -> Mapping[str, str]:
        """The values by name, each from the first of the scopes that has it.

        A name that no scope has is left out, and so is one whose value cannot be opened: it holds up no other.
        """
        rows = {(scope, name): sealed for scope, name, sealed, *_ in await self._rows.select(scopes)}
        values = {}
        for name in names:
            scope = next((each for each in scopes if (each, name) in rows), None)
            value = None if scope is None else self._open(scope, name, rows[scope, name])
            if value is not None:
                values[name] = value
        return values

    def _open(self, scope: str, name: str, sealed: str) -> str | None:
        """None if it was sealed with another key, or as another secret."""
        try:
            content = base64.b64decode(sealed)
            return self._cipher.decrypt(content[:_NONCE], content[_NONCE:], _context(scope, name)).decode()
        except (InvalidTag, ValueError):
            if (scope, name) not in self._unreadable:
                self._unreadable.add((scope, name))
                _log.error("secret_unreadable", scope=scope, name=name, hint=f"restore {KEY_FILE}, or set it again")
            return None


def _context(scope: str, name: str) -> bytes:
    return f"{scope}\0{name}".encode()


def load_key(path: Path, *, in_use: bool) -> Secret:
    """The key in this file, made at the first start. PRECONDITION if it is missing and `in_use`: there are secrets."""
    if not path.exists():
        if in_use:
            raise StrataError(
                Code.PRECONDITION,
                f"{path} is missing, and the database has secrets that were encrypted with it",
                hint=f"restore it; or give the secrets up with a new key: (umask 077; openssl rand -hex 32 > {path})",
            )
        create_file(path, f"{secrets.token_hex(32)}\n".encode())
    key = read_secret(path)
    if not _KEY.fullmatch(key.reveal()):
        raise StrataError(Code.INVALID, f"{path} does not hold a key of 64 hexadecimal digits")
    return key
