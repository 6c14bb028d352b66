"""What belongs to one researcher, in the hands of another: every route that changes something, from the table."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from strata.base.clock import SystemClock
from strata.fleet.wire.artifacts import ArtifactRecord, CommitReply
from strata.fleet.wire.manifests import ManifestReply
from strata.fleet.wire.owners import QuotasReply, SubscriptionReply, SubscriptionsReply
from strata.http.route import Route
from strata.hub.gangs import CoordinatorGangs
from strata.hub.lone_coordinator import TokenSessions, make_app
from strata.hub.routes import ROUTES
from strata.web.pages import lone_server
from strata.web.routes import PAGES
from tests.abuse.owners import FREE, changing, check_rules, free, named, served_routes
from tests.shell.fleet_http.running import Running, manifest_body, ok, refused, replying, running
from tests.shell.fleet_http.test_servers import serve
from tests.shell.web.browsing import log_in

Tries = Callable[[int], None]
AREA = "hub: owners"


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Running]:
    async with running(tmp_path / "hub") as started:
        yield started


def described(content: bytes) -> dict[str, Any]:
    digest = hashlib.sha256(content).hexdigest()
    return {"path": "train.csv", "sha256": digest, "size": len(content), "chunks": [digest]}


async def push(person: httpx.AsyncClient, name: str, content: bytes, upload: str = "1") -> httpx.Response:
    """As `strata data push` does, but for what its client checks."""
    file = described(content)
    assert (await person.put(f"/v1/chunk/{file['sha256']}?size={len(content)}", content=content)).status_code == 204
    lineage = {"kind": "data", "model": name, "mode": upload}
    return await person.post("/v1/artifacts", json={"manifest": {"files": [file]}, "lineage": lineage})


@pytest.mark.attack(AREA, "data under the name of another researcher's data")
async def test_the_data_of_a_name_is_never_another_owners(site: Running, tries: Tries) -> None:
    anna, rob = await site.with_role("researcher", "anna"), await site.with_role("researcher", "rob")
    hers = ok(await push(anna, "images", b"good"), CommitReply).artifact_id
    for content in (b"poison", b"good"):
        tries(1)
        refusal = await push(rob, "images", content, "2")
        assert (refused(refusal), "belongs to anna" in refusal.text) == ((403, "forbidden"), True)
    latest = {"model": "images", "kind": "data"}
    made = ok(await rob.get("/v1/artifacts/latest", params=latest), ArtifactRecord)
    assert (made.artifact_id, made.owner) == (hers, "anna")
    ok(await push(rob, "mine", b"good"), CommitReply)
    ok(await push(anna, "images", b"better", "2"), CommitReply)
    renewed = await site.with_role("researcher", "anna")
    ok(await push(renewed, "images", b"best", "3"), CommitReply)


PAGE_ROUTES = [route for module in (*PAGES, lone_server) for route in module.ROUTES]
OWNERS_ROUTES, OWNERS_PAGES = changing(ROUTES), changing(PAGE_ROUTES)


FREE_ROUTES = {
    "PUT /v1/chunk/{digest}",
    "POST /v1/chunks/missing",
    "PUT /v1/source/{id}",
    "POST /v1/join",
    "POST /api/v1/telemetry",
    "POST /api/v1/get_info",
    "POST /api/v1/weights_info",
    "POST /api/v1/list_checkpoints",
    "POST /api/v1/client/config",
    "POST /api/v1/client/dynamic_config",
    "POST /login",
}
"""No test tries them on a thing of another: whoever adds one here has seen that there is no such thing."""


@pytest.mark.attack(AREA, "a new route or form that changes something, without a word on whose it is")
async def test_every_route_that_changes_something_says_whose_it_is(site: Running, tries: Tries) -> None:
    served = served_routes(site.hub.app)
    check_rules([*served, *PAGE_ROUTES], tries)
    assert free(served) == FREE_ROUTES
    tried = {named(each) for each in (*OWNERS_ROUTES, *OWNERS_PAGES)}
    only_alone = {named(each) for each in lone_server.ROUTES}
    assert {named(each) for each in changing(served)} == (tried - only_alone) | {"POST /login"}
    clock = SystemClock()
    gangs = CoordinatorGangs("127.0.0.1:1", clock)
    alone = served_routes(make_app(gangs, TokenSessions(None, clock), clock, asyncio.Event()))
    await gangs.close()
    check_rules(alone, tries)
    assert {named(each) for each in changing(alone)} == {"POST /login", "POST /logout"}


MANIFEST = """
project = "hers"
[trainers.t]
command = ["true"]
directory = "/code"
[[jobs]]
model = "m"
trainer = "t"
[[schedules]]
name = "nightly"
cron = "0 3 * * *"
timezone = "UTC"
model = "n"
trainer = "t"
[[sweeps]]
name = "rates"
model = "o"
trainer = "t"
grid = { x = [1] }
"""


@dataclass(frozen=True)
class Hers:
    """What anna has: a project with jobs, a command in the running one, a schedule, a sweep and a secret; data."""

    job: str
    """It runs."""
    waiting: str
    ended: str
    exec: str
    artifact: str


@dataclass(frozen=True)
class Row:
    """How a route names what is anna's."""

    path: str
    body: dict[str, Any] | None = None
    query: Mapping[str, str] = field(default_factory=dict)


