"""Databases of earlier versions are served from: what was true of them still is, and their leases are fenced."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from strata.base.errors import Code, StrataError
from strata.database.migrations import Component
from strata.database.transaction import PostgresDatabase
from strata.fleet.store.backup import EPOCHS, fence, restore_sqlite
from strata.hub.tables import SQLITE, open_tables, postgres_components, postgres_connections, upgrade_existing
from strata.identity.tokens import KEY_PREFIX
from tests.shell.golden.folder import HubMeaning, contains, read_meaning, unpack
from tests.shell.golden.hub_files import DATABASE, DUMP, load_dump
from tests.shell.golden.hub_site import Site, open_site
from tests.support.manual_clock import ManualClock


@pytest.fixture
def meaning(part: Path) -> HubMeaning:
    return read_meaning(part, HubMeaning)


@pytest.fixture(params=["sqlite", "postgres"])
def database(part: Path, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of a copy."""
    if request.param == "sqlite":
        return f"sqlite:{unpack(part / f'{DATABASE}.gz', tmp_path)}"
    url = str(request.getfixturevalue("postgres_url"))
    load_dump(part / DUMP, url)
    return url


@pytest.fixture
async def site(database: str, meaning: HubMeaning, tmp_path: Path) -> AsyncIterator[Site]:
    """A hub of this version on it, a moment after the one that wrote it."""
    clock = ManualClock(meaning.at_s)
    async with open_site(tmp_path / "data", database, clock, secrets_key=meaning.secrets_key) as opened:
        yield opened


async def test_jobs_hosts_and_all_that_people_declared_are_as_they_were(site: Site, meaning: HubMeaning) -> None:
    assert contains(await site.describe(), meaning.description)


async def test_a_host_goes_on_with_its_lease_and_no_other_epoch_counts(site: Site, meaning: HubMeaning) -> None:
    job = meaning.description["jobs"]["running"]
    host = await site.bearer(meaning.hosts["desk"])
    held = {"job_id": job["id"], "epoch": job["epoch"], "running": True}
    older = {**held, "epoch": job["epoch"] + 1}
    verdicts = (await host.post("/v1/heartbeats", {"leases": [held, older]}))["verdicts"]
    assert [(each["verdict"], each["cause"]) for each in verdicts] == [("continue", ""), ("stop", "stale")]
    complete = f"/v1/job/{job['id']}/complete"
    assert (await host.refused(complete, {"epoch": job["epoch"] + 1})) == "stale"
    assert (await (await site.bearer(meaning.hosts["pi"])).refused(complete, {"epoch": job["epoch"]})) == "stale"
    assert (await host.post(complete, {"epoch": job["epoch"]}))["status"] == "completed"


async def test_a_host_gets_the_job_that_it_was_reserved_for(site: Site, meaning: HubMeaning) -> None:
    ((host_id, job_id, _),) = meaning.description["reserved"]
    (name,) = [name for name, host in meaning.description["hosts"].items() if host["id"] == host_id]
    host = await site.bearer(meaning.hosts[name])
    (lease,) = (await host.post("/v1/job/claim", {"claim_id": "later"}))["leases"]
    before = next(each for each in meaning.description["jobs"].values() if each["id"] == job_id)
    assert (lease["job_id"], lease["epoch"]) == (job_id, before["epoch"] + 1)
    assert lease["secrets"] == meaning.secrets["project:default"]


async def test_a_key_is_known_by_its_secret_alone(site: Site, meaning: HubMeaning) -> None:
    caller = await (await site.bearer(meaning.key)).get("/v1/caller")
    assert (caller["name"], caller["role"], caller["owner"]) == ("alice", "researcher", "alice")
    _, key_id, secret = meaning.key.split("-")
    guessed = await site.bearer(f"{KEY_PREFIX}-{key_id}-{secret[::-1]}")
    assert await guessed.refused("/v1/login/code") == "unauthenticated"


async def test_secrets_are_opened_by_the_key_that_lay_beside_the_database(site: Site, meaning: HubMeaning) -> None:
    for scope, values in meaning.secrets.items():
        assert await site.hub.context.secrets.reveal([scope], list(values)) == values
    alice = await site.bearer(meaning.key)
    (subscription,) = (await alice.get("/v1/subscriptions"))["subscriptions"]
    assert subscription["service"] == "ntfy"


async def test_a_restored_copy_is_fenced_and_keeps_its_events(
    database: str, meaning: HubMeaning, tmp_path: Path
) -> None:
    restored = await restore(database, tmp_path, meaning.at_s)
    clock = ManualClock(meaning.at_s)
    async with open_site(tmp_path / "data", restored, clock, secrets_key=meaning.secrets_key) as site:
        events = await site.events()
        assert events[: len(meaning.events)] == meaning.events
        assert "hub.restored" in events[len(meaning.events)]
        now, before = (await site.describe())["jobs"], meaning.description["jobs"]
        assert {name: each["epoch"] for name, each in now.items()} == {
            name: each["epoch"] + EPOCHS for name, each in before.items()
        }
        assert {now[name]["status"] for name in ("running", "claimed", "server")} == {"pending"}
        host = await site.bearer(meaning.hosts["desk"])
        complete = f"/v1/job/{before['running']['id']}/complete"
        assert await host.refused(complete, {"epoch": before["running"]["epoch"]}) == "stale"


async def restore(database: str, folder: Path, now_s: float) -> str:
    """As `strata restore` does; on PostgreSQL the dump was loaded before."""
    if database.startswith("sqlite:"):
        async with open_tables(database) as tables:
            assert tables.copy is not None
            await tables.copy(folder / "backup.db", now_s)
        await asyncio.to_thread(restore_sqlite, folder / "backup.db", folder / "restored.db", SQLITE, now_s)
        return f"sqlite:{folder / 'restored.db'}"
    async with postgres_connections(database) as connections:
        await upgrade_existing(connections)
        await PostgresDatabase(connections).run(lambda tx: fence(tx, now_s))
    return database


async def test_tables_with_another_number_are_refused(database: str) -> None:
    for component in SQLITE if database.startswith("sqlite:") else postgres_components():
        # 0 is that of tables which are not there yet.
        smaller = {component.first - 1: "an unreleased"} if component.first > 1 else {}
        for number, version in {**smaller, component.version + 1: "a newer"}.items():
            renumber(database, component, number)
            with pytest.raises(StrataError) as refused:
                async with open_tables(database):
                    pass
            assert refused.value.code is Code.UNSUPPORTED
            assert f"of {component.name}: schema {number} of {version} version" in refused.value.message
        renumber(database, component, component.version)


def renumber(database: str, component: Component, number: int) -> None:
    if database.startswith("sqlite:"):
        with closing(sqlite3.connect(database.removeprefix("sqlite:"), isolation_level=None)) as db:
            db.execute("UPDATE strata_schema SET version = ? WHERE component = ?", (number, component.name))
        return
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("UPDATE strata_schema SET version = %s WHERE component = %s", (number, component.name))
