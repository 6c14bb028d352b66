"""Addresses of databases: `sqlite:PATH`, a bare path, or `postgresql://…`."""

from __future__ import annotations

from pathlib import Path

from strata.base.errors import Code, StrataError


def is_postgres(database: str) -> bool:
    scheme, separator, _ = database.partition(":")
    return scheme in ("postgresql", "postgres") and bool(separator)


def sqlite_file(database: str) -> Path:
    """The file that `sqlite:PATH` or a bare path names; INVALID for any other database."""
    scheme, separator, rest = database.partition(":")
    if "://" in database or not database:
        raise StrataError(
            Code.INVALID,
            f"{scheme + '://…' if scheme else 'nothing'} is not a database Strata knows",
            hint="use sqlite:PATH or postgresql://USER@HOST/NAME",
        )
    return Path(rest if scheme == "sqlite" and separator else database)
