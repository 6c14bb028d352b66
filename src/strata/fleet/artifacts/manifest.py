"""The manifest of an artifact: its id, files and chunks of 8 MiB, its limits (files, bytes, paths, metrics), the kinds
of artifacts, and their lineage.

A file is cut into chunks of 8 MiB, the last one shorter; an empty file has none. So the sizes of the chunks follow from
the size of the file, and a manifest cannot lie about them. Where an artifact came from is not part of it: that is its
lineage, and one artifact may have several, when two runs ended in the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Final, Literal

import msgspec

from strata.base.digest import canonical_json, sha256_hex
from strata.base.errors import Code, StrataError
from strata.base.ids import check_content_id, content_id
from strata.fleet.artifacts.paths import check_collisions, check_path

CHUNK_BYTES: Final = 8 << 20
EMPTY_SHA256: Final = sha256_hex(b"")
MAX_METRICS: Final = 1000

Sha256 = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
ArtifactId = Annotated[str, msgspec.Meta(pattern=r"\Aartifact1_[0-9a-f]{64}\Z")]
Size = Annotated[int, msgspec.Meta(ge=0, le=2**53 - 1)]
Word = Annotated[str, msgspec.Meta(max_length=256, pattern=r"\A[^\x00-\x1f\x7f]*\Z")]


@dataclass(frozen=True, slots=True, order=True)
class ArtifactChunk:
    digest: str
    size: int


class ArtifactFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    path: str
    size: Size
    sha256: Sha256
    """The digest of the whole file. The hub has verified every chunk, but not this sum of several: readers do."""
    chunks: tuple[Sha256, ...] = ()
    mode: Literal["0644", "0755"] = "0644"
    """All that is kept of it: whether the file can be executed."""

    def sized_chunks(self) -> Iterator[ArtifactChunk]:
        for number, digest in enumerate(self.chunks):
            yield ArtifactChunk(digest, min(CHUNK_BYTES, self.size - number * CHUNK_BYTES))


class ArtifactManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    files: tuple[ArtifactFile, ...]
    """Sorted by path."""

    @property
    def id(self) -> str:
        return content_id("artifact", 1, self)

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    def encode(self) -> bytes:
        return canonical_json(self)

    def chunks(self) -> dict[str, int]:
        """Each chunk once, with its size, in the order in which they are first needed."""
        return {chunk.digest: chunk.size for file in self.files for chunk in file.sized_chunks()}

    def file(self, path: str) -> ArtifactFile:
        for file in self.files:
            if file.path == path:
                return file
        raise StrataError(Code.NOT_FOUND, f"{self.id} has no file {path[:120]!r}")


class ArtifactLimits(msgspec.Struct, frozen=True, kw_only=True):
    max_files: int = 100_000
    max_bytes: int = 1 << 40
    max_path_characters: int = 8 << 20
    """Characters of all paths together."""


class ArtifactKind(StrEnum):
    RESULT = "result"
    CHECKPOINT = "checkpoint"
    SOURCE = "source"
    DATA = "data"


class Lineage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where an artifact came from. Equal content is the same record: a repeated commit adds nothing."""

    kind: ArtifactKind
    job_id: Word = ""
    epoch: Annotated[int, msgspec.Meta(ge=0, le=2**53 - 1)] = 0
    host_id: Word = ""
    model: Word = ""
    mode: Word = ""
    metrics: Annotated[Mapping[Word, float], msgspec.Meta(max_length=MAX_METRICS)] = {}
    code: Word = ""
    """The commit or the source artifact that was run."""
    data: Word = ""
    """The digest of what it was trained on."""
    parents: Annotated[tuple[ArtifactId, ...], msgspec.Meta(max_length=100)] = ()
    """What it was made from: the checkpoint that was resumed, the model that was tuned, the source."""

    def __post_init__(self) -> None:
        for name, value in self.metrics.items():
            if not math.isfinite(value):
                raise ValueError(f"the metric {name!r} is {value}, which cannot be compared")

    def id_for(self, artifact_id: str) -> str:
        return content_id("lineage", 1, {"artifact": artifact_id, "lineage": self})


def check_manifest(manifest: ArtifactManifest, limits: ArtifactLimits) -> ArtifactManifest:
    files = manifest.files
    if not files or len(files) > limits.max_files:
        raise StrataError(Code.INVALID, f"a manifest of {len(files)} files; 1 to {limits.max_files} are allowed")
    if sum(len(file.path) for file in files) > limits.max_path_characters:
        raise StrataError(Code.INVALID, f"all paths of a manifest have at most {limits.max_path_characters} characters")
    _check_files(files)
    if manifest.size > limits.max_bytes:
        raise StrataError(Code.INVALID, f"an artifact of {manifest.size} bytes; at most {limits.max_bytes} are allowed")
    check_collisions(file.path for file in files)
    return manifest


def _check_files(files: Sequence[ArtifactFile]) -> None:
    sizes: dict[str, int] = {}
    before = ""
    for file in files:
        check_path(file.path)
        if file.path <= before:
            raise StrataError(Code.INVALID, f"{file.path!r} comes after {before!r}: files are sorted, each path once")
        before = file.path
        _check_chunks(file)
        for chunk in file.sized_chunks():
            if sizes.setdefault(chunk.digest, chunk.size) != chunk.size:
                raise StrataError(Code.INVALID, f"the chunk {chunk.digest} cannot have two sizes", path=file.path)


def _check_chunks(file: ArtifactFile) -> None:
    wanted = -(-file.size // CHUNK_BYTES)
    if len(file.chunks) != wanted:
        raise StrataError(
            Code.INVALID, f"{file.path!r} has {len(file.chunks)} chunks; {file.size} bytes are {wanted}", path=file.path
        )
    alone = file.chunks[0] if wanted == 1 else EMPTY_SHA256 if wanted == 0 else file.sha256
    if file.sha256 != alone:
        raise StrataError(Code.INVALID, f"{file.path!r} has another digest than its only content", path=file.path)


def check_artifact_id(text: str) -> str:
    return check_content_id("artifact", 1, text)


def check_sha256(text: str) -> str:
    try:
        return msgspec.convert(text, Sha256)
    except msgspec.ValidationError as error:
        raise StrataError(Code.INVALID, f"{text[:80]!r} is not a SHA-256 in 64 lower-case hex digits") from error
