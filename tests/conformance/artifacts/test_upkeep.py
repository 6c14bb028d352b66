"""What is removed is what nobody needs: retention, collection beside running uploads, scrubbing."""

from __future__ import annotations

import asyncio

import msgspec

from strata.base.errors import Code
from strata.fleet.artifacts import maintenance
from strata.fleet.artifacts.manifest import ArtifactKind, Lineage
from strata.fleet.artifacts.ports import LineageFilter
from strata.fleet.artifacts.retention import RetentionPolicy
from strata.fleet.artifacts.service import once
from strata.fleet.artifacts.states import ChunkState
from tests.conformance.artifacts.making import (
    OWNER,
    RESULT,
    Place,
    chunk_of,
    content_of,
    manifest_of,
    noise,
    refusal,
    send,
    upload,
)
from tests.conformance.artifacts.test_chunks import damage
from tests.conformance.fleet.fleet import add, add_host, claim, hold, job

GRACE_S = 1000.0
FILES = {"a": noise(5000), "b": noise(6000, seed=2)}
TOGETHER = {chunk_of(content).digest for content in FILES.values()}


async def test_a_dry_run_changes_nothing_and_tells_what_the_real_run_does(place: Place) -> None:
    done = await upload(place, FILES)
    await place.artifacts.remove(done.artifact_id, "old", "operator")
    await place.clock.advance(GRACE_S)
    for _ in range(2):
        told = await maintenance.collect_garbage(place.artifacts)
        assert {chunk.digest for chunk in told.marked} == TOGETHER
        assert told.erased == []
    assert {slot.state for slot in (await place.index.slots(list(TOGETHER))).values()} == {ChunkState.STORED}
    assert {
        chunk.digest for chunk in (await maintenance.collect_garbage(place.artifacts, dry_run=False)).marked
    } == TOGETHER
    assert (await maintenance.collect_garbage(place.artifacts, dry_run=False)).erased == [], (
        "a grace lies between the two"
    )
    await place.clock.advance(GRACE_S)
    assert {chunk.digest for chunk in (await maintenance.collect_garbage(place.artifacts)).erased} == TOGETHER
    assert all([await place.chunks.has(digest) for digest in TOGETHER])
    assert {
        chunk.digest for chunk in (await maintenance.collect_garbage(place.artifacts, dry_run=False)).erased
    } == TOGETHER
    assert not any([await place.chunks.has(digest) for digest in TOGETHER])
    assert await place.index.slots(list(TOGETHER)) == {}
    assert (await upload(place, FILES)).new


async def test_what_an_artifact_needs_is_never_collected(place: Place) -> None:
    kept = await upload(place, FILES)
    gone = await upload(place, {"a": FILES["a"], "c": b"alone"})
    await place.artifacts.remove(gone.artifact_id, "old", "operator")
    for _ in range(4):
        await place.clock.advance(GRACE_S)
        await maintenance.collect_garbage(place.artifacts, dry_run=False)
    assert await content_of(place, kept.artifact_id) == FILES
    assert not await place.chunks.has(chunk_of(b"alone").digest)


async def test_an_upload_that_began_before_a_collection_keeps_its_chunks(place: Place) -> None:
    await send(place, FILES)
    await place.clock.advance(GRACE_S)
    # The chunks are to be deleted when another upload wants them: asking for them is enough.
    await maintenance.collect_garbage(place.artifacts, dry_run=False)
    assert {slot.state for slot in (await place.index.slots(list(TOGETHER))).values()} == {ChunkState.TO_DELETE}
    await place.clock.advance(GRACE_S / 20)
    plan = await place.artifacts.plan(manifest_of(FILES).chunks(), OWNER)
    assert plan.missing == ()
    await place.clock.advance(GRACE_S - 1)
    assert (await maintenance.collect_garbage(place.artifacts, dry_run=False)).erased == []
    done = await place.artifacts.commit(manifest_of(FILES), RESULT, "host:a")
    await place.clock.advance(10 * GRACE_S)
    await maintenance.collect_garbage(place.artifacts, dry_run=False)
    await maintenance.collect_garbage(place.artifacts, dry_run=False)
    assert await content_of(place, done.artifact_id) == FILES


