"""The index of artifacts in PostgreSQL: short transactions on rows they have locked.

Order of locks, so that no two transactions wait for each other: the job's row, the artifact, then chunks by digest.
A collection passes over chunks that somebody holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from strata.database import events
from strata.database.events import EventRecord as Record
from strata.database.events import record_postgres
from strata.database.postgres import Connections
from strata.database.transaction import PostgresDatabase
from strata.fleet.artifacts.manifest import ArtifactChunk, ArtifactKind
from strata.fleet.artifacts.ports import (
    ArtifactRow,
    Commit,
    CommitResult,
    LineageFilter,
    LineageRow,
    Slot,
    StorageUsage,
)
from strata.fleet.artifacts.states import ChunkEvent, ChunkState, among, becomes
from strata.fleet.artifacts.store import rows
from strata.fleet.core.quota import check_bytes

Connection = Any
"""A psycopg connection: only the adapters of `strata.database` know its type."""

_UNREFERENCED: Final = "NOT EXISTS (SELECT 1 FROM artifact_ref WHERE chunk = number)"
_UNUSED: Final = (
    f"FROM artifact_chunk WHERE state IN {among(ChunkEvent.MARK)} AND wanted_at <= %(before)s AND {_UNREFERENCED}"
    " ORDER BY wanted_at, number LIMIT %(limit)s"
)
_ERASABLE: Final = (
    f"FROM artifact_chunk WHERE state IN {among(ChunkEvent.ERASE)}"
    f" AND (state = '{ChunkState.DELETING}' OR wanted_at <= %(before)s) AND {_UNREFERENCED}"
    " ORDER BY wanted_at, number LIMIT %(limit)s"
)
_SELECT_SLOTS: Final = f"SELECT {rows.SLOT} FROM artifact_chunk WHERE digest = ANY(%(digests)s) ORDER BY digest"
_JOB_KIND: Final = "convert_from(j.spec, 'UTF8')::json ->> 'kind'"
_LOCKED: Final = "FOR UPDATE SKIP LOCKED"


class PostgresIndex:
    """On a database that has the components `event`, `fleet` and `artifact`."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    async def reserve(self, digests: Sequence[str], now_s: float, *, stale_after_s: float) -> Mapping[str, Slot]:
        ordered = sorted(set(digests))
        found: dict[str, Slot] = {}
        async with self._connections.transaction() as connection:
            # A row that was in the way of an insert may be erased before it is read: then it is inserted after all.
            while missing := [digest for digest in ordered if digest not in found]:
                await connection.execute(
                    "INSERT INTO artifact_chunk (digest, state, size, wanted_at, checked_at)"
                    f" SELECT digest, '{ChunkState.INCOMING}', 0, %(now)s, 0 FROM unnest(%(new)s::text[]) AS n (digest)"
                    " ORDER BY digest ON CONFLICT (digest) DO NOTHING",
                    {"now": now_s, "new": missing},
                )
                await connection.execute(
                    f"UPDATE artifact_chunk SET wanted_at = %(now)s, state = {becomes(ChunkEvent.RESERVE)}"
                    " WHERE number IN (SELECT number FROM artifact_chunk WHERE digest = ANY(%(digests)s)"
                    f" AND state IN {among(ChunkEvent.RESERVE)}"
                    f" AND (wanted_at <= %(stale)s OR state = '{ChunkState.TO_DELETE}')"
                    " ORDER BY digest FOR UPDATE)",
                    {"now": now_s, "digests": missing, "stale": now_s - stale_after_s},
                )
                found |= await _slots(connection, missing)
        return found

    async def slots(self, digests: Sequence[str]) -> Mapping[str, Slot]:
        found = await self._connections.run(_SELECT_SLOTS, {"digests": list(digests)})
        return {slot.digest: slot for slot in map(rows.decode_slot, found)}

    async def stored(self, slots: Sequence[Slot], now_s: float) -> None:
        async with self._connections.transaction() as connection:
            there = await _slots(connection, [slot.digest for slot in slots], lock=True)
            for slot in slots:
                found = there.get(slot.digest)
                if found is None or found.number != slot.number or found.state is ChunkState.DELETING:
                    raise rows.chunk_overtaken(slot.digest)
            await connection.execute(
                f"UPDATE artifact_chunk c SET state = {becomes(ChunkEvent.STORE)}, size = s.size, wanted_at = %(now)s,"
                " checked_at = %(now)s FROM unnest(%(numbers)s::bigint[], %(sizes)s::bigint[]) AS s (number, size)"
                f" WHERE c.number = s.number AND state IN {among(ChunkEvent.STORE)}",
                {
                    "now": now_s,
                    "numbers": [slot.number for slot in slots],
                    "sizes": [slot.size for slot in slots],
                },
            )

    async def damaged(self, digest: str, reason: str, now_s: float) -> None:
        async with self._connections.transaction() as connection:
            changed = await connection.execute(
                f"UPDATE artifact_chunk SET state = {becomes(ChunkEvent.DAMAGE)}, wanted_at = %s"
                f" WHERE digest = %s AND state IN {among(ChunkEvent.DAMAGE)}",
                (now_s, digest),
            )
            if changed.rowcount:
                await record_postgres(connection, [Record(now_s, "hub", "chunk.damaged", digest, {"reason": reason})])

    async def commit(self, commit: Commit, now_s: float) -> CommitResult:
        async with self._connections.transaction() as connection:
            return await _commit(connection, commit, now_s)

    async def artifact(self, artifact_id: str) -> ArtifactRow:
        found = await self._connections.run(
            f"SELECT {rows.ARTIFACT} FROM artifact WHERE id = %(id)s", {"id": artifact_id}
        )
        return rows.decode_artifact(found[0] if found else None, artifact_id)

    async def blob(self, sha256: str) -> str:
        found = await self._connections.run(
            "SELECT artifact_id FROM artifact_blob WHERE sha256 = %(sha256)s", {"sha256": sha256}
        )
        if not found:
            raise rows.unknown_blob(sha256)
        return str(found[0][0])

    async def is_open(self, digest: str) -> bool:
        select = rows.OPEN.format(digest="%(digest)s", kind=_JOB_KIND)
        return bool(await self._connections.run(select, {"digest": digest}))

    async def find(self, prefix: str, limit: int = 6) -> Sequence[str]:
        whole = prefix if prefix.startswith("artifact") else f"artifact1_{prefix}"
        # '~' sorts after every character of an id.
        found = await self._connections.run(
            "SELECT id FROM artifact WHERE id >= %(low)s AND id < %(high)s AND removed_at IS NULL"
            " ORDER BY id LIMIT %(limit)s",
            {"low": whole, "high": f"{whole}~", "limit": limit},
        )
        return [id_ for (id_,) in found]

    async def lineages(self, wanted: LineageFilter) -> Sequence[LineageRow]:
        query, values = rows.lineage_query(wanted, lambda name: f"%({name})s", "= ANY(%({})s)".format)
        return [rows.decode_lineage(row) for row in await self._connections.run(query, values)]

    async def referenced(self) -> Mapping[str, str]:
        return dict(await self._connections.run(rows.REFERENCED, {}))

    async def pin(self, artifact_id: str, reason: str, actor: str, now_s: float, *, owner: str | None = None) -> None:
        async with self._connections.transaction() as connection:
            row = rows.decode_artifact(await _artifact(connection, artifact_id), artifact_id)
            if owner is not None:
                rows.check_pin(row, owner, await _shares(connection, artifact_id, owner))
            if row.pinned != reason:
                by = owner or "" if reason else ""
                change = "UPDATE artifact SET pinned = %s, pinned_by = %s WHERE id = %s"
                await connection.execute(change, (reason, by, artifact_id))
                kind = "artifact.pinned" if reason else "artifact.unpinned"
                await record_postgres(connection, [Record(now_s, actor, kind, artifact_id, {"reason": reason})])

    async def remove(
        self, artifact_id: str, reason: str, actor: str, now_s: float, *, upto_seq: int | None = None
    ) -> bool:
        async with self._connections.transaction() as connection:
            return await _remove(connection, artifact_id, reason, actor, now_s, upto_seq)

    async def withdraw(self, artifact_id: str, owner: str, reason: str, actor: str, now_s: float) -> bool:
        async with self._connections.transaction() as connection:
            row = rows.decode_artifact(await _artifact(connection, artifact_id), artifact_id)
            if not rows.is_needed_by_others(row, owner, await _shares(connection, artifact_id, owner)):
                return await _remove(connection, artifact_id, reason, actor, now_s, None)
            values = {"now": now_s, "id": artifact_id, "owner": owner}
            await connection.execute(rows.WITHDRAW_HERS.format(now="%(now)s", id="%(id)s", owner="%(owner)s"), values)
            await connection.execute(rows.PASS_ON.format(id="%(id)s"), values)
            await record_postgres(connection, [rows.withdrawn(artifact_id, owner, reason, actor, now_s)])
            return False

    async def unused(self, before_s: float, limit: int) -> Sequence[ArtifactChunk]:
        return _chunks(
            await self._connections.run(f"SELECT {rows.SLOT} {_UNUSED}", {"before": before_s, "limit": limit})
        )

    async def mark_unused(self, before_s: float, now_s: float, limit: int) -> Sequence[ArtifactChunk]:
        # A commit that came between changed `wanted_at`, which is compared again once the row is locked.
        return _chunks(
            await self._connections.run(
                f"UPDATE artifact_chunk SET state = {becomes(ChunkEvent.MARK)}, wanted_at = %(now)s"
                f" WHERE number IN (SELECT number {_UNUSED} {_LOCKED}) RETURNING {rows.SLOT}",
                {"now": now_s, "before": before_s, "limit": limit},
            )
        )

    async def erasable(self, before_s: float, limit: int) -> Sequence[ArtifactChunk]:
        return _chunks(
            await self._connections.run(f"SELECT {rows.SLOT} {_ERASABLE}", {"before": before_s, "limit": limit})
        )

    async def erase(self, before_s: float, limit: int) -> Sequence[Slot]:
        found = await self._connections.run(
            f"UPDATE artifact_chunk SET state = {becomes(ChunkEvent.ERASE)}"
            f" WHERE number IN (SELECT number {_ERASABLE} {_LOCKED}) RETURNING {rows.SLOT}",
            {"before": before_s, "limit": limit},
        )
        return [rows.decode_slot(row) for row in found]

    async def erased(self, slots: Sequence[Slot]) -> None:
        await self._connections.write(
            f"DELETE FROM artifact_chunk WHERE number = ANY(%(numbers)s) AND state = '{ChunkState.DELETING}'",
            {"numbers": [slot.number for slot in slots]},
        )

    async def least_checked(self, before_s: float, limit: int) -> Sequence[Slot]:
        found = await self._connections.run(
            f"SELECT {rows.SLOT} FROM artifact_chunk WHERE state = '{ChunkState.STORED}' AND checked_at < %(before)s"
            " ORDER BY checked_at, number LIMIT %(limit)s",
            {"before": before_s, "limit": limit},
        )
        return [rows.decode_slot(row) for row in found]

    async def checked(self, slots: Sequence[Slot], now_s: float) -> None:
        await self._connections.write(
            "UPDATE artifact_chunk SET checked_at = %(now)s WHERE number IN (SELECT number FROM artifact_chunk"
            " WHERE number = ANY(%(numbers)s) ORDER BY digest FOR UPDATE)",
            {"now": now_s, "numbers": [slot.number for slot in slots]},
        )

    async def usage(self) -> StorageUsage:
        ((artifacts,),) = await self._connections.run("SELECT count(*) FROM artifact WHERE removed_at IS NULL", {})
        ((chunks, size, damaged),) = await self._connections.run(
            f"SELECT count(*) FILTER (WHERE state IN {among(ChunkEvent.DAMAGE)}),"
            f" coalesce(sum(size) FILTER (WHERE state IN {among(ChunkEvent.DAMAGE)}), 0)::bigint,"
            f" count(*) FILTER (WHERE state = '{ChunkState.DAMAGED}') FROM artifact_chunk",
            {},
        )
        return StorageUsage(artifacts=artifacts, chunks=chunks, bytes=size, damaged=damaged)

    async def owner_bytes(self) -> Mapping[str, int]:
        return {owner: int(size) for owner, size in await self._connections.run(rows.OWNER_BYTES, {})}

    async def events(self, after: str, limit: int, *, subject: str = "") -> Sequence[events.StoredEvent]:
        return await events.read(PostgresDatabase(self._connections), after, limit, subject=subject)


