"""Short ways to say what a test of artifacts needs: bytes, bodies, manifests, uploads."""

from __future__ import annotations

import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from strata.base.digest import sha256_hex
from strata.base.errors import StrataError
from strata.fleet.artifacts.index import ArtifactIndex
from strata.fleet.artifacts.manifest import (
    CHUNK_BYTES,
    ArtifactChunk,
    ArtifactFile,
    ArtifactKind,
    ArtifactManifest,
    Lineage,
)
from strata.fleet.artifacts.ports import ChunkStore
from strata.fleet.artifacts.service import Artifacts, once
from strata.fleet.ports import Store
from strata.fleet.records import AttemptKey, JobCompletion
from strata.fleet.wire.artifacts import CommitReply
from tests.conformance.fleet.fleet import add, add_host, claim, hold, job, marker
from tests.support.feed import told_before
from tests.support.manual_clock import ManualClock

OWNER = "host_a"
RESULT = Lineage(kind=ArtifactKind.RESULT, model="gbt", mode="oracle")


_jobs = itertools.count()


@dataclass(frozen=True)
class Place:
    """Everything of one hub: the artifacts, what is under them, and the fleet in the same database."""

    artifacts: Artifacts
    index: ArtifactIndex
    chunks: ChunkStore
    clock: ManualClock
    fleet: Store


def noise(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def chunk_of(content: bytes) -> ArtifactChunk:
    return ArtifactChunk(sha256_hex(content), len(content))


def cut(content: bytes) -> list[bytes]:
    return [content[start : start + CHUNK_BYTES] for start in range(0, len(content), CHUNK_BYTES)]


def manifest_of(files: Mapping[str, bytes], **modes: Any) -> ArtifactManifest:
    described = [
        ArtifactFile(
            path=path,
            size=len(content),
            sha256=sha256_hex(content),
            chunks=tuple(sha256_hex(part) for part in cut(content)),
            mode=modes.get(path, "0644"),
        )
        for path, content in sorted(files.items())
    ]
    return ArtifactManifest(files=tuple(described))


async def broken_off(content: bytes, after: int, piece: int = 64 << 10) -> AsyncIterator[bytes]:
    """The body of a request whose line is cut after so many bytes."""
    for start in range(0, after, piece):
        yield content[start : min(start + piece, after)]
    raise ConnectionResetError


async def in_pieces(content: bytes, piece: int = 64 << 10) -> AsyncIterator[bytes]:
    for start in range(0, len(content), piece):
        yield content[start : start + piece]


def parts_of(files: Mapping[str, bytes]) -> dict[str, bytes]:
    return {sha256_hex(part): part for content in files.values() for part in cut(content)}


async def send(place: Place, files: Mapping[str, bytes], owner: str = OWNER) -> ArtifactManifest:
    """All chunks that are missing, through the hub."""
    manifest = manifest_of(files)
    plan = await place.artifacts.plan(manifest.chunks(), owner)
    parts = parts_of(files)
    for each in plan.missing:
        rest = parts[each.digest][each.received :]
        await place.artifacts.put_chunk(ArtifactChunk(each.digest, each.size), once(rest), owner, offset=each.received)
    return manifest


async def upload(
    place: Place, files: Mapping[str, bytes], lineage: Lineage = RESULT, hold: AttemptKey | None = None
) -> CommitReply:
    manifest = await send(place, files)
    return await place.artifacts.commit(manifest, lineage, f"host:{OWNER}", hold=hold)


async def complete(place: Place, files: Mapping[str, bytes], lineage: Lineage = RESULT) -> CommitReply:
    """The result of a job of its own, which it completes."""
    number = next(_jobs)
    await add_host(place.fleet)
    await add(place.fleet, job("m", seed=number))
    (lease,) = await claim(place.fleet, claim_id=f"complete-{number}")
    done = await upload(place, files, lineage, hold(lease))
    await place.fleet.leases.complete(hold(lease), JobCompletion(artifact=done.artifact_id), 1.0)
    return done


async def content_of(place: Place, artifact_id: str) -> dict[str, bytes]:
    manifest = (await place.artifacts.open(artifact_id)).manifest
    return {
        file.path: b"".join([part async for part in place.artifacts.read_file(artifact_id, file.path)])
        for file in manifest.files
    }


async def kinds(place: Place, subject: str) -> list[str]:
    """What happened to `subject` until now: all of it, and so nothing else."""
    await told_before(await marker(place.fleet), place.index.events)
    return [each.event.kind for each in await place.index.events("", 100, subject=subject)]


async def refusal(call: Awaitable[object]) -> StrataError:
    with pytest.raises(StrataError) as refused:
        await call
    return refused.value
