"""A commit is all or nothing, happens once, and only under the attempt it belongs to."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import msgspec
import pytest

from strata.base.digest import sha256_hex
from strata.base.errors import Code, StrataError
from strata.fleet.artifacts import checks
from strata.fleet.artifacts.manifest import CHUNK_BYTES, ArtifactChunk, ArtifactKind, ArtifactManifest, Lineage
from strata.fleet.artifacts.ports import LineageFilter, StorageAccount
from strata.fleet.artifacts.service import once
from strata.fleet.records import JobCompletion
from tests.conformance.artifacts.making import (
    OWNER,
    RESULT,
    Place,
    chunk_of,
    complete,
    content_of,
    kinds,
    manifest_of,
    noise,
    parts_of,
    refusal,
    send,
    upload,
)
from tests.conformance.fleet.fleet import LEASE_S, add, add_host, claim, hold, job

FILES = {"model.bin": noise(CHUNK_BYTES + 1000), "sub/config.json": b"{}", "sub/empty": b""}


async def test_a_committed_artifact_can_be_read_and_is_an_event(place: Place) -> None:
    done = await upload(place, FILES)
    assert done.new
    assert done.artifact_id == manifest_of(FILES).id
    row = await place.artifacts.open(done.artifact_id)
    assert row.manifest == manifest_of(FILES)
    assert row.size == sum(map(len, FILES.values()))
    assert await content_of(place, done.artifact_id) == FILES
    assert await kinds(place, done.artifact_id) == ["artifact.committed"]


async def test_the_same_commit_again_changes_nothing(place: Place) -> None:
    done = await upload(place, FILES)
    again = await upload(place, FILES)
    assert not again.new
    assert (again.artifact_id, again.lineage_id) == (done.artifact_id, done.lineage_id)
    assert await kinds(place, done.artifact_id) == ["artifact.committed"]
    assert len(await place.index.lineages(LineageFilter())) == 1


async def test_a_chunk_is_open_while_an_artifact_that_is_no_state_of_a_server_has_it(place: Place) -> None:
    shared, secret, draft = noise(100, 1), noise(100, 2), noise(100, 3)
    checkpoint = Lineage(kind=ArtifactKind.CHECKPOINT, model="gbt")
    await add_host(place.fleet)
    await add(place.fleet, job("gbt", kind="server"))
    (server,) = await claim(place.fleet, claim_id="server")
    await upload(place, {"a": shared, "b": secret}, checkpoint, hold(server))
    await send(place, {"c": draft})
    digests = [chunk_of(each).digest for each in (shared, secret, draft)]
    assert [await place.index.is_open(digest) for digest in digests] == [False, False, False]
    await add(place.fleet, job("gbt"))
    (lease,) = await claim(place.fleet, claim_id="train")
    done = await upload(place, {"a": shared}, checkpoint, hold(lease))
    assert [await place.index.is_open(digest) for digest in digests] == [True, False, False]
    await place.artifacts.remove(done.artifact_id, "test", "test")
    assert not await place.index.is_open(digests[0])
    await committed_by(place, "operator", {"a": shared, "b": secret}, data("images", "1"))
    assert not await place.index.is_open(digests[1]), "it stays the state of a server"


@pytest.mark.proves("Never again: the digests of a training server's state opened it to whoever knew them")
async def test_a_person_does_not_commit_chunks_that_only_a_server_has_saved(place: Place) -> None:
    checkpoint = Lineage(kind=ArtifactKind.CHECKPOINT, model="gbt")
    await add_host(place.fleet)
    await add(place.fleet, job("gbt", kind="server"))
    (server,) = await claim(place.fleet, claim_id="server")
    shared, secret = noise(100, 1), noise(100, 2)
    await committed_by(place, "rob", {"a": shared}, data("open", "1"))
    state = await upload(place, {"a": shared, "b": secret}, checkpoint, hold(server))
    await committed_by(place, "eve", {"a": shared}, data("x", "1"))
    for removed in (False, True):
        if removed:
            await place.artifacts.remove(state.artifact_id, "a newer copy", "host:a")
        for files in ({"b": secret}, {"a": shared, "b": secret}):
            error = await refusal(committed_by(place, "eve", files, data("x", "2")))
            assert (error.code, error.message.partition(" of")[0]) == (Code.FORBIDDEN, "1"), removed
    blob = place.artifacts.put_blob(sha256_hex(secret), once(secret), Lineage(kind=ArtifactKind.SOURCE), "key:x")
    assert (await blob).new, "who sends the bytes has them"
    await committed_by(place, "eve", {"b": secret}, data("x", "2"))


async def test_nothing_is_committed_while_a_chunk_is_missing(place: Place) -> None:
    manifest = manifest_of(FILES)
    parts = parts_of(FILES)
    first, *rest = manifest.chunks()
    for digest in rest:
        await place.artifacts.put_chunk(chunk_of(parts[digest]), once(parts[digest]), OWNER)
    error = await refusal(place.artifacts.commit(manifest, RESULT, "host:a"))
    assert (error.code, error.detail["missing"]) == (Code.PRECONDITION, [first])
    assert (await refusal(place.artifacts.open(manifest.id))).code is Code.NOT_FOUND
    assert await place.index.lineages(LineageFilter()) == []
    await place.artifacts.put_chunk(chunk_of(parts[first]), once(parts[first]), OWNER)
    assert (await place.artifacts.commit(manifest, RESULT, "host:a")).new


async def test_a_reserved_chunk_that_never_came_is_missing(place: Place) -> None:
    manifest = manifest_of(FILES)
    plan = await place.artifacts.plan(manifest.chunks(), OWNER)
    assert {each.digest: each.size for each in plan.missing} == manifest.chunks()
    assert plan.stored == 0
    assert (await refusal(place.artifacts.commit(manifest, RESULT, "host:a"))).code is Code.PRECONDITION


async def test_a_manifest_that_gives_a_chunk_another_size_is_refused(place: Place) -> None:
    content = noise(1000)
    await place.artifacts.put_chunk(chunk_of(content), once(content), OWNER)
    (file,) = manifest_of({"a": content}).files
    lie = ArtifactManifest(files=(msgspec.structs.replace(file, size=999),))
    assert (await refusal(place.artifacts.commit(lie, RESULT, "host:a"))).code is Code.INVALID


async def test_two_uploads_of_the_same_content_at_once_store_it_once(place: Place) -> None:
    runs = [msgspec.structs.replace(RESULT, code=f"commit {number}") for number in range(4)]
    done = await asyncio.gather(*(upload(place, FILES, lineage) for lineage in [*runs, runs[0]]))
    assert len({each.artifact_id for each in done}) == 1
    assert len({each.lineage_id for each in done}) == 4
    assert sum(each.new for each in done) == 4
    usage = await place.index.usage()
    assert (usage.artifacts, usage.chunks, usage.bytes) == (1, 3, sum(map(len, FILES.values())))
    assert await content_of(place, done[0].artifact_id) == FILES


async def test_an_attempt_commits_while_it_is_alive_and_is_stale_afterwards(place: Place) -> None:
    await add_host(place.fleet, "host_a")
    await add_host(place.fleet, "host_b")
    (job_id,) = await add(place.fleet, job("gbt"))
    (lease,) = await claim(place.fleet, "host_a")
    forged = msgspec.structs.replace(RESULT, job_id="job1_other", epoch=7, host_id="host_z")
    done = await upload(place, {"a": b"1"}, forged, hold(lease))
    (row,) = await place.index.lineages(LineageFilter(job_id=job_id))
    assert (row.lineage.epoch, row.lineage.host_id) == (1, "host_a"), "the hold counts, not what the sender wrote"
    await place.fleet.leases.expire(LEASE_S + 1)
    expired = msgspec.structs.replace(RESULT, kind=ArtifactKind.CHECKPOINT)
    assert (await upload(place, {"a": b"2"}, expired, hold(lease))).new, "nobody else has claimed it yet"
    (second,) = await claim(place.fleet, "host_b", claim_id="c2", now_s=LEASE_S + 2)
    stale = await refusal(upload(place, {"a": b"3"}, RESULT, hold(lease)))
    assert (stale.code, stale.detail["epoch"]) == (Code.STALE, 2)
    again = await upload(place, {"a": b"1"}, forged, hold(lease))
    assert (again.new, again.lineage_id) == (False, done.lineage_id), "a lost reply is answered as before"
    await upload(place, {"a": b"4"}, RESULT, hold(second))
    await place.fleet.leases.complete(hold(second), JobCompletion(artifact="x"), LEASE_S + 3)
    late = await refusal(upload(place, {"a": b"5"}, RESULT, hold(second)))
    assert late.code is Code.STALE
    wrong_host = await refusal(upload(place, {"a": b"6"}, RESULT, hold(lease)))
    assert wrong_host.code is Code.STALE
    assert (await refusal(place.artifacts.open(manifest_of({"a": b"3"}).id))).code is Code.NOT_FOUND


async def test_the_latest_and_the_best_are_found_by_model_and_mode(place: Place) -> None:
    figures = {"a": 0.5, "b": 0.9, "c": 0.7}
    done = {
        name: await complete(
            place,
            {"f": name.encode()},
            Lineage(kind=ArtifactKind.RESULT, model="gbt", mode="oracle", metrics={"auc": auc}),
        )
        for name, auc in figures.items()
    }
    await complete(place, {"f": b"other"}, Lineage(kind=ArtifactKind.RESULT, model="mlp", metrics={"auc": 1.0}))
    # Uploaded, but no job was completed with it.
    await upload(place, {"f": b"claimed"}, msgspec.structs.replace(RESULT, metrics={"auc": 1.0}))
    await upload(place, {"f": b"kept"}, Lineage(kind=ArtifactKind.CHECKPOINT, model="gbt", metrics={"auc": 1.0}))
    assert (await place.artifacts.latest("gbt")).artifact_id == done["c"].artifact_id
    assert (await place.artifacts.best("gbt", "auc", "oracle")).artifact_id == done["b"].artifact_id
    assert (await place.artifacts.best("gbt", "auc", lowest=True)).artifact_id == done["a"].artifact_id
    for unknown in (place.artifacts.latest("gbt", "real"), place.artifacts.best("gbt", "loss")):
        assert (await refusal(unknown)).code is Code.NOT_FOUND
    await place.artifacts.remove(done["b"].artifact_id, "bad", "operator")
    assert (await place.artifacts.best("gbt", "auc", "oracle")).artifact_id == done["c"].artifact_id


@pytest.mark.proves("Never again: a result that completed no job was latest, best and exported")
async def test_a_result_is_one_only_while_its_job_is_completed_with_it(place: Place) -> None:
    await add_host(place.fleet)
    await add(place.fleet, job("gbt"))
    (lease,) = await claim(place.fleet)
    scored = msgspec.structs.replace(RESULT, metrics={"auc": 1.0})
    done = await upload(place, {"f": b"1"}, scored, hold(lease))
    checkpoint = msgspec.structs.replace(RESULT, kind=ArtifactKind.CHECKPOINT)
    await upload(place, {"f": b"2"}, checkpoint)
    for early in (place.artifacts.latest("gbt"), place.artifacts.best("gbt", "auc")):
        assert (await refusal(early)).code is Code.NOT_FOUND
    assert (await refusal(place.artifacts.latest("gbt", kind=ArtifactKind.CHECKPOINT))).code is Code.NOT_FOUND
    await place.fleet.leases.complete(hold(lease), JobCompletion(artifact=done.artifact_id), 1.0)
    found = await place.artifacts.latest("gbt")
    assert (found.artifact_id, found.by, found.project) == (done.artifact_id, "host:host_a", "default")
    await place.fleet.jobs.requeue(lease.job_id, "operator", 2.0)
    assert (await refusal(place.artifacts.latest("gbt"))).code is Code.NOT_FOUND


async def test_lineage_is_walked_to_its_roots_even_through_what_was_removed(place: Place) -> None:
    source = await upload(place, {"f": b"source"}, Lineage(kind=ArtifactKind.SOURCE))
    base = await upload(place, {"f": b"base"}, Lineage(kind=ArtifactKind.RESULT, parents=(source.artifact_id,)))
    tuned = await upload(
        place, {"f": b"tuned"}, Lineage(kind=ArtifactKind.RESULT, parents=(base.artifact_id, source.artifact_id))
    )
    await place.artifacts.remove(base.artifact_id, "old", "operator")
    walked = [row.artifact_id for row in await place.artifacts.ancestry(tuned.artifact_id)]
    assert walked[0] == tuned.artifact_id
    assert set(walked[1:]) == {base.artifact_id, source.artifact_id}
    made = [
        row.artifact_id for row in await place.index.lineages(LineageFilter(parents=[source.artifact_id], removed=True))
    ]
    assert made == [tuned.artifact_id, base.artifact_id]
    children = [row.artifact_id for row in await place.artifacts.descendants(source.artifact_id)]
    assert children == [tuned.artifact_id, base.artifact_id], "each once, also what was made from both"
    assert [row.artifact_id for row in await place.artifacts.descendants(base.artifact_id)] == [tuned.artifact_id]
    assert not await place.artifacts.descendants(tuned.artifact_id)


async def test_pages_of_lineage_miss_nothing(place: Place) -> None:
    for number in range(5):
        await upload(place, {"f": b"same"}, msgspec.structs.replace(RESULT, code=str(number)))
    seen: list[str] = []
    before = 2**62
    while page := await place.index.lineages(LineageFilter(model="gbt", limit=2, before_seq=before)):
        seen += [row.lineage.code for row in page]
        before = page[-1].seq
    assert seen == ["4", "3", "2", "1", "0"]


async def test_a_removed_artifact_is_gone_and_another_upload_brings_it_back(place: Place) -> None:
    done = await upload(place, FILES)
    await place.artifacts.pin(done.artifact_id, "the paper", "operator")
    assert (await refusal(place.artifacts.remove(done.artifact_id, "old", "op"))).code is Code.PRECONDITION
    await place.artifacts.pin(done.artifact_id, "", "operator")
    assert await place.artifacts.remove(done.artifact_id, "old", "operator")
    assert not await place.artifacts.remove(done.artifact_id, "old", "operator")
    assert (await refusal(place.artifacts.open(done.artifact_id))).code is Code.GONE
    assert (await refusal(place.artifacts.remove(f"artifact1_{'0' * 64}", "", "op"))).code is Code.NOT_FOUND
    assert (await upload(place, FILES)).new
    assert await content_of(place, done.artifact_id) == FILES
    assert await kinds(place, done.artifact_id) == [
        "artifact.committed", "artifact.pinned", "artifact.unpinned", "artifact.removed", "artifact.committed",
    ]  # fmt: skip


async def test_a_checkpoint_that_an_unfinished_job_needs_cannot_be_removed(place: Place) -> None:
    await add_host(place.fleet)
    (job_id,) = await add(place.fleet, job("gbt"))
    (lease,) = await claim(place.fleet)
    done = await upload(place, {"step": b"10"}, Lineage(kind=ArtifactKind.CHECKPOINT), hold(lease))
    await place.fleet.leases.record_checkpoint(hold(lease), done.artifact_id, 1.0)
    assert await place.index.referenced() == {done.artifact_id: "checkpoint"}
    assert (await refusal(place.artifacts.remove(done.artifact_id, "", "op"))).code is Code.PRECONDITION
    await place.fleet.jobs.cancel(job_id, "no", "operator", 2.0)
    assert await place.index.referenced() == {}
    assert await place.artifacts.remove(done.artifact_id, "", "op")


async def test_a_prefix_finds_artifacts_with_or_without_its_kind(place: Place) -> None:
    done = await upload(place, FILES)
    whole = done.artifact_id
    assert await place.index.find(whole[:20]) == [whole]
    assert await place.index.find(whole.removeprefix("artifact1_")[:6]) == [whole]
    assert await place.index.find("artifact1_zz") == []


@pytest.mark.parametrize(("digest", "size"), [("x", 1), ("A" * 64, 1), ("0" * 64, 0), ("0" * 64, CHUNK_BYTES + 1)])
async def test_what_cannot_be_a_chunk_is_refused_before_anything_is_stored(
    place: Place, digest: str, size: int
) -> None:
    assert (await refusal(place.artifacts.plan({digest: size}, OWNER))).code is Code.INVALID
    put = place.artifacts.put_chunk(ArtifactChunk(digest, size), once(b"x"), OWNER)
    assert (await refusal(put)).code is Code.INVALID
    assert await place.index.unused(9e9, 10) == await place.index.erasable(9e9, 10) == []


async def test_an_upload_that_was_sent_before_needs_nothing_sent_again(place: Place) -> None:
    await send(place, FILES)
    plan = await place.artifacts.plan(manifest_of(FILES).chunks(), "host_b")
    assert (plan.missing, plan.stored) == ((), 3)


async def stored_for(place: Place, owner: str, limit: int | None, content: bytes) -> str:
    manifest = await send(place, {"a": content})
    done = await place.artifacts.commit(manifest, RESULT, "key:x", account=StorageAccount(owner=owner, limit=limit))
    return done.artifact_id


async def test_as_many_bytes_are_committed_as_the_owner_has_room_for(place: Place) -> None:
    first = await stored_for(place, "anna", 1000, noise(600, 1))
    error = await refusal(stored_for(place, "anna", 1000, noise(401, 2)))
    assert (error.code, error.detail["quota"]) == (Code.EXHAUSTED, "bytes")
    assert "600 bytes are stored, 401 more are too many for 1000" in error.message
    await stored_for(place, "anna", 1000, noise(400, 3))
    await stored_for(place, "bert", None, noise(5000, 4))
    # What is there already costs nothing, whoever commits it again.
    await stored_for(place, "anna", 1000, noise(600, 1))
    await stored_for(place, "anna", 1000, noise(5000, 4))
    assert await place.index.owner_bytes() == {"anna": 1000, "bert": 5000}
    assert await place.artifacts.remove(first, "", "operator")
    assert await place.index.owner_bytes() == {"anna": 400, "bert": 5000}
    await stored_for(place, "bert", None, noise(600, 1))
    assert (await place.artifacts.open(first)).owner == "bert"
    assert await place.index.owner_bytes() == {"anna": 400, "bert": 5600}


async def pushed(place: Place, owner: str, name: str, content: bytes) -> None:
    manifest = await send(place, {"a": content})
    account = StorageAccount(owner=owner, operator=owner == "operator")
    lineage = Lineage(kind=ArtifactKind.DATA, model=name, mode=owner)
    await place.artifacts.commit(manifest, lineage, "key:x", account=account)


async def test_a_name_of_data_is_of_the_owner_who_used_it_first(place: Place) -> None:
    await pushed(place, "anna", "images", noise(10, 1))
    error = await refusal(pushed(place, "bert", "images", noise(10, 2)))
    assert (error.code, error.message) == (Code.FORBIDDEN, "the data 'images' belongs to anna")
    await pushed(place, "bert", "others", noise(10, 1))
    await pushed(place, "operator", "images", noise(10, 3))
    made = await place.index.lineages(LineageFilter(kind=ArtifactKind.DATA))
    assert [(row.lineage.model, row.owner) for row in made] == [
        ("images", "anna"),
        ("others", "bert"),
        ("images", "anna"),
    ]
    for row in made:
        await place.artifacts.remove(row.artifact_id, "", "operator")
    error = await refusal(pushed(place, "bert", "images", noise(10, 2)))
    assert error.code is Code.FORBIDDEN, "a manifest may still have the name"


async def test_an_owner_has_so_many_names_of_data_and_no_more(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "MAX_NAMES", 3, raising=False)
    same = noise(1)
    pushes = (pushed(place, "anna", f"name{number}", same) for number in range(6))
    done = await asyncio.gather(*pushes, return_exceptions=True)
    assert [each.code for each in done if isinstance(each, StrataError)] == [Code.EXHAUSTED] * 3
    made = await place.index.lineages(LineageFilter(kind=ArtifactKind.DATA))
    assert len(made) == 3
    await place.artifacts.withdraw(made[0].artifact_id, "anna", "", "key:anna")
    assert (await refusal(pushed(place, "anna", "another", same))).code is Code.EXHAUSTED, "names are kept for ever"
    await pushed(place, "anna", made[0].lineage.model, noise(10, 1))
    await pushed(place, "bert", "another", same)
    for number in range(4):
        await pushed(place, "operator", f"op{number}", same)


def data(name: str, upload: str) -> Lineage:
    return Lineage(kind=ArtifactKind.DATA, model=name, mode=upload)


async def committed_by(place: Place, owner: str, files: Mapping[str, bytes], lineage: Lineage) -> str:
    account = StorageAccount(owner=owner, operator=owner == "operator")
    manifest = await send(place, files)
    return (await place.artifacts.commit(manifest, lineage, f"key:{owner}", account=account)).artifact_id


@pytest.mark.proves("Never again: a version of data that its owner had removed was the latest again")
async def test_what_was_withdrawn_stays_withdrawn_when_another_commits_the_same(place: Place) -> None:
    first = await committed_by(place, "anna", {"f": b"1"}, data("images", "1"))
    second = await committed_by(place, "anna", {"f": b"2"}, data("images", "2"))
    assert await place.artifacts.withdraw(second, "anna", "bad", "key:anna")
    assert await committed_by(place, "rob", {"f": b"2"}, data("x", "1")) == second
    kind = ArtifactKind.DATA
    assert (await place.artifacts.latest("images", kind=kind)).artifact_id == first
    assert (await place.artifacts.latest("x", kind=kind)).artifact_id == second
    shown = [(row.lineage.model, row.removed_at_s is None) for row in await place.artifacts.ancestry(second)]
    assert shown == [("x", True), ("images", False)]
    # She takes it up again herself: the very same commit is the latest, and hers to withdraw.
    for _ in range(2):
        await committed_by(place, "anna", {"f": b"2"}, data("images", "2"))
        assert (await place.artifacts.latest("images", kind=kind)).artifact_id == second
        assert not await place.artifacts.withdraw(second, "anna", "bad", "key:anna"), "rob needs the bytes"
        assert (await place.artifacts.latest("images", kind=kind)).artifact_id == first
    assert await content_of(place, second) == {"f": b"2"}
    assert await place.artifacts.withdraw(second, "rob", "", "key:rob")
    assert (await refusal(place.artifacts.open(second))).code is Code.GONE


async def test_an_owner_withdraws_what_is_hers_and_the_quota_passes_on(place: Place) -> None:
    shared = await committed_by(place, "anna", {"f": noise(100)}, data("images", "1"))
    await committed_by(place, "rob", {"f": noise(100)}, data("x", "1"))
    assert await place.index.owner_bytes() == {"anna": 100}
    assert (await refusal(place.artifacts.withdraw(shared, "eve", "", "key:eve"))).code is Code.FORBIDDEN
    assert not await place.artifacts.withdraw(shared, "anna", "", "key:anna")
    assert await place.index.owner_bytes() == {"rob": 100}
    assert await content_of(place, shared) == {"f": noise(100)}
    assert (await refusal(place.artifacts.withdraw(shared, "anna", "", "key:anna"))).code is Code.FORBIDDEN
    assert await place.artifacts.withdraw(shared, "rob", "", "key:rob")
    assert await place.index.owner_bytes() == {}
    assert await kinds(place, shared) == [
        "artifact.committed", "artifact.committed", "artifact.withdrawn", "artifact.removed",
    ]  # fmt: skip


async def test_two_owners_do_not_fill_the_quota_of_one_beyond_what_the_other_has(place: Place) -> None:
    async def pump(seed: int) -> None:
        manifest = await send(place, {"f": noise(100, seed)})
        for owner in ("anna", "rob"):
            account = StorageAccount(owner=owner, limit=100)
            await place.artifacts.commit(manifest, data(owner, str(seed)), f"key:{owner}", account=account)
        assert not await place.artifacts.withdraw(manifest.id, "anna", "", "key:anna")

    await pump(1)
    await pump(2)
    assert await place.index.owner_bytes() == {"rob": 200}
    error = await refusal(pump(3))
    assert (error.code, error.detail["quota"]) == (Code.EXHAUSTED, "bytes")


async def test_what_an_operator_removes_is_withdrawn_for_all(place: Place) -> None:
    shared = await committed_by(place, "anna", {"f": b"1"}, data("images", "1"))
    await committed_by(place, "rob", {"f": b"1"}, data("x", "1"))
    assert await place.artifacts.remove(shared, "", "operator")
    assert await place.index.lineages(LineageFilter()) == []
    assert (await refusal(place.artifacts.withdraw(shared, "anna", "", "key:anna"))).code is Code.GONE


async def test_a_source_is_withdrawn_by_nobody_below_an_operator(place: Place) -> None:
    source = Lineage(kind=ArtifactKind.SOURCE)
    both = await committed_by(place, "anna", {"f": b"1"}, data("images", "1"))
    await committed_by(place, "rob", {"f": b"1"}, source)
    assert (await refusal(place.artifacts.withdraw(both, "rob", "", "key:rob"))).code is Code.FORBIDDEN
    assert not await place.artifacts.withdraw(both, "anna", "", "key:anna")
    assert await content_of(place, both) == {"f": b"1"}
    own = await committed_by(place, "anna", {"f": b"2"}, source)
    await committed_by(place, "anna", {"f": b"2"}, data("images", "2"))
    assert not await place.artifacts.withdraw(own, "anna", "", "key:anna"), "the source stays"


async def test_a_pin_is_taken_off_by_the_one_who_pinned_or_an_operator(place: Place) -> None:
    pin, withdraw = place.artifacts.pin, place.artifacts.withdraw
    shared = await committed_by(place, "anna", {"f": b"1"}, data("images", "1"))
    await committed_by(place, "rob", {"f": b"1"}, data("x", "1"))
    assert (await refusal(pin(shared, "mine", "key:eve", owner="eve"))).code is Code.FORBIDDEN
    await pin(shared, "mine", "key:anna", owner="anna")
    for reason in ("", "mine", "his"):
        assert (await refusal(pin(shared, reason, "key:rob", owner="rob"))).code is Code.FORBIDDEN
    assert (await refusal(withdraw(shared, "anna", "", "key:anna"))).code is Code.PRECONDITION, "she has pinned it"
    await pin(shared, "", "key:anna", owner="anna")
    await pin(shared, "his", "key:rob", owner="rob")
    assert (await place.artifacts.open(shared)).pinned_by == "rob"
    assert not await withdraw(shared, "anna", "", "key:anna"), "his pin does not hold her"
    await pin(shared, "the paper", "operator")
    assert (await refusal(pin(shared, "", "key:rob", owner="rob"))).code is Code.FORBIDDEN
    assert (await refusal(withdraw(shared, "rob", "", "key:rob"))).code is Code.PRECONDITION
    await pin(shared, "", "operator")
    assert await withdraw(shared, "rob", "", "key:rob")


async def test_a_checkpoint_of_an_unfinished_job_is_not_withdrawn_by_its_owner(place: Place) -> None:
    await add_host(place.fleet)
    await add(place.fleet, job("gbt"))
    (lease,) = await claim(place.fleet)
    done = await upload(place, {"step": b"10"}, Lineage(kind=ArtifactKind.CHECKPOINT), hold(lease))
    await place.fleet.leases.record_checkpoint(hold(lease), done.artifact_id, 1.0)
    owner = (await place.fleet.jobs.get(lease.job_id)).owner
    withdraw = place.artifacts.withdraw
    assert (await refusal(withdraw(done.artifact_id, owner, "", "key:x"))).code is Code.PRECONDITION
    await committed_by(place, "rob", {"step": b"10"}, data("x", "1"))
    assert not await withdraw(done.artifact_id, owner, "", "key:x"), "the bytes stay"
    assert (await refusal(withdraw(done.artifact_id, "rob", "", "key:rob"))).code is Code.PRECONDITION


async def test_a_withdrawn_lineage_comes_back_with_its_metrics_and_parents(place: Place) -> None:
    base = await upload(place, {"f": b"base"})
    made = Lineage(kind=ArtifactKind.DATA, model="m", metrics={"auc": 0.5}, parents=(base.artifact_id,))
    for _ in range(2):
        done = await committed_by(place, "anna", {"f": b"1"}, made)
        (row,) = await place.index.lineages(LineageFilter(parents=[base.artifact_id]))
        assert [row] == list(await place.index.lineages(LineageFilter(metric="auc")))
        assert await place.artifacts.withdraw(done, "anna", "", "key:anna")
        assert await place.index.lineages(LineageFilter(metric="auc")) == []


async def test_of_many_who_use_a_name_at_once_one_gets_it(place: Place) -> None:
    contents = {f"owner{number}": noise(10, number) for number in range(8)}
    pushes = (pushed(place, owner, "images", content) for owner, content in contents.items())
    done = await asyncio.gather(*pushes, return_exceptions=True)
    assert [each.code for each in done if isinstance(each, StrataError)] == [Code.FORBIDDEN] * 7
    (row,) = await place.index.lineages(LineageFilter(kind=ArtifactKind.DATA))
    assert (await place.artifacts.open(row.artifact_id)).owner == row.owner


async def test_commits_of_one_owner_at_once_do_not_exceed_its_quota(place: Place) -> None:
    manifests = [await send(place, {"a": noise(100, seed)}) for seed in range(8)]
    account = StorageAccount(owner="anna", limit=300, refusal=Code.INVALID)
    commits = (place.artifacts.commit(each, RESULT, "host:a", account=account) for each in manifests)
    done = await asyncio.gather(*commits, return_exceptions=True)
    refused = [each.code for each in done if isinstance(each, StrataError)]
    assert refused == [Code.INVALID] * 5
    assert await place.index.owner_bytes() == {"anna": 300}
