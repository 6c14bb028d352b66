"""Servers that are jobs: where they serve is of one attempt, and ends with its lease."""

from __future__ import annotations

from strata.base.errors import Code
from strata.fleet.ports import ASLEEP, AttemptKey, JobLease, ServerRow, Store
from tests.conformance.fleet.fleet import LEASE_S, add, add_host, claim, hold, job, kinds, refusal

ADDRESS = "unix:/srv/servers/a/run/api"
MODELS = ("tiny", "lab/tiny")


async def served(store: Store, **fields: float) -> JobLease:
    await add_host(store)
    await add(store, job("tiny", kind="server", **fields))
    (lease,) = await claim(store)
    await store.publish_server(hold(lease), ADDRESS, MODELS, 5.0)
    return lease


async def only(store: Store) -> ServerRow:
    (server,) = await store.servers()
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
    await store.expire_leases(LEASE_S + 1)
    assert (await only(store)).state == ""
    (later,) = await claim(store, "host_b", now_s=LEASE_S + 2)
    refused = await refusal(store.publish_server(hold(lease), "unix:/srv/servers/zombie", MODELS, 60.0))
    assert refused.code is Code.STALE
    assert (await only(store)).state == "", "the address is of the attempt before"
    await store.publish_server(hold(later), "unix:/srv/servers/b/run/api", MODELS, 61.0)
    server = await only(store)
    assert (server.state, server.address) == ("serving", "unix:/srv/servers/b/run/api")


async def test_another_host_cannot_publish_for_it(store: Store) -> None:
    lease = await served(store)
    other = AttemptKey("host_b", lease.job_id, lease.epoch)
    assert (await refusal(store.publish_server(other, "unix:/elsewhere", MODELS, 6.0))).code is Code.STALE
    assert (await only(store)).address == ADDRESS


async def test_a_server_that_is_cancelled_serves_no_more_and_may_be_asleep(store: Store) -> None:
    lease = await served(store)
    await store.cancel(lease.job_id, "not needed", "operator", 7.0)
    assert (await only(store)).state == ""
    await store.requeue(lease.job_id, "operator", 8.0)
    (again,) = await claim(store, claim_id="c2", now_s=9.0)
    await store.publish_server(hold(again), ADDRESS, MODELS, 10.0)
    await store.cancel(lease.job_id, f"{ASLEEP}no request for 60 s", "hub", 80.0)
    assert (await only(store)).state == "asleep"


async def test_a_person_ends_a_server_that_is_asleep(store: Store) -> None:
    lease = await served(store)
    await store.cancel(lease.job_id, f"{ASLEEP}no request for 60 s", "hub", 80.0)
    ended = await store.cancel(lease.job_id, "not needed", "operator", 90.0)
    assert (ended.reason, ended.changed_at_s, (await only(store)).state) == ("not needed", 90.0, "")
    again = await store.cancel(lease.job_id, f"{ASLEEP}no request for 60 s", "hub", 100.0)
    assert (again.reason, (await kinds(store, lease.job_id)).count("job.cancelled")) == ("not needed", 2)


async def test_a_server_that_was_used_meanwhile_is_not_put_to_sleep(store: Store) -> None:
    lease = await served(store)
    await store.touch_server(lease.job_id, 50.0)
    kept = await store.cancel(lease.job_id, f"{ASLEEP}no request", "hub", 60.0, unused_since_s=5.0)
    assert (kept.status, (await only(store)).state) == ("claimed", "serving")
    await store.cancel(lease.job_id, f"{ASLEEP}no request", "hub", 60.0, unused_since_s=50.0)
    assert (await only(store)).state == "asleep"


async def test_the_last_request_is_kept(store: Store) -> None:
    lease = await served(store, idle_s=60.0)
    await store.touch_server(lease.job_id, 50.0)
    await store.touch_server(lease.job_id, 20.0)
    server = await only(store)
    assert (server.used_at_s, server.job.spec.idle_s) == (50.0, 60.0)
