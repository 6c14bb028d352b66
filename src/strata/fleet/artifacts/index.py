"""SQL of the index of artifacts: chunks and their states, commits, lineage, pins, names of data, removal, and bytes by
owner.

Order of locks, so that no two transactions wait for each other: the job's row, the artifact, then chunks by digest.
A collection passes over chunks that somebody holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

import msgspec

from strata.base.errors import Code, StrataError
from strata.database import event_kinds, events
from strata.database.events import EventRecord, record
from strata.database.transaction import Database, Transaction, Values
from strata.fleet.artifacts import checks
from strata.fleet.artifacts.manifest import ArtifactChunk, ArtifactKind, ArtifactManifest, Lineage
from strata.fleet.artifacts.ports import ArtifactRow, Commit, LineageFilter, Slot, StorageUsage
from strata.fleet.artifacts.states import ChunkEvent, ChunkState, among, becomes
from strata.fleet.core.job import TERMINAL, JobStatus
from strata.fleet.core.quota import check_bytes
from strata.fleet.wire.artifacts import ArtifactRecord, CommitReply

_SLOT: Final = "number, digest, state, size"
_ARTIFACT: Final = "id, manifest, size, committed_at, pinned, removed_at, owner, pinned_by"
_OWNER_BYTES: Final = "SELECT owner, sum(size)::bigint FROM artifact WHERE removed_at IS NULL GROUP BY owner"
_BYTES_OF: Final = "SELECT coalesce(sum(size), 0)::bigint FROM artifact WHERE removed_at IS NULL AND owner = :owner"
_KEPT_OWNER: Final = "CASE WHEN artifact.removed_at IS NULL THEN artifact.owner ELSE excluded.owner END"
"""An artifact that was removed is of those who commit it again."""
_LINEAGE: Final = (
    "l.id, l.seq, l.artifact_id, a.size, l.committed_at, l.body, a.pinned, l.removed_at, l.actor,"
    " coalesce(j.project, ''), coalesce(t.trainer_digest, ''), coalesce(d.owner, j.owner, l.owner)"
)
_LINEAGE_FIELDS: Final = (
    "lineage_id", "seq", "artifact_id", "size", "committed_at_s", "lineage", "pinned", "removed_at_s", "by",
    "project", "trainer_digest", "owner",
)  # fmt: skip
_HERS: Final = (
    f"coalesce((SELECT d.owner FROM data_name d WHERE d.name = l.model AND l.kind = '{ArtifactKind.DATA}'),"
    " (SELECT j.owner FROM job j WHERE j.id = l.job_id), l.owner) = :owner"
)
_LIVE: Final = "l.artifact_id = :id AND l.removed_at IS NULL"
_SHARES: Final = (
    f"SELECT count(*) FILTER (WHERE hers AND kind <> '{ArtifactKind.SOURCE}'),"
    f" count(*) FILTER (WHERE hers AND kind = '{ArtifactKind.SOURCE}'), count(*) FILTER (WHERE NOT hers)"
    f" FROM (SELECT l.kind, {_HERS} AS hers FROM artifact_lineage l WHERE {_LIVE}) AS known"
)
"""What `Shares` has of an owner."""
_WITHDRAW: Final = f"UPDATE artifact_lineage AS l SET removed_at = :now WHERE {_LIVE}"
_WITHDRAW_HERS: Final = f"{_WITHDRAW} AND l.kind <> '{ArtifactKind.SOURCE}' AND {_HERS}"
_PASS_ON: Final = (
    "UPDATE artifact SET owner = (SELECT l.owner FROM artifact_lineage l"
    f" WHERE {_LIVE} ORDER BY l.seq LIMIT 1) WHERE id = :id"
    f" AND NOT EXISTS (SELECT 1 FROM artifact_lineage l WHERE {_LIVE} AND l.owner = artifact.owner)"
)
"""The bytes count against the quota of an owner who still needs them."""
_JOB_KIND: Final = "convert_from(j.spec, 'UTF8')::json ->> 'kind'"
_OPEN: Final = (
    "EXISTS (SELECT 1 FROM artifact_ref r JOIN artifact a ON a.seq = r.artifact WHERE r.chunk = c.number"
    " AND NOT EXISTS (SELECT 1 FROM artifact_lineage l JOIN job j ON j.id = l.job_id WHERE l.artifact_id = a.id"
    f" AND l.kind = '{ArtifactKind.CHECKPOINT}' AND {_JOB_KIND} = 'server'))"
)
_FIND_OPEN: Final = f"SELECT 1 FROM artifact_chunk c WHERE c.digest = :digest AND {_OPEN}"
_CLOSED: Final = (
    f"SELECT count(*) FROM artifact_chunk c WHERE c.number = ANY(:numbers::bigint[]) AND c.closed = 1 AND NOT {_OPEN}"
)
_CLOSE: Final = (
    "UPDATE artifact_chunk SET closed = 1 WHERE number = ANY(:numbers::bigint[])"
    f" AND EXISTS (SELECT 1 FROM job j WHERE j.id = :job AND {_JOB_KIND} = 'server')"
)
_FINISHED: Final = "(" + ", ".join(f"'{status}'" for status in sorted(TERMINAL)) + ")"
_REFERENCED: Final = (
    "SELECT l.artifact_id, CASE WHEN j.artifact = l.artifact_id THEN 'result' ELSE 'checkpoint' END"
    " FROM artifact_lineage l JOIN job j ON j.id = l.job_id WHERE (j.artifact = l.artifact_id AND l.removed_at IS NULL)"
    f" OR (j.checkpoint = l.artifact_id AND j.status NOT IN {_FINISHED})"
)
_SELECT_SLOTS: Final = f"SELECT {_SLOT} FROM artifact_chunk WHERE digest = ANY(:digests) ORDER BY digest"
_UNREFERENCED: Final = "NOT EXISTS (SELECT 1 FROM artifact_ref WHERE chunk = number)"
_UNUSED: Final = (
    f"FROM artifact_chunk WHERE state IN {among(ChunkEvent.MARK)} AND wanted_at <= :before AND {_UNREFERENCED}"
    " ORDER BY wanted_at, number LIMIT :limit"
)
_ERASABLE: Final = (
    f"FROM artifact_chunk WHERE state IN {among(ChunkEvent.ERASE)}"
    f" AND (state = '{ChunkState.DELETING}' OR wanted_at <= :before) AND {_UNREFERENCED}"
    " ORDER BY wanted_at, number LIMIT :limit"
)
_encode: Final = msgspec.json.Encoder().encode
_manifest: Final = msgspec.json.Decoder(ArtifactManifest).decode
_lineage: Final = msgspec.json.Decoder(Lineage).decode


class ArtifactIndex:
    """Unknown ids raise NOT_FOUND, removed artifacts GONE.

    On a database that has the components `event`, `fleet` and `artifact`. Each method is one transaction, with the
    events of what it changed. Time is an argument; the hub's clock counts.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    async def reserve(self, digests: Sequence[str], now_s: float, *, stale_after_s: float) -> Mapping[str, Slot]:
        """A row for each, and nobody removes them for a while: what was to be deleted is wanted again.

        A row that was wanted less than `stale_after_s` ago is left as it is, so that asking twice costs one write.
        """
        ordered = sorted(set(digests))

        async def take(tx: Transaction) -> dict[str, Slot]:
            slots: dict[str, Slot] = {}
            # A row that was in the way of an insert may be erased before it is read: then it is inserted after all.
            while missing := [digest for digest in ordered if digest not in slots]:
                await tx.many(
                    "INSERT INTO artifact_chunk (digest, state, size, wanted_at, checked_at)"
                    f" VALUES (:digest::text, '{ChunkState.INCOMING}', 0, :now::float8, 0)"
                    " ON CONFLICT (digest) DO NOTHING",
                    [{"digest": digest, "now": now_s} for digest in missing],
                )
                await tx.execute(
                    f"UPDATE artifact_chunk SET wanted_at = :now, state = {becomes(ChunkEvent.RESERVE)}"
                    " WHERE number IN (SELECT number FROM artifact_chunk WHERE digest = ANY(:digests)"
                    f" AND state IN {among(ChunkEvent.RESERVE)}"
                    f" AND (wanted_at <= :stale OR state = '{ChunkState.TO_DELETE}') ORDER BY digest FOR UPDATE)",
                    {"now": now_s, "digests": missing, "stale": now_s - stale_after_s},
                )
                slots |= await _slots(tx, missing)
            return slots

        return await self._database.run(take)

    async def slots(self, digests: Sequence[str]) -> Mapping[str, Slot]:
        """Those that there are."""
        rows = await self._database.rows(_SELECT_SLOTS, {"digests": list(digests)})
        return {slot.digest: slot for slot in map(_decode_slot, rows)}

    async def stored(self, slots: Sequence[Slot], now_s: float) -> None:
        """Their bytes, of their sizes, are in the store. CONFLICT if a row was removed since it was reserved."""

        async def store(tx: Transaction) -> None:
            there = await _slots(tx, [slot.digest for slot in slots], lock=True)
            for slot in slots:
                row = there.get(slot.digest)
                if row is None or row.number != slot.number or row.state is ChunkState.DELETING:
                    raise checks.chunk_overtaken(slot.digest)
            await tx.execute(
                f"UPDATE artifact_chunk SET state = {becomes(ChunkEvent.STORE)}, size = s.size, wanted_at = :now,"
                " checked_at = :now FROM unnest(:numbers::bigint[], :sizes::bigint[]) AS s (number, size)"
                f" WHERE artifact_chunk.number = s.number AND state IN {among(ChunkEvent.STORE)}",
                {"now": now_s, "numbers": [slot.number for slot in slots], "sizes": [slot.size for slot in slots]},
            )

        await self._database.run(store)

    async def damaged(self, digest: str, reason: str, now_s: float) -> None:
        """Its bytes are wrong or gone: it is missing from now on."""

        async def damage(tx: Transaction) -> None:
            if await tx.changed(
                f"UPDATE artifact_chunk SET state = {becomes(ChunkEvent.DAMAGE)}, wanted_at = :now"
                f" WHERE digest = :digest AND state IN {among(ChunkEvent.DAMAGE)}",
                {"now": now_s, "digest": digest},
            ):
                await record(tx, [EventRecord(now_s, "hub", event_kinds.CHUNK_DAMAGED, digest, {"reason": reason})])

        await self._database.run(damage)

    async def commit(self, commit: Commit, now_s: float) -> CommitReply:
        """The artifact, its references and its lineage, if every chunk is there with the right size.

        PRECONDITION names the chunks that are missing. The same commit again gets the same answer, also when the
        attempt is over by then. An artifact that was removed is there again, with this lineage alone. EXHAUSTED when a
        new one does not fit into the account; one that is there already costs nothing, but is for nobody who has more
        than the quota. FORBIDDEN for data under a name of another owner, EXHAUSTED under one name more than an owner
        may have. FORBIDDEN for a person who names chunks that only training servers have saved, now or before.
        """
        return await self._database.run(lambda tx: _commit(tx, commit, now_s))

    async def artifact(self, artifact_id: str) -> ArtifactRow:
        rows = await self._database.rows(f"SELECT {_ARTIFACT} FROM artifact WHERE id = :id", {"id": artifact_id})
        return _decode_artifact(rows[0] if rows else None, artifact_id)

    async def blob(self, sha256: str) -> str:
        """The artifact that was uploaded as this blob."""
        select = "SELECT artifact_id FROM artifact_blob WHERE sha256 = :sha256"
        rows = await self._database.rows(select, {"sha256": sha256})
        if not rows:
            raise checks.unknown_blob(sha256)
        return str(rows[0][0])

    async def is_open(self, digest: str) -> bool:
        """Says whether an artifact that is not the state of a server has this chunk."""
        return bool(await self._database.rows(_FIND_OPEN, {"digest": digest}))

    async def find(self, prefix: str, limit: int = 6) -> Sequence[str]:
        """Ids of artifacts that begin so, with or without their `artifact1_`."""
        whole = prefix if prefix.startswith("artifact") else f"artifact1_{prefix}"
        rows = await self._database.rows(
            "SELECT id FROM artifact WHERE id >= :low AND id < :high AND removed_at IS NULL ORDER BY id LIMIT :limit",
            # '~' sorts after every character of an id.
            {"low": whole, "high": f"{whole}~", "limit": limit},
        )
        return [id_ for (id_,) in rows]

    async def lineages(self, wanted: LineageFilter) -> Sequence[ArtifactRecord]:
        return [_decode_lineage(row) for row in await self._database.rows(*_lineage_query(wanted))]

    async def referenced(self) -> Mapping[str, str]:
        """Artifacts that a job needs or points to, and why: `checkpoint` of an unfinished one, `result` of another."""
        return dict(await self._database.rows(_REFERENCED))

    async def pin(self, artifact_id: str, reason: str, actor: str, now_s: float, *, owner: str | None = None) -> None:
        """Keep it whatever a policy says; an empty reason lets it go.

        With an owner, FORBIDDEN unless a lineage of it is hers, and for what another owner or an operator pinned.
        """

        async def change(tx: Transaction) -> None:
            row = _decode_artifact(await _artifact(tx, artifact_id), artifact_id)
            if owner is not None:
                checks.check_pin(row, owner, await _shares(tx, artifact_id, owner))
            if row.pinned != reason:
                values = {"reason": reason, "by": owner or "" if reason else "", "id": artifact_id}
                await tx.execute("UPDATE artifact SET pinned = :reason, pinned_by = :by WHERE id = :id", values)
                kind = event_kinds.ARTIFACT_PINNED if reason else event_kinds.ARTIFACT_UNPINNED
                await record(tx, [EventRecord(now_s, actor, kind, artifact_id, {"reason": reason})])

        await self._database.run(change)

    async def remove(
        self, artifact_id: str, reason: str, actor: str, now_s: float, *, upto_seq: int | None = None
    ) -> bool:
        """Let go of its chunks, and withdraw every lineage, which stays known.

        PRECONDITION if it is pinned or an unfinished job's checkpoint.

        With `upto_seq`, False and unchanged if it was committed again since that lineage. Removed before: False.
        """
        return await self._database.run(lambda tx: _remove(tx, artifact_id, reason, actor, now_s, upto_seq))

    async def withdraw(self, artifact_id: str, owner: str, reason: str, actor: str, now_s: float) -> bool:
        """Withdraw what is this owner's of its lineage, but for sources: FORBIDDEN if nothing else is.

        What nobody else committed is removed as by `remove`: True. Else its chunks stay, in the quota of another owner.
        PRECONDITION if the owner has pinned it.
        """

        async def withdraw(tx: Transaction) -> bool:
            row = _decode_artifact(await _artifact(tx, artifact_id), artifact_id)
            if not checks.is_needed_by_others(row, owner, await _shares(tx, artifact_id, owner)):
                return await _remove(tx, artifact_id, reason, actor, now_s, None)
            values = {"now": now_s, "id": artifact_id, "owner": owner}
            await tx.execute(_WITHDRAW_HERS, values)
            await tx.execute(_PASS_ON, values)
            body = {"reason": reason, "owner": owner}
            await record(tx, [EventRecord(now_s, actor, event_kinds.ARTIFACT_WITHDRAWN, artifact_id, body)])
            return False

        return await self._database.run(withdraw)

    async def unused(self, before_s: float, limit: int) -> Sequence[ArtifactChunk]:
        """Returns what `mark_unused` would take."""
        values = {"before": before_s, "limit": limit}
        return _chunks(await self._database.rows(f"SELECT {_SLOT} {_UNUSED}", values))

    async def mark_unused(self, before_s: float, now_s: float, limit: int) -> Sequence[ArtifactChunk]:
        """Mark stored chunks that nothing refers to and nobody has wanted since: they are to be deleted."""
        # A commit that came between changed `wanted_at`, which is compared again once the row is locked.
        rows = await self._database.returning(
            f"UPDATE artifact_chunk SET state = {becomes(ChunkEvent.MARK)}, wanted_at = :now"
            f" WHERE number IN (SELECT number {_UNUSED} FOR UPDATE SKIP LOCKED) RETURNING {_SLOT}",
            {"now": now_s, "before": before_s, "limit": limit},
        )
        return _chunks(rows)

    async def erasable(self, before_s: float, limit: int) -> Sequence[ArtifactChunk]:
        values = {"before": before_s, "limit": limit}
        return _chunks(await self._database.rows(f"SELECT {_SLOT} {_ERASABLE}", values))

    async def erase(self, before_s: float, limit: int) -> Sequence[Slot]:
        """Take rows that were marked, never arrived or stayed damaged since, unreferenced: their bytes may go now."""
        rows = await self._database.returning(
            f"UPDATE artifact_chunk SET state = {becomes(ChunkEvent.ERASE)}"
            f" WHERE number IN (SELECT number {_ERASABLE} FOR UPDATE SKIP LOCKED) RETURNING {_SLOT}",
            {"before": before_s, "limit": limit},
        )
        return list(map(_decode_slot, rows))

    async def erased(self, slots: Sequence[Slot]) -> None:
        """Their bytes are gone, and so are the rows."""
        await self._database.changed(
            f"DELETE FROM artifact_chunk WHERE number = ANY(:numbers::bigint[]) AND state = '{ChunkState.DELETING}'",
            {"numbers": [slot.number for slot in slots]},
        )

    async def least_checked(self, before_s: float, limit: int) -> Sequence[Slot]:
        """Stored chunks that were not checked since, the longest unchecked first."""
        rows = await self._database.rows(
            f"SELECT {_SLOT} FROM artifact_chunk WHERE state = '{ChunkState.STORED}' AND checked_at < :before"
            " ORDER BY checked_at, number LIMIT :limit",
            {"before": before_s, "limit": limit},
        )
        return list(map(_decode_slot, rows))

    async def checked(self, slots: Sequence[Slot], now_s: float) -> None:
        await self._database.changed(
            "UPDATE artifact_chunk SET checked_at = :now WHERE number IN (SELECT number FROM artifact_chunk"
            " WHERE number = ANY(:numbers::bigint[]) ORDER BY digest FOR UPDATE)",
            {"now": now_s, "numbers": [slot.number for slot in slots]},
        )

    async def usage(self) -> StorageUsage:
        ((artifacts,),) = await self._database.rows("SELECT count(*) FROM artifact WHERE removed_at IS NULL")
        ((chunks, size, damaged),) = await self._database.rows(
            f"SELECT count(*) FILTER (WHERE state IN {among(ChunkEvent.DAMAGE)}),"
            f" coalesce(sum(size) FILTER (WHERE state IN {among(ChunkEvent.DAMAGE)}), 0)::bigint,"
            f" count(*) FILTER (WHERE state = '{ChunkState.DAMAGED}') FROM artifact_chunk"
        )
        return StorageUsage(artifacts=artifacts, chunks=chunks, bytes=size, damaged=damaged)

    async def owner_bytes(self) -> Mapping[str, int]:
        """The sum of the sizes of the artifacts of each owner: each counts in full, also where chunks are shared."""
        return dict(await self._database.rows(_OWNER_BYTES))

    async def events(self, after: str, limit: int, *, subject: str = "") -> Sequence[events.StoredEvent]:
        return await events.read(self._database, after, limit, subject=subject)


