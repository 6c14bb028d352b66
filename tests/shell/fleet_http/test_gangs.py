"""Gangs at the hub: who is told where the coordinator is, and who gets tokens for it, and for how long."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import httpx
import pytest

from strata.base.digest import sha256_hex
from strata.base.errors import Code, StrataError
from strata.base.secret import Secret
from strata.coord.server.tokens import Claims, TokenRole, Tokens
from strata.fleet.core.jobspec import GangPlace, JobSpec, coordinator_job, gang_members
from strata.fleet.wire.artifacts import CommitReply
from strata.fleet.wire.jobs import JobsReply
from strata.fleet.wire.leases import HeartbeatsReply, LeaseGiven, LeaseVerdict, PartsReply
from strata.fleet.wire.manifests import ManifestReply
from strata.hub.settings import GangCoordinatorSettings
from tests.core.fleet.jobs import TRAINER
from tests.shell.fleet_http.running import HostClient, Running, manifest_body, ok, refused, running

SECRET: Final = "s" * 32
GANG: Final = gang_members(JobSpec(model="m", gang=GangPlace(name="sft", size=2, index=0, min_size=1)))
MANIFEST: Final = TRAINER + '[[jobs]]\nname = "sft"\nmodel = "m"\nworkers = 2\n'


@pytest.fixture
async def gangs(tmp_path: Path) -> AsyncIterator[Running]:
    """A hub with a coordinator, which nobody has to run for this."""
    (tmp_path / "ca.pem").write_text("the authority")
    coordinator = GangCoordinatorSettings(
        address="10.0.0.9:7070",
        token_secret=Secret(SECRET),
        ca=tmp_path / "ca.pem",
        token_s=300.0,
        checkpoint_root="/shared",
    )
    async with running(tmp_path / "hub", coordinator=coordinator) as site:
        yield site


async def member(site: Running, name: str = "a") -> tuple[HostClient, LeaseGiven]:
    host = await site.host(name)
    await site.hub.context.fleet.claims.plan_reservations()
    (lease,) = await host.claim(f"c-{name}")
    return host, lease


def claims(site: Running, token: str, later_s: float = 0.0) -> Claims:
    return Tokens(Secret(SECRET)).read(token, site.hub.context.clock.wall_s() + later_s)


async def renew(host: HostClient, lease: LeaseGiven, **held: object) -> LeaseVerdict:
    body = {"leases": [{"job_id": lease.job_id, "epoch": lease.epoch, **held}]}
    (verdict,) = ok(await host.http.post("/v1/heartbeats", json=body), HeartbeatsReply).verdicts
    return verdict


async def test_a_member_is_told_where_the_coordinator_is_and_gets_a_token_for_its_run_alone(gangs: Running) -> None:
    await gangs.add(*GANG)
    host, lease = await member(gangs)
    assert lease.gang is not None
    assert (lease.gang.coordinator, lease.gang.job) == ("10.0.0.9:7070", coordinator_job(GANG[0]))
    assert (lease.gang.ca_pem, lease.gang.checkpoint_root, lease.gang.token_s) == ("the authority", "/shared", 300.0)
    read = claims(gangs, lease.gang.token)
    assert (read.job, read.role, read.renew_until_s) == (lease.gang.job, TokenRole.WORKER, 0)
    assert read.id == f"{lease.job_id}:{lease.epoch}@{host.id}"
    with pytest.raises(StrataError) as expired:
        claims(gangs, lease.gang.token, later_s=301.0)
    assert expired.value.code is Code.UNAUTHENTICATED


async def test_a_job_that_trains_alone_gets_no_token(gangs: Running) -> None:
    await gangs.add(JobSpec(model="m"))
    host, lease = await member(gangs)
    assert lease.gang is None
    assert (await renew(host, lease, renew_token=True)).token == ""


async def test_a_heartbeat_renews_the_token_of_the_host_that_holds_the_lease(gangs: Running) -> None:
    await gangs.add(*GANG)
    host, lease = await member(gangs)
    assert lease.gang is not None
    assert (await renew(host, lease)).token == ""
    renewed = await renew(host, lease, renew_token=True)
    assert claims(gangs, renewed.token).id == claims(gangs, lease.gang.token).id

    other = await gangs.host("b")
    verdict = await renew(other, lease, renew_token=True)
    assert (verdict.verdict, verdict.token) == ("stop", "")
    await gangs.hub.context.fleet.jobs.cancel(lease.job_id, "", "test")
    verdict = await renew(host, lease, renew_token=True)
    assert (verdict.verdict, verdict.cause, verdict.token) == ("stop", "ended", "")


async def test_people_see_neither_token_nor_secret(gangs: Running) -> None:
    operator = await gangs.operator()
    ok(await operator.post("/v1/manifest", json=manifest_body(MANIFEST)), ManifestReply)
    _, lease = await member(gangs)
    assert lease.gang is not None
    for path in ("/v1/jobs", f"/v1/job/{lease.job_id}", "/v1/events"):
        text = (await operator.get(path)).text
        assert "strata1." not in text
        assert SECRET not in text


async def upload(host: HostClient, lease: LeaseGiven, **files: bytes) -> str:
    """A checkpoint of this attempt with these files."""
    for content in files.values():
        query = {"size": len(content)}
        assert (await host.http.put(f"/v1/chunk/{sha256_hex(content)}", params=query, content=content)).is_success
    listed = [
        {"path": name, "size": len(content), "sha256": sha256_hex(content), "chunks": [sha256_hex(content)]}
        for name, content in sorted(files.items())
    ]
    body = {"manifest": {"files": listed}, "lineage": {"kind": "checkpoint"}}
    body |= {"job_id": lease.job_id, "epoch": lease.epoch}
    return ok(await host.http.post("/v1/artifacts", json=body), CommitReply).artifact_id


async def find(host: HostClient, lease: LeaseGiven, **parts: bytes) -> httpx.Response:
    body = {"epoch": lease.epoch, "parts": {name: f"sha256:{sha256_hex(content)}" for name, content in parts.items()}}
    return await host.http.post(f"/v1/job/{lease.job_id}/parts", json=body)


async def test_a_member_reads_the_parts_of_a_checkpoint_that_the_others_uploaded(gangs: Running) -> None:
    await gangs.add(*GANG)
    anna = await gangs.host("anna")
    bert = await gangs.host("bert")
    ((own,), (other,)) = [await host.claim(f"c-{host.id}", wait_s=30) for host in (anna, bert)]
    await upload(anna, own, a=b"old-a")
    await upload(bert, other, b=b"old-b")
    later = await upload(anna, own, a=b"new-a")
    found = ok(await find(anna, own, a=b"new-a", b=b"new-b"), PartsReply)
    assert found.artifacts == (), "bert has not uploaded his"
    earlier = ok(await find(anna, own, a=b"old-a", b=b"old-b"), PartsReply)
    assert len(earlier.artifacts) == 2
    newest = await upload(bert, other, b=b"new-b")
    found = ok(await find(anna, own, a=b"new-a", b=b"new-b"), PartsReply)
    assert sorted(found.artifacts) == sorted([later, newest])
    assert (await anna.http.get(f"/v1/chunk/{sha256_hex(b'new-b')}")).content == b"new-b"


async def test_the_hub_finds_parts_by_their_digests_and_never_by_their_names(gangs: Running) -> None:
    await gangs.add(*GANG)
    host, lease = await member(gangs)
    right = await upload(host, lease, a=b"new-a", b=b"new-b")
    await upload(host, lease, a=b"new-a", b=b"old-b")
    found = ok(await find(host, lease, a=b"new-a", b=b"new-b"), PartsReply)
    assert found.artifacts == (right,), "a file of the other one would take the place of a part"
    for digest in ("crc32:1", ""):
        body = {"epoch": lease.epoch, "parts": {"a": digest}}
        named = ok(await host.http.post(f"/v1/job/{lease.job_id}/parts", json=body), PartsReply)
        assert named.artifacts == ()


async def test_who_holds_no_lease_of_the_gang_reads_none_of_its_parts(gangs: Running) -> None:
    await gangs.add(*GANG)
    host, lease = await member(gangs)
    await upload(host, lease, a=b"part")
    stranger = await gangs.host("stranger")
    assert refused(await find(stranger, lease, a=b"part"))[1] == Code.STALE.value
    assert refused(await stranger.http.get(f"/v1/chunk/{sha256_hex(b'part')}")) == (403, "forbidden")
    await gangs.hub.context.fleet.jobs.cancel(lease.job_id, "", "test")
    assert refused(await find(host, lease, a=b"part"))[1] == Code.STALE.value


async def test_a_hub_without_a_coordinator_refuses_gangs(site: Running) -> None:
    operator = await site.operator()
    for body in (manifest_body(MANIFEST), manifest_body(MANIFEST, dry_run=True)):
        reply = await operator.post("/v1/manifest", json=body)
        assert refused(reply)[1] == Code.UNSUPPORTED.value
        assert "sft is a gang, and this hub has no coordinator for gangs" in reply.text
    assert ok(await operator.get("/v1/jobs"), JobsReply).jobs == ()


async def test_a_member_cannot_be_submitted_without_its_gang(gangs: Running) -> None:
    operator = await gangs.operator()
    body = {"spec": {"model": "m", "gang": {"name": "g", "size": 2, "index": 0, "min_size": 1}}}
    assert refused(await operator.post("/v1/jobs", json=body)) == (400, "invalid")


def test_workers_reach_a_coordinator_elsewhere_with_tls_and_tokens_or_not_at_all(tmp_path: Path) -> None:
    GangCoordinatorSettings(address="127.0.0.1:7070")
    for given in ({}, {"token_secret": Secret(SECRET)}, {"ca": tmp_path}):
        with pytest.raises(StrataError, match="in the clear, or without tokens"):
            GangCoordinatorSettings(address="127.0.0.1:7070, 10.0.0.9:7070", **given)