async def test_a_commit_keeps_chunks_that_are_to_be_deleted(place: Place) -> None:
    await send(place, FILES)
    await place.clock.advance(GRACE_S)
    await maintenance.collect_garbage(place.artifacts, dry_run=False)
    await place.artifacts.commit(manifest_of(FILES), RESULT, "host:a")
    assert {slot.state for slot in (await place.index.slots(list(TOGETHER))).values()} == {ChunkState.STORED}


async def test_collections_racing_uploads_never_take_a_committed_chunk(place: Place) -> None:
    """Every upload wants chunks that the collection is just about to erase."""
    for turn in range(8):
        files = {"same": FILES["a"], "own": noise(3000, seed=turn)}
        await send(place, files)
        await place.clock.advance(GRACE_S)
        await maintenance.collect_garbage(place.artifacts, dry_run=False)
        await place.clock.advance(GRACE_S)

        async def try_upload(files: dict[str, bytes] = files) -> str | None:
            for _ in range(200):
                try:
                    return (await upload(place, files)).artifact_id
                except Exception as error:
                    if getattr(error, "code", None) not in (Code.UNAVAILABLE, Code.CONFLICT, Code.PRECONDITION):
                        raise
                    await asyncio.sleep(0)
            return None

        results = await asyncio.gather(
            try_upload(),
            maintenance.collect_garbage(place.artifacts, dry_run=False),
            try_upload(),
            return_exceptions=True,
        )
        assert [each for each in results if isinstance(each, BaseException)] == []
        artifact_id = results[0]
        assert isinstance(artifact_id, str)
        assert await content_of(place, artifact_id) == files
        await place.artifacts.remove(artifact_id, "next", "op")


async def test_a_chunk_that_is_being_erased_cannot_be_put_until_it_is_gone(place: Place) -> None:
    await send(place, FILES)
    await place.clock.advance(GRACE_S)
    await maintenance.collect_garbage(place.artifacts, dry_run=False)
    await place.clock.advance(GRACE_S)
    slots = await place.index.erase(place.clock.wall_s() - GRACE_S, 10)
    assert {slot.digest for slot in slots} == TOGETHER
    put = place.artifacts.put_chunk(chunk_of(FILES["a"]), once(FILES["a"]), OWNER)
    assert (await refusal(put)).code is Code.UNAVAILABLE
    stale = await refusal(place.index.stored([slots[0]], place.clock.wall_s()))
    assert stale.code is Code.CONFLICT
    assert (await refusal(place.artifacts.commit(manifest_of(FILES), RESULT, "h"))).code is Code.PRECONDITION
    # Whoever began to erase is gone; the next collection ends it.
    assert {
        chunk.digest for chunk in (await maintenance.collect_garbage(place.artifacts, dry_run=False)).erased
    } == TOGETHER
    assert (await upload(place, FILES)).new


async def test_a_put_that_outlasted_its_row_is_told_to_send_again(place: Place) -> None:
    reserved = (await place.index.reserve([chunk_of(FILES["a"]).digest], 0.0, stale_after_s=100))[
        chunk_of(FILES["a"]).digest
    ]
    await maintenance.collect_garbage(place.artifacts, dry_run=False)
    await send(place, FILES)
    assert (await refusal(place.index.stored([reserved], 1.0))).code is Code.CONFLICT


