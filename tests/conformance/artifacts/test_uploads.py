"""Uploads that break off, lie or meet damage; reads that are verified; blobs; the export."""

from __future__ import annotations

import asyncio
import io
import tarfile
from collections.abc import AsyncIterator

import msgspec
import pytest

from strata.base.digest import sha256_hex
from strata.base.errors import Code
from strata.fleet.artifacts import export
from strata.fleet.artifacts.manifest import CHUNK_BYTES, ArtifactChunk, ArtifactKind, ArtifactManifest, Lineage
from strata.fleet.artifacts.ports import LineageFilter
from strata.fleet.artifacts.service import Artifacts, once
from strata.http.zstd import zstd
from tests.conformance.artifacts.making import (
    OWNER,
    RESULT,
    Place,
    broken_off,
    chunk_of,
    complete,
    content_of,
    in_pieces,
    kinds,
    manifest_of,
    noise,
    parts_of,
    refusal,
    send,
    upload,
)
from tests.conformance.artifacts.test_chunks import damage, http_put

BIG = noise(2 * CHUNK_BYTES + 12345)
FILES = {"run.sh": b"#!/bin/sh\n", "weights/model.bin": BIG, "empty": b""}


async def collected(parts: AsyncIterator[bytes]) -> bytes:
    return b"".join([part async for part in parts])


async def test_an_interrupted_upload_goes_on_with_what_is_missing(place: Place) -> None:
    manifest, parts = manifest_of(FILES), parts_of(FILES)
    first, second, *rest = manifest.chunks()
    await place.artifacts.put_chunk(chunk_of(parts[first]), once(parts[first]), OWNER)
    cut_at = len(parts[second]) // 2
    with pytest.raises(ConnectionResetError):
        await place.artifacts.put_chunk(chunk_of(parts[second]), broken_off(parts[second], cut_at), OWNER)
    plan = await place.artifacts.plan(manifest.chunks(), OWNER)
    assert [each.digest for each in plan.missing] == [second, *rest]
    assert plan.missing[0].received == (cut_at if place.chunks.signer is None else 0)
    await send(place, FILES)
    done = await place.artifacts.commit(manifest, RESULT, "host:a")
    assert await content_of(place, done.artifact_id) == FILES


async def test_chunks_put_past_the_hub_are_verified_by_the_next_plan_or_the_commit(place: Place) -> None:
    if place.chunks.signer is None:
        assert all(each.url == "" for each in (await place.artifacts.plan(manifest_of(FILES).chunks(), OWNER)).missing)
        return
    manifest, parts = manifest_of(FILES), parts_of(FILES)
    plan = await place.artifacts.plan(manifest.chunks(), OWNER)
    first, second, *rest = plan.missing
    assert await asyncio.to_thread(http_put, first.url, parts[first.digest]) == 200
    assert await asyncio.to_thread(http_put, second.url, bytes(second.size)) == 200
    plan = await place.artifacts.plan(manifest.chunks(), OWNER)
    assert [each.digest for each in plan.missing] == [second.digest, *(each.digest for each in rest)]
    for each in plan.missing:
        assert await asyncio.to_thread(http_put, each.url, parts[each.digest]) == 200
    other = await refusal(place.artifacts.commit(manifest, RESULT, "host:b", owner="host_b"))
    assert other.code is Code.PRECONDITION
    done = await place.artifacts.commit(manifest, RESULT, f"host:{OWNER}", owner=OWNER)
    assert await content_of(place, done.artifact_id) == FILES
    download = await place.artifacts.download(done.artifact_id)
    assert download.urls.keys() == manifest.chunks().keys()


async def test_any_range_of_a_file_can_be_read(place: Place) -> None:
    done = await upload(place, FILES)
    edge = CHUNK_BYTES
    for start, end in ((0, None), (edge - 3, edge + 3), (edge, edge), (2 * edge + 5, None), (0, 10**12)):
        read = await collected(place.artifacts.read_file(done.artifact_id, "weights/model.bin", start=start, end=end))
        assert read == BIG[start:end]
    for start, end in ((-1, 5), (5, 4), (len(BIG) + 1, None)):
        parts = place.artifacts.read_file(done.artifact_id, "weights/model.bin", start=start, end=end)
        assert (await refusal(collected(parts))).code is Code.INVALID
    assert (await refusal(collected(place.artifacts.read_file(done.artifact_id, "nope")))).code is Code.NOT_FOUND


