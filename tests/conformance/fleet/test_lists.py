"""Lists of jobs and hosts for people: searched, a page at a time, with counts that are kept."""

from __future__ import annotations

from dataclasses import replace

import pytest

from strata.base.errors import Code
from strata.fleet.core.job import Cause, JobStatus
from strata.fleet.core.ownership import Submitter
from strata.fleet.core.plan import ApplyPlan
from strata.fleet.ports import Store
from strata.fleet.records import JobCompletion, JobFailure, JobFilter, Renewal
from tests.conformance.fleet.fleet import LEASE_S, add, add_host, claim, hold, job, plan, refusal


async def found(store: Store, wanted: JobFilter) -> list[str]:
    return [row.spec.label for row in await store.jobs.select(wanted)]


async def pages(store: Store, wanted: JobFilter) -> list[str]:
    labels: list[str] = []
    while rows := await store.jobs.select(wanted):
        labels += [row.spec.label for row in rows]
        wanted = replace(wanted, after=wanted.cursor_of(rows[-1]))
    return labels


async def test_a_search_finds_a_job_by_any_of_its_names(store: Store) -> None:
    tree = job("tree", name="Nightly_tree", sweep="depths")
    (tree_id,) = await add(store, tree)
    alice = Submitter(owner="alice", operator=True)
    vision = job("net", project="vision")
    await store.plans.apply(ApplyPlan(project="vision", new={vision.id: vision}), "k", 1.0, source="m", submitter=alice)
    await add_host(store, "host_desk")
    await claim(store, "host_desk", now_s=2.0)
    searches = {
        "nightly": ["Nightly_tree"],
        "y_t": ["Nightly_tree"],
        "yXt": [],
        "%": [],
        "DEPTH": ["Nightly_tree"],
        "alice": ["net-default"],
        "vision": ["net-default"],
        tree_id[:12]: ["Nightly_tree"],
        tree_id.removeprefix("job1_")[:8]: ["Nightly_tree"],
        "desk": ["Nightly_tree"],
        "nothing": [],
    }
    for text, labels in searches.items():
        for order in ("id", "newest"):
            assert await found(store, JobFilter(search=text, order=order)) == labels, text
    assert await found(store, JobFilter(search="desk", status=(JobStatus.PENDING,))) == []


async def test_a_search_that_many_jobs_and_hosts_match_shows_the_newest(store: Store) -> None:
    await add(store, *(job("m", name=f"n{n:04}", seed=n) for n in range(1050)))
    for number in range(105):
        await add_host(store, f"host_desk{number:03}")
    (lease,) = await claim(store, "host_desk104", now_s=2.0)
    on_host = (await store.jobs.get(lease.job_id)).spec.label
    assert await found(store, JobFilter(search="n1", order="newest", limit=2)) == ["n1049", "n1048"]
    old = JobFilter(search="n00", order="newest", status=(JobStatus.PENDING,), limit=1000)
    expected = [f"n{n:04}" for n in reversed(range(100)) if f"n{n:04}" != on_host]
    assert await found(store, old) == expected
    assert await found(store, JobFilter(search="desk", order="newest")) == [on_host]
    assert await found(store, JobFilter(search="desk1", order="newest")) == [on_host]


@pytest.mark.parametrize("search", ["desk", "job", "m"])
async def test_pages_of_a_search_show_every_match_once_whichever_way_it_matches(store: Store, search: str) -> None:
    await add_host(store, "host_desk")
    # The oldest jobs match by their host, some of them by their name as well; the newest by their name alone.
    await add(store, *(job("m", name=f"{'desk' if n % 3 == 0 else 'old'}-{n}", seed=n) for n in range(30)))
    await claim(store, "host_desk", count=24, now_s=1.0)
    vision = [job("m", name=f"{'desk' if n % 4 else 'new'}-{n}", seed=n, project="vision") for n in range(30, 60)]
    await store.plans.apply(ApplyPlan(project="vision", new={spec.id: spec for spec in vision}), "k", 2.0, source="m")
    jobs = await store.jobs.select(JobFilter(order="newest", limit=1000))
    assert (len(jobs), [row.seq for row in jobs]) == (60, sorted((row.seq for row in jobs), reverse=True))
    matches = [
        row
        for row in jobs
        if search in (row.spec.label + row.spec.model + row.host_id) or row.id.startswith((search, f"job1_{search}"))
    ]
    for limit in (1, 3, 7, 9, 50):
        every = JobFilter(search=search, order="newest", limit=limit)
        assert await pages(store, every) == [row.spec.label for row in matches]
        for project in ("default", "vision"):
            of_project = [row.spec.label for row in matches if row.spec.project == project]
            assert await pages(store, replace(every, project=project)) == of_project
        for status in (JobStatus.PENDING, JobStatus.CLAIMED):
            of_status = [row.spec.label for row in matches if row.status is status]
            assert await pages(store, replace(every, status=(status,))) == of_status


