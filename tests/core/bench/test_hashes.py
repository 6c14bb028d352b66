"""The placements that ours is compared with are what they claim to be."""

from __future__ import annotations

from collections import Counter

import pytest

from bench.coordinator.hashes import hashed, jump, jump_owners, maglev_owners, next_prime, slots_of, without
from bench.coordinator.placement import balance, moved

KEYS = [hashed(f"key-{number}") for number in range(2_000)]
WEIGHTS = {"a": 1, "b": 2, "c": 4, "d": 8}


@pytest.mark.parametrize("slots", [1, 2, 7, 100])
def test_jump_hash_gives_every_key_a_slot_that_exists_and_every_slot_about_as_many(slots: int) -> None:
    counts = Counter(jump(key, slots) for key in KEYS)
    assert set(counts) == set(range(slots))
    assert max(counts.values()) < 2.5 * len(KEYS) / slots


@pytest.mark.parametrize("slots", [1, 5, 40])
def test_with_one_slot_more_jump_hash_moves_keys_to_the_new_slot_only(slots: int) -> None:
    before = [jump(key, slots) for key in KEYS]
    after = [jump(key, slots + 1) for key in KEYS]
    changed = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(changed) == {slots}
    assert len(changed) == pytest.approx(len(KEYS) / (slots + 1), rel=0.3)


def test_the_last_slots_take_the_places_of_a_lost_worker() -> None:
    assert without(["a", "b", "b", "c"], "b") == ["a", "c"]
    assert without(["a", "b", "c", "d"], "b") == ["a", "d", "c"]
    assert without(["a", "b"], "b") == ["a"]
    assert without(["b"], "b") == []


def test_a_worker_of_weight_four_counts_four_times() -> None:
    assert Counter(slots_of(WEIGHTS)) == WEIGHTS
    shares = Counter(jump_owners(4_096, slots_of(WEIGHTS)))
    assert shares["d"] == pytest.approx(8 * shares["a"], rel=0.2)


def test_maglev_shares_buckets_by_weight_within_a_few() -> None:
    owners = maglev_owners(1_500, WEIGHTS)
    assert len(owners) == 1_500
    assert Counter(owners) == {worker: pytest.approx(1_500 * weight / 15, abs=15) for worker, weight in WEIGHTS.items()}
    assert owners == maglev_owners(1_500, WEIGHTS)


def test_a_lost_worker_moves_its_own_buckets_and_with_maglev_some_others() -> None:
    owners = maglev_owners(1_500, WEIGHTS)
    after = maglev_owners(1_500, {worker: weight for worker, weight in WEIGHTS.items() if worker != "a"})
    assert "a" not in after
    assert owners.count("a") / 1_500 <= moved(owners, after) < 0.5


def test_the_next_prime_is_the_number_itself_if_it_is_prime() -> None:
    assert [next_prime(number) for number in (2, 4, 13, 4_096)] == [2, 5, 13, 4_099]


def test_balance_is_the_largest_load_in_fair_shares_of_its_worker() -> None:
    assert balance(["a", "b", "b", "b"], {"a": 1, "b": 3}) == 1.0
    assert balance(["a", "a", "b", "b"], {"a": 1, "b": 3}) == 2.0