async def test_damage_is_corrupt_is_quarantined_and_is_healed_by_an_upload(place: Place) -> None:
    done = await upload(place, FILES)
    bad = chunk_of(BIG[CHUNK_BYTES : 2 * CHUNK_BYTES])
    await damage(place.chunks, bad, b"rot")
    got: list[bytes] = []

    async def read() -> None:
        async for part in place.artifacts.read_file(done.artifact_id, "weights/model.bin"):
            got.append(part)  # noqa: PERF401 - what came before the error counts

    assert (await refusal(read())).code is Code.CORRUPT
    assert b"".join(got) == BIG[:CHUNK_BYTES], "only what was verified is handed out"
    assert not await place.chunks.has(bad.digest)
    assert (await place.index.usage()).damaged == 1
    assert await kinds(place, bad.digest) == ["chunk.damaged"]
    assert (await refusal(place.artifacts.read_chunk(bad.digest))).code is Code.NOT_FOUND
    plan = await place.artifacts.plan(manifest_of(FILES).chunks(), "host_b")
    assert [each.digest for each in plan.missing] == [bad.digest]
    await send(place, FILES, "host_b")
    assert await content_of(place, done.artifact_id) == FILES
    assert (await place.index.usage()).damaged == 0


async def test_a_file_that_is_not_what_its_maker_said_is_corrupt_at_its_end(place: Place) -> None:
    await send(place, FILES)
    liar = [msgspec.structs.replace(file, sha256="0" * 64) if file.size > CHUNK_BYTES else file
            for file in manifest_of(FILES).files]  # fmt: skip
    done = await place.artifacts.commit(ArtifactManifest(files=tuple(liar)), RESULT, "host:a")
    read = collected(place.artifacts.read_file(done.artifact_id, "weights/model.bin"))
    assert (await refusal(read)).code is Code.CORRUPT


async def test_a_blob_is_verified_as_a_whole_and_found_by_its_digest(place: Place) -> None:
    sha256 = sha256_hex(BIG)
    wrong = place.artifacts.put_blob(sha256, in_pieces(BIG[:-1]), RESULT, "host:a")
    assert (await refusal(wrong)).code is Code.INVALID
    assert (await refusal(place.index.blob(sha256))).code is Code.NOT_FOUND
    done = await place.artifacts.put_blob(sha256, in_pieces(BIG, 1_000_000), RESULT, "host:a")
    assert await place.index.blob(sha256) == done.artifact_id
    again = await place.artifacts.put_blob(sha256, in_pieces(BIG), RESULT, "host:a")
    assert not again.new
    assert await collected(export.bundle(place.artifacts, done.artifact_id)) == BIG, "never unpacked, never repacked"
    await place.artifacts.remove(done.artifact_id, "", "op")
    assert (await refusal(place.index.blob(sha256))).code is Code.NOT_FOUND


async def test_a_blob_beyond_the_limit_is_refused(place: Place) -> None:
    small = Artifacts(
        place.index, place.chunks, place.clock, limits=msgspec.structs.replace(place.artifacts.limits, max_bytes=100)
    )
    refused = await refusal(small.put_blob(sha256_hex(bytes(101)), once(bytes(101)), RESULT, "host:a"))
    assert refused.code is Code.INVALID


async def test_the_bundle_is_the_same_bytes_each_time_and_what_tar_expects(place: Place) -> None:
    long = f"{'d' * 120}/{'ü' * 90}/f"
    files = {**FILES, long: b"deep", "a block": bytes(512)}
    manifest = await send(place, files)
    executable = ArtifactManifest(
        files=tuple(
            msgspec.structs.replace(file, mode="0755") if file.path == "run.sh" else file for file in manifest.files
        )
    )
    done = await place.artifacts.commit(executable, RESULT, "host:a")
    packed = await collected(export.bundle(place.artifacts, done.artifact_id))
    await place.clock.advance(1000)
    assert await collected(export.bundle(place.artifacts, done.artifact_id)) == packed
    plain = zstd.decompress(packed)
    assert len(plain) % tarfile.RECORDSIZE == 0
    with tarfile.open(fileobj=io.BytesIO(plain)) as archive:
        members = archive.getmembers()
        assert [member.name for member in members] == sorted(files)
        assert {(member.mtime, member.uid, member.gid, member.uname) for member in members} == {(0, 0, 0, "")}
        assert {member.name: member.mode for member in members}["run.sh"] == 0o755
        unpacked = {member.name: archive.extractfile(member).read() for member in members}  # type: ignore[union-attr]
    assert unpacked == files


