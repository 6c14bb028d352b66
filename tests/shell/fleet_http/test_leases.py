"""The life of a job over HTTP: claims that wait, heartbeats with verdicts, results, and what people may ask."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import pytest

from strata.base.digest import sha256_hex
from strata.fleet.core.jobspec import JobSpec
from strata.fleet.core.requirement import Needs
from strata.fleet.wire.artifacts import ArtifactReply, ArtifactsReply, CommitReply, MissingReply
from strata.fleet.wire.hosts import Host, RegisterRequest, SamplesReply
from strata.fleet.wire.jobs import Job, JobReply, JobsReply, SubmitReply
from strata.fleet.wire.leases import HeartbeatsReply, LeaseVerdict
from tests.shell.fleet_http.running import Running, ok, refused
from tests.support.turns import turns


async def test_a_job_goes_from_a_claim_to_its_result(site: Running) -> None:
    host, viewer = await site.host("anna", cores=4), await site.with_role("viewer")
    (job_id,) = await site.add(JobSpec(model="gbt", mode="oracle", hyper={"lr": 0.1}))
    (lease,) = await host.claim()
    assert (lease.job_id, lease.epoch, lease.spec.hyper) == (job_id, 1, {"lr": 0.1})
    assert 0 < lease.expires_in_s <= 45
    beat = await host.http.post("/v1/heartbeats", json={"leases": [{"job_id": job_id, "epoch": 1, "running": True}]})
    (verdict,) = ok(beat, HeartbeatsReply).verdicts
    assert verdict.verdict == "continue"
    assert ok(await viewer.get(f"/v1/job/{job_id}"), JobReply).job.status == "running"
    blob = b"weights" * 1000
    sha = hashlib.sha256(blob).hexdigest()
    upload = await host.http.put(f"/v1/model/{sha}", params={"job_id": job_id, "epoch": 1}, content=blob)
    artifact = ok(upload, CommitReply).artifact_id
    body = {"epoch": 1, "artifact": sha, "metrics": {"auc": 0.9}}
    done = ok(await host.http.post(f"/v1/job/{job_id}/complete", json=body), Job)
    assert (done.status, done.artifact) == ("completed", artifact)
    again = ok(await host.http.post(f"/v1/job/{job_id}/complete", json=body), Job)
    assert again == done
    assert (await viewer.get(f"/v1/model/{sha}")).content == blob
    (made,) = ok(await viewer.get("/v1/artifacts", params={"model": "gbt"}), ArtifactsReply).artifacts
    assert (made.artifact_id, made.lineage.job_id, made.lineage.host_id) == (artifact, job_id, host.id)
    assert (made.by, made.project) == (f"host:{host.id}", "default")


async def test_a_claim_that_waits_is_answered_when_a_job_comes(site: Running) -> None:
    host = await site.host("anna")
    waiting = asyncio.create_task(host.claim(wait_s=30))
    done, _ = await asyncio.wait([waiting], timeout=0.2)
    assert not done
    (job_id,) = await site.add(JobSpec(model="m"))
    (lease,) = await asyncio.wait_for(waiting, 10)
    assert lease.job_id == job_id


async def test_a_claim_gives_several_jobs_and_no_more_than_asked(site: Running) -> None:
    host = await site.host("anna", slots=8)
    await site.add(*(JobSpec(model="m", seed=n) for n in range(5)))
    assert len(await host.claim("c1", count=3)) == 3
    assert len(await host.claim("c1", count=3)) == 3
    assert len(await host.claim("c2", count=3)) == 2


async def test_a_client_that_left_is_given_no_job(site: Running) -> None:
    host = await site.host("anna")
    other = await site.host("bob")
    waiting = asyncio.create_task(host.claim("gone", wait_s=30))
    await asyncio.wait([waiting], timeout=0.3)
    waiting.cancel()
    await asyncio.wait([waiting])
    while len(site.hub.context.fleet.claims._queue._pending):
        await turns()
    await asyncio.wait([asyncio.create_task(other.claim("nothing", wait_s=0.3))])
    (job_id,) = await site.add(JobSpec(model="m"))
    (lease,) = await other.claim("c", wait_s=10)
    assert lease.job_id == job_id


async def test_a_cancelled_job_stops_its_host_at_the_next_heartbeat(site: Running) -> None:
    host, operator = await site.host("anna"), await site.with_role("operator")
    (job_id,) = await site.add(JobSpec(model="m"))
    await host.claim()
    cancelled = await operator.post(f"/v1/job/{job_id}/cancel", json={"reason": "typo"})
    assert ok(cancelled, Job).status == "cancelled"
    verdict = ok(await host.http.post(f"/v1/job/{job_id}/heartbeat", json={"epoch": 1}), LeaseVerdict)
    assert (verdict.verdict, verdict.cause, verdict.reason) == ("stop", "ended", "the job is cancelled")
    late = await host.http.post(f"/v1/job/{job_id}/complete", json={"epoch": 1})
    assert refused(late) == (409, "conflict")


async def test_cancel_and_requeue_take_a_request_without_a_body(site: Running) -> None:
    operator = await site.operator()
    (job_id,) = await site.add(JobSpec(model="m"))
    assert ok(await operator.post(f"/v1/job/{job_id}/cancel"), Job).status == "cancelled"
    assert ok(await operator.post(f"/v1/job/{job_id}/requeue"), Job).status == "pending"


async def test_the_beginning_of_an_id_is_enough_if_it_is_the_only_one(site: Running) -> None:
    viewer = await site.with_role("viewer")
    ids = await site.add(*(JobSpec(model="m", seed=n) for n in range(40)))
    one = ids[0]
    assert ok(await viewer.get(f"/v1/job/{one[:20]}"), JobReply).job.id == one
    assert ok(await viewer.get(f"/v1/job/{one[5:20]}"), JobReply).job.id == one
    assert refused(await viewer.get("/v1/job/job1_")) == (409, "conflict")
    assert refused(await viewer.get("/v1/job/zzzz")) == (404, "not_found")
    assert refused(await viewer.get(f"/v1/job/job1_{'0' * 64}")) == (404, "not_found")


async def test_a_result_that_was_not_uploaded_is_not_accepted(site: Running) -> None:
    host = await site.host("anna")
    (job_id,) = await site.add(JobSpec(model="m"))
    await host.claim()
    body: dict[str, Any] = {"epoch": 1, "artifact": "artifact1_" + "0" * 64}
    assert refused(await host.http.post(f"/v1/job/{job_id}/complete", json=body)) == (409, "precondition")


async def test_a_failure_says_what_becomes_of_the_job(site: Running) -> None:
    host = await site.host("anna")
    (job_id,) = await site.add(JobSpec(model="m"))
    await host.claim()
    body = {"epoch": 1, "cause": "user_error", "error": "ValueError: no"}
    job = ok(await host.http.post(f"/v1/job/{job_id}/fail", json=body), Job)
    assert job.status == "pending"
    assert "attempt 1 of 3" in job.reason
    shown = ok(await (await site.with_role("viewer")).get(f"/v1/job/{job_id}"), JobReply)
    assert [(each.epoch, each.cause, each.error) for each in shown.attempts] == [(1, "user_error", "ValueError: no")]


async def test_why_names_what_is_in_the_way(site: Running) -> None:
    await site.host("cpu")
    (job_id,) = await site.add(JobSpec(model="m", needs=Needs(require_cuda=True)))
    reply = await (await site.with_role("viewer")).get(f"/v1/job/{job_id}/why")
    assert reply.json()["schedulable"] is False
    assert reply.json()["obstacles"][0]["what"] == "require_cuda"


async def test_a_paused_host_gets_nothing_and_a_resumed_one_does(site: Running) -> None:
    host, operator = await site.host("anna"), await site.operator()
    await site.add(JobSpec(model="m"))
    paused = ok(await operator.post("/v1/host/anna/pause", json={"reason": "gaming"}), Host)
    assert (paused.state, paused.state_reason, paused.presence) == ("paused", "gaming", "online")
    assert await host.claim("c1") == ()
    assert ok(await operator.post(f"/v1/host/{host.id}/resume"), Host).state == "active"
    assert len(await host.claim("c2")) == 1


async def test_a_claim_that_waits_while_its_host_is_revoked_gets_nothing(site: Running) -> None:
    host, operator = await site.host("anna"), await site.operator()
    asked_s = site.hub.context.fleet.now_s()
    waiting = asyncio.create_task(host.claim(wait_s=3))
    while ok(await operator.get("/v1/host/anna"), Host).seen_at_s < asked_s:
        await turns()
    assert (await operator.post("/v1/host/anna/revoke")).status_code == 204
    (job_id,) = await site.add(JobSpec(model="m"))
    assert await waiting == ()
    assert (await site.hub.context.fleet.store.jobs.get(job_id)).epoch == 0


async def test_the_list_of_jobs_is_paged_and_filtered(site: Running) -> None:
    viewer = await site.with_role("viewer")
    ids = await site.add(*(JobSpec(model="m", seed=n) for n in range(5)), JobSpec(model="other"))
    first = ok(await viewer.get("/v1/jobs", params={"model": "m", "limit": 3}), JobsReply)
    second = ok(await viewer.get("/v1/jobs", params={"model": "m", "limit": 3, "after": first.next}), JobsReply)
    assert sorted(job.id for job in (*first.jobs, *second.jobs)) == sorted(ids[:5])
    assert second.next == ""
    params = {"status": ["pending", "running"]}
    assert len(ok(await viewer.get("/v1/jobs", params=params), JobsReply).jobs) == 6
    assert ok(await viewer.get("/v1/jobs", params={"status": "failed"}), JobsReply).jobs == ()


async def test_labels_of_the_invitation_are_kept_apart_from_what_a_host_says(site: Running) -> None:
    from strata.identity.records import HostIdentity

    identity = HostIdentity("host_x", "x", "k", 0.0, labels=("rack=b4", "gpu"), pool="lab")
    await site.hub.context.identity.add_host(identity, "test")
    from strata.fleet.http.context import HubCall
    from strata.fleet.http.leases import register
    from strata.identity.roles import CallerKind, Principal

    body = RegisterRequest(capability=_capability(labels={"rack": "z9", "own": "1"}))
    call: Any = HubCall(site.hub.context, Principal(CallerKind.HOST, "host_x", None), {}, None, None, None)  # type: ignore[arg-type]
    await register(call, body)
    (row,) = [host for host in await site.hub.context.fleet.hosts.all() if host.id == "host_x"]
    assert row.labels == {"rack": "b4", "gpu": "true"}
    assert row.capability.labels == {"rack": "z9", "own": "1"}
    assert (row.name, row.pool) == ("x", "lab")


def _capability(**fields: Any) -> Any:
    from strata.fleet.core.capability import Capability

    return Capability(hostname="h", **fields)


async def test_a_submitted_job_is_queued_once(site: Running) -> None:
    researcher = await site.with_role("researcher")
    trainer = {"name": "run-1", "command": ["python", "train.py"], "bundle": "0" * 64}
    body = {"spec": {"model": "m", "trainer": "run-1", "hyper": {"lr": 1}}, "trainer": trainer}
    first = ok(await researcher.post("/v1/jobs", json=body), SubmitReply)
    second = ok(await researcher.post("/v1/jobs", json=body), SubmitReply)
    assert (first.new, second.new, first.job.id) == (True, False, second.job.id)
    assert not first.job.declared
    unknown = await researcher.post("/v1/jobs", json={"spec": {"model": "m", "trainer": "nobody"}})
    assert refused(unknown) == (400, "invalid")
    after = {"model": "m", "trainer": "run-1", "seed": 9, "after": ["job1_" + "0" * 64]}
    assert refused(await researcher.post("/v1/jobs", json={"spec": after})) == (404, "not_found")


@pytest.mark.parametrize("size", [0, 1, 70_000])
async def test_chunks_that_are_missing_are_sent_and_committed(site: Running, size: int) -> None:
    researcher = await site.with_role("researcher")
    content = bytes(n % 251 for n in range(size))
    digest = sha256_hex(content)
    wanted = {digest: size} if size else {}
    plan = ok(await researcher.post("/v1/chunks/missing", json={"chunks": wanted}), MissingReply)
    assert [each.digest for each in plan.missing] == list(wanted)
    for each in plan.missing:
        put = await researcher.put(f"/v1/chunk/{each.digest}", params={"size": each.size}, content=content)
        assert put.status_code == 204, put.text
    file = {"path": "a/b.bin", "size": size, "sha256": digest, "chunks": list(wanted)}
    lineage = {"kind": "source", "model": "m", "job_id": "forged", "host_id": "forged"}
    body = {"manifest": {"files": [file]}, "lineage": lineage}
    done = ok(await researcher.post("/v1/artifacts", json=body), CommitReply)
    found = ok(await researcher.get(f"/v1/artifact/{done.artifact_id[:24]}"), ArtifactReply)
    assert found.manifest.files[0].path == "a/b.bin"
    got = await researcher.get(f"/v1/artifact/{done.artifact_id}/file", params={"path": "a/b.bin"})
    assert got.content == content
    made = ok(await researcher.get(f"/v1/artifact/{done.artifact_id}/lineage"), ArtifactsReply).artifacts[0]
    assert (made.lineage.job_id, made.lineage.host_id) == ("", "")
    bundle = await researcher.get(f"/v1/artifact/{done.artifact_id}/bundle.tar.zst")
    again = await researcher.get(f"/v1/artifact/{done.artifact_id}/bundle.tar.zst")
    assert bundle.status_code == 200
    assert bundle.content == again.content


async def test_a_checkpoint_of_an_attempt_is_what_the_next_one_resumes_from(site: Running) -> None:
    anna, bob = await site.host("anna"), await site.host("bob")
    (job_id,) = await site.add(JobSpec(model="m"))
    await anna.claim()
    content = b"step 100"
    digest = sha256_hex(content)
    await anna.http.put(f"/v1/chunk/{digest}", params={"size": len(content)}, content=content)
    file = {"path": "state", "size": len(content), "sha256": digest, "chunks": [digest]}
    body = {"manifest": {"files": [file]}, "lineage": {"kind": "checkpoint"}, "job_id": job_id, "epoch": 1}
    done = ok(await anna.http.post("/v1/artifacts", json=body), CommitReply)
    failure = {"epoch": 1, "cause": "preempted"}
    row = ok(await anna.http.post(f"/v1/job/{job_id}/fail", json=failure), Job)
    assert row.status == "pending"
    await site.hub.context.fleet.store.leases.release_backoffs(row.not_before_s + 1)
    (lease,) = await bob.claim("c9", wait_s=10)
    assert (lease.epoch, lease.checkpoint) == (2, done.artifact_id)
    assert (await bob.http.get(f"/v1/chunk/{digest}")).content == content


async def test_what_a_host_does_is_sampled_with_its_heartbeats(site: Running) -> None:
    host = await site.host("anna")
    sample = {"cpu_use": 0.5, "cards": [{"card": "GPU-0", "use": 0.25, "power_w": 100.0}]}
    ok(await host.http.post("/v1/heartbeats", json={"leases": [], "sample": sample}), HeartbeatsReply)
    await site.hub.context.fleet.samples.run_once()
    reader = await site.operator()
    values = {"cpu_use": 0.5, "GPU-0/use": 0.25, "GPU-0/power_w": 100.0}
    assert ok(await reader.get("/v1/host/anna"), Host).sample == values
    kept = ok(await reader.get("/v1/host/anna/samples?points=300"), SamplesReply)
    assert (kept.step_s, [point.values for point in kept.points]) == (0, [values])
