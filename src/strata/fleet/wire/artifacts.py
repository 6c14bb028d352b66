"""Messages about artifacts, with defaults of their queries: chunks, commits, lineage, lists, latest and best, pins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec

from strata.fleet.artifacts.manifest import ArtifactId, ArtifactKind, ArtifactManifest, Lineage, Sha256, Size, Word
from strata.fleet.core.jobspec import JobId
from strata.fleet.core.objective import MetricObjective
from strata.fleet.wire.base import MAX_PAGE, Epoch, HubReply, Message, Offset, Page, Prefix, Text


class MissingRequest(Message, frozen=True, kw_only=True):
    chunks: dict[Sha256, Size]
    """Digest to size."""


class MissingChunk(HubReply, frozen=True, kw_only=True):
    digest: str
    size: int
    received: int = 0
    url: str = ""
    """Where to PUT it; empty: to the hub."""


class MissingReply(HubReply, frozen=True, kw_only=True):
    missing: tuple[MissingChunk, ...]
    stored: int


class ChunkQuery(Message, frozen=True, kw_only=True):
    size: Annotated[int, msgspec.Meta(ge=1, le=8 * 1024 * 1024)]
    """Size of the whole chunk."""
    offset: Offset = 0


class CommitRequest(Message, frozen=True, kw_only=True):
    manifest: ArtifactManifest
    lineage: Lineage
    job_id: JobId | None = None
    """A host commits for an attempt that it holds; a person for none."""
    epoch: Epoch | None = None


class CommitReply(HubReply, frozen=True, kw_only=True):
    artifact_id: str
    lineage_id: str
    new: bool


class BlobQuery(Message, frozen=True, kw_only=True):
    """Names the attempt: the model and the mode are those of its job."""

    job_id: JobId
    epoch: Epoch


class ArtifactRecord(HubReply, frozen=True, kw_only=True):
    """An artifact and where it came from."""

    artifact_id: str
    lineage_id: str
    seq: int
    """Grows with each record, so the latest is the highest."""
    size: int
    committed_at_s: float
    lineage: Lineage
    pinned: str = ""
    removed_at_s: float | None = None
    """When it was withdrawn. Its artifact stays while another lineage needs it."""
    by: str = ""
    """Who committed it: `host:…` for an attempt, `key:…` for a person."""
    owner: str = ""
    """The owner of the name, where it is data; else of the job that made it, or who committed it."""
    project: str = ""
    """The project of the job that made it; empty where none did."""
    trainer_digest: str = ""
    """The trainer of the attempt that made it."""


class ArtifactsReply(HubReply, frozen=True, kw_only=True):
    artifacts: tuple[ArtifactRecord, ...]
    next: int | None = None
    """Give it as `before` for the next page; null at the end."""
    objective: MetricObjective | None = None
    """The metric that tells the better of these; null: they have none."""


class ArtifactsQuery(Message, frozen=True, kw_only=True):
    model: Word = ""
    mode: Word = ""
    kind: ArtifactKind | None = None
    job_id: Prefix = ""
    parent: ArtifactId | None = None
    metric: Word = ""
    """Order by it, the highest first; one page only."""
    lowest: bool = False
    removed: bool = False
    before: Annotated[int, msgspec.Meta(ge=0, le=2**53 - 1)] | None = None
    limit: Page = 100


class LineageQuery(Message, frozen=True, kw_only=True):
    descendants: bool = False
    """Also what was made from it, and from that."""
    limit: Page = MAX_PAGE
    """The limit of each direction."""


class LatestQuery(Message, frozen=True, kw_only=True):
    model: Word
    mode: Word = ""
    kind: ArtifactKind = ArtifactKind.RESULT


class BestQuery(Message, frozen=True, kw_only=True):
    model: Word
    metric: Word
    mode: Word = ""
    lowest: bool = False


class ArtifactReply(HubReply, frozen=True, kw_only=True):
    id: str
    size: int
    committed_at_s: float
    pinned: str = ""
    manifest: ArtifactManifest
    urls: Mapping[str, str] = {}
    """Where to GET each chunk; empty: from the hub."""


class FileQuery(Message, frozen=True, kw_only=True):
    path: Text


class PinRequest(Message, frozen=True, kw_only=True):
    reason: Annotated[str, msgspec.Meta(max_length=256)] = ""
    """Empty: let it go."""
