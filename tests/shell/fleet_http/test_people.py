"""People with different roles, and jobs of different owners: who may change what."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from strata.base.digest import sha256_hex
from strata.fleet.core.why import Why
from strata.fleet.wire.artifacts import CommitReply
from strata.fleet.wire.identities import CallerReply
from strata.fleet.wire.jobs import Job, JobReply, JobsReply, SubmitReply
from strata.fleet.wire.leases import LeaseGiven
from strata.fleet.wire.manifests import ManifestReply
from strata.fleet.wire.owners import QuotasReply
from tests.shell.fleet_http.running import HostClient, Running, manifest_body, ok, refused, running

TRAINER = {"name": "t", "command": ["true"], "bundle": "0" * 64}
TEXT = '[trainers.t]\ncommand = ["true"]\nbundle = "' + "0" * 64 + '"\n[[jobs]]\nmodel = "m"\ntrainer = "t"\n'
VERBS = ("cancel", "archive", "requeue")
"""In an order in which each is legal after the one before."""


async def submit(client: httpx.AsyncClient, model: str, **spec: Any) -> Job:
    body = {"spec": {"model": model, "trainer": "t", **spec}, "trainer": TRAINER}
    return ok(await client.post("/v1/jobs", json=body), SubmitReply).job


async def change(client: httpx.AsyncClient, job_id: str, verb: str) -> int:
    return (await client.post(f"/v1/job/{job_id}/{verb}", json={} if verb == "cancel" else None)).status_code


@pytest.mark.parametrize("role", ["viewer", "researcher", "operator", "admin"])
async def test_only_the_owner_and_operators_change_a_job(site: Running, role: str) -> None:
    anna, other = await site.with_role("researcher", "anna"), await site.with_role(role, "bert")
    job = await submit(anna, "m")
    assert job.owner == "anna"
    may = role in ("operator", "admin")
    for verb in VERBS:
        assert await change(other, job.id, verb) == (200 if may else 403)
        if not may:
            assert await change(anna, job.id, verb) == 200
    shown = ok(await anna.get(f"/v1/job/{job.id}"), JobReply).job
    assert (shown.status, shown.owner, shown.archived) == ("pending", "anna", False)


async def test_a_renewed_key_keeps_its_jobs(site: Running) -> None:
    before, after = await site.with_role("researcher", "anna"), await site.with_role("researcher", "anna")
    job = await submit(before, "m")
    assert await change(after, job.id, "cancel") == 200
    mine = ok(await after.get("/v1/caller"), CallerReply).owner
    listed = ok(await after.get("/v1/jobs", params={"owner": mine}), JobsReply)
    assert [each.id for each in listed.jobs] == [job.id]


async def test_a_researcher_applies_manifests_to_projects_of_her_own(site: Running) -> None:
    anna, bert = await site.with_role("researcher", "anna"), await site.with_role("researcher", "bert")
    operator = await site.operator()
    assert refused(await anna.post("/v1/manifest", json=manifest_body(TEXT))) == (403, "forbidden")
    hers = manifest_body(f'project = "hers"\n{TEXT}')
    applied = ok(await anna.post("/v1/manifest", json=hers), ManifestReply)
    assert [each.label for each in applied.new] == ["m-default"]
    for dry_run in (True, False):
        assert refused(await bert.post("/v1/manifest", json={**hers, "dry_run": dry_run})) == (403, "forbidden")
    body = {"spec": {"model": "n", "trainer": "t", "project": "hers"}, "trainer": TRAINER}
    assert refused(await bert.post("/v1/jobs", json=body)) == (403, "forbidden")
    job_id = applied.new[0].id
    assert await change(bert, job_id, "cancel") == 403
    assert await change(anna, job_id, "cancel") == 200
    policy = manifest_body(f'project = "hers"\n{TEXT}[hosts.desk]\ndeny_jobs = ["*"]\n')
    assert refused(await anna.post("/v1/manifest", json=policy)) == (403, "forbidden")
    assert ok(await operator.post("/v1/manifest", json=policy), ManifestReply).hosts == ("desk",)
    assert ok(await anna.get(f"/v1/job/{job_id}"), JobReply).job.owner == "anna"


async def test_the_operators_job_in_her_project_stays_the_operators(site: Running) -> None:
    anna, operator = await site.with_role("researcher", "anna"), await site.operator()
    body = manifest_body(f'project = "hers"\n{TEXT}')
    more = manifest_body(f'project = "hers"\n{TEXT}[[jobs]]\nmodel = "n"\ntrainer = "t"\n')
    ok(await anna.post("/v1/manifest", json=body), ManifestReply)
    ok(await operator.post("/v1/manifest", json=more), ManifestReply)
    assert refused(await anna.post("/v1/manifest", json=more)) == (403, "forbidden")
    assert ok(await anna.post("/v1/manifest", json=body), ManifestReply).unchanged == 1


async def test_the_same_name_again_supersedes_the_job_before_unless_the_seed_differs(site: Running) -> None:
    anna, bert = await site.with_role("researcher", "anna"), await site.with_role("researcher", "bert")
    first = await submit(anna, "a", name="x")
    await submit(anna, "b", name="x", seed=1)
    await submit(bert, "c", name="x")
    assert not ok(await anna.get(f"/v1/job/{first.id}"), JobReply).job.superseded
    newest = await submit(anna, "d", name="x")
    await change(anna, first.id, "cancel")
    shown = ok(await anna.get("/v1/jobs", params={"name": "x", "hidden": "false"}), JobsReply).jobs
    assert {each.spec.model: each.newer for each in shown} == {"b": 2, "c": 1, "d": 0}
    assert newest.id in {each.id for each in shown}


async def test_a_full_quota_is_named_and_an_operator_can_raise_it(site: Running) -> None:
    anna, operator = await site.with_role("researcher", "anna"), await site.operator()
    change_quota = {"owner": "anna", "quota": {"jobs": 1, "max_priority": 3}}
    assert refused(await anna.post("/v1/quotas", json=change_quota)) == (403, "forbidden")
    assert (await operator.post("/v1/quotas", json=change_quota)).status_code == 204
    await submit(anna, "a")
    body = {"spec": {"model": "b", "trainer": "t"}, "trainer": TRAINER}
    reply = await anna.post("/v1/jobs", json=body)
    assert refused(reply) == (429, "exhausted")
    assert "the quota of anna is full: 1 jobs wait or run" in reply.text
    assert refused(await anna.post("/v1/manifest", json=manifest_body(f'project = "p"\n{TEXT}'))) == (429, "exhausted")
    quotas = {each.owner: each for each in ok(await anna.get("/v1/quotas"), QuotasReply).quotas}
    assert (quotas["anna"].own, quotas["anna"].usage.jobs, quotas["*"].own) == (True, 1, False)
    wrong = {"owner": "anna", "quota": {"min_priority": 4, "max_priority": 3}}
    assert refused(await operator.post("/v1/quotas", json=wrong)) == (400, "invalid")
    assert (await operator.post("/v1/quotas", json={"owner": "anna", "quota": None})).status_code == 204
    assert (await submit(anna, "b")).owner == "anna"


async def test_a_start_time_outlives_the_hub(tmp_path: Path) -> None:
    starts_at_s = time.time() + 4
    async with running(tmp_path / "hub") as site:
        anna = await site.with_role("researcher", "anna")
        job = await submit(anna, "m", not_before_s=starts_at_s)
        assert job.not_before_s == starts_at_s
        assert await (await site.host("one")).claim() == ()
        told = ok(await anna.get(f"/v1/job/{job.id}/why"), Why)
        assert told.headline.startswith("starts at ")
        assert [each.what for each in told.obstacles] == ["start time"]
    async with running(tmp_path / "hub") as site:
        host = await site.host("two")
        leases = await host.claim(wait_s=30)
        assert [lease.job_id for lease in leases] == [job.id]
        assert time.time() >= starts_at_s


async def put_source(client: httpx.AsyncClient, content: bytes) -> httpx.Response:
    return await client.put(f"/v1/source/{sha256_hex(content)}", content=content)


async def commit_result(host: HostClient, lease: LeaseGiven, content: bytes) -> httpx.Response:
    digest = sha256_hex(content)
    assert (await host.http.put(f"/v1/chunk/{digest}", params={"size": len(content)}, content=content)).is_success
    file = {"path": "model", "size": len(content), "sha256": digest, "chunks": [digest]}
    body = {"manifest": {"files": [file]}, "lineage": {"kind": "result"}, "job_id": lease.job_id, "epoch": lease.epoch}
    return await host.http.post("/v1/artifacts", json=body)


async def stored(client: httpx.AsyncClient, owner: str) -> int:
    quotas = ok(await client.get("/v1/quotas"), QuotasReply).quotas
    return next(each.usage.bytes for each in quotas if each.owner == owner)


async def test_a_full_quota_of_bytes_refuses_uploads_and_jobs_and_bounds_results(site: Running) -> None:
    anna, bert = await site.with_role("researcher", "anna"), await site.with_role("researcher", "bert")
    operator, host = await site.operator(), await site.host("desk")
    assert (await operator.post("/v1/quotas", json={"owner": "anna", "quota": {"bytes": 1000}})).status_code == 204
    assert (await put_source(anna, b"s" * 900)).is_success
    reply = await put_source(anna, b"t" * 200)
    assert refused(reply) == (429, "exhausted")
    assert "900 bytes are stored, 200 more are too many for 1000" in reply.text
    asked = await anna.post("/v1/chunks/missing", json={"chunks": {sha256_hex(b"d" * 101): 101}})
    assert refused(asked) == (429, "exhausted")
    assert (await put_source(bert, b"t" * 200)).is_success
    await submit(anna, "a")
    (lease,) = await host.claim()
    # What an attempt made is kept beyond the quota, up to twice of it.
    result = ok(await commit_result(host, lease, b"r" * 1000), CommitReply)
    assert refused(await commit_result(host, lease, b"x" * 200)) == (400, "invalid")
    assert await stored(anna, "anna") == 1900
    body = {"spec": {"model": "b", "trainer": "t"}, "trainer": TRAINER}
    assert refused(await anna.post("/v1/jobs", json=body)) == (429, "exhausted")
    manifest = manifest_body(f'project = "p"\n{TEXT}')
    assert refused(await anna.post("/v1/manifest", json=manifest)) == (429, "exhausted")
    assert refused(await bert.delete(f"/v1/artifact/{result.artifact_id}")) == (403, "forbidden")
    assert (await anna.delete(f"/v1/artifact/{result.artifact_id}")).is_success
    assert await stored(anna, "anna") == 900
    await submit(anna, "b")


async def test_a_researcher_removes_no_source_and_keeps_what_others_made_as_well(site: Running) -> None:
    anna, bert = await site.with_role("researcher", "anna"), await site.with_role("researcher", "bert")
    host = await site.host("desk")
    source = ok(await put_source(anna, b"source"), CommitReply)
    assert refused(await anna.delete(f"/v1/artifact/{source.artifact_id}")) == (403, "forbidden")
    made = []
    for client, claim_id in ((anna, "c1"), (bert, "c2")):
        await submit(client, claim_id)
        (lease,) = await host.claim(claim_id)
        made.append(ok(await commit_result(host, lease, b"the same"), CommitReply).artifact_id)
        done = {"epoch": lease.epoch, "artifact": made[-1]}
        ok(await host.http.post(f"/v1/job/{lease.job_id}/complete", json=done), Job)
    assert made[0] == made[1]
    path = f"/v1/artifact/{made[0]}"
    assert (await anna.delete(path)).is_success
    assert (await bert.get(path)).is_success, "he made the same"
    assert [await stored(bert, each) for each in ("anna", "bert")] == [len(b"source"), len(b"the same")]
    assert refused(await anna.delete(path)) == (403, "forbidden")
    assert (await bert.delete(path)).is_success
    assert refused(await bert.get(path)) == (410, "gone")


async def test_a_researcher_removes_her_data_and_not_that_of_others_who_uploaded_the_same(site: Running) -> None:
    anna, bert = await site.with_role("researcher", "anna"), await site.with_role("researcher", "bert")
    renewed = await site.with_role("researcher", "anna")
    shared = [await put_data(client, b"the same", name) for client, name in ((anna, "a"), (bert, "b"))]
    assert shared[0] == shared[1]
    assert (await anna.delete(f"/v1/artifact/{shared[0]}")).is_success
    assert (await bert.get(f"/v1/artifact/{shared[0]}")).is_success
    own = [await put_data(client, b"her own", name) for client, name in ((anna, "c"), (renewed, "d"))]
    assert refused(await bert.delete(f"/v1/artifact/{own[0]}")) == (403, "forbidden")
    assert (await anna.delete(f"/v1/artifact/{own[0]}")).is_success, "a renewed key has the same owner"


async def put_data(client: httpx.AsyncClient, content: bytes, name: str) -> str:
    digest = sha256_hex(content)
    assert (await client.put(f"/v1/chunk/{digest}", params={"size": len(content)}, content=content)).is_success
    file = {"path": "rows", "size": len(content), "sha256": digest, "chunks": [digest]}
    body = {"manifest": {"files": [file]}, "lineage": {"kind": "data", "model": name}}
    return ok(await client.post("/v1/artifacts", json=body), CommitReply).artifact_id
