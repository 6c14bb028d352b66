"""Servers that are jobs, at the hub's own door: who wakes them, who keeps them awake, and at whose expense."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import httpx
import msgspec
import pytest

from strata.base.errors import StrataError
from strata.fleet.core.jobspec import JobSpec
from strata.fleet.core.lease import ASLEEP
from strata.fleet.core.ownership import OPERATOR, Submitter
from strata.fleet.core.plan import ApplyPlan
from strata.fleet.core.quota import Quota
from strata.fleet.records import AttemptKey, JobFilter, ServerRow
from strata.fleet.wire.jobs import Job
from strata.fleet.wire.leases import HeartbeatsReply, LeaseGiven, LeaseVerdict
from strata.http.zstd import zstd
from strata.hub.gateway.dispatch import tag_of
from strata.train.wire.grants import ArchiveGrant, sign_token
from tests.shell.fleet_http.running import HostClient, Running, manifest_body, ok, refused, replying

ANNA = Submitter(owner="anna")
LONG_AGO_S = 5.0
NOBODY = Path("/nonexistent/socket")


async def serve(
    site: Running, model: str = "tiny", submitter: Submitter = OPERATOR, path: Path = NOBODY, also: Sequence[str] = ()
) -> str:
    """A server that a host has published, with these models, too: at a socket where nobody listens, or at this one."""
    _, lease = await published(site, JobSpec(kind="server", model=model, trainer="t"), submitter, path, also)
    return lease.job_id


async def published(
    site: Running, spec: JobSpec, submitter: Submitter = OPERATOR, path: Path = NOBODY, also: Sequence[str] = ()
) -> tuple[HostClient, LeaseGiven]:
    """The host of a server that has not been used for long."""
    fleet = site.hub.context.fleet
    await fleet.store.plans.apply(
        ApplyPlan(new={spec.id: spec}), "test", fleet.now_s(), source="test", declared=False, submitter=submitter
    )
    host = await site.host(f"host-{spec.model}")
    (lease,) = await host.claim(f"c-{spec.model}")
    attempt = AttemptKey(host.id, lease.job_id, lease.epoch)
    await fleet.store.jobs.publish_server(attempt, f"unix:{path}", [spec.model, *also], LONG_AGO_S)
    return host, lease


async def sleeping(site: Running, model: str = "tiny", submitter: Submitter = OPERATOR) -> str:
    job = await serve(site, model, submitter)
    await site.hub.context.fleet.jobs.cancel(job, f"{ASLEEP}no request for 60 s", "hub")
    return job


async def row(site: Running, job: str) -> ServerRow:
    return next(each for each in await site.hub.context.fleet.store.jobs.servers() if each.job.id == job)


def key_of(client: httpx.AsyncClient) -> str:
    return client.headers["Authorization"].split("-")[1]


def signed(job: str, key_id: str = "") -> dict[str, str]:
    """As the query of a signed URL, with a signature that nobody has made."""
    grant = ArchiveGrant(f"session_1.{tag_of(job)}:train:0/weights/a", "", 9e9, f"hub:{key_id}")
    return {"token": sign_token(grant, b"no server has this key")}


@pytest.mark.parametrize("several", [False, True])
async def test_a_signed_url_wakes_no_server(site: Running, *, several: bool) -> None:
    job = await sleeping(site)
    if several:
        await sleeping(site, "other")
    anybody = await site.client()
    async with asyncio.timeout(10.0):
        assert refused(await anybody.get("/api/v1/archive", params=signed(job))) == (503, "unavailable")
        for query in ({"token": "?"}, {}):
            unknown = await anybody.get("/api/v1/archive", params=query)
            assert refused(unknown) == ((404, "not_found") if several else (503, "unavailable"))
    assert (await row(site, job)).state == "asleep"


async def test_a_signed_url_keeps_no_server_awake(site: Running) -> None:
    job = await serve(site)
    anybody = await site.client()
    alice = await site.with_role("researcher")
    reply = await anybody.get("/api/v1/archive", params=signed(job, key_of(alice)))
    assert refused(reply) == (503, "unavailable")
    assert (await row(site, job)).used_at_s == LONG_AGO_S
    assert refused(await alice.get("/api/v1/status")) == (503, "unavailable"), "nobody listens there"
    assert (await row(site, job)).used_at_s > LONG_AGO_S


async def test_a_viewer_neither_wakes_a_server_nor_changes_anything_at_it(site: Running) -> None:
    job = await sleeping(site)
    viewer = await site.with_role("viewer")
    async with asyncio.timeout(10.0):
        assert refused(await viewer.get("/api/v1/status")) == (403, "forbidden")
        assert refused(await viewer.post("/api/v1/get_info", json={})) == (403, "forbidden")
        for method, path in (("POST", "forward_backward"), ("PUT", "training_runs/1/ttl"), ("DELETE", "checkpoints/1")):
            reply = await viewer.request(method, f"/api/v1/{path}", json={})
            assert (refused(reply), "needs the role researcher" in reply.text) == ((403, "forbidden"), True), path
    assert (await row(site, job)).state == "asleep"


async def test_a_viewer_keeps_no_server_awake(site: Running) -> None:
    job = await serve(site)
    viewer = await site.with_role("viewer")
    assert refused(await viewer.get("/api/v1/status")) == (503, "unavailable")
    assert (await row(site, job)).used_at_s == LONG_AGO_S


async def test_a_server_wakes_within_the_quota_of_its_owner(site: Running) -> None:
    job = await sleeping(site, submitter=ANNA)
    store = site.hub.context.fleet.store
    await store.owners.set_quota("anna", Quota(jobs=0), "operator", 1.0)
    bert = await site.with_role("researcher", "bert")
    async with asyncio.timeout(10.0):
        reply = await bert.get("/api/v1/status")
    assert (refused(reply), "the quota of anna is full" in reply.text) == ((403, "forbidden"), True)
    assert (await row(site, job)).state == "asleep"
    await store.owners.set_quota("anna", None, "operator", 2.0)
    await until_queued(site, bert, job)


async def test_the_server_of_an_operator_has_no_quota(site: Running) -> None:
    job = await sleeping(site)
    await site.hub.context.fleet.store.owners.set_quota("*", Quota(jobs=0), "operator", 1.0)
    await until_queued(site, await site.with_role("researcher"), job)


MANIFEST = """
project = "p"
[trainers.t]
command = ["t"]
directory = "/srv/t"
[[jobs]]
kind = "server"
model = "tiny"
trainer = "t"
"""


async def test_only_an_operator_queues_a_server(site: Running) -> None:
    body = manifest_body(MANIFEST)
    alice = await site.with_role("researcher")
    for dry in (True, False):
        assert refused(await alice.post("/v1/manifest", json={**body, "dry_run": dry})) == (403, "forbidden")
    single = {
        "spec": {"kind": "server", "model": "tiny", "trainer": "t"},
        "trainer": {"name": "t", "command": ["t"], "directory": "/srv/t"},
    }
    assert refused(await alice.post("/v1/jobs", json=single)) == (403, "forbidden")
    assert await site.hub.context.fleet.store.jobs.select(JobFilter()) == []
    olga = await site.with_role("operator")
    assert (await olga.post("/v1/manifest", json=body)).status_code == 200
    (made,) = await site.hub.context.fleet.store.jobs.select(JobFilter())
    assert made.spec.kind == "server"


async def test_who_is_no_operator_does_not_queue_a_server_again(site: Running) -> None:
    job = await serve(site, submitter=ANNA)
    anna = await site.with_role("researcher", "anna")
    assert (await anna.post(f"/v1/job/{job}/cancel", json={})).status_code == 200
    assert refused(await anna.post(f"/v1/job/{job}/requeue")) == (403, "forbidden")


@pytest.mark.parametrize(
    "nonsense",
    [
        b"[]",
        b"{",
        b'{"training_runs": 5, "cursor": {"total_count": "x"}}',
        pytest.param(b'{"training_runs": %s1%s}' % (b"[" * 50_000, b"]" * 50_000), id="deep"),
        pytest.param(b'{"training_runs": ["\xff"]}', id="no UTF-8"),
    ],
)
async def test_a_server_that_replies_nonsense_is_left_out_of_lists(
    site: Running, tmp_path: Path, nonsense: bytes
) -> None:
    good = b'{"training_runs": [{"training_run_id": "r"}], "cursor": {"total_count": 1}}'
    alice = await site.with_role("researcher")
    async with replying(tmp_path / "a" / "s", nonsense), replying(tmp_path / "b" / "s", good):
        await serve(site, "bad", path=tmp_path / "a" / "s")
        await serve(site, "good", path=tmp_path / "b" / "s")
        merged = await alice.get("/api/v1/training_runs")
        assert (merged.status_code, merged.json()["training_runs"]) == (200, [{"training_run_id": "r"}])
        assert merged.json()["cursor"]["total_count"] == 1
        assert (await alice.get("/api/v1/get_server_capabilities")).json() == {"supported_models": []}


async def test_a_model_from_a_checkpoint_is_found_by_the_id_that_its_client_composes(
    site: Running, tmp_path: Path
) -> None:
    """As `tinker` 0.38 does: the session at the hub, without a server in it."""
    alice, bert = await site.with_role("researcher", "alice"), await site.with_role("researcher", "bert")
    heads: list[bytes] = []
    async with (
        replying(tmp_path / "a" / "s", b"{}", b"404 Not Found") as at_a,
        replying(tmp_path / "b" / "s", b"{}", heads=heads),
    ):
        await serve(site, "a", path=tmp_path / "a" / "s")
        job = await serve(site, "b", path=tmp_path / "b" / "s")
        session = (await alice.post("/api/v1/create_session", json={})).json()["session_id"]
        path = f"tinker://session_9.{tag_of(job)}:train:0/weights/w"
        request = {"session_id": session, "model_seq_id": 3, "path": path}
        assert (await alice.post("/api/v1/load_weights", json=request)).status_code == 200
        step = {"model_id": f"{session}:train:3", "seq_id": 1}
        named = f"x-strata-model: {session}.{tag_of(job)}:train:3\r\n".encode()
        for content, encoding in (
            (msgspec.json.encode(step), {}),
            (zstd.compress(msgspec.json.encode(step)), {"content-encoding": "zstd"}),
        ):
            heads.clear()
            assert (await alice.post("/api/v1/optim_step", content=content, headers=encoding)).status_code == 200
            assert [named in head for head in heads] == [True]
        assert at_a == [], "where it is was known"
        site.hub.context.composed.clear()
        await alice.get(f"/api/v1/training_runs/{session}%3Atrain%3A3")
        assert len(at_a) == 1, "after a restart the servers are asked"
        assert named in heads[-1]
        site.hub.context.composed.clear()
        await bert.post("/api/v1/optim_step", json=step, headers={"x-strata-model": f"session_1.{tag_of(job)}:train:0"})
        assert b"x-strata-tenant: bert" in heads[-1], "the server judges whose it is"
        assert named in heads[-1]


async def test_an_id_is_read_whole_at_the_border_of_two_pieces(site: Running, tmp_path: Path) -> None:
    alice = await site.with_role("researcher")
    heads: list[bytes] = []
    async with replying(tmp_path / "a" / "s", b"{}", heads=heads):
        job = await serve(site, path=tmp_path / "a" / "s")
        for before in range((1 << 20) - 20, (1 << 20) + 1):
            content = zstd.compress(bytes(before) + b"session_1:train:12345" + bytes(100))
            await alice.post("/api/v1/forward_backward", content=content, headers={"content-encoding": "zstd"})
            assert f"x-strata-model: session_1.{tag_of(job)}:train:12345\r\n".encode() in heads[-1], before


async def test_a_session_is_of_the_tenant_who_opened_it(site: Running) -> None:
    await serve(site)
    alice, bert = await site.with_role("researcher", "alice"), await site.with_role("researcher", "bert")
    session = (await alice.post("/api/v1/create_session", json={})).json()["session_id"]
    asked = {"session_id": session, "base_model": "tiny"}
    assert refused(await bert.post("/api/v1/create_model", json=asked)) == (404, "not_found")
    assert refused(await alice.post("/api/v1/create_model", json=asked)) == (503, "unavailable"), "nobody listens there"
    assert (await bert.post(f"/api/v1/sessions/{session}/finish", json={})).status_code == 204
    assert refused(await bert.get(f"/api/v1/sessions/{session}")) == (404, "not_found")
    assert (await alice.get(f"/api/v1/sessions/{session}")).status_code == 200, "it is open still"
    strange = {"session_id": "session_ä", "base_model": "tiny"}
    assert refused(await alice.post("/api/v1/create_model", json=strange)) == (400, "invalid")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            b'{"error":{"code":"invalid","message":"planted: this server does not know the field"}}',
            "planted: this server",
        ),
        (b"no JSON", "the training server refused the body, and did not say why"),
    ],
)
async def test_a_client_hears_why_a_server_refuses_the_body_of_its_session(
    site: Running, tmp_path: Path, content: bytes, words: str
) -> None:
    """The hub opens sessions itself and sends the body to a server later: a client must not retry that for ever."""
    alice = await site.with_role("researcher")
    async with replying(tmp_path / "a" / "s", content, b"400 Bad Request"):
        await serve(site, "tiny", path=tmp_path / "a" / "s")
        session = (await alice.post("/api/v1/create_session", json={"planted": "fast"})).json()["session_id"]
        for path, body in (
            ("create_model", {"session_id": session, "base_model": "tiny"}),
            ("session_heartbeat", {"session_id": session, "planted": "fast"}),
            (f"sessions/{session}/finish", {"planted": "fast"}),
        ):
            reply = await alice.post(f"/api/v1/{path}", json=body)
            assert refused(reply) == (400, "invalid"), path
            assert words in reply.json()["error"]["message"]


async def test_a_tag_is_found_in_a_compressed_body_wherever_it_is(site: Running, tmp_path: Path) -> None:
    alice = await site.with_role("researcher")
    async with replying(tmp_path / "a" / "s", b'"a"'), replying(tmp_path / "b" / "s", b'"b"'):
        jobs = [await serve(site, name, path=tmp_path / name / "s") for name in ("a", "b")]
        for job, name in zip(jobs, ("a", "b"), strict=True):
            # Across the border of two pieces that are unpacked one after the other.
            content = bytes((1 << 20) - 10) + f"session_1.{tag_of(job)}:train:0".encode() + bytes(100)
            headers = {"content-encoding": "zstd"}
            reply = await alice.post("/api/v1/forward_backward", content=zstd.compress(content), headers=headers)
            assert (reply.status_code, reply.text) == (200, f'"{name}"')


async def test_the_tokenizer_of_each_base_model_comes_from_its_server(site: Running, tmp_path: Path) -> None:
    viewer = await site.with_role("viewer")
    path = "/hf/%s/resolve/main/tokenizer.json"
    async with replying(tmp_path / "a" / "s", b"aa") as at_a, replying(tmp_path / "b" / "s", b"b"):
        for name in ("a", "b"):
            await serve(site, name, path=tmp_path / name / "s")
        assert [(await viewer.get(path % name)).content for name in ("a", "b")] == [b"aa", b"b"]
        head = await viewer.head(path % "a")
        assert (head.status_code, head.headers["content-length"], head.content) == (200, "2", b"")
        assert at_a == [b"GET %s HTTP/1.1" % (path % "a").encode(), b"HEAD %s HTTP/1.1" % (path % "a").encode()]
    anybody = await site.client()
    assert refused(await anybody.get(path % "a")) == (401, "unauthenticated")


@pytest.mark.parametrize("state", ["asleep", "unreachable"])
@pytest.mark.parametrize("ready", ["a", "b"])
async def test_a_tokenizer_comes_from_the_server_that_is_ready(
    site: Running, tmp_path: Path, state: str, ready: str
) -> None:
    viewer = await site.with_role("viewer")
    async with replying(tmp_path / "s", b"tokens"):
        for name in ("a", "b"):
            job = await serve(site, name, path=tmp_path / "s" if name == ready else NOBODY, also=["shared"])
            if name != ready and state == "asleep":
                await site.hub.context.fleet.jobs.cancel(job, f"{ASLEEP}no request for 60 s", "hub")
        reply = await viewer.get("/hf/shared/resolve/main/tokenizer.json")
    assert (reply.status_code, reply.content) == (200, b"tokens")


async def test_a_file_is_not_missing_while_a_server_that_may_have_it_is_not_reached(
    site: Running, tmp_path: Path
) -> None:
    viewer = await site.with_role("viewer")
    async with replying(tmp_path / "s", b"not here", b"404 Not Found"):
        await serve(site, "a", path=tmp_path / "s", also=["shared"])
        path = "/hf/shared/resolve/main/tokenizer.json"
        assert (await viewer.get(path)).status_code == 404
        await serve(site, "b", also=["shared"])
        assert refused(await viewer.get(path)) == (503, "unavailable")


async def test_no_server_has_a_tokenizer_of_another_model(site: Running) -> None:
    viewer = await site.with_role("viewer")
    assert refused(await viewer.get("/hf/lab/x/resolve/main/tokenizer.json")) == (404, "not_found")


@pytest.mark.parametrize("idle_s", [0.1, 9.9])
async def test_a_server_that_would_sleep_before_it_is_up_is_refused(site: Running, idle_s: float) -> None:
    olga = await site.with_role("operator")
    single = {
        "spec": {"kind": "server", "model": "tiny", "trainer": "t", "idle_s": idle_s},
        "trainer": {"name": "t", "command": ["t"], "directory": "/srv/t"},
    }
    reply = await olga.post("/v1/jobs", json=single)
    assert (refused(reply), "a server sleeps after 10 s or more" in reply.text) == ((400, "invalid"), True)
    with pytest.raises(StrataError, match="a server sleeps after 10 s or more"):
        manifest_body(f"{MANIFEST}\nidle_s = {idle_s}")


IDLE = JobSpec(kind="server", model="tiny", trainer="t", idle_s=10.0)


async def heartbeat(host: HostClient, lease: LeaseGiven) -> LeaseVerdict:
    held = {"leases": [{"job_id": lease.job_id, "epoch": lease.epoch}]}
    (verdict,) = ok(await host.http.post("/v1/heartbeats", json=held), HeartbeatsReply).verdicts
    return verdict


async def test_the_order_to_sleep_is_for_one_attempt_and_not_for_the_one_that_a_request_wakes(site: Running) -> None:
    host, lease = await published(site, IDLE)
    fleet = site.hub.context.fleet
    await fleet.servers.choose_to_end()
    order = await heartbeat(host, lease)
    assert order.yield_as == "cancelled"
    ended = {"epoch": lease.epoch, "cause": "cancelled", "error": order.reason}
    ok(await host.http.post(f"/v1/job/{lease.job_id}/fail", json=ended), Job)
    assert (await row(site, lease.job_id)).state == "asleep"
    await fleet.jobs.wake_server(lease.job_id, "hub", OPERATOR)
    (again,) = await host.claim("c-again")
    assert (again.epoch, (await heartbeat(host, again)).yield_as) == (2, "")


async def test_a_request_keeps_a_server_awake_whose_host_has_not_been_told_to_end_it(site: Running) -> None:
    host, lease = await published(site, IDLE)
    await site.hub.context.fleet.servers.choose_to_end()
    alice = await site.with_role("researcher")
    assert refused(await alice.get("/api/v1/status")) == (503, "unavailable"), "nobody listens there"
    assert (await heartbeat(host, lease)).yield_as == ""


async def test_a_server_that_falls_asleep_again_before_it_serves_is_woken_again(site: Running) -> None:
    job = await sleeping(site)
    waiting = asyncio.create_task((await site.with_role("researcher")).get("/api/v1/status"))
    try:
        await until_pending(site, job, waiting)
        await site.hub.context.fleet.jobs.cancel(job, f"{ASLEEP}no request for 60 s", "hub")
        await until_pending(site, job, waiting)
    finally:
        waiting.cancel()
        await asyncio.wait([waiting])


async def until_queued(site: Running, client: httpx.AsyncClient, job: str) -> None:
    waiting = asyncio.create_task(client.get("/api/v1/status"))
    try:
        await until_pending(site, job, waiting)
    finally:
        waiting.cancel()
        await asyncio.wait([waiting])


async def until_pending(site: Running, job: str, waiting: asyncio.Task[httpx.Response]) -> None:
    async with asyncio.timeout(10.0):
        while (await row(site, job)).job.status != "pending":
            assert not waiting.done(), waiting.result().text
            await asyncio.sleep(0.02)
