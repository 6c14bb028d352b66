"""Which hosts are reserved, for whom and until when; and who has to yield."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from strata.fleet.core.amounts import Amounts, Capacity, Card, Room, Taken
from strata.fleet.core.job import JobStatus
from strata.fleet.core.reservation import (
    GRANT_S,
    INCOMPLETE_S,
    PASS_OVER_S,
    GangMember,
    HeldPlace,
    HostOffer,
    QueueView,
    Reservation,
    ReservationPlan,
    ReservationPlanner,
    WaitingJob,
)

WHOLE, CORE, CARDS = 1, 2, 3
AMOUNTS = {
    WHOLE: Amounts(whole=True, slots=0),
    CORE: Amounts(slots=0, cores=1),
    CARDS: Amounts(slots=0, cores=1, gpus=2),
}
CAPACITY = Capacity(cards=(Card("a", 24.0), Card("b", 24.0)), cores=4, ram_gib=32.0)
NOW_S = 1000.0


def waiting(seq: int, class_id: int = WHOLE, *, priority: int = 0, since_s: float = 0.0, gang: str = "") -> WaitingJob:
    return WaitingJob(seq, f"job{seq}", class_id, priority, "anna", since_s, gang)


def held(host: str, *, cores: int = 1, age_s: float = 10.0, priority: int = 0, **flags: bool) -> HeldPlace:
    taken = Taken(slots=0, cores=cores)
    return HeldPlace(host, f"{host}-{age_s:g}", 1, taken, priority, NOW_S - age_s, **flags)  # type: ignore[arg-type]


def planner(*hosts: str, preempt: bool = False, reserve_after_s: float = 60.0) -> ReservationPlanner:
    offers = {host: HostOffer(CAPACITY, AMOUNTS) for host in hosts}
    return ReservationPlanner(
        hosts=offers, classes=AMOUNTS.keys(), owners=["anna"], reserve_after_s=reserve_after_s, preempt=preempt
    )


def gang(key: str, *seqs: int, min_size: int = 0, states: Mapping[int, JobStatus] | None = None) -> list[GangMember]:
    states = states or {}
    return [
        GangMember(
            key,
            f"job{seq}",
            states.get(seq, JobStatus.PENDING),
            len(seqs),
            min_size or len(seqs),
            None if seq in states else waiting(seq, CORE, gang=key),
        )
        for seq in seqs
    ]


def reserved(plan: ReservationPlan) -> list[tuple[str, int, str]]:
    return sorted((each.host_id, each.job.seq, each.kind) for each in plan.reservations)


def again(plan: ReservationPlan, **view: Any) -> QueueView:
    """The queue at the next plan, with what this one reserved."""
    return QueueView([], plan.reservations)._replace(**view)


def test_the_host_with_the_fewest_jobs_drains_for_a_job_that_has_waited() -> None:
    busy = [held("h1"), held("h1", age_s=5), held("h2")]
    plan = planner("h1", "h2").plan(QueueView([waiting(1)], held=busy), NOW_S)
    assert reserved(plan) == [("h2", 1, "grant")]
    assert planner("h1", "h2").plan(QueueView([waiting(1, since_s=NOW_S - 59)], held=busy), NOW_S).reservations == ()


def test_a_host_that_could_take_it_at_once_comes_first_and_a_server_is_not_waited_for() -> None:
    plan = planner("h1", "h2").plan(QueueView([waiting(1)], held=[held("h1")]), NOW_S)
    assert reserved(plan) == [("h2", 1, "grant")]
    plan = planner("h1").plan(QueueView([waiting(1)], held=[held("h1", endless=True)]), NOW_S)
    assert plan.reservations == ()


def test_a_queue_that_moves_is_left_to_claims() -> None:
    heads, busy = [waiting(1), waiting(2, CARDS, since_s=NOW_S)], [held("h1")]
    moving = replace(planner("h1"), seen=frozenset({7}))
    first = moving.plan(QueueView(heads, held=busy), NOW_S)
    assert (first.reservations, first.stuck) == ((), frozenset({1}))
    second = replace(planner("h1"), seen=first.stuck).plan(QueueView(heads, held=busy), NOW_S + 2)
    assert reserved(second) == [("h1", 1, "grant")]


def test_only_the_first_that_can_be_served_has_reservations() -> None:
    nowhere = waiting(1, 99, priority=9)
    heads = [waiting(5), nowhere, waiting(4, CARDS, priority=3), waiting(2, priority=3)]
    plan = planner("h1", "h2").plan(QueueView(heads, held=[held("h1"), held("h2")]), NOW_S)
    assert [each.job.seq for each in plan.reservations] == [2]


def test_a_reservation_stays_while_its_job_waits_and_is_written_at_half_time_only() -> None:
    busy = [held("h1")]
    first = planner("h1", "h2").plan(QueueView([waiting(1)], held=[*busy, held("h2")]), NOW_S)
    assert reserved(first) == [("h1", 1, "grant")]
    heads = [waiting(1), waiting(2, CARDS)]
    # h2 is free by now, and is taken by its next claim: the reservation does not move.
    soon = planner("h1", "h2").plan(again(first, heads=heads, held=busy), NOW_S + 1)
    assert soon.reservations == first.reservations
    later = planner("h1", "h2").plan(again(first, heads=heads, held=busy), NOW_S + GRANT_S / 2 + 1)
    assert [each.expires_at_s for each in later.reservations] == [NOW_S + GRANT_S / 2 + 1 + GRANT_S]


def test_a_higher_priority_takes_the_turn_and_an_equal_one_does_not() -> None:
    busy = [held("h1")]
    first = planner("h1").plan(QueueView([waiting(5)], held=busy), NOW_S)
    equal = planner("h1").plan(again(first, heads=[waiting(1, CARDS), waiting(5)], held=busy), NOW_S + 1)
    assert reserved(equal) == [("h1", 5, "grant")]
    higher = [waiting(7, CARDS, priority=1), waiting(5)]
    assert reserved(planner("h1").plan(again(first, heads=higher, held=busy), NOW_S + 1)) == [("h1", 7, "grant")]


def test_a_host_that_is_gone_refused_the_job_or_changed_is_replaced() -> None:
    busy = [held("h1"), held("h2")]
    first = planner("h1", "h2").plan(QueueView([waiting(1)], held=busy), NOW_S)
    assert reserved(first) == [("h1", 1, "grant")]
    view = again(first, heads=[waiting(1)], held=busy)
    assert reserved(planner("h2").plan(view, NOW_S + 1)) == [("h2", 1, "grant")]
    refused = view._replace(refused={("h1", 1)})
    assert reserved(planner("h1", "h2").plan(refused, NOW_S + 1)) == [("h2", 1, "grant")]


def test_a_host_that_does_not_claim_what_it_could_is_passed_over_for_a_while() -> None:
    first = planner("h1", "h2").plan(QueueView([waiting(1)], held=[held("h2")]), NOW_S)
    assert reserved(first) == [("h1", 1, "grant")]
    late_s = NOW_S + GRANT_S
    view = again(first, heads=[waiting(1)], held=[held("h2")])
    missed = planner("h1", "h2").plan(view, late_s)
    assert reserved(missed) == [("h1", 1, "missed"), ("h2", 1, "grant")]
    forgiven = planner("h1", "h2").plan(again(missed, heads=[waiting(1)]), late_s + PASS_OVER_S)
    assert ("h1", 1, "missed") not in reserved(forgiven)


def test_a_gang_gets_all_its_hosts_at_once_or_lets_all_drain() -> None:
    free = planner("h1", "h2").plan(QueueView([], members=gang("g", 1, 2)), 0.0)
    assert reserved(free) == [("h1", 1, "grant"), ("h2", 2, "grant")]
    full = [held("h1", cores=4)]
    young = planner("h1", "h2").plan(QueueView([], held=full, members=gang("g", 1, 2)), 0.0)
    assert young.reservations == (), "a part is not reserved before it has waited"
    drain = planner("h1", "h2").plan(QueueView([], held=full, members=gang("g", 1, 2)), NOW_S)
    assert reserved(drain) == [("h1", 2, "drain"), ("h2", 1, "drain")]
    still = planner("h1", "h2").plan(again(drain, held=full, members=gang("g", 1, 2)), NOW_S + 1)
    assert reserved(still) == reserved(drain)
    ready = planner("h1", "h2").plan(again(drain, members=gang("g", 1, 2)), NOW_S + 2)
    assert reserved(ready) == [("h1", 2, "grant"), ("h2", 1, "grant")]
    assert {each.expires_at_s for each in ready.reservations} == {NOW_S + 2 + GRANT_S}


def test_a_gang_of_which_not_all_were_claimed_in_time_goes_back_as_a_whole() -> None:
    granted = planner("h1", "h2").plan(QueueView([], members=gang("g", 1, 2)), NOW_S)
    left = QueueView([], [each for each in granted.reservations if each.job.seq == 2])
    members = gang("g", 1, 2, states={1: JobStatus.CLAIMED})
    part = left._replace(members=members, held=[held("h1")._replace(job_id="job1", gang="g")])
    assert not planner("h1", "h2").plan(part, NOW_S + 1).returned
    over = planner("h1", "h2").plan(part, NOW_S + GRANT_S)
    assert over.returned == {"job1": "its gang did not start: only 1 of 2 members were claimed in time"}
    assert reserved(over) == [("h2", 2, "missed")]
    elastic = part._replace(members=gang("g", 1, 2, min_size=1, states={1: JobStatus.RUNNING}))
    plan = planner("h1", "h2", "h3").plan(elastic, NOW_S + GRANT_S)
    assert (plan.returned, reserved(plan)) == ({}, [("h2", 2, "missed"), ("h3", 2, "grant")])


def test_a_lost_member_is_replaced_on_a_host_without_another_member_and_not_waited_for_for_ever() -> None:
    members = gang("g", 1, 2, states={1: JobStatus.RUNNING})
    runs = [held("h1")._replace(job_id="job1", gang="g")]
    plan = planner("h1", "h2").plan(QueueView([], held=runs, members=members), 0.0)
    assert reserved(plan) == [("h2", 2, "grant")]
    alone = QueueView([], held=runs, members=members)
    assert planner("h1").plan(alone, INCOMPLETE_S).returned == {}
    assert planner("h1").plan(alone, INCOMPLETE_S + 1).returned == {
        "job1": "its gang waits too long: only 1 of 2 members hold a host"
    }


def test_a_gang_that_lost_too_many_members_for_good_is_cancelled() -> None:
    states = {1: JobStatus.FAILED, 2: JobStatus.RUNNING}
    members = gang("g", 1, 2, 3, min_size=2, states=states)
    assert planner("h1").plan(QueueView([], members=members), 0.0).cancelled == {}
    members = gang("g", 1, 2, 3, states=states)
    ended = planner("h1").plan(QueueView([], members=members), 0.0).cancelled
    assert ended == {"job2": "its gang ends: job1 is failed", "job3": "its gang ends: job1 is failed"}


def test_a_gang_of_which_a_member_backs_off_waits_for_it() -> None:
    members = gang("g", 1, 2)
    members[1] = members[1]._replace(waiting=None)
    assert planner("h1", "h2").plan(QueueView([], members=members), NOW_S).reservations == ()


def test_two_gangs_never_hold_a_part_each() -> None:
    members = [*gang("a", 1, 3), *gang("b", 2, 4)]
    full = [held("h1", cores=4), held("h2", cores=4)]
    plan = planner("h1", "h2").plan(QueueView([], held=full, members=members), NOW_S)
    assert {each.job.gang for each in plan.reservations} == {"a"}
    half = planner("h1", "h2").plan(again(plan, held=full[:1], members=members), NOW_S + 1)
    assert {each.job.gang for each in half.reservations} == {"a"}


def test_as_few_and_as_young_attempts_as_possible_yield_to_a_higher_priority() -> None:
    head = [waiting(9, CARDS, priority=5)]
    old = held("h1", age_s=100, resumes=True)._replace(taken=Taken(slots=0, cores=1, cards=("a",)))
    young = held("h1", age_s=1, resumes=True)._replace(taken=Taken(slots=0, cores=1))
    both = held("h1", age_s=50, resumes=True)._replace(taken=Taken(slots=0, cores=1, cards=("b",)))
    plan = planner("h1", preempt=True).plan(QueueView(head, held=[old, young, both]), NOW_S)
    assert {each.job_id for each in plan.preempted} == {"h1-100", "h1-50"}, "the youngest has no card"
    assert plan.preempted[0].reason == "yields to job9, which has priority 5"
    assert planner("h1").plan(QueueView(head, held=[old, young, both]), NOW_S).preempted == ()
    told = [old._replace(yielding=True), young, both._replace(yielding=True)]
    assert planner("h1", preempt=True).plan(again(plan, heads=head, held=told), NOW_S + 1).preempted == ()


def test_nothing_yields_that_would_lose_its_work_has_the_same_priority_or_does_not_make_room() -> None:
    head = [waiting(9, priority=5)]
    for place in (held("h1"), held("h1", resumes=True, priority=5), held("h1", resumes=True)._replace(gang="g")):
        assert planner("h1", preempt=True).plan(QueueView(head, held=[place]), NOW_S).preempted == ()
    beside = [held("h1", resumes=True), held("h1", age_s=3)]
    assert planner("h1", preempt=True).plan(QueueView(head, held=beside), NOW_S).preempted == ()


@given(
    st.lists(st.tuples(st.sampled_from(["h1", "h2", "h3"]), st.integers(1, 4), st.integers(0, 2)), max_size=8),
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 3)), max_size=5),
    st.lists(st.integers(1, 3), max_size=3),
)
def test_what_may_be_claimed_at_once_fits_together(
    places: list[tuple[str, int, int]], jobs: list[tuple[int, int]], gangs: list[int]
) -> None:
    rooms = {host: Room(CAPACITY) for host in ("h1", "h2", "h3")}
    attempts = []
    for number, (host, cores, priority) in enumerate(places):
        taken = Taken(slots=0, cores=cores)
        if rooms[host].admits(taken):
            rooms[host].hold(taken)
            attempts.append(held(host, cores=cores, age_s=number, priority=priority, resumes=bool(number % 2)))
    heads = [waiting(number + 1, class_id, priority=priority) for number, (class_id, priority) in enumerate(jobs)]
    members = []
    for number, size in enumerate(gangs):
        members += gang(f"g{number}", *range(100 * number + 100, 100 * number + 100 + size))
    plan = planner("h1", "h2", "h3", preempt=True).plan(QueueView(heads, (), attempts, members), NOW_S)
    by_gang: dict[str, list[Reservation]] = {}
    for each in plan.reservations:
        by_gang.setdefault(each.job.gang, []).append(each)
        if each.job.gang and each.kind == "grant":
            assert rooms[each.host_id].fits(each.amounts)
            rooms[each.host_id].hold(rooms[each.host_id].plan(each.amounts)[0])
    assert len(by_gang.pop("", [])) + sum(rows[0].kind == "drain" for rows in by_gang.values()) <= 1
    for key, rows in by_gang.items():
        assert len({row.host_id for row in rows}) == len(rows) == gangs[int(key[1:])]
    weak = {place.job_id: place for place in attempts}
    assert all(weak[each.job_id].resumes for each in plan.preempted)
