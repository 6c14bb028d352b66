"""The same hub on both databases: a SQLite file, and what pg_dump writes of PostgreSQL."""

from __future__ import annotations

import asyncio
import re
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Final

from tests.shell.golden.folder import HubMeaning, pack, write_meaning
from tests.shell.golden.hub_history import SECRETS_KEY, START_S, fill
from tests.shell.golden.hub_site import open_site
from tests.support.manual_clock import ManualClock
from tests.support.postgres import PostgresDatabases, find_programs

DATABASE: Final = "hub.db"
DUMP: Final = "hub.sql"
_OF_THE_SERVER: Final = re.compile(r"^(--.*|\\(un)?restrict .*|SET transaction_timeout .*|)\n", re.MULTILINE)
"""Lines of a dump that have its version, a random key, or what older servers do not know."""


def write_hub(folder: Path, scratch: Path, databases: PostgresDatabases) -> None:
    file = scratch / "one" / DATABASE
    meaning = asyncio.run(_fill(file.parent, f"sqlite:{file}"))
    _require_rows(file)
    pack(file, folder)
    url = databases.create_database()
    try:
        assert asyncio.run(_fill(scratch / "other", url)) == meaning, "the databases differ"
        (folder / DUMP).write_text(_dump(url), encoding="utf-8")
    finally:
        databases.drop_database(url)
    write_meaning(folder, meaning)


def load_dump(dump: Path, url: str) -> None:
    options = ["--quiet", "--no-psqlrc", "--set=ON_ERROR_STOP=1", "--output=/dev/null"]
    subprocess.run([find_programs() / "psql", *options, "--dbname", url, "--file", dump], check=True)


async def _fill(data: Path, database: str) -> HubMeaning:
    async with open_site(data, database, ManualClock(START_S), secrets_key=SECRETS_KEY) as site:
        return await fill(site)


def _require_rows(file: Path) -> None:
    with closing(sqlite3.connect(file)) as db:
        tables = [name for (name,) in db.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
        empty = [name for name in tables if db.execute(f"SELECT 1 FROM {name} LIMIT 1").fetchone() is None]
    assert not empty, f"the history has nothing for {', '.join(empty)}"


def _dump(url: str) -> str:
    options = ["--no-owner", "--no-privileges", "--no-comments"]
    dumped = subprocess.run(
        [find_programs() / "pg_dump", *options, "--dbname", url], capture_output=True, text=True, check=True
    )
    return _OF_THE_SERVER.sub("", dumped.stdout)
