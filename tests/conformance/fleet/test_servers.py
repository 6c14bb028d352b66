"""Servers that are jobs: where they serve is of one attempt, and ends with its lease."""

from __future__ import annotations

from strata.base.errors import Code
from strata.fleet.core.job import Cause
from strata.fleet.core.lease import ASLEEP
from strata.fleet.ports import Store
from strata.fleet.records import AttemptKey, JobFailure, JobFilter, JobLease, ServerRow
from tests.conformance.fleet.fleet import LEASE_S, add, add_host, claim, hold, job, kinds, refusal

ADDRESS = "unix:/srv/servers/a/run/api"
MODELS = ("tiny", "lab/tiny")


async def served(store: Store, **fields: float) -> JobLease:
    await add_host(store)
    await add(store, job("tiny", kind="server", **fields))
    (lease,) = await claim(store)
    await store.jobs.publish_server(hold(lease), ADDRESS, MODELS, 5.0)
    return lease


async def only(store: Store) -> ServerRow:
    (server,) = await store.jobs.servers()
    return server


async def test_a_server_serves_where_the_holder_of_its_lease_says(store: Store) -> None:
    lease = await served(store)
    server = await only(store)
    assert (server.job.id, server.epoch, server.address, server.models) == (lease.job_id, 1, ADDRESS, MODELS)
    assert (server.state, server.used_at_s) == ("serving", 5.0)
    assert (await kinds(store, lease.job_id))[-1] == "job.serving"


async def test_a_replaced_host_cannot_publish(store: Store) -> None:
    lease = await served(store)
    await add_host(store, "host_b")
    await store.leases.expire(LEASE_S + 1)
    assert (await only(store)).state == ""
    (later,) = await claim(store, "host_b", now_s=LEASE_S + 2)
    refused = await refusal(store.jobs.publish_server(hold(lease), "unix:/srv/servers/zombie", MODELS, 60.0))
    assert refused.code is Code.STALE
    assert (await only(store)).state == "", "the address is of the attempt before"
    await store.jobs.publish_server(hold(later), "unix:/srv/servers/b/run/api", MODELS, 61.0)
    server = await only(store)
    assert (server.state, server.address) == ("serving", "unix:/srv/servers/b/run/api")


async def test_another_host_cannot_publish_for_it(store: Store) -> None:
    lease = await served(store)
    other = AttemptKey("host_b", lease.job_id, lease.epoch)
    assert (await refusal(store.jobs.publish_server(other, "unix:/elsewhere", MODELS, 6.0))).code is Code.STALE
    assert (await only(store)).address == ADDRESS


async def test_a_server_that_is_cancelled_serves_no_more_and_may_be_asleep(store: Store) -> None:
    lease = await served(store)
    await store.jobs.cancel(lease.job_id, "not needed", "operator", 7.0)
    assert (await only(store)).state == ""
    await store.jobs.requeue(lease.job_id, "operator", 8.0)
    (again,) = await claim(store, claim_id="c2", now_s=9.0)
    await store.jobs.publish_server(hold(again), ADDRESS, MODELS, 10.0)
    await store.jobs.cancel(lease.job_id, f"{ASLEEP}no request for 60 s", "hub", 80.0)
    assert (await only(store)).state == "asleep"


async def test_a_person_ends_a_server_that_is_asleep(store: Store) -> None:
    lease = await served(store)
    await store.jobs.cancel(lease.job_id, f"{ASLEEP}no request for 60 s", "hub", 80.0)
    ended = await store.jobs.cancel(lease.job_id, "not needed", "operator", 90.0)
    assert (ended.reason, ended.changed_at_s, (await only(store)).state) == ("not needed", 90.0, "")
    again = await store.jobs.cancel(lease.job_id, f"{ASLEEP}no request for 60 s", "hub", 100.0)
    assert (again.reason, (await kinds(store, lease.job_id)).count("job.cancelled")) == ("not needed", 2)


async def test_a_host_puts_its_server_to_sleep_and_no_other_job(store: Store) -> None:
    lease = await served(store)
    reason = f"{ASLEEP}no request for 60 s; the next one wakes it"
    slept = await store.leases.fail(hold(lease), JobFailure(cause=Cause.CANCELLED, error=reason), 80.0, chance=0.5)
    assert (slept.status, slept.reason, (await only(store)).state) == ("cancelled", reason, "asleep")
    again = await store.leases.fail(hold(lease), JobFailure(cause=Cause.CANCELLED, error=reason), 81.0, chance=0.5)
    assert (again.reason, (await kinds(store, lease.job_id)).count("job.cancelled")) == (reason, 1), (
        "the reply was lost"
    )
    await store.jobs.requeue(lease.job_id, "hub", 90.0)
    (later,) = await claim(store, claim_id="c2", now_s=91.0)
    ended = await store.leases.fail(hold(later), JobFailure(cause=Cause.CANCELLED, error="by hand"), 92.0, chance=0.5)
    assert (ended.reason, (await only(store)).state) == ("the host reports it cancelled", "")


async def test_the_state_of_a_server_that_sleeps_is_what_it_wakes_with(store: Store) -> None:
    lease = await served(store)
    saved = "artifact1_" + "a" * 64
    await store.leases.record_checkpoint(hold(lease), saved, 70.0)
    await store.leases.fail(hold(lease), JobFailure(cause=Cause.CANCELLED, error=f"{ASLEEP}idle"), 80.0, chance=0.5)
    await store.jobs.requeue(lease.job_id, "hub", 90.0)
    await add_host(store, "host_b")
    (later,) = await claim(store, "host_b", claim_id="c2", now_s=91.0)
    assert (later.checkpoint, later.epoch, (await only(store)).epoch) == (saved, 2, 1), "1 has served last"
    zombie = await refusal(store.leases.record_checkpoint(hold(lease), "artifact1_" + "b" * 64, 92.0))
    assert zombie.code is Code.STALE


async def test_the_last_request_is_kept(store: Store) -> None:
    lease = await served(store, idle_s=60.0)
    await store.jobs.touch_server(lease.job_id, 50.0)
    await store.jobs.touch_server(lease.job_id, 20.0)
    server = await only(store)
    assert (server.used_at_s, server.job.spec.idle_s) == (50.0, 60.0)


async def test_a_list_of_servers_has_them_among_many_other_jobs(store: Store) -> None:
    await add(store, *(job("m", seed=n) for n in range(5)))
    named = job("m", seed=9, hyper={"kind": "server"})
    (server, alike) = await add(store, job("tiny", kind="server"), named)
    found = {row.id for row in await store.jobs.select(JobFilter(servers=True))}
    assert server in found
    assert found <= {server, alike}