async def _slots(connection: Connection, digests: Sequence[str], *, lock: bool = False) -> dict[str, Slot]:
    cursor = await connection.execute(f"{_SELECT_SLOTS} {'FOR UPDATE' if lock else ''}", {"digests": list(digests)})
    return {slot.digest: slot for slot in map(rows.decode_slot, await cursor.fetchall())}


def _chunks(found: Sequence[Any]) -> list[ArtifactChunk]:
    return [ArtifactChunk(slot.digest, slot.size) for slot in map(rows.decode_slot, found)]


async def _artifact(connection: Connection, artifact_id: str) -> Any:
    select = f"SELECT {rows.ARTIFACT} FROM artifact WHERE id = %s FOR UPDATE"
    return await (await connection.execute(select, (artifact_id,))).fetchone()


async def _commit(connection: Connection, commit: Commit, now_s: float) -> CommitResult:
    artifact_id = commit.manifest.id
    lineage_id = commit.lineage.id_for(artifact_id)
    if commit.account.limit is not None or commit.data_name:
        # Commits of one owner come one at a time, before any other lock: each counts those before it.
        lock = "SELECT pg_advisory_xact_lock(hashtextextended(%s, 11))"
        await connection.execute(lock, (commit.account.owner,))
    if commit.hold is not None and not await _is_lineage_recorded(connection, lineage_id):
        # The lease is read once the job is locked: in one statement it would be as old as the statement.
        select = f"SELECT {rows.JOB} FROM job WHERE id = %s FOR UPDATE"
        job = await (await connection.execute(select, (commit.hold.job_id,))).fetchone()
        lease = await connection.execute("SELECT 1 FROM lease WHERE job_id = %s", (commit.hold.job_id,))
        rows.check_attempt(job, commit.hold, leased=bool(lease.rowcount))
    # One commit of an artifact at a time: a row that is not there yet cannot be locked.
    await connection.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", (artifact_id,))
    there = await _artifact(connection, artifact_id)
    if await _is_lineage_recorded(connection, lineage_id):
        return CommitResult(artifact_id=artifact_id, lineage_id=lineage_id, new=False)
    wanted = commit.manifest.chunks()
    slots = await _slots(connection, list(wanted), lock=True)
    rows.check_chunks(wanted, slots.values())
    numbers = [slot.number for slot in slots.values()]
    await _guard_closed(connection, commit, numbers)
    await _check_account(connection, commit, rows.added_bytes(there, commit))
    await _take_name(connection, commit)
    await connection.execute(
        f"UPDATE artifact_chunk SET state = {becomes(ChunkEvent.RESERVE)}, wanted_at = %s WHERE number = ANY(%s)",
        (now_s, numbers),
    )
    cursor = await connection.execute(
        "INSERT INTO artifact (id, manifest, size, committed_at, pinned, owner) VALUES (%s, %s, %s, %s, '', %s)"
        f" ON CONFLICT (id) DO UPDATE SET removed_at = NULL, owner = {rows.KEPT_OWNER} RETURNING seq",
        (artifact_id, commit.manifest.encode(), commit.manifest.size, now_s, commit.account.owner),
    )
    (seq,) = await cursor.fetchone()
    await connection.execute(
        "INSERT INTO artifact_ref SELECT number, %s FROM unnest(%s::bigint[]) AS n (number) ON CONFLICT DO NOTHING",
        (seq, numbers),
    )
    await _insert_lineage(connection, commit, artifact_id, lineage_id, now_s)
    if commit.blob:
        await connection.execute(
            "INSERT INTO artifact_blob VALUES (%s, %s) ON CONFLICT DO NOTHING", (commit.blob, artifact_id)
        )
    await record_postgres(connection, [rows.committed(commit, artifact_id, lineage_id, now_s)])
    return CommitResult(artifact_id=artifact_id, lineage_id=lineage_id, new=True)


