"""Nobody gets in unknown, and nobody further than declared: every route, made from the table that is served."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from strata.fleet.core.jobspec import JobSpec
from strata.fleet.wire.identities import CallerReply, HubKeyReply
from strata.fleet.wire.jobs import Job, SubmitReply
from strata.fleet.wire.manifests import ManifestReply, TrainersReply
from strata.http.route import Route
from strata.hub.routes import ROUTES
from tests.shell.fleet_http.running import HostClient, Running, manifest_body, ok, refused, running

METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE")
CLOSED = [route for route in ROUTES if not route.access.public]
SHA = "a" * 64


def url(endpoint_path: str) -> str:
    filled = endpoint_path.replace("{id}", f"job1_{SHA}").replace("{digest}", SHA)
    return filled.replace("{name}", "m_d").replace("{sha256}", SHA)


def named(route: Route) -> str:
    return f"{route.method} {route.path}"


REQUIRED = {
    ("POST", "/v1/job/claim"): "host",
    ("POST", "/v1/job/{id}/heartbeat"): "host",
    ("POST", "/v1/job/{id}/complete"): "host",
    ("POST", "/v1/job/{id}/fail"): "host",
    ("PUT", "/v1/model/{id}"): "host",
    ("GET", "/v1/jobs"): "viewer or host",
    ("GET", "/v1/workers"): "viewer or host",
    ("POST", "/v1/job/{id}/cancel"): "researcher",
    ("POST", "/v1/job/{id}/requeue"): "researcher",
    ("POST", "/v1/job/{id}/archive"): "researcher",
    ("POST", "/v1/manifest"): "researcher",
    ("POST", "/v1/manifest/reload"): "operator",
    ("GET", "/v1/health"): "anybody",
}
"""The interface that was asked for, and who may call it; the lists are for anybody who is known. A researcher cancels
and requeues only what she submitted: `test_a_researcher_ends_only_her_own_jobs`."""


def test_the_routes_that_were_asked_for_are_open_to_whom_they_were_meant_for() -> None:
    assert {(each.method, each.path): str(each.access) for each in ROUTES if (each.method, each.path) in REQUIRED} == (
        REQUIRED
    )


async def test_a_researcher_ends_only_her_own_jobs(site: Running) -> None:
    hers, other = await site.with_role("researcher"), await site.with_role("researcher")
    operator = await site.operator()
    trainer = {"name": "t", "command": ["true"], "bundle": "0" * 64}
    body = {"spec": {"model": "m", "trainer": "t"}, "trainer": trainer}
    job = ok(await hers.post("/v1/jobs", json=body), SubmitReply).job
    key_id = hers.headers["Authorization"].split("-")[1]
    assert job.submitted_by == f"key:{key_id}"
    for path in (f"/v1/job/{job.id}/cancel", f"/v1/job/{job.id}/requeue"):
        assert refused(await other.post(path)) == (403, "forbidden")
        assert ok(await hers.post(path), Job).submitted_by == f"key:{key_id}"
    text = '[trainers.t]\ncommand = ["true"]\nbundle = "' + "0" * 64 + '"\n[[jobs]]\nmodel = "m"\ntrainer = "t"\n'
    ok(await operator.post("/v1/manifest", json=manifest_body(text)), ManifestReply)
    assert refused(await hers.post(f"/v1/job/{job.id}/cancel", json={})) == (403, "forbidden")
    assert ok(await operator.post(f"/v1/job/{job.id}/cancel", json={}), Job).status == "cancelled"


async def test_a_method_that_is_not_there_is_named_as_such(site: Running) -> None:
    assert refused(await (await site.operator()).delete("/v1/jobs")) == (405, "unsupported")


async def test_the_operator_token_is_taken_in_both_headers(site: Running) -> None:
    operator = await site.operator()
    token = operator.headers["X-Operator-Token"]
    assert (await operator.get("/v1/keys")).status_code == 200
    bearer = await site.private_client(Authorization=f"Bearer {token}")
    assert (await bearer.get("/v1/keys")).status_code == 200


async def test_a_hub_shows_its_lists_to_everybody_only_if_told_to(tmp_path: Path) -> None:
    async with running(tmp_path / "hub", public_read=True) as site:
        anybody = await site.client()
        for path in ("/v1/jobs", "/v1/workers"):
            assert (await anybody.get(path)).status_code == 200
            wrong = await anybody.get(path, headers={"Authorization": "Bearer tml-x"})
            assert wrong.status_code == 401
        for path in ("/v1/status", "/v1/events", f"/v1/job/job1_{SHA}"):
            assert (await anybody.get(path)).status_code == 401
        assert (await anybody.post("/v1/jobs", json={})).status_code == 401


async def test_everybody_who_is_known_is_told_who_he_is_and_until_when(site: Running) -> None:
    anna = await site.host("anna")
    told = ok(await anna.http.get("/v1/caller"), CallerReply)
    assert (told.kind, told.id, told.name, told.role, told.expires_at_s) == ("host", anna.id, "anna", None, None)
    operator = await site.operator()
    assert ok(await operator.get("/v1/caller"), CallerReply).role == "admin"
    body = {"name": "laptop", "role": "viewer", "valid_s": 3600}
    made = ok(await operator.post("/v1/keys", json=body), HubKeyReply)
    viewer = await site.client(Authorization=f"Bearer {made.secret}")
    told = ok(await viewer.get("/v1/caller"), CallerReply)
    assert (told.kind, told.name, told.role, told.expires_at_s) == ("key", "laptop", "viewer", made.key.expires_at_s)


async def test_a_revoked_host_is_refused_at_once_and_by_name(site: Running) -> None:
    anna = await site.host("anna")
    operator = await site.operator()
    assert (await operator.post("/v1/host/anna/revoke", json={"reason": "stolen"})).status_code == 204
    reply = await anna.http.post("/v1/job/claim", json={"claim_id": "c"})
    assert refused(reply) == (403, "forbidden")
    assert "stolen" in reply.json()["error"]["message"]
    assert refused(await operator.post("/v1/host/anna/resume")) == (409, "precondition")


@pytest.fixture
async def two(site: Running) -> tuple[HostClient, HostClient, str]:
    """A host that holds a job, another one, and the job."""
    holder, other = await site.host("holder"), await site.host("other")
    (job_id,) = await site.add(JobSpec(model="m"))
    (lease,) = await holder.claim()
    assert lease.job_id == job_id
    return holder, other, job_id


async def test_a_host_cannot_speak_for_the_lease_of_another(two: tuple[HostClient, HostClient, str]) -> None:
    holder, other, job_id = two
    beat = await other.http.post(f"/v1/job/{job_id}/heartbeat", json={"epoch": 1})
    assert beat.json()["verdict"] == "stop"
    assert refused(await other.http.post(f"/v1/job/{job_id}/complete", json={"epoch": 1})) == (412, "stale")
    failed = await other.http.post(f"/v1/job/{job_id}/fail", json={"epoch": 1, "cause": "user_error"})
    assert refused(failed) == (412, "stale")
    log = await other.http.put(f"/v1/job/{job_id}/log", params={"epoch": 1, "offset": 0}, content=b"x")
    assert refused(log) == (404, "not_found")
    beat = await holder.http.post(f"/v1/job/{job_id}/heartbeat", json={"epoch": 1})
    assert beat.json()["verdict"] == "continue"


async def test_who_calls_is_never_taken_from_a_message(two: tuple[HostClient, HostClient, str]) -> None:
    holder, other, job_id = two
    body = {"epoch": 1, "host_id": holder.id}
    assert refused(await other.http.post(f"/v1/job/{job_id}/complete", json=body)) == (400, "invalid")
    claimed = await other.http.post("/v1/job/claim", json={"claim_id": "c1", "host_id": holder.id})
    assert refused(claimed) == (400, "invalid")


async def test_a_claim_id_of_another_host_gives_nothing_away(two: tuple[HostClient, HostClient, str]) -> None:
    holder, other, _ = two
    assert await other.claim("c1") == ()
    assert len(await holder.claim("c1")) == 1


async def test_a_host_cannot_attribute_an_upload_to_a_job_it_does_not_hold(
    two: tuple[HostClient, HostClient, str],
) -> None:
    import hashlib

    _, other, job_id = two
    blob = b"weights"
    sha = hashlib.sha256(blob).hexdigest()
    reply = await other.http.put(f"/v1/model/{sha}", params={"job_id": job_id, "epoch": 1}, content=blob)
    assert refused(reply) == (412, "stale")
    assert refused(await other.http.put(f"/v1/model/{sha}", content=blob)) == (400, "invalid")


async def test_a_researcher_cannot_change_how_the_jobs_of_others_are_run(site: Running) -> None:
    researcher = await site.with_role("researcher")
    trainer = {"name": "t", "command": ["python", "train.py"], "directory": "/srv/t"}
    spec = {"model": "m", "trainer": "t"}
    assert (await researcher.post("/v1/jobs", json={"spec": spec, "trainer": trainer})).status_code == 200
    evil = {**trainer, "command": ["sh", "-c", "curl evil"]}
    reply = await researcher.post("/v1/jobs", json={"spec": {**spec, "seed": 2}, "trainer": evil})
    assert refused(reply) == (409, "conflict")


async def test_of_many_trainers_that_are_submitted_at_once_under_one_name_one_gets_it(site: Running) -> None:
    researcher = await site.with_role("researcher")
    bodies = [
        {
            "spec": {"model": "m", "trainer": "t", "seed": n},
            "trainer": {"name": "t", "command": ["python", f"{n}.py"], "directory": "/srv/t"},
        }
        for n in range(6)
    ]
    replies = await asyncio.gather(*(researcher.post("/v1/jobs", json=body) for body in bodies))
    (queued,) = [ok(reply, SubmitReply).job for reply in replies if reply.status_code == 200]
    assert [refused(reply) for reply in replies if reply.status_code != 200] == [(409, "conflict")] * 5
    known = ok(await researcher.get("/v1/trainers"), TrainersReply).trainers["t"]
    assert (queued.trainer_digest, known.spec.command[1]) == (known.digest, f"{queued.spec.seed}.py")


async def test_the_secrets_of_the_hub_are_readable_by_their_owner_only(site: Running) -> None:
    for path in [site.data / "operator.token", site.data / "ca" / "ca.key"]:
        assert path.stat().st_mode & 0o077 == 0