async def _one(tx: Transaction, statement: str, values: Values) -> Any:
    """The first row, or None."""
    rows = await tx.rows(statement, values)
    return rows[0] if rows else None


async def _slots(tx: Transaction, digests: Sequence[str], *, lock: bool = False) -> dict[str, Slot]:
    rows = await tx.rows(f"{_SELECT_SLOTS}{' FOR UPDATE' if lock else ''}", {"digests": list(digests)})
    return {slot.digest: slot for slot in map(_decode_slot, rows)}


async def _artifact(tx: Transaction, artifact_id: str) -> Any:
    return await _one(tx, f"SELECT {_ARTIFACT} FROM artifact WHERE id = :id FOR UPDATE", {"id": artifact_id})


async def _shares(tx: Transaction, artifact_id: str, owner: str) -> checks.Shares:
    return checks.Shares(*await _one(tx, _SHARES, {"id": artifact_id, "owner": owner}))


async def _commit(tx: Transaction, commit: Commit, now_s: float) -> CommitReply:
    artifact_id = commit.manifest.id
    lineage_id = commit.lineage.id_for(artifact_id)
    if commit.account.limit is not None or commit.data_name:
        # Commits of one owner come one at a time, before any other lock: each counts those before it.
        await tx.lock(f"artifact.owner {commit.account.owner}")
    if commit.hold is not None and not await _is_lineage_recorded(tx, lineage_id):
        # The lease is read once the job is locked: in one statement it would be as old as the statement.
        values = {"id": commit.hold.job_id}
        job = await _one(tx, "SELECT status, epoch, host_id FROM job WHERE id = :id FOR UPDATE", values)
        lease = await _one(tx, "SELECT 1 FROM lease WHERE job_id = :id", values)
        checks.check_attempt(job, commit.hold, leased=lease is not None)
    # One commit of an artifact at a time: a row that is not there yet cannot be locked.
    await tx.lock(artifact_id)
    there = await _artifact(tx, artifact_id)
    if await _is_lineage_recorded(tx, lineage_id):
        return CommitReply(artifact_id=artifact_id, lineage_id=lineage_id, new=False)
    wanted = commit.manifest.chunks()
    slots = await _slots(tx, list(wanted), lock=True)
    checks.check_chunks(wanted, slots.values())
    numbers = [slot.number for slot in slots.values()]
    await _guard_closed(tx, commit, numbers)
    await _check_account(tx, commit, checks.added_bytes(there, commit))
    await _take_name(tx, commit)
    await tx.execute(
        f"UPDATE artifact_chunk SET state = {becomes(ChunkEvent.RESERVE)}, wanted_at = :now"
        " WHERE number = ANY(:numbers::bigint[])",
        {"now": now_s, "numbers": numbers},
    )
    (seq,) = await _one(
        tx,
        "INSERT INTO artifact (id, manifest, size, committed_at, pinned, owner)"
        " VALUES (:id, :manifest, :size, :now, '', :owner)"
        f" ON CONFLICT (id) DO UPDATE SET removed_at = NULL, owner = {_KEPT_OWNER} RETURNING seq",
        {
            "id": artifact_id,
            "manifest": commit.manifest.encode(),
            "size": commit.manifest.size,
            "now": now_s,
            "owner": commit.account.owner,
        },
    )
    await tx.many(
        "INSERT INTO artifact_ref VALUES (:chunk::bigint, :artifact::bigint) ON CONFLICT DO NOTHING",
        [{"chunk": number, "artifact": seq} for number in numbers],
    )
    await _insert_lineage(tx, commit, artifact_id, lineage_id, now_s)
    if commit.blob:
        insert = "INSERT INTO artifact_blob VALUES (:sha256, :artifact) ON CONFLICT DO NOTHING"
        await tx.execute(insert, {"sha256": commit.blob, "artifact": artifact_id})
    await record(tx, [_committed(commit, artifact_id, lineage_id, now_s)])
    return CommitReply(artifact_id=artifact_id, lineage_id=lineage_id, new=True)