IN_PROJECT = {"project": "hers"}
GOOD = described(b"good")
LINEAGE = {"kind": "data", "model": "images", "mode": "2"}
SUBSCRIPTION = {"url": "ntfy://topic-of-this-test", "events": ["failed"]}
DATA = {"manifest": {"files": [GOOD]}, "lineage": LINEAGE}
JOB = {"spec": {"project": "hers", "model": "x", "trainer": "t"}}

REQUESTS: Mapping[str, Callable[[Hers], Row]] = {
    "artifacts.commit": lambda _: Row("/v1/artifacts", DATA),
    "jobs.submit": lambda _: Row("/v1/jobs", JOB),
    "jobs.archive": lambda hers: Row(f"/v1/job/{hers.ended}/archive"),
    "jobs.requeue": lambda hers: Row(f"/v1/job/{hers.ended}/requeue"),
    "execs.request": lambda hers: Row(f"/v1/job/{hers.job}/exec", {"command": ["id"]}),
    "execs.cancel": lambda hers: Row(f"/v1/job/{hers.job}/exec/{hers.exec}/cancel"),
    "jobs.cancel": lambda hers: Row(f"/v1/job/{hers.waiting}/cancel", {}),
    "manifests.apply": lambda _: Row("/v1/manifest", manifest_body(MANIFEST)),
    "schedules.pause": lambda _: Row("/v1/schedule/hers/nightly/pause"),
    "schedules.resume": lambda _: Row("/v1/schedule/hers/nightly/resume"),
    "schedules.remove": lambda _: Row("/v1/schedule/hers/nightly"),
    "sweeps.stop": lambda _: Row("/v1/sweep/hers/rates/stop"),
    "sweeps.resume": lambda _: Row("/v1/sweep/hers/rates/resume"),
    "secrets.put": lambda _: Row("/v1/secret/TOKEN", {"value": "stolen-by-another"}, IN_PROJECT),
    "secrets.remove": lambda _: Row("/v1/secret/TOKEN", None, IN_PROJECT),
    "artifacts.pin": lambda hers: Row(f"/v1/artifact/{hers.artifact}/pin", {"reason": ""}),
    "artifacts.remove": lambda hers: Row(f"/v1/artifact/{hers.artifact}"),
}
"""In an order in which all of them succeed for anna."""
FORMS: Mapping[str, Callable[[Hers], str]] = {
    "job.archive": lambda hers: f"/jobs/{hers.ended}/archive",
    "job.requeue": lambda hers: f"/jobs/{hers.ended}/requeue",
    "job.cancel": lambda hers: f"/jobs/{hers.waiting}/cancel",
    "artifacts.pin": lambda hers: f"/artifacts/{hers.artifact}/pin",
}
"""The same of the dashboard's."""


