"""Claims, renewals, ends and expiry: what a host may rely on, and what a host that was replaced may not do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from strata.base.errors import Code
from strata.fleet.core.amounts import Amounts
from strata.fleet.core.job import Cause, JobStatus
from strata.fleet.core.plan import ApplyPlan, JobChange
from strata.fleet.ports import Store
from strata.fleet.records import AttemptKey, Claim, JobCompletion, JobFailure, Renewal
from tests.conformance.fleet.fleet import (
    LEASE_S,
    ROOMY,
    add,
    add_host,
    all_classes,
    claim,
    hold,
    job,
    kinds,
    needs,
    refusal,
)

DONE = JobCompletion(artifact="art1", metrics={"auc": 0.9})
BROKEN = JobFailure(cause=Cause.USER_ERROR, error="ValueError: no")


async def status_of(store: Store, job_id: str) -> JobStatus:
    return (await store.jobs.get(job_id)).status


async def test_the_best_priority_is_claimed_first_and_then_the_oldest(store: Store) -> None:
    await add_host(store)
    low, high, older = job("low"), job("high", priority=5), job("older", priority=5, seed=2)
    await add(store, older, low, high)
    got = await claim(store, count=3)
    assert [lease.spec.model for lease in got] == ["older", "high", "low"]
    assert [lease.epoch for lease in got] == [1, 1, 1]
    assert await claim(store, claim_id="c2") == []


async def test_a_claim_takes_only_from_the_classes_it_names(store: Store) -> None:
    await add_host(store)
    await add(store, job("cpu"), job("gpu", needs=needs(require_cuda=True), priority=9))
    cpu = {row.id: Amounts() for row in await store.plans.classes() if row.requirement.model == "cpu"}
    assert [lease.spec.model for lease in await claim(store, count=5, classes=cpu)] == ["cpu"]
    assert await claim(store, claim_id="c2", classes={}) == []


async def test_a_job_that_would_rather_run_elsewhere_is_left_for_a_while(store: Store) -> None:
    await add_host(store)
    await add(store, job("picky", priority=9), now_s=100.0)
    await add(store, job("any"), now_s=100.0)
    classes = await all_classes(store)
    (picky,) = [row.id for row in await store.plans.classes() if row.requirement.model == "picky"]
    asked = Claim(host_id="host_a", claim_id="c1", classes=classes, capacity=ROOMY, count=1, held_back={picky: 99.0})
    ((lease,),) = await store.leases.claim([asked], LEASE_S, 110.0)
    assert lease.spec.model == "any"
    ((lease,),) = await store.leases.claim([replace(asked, claim_id="c2", held_back={picky: 100.0})], LEASE_S, 110.0)
    assert lease.spec.model == "picky"


async def test_a_lost_reply_to_a_claim_is_answered_with_the_same_leases(store: Store) -> None:
    await add_host(store)
    await add(store, job("a"), job("b"))
    first = await claim(store, count=1)
    again = await claim(store, count=1, now_s=3.0)
    assert list(again) == list(first)
    await store.leases.complete(hold(first[0]), DONE, 4.0)
    assert await claim(store, count=1, now_s=5.0) == []
    assert len(await claim(store, claim_id="c2", now_s=5.0)) == 1


async def test_one_transaction_answers_many_claims_and_gives_no_job_twice(store: Store) -> None:
    for n in range(4):
        await add_host(store, f"host_{n}")
    await add(store, *(job("m", seed=n) for n in range(3)))
    classes = await all_classes(store)
    claims = [Claim(host_id=f"host_{n}", claim_id=f"c{n}", classes=classes, capacity=ROOMY, count=1) for n in range(4)]
    given = await store.leases.claim(claims, LEASE_S, 0.0)
    jobs = [lease.job_id for leases in given for lease in leases]
    assert len(jobs) == len(set(jobs)) == 3


@pytest.mark.parametrize("state", ["draining", "paused", "quarantined", "left"])
async def test_a_host_that_is_not_active_gets_nothing_new(store: Store, state: str) -> None:
    await add_host(store)
    await add(store, job("a"), job("b"))
    held = await claim(store)
    await store.hosts.set_state("host_a", state, "because", "operator", 1.0)
    assert await claim(store, claim_id="c2") == []
    assert list(await claim(store)) == list(held)
    assert await claim(store, "host_unknown", claim_id="c3") == []


async def test_a_renewal_extends_the_lease_and_says_when_the_child_runs(store: Store) -> None:
    await add_host(store)
    (job_id,) = await add(store, job("a"))
    (lease,) = await claim(store)
    (renewed,) = await store.leases.renew("host_a", [Renewal(job_id=job_id, epoch=1)], LEASE_S, 10.0)
    assert (renewed.verdict, renewed.status, renewed.expires_at_s) == ("held", JobStatus.CLAIMED, 55.0)
    (renewed,) = await store.leases.renew("host_a", [Renewal(job_id=job_id, epoch=1, running=True)], LEASE_S, 20.0)
    assert renewed.status is JobStatus.RUNNING
    assert await store.leases.expire(64.0) == []
    assert [row.id for row in await store.leases.expire(65.0)] == [job_id]
    (attempt,) = await store.jobs.attempts(job_id)
    assert (attempt.started_at_s, attempt.ended_at_s) == (20.0, None)
    assert lease.expires_at_s == LEASE_S


async def test_a_completed_job_keeps_its_result_and_answers_a_repeated_report(store: Store) -> None:
    await add_host(store)
    (job_id,) = await add(store, job("a"))
    (lease,) = await claim(store)
    row = await store.leases.complete(hold(lease), DONE, 5.0)
    assert (row.status, row.artifact) == (JobStatus.COMPLETED, "art1")
    assert await store.leases.complete(hold(lease), DONE, 6.0) == row
    (attempt,) = await store.jobs.attempts(job_id)
    assert (attempt.outcome, attempt.artifact, attempt.facts["metrics"]) == ("completed", "art1", {"auc": 0.9})
    (renewed,) = await store.leases.renew("host_a", [Renewal(job_id=job_id, epoch=1)], LEASE_S, 7.0)
    assert (renewed.verdict, renewed.status) == ("ended", JobStatus.COMPLETED)
    assert await kinds(store, job_id) == ["job.created", "job.claimed", "job.completed"]


async def test_another_result_for_a_completed_job_is_refused(store: Store) -> None:
    await add_host(store)
    (job_id,) = await add(store, job("a"))
    (lease,) = await claim(store)
    await store.leases.complete(hold(lease), DONE, 5.0)
    assert (
        await refusal(store.leases.complete(hold(lease), JobCompletion(artifact="other"), 6.0))
    ).code is Code.CONFLICT
    assert (await refusal(store.leases.fail(hold(lease), BROKEN, 6.0, chance=0.0))).code is Code.CONFLICT
    assert (await store.jobs.get(job_id)).artifact == "art1"


async def test_an_expired_job_that_nobody_claimed_is_revived_by_its_host(store: Store) -> None:
    await add_host(store)
    await add_host(store, "host_b")
    (job_id,) = await add(store, job("a"))
    await claim(store)
    (expired,) = await store.leases.expire(LEASE_S)
    assert (expired.status, expired.epoch) == (JobStatus.PENDING, 1)
    (renewed,) = await store.leases.renew("host_a", [Renewal(job_id=job_id, epoch=1)], LEASE_S, LEASE_S + 1)
    assert (renewed.verdict, renewed.status) == ("held", JobStatus.RUNNING)
    assert await claim(store, "host_b", claim_id="c2", now_s=LEASE_S + 2) == []
    assert "job.revived" in await kinds(store, job_id)


async def test_an_expired_job_that_nobody_claimed_may_still_be_completed(store: Store) -> None:
    await add_host(store)
    await add_host(store, "host_b")
    await add(store, job("a"))
    (lease,) = await claim(store)
    await store.leases.expire(LEASE_S)
    assert (await store.leases.complete(hold(lease), DONE, LEASE_S + 1)).status is JobStatus.COMPLETED
    assert await claim(store, "host_b", claim_id="c2", now_s=LEASE_S + 2) == []


async def test_a_host_that_was_replaced_can_change_nothing(store: Store) -> None:
    await add_host(store)
    await add_host(store, "host_b")
    (job_id,) = await add(store, job("a"))
    (old,) = await claim(store)
    await store.leases.expire(LEASE_S)
    (new,) = await claim(store, "host_b", claim_id="c2", now_s=LEASE_S + 1)
    assert (new.job_id, new.epoch) == (job_id, 2)
    (renewed,) = await store.leases.renew("host_a", [Renewal(job_id=job_id, epoch=1)], LEASE_S, LEASE_S + 2)
    assert renewed.verdict == "stale"
    late = JobCompletion(artifact="late")
    assert (await refusal(store.leases.complete(hold(old), late, LEASE_S + 3))).code is Code.STALE
    assert (await refusal(store.leases.fail(hold(old), BROKEN, LEASE_S + 3, chance=0.0))).code is Code.STALE
    assert (await refusal(store.leases.record_checkpoint(hold(old), "ck", LEASE_S + 3))).code is Code.STALE
    row = await store.jobs.get(job_id)
    assert (row.status, row.epoch, row.artifact, row.host_id) == (JobStatus.CLAIMED, 2, "", "host_b")
    first, second = await store.jobs.attempts(job_id)
    assert (first.outcome, first.artifact, second.outcome) == ("orphan", "late", "")
    assert (await store.leases.complete(hold(new), DONE, LEASE_S + 4)).artifact == "art1"


@pytest.mark.parametrize(
    "forged", [AttemptKey("host_b", "", 1), AttemptKey("host_a", "", 2), AttemptKey("host_a", "", 0)]
)
async def test_a_forged_hold_is_stale(store: Store, forged: AttemptKey) -> None:
    await add_host(store)
    (job_id,) = await add(store, job("a"))
    await claim(store)
    lie = AttemptKey(forged.host_id, job_id, forged.epoch)
    assert (await refusal(store.leases.complete(lie, DONE, 1.0))).code is Code.STALE
    (renewed,) = await store.leases.renew(lie.host_id, [Renewal(job_id=job_id, epoch=lie.epoch)], LEASE_S, 1.0)
    assert renewed.verdict == "stale"
    assert await status_of(store, job_id) is JobStatus.CLAIMED


async def test_unknown_jobs_are_not_found(store: Store) -> None:
    await add_host(store)
    nobody = AttemptKey("host_a", "job1_x", 1)
    assert (await refusal(store.leases.complete(nobody, DONE, 0.0))).code is Code.NOT_FOUND
    assert (await refusal(store.jobs.cancel("job1_x", "", "operator", 0.0))).code is Code.NOT_FOUND
    assert (await refusal(store.jobs.get("job1_x"))).code is Code.NOT_FOUND
    (renewed,) = await store.leases.renew("host_a", [Renewal(job_id="job1_x", epoch=1)], LEASE_S, 0.0)
    assert renewed.verdict == "unknown"


async def test_the_jobs_own_failures_are_counted_and_end_it(store: Store) -> None:
    await add_host(store)
    (job_id,) = await add(store, job("a", max_attempts=2))
    (first,) = await claim(store)
    row = await store.leases.fail(hold(first), BROKEN, 10.0, chance=0.0)
    assert (row.status, row.not_before_s > 10.0) == (JobStatus.PENDING, True)
    assert await store.leases.fail(hold(first), BROKEN, 11.0, chance=0.0) == row
    assert await claim(store, claim_id="c2", now_s=11.0) == []
    assert await store.leases.release_backoffs(row.not_before_s - 0.001) == 0
    assert await store.leases.release_backoffs(row.not_before_s) == 1
    (second,) = await claim(store, claim_id="c3", now_s=row.not_before_s)
    assert second.epoch == 2
    row = await store.leases.fail(hold(second), BROKEN, 30.0, chance=0.0)
    assert row.status is JobStatus.FAILED
    assert "attempt 2 of 2" in row.reason
    assert [attempt.error for attempt in await store.jobs.attempts(job_id)] == [BROKEN.error] * 2
    assert [attempt.outcome for attempt in await store.jobs.attempts(job_id)] == ["retried", "failed"]


async def test_trouble_of_the_host_costs_the_job_no_attempt(store: Store) -> None:
    await add_host(store)
    (job_id,) = await add(store, job("a", max_attempts=1))
    now_s = 0.0
    for n in range(4):
        (lease,) = await claim(store, claim_id=f"c{n}", now_s=now_s)
        row = await store.leases.fail(hold(lease), JobFailure(cause=Cause.INFRA, error="disk full"), now_s, chance=0.0)
        assert row.status is JobStatus.PENDING
        now_s = row.not_before_s
        await store.leases.release_backoffs(now_s)
    assert (await store.jobs.get(job_id)).epoch == 4
    assert await store.hosts.infra_jobs("host_a") == [job_id]
    (lease,) = await claim(store, claim_id="c9", now_s=now_s)
    await store.leases.complete(hold(lease), DONE, now_s)
    assert await store.hosts.infra_jobs("host_a") == []


NO_FOLDER = JobFailure(cause=Cause.SETUP_ERROR, error="the folder /x is not on this host")


async def test_trouble_of_hosts_ends_a_job_at_its_cap(store: Store) -> None:
    await add_host(store)
    (job_id,) = await add(store, job("a", max_infra=2))
    for n, status in enumerate((JobStatus.PENDING, JobStatus.FAILED)):
        (lease,) = await claim(store, claim_id=f"c{n}", now_s=100.0 * n)
        row = await store.leases.fail(
            hold(lease), JobFailure(cause=Cause.INFRA, error="disk full"), 100.0 * n, chance=0.0
        )
        assert row.status is status
        await store.leases.release_backoffs(100.0 * n + 99)
    assert "max_infra is 2" in (await store.jobs.get(job_id)).reason


@pytest.mark.parametrize("count", [1, 2])
async def test_a_host_that_could_not_set_a_job_up_is_excluded_and_another_takes_it(store: Store, count: int) -> None:
    hosts = [await add_host(store, "host_a"), await add_host(store, "host_b")]
    (job_id,) = await add(store, job("a", max_attempts=1))
    (lease,) = await claim(store, "host_a", claim_id="c1")
    row = await store.leases.fail(hold(lease), NO_FOLDER, 1.0, chance=0.0, eligible=hosts)
    assert (row.status, row.not_before_s) == (JobStatus.PENDING, 1.0)
    assert (await store.jobs.refusals(job_id), await store.hosts.refusing()) == (["host_a"], {"host_a"})
    assert await claim(store, "host_a", claim_id="c2", now_s=1.0, count=count) == []
    (other,) = await add(store, job("b", priority=-1))
    assert [each.job_id for each in await claim(store, "host_a", claim_id="c3", now_s=1.0, count=count)] == [other]
    assert [each.job_id for each in await claim(store, "host_b", claim_id="c1", now_s=1.0, count=count)] == [job_id]
    assert await store.hosts.infra_jobs("host_a") == []


async def test_an_excluded_host_is_passed_over_in_a_batch_and_the_others_are_served(store: Store) -> None:
    hosts = [await add_host(store, f"host_{name}") for name in "abc"]
    first, second = await add(store, job("a", priority=5), job("a", seed=2))
    (lease,) = await claim(store, "host_a", claim_id="c1")
    assert lease.job_id == first
    await store.leases.fail(hold(lease), NO_FOLDER, 1.0, chance=0.0, eligible=hosts)
    classes = await all_classes(store)
    refusing = await store.hosts.refusing()
    asked = [
        Claim(host_id=host, claim_id="c2", classes=classes, capacity=ROOMY, count=1, refusing=host in refusing)
        for host in hosts
    ]
    given = await store.leases.claim(asked, LEASE_S, 2.0)
    assert [lease.job_id for lease in given[0]] in ([second], [])
    assert sorted(lease.job_id for leases in given for lease in leases) == sorted([first, second])


async def test_a_job_that_every_eligible_host_refused_has_failed_and_a_requeue_forgets_it(store: Store) -> None:
    hosts = [await add_host(store, "host_a"), await add_host(store, "host_b")]
    (job_id,) = await add(store, job("a"))
    for host, status in zip(hosts, (JobStatus.PENDING, JobStatus.FAILED), strict=True):
        (lease,) = await claim(store, host, now_s=1.0)
        row = await store.leases.fail(hold(lease), NO_FOLDER, 1.0, chance=0.0, eligible=hosts)
        assert row.status is status
        again = await store.leases.fail(hold(lease), NO_FOLDER, 1.0, chance=0.0, eligible=hosts)
        assert again == row, "the same report again gets the same answer"
    assert (await store.jobs.get(job_id)).reason == "setup_error: no eligible host could set it up"
    assert await store.jobs.refusals(job_id) == []
    await store.jobs.requeue(job_id, "operator", 2.0)
    assert [lease.job_id for lease in await claim(store, "host_a", claim_id="c9", now_s=2.0)] == [job_id]


async def test_a_pending_job_that_hosts_refused_can_be_requeued_and_is_open_to_them_again(store: Store) -> None:
    hosts = [await add_host(store, "host_a"), await add_host(store, "host_b")]
    (job_id,) = await add(store, job("a", max_infra=2))
    assert (await refusal(store.jobs.requeue(job_id, "operator", 0.0))).code is Code.PRECONDITION
    (lease,) = await claim(store, "host_a")
    await store.leases.fail(hold(lease), NO_FOLDER, 1.0, chance=0.0, eligible=hosts)
    await store.hosts.set_state("host_b", "left", "it left", "operator", 2.0)
    assert await claim(store, "host_a", claim_id="c2", now_s=2.0) == []
    row = await store.jobs.requeue(job_id, "operator", 3.0)
    assert (row.status, row.reason, await store.jobs.refusals(job_id)) == (JobStatus.PENDING, "requeued", [])
    (again,) = await claim(store, "host_a", claim_id="c3", now_s=3.0)
    assert (await refusal(store.jobs.requeue(job_id, "operator", 3.0))).code is Code.PRECONDITION
    row = await store.leases.fail(hold(again), NO_FOLDER, 4.0, chance=0.0, eligible=hosts)
    assert row.status is JobStatus.PENDING, "it has a new budget"


async def test_a_requeue_ends_the_back_off_of_a_job_that_a_host_refused(store: Store) -> None:
    hosts = [await add_host(store, "host_a"), await add_host(store, "host_b")]
    (job_id,) = await add(store, job("a"))
    (lease,) = await claim(store, "host_a")
    await store.leases.fail(hold(lease), NO_FOLDER, 1.0, chance=0.0, eligible=hosts)
    (lease,) = await claim(store, "host_b", now_s=1.0)
    waiting = await store.leases.fail(hold(lease), JobFailure(cause=Cause.INFRA, error="disk full"), 1.0, chance=0.5)
    assert waiting.not_before_s > 2.0
    await store.jobs.requeue(job_id, "operator", 2.0)
    assert [each.job_id for each in await claim(store, "host_a", claim_id="c2", now_s=2.0)] == [job_id]
    assert await store.leases.release_backoffs(waiting.not_before_s) == 0
    assert await claim(store, "host_b", claim_id="c3", now_s=waiting.not_before_s) == []


async def test_a_host_that_registers_again_may_take_the_jobs_it_refused(store: Store) -> None:
    hosts = [await add_host(store, "host_a"), await add_host(store, "host_b")]
    (job_id,) = await add(store, job("a"))
    for host in hosts:
        (lease,) = await claim(store, host, now_s=1.0)
        await store.leases.fail(hold(lease), NO_FOLDER, 1.0, chance=0.0, eligible=[*hosts, "host_c"])
    await add_host(store, "host_a", now_s=2.0)
    assert await store.jobs.refusals(job_id) == ["host_b"]
    assert await claim(store, "host_b", claim_id="c2", now_s=2.0) == []
    assert [each.job_id for each in await claim(store, "host_a", claim_id="c2", now_s=2.0)] == [job_id]


async def test_pending_jobs_fail_when_no_eligible_host_is_left_that_did_not_refuse_them(store: Store) -> None:
    hosts = [await add_host(store, "host_a"), await add_host(store, "host_b")]
    refused, held, fresh = await add(store, job("refused", priority=2), job("held", priority=1), job("fresh"))
    for lease in await claim(store, "host_a", count=2):
        await store.leases.fail(hold(lease), NO_FOLDER, 1.0, chance=0.0, eligible=hosts)
    assert {(each.job_id, *each.hosts) for each in await store.leases.refused_jobs()} == {
        (refused, "host_a"),
        (held, "host_a"),
    }
    await claim(store, "host_b", classes={(await store.jobs.get(held)).class_id: Amounts()}, now_s=2.0)
    assert [each.job_id for each in await store.leases.refused_jobs()] == [refused]
    assert await store.leases.fail_refused({refused: ["host_a", "host_b"]}, 3.0) == []
    (row,) = await store.leases.fail_refused({refused: ["host_a"], held: ["host_a"], fresh: []}, 3.0)
    assert (row.id, row.status) == (refused, JobStatus.FAILED)
    assert row.reason == "setup_error: no eligible host could set it up"
    assert (await store.statistics.counts()).ready == 1
    assert await store.leases.refused_jobs() == []
    assert [await status_of(store, each) for each in (held, fresh)] == [JobStatus.CLAIMED, JobStatus.PENDING]
    assert (await kinds(store, refused))[-1] == "job.failed"


async def test_a_job_that_is_declared_otherwise_is_open_to_hosts_that_refused_it(store: Store) -> None:
    hosts = [await add_host(store, "host_a"), await add_host(store, "host_b")]
    (job_id,) = await add(store, job("a"))
    (lease,) = await claim(store, "host_a")
    await store.leases.fail(hold(lease), NO_FOLDER, 1.0, chance=0.0, eligible=hosts)
    changed = JobChange(job_id=job_id, spec=job("a", priority=3), kinds=("priority",), reclassed=False, deferred=False)
    await store.plans.apply(ApplyPlan(changed=(changed,)), "operator", 2.0, source="manifest")
    assert await store.jobs.refusals(job_id) == []


async def test_unfinished_classes_are_those_of_jobs_that_have_not_ended(store: Store) -> None:
    await add_host(store)
    await add(store, job("a", priority=1), job("b"))
    by_model = {row.requirement.model: row.id for row in await store.plans.classes()}
    assert await store.plans.unfinished_classes() == set(by_model.values())
    (lease,) = await claim(store)
    assert await store.plans.unfinished_classes() == set(by_model.values())
    await store.leases.complete(hold(lease), DONE, 1.0)
    assert await store.plans.unfinished_classes() == {by_model["b"]}


async def test_a_job_that_loses_its_hosts_ends(store: Store) -> None:
    (job_id,) = await add(store, job("a", max_lost=2))
    await add_host(store)
    await add_host(store, "host_b")
    await claim(store)
    await store.leases.expire(LEASE_S)
    await claim(store, "host_b", claim_id="c2", now_s=LEASE_S)
    (row,) = await store.leases.expire(2 * LEASE_S)
    assert row.status is JobStatus.FAILED
    assert "max_lost is 2" in row.reason
    (renewed,) = await store.leases.renew("host_b", [Renewal(job_id=job_id, epoch=2)], LEASE_S, 2 * LEASE_S + 1)
    assert renewed.verdict == "ended"


async def test_a_cancelled_job_leaves_the_queue_and_its_host_hears_of_it(store: Store) -> None:
    await add_host(store)
    waiting, running = await add(store, job("waiting", priority=-1), job("running"))
    (lease,) = await claim(store)
    await store.jobs.cancel(waiting, "not needed", "key:1", 1.0)
    row = await store.jobs.cancel(running, "not needed", "key:1", 1.0)
    assert (row.status, row.reason) == (JobStatus.CANCELLED, "not needed")
    assert await store.jobs.cancel(running, "again", "key:1", 2.0) == row
    assert await claim(store, claim_id="c2", now_s=2.0) == []
    (renewed,) = await store.leases.renew("host_a", [Renewal(job_id=running, epoch=1)], LEASE_S, 2.0)
    assert renewed.verdict == "ended"
    assert (await refusal(store.leases.complete(hold(lease), DONE, 3.0))).code is Code.CONFLICT
    (attempt,) = await store.jobs.attempts(running)
    assert (attempt.outcome, attempt.artifact) == ("orphan", "art1")
    assert await status_of(store, running) is JobStatus.CANCELLED


async def test_a_requeued_job_runs_again_under_a_new_epoch_with_a_new_budget(store: Store) -> None:
    await add_host(store)
    (job_id,) = await add(store, job("a", max_attempts=1))
    (lease,) = await claim(store)
    await store.leases.fail(hold(lease), BROKEN, 1.0, chance=0.0)
    row = await store.jobs.requeue(job_id, "operator", 2.0)
    assert (row.status, row.artifact) == (JobStatus.PENDING, "")
    (again,) = await claim(store, claim_id="c2", now_s=2.0)
    assert again.epoch == 2
    assert (await refusal(store.jobs.requeue(job_id, "operator", 3.0))).code is Code.PRECONDITION
    assert (
        await refusal(store.leases.fail(hold(lease), JobFailure(cause=Cause.OOM), 3.0, chance=0.0))
    ).code is Code.STALE


async def test_a_checkpoint_is_handed_to_the_next_attempt(store: Store) -> None:
    await add_host(store)
    await add_host(store, "host_b")
    await add(store, job("a"))
    (lease,) = await claim(store)
    assert lease.checkpoint == ""
    await store.leases.record_checkpoint(hold(lease), "ck1", 1.0)
    await store.leases.record_checkpoint(hold(lease), "ck2", 2.0)
    await store.leases.expire(LEASE_S)
    (again,) = await claim(store, "host_b", claim_id="c2", now_s=LEASE_S)
    assert again.checkpoint == "ck2"


async def test_a_job_waits_for_the_jobs_it_comes_after(store: Store) -> None:
    await add_host(store)
    one, two = job("one"), job("two")
    last = job("last", after=(one.id, two.id), priority=9)
    await add(store, last, one, two)
    assert (await store.jobs.get(last.id)).waits_for == 2
    first, second = await claim(store, count=5)
    await store.leases.complete(hold(first), DONE, 1.0)
    assert await claim(store, claim_id="c2", now_s=1.0) == []
    await store.leases.complete(hold(second), DONE, 2.0)
    (lease,) = await claim(store, claim_id="c3", now_s=2.0)
    assert lease.job_id == last.id
