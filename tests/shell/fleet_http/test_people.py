"""People with different roles, and jobs of different owners: who may change what."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from strata.fleet import wire
from strata.fleet.core.why import Why
from tests.shell.fleet_http.running import Running, manifest_body, ok, refused, running

TRAINER = {"name": "t", "command": ["true"], "bundle": "0" * 64}
TEXT = '[trainers.t]\ncommand = ["true"]\nbundle = "' + "0" * 64 + '"\n[[jobs]]\nmodel = "m"\ntrainer = "t"\n'
VERBS = ("cancel", "archive", "requeue")
"""In an order in which each is legal after the one before."""


async def submit(client: httpx.AsyncClient, model: str, **spec: Any) -> wire.Job:
    body = {"spec": {"model": model, "trainer": "t", **spec}, "trainer": TRAINER}
    return ok(await client.post("/v1/jobs", json=body), wire.SubmitReply).job


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
    shown = ok(await anna.get(f"/v1/job/{job.id}"), wire.JobReply).job
    assert (shown.status, shown.owner, shown.archived) == ("pending", "anna", False)


async def test_a_renewed_key_keeps_its_jobs(site: Running) -> None:
    before, after = await site.with_role("researcher", "anna"), await site.with_role("researcher", "anna")
    job = await submit(before, "m")
    assert await change(after, job.id, "cancel") == 200
    mine = ok(await after.get("/v1/caller"), wire.CallerReply).owner
    listed = ok(await after.get("/v1/jobs", params={"owner": mine}), wire.JobsReply)
    assert [each.id for each in listed.jobs] == [job.id]


async def test_a_researcher_applies_manifests_to_projects_of_her_own(site: Running) -> None:
    anna, bert = await site.with_role("researcher", "anna"), await site.with_role("researcher", "bert")
    operator = await site.operator()
    assert refused(await anna.post("/v1/manifest", json=manifest_body(TEXT))) == (403, "forbidden")
    hers = manifest_body(f'project = "hers"\n{TEXT}')
    applied = ok(await anna.post("/v1/manifest", json=hers), wire.ManifestReply)
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
    assert ok(await operator.post("/v1/manifest", json=policy), wire.ManifestReply).hosts == ("desk",)
    assert ok(await anna.get(f"/v1/job/{job_id}"), wire.JobReply).job.owner == "anna"


async def test_the_operators_job_in_her_project_stays_the_operators(site: Running) -> None:
    anna, operator = await site.with_role("researcher", "anna"), await site.operator()
    body = manifest_body(f'project = "hers"\n{TEXT}')
    more = manifest_body(f'project = "hers"\n{TEXT}[[jobs]]\nmodel = "n"\ntrainer = "t"\n')
    ok(await anna.post("/v1/manifest", json=body), wire.ManifestReply)
    ok(await operator.post("/v1/manifest", json=more), wire.ManifestReply)
    assert refused(await anna.post("/v1/manifest", json=more)) == (403, "forbidden")
    assert ok(await anna.post("/v1/manifest", json=body), wire.ManifestReply).unchanged == 1


async def test_the_same_name_again_supersedes_the_job_before_unless_the_seed_differs(site: Running) -> None:
    anna, bert = await site.with_role("researcher", "anna"), await site.with_role("researcher", "bert")
    first = await submit(anna, "a", name="x")
    await submit(anna, "b", name="x", seed=1)
    await submit(bert, "c", name="x")
    assert not ok(await anna.get(f"/v1/job/{first.id}"), wire.JobReply).job.superseded
    newest = await submit(anna, "d", name="x")
    await change(anna, first.id, "cancel")
    shown = ok(await anna.get("/v1/jobs", params={"name": "x", "hidden": "false"}), wire.JobsReply).jobs
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
    quotas = {each.owner: each for each in ok(await anna.get("/v1/quotas"), wire.QuotasReply).quotas}
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