async def owned_by(anna: httpx.AsyncClient, site: Running) -> Hers:
    ok(await anna.post("/v1/manifest", json=manifest_body(MANIFEST)), ManifestReply)
    host = await site.host("h")
    (lease,) = await host.claim()
    beat = {"leases": [{"job_id": lease.job_id, "epoch": lease.epoch, "running": True}]}
    await host.http.post("/v1/heartbeats", json=beat)
    exec_id = (await anna.post(f"/v1/job/{lease.job_id}/exec", json={"command": ["id"]})).json()["id"]
    waiting, ended = [
        (await anna.post("/v1/jobs", json={"spec": {**JOB["spec"], "model": model}})).json()["job"]["id"]
        for model in ("waiting", "ended")
    ]
    assert (await anna.post(f"/v1/job/{ended}/cancel", json={})).is_success
    assert (await anna.put("/v1/secret/TOKEN", params=IN_PROJECT, json={"value": "hers-and-hers-alone"})).is_success
    artifact = ok(await push(anna, "images", b"good"), CommitReply).artifact_id
    assert (await anna.post(f"/v1/artifact/{artifact}/pin", json={"reason": "mine"})).is_success
    return Hers(lease.job_id, waiting, ended, exec_id, artifact)


async def send(client: httpx.AsyncClient, route: Route, row: Row) -> httpx.Response:
    return await client.request(route.method, row.path, params=row.query, json=row.body)


def owned(routes: Sequence[Route]) -> set[str]:
    """The routes of things that have an owner at the hub."""
    return {route.name for route in routes if route.owner not in ("caller", "tenant") and FREE not in route.owner}


@pytest.mark.attack(AREA, "D: every route that changes something, on a thing of another researcher")
async def test_what_is_owned_is_changed_by_its_owner_and_by_no_other(site: Running, tries: Tries) -> None:
    anna, rob = await site.with_role("researcher", "anna"), await site.with_role("researcher", "rob")
    viewer = await site.with_role("viewer", "eve")
    routes = {route.name: route for route in OWNERS_ROUTES}
    assert owned(OWNERS_ROUTES) == REQUESTS.keys(), "there is a row for every route"
    hers = await owned_by(anna, site)
    for name, request in REQUESTS.items():
        for other in (rob, viewer):
            tries(1)
            assert refused(await send(other, routes[name], request(hers))) == (403, "forbidden"), name
    for name, request in REQUESTS.items():
        reply = await send(anna, routes[name], request(hers))
        assert reply.is_success, (name, reply.text)


@pytest.mark.attack(AREA, "every form of the dashboard, for a thing of another researcher")
async def test_a_form_changes_what_belongs_to_the_person_who_sends_it(site: Running, tries: Tries) -> None:
    assert owned(OWNERS_PAGES) == FORMS.keys(), "there is a row for every form"
    assert {route.name for route in OWNERS_PAGES if route.owner == "caller"} == {"login.log_out"}
    hers = await owned_by(await site.with_role("researcher", "anna"), site)
    anna, rob = await log_in(site, "researcher", "anna"), await log_in(site, "researcher", "rob")
    eve = await log_in(site, "viewer", "eve")
    for name, path in FORMS.items():
        for other in (rob, eve):
            tries(1)
            assert (await other.post(path(hers))).status_code == 403, name
    for other in (rob, eve):
        tries(1)
        assert (await other.post("/logout")).status_code == 303
    for name, path in FORMS.items():
        reply = await anna.post(path(hers))
        assert reply.status_code == 303, (name, reply.text)


@pytest.mark.filterwarnings("ignore:'imghdr' is deprecated:DeprecationWarning")
@pytest.mark.attack(AREA, "the subscriptions and login codes of another researcher")
async def test_what_each_caller_has_is_out_of_reach_for_others(site: Running, tries: Tries) -> None:
    anna, rob = await site.with_role("researcher", "anna"), await site.with_role("researcher", "rob")
    viewer = await site.with_role("viewer", "eve")
    rows = {route.name for route in OWNERS_ROUTES if route.owner == "caller"}
    assert rows == {
        "subscriptions.put",
        "subscriptions.remove",
        "subscriptions.send_test",
        "identities.make_login_code",
    }
    path = "/v1/subscription/mine"
    ok(await anna.put(path, json=SUBSCRIPTION), SubscriptionReply)
    assert refused(await rob.delete(path)) == (404, "not_found")
    assert refused(await rob.post(f"{path}/test")) == (404, "not_found")
    ok(await rob.put(path, json={**SUBSCRIPTION, "events": ["completed"]}), SubscriptionReply)
    for method, where in (("PUT", path), ("DELETE", path), ("POST", f"{path}/test")):
        assert refused(await viewer.request(method, where, json=SUBSCRIPTION)) == (403, "forbidden")
    tries(6)
    (kept,) = ok(await anna.get("/v1/subscriptions"), SubscriptionsReply).subscriptions
    assert kept.events == ("failed",)
    code = (await rob.post("/v1/login/code")).json()
    assert "anna" not in str(code)


