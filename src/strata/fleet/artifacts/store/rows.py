"""How artifacts lie in a table, and the judgements that both databases make: the same columns, the same refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import msgspec

from strata.base.errors import Code, StrataError
from strata.database.events import EventRecord
from strata.fleet.artifacts.manifest import ArtifactKind, ArtifactManifest, Lineage
from strata.fleet.artifacts.ports import ArtifactRow, Commit, LineageFilter, LineageRow, Slot
from strata.fleet.artifacts.states import PRESENT, ChunkState
from strata.fleet.core.job import TERMINAL, JobStatus
from strata.fleet.core.lease_status import ALIVE, lease_status, stale_attempt, unknown_job
from strata.fleet.core.ownership import foreign
from strata.fleet.ports import AttemptKey

SLOT: Final = "number, digest, state, size"
ARTIFACT: Final = "id, manifest, size, committed_at, pinned, removed_at, owner, pinned_by"
OWNER_BYTES: Final = "SELECT owner, sum(size) FROM artifact WHERE removed_at IS NULL GROUP BY owner"
BYTES_OF: Final = "SELECT coalesce(sum(size), 0) FROM artifact WHERE removed_at IS NULL AND owner = {owner}"
KEPT_OWNER: Final = "CASE WHEN artifact.removed_at IS NULL THEN artifact.owner ELSE excluded.owner END"
"""An artifact that was removed is of those who commit it again."""
LINEAGE: Final = (
    "l.id, l.seq, l.artifact_id, a.size, l.committed_at, l.body, a.pinned, l.removed_at, l.actor,"
    " coalesce(j.project, ''), coalesce(t.trainer_digest, ''), coalesce(d.owner, j.owner, l.owner)"
)
_HERS: Final = (
    f"coalesce((SELECT d.owner FROM data_name d WHERE d.name = l.model AND l.kind = '{ArtifactKind.DATA}'),"
    " (SELECT j.owner FROM job j WHERE j.id = l.job_id), l.owner) = {owner}"
)
_LIVE: Final = "l.artifact_id = {id} AND l.removed_at IS NULL"
SHARES: Final = (
    f"SELECT count(*) FILTER (WHERE hers AND kind <> '{ArtifactKind.SOURCE}'),"
    f" count(*) FILTER (WHERE hers AND kind = '{ArtifactKind.SOURCE}'), count(*) FILTER (WHERE NOT hers)"
    f" FROM (SELECT l.kind, {_HERS} AS hers FROM artifact_lineage l WHERE {_LIVE}) AS known"
)
"""What `Shares` has of an owner."""
WITHDRAW: Final = f"UPDATE artifact_lineage AS l SET removed_at = {{now}} WHERE {_LIVE}"
WITHDRAW_HERS: Final = f"{WITHDRAW} AND l.kind <> '{ArtifactKind.SOURCE}' AND {_HERS}"
PASS_ON: Final = (
    "UPDATE artifact SET owner = (SELECT l.owner FROM artifact_lineage l"
    f" WHERE {_LIVE} ORDER BY l.seq LIMIT 1) WHERE id = {{id}}"
    f" AND NOT EXISTS (SELECT 1 FROM artifact_lineage l WHERE {_LIVE} AND l.owner = artifact.owner)"
)
"""The bytes count against the quota of an owner who still needs them."""
_OPEN: Final = (
    "EXISTS (SELECT 1 FROM artifact_ref r JOIN artifact a ON a.seq = r.artifact WHERE r.chunk = c.number"
    " AND NOT EXISTS (SELECT 1 FROM artifact_lineage l JOIN job j ON j.id = l.job_id WHERE l.artifact_id = a.id"
    f" AND l.kind = '{ArtifactKind.CHECKPOINT}' AND {{kind}} = 'server'))"
)
OPEN: Final = f"SELECT 1 FROM artifact_chunk c WHERE c.digest = {{digest}} AND {_OPEN}"
CLOSED: Final = f"SELECT count(*) FROM artifact_chunk c WHERE c.number {{listed}} AND c.closed = 1 AND NOT {_OPEN}"
CLOSE: Final = (
    "UPDATE artifact_chunk SET closed = 1 WHERE number {listed}"
    " AND EXISTS (SELECT 1 FROM job j WHERE j.id = {job} AND {kind} = 'server')"
)
FINISHED: Final = "(" + ", ".join(f"'{status}'" for status in sorted(TERMINAL)) + ")"
REFERENCED: Final = (
    "SELECT l.artifact_id, CASE WHEN j.artifact = l.artifact_id THEN 'result' ELSE 'checkpoint' END"
    " FROM artifact_lineage l JOIN job j ON j.id = l.job_id WHERE (j.artifact = l.artifact_id AND l.removed_at IS NULL)"
    f" OR (j.checkpoint = l.artifact_id AND j.status NOT IN {FINISHED})"
)

encode: Final = msgspec.json.Encoder().encode
_manifest: Final = msgspec.json.Decoder(ArtifactManifest).decode
_lineage: Final = msgspec.json.Decoder(Lineage).decode


def decode_slot(row: Sequence[Any]) -> Slot:
    number, digest, state, size = row
    return Slot(number, digest, ChunkState(state), size)


def decode_artifact(row: Sequence[Any] | None, artifact_id: str) -> ArtifactRow:
    if row is None:
        raise unknown_artifact(artifact_id)
    id_, manifest, size, committed, pinned, removed, owner, pinned_by = row
    if removed is not None:
        raise StrataError(Code.GONE, f"{id_} was removed", hint="only its lineage is left", removed_at_s=removed)
    return ArtifactRow(
        id=id_,
        manifest=_manifest(manifest),
        size=size,
        committed_at_s=committed,
        pinned=pinned,
        pinned_by=pinned_by,
        owner=owner,
    )


def decode_lineage(row: Sequence[Any]) -> LineageRow:
    id_, seq, artifact_id, size, committed, body, pinned, removed, actor, project, trainer_digest, owner = row
    return LineageRow(
        id=id_,
        seq=seq,
        artifact_id=artifact_id,
        size=size,
        committed_at_s=committed,
        lineage=_lineage(body),
        pinned=pinned,
        removed_at_s=removed,
        by=actor,
        project=project,
        trainer_digest=trainer_digest,
        owner=owner,
    )


def unknown_artifact(artifact_id: str) -> StrataError:
    return StrataError(Code.NOT_FOUND, f"there is no artifact {artifact_id[:100]!r}")


def unknown_blob(sha256: str) -> StrataError:
    return StrataError(Code.NOT_FOUND, f"there is no blob {sha256[:100]!r}")


def chunk_overtaken(digest: str) -> StrataError:
    return StrataError(Code.CONFLICT, f"the chunk {digest} was removed while it was sent", hint="send it again")


JOB: Final = "status, epoch, host_id"


def check_attempt(job: Sequence[Any] | None, hold: AttemptKey, *, leased: bool) -> None:
    """From `JOB`: the attempt may still write, or STALE. `leased`: the job's lease row is there."""
    if job is None:
        raise unknown_job(hold.job_id)
    status, epoch, host_id = job
    claimed = (hold.epoch, hold.host_id)
    if lease_status(JobStatus(status), current=(epoch, host_id), claimed=claimed, leased=leased) not in ALIVE:
        raise stale_attempt(hold.job_id, hold.epoch, epoch)