async def _check_account(tx: Transaction, commit: Commit, added: int | None) -> None:
    account = commit.account
    if account.limit is not None and added is not None:
        (used,) = await _one(tx, _BYTES_OF, {"owner": account.owner})
        check_bytes(account.owner, account.limit, used, added, refusal=account.refusal)


async def _guard_closed(tx: Transaction, commit: Commit, numbers: Sequence[int]) -> None:
    values = {"numbers": numbers, "job": commit.lineage.job_id}
    if checks.names_chunks(commit):
        checks.check_closed(*await _one(tx, _CLOSED, values))
    if commit.hold is not None and commit.lineage.kind is ArtifactKind.CHECKPOINT:
        await tx.execute(_CLOSE, values)


async def _take_name(tx: Transaction, commit: Commit) -> None:
    """A name without an owner becomes the submitter's."""
    if commit.data_name:
        values = {"name": commit.data_name, "owner": commit.account.owner}
        if await tx.changed("INSERT INTO data_name VALUES (:name, :owner) ON CONFLICT DO NOTHING", values):
            (owned,) = await _one(tx, "SELECT count(*) - 1 FROM data_name WHERE owner = :owner", values)
            checks.check_name_count(commit, owned)
        (owner,) = await _one(tx, "SELECT owner FROM data_name WHERE name = :name", values)
        checks.check_name(commit, owner)