async def test_retention_keeps_the_latest_the_best_and_what_is_needed(place: Place) -> None:
    await add_host(place.fleet)
    await add(place.fleet, job("gbt"))
    (lease,) = await claim(place.fleet)
    point = await upload(place, {"f": b"point"}, Lineage(kind=ArtifactKind.CHECKPOINT), hold(lease))
    await place.fleet.leases.record_checkpoint(hold(lease), point.artifact_id, 1.0)
    ids = []
    for number in range(6):
        made = Lineage(kind=ArtifactKind.RESULT, model="gbt", metrics={"auc": 1.0 if number == 0 else 0.1 * number})
        ids.append((await upload(place, {"f": str(number).encode()}, made)).artifact_id)
    await place.artifacts.pin(ids[1], "the paper", "operator")
    tuned = Lineage(kind=ArtifactKind.RESULT, model="other", parents=(ids[2],))
    other = (await upload(place, {"f": b"tuned"}, tuned)).artifact_id
    policy = RetentionPolicy(keep_last=1, keep_best=1, metric="auc", min_age_s=60)
    assert (await maintenance.apply_retention(place.artifacts, policy, "hub")).dropped == {}, "all are new"
    await place.clock.advance(61)
    choice = await maintenance.apply_retention(place.artifacts, policy, "hub")
    assert set(choice.dropped) == {ids[3], ids[4]}
    assert {id_: why.split(":")[0].split(" of ")[0] for id_, why in choice.kept.items()} == {
        point.artifact_id: "checkpoint",
        ids[0]: "one",
        ids[1]: "pinned",
        ids[2]: "parent",
        ids[5]: "one",
        other: "one",
    }
    done = await maintenance.apply_retention(place.artifacts, policy, "hub", dry_run=False)
    assert set(done.dropped) == {ids[3], ids[4]}
    assert (await refusal(place.artifacts.open(ids[3]))).code is Code.GONE
    left = {row.artifact_id for row in await place.index.lineages(LineageFilter())}
    assert left == set(choice.kept)


async def test_an_artifact_that_is_committed_again_after_the_choice_is_not_removed(place: Place) -> None:
    done = await upload(place, FILES)
    (row,) = await place.index.lineages(LineageFilter())
    await upload(place, FILES, msgspec.structs.replace(RESULT, code="again"))
    assert not await place.index.remove(done.artifact_id, "retention", "hub", 1.0, upto_seq=row.seq)
    assert await content_of(place, done.artifact_id) == FILES


async def test_scrubbing_finds_damage_and_loss_and_goes_on_where_it_stopped(place: Place) -> None:
    contents = {str(number): noise(1000, seed=number) for number in range(40)}
    done = await upload(place, contents)
    bad, lost = chunk_of(contents["7"]), chunk_of(contents["23"])
    await damage(place.chunks, bad, b"rot")
    await place.chunks.delete(lost.digest)
    await place.clock.advance(100)

    async def scrub(max_bytes: int) -> maintenance.ScrubResult:
        return await maintenance.scrub(place.artifacts, max_bytes=max_bytes, bytes_per_s=1e9, every_s=50)

    async def driven(max_bytes: int) -> maintenance.ScrubResult:
        task = asyncio.ensure_future(scrub(max_bytes))
        while not task.done():
            await place.clock.advance(1e-6)
            await asyncio.wait([task], timeout=0.001)
        return await task

    first = await driven(20_000)
    assert not first.done
    second = await driven(10**9)
    assert second.done
    assert sorted([*first.damaged, *second.damaged]) == sorted([bad.digest, lost.digest])
    assert first.chunks + second.chunks == 40, "each was read once"
    assert (await driven(10**9)).chunks == 0
    plan = await place.artifacts.plan(manifest_of(contents).chunks(), OWNER)
    assert {each.digest for each in plan.missing} == {bad.digest, lost.digest}
    await send(place, contents)
    assert await content_of(place, done.artifact_id) == contents


async def test_scrubbing_keeps_to_its_speed(place: Place) -> None:
    await upload(place, {str(number): noise(1000, seed=number) for number in range(20)})
    await place.clock.advance(100)
    started_s = place.clock.monotonic_s()
    task = asyncio.ensure_future(maintenance.scrub(place.artifacts, max_bytes=10**9, bytes_per_s=1000.0, every_s=50))
    while not task.done():
        await place.clock.advance(0.25)
        await asyncio.wait([task], timeout=0.001)
    assert (await task).bytes == 20_000
    assert place.clock.monotonic_s() - started_s >= 20


async def test_a_chunk_that_was_healed_while_it_was_put_aside_is_not_lost(place: Place) -> None:
    done = await upload(place, FILES)
    chunk = chunk_of(FILES["a"])
    await place.artifacts.set_aside(chunk, "a reader was wrong")
    assert await content_of(place, done.artifact_id) == FILES
    assert (await place.index.usage()).damaged == 0
