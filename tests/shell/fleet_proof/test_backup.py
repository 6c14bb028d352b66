"""Backup, restore and move: nothing is missing, and no host from before a restore can write."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import pytest

from strata.base.errors import Code, StrataError
from strata.database import events
from strata.database.migrations import SqliteComponents, upgrade_postgres
from strata.database.postgres import Connections
from strata.database.sqlite import SqliteThread
from strata.database.transaction import PostgresDatabase, SqliteDatabase
from strata.fleet.artifacts import tables as artifact_tables
from strata.fleet.core.job import Cause, JobStatus
from strata.fleet.ports import Store
from strata.fleet.records import AttemptKey, JobCompletion, JobFailure, Renewal
from strata.fleet.store import migrate
from strata.fleet.store.backup import EPOCHS, backup_sqlite, fence, restore_sqlite
from strata.fleet.store.postgres import tables as postgres_tables
from strata.fleet.store.postgres.store import build_postgres_store
from strata.fleet.store.sqlite import tables as sqlite_tables
from strata.fleet.store.sqlite.store import build_sqlite_store
from strata.hub import cursor_store
from strata.identity import store as identity_store
from strata.identity.records import ApiKey, Invite
from strata.identity.roles import Role
from tests.conformance.fleet.fleet import LEASE_S, add, add_host, claim, hold, job, marker, refusal
from tests.shell.fleet_proof.histories import rows
from tests.support.feed import ARRIVES_S, told_before

SQLITE: Final = (
    events.SQLITE,
    identity_store.SQLITE,
    sqlite_tables.COMPONENT,
    artifact_tables.SQLITE,
    cursor_store.SQLITE,
)
POSTGRES: Final = (
    events.POSTGRES,
    identity_store.POSTGRES,
    postgres_tables.COMPONENT,
    artifact_tables.POSTGRES,
    cursor_store.POSTGRES,
)
DONE: Final = JobCompletion(artifact="art1", metrics={"auc": 0.9})


async def open_thread(path: Path) -> SqliteThread:
    return await SqliteThread.open(path, SqliteComponents(SQLITE))


@pytest.fixture
async def thread(tmp_path: Path) -> AsyncIterator[SqliteThread]:
    opened = await open_thread(tmp_path / "hub.db")
    yield opened
    await opened.close()


@pytest.fixture
async def connections(postgres_url: str) -> AsyncIterator[Connections]:
    opened = Connections(postgres_url, 4, 60.0, what="hub")
    async with opened.acquire() as connection:
        await upgrade_postgres(connection, POSTGRES)
    yield opened
    await opened.close()


async def live_a_little(store: Store) -> dict[str, AttemptKey]:
    """One job of each kind: completed, running, expired, in a back-off, waiting for another, cancelled, untouched."""
    for host in ("host_a", "host_b"):
        await add_host(store, host)
    names = ("done", "running", "expired", "broken", "gone", "fresh")
    specs = {name: job(name, priority=9 - n) for n, name in enumerate(names)}
    await add(store, *specs.values(), job("later", after=(specs["running"].id,)))
    holds = {lease.spec.model: hold(lease) for lease in await claim(store, count=4)}
    await store.leases.complete(holds["done"], DONE, 1.0)
    await store.leases.fail(holds["broken"], JobFailure(cause=Cause.USER_ERROR, error="no"), 1.0, chance=0.0)
    await store.jobs.cancel(specs["gone"].id, "not needed", "operator", 1.0)
    await store.leases.renew("host_a", [Renewal(job_id=specs["running"].id, epoch=1, running=True)], LEASE_S, 5.0)
    await store.leases.expire(LEASE_S)
    return holds


async def test_a_backup_of_a_busy_database_is_whole_and_keeps_what_was_confirmed(
    thread: SqliteThread, tmp_path: Path
) -> None:
    store = build_sqlite_store(thread)
    await add_host(store)
    await add(store, *(job("m", seed=n) for n in range(40)))
    confirmed: list[str] = []

    async def work(number: int) -> None:
        for turn in range(10):
            (lease,) = await claim(store, claim_id=f"c{number}.{turn}", now_s=1.0)
            await store.leases.complete(hold(lease), DONE, 2.0)
            confirmed.append(lease.job_id)

    working = [asyncio.create_task(work(number)) for number in range(4)]
    while len(confirmed) < 10:
        await store.statistics.counts()
    before = list(confirmed)
    size = await backup_sqlite(thread, tmp_path / "copy.db", 3.0)
    await asyncio.gather(*working)
    assert size == (tmp_path / "copy.db").stat().st_size
    restore_sqlite(tmp_path / "copy.db", tmp_path / "again.db", SQLITE, 4.0)
    again = build_sqlite_store(await open_thread(tmp_path / "again.db"))
    statuses = [(await again.jobs.get(job_id)).status for job_id in before]
    await again.close()
    assert set(statuses) == {JobStatus.COMPLETED}


async def test_a_backup_is_not_served_from_and_overwrites_nothing(thread: SqliteThread, tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    await backup_sqlite(thread, copy, 3.0)
    with pytest.raises(StrataError, match="restore it"):
        await open_thread(copy)
    assert (await refusal(backup_sqlite(thread, copy, 4.0))).code is Code.CONFLICT
    assert (await refusal(backup_sqlite(thread, tmp_path / "no" / "copy.db", 4.0))).code is Code.UNAVAILABLE
    # The database that was copied is none the worse for it.
    await add_host(build_sqlite_store(thread))
    with pytest.raises(StrataError, match="there already"):
        restore_sqlite(copy, tmp_path / "hub.db", SQLITE, 4.0)
    with pytest.raises(StrataError, match="is not a backup"):
        restore_sqlite(await plain_file(tmp_path), tmp_path / "again.db", SQLITE, 4.0)


@pytest.mark.parametrize("left", ["-wal", "-journal"])
async def test_nothing_is_restored_beside_the_log_of_a_database_that_was_moved_away(
    thread: SqliteThread, tmp_path: Path, left: str
) -> None:
    copy, again = tmp_path / "copy.db", tmp_path / "again.db"
    await backup_sqlite(thread, copy, 3.0)
    # As a hub that was killed leaves it. SQLite would play it back onto whatever has this name, and undo the fence.
    await add_host(build_sqlite_store(thread))
    shutil.copy(tmp_path / "hub.db-wal", f"{again}{left}")
    with pytest.raises(StrataError, match=f"again.db{left} is there already") as refused:
        restore_sqlite(copy, again, SQLITE, 4.0)
    assert refused.value.code is Code.CONFLICT
    assert not again.exists()


async def plain_file(folder: Path) -> Path:
    path = folder / "plain.db"
    await (await open_thread(path)).close()
    return path


async def test_a_damaged_backup_is_refused_and_leaves_no_file(thread: SqliteThread, tmp_path: Path) -> None:
    await add(build_sqlite_store(thread), *(job("m", seed=n) for n in range(200)))
    copy = tmp_path / "copy.db"
    await backup_sqlite(thread, copy, 3.0)
    whole = bytearray(copy.read_bytes())
    middle = len(whole) // 2
    whole[middle : middle + 4096] = bytes(4096)
    copy.write_bytes(whole)
    with pytest.raises(StrataError) as refused:
        restore_sqlite(copy, tmp_path / "again.db", SQLITE, 4.0)
    assert refused.value.code is Code.CORRUPT
    assert sorted(path.name for path in tmp_path.iterdir() if "again" in path.name) == []


async def check_fenced(store: Store, holds: dict[str, AttemptKey]) -> None:
    """Nobody from before can write, and everything that was not finished can be claimed."""
    for held in holds.values():
        if held != holds["done"]:
            assert (await refusal(store.leases.complete(held, JobCompletion(artifact="late"), 60.0))).code is Code.STALE
        (renewed,) = await store.leases.renew(
            held.host_id, [Renewal(job_id=held.job_id, epoch=held.epoch)], LEASE_S, 60.0
        )
        assert renewed.verdict == "stale"
    assert (await store.leases.complete(holds["done"], DONE, 60.0)).status is JobStatus.COMPLETED
    await store.leases.release_backoffs(1000.0)
    leases = await claim(store, "host_b", claim_id="after", count=9, now_s=1000.0)
    assert sorted(lease.spec.model for lease in leases) == ["broken", "expired", "fresh", "running"]
    assert {lease.epoch for lease in leases} == {EPOCHS + 1, EPOCHS + 2}
    for lease in leases:
        await store.leases.complete(hold(lease), DONE, 1001.0)
    (later,) = await claim(store, "host_b", claim_id="last", now_s=1002.0)
    assert later.spec.model == "later"


async def test_hosts_from_after_a_backup_are_fenced_by_its_restore(thread: SqliteThread, tmp_path: Path) -> None:
    store = build_sqlite_store(thread)
    holds = await live_a_little(store)
    identity = identity_store.IdentityStore(SqliteDatabase(thread))
    await identity.add_invite(Invite("inv1", "hash", 0.0, 1e9), "operator")
    newest = (await store.events.read("", 1000))[-1].cursor
    await backup_sqlite(thread, tmp_path / "copy.db", 50.0)
    # What the backup does not know of: the next attempts, of the same host too.
    for lease in await claim(store, "host_a", claim_id="unknown", count=9, now_s=51.0):
        holds[f"unknown {lease.spec.model}"] = hold(lease)
    restore_sqlite(tmp_path / "copy.db", tmp_path / "again.db", SQLITE, 52.0)
    opened = await open_thread(tmp_path / "again.db")
    restored = build_sqlite_store(opened)
    await check_fenced(restored, holds)
    told = await restored.events.read(newest, 1000)
    assert told[0].event.kind == "hub.restored"
    assert int(told[0].cursor) > 1_000_000_000
    invites = await restored.database.rows("SELECT id, revoked_at FROM identity_invite")
    await opened.close()
    assert invites == [("inv1", 52.0)]


async def test_a_restored_postgres_database_is_fenced_the_same_way(connections: Connections) -> None:
    store = build_postgres_store(connections)
    holds = await live_a_little(store)
    # As if it came from a server that had run many more transactions.
    await connections.write("UPDATE event SET tx = tx + 1000000000", {})
    assert await store.events.read("", 1000) == []
    await PostgresDatabase(connections).run(lambda tx: fence(tx, 52.0))
    await check_fenced(store, holds)
    told = [each.event.kind for each in await told_before(await marker(store), store.events.read)]
    assert told[0] == "host.registered"
    assert told.index("hub.restored") < len(told) - 1


async def everything(store: Store) -> dict[str, list[tuple[Any, ...]]]:
    tables = {
        "job": "id, spec, status, epoch, created_at, host_id, reason, artifact, declared, orphaned, waits_for, lost",
        "attempt": "job_id, epoch, host_id, claim_id, outcome, cause, error, facts",
        "lease": "job_id, host_id, epoch, expires_at, expired",
        "event": "seq, at, actor, kind, subject, body",
        "identity_key": "id, name, role, secret_hash",
    }
    found = {}
    for table, columns in tables.items():
        lines = await rows(store, f"SELECT {columns} FROM {table}")
        found[table] = sorted(tuple(int(v) if isinstance(v, bool) else v for v in line) for line in lines)
    return found


async def test_a_database_moves_to_postgres_and_back_with_every_row(
    thread: SqliteThread, connections: Connections, tmp_path: Path
) -> None:
    here, there = build_sqlite_store(thread), build_postgres_store(connections)
    holds = await live_a_little(here)
    identity = identity_store.IdentityStore(SqliteDatabase(thread))
    await identity.add_key(ApiKey("k1", "me", Role.ADMIN, "hash", 1.0), "operator")
    before = await everything(here)
    moved = await migrate.to_postgres(thread, connections, 60.0)
    assert moved.rows["job"] == 7
    assert await everything(there) == before
    # Who worked goes on working, and new rows are numbered after the old ones.
    (renewed,) = await there.leases.renew("host_a", [Renewal(job_id=holds["running"].job_id, epoch=1)], LEASE_S, 46.0)
    assert renewed.verdict == "held"
    (new,) = await add(there, job("new"), now_s=47.0)
    assert (await told_before(new, there.events.read))[0].event.kind == "host.registered"
    back = await open_thread(tmp_path / "back.db")
    await migrate.to_sqlite(connections, back)
    after, once_more = await everything(there), await everything(build_sqlite_store(back))
    leases = await claim(build_sqlite_store(back), "host_b", claim_id="back", count=9, now_s=48.0)
    await back.close()
    assert once_more == after
    assert {lease.spec.model for lease in leases} == {"expired", "fresh", "new"}


async def read_on(store: Store, known: cursor_store.CursorStore) -> list[str]:
    """What a webhook is told next. PostgreSQL shows an event only when nothing older is under way."""
    async with asyncio.timeout(ARRIVES_S):
        while not (told := await store.events.read(await known.cursor("hook") or "", 1000)):
            pass
    await known.put_cursor("hook", told[-1].cursor)
    return [each.event.subject for each in told]


async def test_a_webhook_goes_on_where_it_was_when_the_database_moves(
    thread: SqliteThread, connections: Connections, tmp_path: Path
) -> None:
    here, there = build_sqlite_store(thread), build_postgres_store(connections)
    await add_host(here, "host_a")
    await cursor_store.CursorStore(SqliteDatabase(thread)).put_cursor("new", "")
    assert await read_on(here, cursor_store.CursorStore(SqliteDatabase(thread))) == ["host_a"]
    await add_host(here, "host_b")
    await migrate.to_postgres(thread, connections, 60.0)
    assert await read_on(there, cursor_store.CursorStore(PostgresDatabase(connections))) == ["host_b"]
    await add_host(there, "host_c")
    assert await read_on(there, cursor_store.CursorStore(PostgresDatabase(connections))) == ["host_c"]
    await add_host(there, "host_d")
    back = await open_thread(tmp_path / "back.db")
    await migrate.to_sqlite(connections, back)
    told = await read_on(build_sqlite_store(back), cursor_store.CursorStore(SqliteDatabase(back)))
    fresh = await cursor_store.CursorStore(SqliteDatabase(back)).cursor("new")
    await back.close()
    assert told == ["host_d"]
    assert fresh == ""


async def test_a_webhook_goes_on_where_it_was_when_postgres_is_restored(connections: Connections) -> None:
    store, known = build_postgres_store(connections), cursor_store.CursorStore(PostgresDatabase(connections))
    await add_host(store, "host_a")
    assert await read_on(store, known) == ["host_a"]
    await add_host(store, "host_b")
    # As if it came from a server that had run many more transactions.
    await connections.write("UPDATE event SET tx = tx + 1000000000", {})
    await connections.write(
        "UPDATE hub_cursor SET cursor = (split_part(cursor, '.', 1)::bigint + 1000000000) || '.'"
        " || split_part(cursor, '.', 2)",
        {},
    )
    await PostgresDatabase(connections).run(lambda tx: fence(tx, 52.0))
    told = await read_on(store, known)
    assert told[0] == "host_b"
    assert set(told) <= {"host_b", "hub"}


async def test_a_database_that_was_moved_is_not_served_from_again(
    thread: SqliteThread, connections: Connections, tmp_path: Path
) -> None:
    await migrate.to_postgres(thread, connections, 60.0)
    await thread.close()
    with pytest.raises(StrataError, match="moved to PostgreSQL"):
        await open_thread(tmp_path / "hub.db")


async def test_nothing_is_moved_into_a_database_that_has_rows(thread: SqliteThread, connections: Connections) -> None:
    await add_host(build_postgres_store(connections))
    await add_host(build_sqlite_store(thread))
    assert (await refusal(migrate.to_postgres(thread, connections, 60.0))).code is Code.CONFLICT
    await connections.write("DROP TABLE artifact_metric", {})
    assert (await refusal(migrate.to_postgres(thread, connections, 60.0))).code is Code.PRECONDITION


async def test_a_row_that_changes_on_its_way_is_noticed(thread: SqliteThread, connections: Connections) -> None:
    await add_host(build_sqlite_store(thread))
    await connections.write("CREATE FUNCTION worse() RETURNS trigger LANGUAGE plpgsql AS"
                            " $$ BEGIN NEW.name = 'other'; RETURN NEW; END $$", {})  # fmt: skip
    await connections.write("CREATE TRIGGER worse BEFORE INSERT ON host FOR EACH ROW EXECUTE FUNCTION worse()", {})
    assert (await refusal(migrate.to_postgres(thread, connections, 60.0))).code is Code.CORRUPT
    assert await connections.run("SELECT count(*) FROM host", {}) == [(0,)]


def test_a_file_that_is_no_database_is_not_restored(tmp_path: Path) -> None:
    (tmp_path / "noise").write_bytes(b"noise" * 1000)
    with pytest.raises(StrataError):
        restore_sqlite(tmp_path / "noise", tmp_path / "again.db", SQLITE, 4.0)
    with pytest.raises(StrataError, match="there is no backup"):
        restore_sqlite(tmp_path / "nothing", tmp_path / "again.db", SQLITE, 4.0)
    assert not (tmp_path / "again.db").exists()