async def _is_lineage_recorded(tx: Transaction, lineage_id: str) -> bool:
    return bool(
        await tx.rows("SELECT 1 FROM artifact_lineage WHERE id = :id AND removed_at IS NULL", {"id": lineage_id})
    )


async def _insert_lineage(tx: Transaction, commit: Commit, artifact_id: str, lineage_id: str, now_s: float) -> None:
    """One that was withdrawn is recorded anew: it is the latest now, and whose it is may have changed."""
    made = commit.lineage
    parents = sorted(set(made.parents))
    withdrawn = await _one(tx, "DELETE FROM artifact_lineage WHERE id = :id RETURNING seq", {"id": lineage_id})
    if withdrawn is not None:
        values = {"lineage": withdrawn[0], "parents": parents}
        await tx.execute("DELETE FROM artifact_metric WHERE lineage = :lineage", values)
        await tx.execute("DELETE FROM artifact_parent WHERE parent = ANY(:parents) AND lineage = :lineage", values)
    (seq,) = await _one(
        tx,
        "INSERT INTO artifact_lineage"
        " (id, artifact_id, committed_at, kind, job_id, epoch, model, mode, actor, owner, body)"
        " VALUES (:id, :artifact, :now, :kind, :job, :epoch, :model, :mode, :actor, :owner, :body) RETURNING seq",
        {
            "id": lineage_id,
            "artifact": artifact_id,
            "now": now_s,
            "kind": made.kind,
            "job": made.job_id,
            "epoch": made.epoch,
            "model": made.model,
            "mode": made.mode,
            "actor": commit.actor,
            "owner": commit.account.owner,
            "body": _encode(made),
        },
    )
    await tx.many(
        "INSERT INTO artifact_metric VALUES (:lineage::bigint, :name::text, :value::float8)",
        [{"lineage": seq, "name": name, "value": value} for name, value in made.metrics.items()],
    )
    await tx.many(
        "INSERT INTO artifact_parent VALUES (:parent::text, :lineage::bigint)",
        [{"parent": parent, "lineage": seq} for parent in parents],
    )


