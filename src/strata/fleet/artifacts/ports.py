"""The ports of artifacts to chunk storage and to the database: each has two adapters and one conformance suite.

`ChunkStore` holds bytes under their digest, on disk (`disk`) or in object storage (`objects`). Whatever lies there was
verified before it became visible, so a part of a chunk can never be read. `ArtifactIndex` knows which chunks there are,
which artifacts need them and where those came from (`sqlite`, `postgres`). Each of its methods is one transaction, with
the events of what it changed. Time is an argument; the hub's clock counts.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

from strata.base.errors import Code
from strata.database.events import StoredEvent
from strata.fleet.artifacts.manifest import ArtifactChunk, ArtifactKind, ArtifactManifest, Lineage
from strata.fleet.artifacts.states import ChunkState
from strata.fleet.ports import AttemptKey


class Signer(Protocol):
    """Lets a host put and get chunks by URLs that are good for one thing and for a while."""

    async def sign_put(self, digests: Sequence[str], owner: str, expires_s: float) -> Sequence[str]:
        """For each an URL to which its owner may PUT it. What comes that way counts only once it is adopted."""

    async def sign_get(self, digests: Sequence[str], expires_s: float) -> Sequence[str]: ...

    async def adopt(self, chunk: ArtifactChunk, owner: str) -> bool:
        """Verify what the owner sent to a signed URL and make it the chunk; False if nothing right is there."""


class ChunkStore(Protocol):
    """Refuses what is not the chunk it is said to be with INVALID, and a full disk with EXHAUSTED."""

    @property
    def signer(self) -> Signer | None:
        """How hosts send to it and read from it past the hub; None where all goes through the hub."""

    async def put(self, chunk: ArtifactChunk, body: AsyncIterable[bytes], *, owner: str = "", offset: int = 0) -> None:
        """Durable and visible when this returns; what was there under the digest is replaced.

        When `body` breaks off, what came of it may be kept for the same owner, who can go on from `received`. Any other
        offset is CONFLICT. A wrong byte anywhere makes the whole chunk start over.
        """

    async def received(self, digests: Sequence[str], owner: str) -> Mapping[str, int]:
        """Of which broken-off puts something is there, and how much."""

    async def read(self, chunk: ArtifactChunk) -> bytes:
        """Verified: CORRUPT if the bytes are not the chunk, NOT_FOUND if there are none."""

    async def has(self, digest: str) -> bool: ...

    async def delete(self, digest: str) -> None:
        """No matter whether it is there."""

    async def quarantine(self, chunk: ArtifactChunk) -> bool:
        """Put bytes that are not the chunk out of sight, for a person to look at; False if they are right after all."""

    async def free_bytes(self) -> int | None:
        """How much more may be stored before it refuses; None where nobody can tell."""

    async def tidy(self, before_s: float) -> int:
        """Remove the rests of uploads that nobody has touched since; how many."""

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Slot:
    """The row of a chunk. Its number is never used again, so a writer that was overtaken by a removal is noticed."""

    number: int
    digest: str
    state: ChunkState
    size: int
    """0 until it was stored once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactRow:
    id: str
    manifest: ArtifactManifest
    size: int
    committed_at_s: float
    pinned: str = ""
    """Why it is kept whatever the policy says; empty if it is not."""
    pinned_by: str = ""
    """The owner who pinned it; empty if an operator did."""
    owner: str = ""
    """Who has it in the quota of bytes: of the owners who committed it and did not withdraw it, the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineageRow:
    id: str
    seq: int
    """Grows with each record, so the latest is the highest."""
    artifact_id: str
    size: int
    committed_at_s: float
    lineage: Lineage
    pinned: str = ""
    removed_at_s: float | None = None
    """When it was withdrawn. Its artifact stays while another lineage needs it."""
    by: str = ""
    """Who committed it, as events name the caller. Empty: it is from before this was recorded."""
    owner: str = ""
    """Of the name, where it is data; else of the job that made it, or who committed it."""
    project: str = ""
    """Of the job that made it; empty where none did."""
    trainer_digest: str = ""
    """Of the attempt that made it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitResult:
    artifact_id: str
    lineage_id: str
    new: bool
    """False when this very commit had been made before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineageFilter:
    artifact_ids: Sequence[str] = ()
    job_id: str = ""
    model: str = ""
    mode: str = ""
    kind: ArtifactKind | None = None
    parents: Sequence[str] = ()
    """Only what was made from one of these artifacts."""
    metric: str = ""
    """Order by it, and only what has it; else the latest come first."""
    best: Literal["max", "min"] = "max"
    removed: bool = False
    """Also what was withdrawn since."""
    completed: bool = False
    """Only what completed its job: the result that the job's row points to, of the attempt that ended so."""
    attempted: bool = False
    """Only what an attempt made, not what a person uploaded."""
    before_seq: int = 2**62
    """Paging: the `seq` of the last row of the page before. Not with `metric`."""
    limit: int = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageUsage:
    artifacts: int
    chunks: int
    bytes: int
    damaged: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageAccount:
    """Against whose quota bytes count, and how many of this owner the hub stores at most."""

    owner: str = ""
    limit: int | None = None
    operator: bool = False
    """May commit data under the names of other owners."""
    refusal: Code = Code.EXHAUSTED
    """INVALID for what an attempt makes: its host would send it again and again after EXHAUSTED, and hold the job."""


