"""The lease ledger by itself: what is consumed, what is out, what has to be read again."""

from __future__ import annotations

from strata.coord.core import ledger as ledgers
from strata.coord.core.facts import Grant
from strata.coord.core.ledger import DatasetLedger, EpochLedger, EpochProgress, Lease, ShardRange
from tests.core.coord.jobs import corpus


def opened(**fields: int) -> tuple[DatasetLedger, EpochLedger]:
    """An epoch with one lease for each of the first three shards, all of one worker."""
    dataset = corpus(**fields)
    datasets = DatasetLedger(dataset)
    epoch = datasets.epochs.setdefault(0, datasets.epoch(0))
    ledgers.grant(epoch, dataset, "w0", [Grant(each + 1, each, *dataset.bounds(each), True) for each in range(3)])
    return datasets, epoch


def test_the_last_shard_is_as_short_as_the_samples_leave_it() -> None:
    dataset = corpus(samples=10)
    assert (dataset.shards, dataset.bounds(0), dataset.bounds(2)) == (3, (0, 4), (8, 10))


def test_an_ack_moves_forward_only_and_ends_the_lease_at_its_end() -> None:
    _, epoch = opened()
    assert ledgers.ack(epoch, 1, 2).until == 0, "it tells how the lease was before"
    ledgers.ack(epoch, 1, 1)
    assert epoch.leases[1].until == 2
    ledgers.ack(epoch, 1, 4)
    assert (1 in epoch.leases, epoch.held) == (False, {"w0": [2, 3]})


def test_the_leases_of_a_lost_worker_come_to_the_front_oldest_first() -> None:
    _, epoch = opened()
    epoch.returned = [ShardRange(9, 36, 40)]
    ledgers.ack(epoch, 2, 6)
    ledgers.give_back_all(epoch, "w0")
    assert epoch.returned == [ShardRange(0, 0, 4), ShardRange(1, 6, 8), ShardRange(2, 8, 12), ShardRange(9, 36, 40)]
    assert (epoch.leases, epoch.held, epoch.failures) == ({}, {}, {}), "a loss is not the shard's failure"
    ledgers.give_back_all(epoch, "stranger")


def test_only_what_is_out_and_what_came_back_keeps_an_epoch_open() -> None:
    datasets, epoch = opened(samples=12)
    assert ledgers.is_exhausted(datasets.dataset, epoch)
    assert not ledgers.is_finished(datasets.dataset, epoch)
    for lease_id in (1, 2):
        ledgers.ack(epoch, lease_id, epoch.leases[lease_id].end)
    ledgers.give_back(epoch, 3, failed=True)
    ledgers.close_finished(datasets, 0)
    assert datasets.finished == []
    ledgers.grant(epoch, datasets.dataset, "w1", [Grant(4, 2, 8, 12, False)])
    ledgers.quarantine(epoch, 4, "broken")
    assert epoch.failures == {2: 2}
    assert ledgers.is_finished(datasets.dataset, epoch)
    ledgers.close_finished(datasets, 0)
    assert (datasets.finished, datasets.epochs) == ([0], {})
    assert [each.shard_range for each in datasets.quarantined[0]] == [ShardRange(2, 8, 12)]


def test_progress_adds_up_to_all_shards() -> None:
    datasets, epoch = opened()
    ledgers.ack(epoch, 1, 4)
    ledgers.quarantine(epoch, 2, "broken")
    assert ledgers.progress(datasets.dataset, epoch) == EpochProgress(
        total=10, done=1, leased=1, waiting=7, quarantined=1
    )
    ledgers.give_back_all(epoch, "w0")
    assert ledgers.progress(datasets.dataset, epoch) == EpochProgress(
        total=10, done=1, leased=0, waiting=8, quarantined=1
    )


def test_a_position_has_what_was_read_and_not_what_was_acked_later() -> None:
    datasets, epoch = opened()
    ledgers.ack(epoch, 1, 3)
    read_until = {1: 2, 2: 6}
    late = ledgers.late_part(Lease(1, "w0", 0, 0, 4, until=2), 3, read_until)
    assert late == ShardRange(0, 2, 3)
    (position,) = ledgers.position(datasets, read_until, {0: [late]}).epochs
    assert position.unread == (ShardRange(0, 2, 4), ShardRange(1, 6, 8), ShardRange(2, 8, 12))
    assert sum(position.cursors) == 3


def test_nothing_is_late_that_was_read_before_the_part_was_taken() -> None:
    lease = Lease(1, "w0", 0, 0, 4, until=0)
    assert ledgers.late_part(lease, 3, {1: 3}) is None
    assert ledgers.late_part(lease, 4, {1: 3}) == ShardRange(0, 3, 4)
    assert ledgers.late_part(lease, 4, {}) == ShardRange(0, 0, 4), "a lease from after the part"


def test_neighbouring_rests_of_a_shard_become_one_and_those_of_two_shards_do_not() -> None:
    datasets, epoch = opened()
    ledgers.give_back_all(epoch, "w0")
    late = {0: [ShardRange(5, 22, 24), ShardRange(5, 20, 22)]}
    (position,) = ledgers.position(datasets, {}, late).epochs
    assert position.unread == (ShardRange(0, 0, 4), ShardRange(1, 4, 8), ShardRange(2, 8, 12), ShardRange(5, 20, 24))


def test_an_epoch_that_ended_after_a_part_was_taken_is_open_in_the_position() -> None:
    datasets, epoch = opened(samples=12)
    ledgers.quarantine(epoch, 2, "broken")
    for lease_id in (1, 3):
        ledgers.ack(epoch, lease_id, epoch.leases[lease_id].end)
    ledgers.close_finished(datasets, 0)
    assert datasets.finished == [0]
    position = ledgers.position(datasets, {}, {0: [ShardRange(2, 8, 12)]})
    assert position.finished == ()
    ledgers.rewind(datasets, position)
    again = datasets.epochs[0]
    assert (datasets.finished, datasets.quarantined) == ([], {})
    assert (again.issued, again.returned) == (3, [ShardRange(2, 8, 12)])
    assert [each.shard_range for each in again.quarantined] == [ShardRange(1, 4, 8)]


def test_what_a_finished_epoch_put_aside_is_still_shown_after_a_rewind() -> None:
    datasets, epoch = opened(samples=12)
    ledgers.quarantine(epoch, 2, "broken")
    for lease_id in (1, 3):
        ledgers.ack(epoch, lease_id, epoch.leases[lease_id].end)
    ledgers.close_finished(datasets, 0)
    before = datasets.quarantined
    ledgers.rewind(datasets, ledgers.position(datasets, {}, {}))
    assert (datasets.finished, datasets.quarantined) == ([0], before)
    ledgers.rewind(datasets, ledgers.DatasetPosition((), ()))
    assert (datasets.finished, datasets.quarantined, datasets.epochs) == ([], {}, {})
