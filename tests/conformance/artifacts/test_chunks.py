"""What a place of bytes promises: whole, verified chunks or nothing."""

from __future__ import annotations

import asyncio
import hashlib
from http.client import HTTPConnection
from urllib.parse import urlsplit

import pytest

from strata.base import failpoint
from strata.base.errors import Code
from strata.fleet.artifacts.disk import DiskChunks
from strata.fleet.artifacts.manifest import CHUNK_BYTES, ArtifactChunk
from strata.fleet.artifacts.objects import ObjectChunks
from strata.fleet.artifacts.ports import ChunkStore
from strata.fleet.artifacts.service import once
from tests.conformance.artifacts.making import broken_off, chunk_of, in_pieces, noise, refusal

CONTENT = noise(3 << 20)
CHUNK = chunk_of(CONTENT)


async def damage(chunks: ChunkStore, chunk: ArtifactChunk, content: bytes) -> None:
    """What a failing disk does: other bytes under the same name."""
    if isinstance(chunks, DiskChunks):
        chunks._chunk(chunk.digest).write_bytes(content)
    else:
        assert isinstance(chunks, ObjectChunks)
        await chunks._bucket.put(chunks._chunk(chunk.digest), content)


async def test_what_was_put_can_be_read(chunks: ChunkStore) -> None:
    assert not await chunks.has(CHUNK.digest)
    await chunks.put(CHUNK, in_pieces(CONTENT))
    assert await chunks.has(CHUNK.digest)
    assert await chunks.read(CHUNK) == CONTENT
    await chunks.put(CHUNK, once(CONTENT))
    assert await chunks.read(CHUNK) == CONTENT


async def test_a_full_chunk_and_a_single_byte_are_chunks(chunks: ChunkStore) -> None:
    for content in (noise(CHUNK_BYTES), b"x"):
        await chunks.put(chunk_of(content), in_pieces(content))
        assert await chunks.read(chunk_of(content)) == content


async def test_wrong_bytes_too_many_and_too_few_are_refused_and_never_visible(chunks: ChunkStore) -> None:
    wrong = CONTENT[:-1] + bytes([CONTENT[-1] ^ 1])
    assert (await refusal(chunks.put(CHUNK, once(wrong)))).code is Code.INVALID
    assert (await refusal(chunks.put(CHUNK, in_pieces(CONTENT + b"x")))).code is Code.INVALID
    truncated = await refusal(chunks.put(CHUNK, in_pieces(CONTENT[:-1])))
    assert truncated.code is Code.PRECONDITION
    assert not await chunks.has(CHUNK.digest)
    assert (await refusal(chunks.read(CHUNK))).code is Code.NOT_FOUND
    await chunks.put(CHUNK, once(CONTENT))
    assert await chunks.read(CHUNK) == CONTENT


async def test_a_chunk_of_another_size_than_asked_for_is_corrupt(chunks: ChunkStore) -> None:
    await chunks.put(CHUNK, once(CONTENT))
    assert (await refusal(chunks.read(ArtifactChunk(CHUNK.digest, CHUNK.size - 1)))).code is Code.CORRUPT


@pytest.mark.parametrize("bad", [b"", CONTENT[:-1], CONTENT + b"x", CONTENT[:-1] + b"\0"])
async def test_damaged_bytes_are_noticed_put_aside_and_healed_by_another_put(chunks: ChunkStore, bad: bytes) -> None:
    await chunks.put(CHUNK, once(CONTENT))
    assert not await chunks.quarantine(CHUNK)
    await damage(chunks, CHUNK, bad)
    assert (await refusal(chunks.read(CHUNK))).code is Code.CORRUPT
    assert await chunks.quarantine(CHUNK)
    assert (await refusal(chunks.read(CHUNK))).code is Code.NOT_FOUND
    assert await chunks.quarantine(CHUNK)
    await chunks.put(CHUNK, once(CONTENT))
    assert await chunks.read(CHUNK) == CONTENT


async def test_a_put_replaces_damaged_bytes_that_nobody_has_noticed(chunks: ChunkStore) -> None:
    await chunks.put(CHUNK, once(CONTENT))
    await damage(chunks, CHUNK, b"rot")
    await chunks.put(CHUNK, once(CONTENT))
    assert await chunks.read(CHUNK) == CONTENT


async def test_delete_removes_and_may_be_repeated(chunks: ChunkStore) -> None:
    await chunks.put(CHUNK, once(CONTENT))
    for _ in range(2):
        await chunks.delete(CHUNK.digest)
        assert not await chunks.has(CHUNK.digest)


async def test_a_broken_off_put_goes_on_where_it_was_or_starts_over(chunks: ChunkStore) -> None:
    with pytest.raises(ConnectionResetError):
        await chunks.put(CHUNK, broken_off(CONTENT, 2_000_000), owner="host_a")
    assert not await chunks.has(CHUNK.digest)
    received = (await chunks.received([CHUNK.digest], "host_a")).get(CHUNK.digest, 0)
    assert received in (0, 2_000_000)
    assert await chunks.received([CHUNK.digest], "host_b") == {}
    other = await refusal(chunks.put(CHUNK, once(CONTENT[1:]), owner="host_a", offset=1))
    assert (other.code, other.detail["received"]) == (Code.CONFLICT, received)
    await chunks.put(CHUNK, in_pieces(CONTENT[received:]), owner="host_a", offset=received)
    assert await chunks.read(CHUNK) == CONTENT
    assert await chunks.received([CHUNK.digest], "host_a") == {}


