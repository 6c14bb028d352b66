"""Refusals of the index of artifacts and their wording: missing chunks, wrong attempt, foreign or too many data names
(1,000), pins, and which bytes count against a quota.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from strata.base.errors import Code, StrataError
from strata.fleet.artifacts.ports import ArtifactRow, Commit, Slot
from strata.fleet.artifacts.states import PRESENT
from strata.fleet.core.job import JobStatus
from strata.fleet.core.lease_status import ALIVE, lease_status, stale_attempt, unknown_job
from strata.fleet.core.ownership import foreign
from strata.fleet.records import AttemptKey

MAX_NAMES: Final = 1000
"""The most names of data of an owner who is no operator."""


def unknown_artifact(artifact_id: str) -> StrataError:
    return StrataError(Code.NOT_FOUND, f"there is no artifact {artifact_id[:100]!r}")


def unknown_blob(sha256: str) -> StrataError:
    return StrataError(Code.NOT_FOUND, f"there is no blob {sha256[:100]!r}")


def chunk_overtaken(digest: str) -> StrataError:
    return StrataError(Code.CONFLICT, f"the chunk {digest} was removed while it was sent", hint="send it again")


def check_attempt(job: Sequence[Any] | None, hold: AttemptKey, *, leased: bool) -> None:
    """STALE unless the attempt may still write. `job`: its status, epoch and host; `leased`: its lease row is there."""
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


def names_chunks(commit: Commit) -> bool:
    """Says whether a person names chunks without the proof of having them: a blob was sent as a whole."""
    return commit.hold is None and not commit.blob and not commit.account.operator


def check_closed(closed: int) -> None:
    """FORBIDDEN for chunks, this many, that only training servers have saved."""
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


def check_name_count(commit: Commit, owned: int) -> None:
    """EXHAUSTED if one more name would be too many: a name that is taken is lost for all others."""
    if not commit.account.operator and owned >= MAX_NAMES:
        raise StrataError(
            Code.EXHAUSTED,
            f"{commit.account.owner} has {owned} names of data, and no more are possible",
            hint="upload it as a new version under one of them, or ask an operator to upload it",
        )


def added_bytes(row: Sequence[Any] | None, commit: Commit) -> int | None:
    """Returns what this commit adds to the quota of its account; None if it need not be looked at.

    What another stores adds nothing, but who has more than the quota already takes no share in it: it would become
    theirs when the other withdraws it.
    """
    if row is None or row[5] is not None:
        return commit.manifest.size
    return None if row[6] == commit.account.owner else 0


def check_removable(row: Sequence[Any] | None, artifact_id: str, *, needed: bool) -> bool:
    """Says whether there is anything to remove."""
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
    """Says whether the bytes stay when this owner withdraws what is hers; FORBIDDEN if nothing is."""
    if not shares.hers and shares.sources:
        raise StrataError(Code.FORBIDDEN, "only an operator may remove a source: jobs of others may need it")
    if not shares.hers:
        raise foreign("the artifact", row.owner)
    if row.pinned and row.pinned_by == owner:
        raise _pinned(row.id, row.pinned)
    return bool(shares.others or shares.sources)


def _pinned(artifact_id: str, reason: str) -> StrataError:
    return StrataError(Code.PRECONDITION, f"{artifact_id} is pinned: {reason}", hint="unpin it first")
