"""Results and jobs that are somebody else's: nothing counts that the job, its trainer and its host did not make."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec
import pytest

from strata.base.digest import sha256_hex
from strata.fleet.core.jobspec import JobSpec, TrainerSpec
from strata.fleet.core.plan import ApplyPlan
from strata.fleet.records import JobFilter
from strata.fleet.wire.artifacts import ArtifactRecord, ArtifactsReply, CommitReply
from strata.fleet.wire.identities import CertificateReply, InviteReply
from strata.fleet.wire.jobs import Job, JobsReply, SubmitReply
from strata.fleet.wire.manifests import ManifestReply
from strata.identity.ca import new_signing_request
from strata.identity.tokens import read_join_token
from tests.shell.fleet_http.running import HostClient, Running, manifest_body, ok, refused, running

AREA: Final = "hub: results"
ENROLMENT: Final = "hub: enrolment"
PROJECTS: Final = "hub: projects"
MODEL: Final = "prod"
SCORE: Final = {"auc": 0.9999}
BUNDLE: Final = "0" * 64


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Running]:
    async with running(tmp_path / "hub") as started:
        yield started


def trainer(script: str) -> dict[str, Any]:
    return {"name": "default", "command": ["python", script], "bundle": BUNDLE}


def manifest(script: str, *, project: str = "", model: str = MODEL, more: str = "", last: str = "") -> dict[str, Any]:
    named = f'project = "{project}"\n' if project else ""
    return manifest_body(
        f'{named}[trainers.default]\ncommand = ["python", "{script}"]\nbundle = "{BUNDLE}"\n{more}'
        f'[[jobs]]\nmodel = "{model}"\n{last}'
    )


async def apply(site: Running, body: dict[str, Any], **options: bool) -> ManifestReply:
    return ok(await (await site.operator()).post("/v1/manifest", json=body | options), ManifestReply)


async def submit(who: httpx.AsyncClient, script: str = "evil.py", model: str = MODEL, **spec: Any) -> Job:
    body = {"spec": {"model": model, **spec}, "trainer": trainer(script)}
    return ok(await who.post("/v1/jobs", json=body), SubmitReply).job


async def commit(
    who: httpx.AsyncClient, content: bytes, lineage: dict[str, Any], **attempt: Any
) -> tuple[httpx.Response, str]:
    """The reply, and the id of the artifact if it was taken."""
    digest = sha256_hex(content)
    assert (await who.put(f"/v1/chunk/{digest}", params={"size": len(content)}, content=content)).is_success
    file = {"path": "model", "size": len(content), "sha256": digest, "chunks": [digest]}
    body = {"manifest": {"files": [file]}, "lineage": lineage, **attempt}
    reply = await who.post("/v1/artifacts", json=body)
    return reply, reply.json().get("artifact_id", "")


async def finish(host: HostClient, content: bytes = b"weights", **lineage: Any) -> Job:
    """The host claims a job, and completes it with this result."""
    (lease,) = await host.claim(f"c-{content.hex()}")
    attempt = {"job_id": lease.job_id, "epoch": lease.epoch}
    reply, artifact = await commit(host.http, content, {"kind": "result", **lineage}, **attempt)
    assert reply.is_success, reply.text
    done = await host.http.post(f"/v1/job/{lease.job_id}/complete", json={"epoch": lease.epoch, "artifact": artifact})
    return ok(done, Job)


async def chosen(site: Running, model: str = MODEL) -> list[int]:
    """What the hub says when it is asked for the latest and the best result of a model, and for its export."""
    viewer = await site.with_role("viewer")
    latest = await viewer.get("/v1/artifacts/latest", params={"model": model})
    best = await viewer.get("/v1/artifacts/best", params={"model": model, "metric": "auc"})
    exported = [line for line in (await viewer.get("/v1/export/index.jsonl")).text.splitlines() if f'"{model}"' in line]
    ordered = ok(
        await viewer.get("/v1/artifacts", params={"model": model, "metric": "auc", "kind": "result"}), ArtifactsReply
    )
    return [latest.status_code, best.status_code, len(exported), len(ordered.artifacts)]


NONE: Final = [404, 404, 0, 0]


@pytest.mark.proves(
    "Never again: a researcher's upload was the latest and best result; a host committed a result of another model"
)
@pytest.mark.attack(AREA, "a person commits a result of model prod with auc 0.9999 and any code")
@pytest.mark.parametrize("role", ["researcher", "operator", "admin"])
async def test_a_person_cannot_commit_a_result(site: Running, role: str) -> None:
    person = await site.with_role(role)
    lineage = {"kind": "result", "model": MODEL, "metrics": SCORE, "code": "f" * 40}
    reply, _ = await commit(person, b"forged", lineage)
    assert refused(reply) == (403, "forbidden")
    assert await chosen(site) == NONE


@pytest.mark.attack(AREA, "a researcher commits a checkpoint of model prod")
async def test_a_person_cannot_commit_a_checkpoint(site: Running) -> None:
    researcher = await site.with_role("researcher")
    reply, _ = await commit(researcher, b"forged", {"kind": "checkpoint", "model": MODEL})
    assert refused(reply) == (403, "forbidden")
    latest = await researcher.get("/v1/artifacts/latest", params={"model": MODEL, "kind": "checkpoint"})
    assert refused(latest) == (404, "not_found")


@pytest.mark.attack(AREA, "a researcher commits a source that claims a model and a metric")
async def test_a_source_is_no_result_whatever_it_claims(site: Running) -> None:
    researcher = await site.with_role("researcher")
    reply, _ = await commit(researcher, b"forged", {"kind": "source", "model": MODEL, "metrics": SCORE})
    made = ok(reply, CommitReply)
    assert await chosen(site) == NONE
    (row,) = ok(await researcher.get(f"/v1/artifact/{made.artifact_id}/lineage"), ArtifactsReply).artifacts
    assert row.by == f"key:{researcher.headers['Authorization'].split('-')[1]}"


@pytest.mark.proves(
    "Never again: a researcher's upload was the latest and best result; a host committed a result of another model"
)
@pytest.mark.attack(AREA, "a host commits a result of another model than its job has")
async def test_a_result_is_of_the_model_that_the_job_has(site: Running, tries: Callable[[int], None]) -> None:
    host = await site.host("anna")
    await apply(site, manifest("train.py", model="own"))
    job = await finish(host, model=MODEL, mode="other", metrics=SCORE, code="f" * 40, data="forged")
    assert await chosen(site) == NONE
    viewer = await site.with_role("viewer")
    made = ok(await viewer.get("/v1/artifacts/latest", params={"model": "own"}), ArtifactRecord)
    assert (made.lineage.mode, made.lineage.code, made.lineage.data) == ("default", BUNDLE, "")
    assert (made.by, made.project, made.trainer_digest) == (f"host:{host.id}", "default", job.trainer_digest)
    tries(5)


@pytest.mark.attack(AREA, "a host commits a result and never completes its job")
async def test_a_result_counts_only_when_its_job_is_completed(site: Running) -> None:
    host = await site.host("anna")
    await apply(site, manifest("train.py"))
    (lease,) = await host.claim()
    lineage = {"kind": "result", "metrics": SCORE}
    reply, _ = await commit(host.http, b"early", lineage, job_id=lease.job_id, epoch=lease.epoch)
    assert reply.is_success
    assert await chosen(site) == NONE
    failure = {"epoch": lease.epoch, "cause": "user_error", "error": "x"}
    assert (await host.http.post(f"/v1/job/{lease.job_id}/fail", json=failure)).is_success
    assert await chosen(site) == NONE


@pytest.mark.proves(
    "Never again: a job was completed with the artifact of another, or by a trainer from before the manifest"
)
@pytest.mark.attack(AREA, "a host completes its job with the artifact of another host, job or person")
async def test_a_job_is_completed_with_what_its_own_attempt_uploaded(
    site: Running, tries: Callable[[int], None]
) -> None:
    anna, bob, researcher = await site.host("anna"), await site.host("bob"), await site.with_role("researcher")
    await apply(site, manifest("train.py", model="first"))
    theirs = (await finish(anna, b"good model")).artifact
    await apply(site, manifest("train.py", model="second"))
    (lease,) = await bob.claim()
    reply, source = await commit(researcher, b"source", {"kind": "source"})
    assert reply.is_success
    for artifact in (theirs, source):
        body = {"epoch": lease.epoch, "artifact": artifact}
        assert refused(await bob.http.post(f"/v1/job/{lease.job_id}/complete", json=body)) == (409, "precondition")
    attempt = {"job_id": lease.job_id, "epoch": lease.epoch}
    reply, checkpoint = await commit(bob.http, b"checkpoint", {"kind": "checkpoint"}, **attempt)
    assert reply.is_success
    body = {"epoch": lease.epoch, "artifact": checkpoint}
    assert refused(await bob.http.post(f"/v1/job/{lease.job_id}/complete", json=body)) == (409, "precondition")
    tries(3)


@pytest.mark.attack(AREA, "a host sends the same bytes as another one, and completes its job with them")
async def test_equal_bytes_are_a_result_of_each_job_that_made_them(site: Running) -> None:
    anna = await site.host("anna")
    await apply(site, manifest("train.py", model="first"))
    first = await finish(anna, b"same")
    await apply(site, manifest("train.py", model=MODEL))
    (lease,) = await anna.claim("again")
    body = {"epoch": lease.epoch, "artifact": first.artifact}
    assert refused(await anna.http.post(f"/v1/job/{lease.job_id}/complete", json=body)) == (409, "precondition")
    assert await chosen(site) == NONE


@pytest.mark.proves(
    "Never again: a job was completed with the artifact of another, or by a trainer from before the manifest"
)
@pytest.mark.attack(AREA, "a job of the same model, mode, hyper and seed is completed before the operator's manifest")
async def test_a_result_from_before_the_manifest_does_not_count(site: Running) -> None:
    host, researcher = await site.host("anna"), await site.with_role("researcher")
    job = await submit(researcher)
    assert (await finish(host, b"evil")).status == "completed"
    plan = await apply(site, manifest("train.py"))
    assert [each.id for each in plan.requeued] == [job.id]
    assert "1 requeued" in plan.summary
    (lease,) = await host.claim("again")
    assert lease.trainer is not None
    assert (lease.job_id, lease.trainer.command, lease.checkpoint) == (job.id, ("python", "train.py"), "")
    assert await chosen(site) == NONE


@pytest.mark.attack(AREA, "the operator's job runs already, with the researcher's trainer, when the manifest comes")
async def test_a_result_of_an_attempt_from_before_the_manifest_does_not_count(site: Running) -> None:
    host, researcher = await site.host("anna"), await site.with_role("researcher")
    job = await submit(researcher)
    (lease,) = await host.claim()
    await apply(site, manifest("train.py"))
    attempt = {"job_id": lease.job_id, "epoch": lease.epoch}
    _, artifact = await commit(host.http, b"evil", {"kind": "result", "metrics": SCORE}, **attempt)
    done = await host.http.post(f"/v1/job/{job.id}/complete", json={"epoch": lease.epoch, "artifact": artifact})
    assert ok(done, Job).trainer_digest == lease.trainer_digest
    plan = await apply(site, manifest("train.py"))
    assert [each.id for each in plan.requeued] == [job.id]


@pytest.mark.attack(AREA, "the operator's job waits, with the researcher's trainer, when the manifest comes")
async def test_a_job_that_waits_takes_the_trainer_of_the_manifest(site: Running) -> None:
    host, researcher = await site.host("anna"), await site.with_role("researcher")
    job = await submit(researcher, priority=-5)
    plan = await apply(site, manifest("train.py"))
    assert (plan.takers, [each.id for each in plan.changed]) == (1, [job.id])
    (lease,) = await host.claim()
    assert lease.trainer is not None
    assert (lease.trainer.command, lease.spec.priority) == (("python", "train.py"), 0)


async def saved_server(site: Running) -> str:
    """The artifact with the state of a training server, which its host has saved."""
    spec = JobSpec(kind="server", model="tiny", trainer="t")
    await site.add(spec)
    host = await site.host("keeper")
    (lease,) = await host.claim("server")
    attempt = {"job_id": lease.job_id, "epoch": lease.epoch}
    reply, state = await commit(host.http, b"operator token", {"kind": "checkpoint"}, **attempt)
    assert reply.is_success, reply.text
    return state


def reading(state: str) -> list[dict[str, Any]]:
    """Trainers whose host would fetch this artifact."""
    base = {"name": "default", "command": ["cat"]}
    named = {"x": {"source": "strata:anything", "digest": state}}
    return [base | {"bundle": state}, base | {"bundle": BUNDLE, "data": named}]


@pytest.mark.attack(AREA, "a researcher's job names the saved state of a training server as its data or its source")
@pytest.mark.parametrize("way", [0, 1])
async def test_a_job_cannot_name_the_state_of_a_server(site: Running, way: int, tries: Callable[[int], None]) -> None:
    state = await saved_server(site)
    evil = reading(state)[way]
    mallory = await site.with_role("researcher", "mallory")
    listed = ok(await mallory.get("/v1/artifacts", params={"kind": "checkpoint"}), ArtifactsReply)
    assert [each.artifact_id for each in listed.artifacts] == [state], "its id is no secret"
    assert refused(await mallory.post("/v1/jobs", json={"spec": {"model": "m"}, "trainer": evil})) == (403, "forbidden")
    body = manifest("train.py", project="mine")
    body["manifest"]["trainers"]["default"] = evil
    for dry in (True, False):
        assert refused(await mallory.post("/v1/manifest", json={**body, "dry_run": dry})) == (403, "forbidden")
    assert [job.spec.kind for job in await site.hub.context.fleet.store.jobs.select(JobFilter())] == ["server"]
    tries(3)


@pytest.mark.attack(AREA, "L5: a chunk of a training server's saved state, or of what nobody committed, by its digest")
async def test_a_digest_is_no_way_around_who_may_read_an_artifact(site: Running, tries: Callable[[int], None]) -> None:
    await saved_server(site)
    researcher, operator = await site.with_role("researcher"), await site.operator()
    people = [researcher, await site.with_role("viewer")]
    put = await researcher.put(f"/v1/chunk/{sha256_hex(b'draft')}", params={"size": 5}, content=b"draft")
    assert put.is_success
    hidden = [f"/v1/chunk/{sha256_hex(content)}" for content in (b"operator token", b"draft")]
    for path in hidden:
        for person in people:
            tries(1)
            assert refused(await person.get(path)) == (404, "not_found"), path
        assert (await operator.get(path)).is_success
    reply, _ = await commit(researcher, b"open to all", {"kind": "data", "model": "images"})
    assert reply.is_success
    for person in people:
        assert (await person.get(f"/v1/chunk/{sha256_hex(b'open to all')}")).content == b"open to all"


@pytest.mark.attack(AREA, "L5: a training server's saved state, committed as data by one who knows all its digests")
@pytest.mark.parametrize("kind", ["data", "source"])
async def test_who_knows_the_digests_of_a_state_cannot_commit_it(
    site: Running, kind: str, tries: Callable[[int], None]
) -> None:
    await saved_server(site)
    mallory, operator = await site.with_role("researcher", "mallory"), await site.operator()
    digest = sha256_hex(b"operator token")
    bodies = [
        {"manifest": {"files": [{"path": path, "size": 14, "sha256": digest, "chunks": [digest]}]},
         "lineage": {"kind": kind, "model": "mine"}}
        for path in ("model", "other")
    ]  # fmt: skip
    for body in bodies:
        tries(1)
        assert refused(await mallory.post("/v1/artifacts", json=body)) == (403, "forbidden")
        assert refused(await mallory.get(f"/v1/chunk/{digest}")) == (404, "not_found")
    assert (await operator.post("/v1/artifacts", json=bodies[1])).is_success


@pytest.mark.attack(AREA, "a trainer that the hub stored unchecked names the saved state of a training server")
@pytest.mark.parametrize("way", [0, 1])
async def test_a_host_cannot_read_the_state_of_a_server_for_another_job(site: Running, way: int) -> None:
    state = await saved_server(site)
    stored = msgspec.convert(reading(state)[way], TrainerSpec)
    spec, fleet = JobSpec(model="m"), site.hub.context.fleet
    plan = ApplyPlan(new={spec.id: spec}, trainers={"default": stored}, seen={"default": ""})
    await fleet.jobs.apply(plan, "test", source="test")
    host = await site.host("mallory")
    (lease,) = await host.claim("evil")
    assert lease.trainer == stored
    for path in (f"artifact/{state}", f"chunk/{sha256_hex(b'operator token')}", f"source/{state}"):
        assert refused(await host.http.get(f"/v1/{path}")) == (403, "forbidden"), path


@pytest.mark.proves("Never again: a host gave itself the label that a job required")
@pytest.mark.attack(ENROLMENT, "a host gives itself the label secure=true and 999 cores")
async def test_a_label_that_a_host_gives_itself_opens_no_job(site: Running) -> None:
    host = await site.host("mallory", labels={"secure": "true"}, cores=999)
    need = 'require_labels = { secure = "true" }\n'
    await apply(site, manifest("train.py", last=need))
    assert list(await host.claim()) == []
    policy = '[hosts.mallory]\nlabels = { secure = "true" }\n'
    await apply(site, manifest("train.py", more=policy, last=need))
    assert len(await host.claim("c2")) == 1


async def join(site: Running, name: str, *, invited: str = "") -> httpx.Response:
    made = ok(await (await site.operator()).post("/v1/invites", json={"name": invited}), InviteReply)
    token = read_join_token(made.token)
    body = {
        "invite_id": token.id,
        "secret": token.secret.reveal(),
        "name": name,
        "request_pem": new_signing_request()[1].decode(),
    }
    return await (await site.client()).post("/v1/join", json=body)


@pytest.mark.attack(ENROLMENT, "an invitation for one host is used under the name of another")
async def test_a_name_is_bound_to_its_invitation(site: Running, tries: Callable[[int], None]) -> None:
    for name in ("gpu-1", "desk.", "Desk", "desk2"):
        assert (await join(site, name, invited="desk")).status_code in (400, 403)
        tries(1)
    assert (await join(site, "desk", invited="desk")).is_success


@pytest.mark.attack(
    ENROLMENT,
    "an invitation without a name is used under the name of a revoked host",
    by_design=("docs/operations.md", "An invitation without a name lets the host choose any name that is free"),
)
async def test_an_invitation_without_a_name_leaves_the_choice(site: Running) -> None:
    first = ok(await join(site, "desk"), CertificateReply)
    operator = await site.operator()
    assert (await operator.post("/v1/host/desk/revoke", json={})).is_success
    assert ok(await join(site, "desk"), CertificateReply).host_id != first.host_id


@pytest.mark.attack(PROJECTS, "a second project declares a trainer of the same name while the first one's jobs wait")
async def test_a_trainer_of_another_project_does_not_run_my_jobs(site: Running) -> None:
    hosts = [await site.host(name) for name in ("anna", "bert")]
    await apply(site, manifest("a.py", project="a"))
    plan = await apply(site, manifest("b.py", project="b"))
    assert (plan.changed, plan.orphaned, plan.takers) == ((), (), 0)
    leases = [(await host.claim("c"))[0] for host in hosts]
    ran = {lease.spec.project: lease.trainer.command[1] for lease in leases if lease.trainer}
    assert ran == {"a": "a.py", "b": "b.py"}


@pytest.mark.attack(PROJECTS, "a manifest without [hosts.desk] resets the policy of desk")
async def test_a_manifest_that_does_not_name_a_host_leaves_its_policy(site: Running) -> None:
    host = await site.host("desk")
    await apply(site, manifest("a.py", project="a", more='[hosts.desk]\nallow_jobs = ["nothing"]\n'))
    for project in ("a", "b"):
        plan = await apply(site, manifest("b.py", project=project, model="x"))
        assert plan.hosts == ()
    assert list(await host.claim()) == []


@pytest.mark.attack(PROJECTS, "a manifest of one project writes the policy of a host that another project has")
async def test_a_policy_of_another_project_is_refused(site: Running) -> None:
    await apply(site, manifest("a.py", project="a", more="[hosts.desk]\nallow_jobs = []\n"))
    wanted = manifest("b.py", project="b", more="[hosts.desk]\nslots = 2\n")
    operator = await site.operator()
    reply = await operator.post("/v1/manifest", json=wanted)
    assert refused(reply) == (409, "conflict")
    assert "belongs to project 'a'" in reply.json()["error"]["message"]
    assert ok(await operator.get("/v1/jobs"), JobsReply).jobs[0].spec.project == "a"
    assert (await apply(site, wanted, take_over=True)).hosts == ("desk",)


@pytest.mark.attack(
    PROJECTS, "a researcher submits a job into a project, with another trainer under its trainer's name"
)
async def test_a_submitted_job_changes_no_trainer_of_a_project(site: Running) -> None:
    researcher, host = await site.with_role("researcher"), await site.host("anna")
    await apply(site, manifest("a.py", project="a"))
    body = {"spec": {"model": "x", "project": "a"}, "trainer": trainer("evil.py")}
    assert refused(await researcher.post("/v1/jobs", json=body)) == (409, "conflict")
    (lease,) = await host.claim()
    assert lease.trainer is not None
    assert lease.trainer.command == ("python", "a.py")


@pytest.mark.attack(PROJECTS, "names of projects that are paths, empty, or too long")
@pytest.mark.parametrize("name", ["../a", "a/b", "", ".a", "x" * 65, "a\0b", "a b"])
async def test_a_project_has_a_plain_name(site: Running, name: str) -> None:
    operator = await site.operator()
    wanted = manifest("a.py")
    wanted["manifest"]["project"] = name
    assert refused(await operator.post("/v1/manifest", json=wanted)) == (400, "invalid")
    body = {"spec": {"model": "x", "project": name}, "trainer": trainer("a.py")}
    assert refused(await operator.post("/v1/jobs", json=body)) == (400, "invalid")


@pytest.mark.attack(PROJECTS, "a researcher cancels and requeues jobs of others and of a manifest")
async def test_a_researcher_ends_no_job_of_others(site: Running, tries: Callable[[int], None]) -> None:
    hers, other = await site.with_role("researcher"), await site.with_role("researcher")
    (declared,) = (await apply(site, manifest("a.py"))).new
    theirs = await submit(other, "mine.py", model="x", trainer="default", project="x")
    for job_id in (declared.id, theirs.id):
        for verb in ("cancel", "requeue"):
            assert refused(await hers.post(f"/v1/job/{job_id}/{verb}")) == (403, "forbidden")
            tries(1)
