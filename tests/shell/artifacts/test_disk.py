"""What only a disk can do to a store of chunks: fill up, fail, be shared by writers that stop at any moment."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from strata.base import failpoint
from strata.base.errors import Code
from strata.fleet.artifacts.disk import DiskChunks
from strata.fleet.artifacts.service import once
from tests.conformance.artifacts.making import chunk_of, in_pieces, noise, refusal

CONTENT = noise(3_000_000)
CHUNK = chunk_of(CONTENT)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[DiskChunks]:
    opened = await DiskChunks.open(tmp_path / "artifacts", keep_free_bytes=0)
    yield opened
    failpoint.disarm_all()
    await opened.close()


def fails_with(number: int) -> failpoint.Action:
    def fail(name: str) -> None:
        raise OSError(number, name)

    return fail


async def test_a_disk_that_fills_up_is_exhausted_and_keeps_no_rest(store: DiskChunks, tmp_path: Path) -> None:
    failpoint.arm("artifacts.disk.before_write", fails_with(errno.ENOSPC), skip=1)
    assert (await refusal(store.put(CHUNK, in_pieces(CONTENT), owner="a"))).code is Code.EXHAUSTED
    assert list((tmp_path / "artifacts/partial").iterdir()) == []
    await store.put(CHUNK, once(CONTENT))


async def test_a_disk_that_fails_to_sync_makes_nothing_visible(store: DiskChunks) -> None:
    failpoint.arm("artifacts.disk.before_sync", fails_with(errno.EIO))
    assert (await refusal(store.put(CHUNK, once(CONTENT), owner="a"))).code is Code.UNAVAILABLE
    assert not await store.has(CHUNK.digest)
    assert await store.received([CHUNK.digest], "a") == {}, "what a disk failed to sync is not built upon"


async def test_a_put_that_is_cancelled_leaves_its_owner_what_came(store: DiskChunks) -> None:
    half = len(CONTENT) // 2
    reached = asyncio.Event()

    async def stalls() -> AsyncIterator[bytes]:
        yield CONTENT[:half]
        reached.set()
        await asyncio.Event().wait()

    put = asyncio.ensure_future(store.put(CHUNK, stalls(), owner="a"))
    await reached.wait()
    put.cancel()
    with pytest.raises(asyncio.CancelledError):
        await put
    assert await store.received([CHUNK.digest], "a") == {CHUNK.digest: half}
    await store.put(CHUNK, once(CONTENT[half:]), owner="a", offset=half)
    assert await store.read(CHUNK) == CONTENT


async def test_a_rest_that_was_spoiled_makes_the_chunk_start_over(store: DiskChunks, tmp_path: Path) -> None:
    async def cut() -> AsyncIterator[bytes]:
        yield CONTENT[:1000]
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        await store.put(CHUNK, cut(), owner="a")
    (rest,) = (tmp_path / "artifacts/partial").iterdir()
    rest.write_bytes(bytes(1000))
    assert (await refusal(store.put(CHUNK, once(CONTENT[1000:]), owner="a", offset=1000))).code is Code.INVALID
    assert await store.received([CHUNK.digest], "a") == {}
    await store.put(CHUNK, once(CONTENT), owner="a")


async def test_a_store_opened_again_has_what_was_put(store: DiskChunks, tmp_path: Path) -> None:
    await store.put(CHUNK, once(CONTENT))
    again = await DiskChunks.open(tmp_path / "artifacts", keep_free_bytes=0)
    assert await again.read(CHUNK) == CONTENT
    await again.close()


async def test_no_file_of_the_store_can_be_read_by_others(store: DiskChunks, tmp_path: Path) -> None:
    await store.put(CHUNK, once(CONTENT))
    for folder in (tmp_path / "artifacts").iterdir():
        assert folder.stat().st_mode & 0o077 == 0


async def test_a_store_cannot_be_opened_where_there_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert (await refusal(DiskChunks.open(tmp_path / "file"))).code is Code.INVALID
