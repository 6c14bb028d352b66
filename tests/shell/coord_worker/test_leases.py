"""What a worker holds and acks, without a coordinator."""

from __future__ import annotations

import pytest

from strata.base.errors import Code, StrataError
from strata.coord.core.facts import CommandKind
from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.worker.commands import Commands
from strata.coord.worker.leases import HeldLease, LeaseTracker


def leases(*lease_ids: int) -> LeaseTracker:
    made = LeaseTracker()
    made.take(
        "corpus", 0, [pb.Shard(lease_id=each, start_index=each * 10, end_index=each * 10 + 10) for each in lease_ids]
    )
    return made


def begin(made: LeaseTracker) -> HeldLease:
    held = made.next_unread("corpus", 0)
    assert held is not None
    held.delivered = True
    return held


def test_leases_are_read_and_acked_in_the_order_in_which_they_came() -> None:
    made = leases(3, 1, 2)
    for lease_id in (3, 1, 2):
        held = begin(made)
        assert held.lease_id == lease_id
        held.consume(held.shard.end_index)
    assert [each.message for each in made.pending_acks()] == [pb.ShardAck(lease_id=each) for each in (3, 1, 2)]


def test_an_ack_is_repeated_until_it_is_confirmed() -> None:
    made = leases(1)
    begin(made).consume(20)
    sent = made.pending_acks("corpus")
    assert made.pending_acks("corpus") == sent
    assert made.ids("corpus") == [1]
    made.confirm(sent, ())
    assert made.pending_acks() == []
    assert made.ids() == []


def test_progress_is_acked_once_and_the_lease_goes_on() -> None:
    made = leases(1)
    held = begin(made)
    held.consume(14)
    sent = made.pending_acks()
    assert [each.message for each in sent] == [pb.ShardAck(lease_id=1, consumed_until=14)]
    held.consume(17)
    made.confirm(sent, ())
    assert [each.message.consumed_until for each in made.pending_acks()] == [17]
    with pytest.raises(StrataError, match="not a place"):
        held.consume(13)


def test_a_lease_that_is_handed_out_again_keeps_its_place() -> None:
    made = leases(1)
    begin(made).consume(14)
    made.take("corpus", 0, [pb.Shard(lease_id=1, start_index=10, end_index=20)])
    assert made.next_unread("corpus", 0) is None
    made.restart("corpus", 0)
    assert begin(made).position == 14


def test_between_taking_a_checkpoint_and_reporting_it_nothing_is_acked() -> None:
    made = leases(1, 2)
    first, second = begin(made), begin(made)
    first.consume(20)
    second.consume(25)
    capture = made.begin("c", 7)
    second.consume(30)
    assert (made.pending_acks(), made.unacked_epochs(), made.progress()) == ([], [], [])
    assert made.ids() == [1, 2]
    assert [(each.lease_id, each.consumed_until) for each in capture.consumed] == [(1, 20), (2, 25)]
    with pytest.raises(StrataError, match="not reported"):
        made.begin("d", 8)
    made.end(capture)
    assert [each.held.lease_id for each in made.pending_acks()] == [1, 2]


def test_only_leases_that_the_loop_has_seen_are_reported_as_lost() -> None:
    made = leases(1, 2)
    held = begin(made)
    made.mark_lost([1, 2, 99])
    assert held.lost
    assert made.pop_lost() == [1]
    assert made.pop_lost() == []


def test_a_lease_that_is_over_is_lost_only_if_its_ack_is_rejected() -> None:
    made = leases(1, 2)
    first, second = begin(made), begin(made)
    first.consume(20)
    # The coordinator has the ack of the first; its answer is still on its way.
    made.mark_unless_finished([1, 2])
    assert (first.lost, second.lost) == (False, True)
    assert [each.held.lease_id for each in made.pending_acks()] == [1]


def test_a_rejected_ack_loses_the_lease() -> None:
    made = leases(1)
    begin(made).consume(20)
    made.confirm(made.pending_acks(), [1])
    assert made.pop_lost() == [1]
    assert made.ids() == []


def test_a_failed_shard_is_given_back_with_what_was_read_of_it() -> None:
    made = leases(1)
    held = begin(made)
    held.consume(12)
    held.failure = "unreadable"
    assert [each.message for each in made.pending_acks()] == [
        pb.ShardAck(lease_id=1, consumed_until=12, failed=True, reason="unreadable")
    ]


def test_a_command_is_carried_out_once_and_acknowledged_when_it_was() -> None:
    commands = Commands(None)
    told = [pb.Command(command_id=1, kind=pb.COMMAND_KIND_RELOAD), pb.Command(command_id=2, kind=pb.COMMAND_KIND_DRAIN)]
    assert [each.command_id for each in commands.receive(told)] == [1, 2]
    assert commands.receive(told) == []
    assert commands.draining
    assert commands.to_ack == {2}
    assert [each.kind for each in commands.take()] == [CommandKind.RELOAD]
    assert commands.to_ack == {1, 2}
    commands.to_ack.clear()
    # The ack got lost.
    commands.receive(told)
    assert commands.to_ack == {1, 2}


def test_errors_of_the_ledger_have_codes() -> None:
    made = leases(1)
    made.begin("c", 1)
    with pytest.raises(StrataError) as caught:
        made.begin("c", 2)
    assert caught.value.code is Code.PRECONDITION