@pytest.mark.attack(AREA, "a request to a training server in the name of another tenant, on every forwarded route")
async def test_a_server_gets_the_tenant_who_calls_whatever_the_request_says(
    site: Running, tmp_path: Path, tries: Tries
) -> None:
    path = tmp_path / "servers" / "0a" / "s"
    job = await serve(site, path=path)
    rob, viewer = await site.with_role("researcher", "rob"), await site.with_role("viewer", "eve")
    said_by = [{"role": "user", "content": "x"}]
    body: dict[str, Any] = {"model": "tiny", "prompt": "x", "session_id": "session_1", "messages": said_by}
    pretended = {"x-strata-tenant": "anna", "x-strata-role": "operator", "x-strata-front": "0" * 64}
    for route in (each for each in OWNERS_ROUTES if each.owner == "tenant"):
        tries(2)
        address = route.path.replace(":path", "").format(id=job, session_id="session_1", rest="save_weights")
        sent = {key: value for key, value in body.items() if key != ("prompt" if "chat" in address else "messages")}
        if route.path.startswith("/v1/server/"):
            sent = {key: value for key, value in sent.items() if key != "session_id"} | {
                "temperature": 1,
                "max_tokens": 1,
            }
        heads: list[bytes] = []
        content = msgspec.json.encode(sent)
        headers = {"Content-Type": "application/json", **pretended}
        async with replying(path, b"{}", heads=heads):
            refusal = await viewer.request(route.method, address, content=content, headers=headers)
            assert (refused(refusal), heads) == ((403, "forbidden"), []), named(route)
            await rob.request(route.method, address, content=content, headers=headers)
        said = [line for head in heads for line in head.splitlines() if line.startswith(b"x-strata-tenant")]
        assert set(said) <= {b"x-strata-tenant: rob"}, named(route)
        assert said or route.path.endswith("create_session"), named(route)
    # With the training server's own dashboard it is tried in tests/shell/web/test_rollouts.py.
    assert {named(each) for each in OWNERS_PAGES if each.owner == "tenant"} == {
        "POST /playground",
        "POST /training/{id}/playground",
    }
    form = {"model": "tiny", "prompt": "x", "form": "text", "temperature": "1", "max_tokens": "1"}
    for role, name in (("researcher", "rob"), ("viewer", "eve")):
        tries(1)
        browser, heads = await log_in(site, role, name), []
        async with replying(path, b"{}", heads=heads):
            browser.http.headers.update(pretended)
            status = (await browser.post(f"/training/{job}/playground", **form)).status_code
        said = [line for head in heads for line in head.splitlines() if line.startswith(b"x-strata-tenant")]
        assert set(said) == ({b"x-strata-tenant: rob"} if name == "rob" else set()), (name, status)
        assert (status == 403) is (name == "eve")


