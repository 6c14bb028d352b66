"""Fair share between owners by dominant resource."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from strata.fleet.core.amounts import Amounts, Capacity, Card, Room, Taken, job_amounts
from strata.fleet.core.fair_share import FleetTotals, JobOffer, OwnerShares, add_up
from strata.fleet.core.requirement import Needs

TOTALS = FleetTotals(hosts=4, slots=0, cores=64, ram_gib=256.0, cards=8)
KINDS = {
    1: Amounts(cores=1),
    2: Amounts(cores=8),
    3: Amounts(cores=1, gpus=1),
    4: Amounts(cores=2, gpus=2, gpu_share=0.5),
    5: Amounts(ram_gib=64.0),
    6: Amounts(whole=True),
}
OWNERS = ("anna", "bert", "carl")
JOBS = st.lists(st.tuples(st.sampled_from(OWNERS), st.sampled_from(sorted(KINDS))), min_size=1, max_size=60)


def offers(jobs: Sequence[tuple[str, int]], priority: int = 0) -> list[JobOffer]:
    return [JobOffer(seq, class_id, priority, owner) for seq, (owner, class_id) in enumerate(jobs)]


def largest() -> float:
    sizes = []
    for class_id in KINDS:
        alone = OwnerShares(TOTALS, OWNERS)
        alone.pick([JobOffer(1, class_id, 0, "anna")], KINDS, 1)
        sizes.append(alone.share("anna"))
    return max(sizes)


LARGEST = largest()


@settings(max_examples=1000)
@given(JOBS, st.integers(1, 40))
def test_no_owner_with_waiting_jobs_lags_by_more_than_one_largest_job(jobs: list[tuple[str, int]], count: int) -> None:
    shares = OwnerShares(TOTALS, OWNERS)
    waiting = offers(jobs)
    picked = shares.pick(waiting, KINDS, count)
    assert len(picked) == min(count, len(jobs))
    backlogged = {each.owner for each in waiting if each not in picked}
    for owner in backlogged:
        assert all(shares.share(other) <= shares.share(owner) + LARGEST + 1e-9 for other in OWNERS)


@settings(max_examples=500)
@given(JOBS, st.lists(st.tuples(st.sampled_from(OWNERS), st.integers(0, 32), st.integers(0, 4)), max_size=6))
def test_each_job_goes_to_the_waiting_owner_with_the_smallest_share(
    jobs: list[tuple[str, int]], held: list[tuple[str, int, int]]
) -> None:
    taken = [(owner, Taken(cores=cores, cards=tuple("abcd"[:cards])), 1) for owner, cores, cards in held]
    shares = OwnerShares(TOTALS, OWNERS, taken)
    waiting = offers(jobs)
    while waiting:
        least = min(shares.share(each.owner) for each in waiting)
        before = {owner: shares.share(owner) for owner in OWNERS}
        (offer,) = shares.pick(waiting, KINDS, 1)
        assert before[offer.owner] == least
        assert offer.seq == min(each.seq for each in waiting if before[each.owner] == least)
        waiting.remove(offer)


def test_a_higher_priority_comes_before_a_smaller_share() -> None:
    shares = OwnerShares(TOTALS, OWNERS, [("anna", Taken(cores=32), 1)])
    jobs = [JobOffer(1, 1, 0, "bert"), JobOffer(2, 1, 5, "anna")]
    assert [each.owner for each in shares.pick(jobs, KINDS, 2)] == ["anna", "bert"]


def test_spare_jobs_are_not_counted() -> None:
    shares = OwnerShares(TOTALS, OWNERS)
    picked = shares.pick(offers([("anna", 2), ("anna", 2), ("bert", 2)]), KINDS, 1, spare=2)
    assert [each.owner for each in picked] == ["anna", "bert", "anna"]
    assert (shares.share("anna"), shares.share("bert")) == (8 / 64, 0.0)


def test_the_fleet_has_what_its_hosts_have() -> None:
    hosts = [Capacity(cards=(Card("a", 24.0),), cores=8, ram_gib=32.0), Capacity(cores=4, ram_gib=16.0, slots=2)]
    assert add_up(hosts) == FleetTotals(hosts=2, slots=2, cores=12, ram_gib=48.0, cards=1)


def test_jobs_on_hosts_without_slots_have_no_share_of_the_slots_of_others() -> None:
    plain, divided = Capacity(cards=(Card("a", 24.0),), cores=64, ram_gib=64.0), Capacity(cores=4, slots=1)
    kinds = {"small": Needs(min_cores=1), "large": Needs(min_cores=32, min_gpus=1)}
    taken = {name: Room(plain).plan(job_amounts(needs, plain))[0] for name, needs in kinds.items()}
    held = [("anna", taken["small"], 2), ("bert", taken["large"], 1)]
    shares = OwnerShares(add_up([plain, divided]), OWNERS, held)
    assert (shares.share("anna"), shares.share("bert")) == (2 / 68, 1.0)