async def test_pages_in_each_order_show_every_job_once(store: Store) -> None:
    await add(store, *(job("m", name=f"n{n}", seed=n) for n in range(7)))
    newest = [f"n{n}" for n in reversed(range(7))]
    assert await pages(store, JobFilter(order="newest", limit=3)) == newest
    assert sorted(await pages(store, JobFilter(limit=3))) == sorted(newest)
    await add_host(store)
    ended = []
    for n, lease in enumerate(await claim(store, count=4, now_s=1.0)):
        # Two of them at the same moment.
        await store.leases.complete(hold(lease), JobCompletion(), 10.0 + n // 2)
        ended.append(lease.spec.label)
    shown = await pages(store, JobFilter(order="ended", limit=1))
    assert sorted(shown) == sorted(ended)
    assert set(shown[:2]) == set(ended[2:]), "those that ended last come first"
    for wanted in (JobFilter(order="newest", after="x"), JobFilter(order="ended", after="x:1")):
        assert (await refusal(store.jobs.select(wanted))).code is Code.INVALID


async def test_counts_follow_every_change(store: Store) -> None:
    await add(store, *(job("m", seed=n) for n in range(6)))
    other = job("m", project="vision")
    await store.plans.apply(ApplyPlan(project="vision", new={other.id: other}), "operator", 0.0, source="m")

    async def check(**expected: int) -> None:
        for _ in range(2):
            assert dict((await store.statistics.counts()).by_status) == expected
            rows = await store.jobs.select(JobFilter(hidden=False, limit=100))
            assert len(rows) == sum(expected.values()), "as a list would show them"
            await store.statistics.compact_counts()
        assert dict((await store.statistics.counts("vision")).by_status) == {"pending": 1}
        assert dict((await store.statistics.counts("none")).by_status) == {}

    await check(pending=7)
    await add_host(store)
    classes = {each.id: each for each in await store.plans.classes()}
    assert classes
    leases = [lease for lease in await claim(store, count=5) if lease.spec.project == "default"]
    first, second, third, *rest = leases
    await store.leases.renew(
        "host_a", [Renewal(job_id=each.job_id, epoch=each.epoch, running=True) for each in leases], LEASE_S, 1
    )
    await check(pending=2, running=5)
    await store.leases.complete(hold(first), JobCompletion(), 2.0)
    await store.leases.fail(hold(second), JobFailure(cause=Cause.INFRA), 2.0, chance=0.5)
    await store.jobs.cancel(third.job_id, "", "operator", 2.0)
    await check(pending=3, running=2, completed=1, cancelled=1)
    await store.jobs.archive(first.job_id, "operator", 3.0)
    await check(pending=3, running=2, cancelled=1)
    await store.jobs.archive(first.job_id, "operator", 3.0)
    await store.jobs.requeue(first.job_id, "operator", 4.0)
    await check(pending=4, running=2, cancelled=1)
    superseding = plan(job("m", seed=99), superseded=(third.job_id, second.job_id))
    await store.plans.apply(superseding, "operator", 5.0, source="m")
    await check(pending=5, running=2)
    await store.leases.expire(1000.0)
    await check(pending=7)
    await store.jobs.cancel(second.job_id, "", "operator", 1001.0)
    await check(pending=6)
    assert len(rest) == 2
