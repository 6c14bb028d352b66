"""What a job takes of a host, and what is left beside others."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.fleet.core.amounts import (
    UNKNOWN,
    Amounts,
    Capacity,
    Card,
    MemoryLimits,
    Room,
    Taken,
    job_amounts,
    more_memory,
)
from strata.fleet.core.capability import GIB, Capability, Gpu, profile
from strata.fleet.core.jobspec import HostSpec
from strata.fleet.core.match import eligible
from strata.fleet.core.requirement import Needs, RequirementClass
from tests.core.fleet.jobs import capabilities, needs, policies
from tests.support.accounts import assert_within

SERVER = Capacity(
    cards=tuple(Card(f"GPU-{n}", size) for n, size in enumerate((24.0, 24.0, 80.0, 24.0))), cores=32, ram_gib=128.0
)
DIVIDED = SERVER._replace(slots=2)


def fill(capacity: Capacity, *jobs: Needs) -> list[Taken | str]:
    """What each of these jobs gets, one after the other, or what it lacks."""
    room, got = Room(capacity), list[Taken | str]()
    for each in jobs:
        amounts = job_amounts(each, capacity)
        shortage = room.shortage(amounts)
        got += [shortage] if shortage else room.plan(amounts)
        if not shortage:
            room.hold(room.plan(amounts)[0])
    return got


def test_a_job_that_declares_nothing_takes_the_whole_host() -> None:
    whole, second = fill(SERVER, Needs(), Needs(min_cores=1))
    cards = tuple(card.id for card in SERVER.cards)
    assert whole == Taken(whole=True, slots=0, cores=32, ram_gib=128.0, cards=cards)
    assert second == "another job has the whole host"
    assert fill(SERVER, Needs(min_cores=1), Needs())[1] == "it takes the whole host, and other jobs run there"


def test_on_a_host_with_slots_a_job_that_declares_nothing_takes_a_slot_and_no_card() -> None:
    assert fill(DIVIDED, Needs(), Needs(), Needs()) == [Taken(), Taken(), "needs 1 slot, 0 free"]
    assert fill(DIVIDED, Needs(slots=2), Needs())[1] == "needs 1 slot, 0 free"
    assert fill(DIVIDED, Needs(prefer_cuda=True))[0] == Taken(cards=("GPU-0",))


def test_every_job_gets_cards_of_its_own_and_the_large_one_is_kept_for_who_needs_it() -> None:
    one = Needs(require_cuda=True)
    got = fill(SERVER, one, one, one, Needs(min_vram_gib=40), one)
    assert [each.cards for each in got if isinstance(each, Taken)] == [("GPU-0",), ("GPU-1",), ("GPU-3",), ("GPU-2",)]
    assert got[-1] == "needs 1 card, 0 free"
    assert fill(SERVER, Needs(min_gpus=2, min_vram_gib=24), Needs(min_gpus=3))[1] == "needs 3 cards, 2 free"


def test_two_jobs_of_twenty_gib_do_not_share_a_card_of_24() -> None:
    one_card = Capacity(cards=(Card("0", 24.0),), cores=8, ram_gib=32.0, slots=2)
    assert fill(one_card, Needs(min_vram_gib=20), Needs(min_vram_gib=20))[1] == "needs 1 card with 20 GiB, 0 free"
    share = Needs(min_vram_gib=20, gpu_share=0.5)
    assert fill(one_card, share, share)[1] == "needs 0.5 of 1 card with 20 GiB, 0 free"
    half = Needs(gpu_share=0.5)
    assert fill(one_card, half, half) == [Taken(cards=("0",), gpu_share=0.5)] * 2


def test_ten_tenths_are_a_card_and_sharers_meet_on_one() -> None:
    tenth = Needs(gpu_share=0.1)
    got = fill(SERVER, *[tenth] * 11)
    cards = Counter(card for each in got if isinstance(each, Taken) for card in each.cards)
    assert cards == {"GPU-0": 10, "GPU-1": 1}


def test_memory_and_cores_are_divided_and_a_job_takes_a_core_at_least() -> None:
    small = Capacity(cores=2, ram_gib=8.0)
    assert fill(small, Needs(min_ram_gib=5), Needs(min_ram_gib=5))[1] == "needs 5 GiB of memory, 3 free"
    assert fill(small, Needs(min_ram_gib=1), Needs(min_ram_gib=1), Needs(min_ram_gib=1))[2] == "needs 1 core, 0 free"
    assert fill(small, Needs(min_cores=2), Needs(min_cores=1))[1] == "needs 1 core, 0 free"


def test_a_room_is_full_when_no_job_whatever_fits() -> None:
    assert not Room(SERVER).full
    assert Room(SERVER, [UNKNOWN]).full
    assert Room(SERVER, [Taken(cores=32)]).full
    assert Room(DIVIDED, [Taken(slots=2)]).full
    assert not Room(DIVIDED, [Taken(cores=32)]).full


@pytest.mark.parametrize(
    ("own", "policy", "slots"), [(None, None, None), (3, None, 3), (None, 2, 2), (3, 2, 2), (1, 2, 1)]
)
def test_slots_are_set_in_one_place_and_need_no_second(own: int | None, policy: int | None, slots: int | None) -> None:
    host = profile(Capability(hostname="h", slots=own), HostSpec(name="h", slots=policy))
    assert (host.slots, host.capacity.slots) == (slots, slots)


def test_a_card_goes_by_its_uuid_and_without_one_by_its_number() -> None:
    gpus = (Gpu(name="a", vram_bytes=8 * GIB), Gpu(name="b", vram_bytes=24 * GIB, uuid="GPU-b"))
    assert profile(Capability(hostname="h", gpus=gpus)).capacity.cards == (Card("GPU-b", 24.0), Card("0", 8.0))


@given(capabilities(), needs(), st.data())
def test_a_job_that_a_host_is_eligible_for_fits_on_it_when_it_is_empty(
    capability: Capability, asked: Needs, data: st.DataObject
) -> None:
    host = profile(capability, data.draw(policies(capability.hostname)))
    if eligible(RequirementClass("mlp", "a", asked), host).eligible:
        assert Room(host.capacity).shortage(job_amounts(asked, host.capacity)) == ""


@given(capabilities(), st.lists(needs(), max_size=12), st.none() | st.integers(1, 6))
def test_nothing_is_given_twice(capability: Capability, jobs: list[Needs], slots: int | None) -> None:
    capacity = profile(capability, HostSpec(name=capability.hostname, slots=slots)).capacity
    held = [each for each in fill(capacity, *jobs) if isinstance(each, Taken)]
    assert_within(capacity, held)


@given(
    st.lists(st.builds(Amounts, cores=st.integers(0, 3), ram_gib=st.integers(0, 8).map(float)), min_size=1),
    st.integers(1, 9),
)
def test_what_is_planned_for_several_jobs_is_what_one_after_the_other_gets(amounts: list[Amounts], count: int) -> None:
    capacity = Capacity(cores=8, ram_gib=16.0, slots=6)
    room = Room(capacity)
    planned = room.plan(amounts[0], count)
    one_by_one = list[Taken]()
    while len(one_by_one) < count and room.fits(amounts[0]):
        one_by_one += room.plan(amounts[0])
        room.hold(one_by_one[-1])
    assert planned == one_by_one


def test_a_job_that_ran_out_of_memory_needs_more_than_it_had() -> None:
    whole, declared = Taken(whole=True, ram_gib=128.0, cards=("GPU-0", "GPU-2")), Taken(ram_gib=8.0, cores=1)
    all_of_it, eight = MemoryLimits(115.2, 128, 128), MemoryLimits(8, 128, 128)
    # Nine tenths of the host are the limit of a job that declares nothing.
    assert more_memory("host", Needs(), whole, SERVER, all_of_it) == (Needs(above_ram_gib=128), "115 GiB of memory")
    asked = Needs(min_ram_gib=8)
    assert more_memory("host", asked, declared, SERVER, eight) == (Needs(min_ram_gib=16), "8 GiB of memory")
    assert more_memory("gpu", Needs(), whole, SERVER, eight) == (Needs(above_vram_gib=80), "80 GiB of VRAM")
    card = Needs(require_cuda=True)
    assert more_memory("gpu", card, Taken(cards=("GPU-0",)), SERVER, eight) == (
        Needs(require_cuda=True, min_vram_gib=24.5),
        "24 GiB of VRAM",
    )
    share = Taken(cards=("GPU-0",), gpu_share=0.5)
    assert more_memory("gpu", Needs(gpu_share=0.5), share, SERVER, eight) == (Needs(min_gpus=1), "12 GiB of VRAM")
    assert more_memory("gpu", asked, declared, SERVER, eight) is None


def test_a_job_that_needs_more_memory_than_twice_gets_what_the_largest_host_gives() -> None:
    declared = Taken(ram_gib=8.0, cores=1)
    asked = Needs(min_ram_gib=8)
    found = more_memory("host", asked, declared, SERVER, MemoryLimits(8, 12, 12))
    assert found == (Needs(min_ram_gib=12), "8 GiB of memory")
    # Its host gave it less than the hub had granted, because the settings there were changed meanwhile.
    found = more_memory("host", asked, declared, SERVER, MemoryLimits(2, 2, 12))
    assert found == (Needs(min_ram_gib=8, above_ram_gib=2), "2 GiB of memory")