def check_chunks(wanted: Mapping[str, int], found: Iterable[Slot]) -> None:
    """Every chunk of a manifest is present and of the size that the manifest gives it."""
    slots = {slot.digest: slot for slot in found}
    missing = [digest for digest in wanted if digest not in slots or slots[digest].state not in PRESENT]
    if missing:
        raise StrataError(
            Code.PRECONDITION,
            f"{len(missing)} of {len(wanted)} chunks are missing",
            hint="send them and commit again",
            missing=missing,
        )
    for digest, size in wanted.items():
        if slots[digest].size != size:
            actual = slots[digest].size
            raise StrataError(Code.INVALID, f"the chunk {digest} has {actual} bytes; the manifest says {size}")


ADOPT_NAME: Final = "UPDATE data_name SET owner = {owner} WHERE name = {name} AND owner = {actor}"
"""A name from before names had owners is kept for the key that used it first."""


def names_chunks(commit: Commit) -> bool:
    """Whether a person names chunks without the proof of having them: a blob was sent as a whole."""
    return commit.hold is None and not commit.blob and not commit.account.operator


def check_closed(closed: int) -> None:
    """FORBIDDEN for chunks, counted by `CLOSED`, that only training servers have saved."""
    if closed:
        raise StrataError(
            Code.FORBIDDEN,
            f"{closed} of these chunks are of the saved state of a training server",
            hint="an operator may commit them",
        )


def check_name(commit: Commit, owner: str) -> None:
    """FORBIDDEN if the name of this data is another owner's."""
    if owner != commit.account.owner and not commit.account.operator:
        raise StrataError(
            Code.FORBIDDEN, f"the data {commit.data_name!r} belongs to {owner}", hint="choose another name for yours"
        )


MAX_NAMES: Final = 1000
"""Of data, of an owner who is no operator."""


def check_name_count(commit: Commit, owned: int) -> None:
    """EXHAUSTED if one more name would be too many: a name that is taken is lost for all others."""
    if not commit.account.operator and owned >= MAX_NAMES:
        raise StrataError(
            Code.EXHAUSTED,
            f"{commit.account.owner} has {owned} names of data, and no more are possible",
            hint="upload it as a new version under one of them, or ask an operator to upload it",
        )


