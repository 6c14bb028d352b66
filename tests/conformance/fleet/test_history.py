"""What happened, for people: events newest first, losses and returns of hosts, and what goodput is computed from."""

from __future__ import annotations

from collections.abc import Sequence

from strata.database.events import NEWEST, EventFilter
from strata.fleet.core.job import Cause
from strata.fleet.core.plan import ApplyPlan
from strata.fleet.core.samples import FLEET, SamplePoint
from strata.fleet.ports import Store
from strata.fleet.records import JobCompletion, JobFailure, Renewal
from tests.conformance.fleet.fleet import LEASE_S, add, add_host, claim, hold, job, kinds, marker
from tests.support.feed import told_before


async def settle(store: Store) -> None:
    """Until all that was written is told."""
    await told_before(await marker(store), store.events.read)


async def newest(store: Store, limit: int = 3, **wanted: str | Sequence[str]) -> list[tuple[str, str]]:
    """Kind and subject of all events that match, newest first, page by page."""
    seen: list[tuple[str, str]] = []
    before = NEWEST
    while before:
        page = await store.events.read_before(before, limit, EventFilter(**wanted))  # type: ignore[arg-type]
        assert len(page.events) <= limit
        seen += [(each.event.kind, each.event.subject) for each in page.events]
        before = page.before
    return seen


async def test_events_are_read_backwards_by_kind_subject_and_text(store: Store) -> None:
    ids = await add(store, *(job("m", seed=n) for n in range(4)))
    await add_host(store)
    for lease in await claim(store, count=4):
        await store.leases.complete(hold(lease), JobCompletion(), 1.0)
    await store.hosts.set_state("host_a", "paused", "new Fans", "key:alice", 2.0)
    await settle(store)
    told = [(each.event.kind, each.event.subject) for each in await store.events.read("", 1000)]
    assert await newest(store) == told[::-1]
    assert await newest(store, 2, kinds=("job.completed",)) == [each for each in told[::-1] if "completed" in each[0]]
    assert await newest(store, kinds=("host.paused",)) == [("host.paused", "host_a")]
    both = await newest(store, 2, kinds=("job.cl*", "manifest.*", "job.created"))
    assert both == [each for each in told[::-1] if each[0] in ("job.claimed", "job.created", "manifest.applied")]
    assert await newest(store, subject=ids[0]) == [each for each in told[::-1] if each[1] == ids[0]]
    assert await newest(store, subject=ids[0], kinds=("job.claimed",)) == [("job.claimed", ids[0])]
    assert await newest(store, search="NEW fans") == [("host.paused", "host_a")]
    assert await newest(store, search="alice") == [("host.paused", "host_a")]
    assert await newest(store, search="alice", kinds=("job.*",)) == []
    assert await newest(store, kinds=("no.such",)) == []


async def test_events_go_when_they_are_old(store: Store) -> None:
    await add(store, *(job("m", seed=n) for n in range(3)), now_s=10.0)
    await add(store, job("later"), now_s=100.0)
    await settle(store)
    assert await store.events.drop(50.0, 2) == 2
    assert await store.events.drop(50.0, 2) == 2
    assert await store.events.drop(50.0, 2) == 0
    assert {each.event.at_s for each in await store.events.read("", 100)} == {100.0, 0.0}
    assert [kind for kind, _ in await newest(store, kinds=("job.created",))] == ["job.created"]


async def test_a_silent_host_is_lost_once_and_returns_once(store: Store) -> None:
    await add_host(store)
    await add_host(store, "host_b")
    await store.hosts.record_heartbeats({"host_b": 100.0})
    assert await store.hosts.record_lost(50.0, 120.0) == 1
    assert await store.hosts.record_lost(50.0, 121.0) == 0
    await store.hosts.record_heartbeats({"host_a": 130.0, "host_b": 130.0})
    await store.hosts.record_heartbeats({"host_a": 140.0})
    await store.hosts.set_state("host_b", "left", "", "operator", 150.0)
    assert await store.hosts.record_lost(138.0, 200.0) == 0, "one that has left is not lost"
    assert await kinds(store, "host_a") == ["host.registered", "host.lost", "host.returned"]
    lost, returned = [each.event for each in await store.events.read("", 100, subject="host_a")][1:]
    assert (lost.at_s, lost.body, returned.body) == (120.0, {"seen_at_s": 0.0}, {"silent_s": 130.0})


