"""The export reads each result once for its index, whoever asks at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Mapping, Sequence

import msgspec
import pytest

from strata.fleet.artifacts import export
from strata.fleet.artifacts.manifest import ArtifactChunk
from strata.fleet.artifacts.ports import ChunkStore, Signer
from strata.fleet.artifacts.service import Artifacts
from tests.conformance.artifacts.making import Place, complete, noise


class CountingChunks:
    """A chunk store that counts what is read from it, and how many reads there are at once."""

    def __init__(self, chunks: ChunkStore) -> None:
        self._chunks = chunks
        self.reads: list[str] = []
        self.now = self.most = 0

    async def read(self, chunk: ArtifactChunk) -> bytes:
        self.reads.append(chunk.digest)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            return await self._chunks.read(chunk)
        finally:
            self.now -= 1

    @property
    def signer(self) -> Signer | None:
        return self._chunks.signer

    async def put(self, chunk: ArtifactChunk, body: AsyncIterable[bytes], *, owner: str = "", offset: int = 0) -> None:
        await self._chunks.put(chunk, body, owner=owner, offset=offset)

    async def received(self, digests: Sequence[str], owner: str) -> Mapping[str, int]:
        return await self._chunks.received(digests, owner)

    async def has(self, digest: str) -> bool:
        return await self._chunks.has(digest)

    async def delete(self, digest: str) -> None:
        await self._chunks.delete(digest)

    async def quarantine(self, chunk: ArtifactChunk) -> bool:
        return await self._chunks.quarantine(chunk)

    async def free_bytes(self) -> int | None:
        return await self._chunks.free_bytes()

    async def tidy(self, before_s: float) -> int:
        return await self._chunks.tidy(before_s)

    async def close(self) -> None:
        await self._chunks.close()


async def index_of(artifacts: Artifacts, digests: dict[str, str]) -> list[str]:
    return [msgspec.json.decode(line)["sha256"] async for line in export.index_lines(artifacts, digests)]


@pytest.mark.proves("Never again: each request for the index of the export compressed every result for itself")
async def test_indexes_that_are_asked_for_at_once_read_each_result_once(place: Place) -> None:
    for seed in range(3):
        await complete(place, {"model": noise(1000, seed), "log": b"x" * seed})
    chunks = CountingChunks(place.chunks)
    artifacts, digests = Artifacts(place.index, chunks, place.clock), dict[str, str]()
    first, *others = await asyncio.gather(*(index_of(artifacts, digests) for _ in range(5)))
    assert (len(first), others) == (3, [first] * 4)
    assert (len(chunks.reads), chunks.most) == (5, 1)
    assert await index_of(artifacts, digests) == first
    assert len(chunks.reads) == 5
    assert first == [await export.bundle_digest(artifacts, id_) for id_ in digests]


async def test_a_request_that_ends_early_leaves_the_next_one_to_go_on(place: Place) -> None:
    await complete(place, {"model": noise(1000)})
    digests = dict[str, str]()
    async with place.artifacts.digesting:
        task = asyncio.ensure_future(index_of(place.artifacts, digests))
        await asyncio.wait([task], timeout=0.1)
        task.cancel()
    await asyncio.wait([task])
    assert len(await index_of(place.artifacts, digests)) == 1
