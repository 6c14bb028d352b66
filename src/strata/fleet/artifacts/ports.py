"""The ports of artifacts to chunk storage (`ChunkStore`, `Signer`), and the values that go to their index and come from
it.

`ChunkStore` holds bytes under their digest, on disk (`disk`) or in object storage (`objects`); both pass one
conformance suite. Whatever lies there was verified before it became visible, so a part of a chunk can never be read.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

from strata.base.errors import Code
from strata.fleet.artifacts.manifest import ArtifactChunk, ArtifactKind, ArtifactManifest, Lineage
from strata.fleet.artifacts.states import ChunkState
from strata.fleet.records import AttemptKey


class Signer(Protocol):
    """Lets a host put and get chunks by URLs that are good for one thing and for a while."""

    async def sign_put(self, digests: Sequence[str], owner: str, expires_s: float) -> Sequence[str]:
        """Signs for each an URL to which its owner may PUT it. What comes that way counts only once it is adopted."""

    async def sign_get(self, digests: Sequence[str], expires_s: float) -> Sequence[str]: ...

    async def adopt(self, chunk: ArtifactChunk, owner: str) -> bool:
        """Verify what the owner sent to a signed URL and make it the chunk; False if nothing right is there."""


class ChunkStore(Protocol):
    """Refuses what is not the chunk it is said to be with INVALID, and a full disk with EXHAUSTED."""

    @property
    def signer(self) -> Signer | None:
        """Returns how hosts send to it and read from it past the hub; None where all goes through the hub."""

    async def put(self, chunk: ArtifactChunk, body: AsyncIterable[bytes], *, owner: str = "", offset: int = 0) -> None:
        """Durable and visible when this returns; what was there under the digest is replaced.

        When `body` breaks off, what came of it may be kept for the same owner, who can go on from `received`. Any other
        offset is CONFLICT. A wrong byte anywhere makes the whole chunk start over.
        """

    async def received(self, digests: Sequence[str], owner: str) -> Mapping[str, int]:
        """Returns the broken-off puts of which something is there, and how much."""

    async def read(self, chunk: ArtifactChunk) -> bytes:
        """Verified: CORRUPT if the bytes are not the chunk, NOT_FOUND if there are none."""

    async def has(self, digest: str) -> bool: ...

    async def delete(self, digest: str) -> None:
        """No matter whether it is there."""

    async def quarantine(self, chunk: ArtifactChunk) -> bool:
        """Put bytes that are not the chunk out of sight, for a person to look at; False if they are right after all."""

    async def free_bytes(self) -> int | None:
        """Returns how much more may be stored before it refuses; None where nobody can tell."""

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


@dataclass(frozen=True, slots=True)
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
    """The owner against whose quota bytes count, and how many of this owner the hub stores at most."""

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