@pytest.mark.attack(AREA, "L6: names of projects, taken by hundreds with a secret or a job in each")
async def test_one_researcher_does_not_take_all_names(
    site: Running, tries: Tries, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strata.fleet.core.ownership.MAX_PROJECTS", 3)
    rob, operator = await site.with_role("researcher", "rob"), await site.operator()
    statuses = []
    for number in range(6):
        tries(1)
        reply = await rob.put("/v1/secret/Z", params={"project": f"p{number}"}, json={"value": "12345678"})
        statuses.append(reply.status_code)
    assert statuses == [204] * 3 + [429] * 3
    assert (await rob.put("/v1/secret/Z", params={"project": "p1"}, json={"value": "12345678"})).status_code == 204
    assert refused(await rob.post("/v1/manifest", json=manifest_body(MANIFEST))) == (429, "exhausted")
    for number in range(6, 12):
        reply = await operator.put("/v1/secret/Z", params={"project": f"p{number}"}, json={"value": "12345678"})
        assert reply.status_code == 204
    assert len(await site.hub.context.fleet.store.owners.projects()) == 9


@pytest.mark.parametrize("name", ["HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "db_password", "A=B", "STRATA_X"])
@pytest.mark.attack("hub: secrets", "L4: a secret in env, sent past the client that refuses it")
async def test_the_hub_refuses_a_secret_in_env(site: Running, name: str) -> None:
    rob = await site.with_role("researcher", "rob")
    trainer = {"name": "t", "command": ["true"], "bundle": "0" * 64, "env": {name: "s3cr3t-s3cr3t"}}
    body = {"spec": {"model": "m", "trainer": "t"}, "trainer": trainer}
    reply = await rob.post("/v1/jobs", json=body)
    assert (refused(reply), "s3cr3t" in reply.text) == ((400, "invalid"), False)


@pytest.mark.proves("Never again: a colleague's commit of the same manifest brought removed data back, or locked it")
@pytest.mark.attack(AREA, "C1: a version of data that its owner withdrew, committed again under another name")
async def test_what_was_withdrawn_comes_back_for_its_owner_alone(site: Running, tries: Tries) -> None:
    anna, rob = await site.with_role("researcher", "anna"), await site.with_role("researcher", "rob")
    good = ok(await push(anna, "images", b"good"), CommitReply).artifact_id
    bad = ok(await push(anna, "images", b"bad", "2"), CommitReply).artifact_id
    assert (await anna.delete(f"/v1/artifact/{bad}")).is_success
    tries(1)
    assert ok(await push(rob, "x", b"bad"), CommitReply).artifact_id == bad
    latest = {"model": "images", "kind": "data"}
    assert ok(await rob.get("/v1/artifacts/latest", params=latest), ArtifactRecord).artifact_id == good
    assert ok(await push(anna, "images", b"bad", "2"), CommitReply).new
    assert ok(await rob.get("/v1/artifacts/latest", params=latest), ArtifactRecord).artifact_id == bad
    assert (await anna.delete(f"/v1/artifact/{bad}")).is_success
    assert ok(await rob.get("/v1/artifacts/latest", params=latest), ArtifactRecord).artifact_id == good


@pytest.mark.parametrize("kind", ["data", "source"])
@pytest.mark.attack(AREA, "NEW 3: a colleague's artifact, committed by another as well, so that she cannot let it go")
async def test_a_commit_of_the_same_manifest_locks_nobody_out(site: Running, kind: str, tries: Tries) -> None:
    anna, rob = await site.with_role("researcher", "anna"), await site.with_role("researcher", "rob")
    operator = await site.operator()
    shared = ok(await push(anna, "images", b"good"), CommitReply).artifact_id
    path = f"/v1/artifact/{shared}"
    assert (await anna.post(f"{path}/pin", json={"reason": "mine"})).is_success
    lineage = {"kind": kind, "model": "x"}
    ok(await rob.post("/v1/artifacts", json={"manifest": {"files": [GOOD]}, "lineage": lineage}), CommitReply)
    for reason in ("", "his"):
        tries(1)
        assert refused(await rob.post(f"{path}/pin", json={"reason": reason})) == (403, "forbidden"), "her pin stays"
    assert refused(await anna.delete(path)) == (409, "precondition")
    assert (await anna.post(f"{path}/pin", json={"reason": ""})).is_success
    tries(1)
    assert (await anna.delete(path)).is_success
    assert (await rob.get(f"/v1/chunk/{GOOD['sha256']}")).content == b"good", "he needs it"
    stored = ok(await operator.get("/v1/quotas"), QuotasReply).quotas
    assert {each.owner: each.usage.bytes for each in stored if each.usage.bytes} == {"rob": 4}
    assert refused(await anna.delete(path)) == (403, "forbidden")
    assert (await rob.delete(path)).is_success is (kind == "data")
