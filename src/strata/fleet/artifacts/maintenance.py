"""Runs retention, garbage collection and scrubbing of artifacts: pages, parallelism, and dry runs. What is kept is
decided in `retention`, how often in the hub's settings.

Collection is in two steps, a grace apart. A chunk that nothing refers to and nobody has asked for within the grace is
marked to be deleted; one that is still marked a grace later is erased. An upload asks for its chunks before it sends
them, which removes the mark and protects the rest, so it can only lose a chunk by taking longer than the grace to
commit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from strata.base.errors import Code, StrataError
from strata.base.failpoint import failpoint
from strata.fleet.artifacts.manifest import ArtifactChunk
from strata.fleet.artifacts.ports import GarbageCollected, LineageFilter, Slot
from strata.fleet.artifacts.retention import RetentionChoice, RetentionPolicy, choose_retained
from strata.fleet.artifacts.service import Artifacts
from strata.fleet.wire.artifacts import ArtifactRecord

_PAGE: Final = 1000
_AT_ONCE: Final = 8
_SCRUB_PAGE: Final = 16
DRY_RUN_SHOWS: Final = 100_000


async def apply_retention(
    artifacts: Artifacts, policy: RetentionPolicy, actor: str, *, dry_run: bool = True
) -> RetentionChoice:
    """Remove what the policy does not keep. What was committed again or became needed meanwhile stays."""
    now_s = artifacts.clock.wall_s()
    choice = choose_retained(await _lineage(artifacts), await artifacts.index.referenced(), policy, now_s)
    if dry_run:
        return choice
    removed: dict[str, int] = {}
    for artifact_id, seq in choice.dropped.items():
        try:
            if await artifacts.index.remove(artifact_id, "retention", actor, now_s, upto_seq=seq):
                removed[artifact_id] = seq
        except StrataError as error:
            if error.code is not Code.PRECONDITION:
                raise
    return RetentionChoice(choice.kept, removed)


async def collect_garbage(artifacts: Artifacts, *, dry_run: bool = True) -> GarbageCollected:
    """Mark and erase what is due; the dry run tells what that would be, up to a hundred thousand chunks of each."""
    now_s = artifacts.clock.wall_s()
    before_s = now_s - artifacts.grace_s
    if dry_run:
        return GarbageCollected(
            marked=await artifacts.index.unused(before_s, DRY_RUN_SHOWS),
            erased=await artifacts.index.erasable(before_s, DRY_RUN_SHOWS),
        )
    erased: list[ArtifactChunk] = []
    while slots := await artifacts.index.erase(before_s, _PAGE):
        failpoint("artifacts.collect.before_delete")
        await _delete(artifacts, slots)
        failpoint("artifacts.collect.before_erased")
        await artifacts.index.erased(slots)
        erased += [ArtifactChunk(slot.digest, slot.size) for slot in slots]
    marked: list[ArtifactChunk] = []
    while chunks := await artifacts.index.mark_unused(before_s, now_s, _PAGE):
        marked += chunks
    await artifacts.chunks.tidy(before_s)
    return GarbageCollected(marked=marked, erased=erased)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrubResult:
    chunks: int
    bytes: int
    damaged: Sequence[str]
    done: bool
    """Everything that was due has been read; else call again."""


async def scrub(
    artifacts: Artifacts, *, max_bytes: int, bytes_per_s: float, every_s: float = 30 * 24 * 3600.0
) -> ScrubResult:
    """Read chunks again that were not read for `every_s`, the longest unread first, at no more than this speed.

    Where it stopped is in the index with each chunk, so the next call, or the next process, goes on from there.
    """
    clock = artifacts.clock
    started_s, due_before_s = clock.monotonic_s(), clock.wall_s() - every_s
    chunks = size = 0
    damaged: list[str] = []
    while size < max_bytes:
        slots = await artifacts.index.least_checked(due_before_s, _SCRUB_PAGE)
        if not slots:
            return ScrubResult(chunks=chunks, bytes=size, damaged=damaged, done=True)
        for slot in slots:
            if not await _sound(artifacts, slot):
                damaged.append(slot.digest)
            chunks += 1
            size += slot.size
            ahead_s = size / bytes_per_s - (clock.monotonic_s() - started_s)
            if ahead_s > 0:
                await clock.sleep(ahead_s)
    return ScrubResult(chunks=chunks, bytes=size, damaged=damaged, done=False)


async def _sound(artifacts: Artifacts, slot: Slot) -> bool:
    try:
        await artifacts.read_verified(ArtifactChunk(slot.digest, slot.size))
    except StrataError as error:
        if error.code is not Code.CORRUPT:
            raise
        return False
    await artifacts.index.checked([slot], artifacts.clock.wall_s())
    return True


async def _delete(artifacts: Artifacts, slots: Sequence[Slot]) -> None:
    limit = asyncio.Semaphore(_AT_ONCE)

    async def delete(slot: Slot) -> None:
        async with limit:
            await artifacts.chunks.delete(slot.digest)

    await asyncio.gather(*map(delete, slots))


async def _lineage(artifacts: Artifacts) -> list[ArtifactRecord]:
    rows: list[ArtifactRecord] = []
    wanted = LineageFilter(limit=_PAGE)
    while page := await artifacts.index.lineages(wanted):
        rows += page
        wanted = LineageFilter(limit=_PAGE, before_seq=page[-1].seq)
    return rows