def _committed(commit: Commit, artifact_id: str, lineage_id: str, now_s: float) -> EventRecord:
    made = commit.lineage
    body = {
        "lineage": lineage_id,
        "kind": made.kind,
        "job": made.job_id,
        "epoch": made.epoch,
        "model": made.model,
        "mode": made.mode,
        "size": commit.manifest.size,
    }
    return EventRecord(now_s, commit.actor, event_kinds.ARTIFACT_COMMITTED, artifact_id, body)


async def _remove(
    tx: Transaction, artifact_id: str, reason: str, actor: str, now_s: float, upto_seq: int | None
) -> bool:
    values = {"id": artifact_id, "now": now_s, "upto": upto_seq}
    row = await _artifact(tx, artifact_id)
    needed = await tx.rows(
        "SELECT 1 FROM artifact_lineage l JOIN job j ON j.id = l.job_id WHERE l.artifact_id = :id"
        f" AND j.checkpoint = l.artifact_id AND j.status NOT IN {_FINISHED}",
        values,
    )
    if not checks.check_removable(row, artifact_id, needed=bool(needed)):
        return False
    newer = "SELECT 1 FROM artifact_lineage WHERE artifact_id = :id AND seq > :upto AND removed_at IS NULL"
    if upto_seq is not None and await tx.rows(newer, values):
        return False
    (seq,) = await _one(tx, "UPDATE artifact SET removed_at = :now WHERE id = :id RETURNING seq", values)
    await tx.execute(_WITHDRAW, values)
    await tx.execute(
        "UPDATE artifact_chunk SET wanted_at = :now WHERE number IN (SELECT c.number FROM artifact_chunk c"
        " JOIN artifact_ref r ON r.chunk = c.number WHERE r.artifact = :seq ORDER BY c.digest FOR UPDATE OF c)",
        {"now": now_s, "seq": seq},
    )
    await tx.execute("DELETE FROM artifact_ref WHERE artifact = :seq", {"seq": seq})
    await tx.execute("DELETE FROM artifact_blob WHERE artifact_id = :id", values)
    await record(tx, [EventRecord(now_s, actor, event_kinds.ARTIFACT_REMOVED, artifact_id, {"reason": reason})])
    return True