async def test_an_attempt_that_another_host_replaces_is_lost(store: Store) -> None:
    (job_id,) = await add(store, job("m"))
    await add_host(store)
    await claim(store)
    await store.hosts.record_heartbeats({"host_a": 7.0})
    await store.leases.expire(100.0)
    await add_host(store, "host_b", now_s=100.0)
    await claim(store, "host_b", claim_id="c2", now_s=110.0)
    told = await kinds(store, job_id)
    assert told[:3] == ["job.created", "job.claimed", "job.expired"]
    assert sorted(told[3:]) == ["job.claimed", "job.lost"]
    expired = (await store.events.read("", 100, subject=job_id))[2].event.body
    assert (expired["epoch"], expired["seen_at_s"]) == (1, 7.0)


async def test_goodput_is_computed_from_the_attempts_and_events_of_a_window(store: Store) -> None:
    ids = await add(store, job("a"), job("b"), job("c", project="default", seed=1), now_s=0.0)
    await add_host(store)
    first, second, third = await claim(store, count=3, now_s=10.0)
    running = [Renewal(job_id=each.job_id, epoch=1, running=True) for each in (first, second, third)]
    await store.leases.renew("host_a", running, LEASE_S, 20.0)
    await store.leases.complete(hold(first), JobCompletion(facts={"ran_s": 25.5}), 50.0)
    await store.leases.record_checkpoint(hold(second), "artifact1_" + "a" * 64, 60.0)
    await store.leases.fail(hold(third), JobFailure(cause=Cause.USER_ERROR, facts={"ran_s": "?"}), 500.0, chance=0.0)
    await settle(store)
    ledger = await store.statistics.ledger(100.0, "", 100)
    assert ledger.whole
    assert ledger.jobs.keys() == {second.job_id, third.job_id}, "the first one ended before"
    times = dict(ledger.attempts)
    assert (times[third.job_id].ended_at_s, times[third.job_id].ran_s) == (500.0, None)
    assert times[second.job_id].started_at_s == 20.0
    assert [(job_id, event.kind) for job_id, event in ledger.events] == []
    whole = await store.statistics.ledger(0.0, "default", 100)
    assert whole.jobs.keys() == set(ids)
    assert dict(whole.attempts)[first.job_id].ran_s == 25.5
    assert [(job_id, event.kind, event.epoch) for job_id, event in whole.events] == [
        (second.job_id, "job.checkpointed", 1)
    ]
    assert not (await store.statistics.ledger(0.0, "", 1)).whole
    assert not (await store.statistics.ledger(0.0, "other", 100)).jobs


async def test_the_classes_that_wait_are_counted(store: Store) -> None:
    assert await store.statistics.waiting_classes() == []
    first, *_ = await add(store, *(job("m", seed=n) for n in range(3)), now_s=5.0)
    await add(store, job("m", seed=9), now_s=8.0)
    ((_, jobs, since_s, first_job),) = await store.statistics.waiting_classes()
    assert (jobs, since_s, first_job) == (4, 5.0, first)
    vision = job("m", project="vision")
    await store.plans.apply(ApplyPlan(project="vision", new={vision.id: vision}), "k", 9.0, source="m")
    ((_, jobs, since_s, first_job),) = await store.statistics.waiting_classes("vision")
    assert (jobs, since_s, first_job) == (1, 9.0, vision.id)
    assert await store.statistics.waiting_classes("other") == []


async def test_figures_of_the_fleet_are_kept_like_samples_of_a_host(store: Store) -> None:
    points = [SamplePoint(FLEET, float(at_s), {"running": float(at_s)}) for at_s in (10, 20)]
    await store.samples.record(points)
    await store.samples.roll_up(200.0)
    assert await store.samples.read(FLEET, 60, 0.0) == [SamplePoint(FLEET, 0.0, {"running": 15.0})]
