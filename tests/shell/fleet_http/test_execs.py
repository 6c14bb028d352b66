"""Commands in running jobs over HTTP: who may request them, and what a host may say about them."""

from __future__ import annotations

import httpx

from strata.fleet.core.jobspec import JobSpec
from strata.fleet.core.ownership import Submitter
from strata.fleet.core.plan import ApplyPlan
from strata.fleet.execs import MAX_OPEN, MAX_OUTPUT
from strata.fleet.wire.events import EventsReply
from strata.fleet.wire.execs import ExecGiven, ExecReply
from strata.fleet.wire.leases import HeartbeatsReply, LeaseGiven
from strata.fleet.wire.streams import PieceReply
from tests.shell.fleet_http.running import HostClient, Running, ok, refused


async def run_job(site: Running, host: HostClient, owner: str = "anna") -> LeaseGiven:
    spec = JobSpec(model=f"of-{owner}")
    submitter = Submitter(owner=owner, operator=False)
    plan = ApplyPlan(new={spec.id: spec})
    await site.hub.context.fleet.jobs.apply(plan, "test", source="test", declared=False, submitter=submitter)
    (lease,) = await host.claim()
    await heartbeat(host, lease)
    return lease


async def heartbeat(host: HostClient, lease: LeaseGiven) -> HeartbeatsReply:
    held = {"job_id": lease.job_id, "epoch": lease.epoch, "running": True}
    return ok(await host.http.post("/v1/heartbeats", json={"leases": [held]}), HeartbeatsReply)


async def request(client: httpx.AsyncClient, lease: LeaseGiven) -> str:
    """The path of the exec."""
    body = {"command": ["ls", "-l"], "timeout_s": 5}
    reply = ok(await client.post(f"/v1/job/{lease.job_id}/exec", json=body), ExecReply)
    return f"/v1/job/{lease.job_id}/exec/{reply.id}"


async def test_the_output_and_the_exit_status_reach_the_owner(site: Running) -> None:
    host = await site.host("vera")
    lease = await run_job(site, host)
    anna = await site.with_role("researcher", "anna")
    path = await request(anna, lease)
    (pending,) = (await heartbeat(host, lease)).execs
    assert f"/v1/job/{pending.job_id}/exec/{pending.id}" == path
    given = ok(await host.http.post(f"{path}/start", json={"run": "r1"}), ExecGiven)
    assert (given.command, given.timeout_s) == (("ls", "-l"), 5.0)
    piece = {"epoch": lease.epoch, "offset": 0}
    assert ok(await host.http.put(path, params=piece, content=b"total 0\n"), PieceReply).size == 8
    first = await anna.get(path, params={"wait_s": 5})
    assert (first.content, first.headers["x-strata-next"], first.headers["x-strata-ended"]) == (
        b"total 0\n",
        "8",
        "false",
    )
    assert (await host.http.post(f"{path}/end", json={"run": "r1", "status": 7})).status_code == 204
    last = await anna.get(path, params={"offset": 8, "wait_s": 5})
    assert (last.content, last.headers["x-strata-ended"], last.headers["x-strata-status"]) == (b"", "true", "7")
    await site.hub.context.execs.run_once()
    assert (await heartbeat(host, lease)).execs == ()
    events = ok(await anna.get("/v1/events", params={"subject": lease.job_id, "limit": 100}), EventsReply).events
    (asked,) = (each for each in events if each.kind == "job.exec_requested")
    assert asked.actor.startswith("key:")
    assert (asked.body["program"], asked.body["arguments"]) == ("ls", 1)
    assert "-l" not in str(asked.body), "everybody can read events"


async def test_another_researcher_gets_nothing_of_it(site: Running) -> None:
    host = await site.host("vera")
    lease = await run_job(site, host)
    path = await request(await site.with_role("researcher", "anna"), lease)
    ben = await site.with_role("researcher", "ben")
    body = {"command": ["id"]}
    assert refused(await ben.post(f"/v1/job/{lease.job_id}/exec", json=body))[1] == "forbidden"
    assert refused(await ben.get(path))[1] == "forbidden"
    assert refused(await ben.post(f"{path}/cancel"))[1] == "forbidden"
    operator = await site.with_role("operator")
    await request(operator, lease)
    assert (await operator.get(path)).status_code == 200


