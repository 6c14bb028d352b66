"""A database from before trainers had digests: its jobs get the digest of the trainer that they name."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from strata.database import events
from strata.database.migrations import Component, SqliteComponents, upgrade_postgres
from strata.database.postgres import Connections
from strata.database.sqlite import SqliteThread
from strata.fleet.core.jobspec import HostSpec, TrainerSpec
from strata.fleet.core.plan import HostPolicy, RegisteredTrainer
from strata.fleet.ports import Store
from strata.fleet.store.postgres import tables as postgres_tables
from strata.fleet.store.postgres.store import PostgresStore
from strata.fleet.store.rows import encode
from strata.fleet.store.sqlite import tables as sqlite_tables
from strata.fleet.store.sqlite.store import SqliteStore
from tests.conformance.fleet.fleet import add_host, claim, job

BEFORE: Final = 3
"""Steps of the fleet's tables before digests."""
TRAINER: Final = TrainerSpec(name="default", command=("python", "train.py"), directory="/t", env={"A": "1", "B": "2"})
KNOWN, LOST = job("a"), job("b", trainer="gone")
POLICY: Final = HostSpec(name="desk", slots=2)

CLASS: Final = "INSERT INTO req_class (key, spec) VALUES ('k', {0})"
JOB: Final = (
    "INSERT INTO job (id, spec, class_id, status, epoch, created_at, changed_at, not_before, host_id, reason, artifact,"
    " declared, orphaned, waits_for, model, sweep, priority, trainer, charged, lost, excused, checkpoint)"
    " VALUES ({0}, {0}, 1, 'pending', 1, 0, 0, 0, '', '', '', {1}, {2}, 0, {0}, '', 0, {0}, 0, 0, 0, '')"
)
READY: Final = "INSERT INTO ready SELECT seq, class_id, priority, 0 FROM job"
ATTEMPT: Final = (
    "INSERT INTO attempt (job_id, epoch, host_id, claim_id, claimed_at, outcome, cause, error, artifact, checkpoint,"
    " facts) VALUES ({0}, 1, 'h', 'c0', 0, 'retried', '', '', '', '', {0})"
)


def statements(mark: str, true: str, false: str) -> list[tuple[str, tuple[Any, ...]]]:
    """What an older hub had written: two jobs, one of which names a trainer that is not there."""
    found: list[tuple[str, tuple[Any, ...]]] = [
        (CLASS.format(mark), (encode(KNOWN.requirement),)),
        (f"INSERT INTO trainer VALUES ({mark}, {mark})", ("default", encode(TRAINER))),
        (f"INSERT INTO policy VALUES ({mark}, {mark})", ("desk", encode(POLICY))),
    ]
    insert = JOB.format(mark, true, false)
    jobs = [(insert, (spec.id, encode(spec), spec.model, spec.trainer)) for spec in (KNOWN, LOST)]
    return [*found, *jobs, (READY, ()), (ATTEMPT.format(mark), (KNOWN.id, b"{}"))]


async def check(store: Store) -> None:
    assert await store.trainers() == {("default", "default"): RegisteredTrainer(digest=TRAINER.digest, spec=TRAINER)}
    assert await store.policies() == {"desk": HostPolicy(spec=POLICY, project="default")}
    present = await store.existing_jobs()
    assert {id_: each.trainer for id_, each in present.items()} == {KNOWN.id: TRAINER.digest, LOST.id: ""}
    assert [row.trainer_digest for row in await store.attempts(KNOWN.id)] == [TRAINER.digest]
    await add_host(store)
    leases = {lease.job_id: lease.trainer for lease in await claim(store, count=2)}
    assert leases == {KNOWN.id: TRAINER, LOST.id: None}


async def test_an_older_sqlite_file_gives_its_jobs_the_digests_of_their_trainers(tmp_path: Path) -> None:
    path = tmp_path / "hub.db"
    before = Component("fleet", sqlite_tables.COMPONENT.steps[:BEFORE])
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        SqliteComponents((events.SQLITE, before)).upgrade(db)
        for statement, values in statements("?", "1", "0"):
            db.execute(statement, values)
    thread = await SqliteThread.open(path, SqliteComponents((events.SQLITE, sqlite_tables.COMPONENT)))
    try:
        await check(SqliteStore(thread))
    finally:
        await thread.close()


async def test_an_older_postgres_database_gives_its_jobs_the_digests_of_their_trainers(postgres_url: str) -> None:
    connections = Connections(postgres_url, 4, 60.0, what="hub")
    before = Component("fleet", postgres_tables.COMPONENT.steps[:BEFORE])
    try:
        async with connections.acquire() as connection:
            await upgrade_postgres(connection, (events.POSTGRES, before))
            for statement, values in statements("%s", "true", "false"):
                await connection.execute(statement, values)
            await upgrade_postgres(connection, (events.POSTGRES, postgres_tables.COMPONENT))
        await check(PostgresStore(connections))
    finally:
        await connections.close()