NO_ACCOUNT: Final = StorageAccount()


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    manifest: ArtifactManifest
    lineage: Lineage
    hold: AttemptKey | None = None
    """The attempt it is committed for: refused with STALE when that is over."""
    blob: str = ""
    """The SHA-256 under which its only file was uploaded and verified as a whole."""
    actor: str = ""
    account: StorageAccount = NO_ACCOUNT

    @property
    def data_name(self) -> str:
        """The name that stands for it from now on; empty if none does."""
        return self.lineage.model if self.lineage.kind is ArtifactKind.DATA else ""


@dataclass(frozen=True, slots=True)
class GarbageCollected:
    """What a collection did, or would do."""

    marked: Sequence[ArtifactChunk] = field(default=())
    erased: Sequence[ArtifactChunk] = field(default=())


class ArtifactIndex(Protocol):
    """Unknown ids raise NOT_FOUND, removed artifacts GONE."""

    async def reserve(self, digests: Sequence[str], now_s: float, *, stale_after_s: float) -> Mapping[str, Slot]:
        """A row for each, and nobody removes them for a while: what was to be deleted is wanted again.

        A row that was wanted less than `stale_after_s` ago is left as it is, so that asking twice costs one write.
        """

    async def slots(self, digests: Sequence[str]) -> Mapping[str, Slot]:
        """Those that there are."""

    async def stored(self, slots: Sequence[Slot], now_s: float) -> None:
        """Their bytes, of their sizes, are in the store. CONFLICT if a row was removed since it was reserved."""

    async def damaged(self, digest: str, reason: str, now_s: float) -> None:
        """Its bytes are wrong or gone: it is missing from now on."""

    async def commit(self, commit: Commit, now_s: float) -> CommitResult:
        """The artifact, its references and its lineage, if every chunk is there with the right size.

        PRECONDITION names the chunks that are missing. The same commit again gets the same answer, also when the
        attempt is over by then. An artifact that was removed is there again, with this lineage alone. EXHAUSTED when a
        new one does not fit into the account; one that is there already costs nothing, but is for nobody who has more
        than the quota. FORBIDDEN for data under a name of another owner, EXHAUSTED under one name more than an owner
        may have. FORBIDDEN for a person who names chunks that only training servers have saved, now or before.
        """

    async def artifact(self, artifact_id: str) -> ArtifactRow: ...

    async def blob(self, sha256: str) -> str:
        """The artifact that was uploaded as this blob."""

    async def is_open(self, digest: str) -> bool:
        """Whether an artifact that is not the state of a server has this chunk."""

    async def find(self, prefix: str, limit: int = 6) -> Sequence[str]:
        """Ids of artifacts that begin so, with or without their `artifact1_`."""

    async def lineages(self, wanted: LineageFilter) -> Sequence[LineageRow]: ...

    async def referenced(self) -> Mapping[str, str]:
        """Artifacts that a job needs or points to, and why: `checkpoint` of an unfinished one, `result` of another."""

    async def pin(self, artifact_id: str, reason: str, actor: str, now_s: float, *, owner: str | None = None) -> None:
        """Keep it whatever a policy says; an empty reason lets it go.

        With an owner, FORBIDDEN unless a lineage of it is hers, and for what another owner or an operator pinned.
        """

    async def remove(
        self, artifact_id: str, reason: str, actor: str, now_s: float, *, upto_seq: int | None = None
    ) -> bool:
        """Let go of its chunks, and withdraw every lineage, which stays known.

        PRECONDITION if it is pinned or an unfinished job's checkpoint.

        With `upto_seq`, False and unchanged if it was committed again since that lineage. Removed before: False.
        """

    async def withdraw(self, artifact_id: str, owner: str, reason: str, actor: str, now_s: float) -> bool:
        """Withdraw what is this owner's of its lineage, but for sources: FORBIDDEN if nothing else is.

        What nobody else committed is removed as by `remove`: True. Else its chunks stay, in the quota of another owner.
        PRECONDITION if the owner has pinned it.
        """

    async def unused(self, before_s: float, limit: int) -> Sequence[ArtifactChunk]:
        """What `mark_unused` would take."""

    async def mark_unused(self, before_s: float, now_s: float, limit: int) -> Sequence[ArtifactChunk]:
        """Mark stored chunks that nothing refers to and nobody has wanted since: they are to be deleted."""

    async def erasable(self, before_s: float, limit: int) -> Sequence[ArtifactChunk]: ...

    async def erase(self, before_s: float, limit: int) -> Sequence[Slot]:
        """Take rows that were marked, never arrived or stayed damaged since, unreferenced: their bytes may go now."""

    async def erased(self, slots: Sequence[Slot]) -> None:
        """Their bytes are gone, and so are the rows."""

    async def least_checked(self, before_s: float, limit: int) -> Sequence[Slot]:
        """Stored chunks that were not checked since, the longest unchecked first."""

    async def checked(self, slots: Sequence[Slot], now_s: float) -> None: ...

    async def usage(self) -> StorageUsage: ...

    async def owner_bytes(self) -> Mapping[str, int]:
        """The sum of the sizes of the artifacts of each owner: each counts in full, also where chunks are shared."""

    async def events(self, after: str, limit: int, *, subject: str = "") -> Sequence[StoredEvent]: ...