async def _check_account(connection: Connection, commit: Commit, added: int | None) -> None:
    account = commit.account
    if account.limit is not None and added is not None:
        cursor = await connection.execute(rows.BYTES_OF.format(owner="%s"), (account.owner,))
        ((used,),) = await cursor.fetchall()
        check_bytes(account.owner, account.limit, int(used), added, refusal=account.refusal)


async def _guard_closed(connection: Connection, commit: Commit, numbers: Sequence[int]) -> None:
    values = {"numbers": list(numbers), "job": commit.lineage.job_id}
    listed = "= ANY(%(numbers)s::bigint[])"
    if rows.names_chunks(commit):
        select = rows.CLOSED.format(listed=listed, kind=_JOB_KIND)
        rows.check_closed(*await (await connection.execute(select, values)).fetchone())
    if commit.hold is not None and commit.lineage.kind is ArtifactKind.CHECKPOINT:
        await connection.execute(rows.CLOSE.format(listed=listed, job="%(job)s", kind=_JOB_KIND), values)


async def _take_name(connection: Connection, commit: Commit) -> None:
    """A name without an owner becomes the submitter's."""
    if commit.data_name:
        insert = "INSERT INTO data_name VALUES (%s, %s) ON CONFLICT DO NOTHING"
        taken = await connection.execute(insert, (commit.data_name, commit.account.owner))
        if taken.rowcount:
            count = "SELECT count(*) - 1 FROM data_name WHERE owner = %s"
            ((owned,),) = await (await connection.execute(count, (commit.account.owner,))).fetchall()
            rows.check_name_count(commit, owned)
        adopt = rows.ADOPT_NAME.format(owner="%s", name="%s", actor="%s")
        await connection.execute(adopt, (commit.account.owner, commit.data_name, commit.actor))
        select = "SELECT owner FROM data_name WHERE name = %s"
        ((owner,),) = await (await connection.execute(select, (commit.data_name,))).fetchall()
        rows.check_name(commit, owner)


