"""The index of artifacts in the hub's SQLite file: one writer, so a transaction is a function nothing interleaves with.

Lists of digests go in as one JSON array: a manifest of a terabyte is one statement, not a hundred thousand.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from strata.database import events
from strata.database.events import EventRecord as Record
from strata.database.events import record_sqlite
from strata.database.sqlite import SqliteThread
from strata.database.transaction import SqliteDatabase
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

_UNREFERENCED: Final = "NOT EXISTS (SELECT 1 FROM artifact_ref WHERE chunk = number)"
_UNUSED: Final = (
    f"FROM artifact_chunk WHERE state IN {among(ChunkEvent.MARK)} AND wanted_at <= :before AND {_UNREFERENCED}"
    " ORDER BY wanted_at, number LIMIT :limit"
)
_ERASABLE: Final = (
    f"FROM artifact_chunk WHERE state IN {among(ChunkEvent.ERASE)}"
    f" AND (state = '{ChunkState.DELETING}' OR wanted_at <= :before)"
    f" AND {_UNREFERENCED} ORDER BY wanted_at, number LIMIT :limit"
)

_JOB_KIND: Final = "json_extract(CAST(j.spec AS TEXT), '$.kind')"

Db = sqlite3.Connection


class SqliteIndex:
    """On a thread that has the components `event`, `fleet` and `artifact`."""

    def __init__(self, thread: SqliteThread) -> None:
        self._thread = thread

    async def reserve(self, digests: Sequence[str], now_s: float, *, stale_after_s: float) -> Mapping[str, Slot]:
        def take(db: Db) -> dict[str, Slot]:
            listed = _json(digests)
            db.execute(
                "INSERT INTO artifact_chunk (digest, state, size, wanted_at, checked_at)"
                f" SELECT value, '{ChunkState.INCOMING}', 0, :now, 0 FROM json_each(:digests) WHERE true"
                " ON CONFLICT (digest) DO UPDATE"
                f" SET wanted_at = excluded.wanted_at, state = {becomes(ChunkEvent.RESERVE)}"
                f" WHERE state IN {among(ChunkEvent.RESERVE)}"
                f" AND (wanted_at <= :stale OR state = '{ChunkState.TO_DELETE}')",
                {"now": now_s, "digests": listed, "stale": now_s - stale_after_s},
            )
            return _slots(db, digests)

        return await self._thread.write(take)

    async def slots(self, digests: Sequence[str]) -> Mapping[str, Slot]:
        return await self._thread.read(lambda db: _slots(db, digests))

    async def stored(self, slots: Sequence[Slot], now_s: float) -> None:
        def store(db: Db) -> None:
            there = _slots(db, [slot.digest for slot in slots])
            for slot in slots:
                found = there.get(slot.digest)
                if found is None or found.number != slot.number or found.state is ChunkState.DELETING:
                    raise rows.chunk_overtaken(slot.digest)
            db.executemany(
                f"UPDATE artifact_chunk SET state = {becomes(ChunkEvent.STORE)}, size = ?,"
                " wanted_at = ?, checked_at = ?"
                f" WHERE number = ? AND state IN {among(ChunkEvent.STORE)}",
                [(slot.size, now_s, now_s, slot.number) for slot in slots],
            )

        await self._thread.write(store)

    async def damaged(self, digest: str, reason: str, now_s: float) -> None:
        def damage(db: Db) -> None:
            changed = db.execute(
                f"UPDATE artifact_chunk SET state = {becomes(ChunkEvent.DAMAGE)}, wanted_at = ?"
                f" WHERE digest = ? AND state IN {among(ChunkEvent.DAMAGE)}",
                (now_s, digest),
            )
            if changed.rowcount:
                record_sqlite(db, [Record(now_s, "hub", "chunk.damaged", digest, {"reason": reason})])

        await self._thread.write(damage)

    async def commit(self, commit: Commit, now_s: float) -> CommitResult:
        return await self._thread.write(lambda db: _commit(db, commit, now_s))

    async def artifact(self, artifact_id: str) -> ArtifactRow:
        return rows.decode_artifact(await self._thread.read(lambda db: _artifact(db, artifact_id)), artifact_id)

    async def blob(self, sha256: str) -> str:
        found = await self._rows("SELECT artifact_id FROM artifact_blob WHERE sha256 = ?", (sha256,))
        if not found:
            raise rows.unknown_blob(sha256)
        return str(found[0][0])

    async def is_open(self, digest: str) -> bool:
        select = rows.OPEN.format(digest="?", kind=_JOB_KIND)
        return bool(await self._rows(select, (digest,)))

    async def find(self, prefix: str, limit: int = 6) -> Sequence[str]:
        whole = prefix if prefix.startswith("artifact") else f"artifact1_{prefix}"
        # '~' sorts after every character of an id.
        found = await self._rows(
            "SELECT id FROM artifact WHERE id >= ? AND id < ? AND removed_at IS NULL ORDER BY id LIMIT ?",
            (whole, f"{whole}~", limit),
        )
        return [id_ for (id_,) in found]

    async def lineages(self, wanted: LineageFilter) -> Sequence[LineageRow]:
        listed = "IN (SELECT value FROM json_each(:{}))".format
        query, values = rows.lineage_query(wanted, lambda name: f":{name}", listed)
        values |= {name: _json(values[name]) for name in ("artifact_ids", "parents")}
        return [rows.decode_lineage(row) for row in await self._rows(query, values)]

    async def referenced(self) -> Mapping[str, str]:
        return dict(await self._rows(rows.REFERENCED, ()))

    async def pin(self, artifact_id: str, reason: str, actor: str, now_s: float, *, owner: str | None = None) -> None:
        def change(db: Db) -> None:
            row = rows.decode_artifact(_artifact(db, artifact_id), artifact_id)
            if owner is not None:
                rows.check_pin(row, owner, _shares(db, artifact_id, owner))
            if row.pinned != reason:
                by = owner or "" if reason else ""
                db.execute("UPDATE artifact SET pinned = ?, pinned_by = ? WHERE id = ?", (reason, by, artifact_id))
                kind = "artifact.pinned" if reason else "artifact.unpinned"
                record_sqlite(db, [Record(now_s, actor, kind, artifact_id, {"reason": reason})])

        await self._thread.write(change)

    async def remove(
        self, artifact_id: str, reason: str, actor: str, now_s: float, *, upto_seq: int | None = None
    ) -> bool:
        return await self._thread.write(lambda db: _remove(db, artifact_id, reason, actor, now_s, upto_seq))

    async def withdraw(self, artifact_id: str, owner: str, reason: str, actor: str, now_s: float) -> bool:
        return await self._thread.write(lambda db: _withdraw(db, artifact_id, owner, reason, actor, now_s))

    async def unused(self, before_s: float, limit: int) -> Sequence[ArtifactChunk]:
        return _chunks(await self._rows(f"SELECT {rows.SLOT} {_UNUSED}", {"before": before_s, "limit": limit}))

    async def mark_unused(self, before_s: float, now_s: float, limit: int) -> Sequence[ArtifactChunk]:
        def mark(db: Db) -> Sequence[ArtifactChunk]:
            return _chunks(
                db.execute(
                    f"UPDATE artifact_chunk SET state = {becomes(ChunkEvent.MARK)}, wanted_at = :now"
                    f" WHERE number IN (SELECT number {_UNUSED}) RETURNING {rows.SLOT}",
                    {"now": now_s, "before": before_s, "limit": limit},
                ).fetchall()
            )

        return await self._thread.write(mark)

    async def erasable(self, before_s: float, limit: int) -> Sequence[ArtifactChunk]:
        return _chunks(await self._rows(f"SELECT {rows.SLOT} {_ERASABLE}", {"before": before_s, "limit": limit}))

    async def erase(self, before_s: float, limit: int) -> Sequence[Slot]:
        def take(db: Db) -> list[Slot]:
            found = db.execute(
                f"UPDATE artifact_chunk SET state = {becomes(ChunkEvent.ERASE)}"
                f" WHERE number IN (SELECT number {_ERASABLE}) RETURNING {rows.SLOT}",
                {"before": before_s, "limit": limit},
            ).fetchall()
            return [rows.decode_slot(row) for row in found]

        return await self._thread.write(take)

    async def erased(self, slots: Sequence[Slot]) -> None:
        def drop(db: Db) -> None:
            db.executemany(
                f"DELETE FROM artifact_chunk WHERE number = ? AND state = '{ChunkState.DELETING}'",
                [(slot.number,) for slot in slots],
            )

        await self._thread.write(drop)

    async def least_checked(self, before_s: float, limit: int) -> Sequence[Slot]:
        found = await self._rows(
            f"SELECT {rows.SLOT} FROM artifact_chunk WHERE state = '{ChunkState.STORED}' AND checked_at < ?"
            " ORDER BY checked_at, number LIMIT ?",
            (before_s, limit),
        )
        return [rows.decode_slot(row) for row in found]

    async def checked(self, slots: Sequence[Slot], now_s: float) -> None:
        def note(db: Db) -> None:
            db.executemany(
                "UPDATE artifact_chunk SET checked_at = ? WHERE number = ?", [(now_s, slot.number) for slot in slots]
            )

        await self._thread.write(note)

    async def usage(self) -> StorageUsage:
        ((artifacts,),) = await self._rows("SELECT count(*) FROM artifact WHERE removed_at IS NULL", ())
        ((chunks, size, damaged),) = await self._rows(
            f"SELECT count(*) FILTER (WHERE state IN {among(ChunkEvent.DAMAGE)}),"
            f" coalesce(sum(size) FILTER (WHERE state IN {among(ChunkEvent.DAMAGE)}), 0),"
            f" count(*) FILTER (WHERE state = '{ChunkState.DAMAGED}') FROM artifact_chunk",
            (),
        )
        return StorageUsage(artifacts=artifacts, chunks=chunks, bytes=size, damaged=damaged)

    async def owner_bytes(self) -> Mapping[str, int]:
        return dict(await self._rows(rows.OWNER_BYTES, ()))

    async def events(self, after: str, limit: int, *, subject: str = "") -> Sequence[events.StoredEvent]:
        return await events.read(SqliteDatabase(self._thread), after, limit, subject=subject)

    async def _rows(self, select: str, values: Sequence[Any] | Mapping[str, Any]) -> list[Any]:
        return await self._thread.read(lambda db: db.execute(select, values).fetchall())


def _json(values: Sequence[str]) -> str:
    return msgspec.json.encode(list(values)).decode()


def _slots(db: Db, digests: Sequence[str]) -> dict[str, Slot]:
    found = db.execute(
        f"SELECT {rows.SLOT} FROM artifact_chunk WHERE digest IN (SELECT value FROM json_each(?))", (_json(digests),)
    )
    return {slot.digest: slot for slot in map(rows.decode_slot, found)}


def _chunks(found: Sequence[Any]) -> list[ArtifactChunk]:
    return [ArtifactChunk(slot.digest, slot.size) for slot in map(rows.decode_slot, found)]


def _artifact(db: Db, artifact_id: str) -> Any:
    return db.execute(f"SELECT {rows.ARTIFACT} FROM artifact WHERE id = ?", (artifact_id,)).fetchone()


def _commit(db: Db, commit: Commit, now_s: float) -> CommitResult:
    artifact_id = commit.manifest.id
    lineage_id = commit.lineage.id_for(artifact_id)
    told = db.execute("SELECT 1 FROM artifact_lineage WHERE id = ? AND removed_at IS NULL", (lineage_id,)).fetchone()
    if told:
        return CommitResult(artifact_id=artifact_id, lineage_id=lineage_id, new=False)
    if commit.hold is not None:
        job = db.execute(f"SELECT {rows.JOB} FROM job WHERE id = ?", (commit.hold.job_id,)).fetchone()
        lease = db.execute("SELECT 1 FROM lease WHERE job_id = ?", (commit.hold.job_id,)).fetchone()
        rows.check_attempt(job, commit.hold, leased=lease is not None)
    wanted = commit.manifest.chunks()
    slots = _slots(db, list(wanted))
    rows.check_chunks(wanted, slots.values())
    numbers = [slot.number for slot in slots.values()]
    _guard_closed(db, commit, numbers)
    _check_account(db, commit, artifact_id)
    _take_name(db, commit)
    db.executemany(
        f"UPDATE artifact_chunk SET state = {becomes(ChunkEvent.RESERVE)}, wanted_at = ? WHERE number = ?",
        [(now_s, number) for number in numbers],
    )
    (seq,) = db.execute(
        "INSERT INTO artifact (id, manifest, size, committed_at, pinned, owner) VALUES (?, ?, ?, ?, '', ?)"
        f" ON CONFLICT (id) DO UPDATE SET removed_at = NULL, owner = {rows.KEPT_OWNER} RETURNING seq",
        (artifact_id, commit.manifest.encode(), commit.manifest.size, now_s, commit.account.owner),
    ).fetchone()
    db.executemany("INSERT OR IGNORE INTO artifact_ref VALUES (?, ?)", [(number, seq) for number in numbers])
    _insert_lineage(db, commit, artifact_id, lineage_id, now_s)
    if commit.blob:
        db.execute("INSERT OR IGNORE INTO artifact_blob VALUES (?, ?)", (commit.blob, artifact_id))
    record_sqlite(db, [rows.committed(commit, artifact_id, lineage_id, now_s)])
    return CommitResult(artifact_id=artifact_id, lineage_id=lineage_id, new=True)


def _check_account(db: Db, commit: Commit, artifact_id: str) -> None:
    account, added = commit.account, rows.added_bytes(_artifact(db, artifact_id), commit)
    if account.limit is not None and added is not None:
        ((used,),) = db.execute(rows.BYTES_OF.format(owner="?"), (account.owner,))
        check_bytes(account.owner, account.limit, used, added, refusal=account.refusal)


def _guard_closed(db: Db, commit: Commit, numbers: Sequence[int]) -> None:
    values = {"numbers": msgspec.json.encode(numbers).decode(), "job": commit.lineage.job_id}
    listed = "IN (SELECT value FROM json_each(:numbers))"
    if rows.names_chunks(commit):
        rows.check_closed(*db.execute(rows.CLOSED.format(listed=listed, kind=_JOB_KIND), values).fetchone())
    if commit.hold is not None and commit.lineage.kind is ArtifactKind.CHECKPOINT:
        db.execute(rows.CLOSE.format(listed=listed, job=":job", kind=_JOB_KIND), values)


def _take_name(db: Db, commit: Commit) -> None:
    """A name without an owner becomes the submitter's."""
    if commit.data_name:
        owner = commit.account.owner
        adopt = rows.ADOPT_NAME.format(owner="?", name="?", actor="?")
        db.execute(adopt, (owner, commit.data_name, commit.actor))
        taken = db.execute("SELECT owner FROM data_name WHERE name = ?", (commit.data_name,)).fetchone()
        if taken is None:
            ((owned,),) = db.execute("SELECT count(*) FROM data_name WHERE owner = ?", (owner,))
            rows.check_name_count(commit, owned)
            db.execute("INSERT INTO data_name VALUES (?, ?)", (commit.data_name, owner))
        rows.check_name(commit, owner if taken is None else taken[0])