async def test_the_index_of_the_export_leads_to_every_result(place: Place) -> None:
    done = await complete(
        place, FILES, Lineage(kind=ArtifactKind.RESULT, model="gbt", mode="oracle", metrics={"auc": 0.5})
    )
    await upload(place, {"f": b"uploaded, no job has it"})
    await upload(place, {"f": b"c"}, Lineage(kind=ArtifactKind.CHECKPOINT, model="gbt"))
    odd = await complete(place, {"f": b"1"}, Lineage(kind=ArtifactKind.RESULT, model="../../etc", mode="a/b"))
    digests: dict[str, str] = {}
    lines = (await collected(export.index_lines(place.artifacts, digests))).splitlines()
    assert (await collected(export.index_lines(place.artifacts, digests))).splitlines() == lines
    paths = {row["artifact"]: row["path"] for row in map(msgspec.json.decode, lines)}
    hexed = done.artifact_id.removeprefix("artifact1_")
    assert paths[done.artifact_id] == f"gbt_oracle/{hexed}/bundle.tar.zst"
    assert paths.keys() == {done.artifact_id, odd.artifact_id}
    assert ".." not in paths[odd.artifact_id].split("/")
    assert paths[odd.artifact_id].count("/") == 2
    for artifact_id, path in paths.items():
        assert await export.find(place.artifacts, path) == artifact_id
        assert sha256_hex(await collected(export.bundle(place.artifacts, artifact_id))) == digests[artifact_id]
    assert digests == {row["artifact"]: row["sha256"] for row in map(msgspec.json.decode, lines)}
    for unknown in (f"mlp_oracle/{hexed}/bundle.tar.zst", "../x", f"gbt_oracle/{'0' * 64}/bundle.tar.zst"):
        assert (await refusal(export.find(place.artifacts, unknown))).code is Code.NOT_FOUND


async def test_wrong_truncated_and_oversized_chunks_leave_nothing_behind(place: Place) -> None:
    content = noise(100_000)
    chunk = chunk_of(content)
    for body, code in (
        (bytes(100_000), Code.INVALID),
        (content + b"x", Code.INVALID),
        (content[:-1], Code.PRECONDITION),
    ):
        assert (await refusal(place.artifacts.put_chunk(chunk, in_pieces(body), OWNER))).code is code
        assert (await refusal(place.artifacts.read_chunk(chunk.digest))).code is Code.NOT_FOUND
        assert not await place.chunks.has(chunk.digest)
    for size in (chunk.size - 1, chunk.size + 1):
        lie = place.artifacts.put_chunk(ArtifactChunk(chunk.digest, size), once(content), "host_b")
        assert (await refusal(lie)).code in (Code.INVALID, Code.PRECONDITION)
    assert await place.index.lineages(LineageFilter()) == []


async def test_a_full_disk_refuses_before_bytes_are_sent(place: Place) -> None:
    free = await place.chunks.free_bytes()
    if free is None:
        return
    chunks = place.chunks
    # More than other programs may free meanwhile.
    chunks._keep_free_bytes += free + (1 << 40)  # type: ignore[attr-defined]
    content = noise(100_000)
    refused = await refusal(place.artifacts.plan({chunk_of(content).digest: len(content)}, OWNER))
    assert refused.code is Code.EXHAUSTED
    put = place.artifacts.put_chunk(chunk_of(content), once(content), OWNER)
    assert (await refusal(put)).code is Code.EXHAUSTED
    chunks._keep_free_bytes = 0  # type: ignore[attr-defined]
    await place.artifacts.put_chunk(chunk_of(content), once(content), OWNER)