async def test_many_puts_of_the_same_chunk_at_once_leave_it_whole(chunks: ChunkStore) -> None:
    wrong = bytes(len(CONTENT))
    bodies = [in_pieces(CONTENT), broken_off(CONTENT, 1 << 20), in_pieces(wrong), in_pieces(CONTENT[:-5])]
    puts = [chunks.put(CHUNK, body, owner="host_a") for body in [*bodies, in_pieces(CONTENT), in_pieces(wrong)]]
    results = await asyncio.gather(*puts, return_exceptions=True)
    assert [result is None for result in results] == [True, False, False, False, True, False]
    assert await chunks.read(CHUNK) == CONTENT


async def test_tidy_removes_old_rests_and_no_chunk(chunks: ChunkStore) -> None:
    await chunks.put(CHUNK, once(CONTENT))
    other = noise(1 << 20, seed=1)
    if chunks.signer is None:
        with pytest.raises(ConnectionResetError):
            await chunks.put(chunk_of(other), broken_off(other, 1000), owner="host_a")
    else:
        (url,) = await chunks.signer.sign_put([chunk_of(other).digest], "host_a", 60)
        assert await asyncio.to_thread(http_put, url, other) == 200
    assert await chunks.tidy(0.0) == 0
    assert await chunks.tidy(4e9) == 1
    assert await chunks.received([chunk_of(other).digest], "host_a") == {}
    assert await chunks.read(CHUNK) == CONTENT


def http_put(url: str, content: bytes) -> int:
    return http(url, "PUT", content)[0]


def http(url: str, method: str, content: bytes | None = None) -> tuple[int, bytes]:
    parts = urlsplit(url)
    connection = HTTPConnection(parts.netloc, timeout=20)
    try:
        connection.request(method, f"{parts.path}?{parts.query}", body=content)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


@pytest.mark.parametrize("chunks", ["s3"], indirect=True)
async def test_what_came_by_a_signed_url_counts_once_it_was_verified(chunks: ChunkStore) -> None:
    signer = chunks.signer
    assert signer is not None
    assert not await signer.adopt(CHUNK, "host_a")
    (url,) = await signer.sign_put([CHUNK.digest], "host_a", 60)
    for wrong in (CONTENT[:-1], bytes(len(CONTENT)), CONTENT + b"x"):
        assert await asyncio.to_thread(http_put, url, wrong) == 200
        assert not await signer.adopt(CHUNK, "host_a")
        assert not await chunks.has(CHUNK.digest)
    assert await asyncio.to_thread(http_put, url, CONTENT) == 200
    assert not await chunks.has(CHUNK.digest)
    assert not await signer.adopt(CHUNK, "host_b"), "what one host sent is not another's"
    assert await signer.adopt(CHUNK, "host_a")
    assert await chunks.read(CHUNK) == CONTENT
    assert await asyncio.to_thread(http_put, url, bytes(len(CONTENT))) == 200
    assert await chunks.read(CHUNK) == CONTENT, "the URL still works but reaches no chunk"
    (get,) = await signer.sign_get([CHUNK.digest], 60)
    status, content = await asyncio.to_thread(http, get, "GET")
    assert (status, hashlib.sha256(content).hexdigest()) == (200, CHUNK.digest)
    assert (await asyncio.to_thread(http, get, "DELETE"))[0] == 403
    assert (await asyncio.to_thread(http_put, get, b"x")) == 403


@pytest.mark.parametrize("chunks", ["s3"], indirect=True)
async def test_a_sender_who_swaps_the_bytes_between_check_and_use_gains_nothing(chunks: ChunkStore) -> None:
    signer = chunks.signer
    assert signer is not None
    (url,) = await signer.sign_put([CHUNK.digest], "host_a", 60)
    assert await asyncio.to_thread(http_put, url, CONTENT) == 200
    failpoint.arm("artifacts.objects.before_adopt", lambda name: print(name, http_put(url, bytes(len(CONTENT)))))
    assert await signer.adopt(CHUNK, "host_a")
    assert await chunks.read(CHUNK) == CONTENT


@pytest.mark.parametrize("chunks", ["s3"], indirect=True)
async def test_bytes_that_become_right_only_after_they_were_copied_are_not_adopted(chunks: ChunkStore) -> None:
    signer = chunks.signer
    assert signer is not None
    (url,) = await signer.sign_put([CHUNK.digest], "host_a", 60)
    assert await asyncio.to_thread(http_put, url, bytes(len(CONTENT))) == 200
    failpoint.arm("artifacts.objects.before_check", lambda name: print(name, http_put(url, CONTENT)))
    assert not await signer.adopt(CHUNK, "host_a")
    assert not await chunks.has(CHUNK.digest)


@pytest.mark.parametrize("chunks", ["s3"], indirect=True)
async def test_what_failed_halfway_in_object_storage_can_be_repeated(chunks: ChunkStore) -> None:
    signer = chunks.signer
    assert signer is not None
    (url,) = await signer.sign_put([CHUNK.digest], "host_a", 60)
    for name in ("before_put", "after_put"):
        failpoint.arm(f"artifacts.objects.{name}", failpoint.fail)
        assert (await refusal(chunks.put(CHUNK, once(CONTENT)))).code is Code.UNAVAILABLE
        await chunks.put(CHUNK, once(CONTENT))
        assert await chunks.read(CHUNK) == CONTENT
        await chunks.delete(CHUNK.digest)
    for name in ("before_check", "before_adopt", "after_adopt"):
        assert await asyncio.to_thread(http_put, url, CONTENT) == 200
        failpoint.arm(f"artifacts.objects.{name}", failpoint.fail)
        assert (await refusal(signer.adopt(CHUNK, "host_a"))).code is Code.UNAVAILABLE
        assert await signer.adopt(CHUNK, "host_a")
        assert await chunks.read(CHUNK) == CONTENT
        await chunks.delete(CHUNK.digest)
    assert await chunks.tidy(4e9) == 3, "a copy is left of each, for tidying"