def added_bytes(row: Sequence[Any] | None, commit: Commit) -> int | None:
    """From `ARTIFACT`: what this commit adds to the quota of its account; None if it need not be looked at.

    What another stores adds nothing, but who has more than the quota already takes no share in it: it would become
    theirs when the other withdraws it.
    """
    if row is None or row[5] is not None:
        return commit.manifest.size
    return None if row[6] == commit.account.owner else 0


def check_removable(row: Sequence[Any] | None, artifact_id: str, *, needed: bool) -> bool:
    """From `ARTIFACT`: whether there is anything to remove."""
    if row is None:
        raise unknown_artifact(artifact_id)
    if row[5] is not None:
        return False
    if row[4]:
        raise _pinned(artifact_id, row[4])
    if needed:
        raise StrataError(
            Code.PRECONDITION, f"{artifact_id} is the checkpoint of a job that is not finished", hint="cancel the job"
        )
    return True


@dataclass(frozen=True, slots=True)
class Shares:
    """How many of the lineages of an artifact, of those that were not withdrawn, are an owner's, and how many not."""

    hers: int
    sources: int
    """Hers too, but only an operator may withdraw them."""
    others: int


def check_pin(row: ArtifactRow, owner: str, shares: Shares) -> None:
    """FORBIDDEN unless the artifact is this owner's, and nobody else pinned it."""
    if row.pinned and row.pinned_by != owner:
        by = row.pinned_by or "an operator"
        raise StrataError(
            Code.FORBIDDEN, f"{row.id} was pinned by {by}", hint="only they or an operator may change that"
        )
    if not (row.pinned or shares.hers or shares.sources):
        raise foreign("the artifact", row.owner)


def is_needed_by_others(row: ArtifactRow, owner: str, shares: Shares) -> bool:
    """Whether the bytes stay when this owner withdraws what is hers; FORBIDDEN if nothing is."""
    if not shares.hers and shares.sources:
        raise StrataError(Code.FORBIDDEN, "only an operator may remove a source: jobs of others may need it")
    if not shares.hers:
        raise foreign("the artifact", row.owner)
    if row.pinned and row.pinned_by == owner:
        raise _pinned(row.id, row.pinned)
    return bool(shares.others or shares.sources)


def _pinned(artifact_id: str, reason: str) -> StrataError:
    return StrataError(Code.PRECONDITION, f"{artifact_id} is pinned: {reason}", hint="unpin it first")


def withdrawn(artifact_id: str, owner: str, reason: str, actor: str, now_s: float) -> EventRecord:
    return EventRecord(now_s, actor, "artifact.withdrawn", artifact_id, {"reason": reason, "owner": owner})


def committed(commit: Commit, artifact_id: str, lineage_id: str, now_s: float) -> EventRecord:
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
    return EventRecord(now_s, commit.actor, "artifact.committed", artifact_id, body)


NEW_LINEAGE: Final = "id, artifact_id, committed_at, kind, job_id, epoch, model, mode, actor, owner, body"


def new_lineage(commit: Commit, artifact_id: str, lineage_id: str, now_s: float) -> tuple[Any, ...]:
    """The values of `NEW_LINEAGE`."""
    made = commit.lineage
    return (
        lineage_id,
        artifact_id,
        now_s,
        made.kind,
        made.job_id,
        made.epoch,
        made.model,
        made.mode,
        commit.actor,
        commit.account.owner,
        encode(made),
    )


def lineage_query(
    wanted: LineageFilter, mark: Callable[[str], str], listed: Callable[[str], str]
) -> tuple[str, dict[str, Any]]:
    """`mark` writes a parameter the way of the database, `listed` tests membership in a parameter that is a list."""
    equal = {column: f"l.{column} = {mark(column)}" for column in ("job_id", "model", "mode", "kind")}
    conditions = {
        "l.removed_at IS NULL": not wanted.removed,
        f"j.status = '{JobStatus.COMPLETED}' AND j.artifact = l.artifact_id AND t.outcome = 'completed'": (
            wanted.completed
        ),
        "t.job_id IS NOT NULL": wanted.attempted,
        **{condition: getattr(wanted, column) for column, condition in equal.items()},
        f"l.artifact_id {listed('artifact_ids')}": wanted.artifact_ids,
        f"l.seq IN (SELECT lineage FROM artifact_parent WHERE parent {listed('parents')})": wanted.parents,
        f"l.seq < {mark('before_seq')}": not wanted.metric,
        f"m.name = {mark('metric')}": wanted.metric,
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
    query = f"SELECT {LINEAGE} FROM {tables}{test} ORDER BY {order} LIMIT {mark('limit')}"
    return query, asdict(wanted) | {"artifact_ids": list(wanted.artifact_ids), "parents": list(wanted.parents)}
