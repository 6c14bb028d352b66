"""Artifacts at the hub: upload plans (at most 200,000 chunks), commits, verified reads, signed URLs (1 h), the grace
before garbage collection (24 h), and which artifact is latest or best.

No HTTP here.

An upload asks for its `plan`, sends what is missing and commits. Each step can be repeated, and after an interruption
the plan names what is still missing and how much of a chunk is there already. The manifest is committed last, in one
transaction with the lineage, so there is never an artifact that is not whole.

A chunk that is found damaged is put into quarantine and is missing from then on: the next upload that has it heals all
artifacts that need it.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterable, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from strata.base.clock import Clock
from strata.base.digest import sha256_hex
from strata.base.errors import Code, StrataError
from strata.base.failpoint import failpoint
from strata.fleet.artifacts.index import ArtifactIndex
from strata.fleet.artifacts.manifest import (
    CHUNK_BYTES,
    ArtifactChunk,
    ArtifactFile,
    ArtifactKind,
    ArtifactLimits,
    ArtifactManifest,
    Lineage,
    check_artifact_id,
    check_manifest,
    check_sha256,
)
from strata.fleet.artifacts.ports import (
    NO_ACCOUNT,
    ArtifactRow,
    ChunkStore,
    Commit,
    LineageFilter,
    Signer,
    Slot,
    StorageAccount,
)
from strata.fleet.artifacts.states import PRESENT, ChunkState
from strata.fleet.records import AttemptKey
from strata.fleet.wire.artifacts import ArtifactRecord, CommitReply, MissingChunk, MissingReply

GRACE_S: Final = 24 * 3600.0
SIGNED_S: Final = 3600.0
BLOB_PATH: Final = "bundle.tar.zst"
MAX_PLAN: Final = 200_000
"""Chunks that one plan may ask for: an artifact of the default limits has fewer."""
_AT_ONCE: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Download:
    artifact: ArtifactRow
    urls: Mapping[str, str]
    """Where to GET each chunk; empty: from the hub."""


class Artifacts:
    """`grace_s` is how long a chunk that nothing refers to stays at least: no upload may take longer to commit."""

    def __init__(
        self,
        index: ArtifactIndex,
        chunks: ChunkStore,
        clock: Clock,
        *,
        limits: ArtifactLimits | None = None,
        grace_s: float = GRACE_S,
    ) -> None:
        self.index = index
        self.chunks = chunks
        self.clock = clock
        self.limits = limits or ArtifactLimits()
        self.grace_s = grace_s
        self.digesting = asyncio.Lock()
        """Held while a bundle is made for its digest alone: however many ask for all of them, one is made at a time."""

    async def plan(self, wanted: Mapping[str, int], owner: str) -> MissingReply:
        """Returns which of these chunks (digest to size) have to be sent. They stay for the grace, so there is time
        to."""
        _check_wanted(wanted)
        slots = await self._reserve(list(wanted))
        missing = [ArtifactChunk(digest, size) for digest, size in wanted.items() if slots[digest].state not in PRESENT]
        if self.chunks.signer is not None:
            missing = await self._adopt(self.chunks.signer, missing, slots, owner)
        await self._check_space(missing)
        return MissingReply(missing=tuple(await self._ways(missing, owner)), stored=len(wanted) - len(missing))

    async def put_chunk(self, chunk: ArtifactChunk, body: AsyncIterable[bytes], owner: str, *, offset: int = 0) -> None:
        """Verified, durable and known to the index when this returns; again, with the same bytes, is no harm.

        INVALID for wrong bytes or too many; PRECONDITION with `received` for too few; CONFLICT with `received` for an
        offset other than that; EXHAUSTED for a full disk.
        """
        _check_wanted({chunk.digest: chunk.size})
        slot = (await self._reserve([chunk.digest]))[chunk.digest]
        if slot.state in PRESENT and slot.size == chunk.size:
            return
        await self._put(slot, chunk, body, owner, offset)

    async def commit(
        self,
        manifest: ArtifactManifest,
        lineage: Lineage,
        actor: str,
        *,
        hold: AttemptKey | None = None,
        owner: str = "",
        account: StorageAccount = NO_ACCOUNT,
    ) -> CommitReply:
        """PRECONDITION with the list `missing` while chunks are. `owner` as in `plan`, if signed URLs were used.

        With a hold, the lineage's job, epoch and host are those of the hold, whatever the sender wrote.
        """
        checked = await asyncio.to_thread(check_manifest, manifest, self.limits)
        if self.chunks.signer is not None and owner:
            await self.plan(checked.chunks(), owner)
        return await self._commit(Commit(manifest=checked, lineage=lineage, hold=hold, actor=actor, account=account))

    async def put_blob(
        self,
        sha256: str,
        body: AsyncIterable[bytes],
        lineage: Lineage,
        actor: str,
        *,
        hold: AttemptKey | None = None,
        account: StorageAccount = NO_ACCOUNT,
    ) -> CommitReply:
        """One opaque file, verified as a whole and never opened: an artifact with the one file `bundle.tar.zst`.

        Memory holds one chunk of it. What was sent before is not stored again, but has to be sent again to be checked.
        """
        check_sha256(sha256)
        digests: list[str] = []
        size = 0
        whole = hashlib.sha256()
        async for content in _blocks(body):
            size += len(content)
            if size > self.limits.max_bytes:
                raise StrataError(Code.INVALID, f"a blob of more than {self.limits.max_bytes} bytes")
            chunk = ArtifactChunk(await asyncio.to_thread(_hash, whole, content), len(content))
            await self.put_chunk(chunk, once(content), actor)
            digests.append(chunk.digest)
        if whole.hexdigest() != sha256:
            raise StrataError(
                Code.INVALID, f"the bytes sent as {sha256} are {whole.hexdigest()}", hint="send the file again"
            )
        file = ArtifactFile(path=BLOB_PATH, size=size, sha256=sha256, chunks=tuple(digests))
        manifest = ArtifactManifest(files=(file,))
        return await self._commit(
            Commit(manifest=manifest, lineage=lineage, hold=hold, blob=sha256, actor=actor, account=account)
        )

    async def open(self, artifact_id: str) -> ArtifactRow:
        return await self.index.artifact(check_artifact_id(artifact_id))

    async def download(self, artifact_id: str) -> Download:
        artifact = await self.open(artifact_id)
        digests = list(artifact.manifest.chunks())
        signer = self.chunks.signer
        urls = {} if signer is None else dict(zip(digests, await signer.sign_get(digests, SIGNED_S), strict=True))
        return Download(artifact=artifact, urls=urls)

    async def read_chunk(self, digest: str, *, only_open: bool = False) -> bytes:
        """Verified; NOT_FOUND if the index does not have it, CORRUPT (once, and NOT_FOUND from then on) if damaged.

        With `only_open`, what is of states of servers alone, or of no artifact, is NOT_FOUND as well.
        """
        slot = (await self.index.slots([check_sha256(digest)])).get(digest)
        if slot is None or slot.state not in PRESENT or (only_open and not await self.index.is_open(digest)):
            raise StrataError(Code.NOT_FOUND, f"there is no chunk {digest}", chunk=digest)
        return await self.read_verified(ArtifactChunk(digest, slot.size))

    async def read_file(
        self, artifact_id: str, path: str, *, start: int = 0, end: int | None = None
    ) -> AsyncIterator[bytes]:
        """The bytes from `start` up to, without, `end`. Nothing is yielded that was not verified.

        Read as a whole, a file is also compared with its own digest.
        """
        file = (await self.open(artifact_id)).manifest.file(path)
        stop = file.size if end is None else min(end, file.size)
        if not 0 <= start <= stop:
            raise StrataError(Code.INVALID, f"{path} has {file.size} bytes, not {start} to {stop}")
        async for part in self.stream(file, start, stop):
            yield part

    async def stream(self, file: ArtifactFile, start: int, stop: int) -> AsyncIterator[bytes]:
        entire = start == 0 and stop == file.size and len(file.chunks) > 1
        whole = hashlib.sha256()
        for number, chunk in enumerate(file.sized_chunks()):
            begins = number * CHUNK_BYTES
            if begins + chunk.size <= start or begins >= stop:
                continue
            content = await self.read_verified(chunk)
            if entire:
                await asyncio.to_thread(whole.update, content)
                if begins + chunk.size == stop and whole.hexdigest() != file.sha256:
                    raise StrataError(Code.CORRUPT, f"{file.path} is not the file its maker said it was")
            yield content[max(0, start - begins) : stop - begins]

    async def read_verified(self, chunk: ArtifactChunk) -> bytes:
        try:
            return await self.chunks.read(chunk)
        except StrataError as error:
            if error.code not in (Code.CORRUPT, Code.NOT_FOUND):
                raise
            await self.set_aside(chunk, error.message)
            raise StrataError(
                Code.CORRUPT, error.message, hint="upload it again: that heals it", chunk=chunk.digest
            ) from error

    async def set_aside(self, chunk: ArtifactChunk, reason: str) -> None:
        """It was found damaged. The index says so first: whoever sends it anew from then on is not in the way."""
        await self.index.damaged(chunk.digest, reason, self.clock.wall_s())
        failpoint("artifacts.service.before_quarantine")
        if not await self.chunks.quarantine(chunk):
            # Somebody healed it between the read and now.
            slots = await self.index.slots([chunk.digest])
            await self.index.stored([replace(slots[chunk.digest], size=chunk.size)], self.clock.wall_s())

    async def pin(self, artifact_id: str, reason: str, actor: str, *, owner: str | None = None) -> None:
        if any(ord(char) < 32 for char in reason) or len(reason) > 256:
            raise StrataError(Code.INVALID, "a reason is one line of at most 256 characters")
        await self.index.pin(check_artifact_id(artifact_id), reason, actor, self.clock.wall_s(), owner=owner)

    async def remove(self, artifact_id: str, reason: str, actor: str) -> bool:
        return await self.index.remove(check_artifact_id(artifact_id), reason, actor, self.clock.wall_s())

    async def withdraw(self, artifact_id: str, owner: str, reason: str, actor: str) -> bool:
        return await self.index.withdraw(check_artifact_id(artifact_id), owner, reason, actor, self.clock.wall_s())

    async def latest(self, model: str, mode: str = "", *, kind: ArtifactKind = ArtifactKind.RESULT) -> ArtifactRecord:
        """An empty mode is any mode. Of results those that completed their jobs, of checkpoints those of attempts."""
        wanted = LineageFilter(
            model=model,
            mode=mode,
            kind=kind,
            completed=kind is ArtifactKind.RESULT,
            attempted=kind is ArtifactKind.CHECKPOINT,
            limit=1,
        )
        return await self._first_lineage(wanted)

    async def best(self, model: str, metric: str, mode: str = "", *, lowest: bool = False) -> ArtifactRecord:
        """The result of a completed job with the highest, or lowest, figure; of equals the latest."""
        wanted = LineageFilter(
            model=model,
            mode=mode,
            kind=ArtifactKind.RESULT,
            metric=metric,
            best="min" if lowest else "max",
            completed=True,
            limit=1,
        )
        return await self._first_lineage(wanted)

    async def ancestry(self, artifact_id: str, *, limit: int = 1000) -> Sequence[ArtifactRecord]:
        """Returns where it came from, and what that came from, and so on: each record once, nearest first.

        Of one distance, what was withdrawn comes last.
        """
        found: dict[str, ArtifactRecord] = {}
        seen: set[str] = set()
        asked = [check_artifact_id(artifact_id)]
        while asked and len(found) < limit:
            seen.update(asked)
            layer = await self.index.lineages(LineageFilter(artifact_ids=asked, removed=True, limit=limit))
            found.update({row.lineage_id: row for row in sorted(layer, key=lambda row: row.removed_at_s is not None)})
            asked = sorted({parent for row in layer for parent in row.lineage.parents} - seen)
        if not found:
            raise StrataError(Code.NOT_FOUND, f"there is no artifact {artifact_id}")
        return list(found.values())[:limit]

    async def descendants(self, artifact_id: str, *, limit: int = 1000) -> Sequence[ArtifactRecord]:
        """Returns what was made from it, and from that, and so on: each record once, nearest first."""
        found: dict[str, ArtifactRecord] = {}
        seen: set[str] = set()
        asked = [check_artifact_id(artifact_id)]
        while asked and len(found) < limit:
            seen.update(asked)
            layer = await self.index.lineages(LineageFilter(parents=asked, removed=True, limit=limit))
            found.update({row.lineage_id: row for row in layer})
            asked = sorted({row.artifact_id for row in layer} - seen)
        return list(found.values())[:limit]

    async def _first_lineage(self, wanted: LineageFilter) -> ArtifactRecord:
        found = await self.index.lineages(wanted)
        if not found:
            by = f" with the metric {wanted.metric}" if wanted.metric else ""
            message = f"there is no {wanted.kind} of {wanted.model} {wanted.mode}".rstrip() + by
            raise StrataError(Code.NOT_FOUND, message)
        return found[0]

    async def _reserve(self, digests: Sequence[str]) -> Mapping[str, Slot]:
        # A tenth of the grace: whoever asks again soon after costs no write, and still has nine tenths before him.
        return await self.index.reserve(digests, self.clock.wall_s(), stale_after_s=self.grace_s / 10)

    async def _put(self, slot: Slot, chunk: ArtifactChunk, body: AsyncIterable[bytes], owner: str, offset: int) -> None:
        if slot.state is ChunkState.DELETING:
            raise StrataError(
                Code.UNAVAILABLE, f"an old {chunk.digest} is being removed right now", hint="send it again in a moment"
            )
        await self.chunks.put(chunk, body, owner=owner, offset=offset)
        failpoint("artifacts.service.before_stored")
        await self.index.stored([replace(slot, size=chunk.size)], self.clock.wall_s())
        failpoint("artifacts.service.after_stored")

    async def _adopt(
        self, signer: Signer, missing: Sequence[ArtifactChunk], slots: Mapping[str, Slot], owner: str
    ) -> list[ArtifactChunk]:
        """Take in what the owner has put to signed URLs since; what is missing after that."""
        limit = asyncio.Semaphore(_AT_ONCE)

        async def adopt(chunk: ArtifactChunk) -> bool:
            async with limit:
                if slots[chunk.digest].state is ChunkState.DELETING:
                    return False
                return await signer.adopt(chunk, owner)

        taken = await asyncio.gather(*map(adopt, missing))
        stored = [chunk for chunk, right in zip(missing, taken, strict=True) if right]
        failpoint("artifacts.service.before_adopted")
        if stored:
            adopted = [replace(slots[chunk.digest], size=chunk.size) for chunk in stored]
            await self.index.stored(adopted, self.clock.wall_s())
        return [chunk for chunk, right in zip(missing, taken, strict=True) if not right]

    async def _ways(self, missing: Sequence[ArtifactChunk], owner: str) -> list[MissingChunk]:
        digests = [chunk.digest for chunk in missing]
        signer = self.chunks.signer
        urls = (
            {} if signer is None else dict(zip(digests, await signer.sign_put(digests, owner, SIGNED_S), strict=True))
        )
        received = await self.chunks.received(digests, owner)
        return [
            MissingChunk(
                digest=chunk.digest,
                size=chunk.size,
                received=min(received.get(chunk.digest, 0), chunk.size),
                url=urls.get(chunk.digest, ""),
            )
            for chunk in missing
        ]

    async def _check_space(self, missing: Sequence[ArtifactChunk]) -> None:
        free = await self.chunks.free_bytes()
        needed = sum(chunk.size for chunk in missing)
        if free is not None and needed > free:
            raise StrataError(
                Code.EXHAUSTED,
                f"{needed} bytes would have to be stored, and there is room for {free}",
                hint="free some space, or collect artifacts that nobody needs",
            )

    async def _commit(self, commit: Commit) -> CommitReply:
        if (hold := commit.hold) is not None:
            lineage = msgspec.structs.replace(
                commit.lineage, job_id=hold.job_id, epoch=hold.epoch, host_id=hold.host_id
            )
            commit = replace(commit, lineage=lineage)
        failpoint("artifacts.service.before_commit")
        done = await self.index.commit(commit, self.clock.wall_s())
        failpoint("artifacts.service.after_commit")
        return done


def _check_wanted(wanted: Mapping[str, int]) -> None:
    if len(wanted) > MAX_PLAN:
        raise StrataError(Code.INVALID, f"a plan of {len(wanted)} chunks; at most {MAX_PLAN} are allowed")
    for digest, size in wanted.items():
        check_sha256(digest)
        if not 0 < size <= CHUNK_BYTES:
            raise StrataError(Code.INVALID, f"a chunk has 1 to {CHUNK_BYTES} bytes, not {size}", chunk=digest)


def _hash(whole: hashlib._Hash, content: bytes) -> str:
    whole.update(content)
    return sha256_hex(content)


async def once(content: bytes) -> AsyncIterator[bytes]:
    yield content


async def _blocks(body: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """The same bytes, cut where chunks are."""
    parts = bytearray()
    async for part in body:
        parts += part
        while len(parts) >= CHUNK_BYTES:
            yield bytes(parts[:CHUNK_BYTES])
            del parts[:CHUNK_BYTES]
    if parts:
        yield bytes(parts)
