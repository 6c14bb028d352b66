"""Handing out data: every sample once per epoch, in an order that does not depend on who is there."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.base.errors import Code
from strata.coord.core.facts import DataFile, DatasetMode, DatasetRegistered, ShardAcked, ShardReturned, ShardsGranted
from strata.coord.core.inputs import Ack, Leave, NextShards, RegisterDataset, ShardAssignment
from strata.coord.core.job_config import JobConfig
from strata.coord.core.permutation import order_of
from strata.coord.core.shards import MAX_COUNT, files_of
from strata.coord.core.state import ACKS_KEPT, JobIndexes
from tests.core.coord.jobs import CORPUS, Job, corpus, samples_of


def reading(workers: int = 1, config: JobConfig | None = None, **dataset: Any) -> Job:
    job = Job(config, workers=workers)
    job.register_dataset(**dataset)
    return job


# Registering


def test_a_dataset_registered_twice_is_one_dataset() -> None:
    job = Job(workers=2)
    assert job.register_dataset("w0").created
    again = job.register_dataset("w1")
    assert (again.created, again.shards) == (False, 10)
    assert sum(isinstance(fact, DatasetRegistered) for fact in job.facts) == 1


@pytest.mark.parametrize(
    "field", [{"samples": 41}, {"shard_size": 5}, {"seed": 1}, {"mode": DatasetMode.DETERMINISTIC}]
)
def test_another_definition_under_the_same_name_is_refused(field: dict[str, Any]) -> None:
    job = reading()
    assert job.refusal(RegisterDataset(job.caller("w0"), corpus(**field))).code is Code.CONFLICT


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"dataset_id": ""}, "a dataset needs a name"),
        ({"samples": 0}, "a dataset needs at least one sample"),
        ({"shard_size": 0}, "a shard needs at least one sample"),
        ({"samples": 1_000_001, "shard_size": 1}, "more than 1,000,000 shards"),
        ({"buckets": 0}, "buckets must be a power of two up to 65536"),
        ({"buckets": 12}, "buckets must be a power of two up to 65536"),
        ({"buckets": 1 << 17}, "buckets must be a power of two up to 65536"),
        (
            {"files": (DataFile("a", 20), DataFile("b", 19))},
            "the files do not have as many samples as the dataset",
        ),
        ({"files": (DataFile("a", 50), DataFile("b", -10))}, "a file cannot have fewer samples than none"),
        ({"global_batch": 0}, "a global batch needs at least one shard"),
        ({"seed": -1}, "a seed is a whole number below 2**64"),
        ({"seed": 1 << 64}, "a seed is a whole number below 2**64"),
    ],
)
def test_a_definition_that_makes_no_sense_is_refused_with_its_reason(fields: dict[str, Any], sentence: str) -> None:
    job = Job(workers=1)
    refused = job.refusal(RegisterDataset(job.caller("w0"), corpus(**fields)))
    assert (refused.code, sentence in refused.message) == (Code.INVALID, True)


def test_shards_of_an_unknown_dataset_need_its_registration_first() -> None:
    job = Job(workers=1)
    refused = job.refusal(NextShards(job.caller("w0"), "nothing", 0))
    assert (refused.code, refused.hint) == (Code.NOT_FOUND, "call AckDataset first")


# Who gets what


def test_one_worker_reads_the_canonical_order() -> None:
    job = reading(samples=400, seed=5)
    order = order_of(CORPUS, 5, 0, 100)
    leases = [lease for _ in range(50) for lease in job.next("w0", count=2, held=None).leases]
    assert [lease.shard_range.shard for lease in leases] == [order.at(position) for position in range(100)]


def test_without_shuffling_the_order_is_that_of_the_samples() -> None:
    assert reading(shuffle=False).read("w0") == list(range(40))


def test_each_worker_goes_through_its_own_buckets_in_canonical_order() -> None:
    job = reading(workers=4, samples=4_000, buckets=64)
    order = order_of(CORPUS, 0, 0, 1_000)
    for worker in ("w0", "w1", "w2", "w3"):
        shards = [job.next(worker, held=None).leases[0].shard_range.shard for _ in range(100)]
        positions = [order.position_of(shard) for shard in shards]
        assert positions == sorted(positions)
        owned = set(job.indexes.placements[64].assignment.by_worker()[worker])
        assert {shard % 64 for shard in shards} <= owned


def test_who_has_nothing_left_of_its_own_takes_from_the_others() -> None:
    job = reading(workers=3)
    assert sorted(job.read("w2")) == list(range(40))


@settings(max_examples=60, deadline=None)
@given(
    workers=st.integers(1, 8),
    samples=st.integers(1, 300),
    shard_size=st.sampled_from([1, 3, 16]),
    buckets=st.sampled_from([1, 8, 64]),
    count=st.integers(1, 5),
    turns=st.randoms(use_true_random=False),
)
def test_without_faults_every_sample_is_granted_exactly_once(
    workers: int, samples: int, shard_size: int, buckets: int, count: int, turns: Any
) -> None:
    job = reading(workers, samples=samples, shard_size=shard_size, buckets=buckets)
    granted: list[int] = []
    busy = list(job.job.members)
    while busy:
        worker = turns.choice(busy)
        found = job.next(worker, count=count, held=None)
        granted += samples_of(found)
        if found.end_of_epoch:
            busy.remove(worker)
    assert sorted(granted) == list(range(samples))
    assert job.job.datasets[CORPUS].finished == [0]
    assert job.job.datasets[CORPUS].epochs == {}


def test_an_answer_has_no_more_shards_than_the_limit() -> None:
    job = reading(samples=2_000, shard_size=1)
    assert len(job.next("w0", count=10**9, held=None).leases) == MAX_COUNT


def test_lease_ids_carry_the_epoch_of_the_leader_so_that_no_two_are_equal() -> None:
    job = reading()
    first = job.take("w0", count=2)
    job.restart()
    second = job.take("w0", count=2)
    assert [lease >> 32 for lease in (*first, *second)] == [1, 1, 2, 2]
    assert len({*first, *second}) == 4


# Giving back


def test_what_a_lost_worker_had_goes_out_first_and_without_what_it_had_acked() -> None:
    job = reading(workers=2)
    first, second = job.take("w0", count=2)
    leases = job.job.datasets[CORPUS].epochs[0].leases
    start, end = leases[first].start, leases[first].end
    other = leases[second]
    job.ack("w0", Ack(first, start + 3))
    job.submit(Leave(job.caller("w0")))
    job.settle()
    found = job.next("w1", count=3)
    assert [(lease.shard_range.start, lease.shard_range.end) for lease in found.leases[:2]] == [
        (start + 3, end),
        (other.start, other.end),
    ]


def test_while_others_still_read_the_epoch_is_not_over() -> None:
    job = reading(workers=2, samples=4)
    (lease,) = job.take("w0")
    waiting = job.next("w1")
    assert (waiting.leases, waiting.end_of_epoch) == ((), False)
    assert job.ack("w0", Ack(lease)).end_of_epoch
    assert job.next("w1").end_of_epoch


def test_what_is_given_back_goes_to_another_worker() -> None:
    job = reading(workers=2, samples=4)
    (lease,) = job.take("w0")
    found = job.ack("w0", Ack(lease, until=1, failed=True, reason="torn file"))
    assert (found.leases, found.end_of_epoch) == ((), False), "the rest waits: the epoch is not over"
    assert samples_of(job.next("w1")) == [1, 2, 3]


def test_a_shard_that_fails_too_often_is_put_aside_and_shown_and_the_epoch_ends_without_it() -> None:
    job = reading(workers=2, config=JobConfig(max_shard_failures=3), samples=12)
    bad = job.next("w0").leases[0]
    job.next("w0", acks=(Ack(bad.lease_id, failed=True, reason="no such file"),), count=0)
    while not (found := job.next("w0", held=None)).end_of_epoch:
        (lease,) = found.leases
        if lease.shard_range.shard == bad.shard_range.shard:
            job.next("w0", acks=(Ack(lease.lease_id, failed=True, reason="no such file"),), count=0)
    dataset = job.job.datasets[CORPUS]
    aside = dataset.quarantined[0]
    assert [(each.shard_range.shard, each.reason) for each in aside] == [(bad.shard_range.shard, "no such file")]
    assert dataset.finished == [0]
    assert dataset.epochs == {}, "a finished epoch costs its number and what was put aside"
    for worker in ("w0", "w1"):
        assert job.next(worker).end_of_epoch
        assert job.next(worker, epoch=1).leases
    returned = [fact for fact in job.facts if isinstance(fact, ShardReturned)]
    assert [fact.quarantined for fact in returned] == [False, False, True]


def test_a_lease_that_was_not_begun_goes_to_the_next_worker_and_never_counts_as_failed() -> None:
    job = reading(workers=2, config=JobConfig(max_shard_failures=1), samples=12)
    begun, *others = job.take("w0", count=3)
    for _ in range(2):
        returned = tuple(Ack(lease, returned=True) for lease in others)
        found = job.next("w0", acks=returned, held=(begun, *others), count=0)
        assert (found.leases, found.end_of_epoch, found.stale) == ((), False, ()), "also if it is repeated"
    mine = job.job.datasets[CORPUS].epochs[0]
    assert (list(mine.leases), mine.failures, mine.quarantined) == ([begun], {}, [])
    moved = job.take("w1", count=2)
    job.ack("w0", Ack(begun))
    assert job.ack("w1", *map(Ack, moved)).end_of_epoch


def test_of_a_lease_that_was_begun_only_the_rest_is_returned() -> None:
    job = reading(workers=2, samples=4)
    (lease,) = job.take("w0")
    job.next("w0", acks=(Ack(lease, until=1, returned=True),), held=(lease,), count=0)
    assert samples_of(job.next("w1")) == [1, 2, 3]


def test_an_epoch_whose_last_shard_is_put_aside_ends_with_it() -> None:
    job = reading(config=JobConfig(max_shard_failures=1), samples=4)
    (lease,) = job.take("w0")
    found = job.ack("w0", Ack(lease, until=2, failed=True))
    assert found.end_of_epoch
    assert job.job.datasets[CORPUS].finished == [0]
    (aside,) = job.job.datasets[CORPUS].quarantined[0]
    assert (aside.shard_range.start, aside.shard_range.end, aside.reason) == (2, 4, "the worker gave it back")
    assert job.next("w0").end_of_epoch


def test_epochs_with_shards_put_aside_do_not_pile_up() -> None:
    job = reading(config=JobConfig(max_shard_failures=1), samples=4, buckets=4096)
    for epoch in range(50):
        (lease,) = job.take("w0", epoch)
        job.ack("w0", Ack(lease, failed=True), epoch=epoch)
    assert len(job.saved) < 5_000


def test_a_failed_ack_that_is_repeated_is_recognised() -> None:
    job = reading(samples=8)
    (lease,) = job.take("w0")
    job.ack("w0", Ack(lease, until=None, failed=True))
    found = job.ack("w0", Ack(lease, failed=True))
    assert found.stale == ()


# Acks


def test_a_lease_is_acked_in_parts() -> None:
    job = reading(samples=4)
    (lease,) = job.take("w0")
    for until in (1, 3, 3):
        found = job.ack("w0", Ack(lease, until))
        assert (found.stale, found.end_of_epoch) == ((), False)
    assert job.job.datasets[CORPUS].epochs[0].leases[lease].until == 3
    assert job.ack("w0", Ack(lease)).end_of_epoch
    assert [fact.until for fact in job.facts if isinstance(fact, ShardAcked)] == [1, 3, 4]


@pytest.mark.parametrize("until", [0, 1, 5])
@pytest.mark.parametrize("failed", [False, True])
def test_an_ack_outside_of_its_lease_or_backwards_is_refused(until: int, failed: bool) -> None:
    job = reading(samples=4)
    (lease,) = job.take("w0")
    job.ack("w0", Ack(lease, 2))
    refused = job.refusal(NextShards(job.caller("w0"), CORPUS, 0, acks=(Ack(lease, until, failed=failed),)))
    assert refused.code is Code.INVALID
    assert f"{until} is not a place in it" in refused.message


def test_somebody_elses_lease_and_one_that_never_was_are_named_as_stale() -> None:
    job = reading(workers=2)
    (foreign,) = job.take("w0")
    found = job.next("w1", acks=(Ack(foreign), Ack(12345)))
    assert found.stale == (foreign, 12345)
    assert foreign in job.job.datasets[CORPUS].epochs[0].leases


def test_a_repeated_ack_counts_once_and_is_not_stale() -> None:
    job = reading()
    (lease,) = job.take("w0")
    assert job.ack("w0", Ack(lease), Ack(lease)).stale == ()
    assert job.ack("w0", Ack(lease)).stale == ()
    assert sum(isinstance(fact, ShardAcked) for fact in job.facts) == 1


def test_a_whole_answer_of_acks_may_be_repeated() -> None:
    job = reading(samples=5_000, shard_size=1)
    acks = tuple(Ack(lease) for lease in job.take("w0", count=10_000))
    assert len(acks) == MAX_COUNT
    given = NextShards(job.caller("w0"), CORPUS, 0, acks=acks)
    assert job.submit(given).reply.stale == ()  # type: ignore[union-attr]
    assert job.submit(given).reply.stale == ()  # type: ignore[union-attr]
    assert MAX_COUNT <= ACKS_KEPT


def test_more_acks_than_could_be_recognised_again_are_refused() -> None:
    job = reading()
    acks = tuple(Ack(lease) for lease in range(ACKS_KEPT + 1))
    assert job.refusal(NextShards(job.caller("w0"), CORPUS, 0, acks=acks)).code is Code.INVALID


def test_an_ack_from_before_a_loss_does_not_count() -> None:
    job = reading(workers=2)
    (lease,) = job.take("w0")
    job.register("w0", "incarnation-2", elastic=True)
    job.settle()
    assert job.ack("w0", Ack(lease)).stale == (lease,)


def test_the_next_call_of_a_minimal_worker_acks_the_one_before() -> None:
    job = reading(samples=8)
    first = job.next("w0", held=None)
    second = job.next("w0", held=None)
    assert [fact.until for fact in job.facts if isinstance(fact, ShardAcked)] == [first.leases[0].shard_range.end]
    assert sorted(samples_of(first) + samples_of(second)) == list(range(8))
    assert job.next("w0", held=None).end_of_epoch


def test_an_answer_that_got_lost_is_given_again() -> None:
    job = reading()
    first = job.next("w0", count=2)
    again = job.next("w0", count=1)
    assert again == first
    held = tuple(lease.lease_id for lease in first.leases)
    partly = job.next("w0", held=held[:1], acks=(Ack(held[0], first.leases[0].shard_range.start + 1),))
    assert [lease.lease_id for lease in partly.leases] == [held[1]]
    assert job.next("w0", held=held).leases[0].lease_id not in held


def test_a_lease_given_again_has_only_what_is_not_acked() -> None:
    job = reading(samples=4)
    (lease,) = job.take("w0")
    job.ack("w0", Ack(lease, 3))
    assert samples_of(job.next("w0")) == [3]


@pytest.mark.parametrize("seed", range(100))
def test_whatever_fails_every_sample_is_acked_once_or_shown_as_put_aside(seed: int) -> None:
    chance = random.Random(seed)
    workers, samples = chance.randint(1, 4), chance.randint(1, 60)
    job = reading(workers, config=JobConfig(max_shard_failures=2), samples=samples)
    dataset = job.job.datasets[CORPUS]

    def some_acks(worker: str) -> tuple[Ack, ...]:
        ledger = dataset.epoch(0)
        leases = [ledger.leases[lease] for lease in ledger.held.get(worker, ())]
        return tuple(
            Ack(lease.lease_id, chance.randint(lease.until, lease.end), failed=chance.random() < 0.3)
            for lease in leases
            if chance.random() < 0.7
        )

    ended = False
    for _ in range(150):
        worker = chance.choice(list(job.job.members))
        given = NextShards(job.caller(worker), CORPUS, 0, count=chance.randint(0, 3), acks=some_acks(worker))
        found = job.told(ShardAssignment, given)
        assert not found.stale
        if chance.random() < 0.2:
            assert not job.told(ShardAssignment, NextShards(given.caller, CORPUS, 0, acks=given.acks, count=0)).stale
        assert not (ended and found.leases), "an end is an end"
        ended = ended or found.end_of_epoch
        if chance.random() < 0.1:
            job.register(worker, f"incarnation-{len(job.journal)}", elastic=True)
            job.settle()
        if chance.random() < 0.05:
            job.restart()
            dataset = job.job.datasets[CORPUS]
    for worker in job.job.members:
        job.next(worker, held=None)
    job.read(worker)
    acked = list(acked_samples(job))
    aside = [s for each in dataset.quarantined.get(0, ()) for s in range(each.shard_range.start, each.shard_range.end)]
    assert dataset.finished == [0]
    assert sorted(acked + aside) == list(range(samples))


def acked_samples(job: Job) -> Iterator[int]:
    at: dict[int, int] = {}
    for fact in job.facts:
        if isinstance(fact, ShardsGranted):
            at |= {grant.lease_id: grant.start for grant in fact.grants}
        if isinstance(fact, ShardAcked):
            yield from range(at[fact.lease_id], fact.until)
            at[fact.lease_id] = fact.until


# Epochs


def test_epochs_follow_each_other_each_in_an_order_of_its_own() -> None:
    job = reading()
    read = [job.read("w0", epoch) for epoch in range(3)]
    assert [sorted(samples) for samples in read] == [list(range(40))] * 3
    assert read[0] != read[1] != read[2]
    assert job.job.datasets[CORPUS].finished == [0, 1, 2]
    assert job.read("w0", 0) == [], "an epoch that is over stays so"


def test_the_next_epoch_may_begin_early_and_the_one_after_it_not() -> None:
    job = reading(workers=2)
    job.take("w0", 0)
    assert job.take("w1", 1)
    for epoch in (3, -1):
        refused = job.refusal(NextShards(job.caller("w1"), CORPUS, epoch))
        assert (refused.code, f"epoch {epoch}" in refused.message) == (Code.INVALID, True)


def test_who_asks_for_no_shards_acks_and_is_not_told_that_the_epoch_is_over() -> None:
    job = reading(samples=8)
    (lease,) = job.take("w0")
    found = job.next("w0", acks=(Ack(lease),), count=0)
    assert (found.leases, found.end_of_epoch, found.stale) == ((), False, ())
    (lease,) = job.take("w0")
    assert job.next("w0", acks=(Ack(lease),), count=0).end_of_epoch


def test_a_minimal_worker_that_goes_on_to_the_next_epoch_keeps_what_it_holds_of_the_last() -> None:
    job = reading(samples=8)
    job.next("w0", 0, held=None)
    job.next("w0", 1, held=None)
    assert not any(isinstance(fact, ShardAcked) for fact in job.facts)


def test_what_is_kept_in_memory_of_an_epoch_ends_with_it() -> None:
    job = reading()
    for epoch in range(5):
        job.read("w0", epoch)
    assert len(job.indexes.pickers) <= 1


# The deterministic mode


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6, 12])
def test_the_ranks_together_take_the_same_global_batches_for_every_world_size(world: int) -> None:
    job = reading(world, samples=400, mode=DatasetMode.DETERMINISTIC, global_batch=12)
    order = order_of(CORPUS, 0, 0, 100)
    for step in range(9):
        batch = [
            lease.shard_range.shard
            for worker in job.job.ranks
            for lease in job.next(worker, step=step).leases
            if lease.lease_id == 0
        ]
        assert batch == [order.at(position) for position in range(step * 12, min(100, step * 12 + 12))]
    ended = job.next("w0", step=9)
    assert (ended.leases, ended.end_of_epoch) == ((), True)
    assert job.next("w0", epoch=1, step=9).leases
    assert job.job.datasets[CORPUS].epochs == {}, "there is no ledger"


def test_a_world_size_that_does_not_divide_the_batch_is_refused() -> None:
    job = reading(3, mode=DatasetMode.DETERMINISTIC, global_batch=4)
    assert job.refusal(NextShards(job.caller("w0"), CORPUS, 0, step=0)).code is Code.INVALID


def test_a_step_of_an_earlier_epoch_is_refused_and_not_taken_for_the_end() -> None:
    job = reading(mode=DatasetMode.DETERMINISTIC, global_batch=5)
    refused = job.refusal(NextShards(job.caller("w0"), CORPUS, 1, step=0))
    assert (refused.code, "steps count through all epochs" in refused.message) == (Code.INVALID, True)


# Files


@pytest.mark.parametrize(
    ("start", "end", "files"),
    [(0, 1, "a"), (9, 10, "a"), (10, 11, "c"), (5, 15, "abc"), (0, 30, "abcd"), (29, 30, "d"), (14, 16, "cd")],
)
def test_a_range_names_the_files_that_hold_it_in_order(start: int, end: int, files: str) -> None:
    dataset = corpus(samples=30, files=(DataFile("a", 10), DataFile("b", 0), DataFile("c", 5), DataFile("d", 15)))
    indexes = JobIndexes()
    assert files_of(indexes, dataset, start, end) == tuple(files)
    assert files_of(indexes, dataset, start, end) == tuple(files), "also from what it remembers"


def test_a_dataset_without_files_names_none() -> None:
    assert reading().next("w0").leases[0].files == ()


# Size


def test_a_million_shards_cost_little_and_are_handed_out_quickly() -> None:
    job = reading(8, samples=1_000_000, shard_size=1, buckets=4096)
    workers = list(job.job.ranks)
    first_s = time.process_time()
    job.next("w0", held=None)
    began_s = time.process_time()
    for turn in range(10_000):
        job.next(workers[turn % 8], held=None)
    took_s = time.process_time() - began_s
    print(f"first {began_s - first_s:.3f} s, 10,000 grants and acks {took_s:.3f} s")
    assert took_s < 6.0
    ledger = job.job.datasets[CORPUS].epochs[0]
    ledger.cursors, ledger.issued = [122] * 4096, 122 * 4096
    job.indexes.pickers.clear()
    for worker in workers:
        job.next(worker, held=None)
    print(f"snapshot {len(job.saved):,} bytes")
    assert len(job.saved) < 150_000