async def _is_lineage_recorded(connection: Connection, lineage_id: str) -> bool:
    select = "SELECT 1 FROM artifact_lineage WHERE id = %s AND removed_at IS NULL"
    return await (await connection.execute(select, (lineage_id,))).fetchone() is not None


async def _insert_lineage(
    connection: Connection, commit: Commit, artifact_id: str, lineage_id: str, now_s: float
) -> None:
    """One that was withdrawn is recorded anew: it is the latest now, and whose it is may have changed."""
    made = commit.lineage
    cursor = await connection.execute("DELETE FROM artifact_lineage WHERE id = %s RETURNING seq", (lineage_id,))
    if (withdrawn := await cursor.fetchone()) is not None:
        await connection.execute("DELETE FROM artifact_metric WHERE lineage = %s", withdrawn)
        await connection.execute(
            "DELETE FROM artifact_parent WHERE parent = ANY(%s) AND lineage = %s", (list(made.parents), *withdrawn)
        )
    cursor = await connection.execute(
        f"INSERT INTO artifact_lineage ({rows.NEW_LINEAGE})"
        " VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s) RETURNING seq",
        rows.new_lineage(commit, artifact_id, lineage_id, now_s),
    )
    inserted = await cursor.fetchone()
    await connection.execute(
        "INSERT INTO artifact_metric SELECT %s, m.name, m.value"
        " FROM unnest(%s::text[], %s::float8[]) AS m (name, value)",
        (inserted[0], list(made.metrics), list(made.metrics.values())),
    )
    await connection.execute(
        "INSERT INTO artifact_parent SELECT parent, %s FROM unnest(%s::text[]) AS p (parent)",
        (inserted[0], sorted(set(made.parents))),
    )


