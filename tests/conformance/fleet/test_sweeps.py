"""Sweeps as their jobs show them, and the jobs of many hosts in one read: the same in both databases."""

from __future__ import annotations

from strata.fleet.core.job import JobStatus
from strata.fleet.ports import Store
from strata.fleet.records import JobCompletion, JobFilter
from tests.conformance.fleet.fleet import LEASE_S, add, add_host, claim, hold, job, needs


async def test_a_sweep_is_counted_by_status_and_project(store: Store) -> None:
    await add_host(store)
    one = await add(store, *(job("m", sweep="lr", hyper={"lr": value}) for value in (0.1, 0.2, 0.3)), now_s=5.0)
    await add(store, job("m", sweep="lr", project="other"), job("m", hyper={"lr": 9}))
    (lease,) = await claim(store, classes=None, now_s=6.0)
    await store.leases.complete(hold(lease), JobCompletion(metrics={"loss": 0.5}), 7.0)
    await store.jobs.cancel(next(id_ for id_ in one if id_ != lease.job_id), "no more", "operator", 8.0)
    first, second = await store.jobs.sweeps()
    assert (first.project, first.name, first.changed_at_s) == ("default", "lr", 8.0)
    assert dict(first.by_status) == {"completed": 1, "cancelled": 1, "pending": 1}
    assert (second.project, dict(second.by_status)) == ("other", {"pending": 1})


async def test_trials_come_in_their_order_with_the_metrics_of_the_last_result(store: Store) -> None:
    await add_host(store)
    ids = await add(store, *(job("m", sweep="lr", hyper={"lr": value}) for value in (0.3, 0.1, 0.2)))
    (lease,) = await claim(store)
    await store.leases.complete(
        hold(lease), JobCompletion(metrics={"loss": 0.5}, facts={"metrics": "mine", "n": 1}), 1.0
    )
    await store.jobs.requeue(lease.job_id, "operator", 2.0)
    (again,) = [each for each in await claim(store, claim_id="c2", count=3, now_s=3.0) if each.job_id == lease.job_id]
    await store.leases.complete(hold(again), JobCompletion(metrics={"loss": 0.25, "steps": 3}), 4.0)
    trials = await store.jobs.trials("default", "lr")
    assert [each.job_id for each in trials] == ids
    completed = {each.job_id: dict(each.metrics) for each in trials if each.status is JobStatus.COMPLETED}
    assert completed == {lease.job_id: {"loss": 0.25, "steps": 3.0}}
    assert await store.jobs.trials("other", "lr") == []
    chosen = await store.jobs.select(JobFilter(ids=ids[:2], sweep="lr"))
    assert {each.id for each in chosen} == set(ids[:2])


async def test_an_archived_trial_is_not_counted(store: Store) -> None:
    (job_id,) = await add(store, job("m", sweep="lr"))
    await store.jobs.cancel(job_id, "", "operator", 1.0)
    await store.jobs.archive(job_id, "operator", 2.0)
    assert await store.jobs.sweeps() == []
    assert await store.jobs.trials("default", "lr") == []


async def test_the_jobs_of_many_hosts_come_in_one_read(store: Store) -> None:
    for host in ("host_a", "host_b", "host_c"):
        await add_host(store, host)
    await add(store, *(job("m", name=f"job-{number}", seed=number, needs=needs(min_cores=1)) for number in range(4)))
    first = await claim(store, "host_a", count=2, now_s=1.0)
    (other,) = await claim(store, "host_b", claim_id="c2", now_s=2.0)
    (ended,) = await claim(store, "host_c", claim_id="c3", now_s=2.0)
    await store.leases.complete(hold(ended), JobCompletion(), 3.0)
    held = await store.hosts.jobs_on(["host_a", "host_b", "host_c"])
    assert {host: {each.job_id for each in jobs} for host, jobs in held.items()} == {
        "host_a": {each.job_id for each in first},
        "host_b": {other.job_id},
    }
    (shown,) = held["host_b"]
    assert (shown.label, shown.status, shown.epoch, shown.claimed_at_s) == (
        other.spec.label,
        JobStatus.CLAIMED,
        other.epoch,
        2.0,
    )
    assert shown.taken.cores == 1
    assert not shown.serving
    assert await store.hosts.jobs_on(["host_c"]) == {}
    await store.leases.expire(2.0 + LEASE_S)
    assert await store.hosts.jobs_on(["host_a", "host_b"]) == {}


async def test_a_server_that_serves_is_told_from_a_job(store: Store) -> None:
    await add_host(store)
    await add(store, job("m", kind="server"))
    (lease,) = await claim(store)
    (before,) = (await store.hosts.jobs_on(["host_a"]))["host_a"]
    await store.jobs.publish_server(hold(lease), "unix:/run/s", ["m"], 1.0)
    (after,) = (await store.hosts.jobs_on(["host_a"]))["host_a"]
    assert (before.serving, after.serving) == (False, True)


async def test_a_host_is_found_by_id_or_name_and_jobs_that_wait_by_class(store: Store) -> None:
    await add_host(store, "host_a")
    await add_host(store, "host_b")
    assert [each.id for each in await store.hosts.find("host_a")] == ["host_a"]
    assert [each.id for each in await store.hosts.find("host-b")] == ["host_b"]
    assert await store.hosts.find("host") == []
    await add(store, job("m", seed=1), job("m", seed=2), job("n"))
    assert sorted(each.jobs for each in await store.statistics.waiting_classes()) == [1, 2]