def _chunks(rows: Sequence[Sequence[Any]]) -> list[ArtifactChunk]:
    return [ArtifactChunk(slot.digest, slot.size) for slot in map(_decode_slot, rows)]


def _decode_slot(row: Sequence[Any]) -> Slot:
    number, digest, state, size = row
    return Slot(number, digest, ChunkState(state), size)


def _decode_artifact(row: Sequence[Any] | None, artifact_id: str) -> ArtifactRow:
    if row is None:
        raise checks.unknown_artifact(artifact_id)
    id_, manifest, size, committed, pinned, removed, owner, pinned_by = row
    if removed is not None:
        raise StrataError(Code.GONE, f"{id_} was removed", hint="only its lineage is left", removed_at_s=removed)
    return ArtifactRow(id_, _manifest(manifest), size, committed, pinned, pinned_by, owner)


def _decode_lineage(row: Sequence[Any]) -> ArtifactRecord:
    fields: dict[str, Any] = dict(zip(_LINEAGE_FIELDS, row, strict=True))
    return ArtifactRecord(**fields | {"lineage": _lineage(fields["lineage"])})


def _lineage_query(wanted: LineageFilter) -> tuple[str, Values]:
    equal = {column: f"l.{column} = :{column}" for column in ("job_id", "model", "mode", "kind")}
    conditions = {
        "l.removed_at IS NULL": not wanted.removed,
        f"j.status = '{JobStatus.COMPLETED}' AND j.artifact = l.artifact_id AND t.outcome = 'completed'": (
            wanted.completed
        ),
        "t.job_id IS NOT NULL": wanted.attempted,
        **{condition: getattr(wanted, column) for column, condition in equal.items()},
        "l.artifact_id = ANY(:artifact_ids)": wanted.artifact_ids,
        "l.seq IN (SELECT lineage FROM artifact_parent WHERE parent = ANY(:parents))": wanted.parents,
        "l.seq < :before_seq": not wanted.metric,
        "m.name = :metric": wanted.metric,
    }
    first, order = "artifact_lineage l", "l.seq DESC"
    if wanted.metric:
        # Its index is read in order, and only as many lineages as are shown.
        first = "artifact_metric m JOIN artifact_lineage l ON l.seq = m.lineage"
        order = f"m.value {'DESC' if wanted.best == 'max' else 'ASC'}, m.lineage DESC"
    tables = (
        f"{first} JOIN artifact a ON a.id = l.artifact_id LEFT JOIN job j ON j.id = l.job_id"
        " LEFT JOIN attempt t ON t.job_id = l.job_id AND t.epoch = l.epoch"
        f" LEFT JOIN data_name d ON d.name = l.model AND l.kind = '{ArtifactKind.DATA}'"
    )
    where = " AND ".join(condition for condition, asked in conditions.items() if asked)
    test = f" WHERE {where}" if where else ""
    query = f"SELECT {_LINEAGE} FROM {tables}{test} ORDER BY {order} LIMIT :limit"
    return query, asdict(wanted) | {"artifact_ids": list(wanted.artifact_ids), "parents": list(wanted.parents)}