async def _shares(connection: Connection, artifact_id: str, owner: str) -> rows.Shares:
    select = rows.SHARES.format(id="%(id)s", owner="%(owner)s")
    return rows.Shares(*await (await connection.execute(select, {"id": artifact_id, "owner": owner})).fetchone())


async def _remove(
    connection: Connection, artifact_id: str, reason: str, actor: str, now_s: float, upto_seq: int | None
) -> bool:
    row = await _artifact(connection, artifact_id)
    needed = await connection.execute(
        "SELECT 1 FROM artifact_lineage l JOIN job j ON j.id = l.job_id WHERE l.artifact_id = %s"
        f" AND j.checkpoint = l.artifact_id AND j.status NOT IN {rows.FINISHED}",
        (artifact_id,),
    )
    if not rows.check_removable(row, artifact_id, needed=bool(needed.rowcount)):
        return False
    newer = await connection.execute(
        "SELECT 1 FROM artifact_lineage WHERE artifact_id = %s AND seq > %s AND removed_at IS NULL",
        (artifact_id, upto_seq),
    )
    if upto_seq is not None and newer.rowcount:
        return False
    await _let_go(connection, artifact_id, now_s)
    await record_postgres(connection, [Record(now_s, actor, "artifact.removed", artifact_id, {"reason": reason})])
    return True


async def _let_go(connection: Connection, artifact_id: str, now_s: float) -> None:
    cursor = await connection.execute(
        "UPDATE artifact SET removed_at = %s WHERE id = %s RETURNING seq", (now_s, artifact_id)
    )
    (seq,) = await cursor.fetchone()
    await connection.execute(rows.WITHDRAW.format(now="%(now)s", id="%(id)s"), {"now": now_s, "id": artifact_id})
    await connection.execute(
        "UPDATE artifact_chunk SET wanted_at = %s WHERE number IN (SELECT c.number FROM artifact_chunk c"
        " JOIN artifact_ref r ON r.chunk = c.number WHERE r.artifact = %s ORDER BY c.digest FOR UPDATE OF c)",
        (now_s, seq),
    )
    await connection.execute("DELETE FROM artifact_ref WHERE artifact = %s", (seq,))
    await connection.execute("DELETE FROM artifact_blob WHERE artifact_id = %s", (artifact_id,))