def _insert_lineage(db: Db, commit: Commit, artifact_id: str, lineage_id: str, now_s: float) -> None:
    """One that was withdrawn is recorded anew: it is the latest now, and whose it is may have changed."""
    made = commit.lineage
    withdrawn = db.execute("DELETE FROM artifact_lineage WHERE id = ? RETURNING seq", (lineage_id,)).fetchone()
    if withdrawn is not None:
        db.execute("DELETE FROM artifact_metric WHERE lineage = ?", withdrawn)
        db.executemany(
            "DELETE FROM artifact_parent WHERE parent = ? AND lineage = ?",
            [(parent, *withdrawn) for parent in set(made.parents)],
        )
    (seq,) = db.execute(
        f"INSERT INTO artifact_lineage ({rows.NEW_LINEAGE}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) RETURNING seq",
        rows.new_lineage(commit, artifact_id, lineage_id, now_s),
    ).fetchone()
    db.executemany(
        "INSERT INTO artifact_metric VALUES (?, ?, ?)", [(seq, name, value) for name, value in made.metrics.items()]
    )
    db.executemany("INSERT INTO artifact_parent VALUES (?, ?)", [(parent, seq) for parent in set(made.parents)])


def _remove(db: Db, artifact_id: str, reason: str, actor: str, now_s: float, upto_seq: int | None) -> bool:
    needed = db.execute(
        "SELECT 1 FROM artifact_lineage l JOIN job j ON j.id = l.job_id WHERE l.artifact_id = ?"
        f" AND j.checkpoint = l.artifact_id AND j.status NOT IN {rows.FINISHED}",
        (artifact_id,),
    ).fetchone()
    if not rows.check_removable(_artifact(db, artifact_id), artifact_id, needed=needed is not None):
        return False
    newer = "SELECT 1 FROM artifact_lineage WHERE artifact_id = ? AND seq > ? AND removed_at IS NULL"
    if upto_seq is not None and db.execute(newer, (artifact_id, upto_seq)).fetchone():
        return False
    (seq,) = db.execute(
        "UPDATE artifact SET removed_at = ? WHERE id = ? RETURNING seq", (now_s, artifact_id)
    ).fetchone()
    db.execute(rows.WITHDRAW.format(now=":now", id=":id"), {"now": now_s, "id": artifact_id})
    db.execute(
        "UPDATE artifact_chunk SET wanted_at = ? WHERE number IN (SELECT chunk FROM artifact_ref WHERE artifact = ?)",
        (now_s, seq),
    )
    db.execute("DELETE FROM artifact_ref WHERE artifact = ?", (seq,))
    db.execute("DELETE FROM artifact_blob WHERE artifact_id = ?", (artifact_id,))
    record_sqlite(db, [Record(now_s, actor, "artifact.removed", artifact_id, {"reason": reason})])
    return True


def _withdraw(db: Db, artifact_id: str, owner: str, reason: str, actor: str, now_s: float) -> bool:
    row = rows.decode_artifact(_artifact(db, artifact_id), artifact_id)
    if not rows.is_needed_by_others(row, owner, _shares(db, artifact_id, owner)):
        return _remove(db, artifact_id, reason, actor, now_s, None)
    values = {"now": now_s, "id": artifact_id, "owner": owner}
    db.execute(rows.WITHDRAW_HERS.format(now=":now", id=":id", owner=":owner"), values)
    db.execute(rows.PASS_ON.format(id=":id"), values)
    record_sqlite(db, [rows.withdrawn(artifact_id, owner, reason, actor, now_s)])
    return False


def _shares(db: Db, artifact_id: str, owner: str) -> rows.Shares:
    select = rows.SHARES.format(id=":id", owner=":owner")
    return rows.Shares(*db.execute(select, {"id": artifact_id, "owner": owner}).fetchone())
