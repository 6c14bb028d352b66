"""Exports artifacts for other tools: the paths `<model>_<mode>/<sha256>/bundle.tar.zst`, the fields of `index.jsonl`,
and the compression level (3).

The bundle is made when it is asked for, and is the same bytes each time: files sorted by path, no times, no owners, one
pinned compression. `<sha256>` in the path is the hash in the artifact's id; `sha256` in the index is that of the bytes
of the bundle. A blob that was uploaded as a bundle is handed out as it came. Equal bytes are promised for one version
of the zstd library, so each process computes the digests anew; the content is what the id stands for.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import tarfile
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Final

import msgspec

from strata.base.errors import Code, StrataError
from strata.fleet.artifacts.manifest import ArtifactFile, ArtifactKind, ArtifactManifest
from strata.fleet.artifacts.ports import LineageFilter
from strata.fleet.artifacts.service import BLOB_PATH, Artifacts
from strata.fleet.wire.artifacts import ArtifactRecord
from strata.http.zstd import zstd

LEVEL: Final = 3
_PAGE: Final = 500
_PLACE: Final = re.compile(r"(?P<name>[^/]+)/(?P<sha256>[0-9a-f]{64})/bundle\.tar\.zst")
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9._=+-]")


class IndexLine(msgspec.Struct, frozen=True, kw_only=True):
    """A row of `index.jsonl`. The fields and their order are those of the JSON."""

    artifact: str
    sha256: str
    """The digest of the bytes at `path`; empty if they are damaged."""
    path: str
    model: str
    mode: str
    job_id: str
    host_id: str
    epoch: int
    size: int
    created: float
    metrics: dict[str, float]
    code: str
    data: str
    parents: tuple[str, ...]
    by: str
    project: str
    trainer: str
    """The digest of the trainer that made it."""


async def index_lines(artifacts: Artifacts, digests: dict[str, str]) -> AsyncIterator[bytes]:
    """The results of completed jobs, newest first. `digests` holds those of bundles that were computed before.

    Callers that share it, and the artifacts, compute each digest once, and one at a time.
    """
    wanted = LineageFilter(kind=ArtifactKind.RESULT, completed=True, limit=_PAGE)
    while page := await artifacts.index.lineages(wanted):
        for row in page:
            try:
                digest = digests.get(row.artifact_id) or await _digest_once(artifacts, row.artifact_id, digests)
            except StrataError as error:
                if error.code in (Code.GONE, Code.NOT_FOUND):
                    # Removed since the page was read.
                    continue
                if error.code is not Code.CORRUPT:
                    raise
                digest = ""
            yield msgspec.json.encode(_line(row, digest)) + b"\n"
        wanted = replace(wanted, before_seq=page[-1].seq)


async def _digest_once(artifacts: Artifacts, artifact_id: str, digests: dict[str, str]) -> str:
    async with artifacts.digesting:
        # Another may have computed it while this one waited.
        if artifact_id not in digests:
            digests[artifact_id] = await bundle_digest(artifacts, artifact_id)
        return digests[artifact_id]


async def bundle_digest(artifacts: Artifacts, artifact_id: str) -> str:
    """The SHA-256 of the bytes of a bundle; that of a blob is known, all others are made once for it."""
    manifest = (await artifacts.open(artifact_id)).manifest
    if is_bundle(manifest):
        return manifest.files[0].sha256
    digest = hashlib.sha256()
    async for part in bundle(artifacts, artifact_id):
        await asyncio.to_thread(digest.update, part)
    return digest.hexdigest()


def export_path(row: ArtifactRecord) -> str:
    """Returns where the bundle of a result lies in the export."""
    made = row.lineage
    name = f"{_UNSAFE.sub('-', made.model) or 'model'}_{_UNSAFE.sub('-', made.mode) or 'default'}"
    return f"{name.lstrip('.')}/{row.artifact_id.rpartition('_')[2]}/{BLOB_PATH}"


async def find(artifacts: Artifacts, path: str) -> str:
    """The artifact whose bundle lies at this path of the export."""
    parts = _PLACE.fullmatch(path)
    if parts is not None:
        wanted = LineageFilter(artifact_ids=[f"artifact1_{parts['sha256']}"], kind=ArtifactKind.RESULT, completed=True)
        for row in await artifacts.index.lineages(wanted):
            if export_path(row) == path:
                return row.artifact_id
    raise StrataError(Code.NOT_FOUND, f"there is no bundle {path[:200]!r}", hint="index.jsonl has their paths")


async def bundle(artifacts: Artifacts, artifact_id: str) -> AsyncIterator[bytes]:
    """The artifact as one compressed archive; a blob that came as a bundle as it came. Every byte was verified."""
    manifest = (await artifacts.open(artifact_id)).manifest
    if is_bundle(manifest):
        (file,) = manifest.files
        async for part in artifacts.stream(file, 0, file.size):
            yield part
        return
    compressor = zstd.ZstdCompressor(
        options={zstd.CompressionParameter.compression_level: LEVEL, zstd.CompressionParameter.checksum_flag: 1}
    )
    written = 0
    async for part in _tar(artifacts, manifest):
        written += len(part)
        if packed := await asyncio.to_thread(compressor.compress, part):
            yield packed
    end = b"\0" * (2 * tarfile.BLOCKSIZE)
    end += b"\0" * (-(written + len(end)) % tarfile.RECORDSIZE)
    yield compressor.compress(end) + compressor.flush()


def is_bundle(manifest: ArtifactManifest) -> bool:
    return [file.path for file in manifest.files] == [BLOB_PATH]


async def _tar(artifacts: Artifacts, manifest: ArtifactManifest) -> AsyncIterator[bytes]:
    for file in manifest.files:
        yield _header(file)
        async for part in artifacts.stream(file, 0, file.size):
            yield part
        if padding := -file.size % tarfile.BLOCKSIZE:
            yield b"\0" * padding


def _header(file: ArtifactFile) -> bytes:
    entry = tarfile.TarInfo(file.path)
    entry.size = file.size
    entry.mode = int(file.mode, 8)
    entry.mtime = 0
    return entry.tobuf(tarfile.PAX_FORMAT, "utf-8", "strict")


def _line(row: ArtifactRecord, digest: str) -> IndexLine:
    made = row.lineage
    return IndexLine(
        artifact=row.artifact_id,
        sha256=digest,
        path=export_path(row),
        model=made.model,
        mode=made.mode,
        job_id=made.job_id,
        host_id=made.host_id,
        epoch=made.epoch,
        size=row.size,
        created=row.committed_at_s,
        metrics=dict(made.metrics),
        code=made.code,
        data=made.data,
        parents=made.parents,
        by=row.by,
        project=row.project,
        trainer=row.trainer_digest,
    )