async def test_another_host_cannot_start_it_nor_write_for_it(site: Running) -> None:
    host, other = await site.host("vera"), await site.host("otto")
    lease = await run_job(site, host)
    path = await request(await site.operator(), lease)
    assert refused(await other.http.post(f"{path}/start", json={"run": "r1"}))[1] == "not_found"
    assert refused(await other.http.put(path, params={"epoch": 1, "offset": 0}, content=b"x"))[1] == "not_found"
    assert refused(await other.http.post(f"{path}/end", json={"run": "r1", "status": 0}))[1] == "not_found"


async def test_a_restarted_agent_does_not_run_it_again(site: Running) -> None:
    host = await site.host("vera")
    lease = await run_job(site, host)
    operator = await site.operator()
    path = await request(operator, lease)
    for _ in range(2):
        ok(await host.http.post(f"{path}/start", json={"run": "r1"}), ExecGiven)
    assert refused(await host.http.post(f"{path}/start", json={"run": "r2"}))[1] == "stale"
    ended = await operator.get(path)
    assert (ended.headers["x-strata-ended"], "restarted" in ended.headers["x-strata-reason"]) == ("true", True)
    assert refused(await host.http.put(path, params={"epoch": 1, "offset": 0}, content=b"x"))[1] == "stale"


async def test_a_cancelled_one_is_refused_to_its_host(site: Running) -> None:
    host = await site.host("vera")
    lease = await run_job(site, host)
    operator = await site.operator()
    path = await request(operator, lease)
    ok(await host.http.post(f"{path}/start", json={"run": "r1"}), ExecGiven)
    assert (await operator.post(f"{path}/cancel")).status_code == 204
    assert refused(await host.http.put(path, params={"epoch": 1, "offset": 0}, content=b"x"))[1] == "stale"
    assert (await operator.get(path)).headers["x-strata-reason"] == "it was cancelled"


async def test_one_for_a_lease_that_ended_is_refused(site: Running) -> None:
    host = await site.host("vera")
    lease = await run_job(site, host)
    operator = await site.operator()
    waiting, begun = await request(operator, lease), await request(operator, lease)
    ok(await host.http.post(f"{begun}/start", json={"run": "r1"}), ExecGiven)
    await operator.post(f"/v1/job/{lease.job_id}/cancel", json={})
    assert refused(await host.http.post(f"{waiting}/start", json={"run": "r1"}))[1] == "stale"
    assert refused(await host.http.put(begun, params={"epoch": 1, "offset": 0}, content=b"x"))[1] == "stale"
    assert refused(await operator.post(f"/v1/job/{lease.job_id}/exec", json={"command": ["id"]}))[1] == "precondition"
    await site.hub.context.execs.run_once()
    assert "lease" in (await operator.get(begun)).headers["x-strata-reason"]


async def test_a_host_cannot_flood_the_hub_with_output(site: Running) -> None:
    host = await site.host("vera")
    lease = await run_job(site, host)
    operator = await site.operator()
    path = await request(operator, lease)
    ok(await host.http.post(f"{path}/start", json={"run": "r1"}), ExecGiven)
    piece = b"x" * (MAX_OUTPUT // 2)
    for number in range(2):
        params = {"epoch": 1, "offset": number * len(piece)}
        ok(await host.http.put(path, params=params, content=piece), PieceReply)
    full = await host.http.put(path, params={"epoch": 1, "offset": MAX_OUTPUT}, content=b"y")
    assert refused(full)[1] == "exhausted"
    for _ in range(MAX_OPEN - 1):
        await request(operator, lease)
    assert refused(await operator.post(f"/v1/job/{lease.job_id}/exec", json={"command": ["id"]}))[1] == "exhausted"
