"""When snapshots of the models are taken, when they count, which are kept, and from where ranks may begin."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.base.errors import Code, StrataError
from strata.train.core import ops
from strata.train.core.checkpoint_retention import retained_folders
from strata.train.core.client_commands import DeleteCheckpoint
from strata.train.core.commands import SnapshotWritten
from strata.train.core.facts import SnapshotAbandoned, SnapshotCommitted, SnapshotRejected
from strata.train.core.inputs import (
    ClientCommand,
    CommitSnapshot,
    CompleteDispatch,
    CompleteSnapshotCopy,
    Decision,
    RanksAttached,
    RejectSnapshot,
)
from strata.train.core.snapshots import COST_SHARE, due_reason, pending_operations, recovery_point, replay_starts
from strata.train.core.state import Dispatch
from tests.core.train.servers import TENANT, Server, forward_backward, step

LONGEST_S = 3.0


def server_with(**rules: float) -> Server:
    server = Server(max_running=8, **rules)
    server.ask(RanksAttached("group"))
    return server


def model_of(server: Server) -> str:
    model = server.model(done=False)
    run(server)
    return model


def run(server: Server) -> None:
    """The next dispatch, which is no snapshot."""
    dispatch = server.dispatch()
    assert dispatch is not None
    assert not dispatch.snapshot
    server.answer(dispatch)


def taken(server: Server) -> Dispatch:
    """The next dispatch, which is a snapshot and is answered."""
    dispatch = server.dispatch()
    assert dispatch is not None
    assert dispatch.snapshot
    server.ask(CompleteSnapshotCopy(dispatch.number, None))
    return dispatch


def commit(server: Server, number: int, trouble: str | None = None) -> Decision:
    return server.ask(
        CommitSnapshot(SnapshotWritten(1, number, f"digest-{number}", 1, 0.1, 1.0, trouble), server.now_s)
    )


def train(server: Server, model: str, *seqs: int) -> None:
    for seq in seqs:
        server.accept(step(model, seq))
        run(server)


def test_a_snapshot_is_due_after_so_many_dispatches_that_change_something() -> None:
    server = server_with(snapshot_dispatches=3)
    model = model_of(server)
    for seq in (1, 2, 3):
        server.accept(forward_backward(model, seq, forward_only=True))
        run(server)
    train(server, model, 4)
    assert due_reason(server.state, server.now_s) is None
    train(server, model, 5)
    dispatch = taken(server)
    assert not dispatch.future_ids
    assert dispatch.path.startswith(f"{dispatch.number:012d}-group")
    assert server.dispatch() is None


def test_a_snapshot_is_due_when_the_oldest_change_that_none_holds_has_waited_so_long() -> None:
    server = server_with(snapshot_s=60.0)
    model = model_of(server)
    server.now_s += 59
    train(server, model, 1)
    server.now_s += 1
    commit(server, taken(server).number)
    server.now_s += 1_000
    assert due_reason(server.state, server.now_s) is None, "nothing has changed since"
    train(server, model, 2)
    assert due_reason(server.state, server.now_s) is None
    assert due_reason(server.state, server.now_s + 60) is not None


def test_a_snapshot_is_due_after_so_many_bytes_of_payloads_also_of_passes_that_change_nothing() -> None:
    server = server_with(snapshot_payload_bytes=3_000)
    model = model_of(server)
    for seq, forward_only in ((1, False), (2, True)):
        server.accept(
            forward_backward(model, seq, payload=ops.StoredPayload("0" * 64, 1_500), forward_only=forward_only)
        )
        assert due_reason(server.state, 0.0) is None
        run(server)
    taken(server)


def test_none_is_due_while_one_is_being_written_or_the_server_sleeps_or_all_reasons_are_off() -> None:
    server = server_with(snapshot_dispatches=1)
    model = model_of(server)
    train_one = taken(server)
    train(server, model, 1)
    assert due_reason(server.state, server.now_s) is None
    commit(server, train_one.number)
    assert due_reason(server.state, server.now_s) is not None
    server.state.asleep = True
    assert due_reason(server.state, server.now_s) is None
    off = server_with()
    model_of(off)
    assert due_reason(off.state, 1e12) is None


def test_a_snapshot_counts_only_when_everything_before_it_has_its_results() -> None:
    """Their results could not be made again from what comes after."""
    server = server_with(snapshot_dispatches=2)
    model = model_of(server)
    server.accept(step(model, 1))
    unanswered = server.dispatch()
    assert unanswered is not None
    snapshot = taken(server)
    assert commit(server, snapshot.number).facts == ()
    server.answer(unanswered)
    (fact,) = commit(server, snapshot.number).facts
    assert isinstance(fact, SnapshotCommitted)
    assert commit(server, snapshot.number).facts == ()


def test_the_last_two_are_kept_and_what_came_before_them_is_let_go() -> None:
    server = server_with(snapshot_dispatches=1)
    model = model_of(server)
    numbers = []
    for seq in range(1, 4):
        numbers.append(taken(server).number)
        commit(server, numbers[-1])
        assert server.state.truncated_through == (numbers[-2] if seq > 1 else 0)
        assert replay_starts(server.state) == ({0, numbers[0]} if seq == 1 else set(numbers[-2:]))
        train(server, model, seq)
    server.restart(from_snapshot=True)
    assert [each.number for each in server.state.snapshots] == numbers[-2:]
    server.restart(from_snapshot=False)
    assert [each.number for each in server.state.snapshots] == numbers[-2:]


def test_operations_that_waited_at_a_boundary_are_remembered_with_it() -> None:
    server = server_with(snapshot_dispatches=1)
    model = model_of(server)
    held = step(model, 3)
    server.accept(held)
    snapshot = taken(server)
    commit(server, snapshot.number)
    train(server, model, 1)
    assert pending_operations(server.state, snapshot.number + 1) == {f"{model}:3": held}
    assert pending_operations(server.state, 0) == {}


def test_what_was_let_go_cannot_be_asked_for() -> None:
    server = server_with(snapshot_dispatches=1)
    model = model_of(server)
    for seq in (1, 2):
        commit(server, taken(server).number)
        train(server, model, seq)
    with pytest.raises(StrataError) as refused:
        pending_operations(server.state, 1)
    assert refused.value.code is Code.GONE


def test_a_refused_snapshot_is_forgotten_and_the_last_way_back_never_is() -> None:
    server = server_with(snapshot_dispatches=1)
    model = model_of(server)
    first, second = 0, 0
    for seq in (1, 2):
        first, second = second, taken(server).number
        commit(server, second)
        train(server, model, seq)
    found = recovery_point(server.state, frozenset())
    assert found is not None
    assert found.number == second
    assert server.ask(RejectSnapshot(second, "damaged")).facts == (SnapshotRejected(second, "damaged"),)
    found = recovery_point(server.state, frozenset())
    assert found is not None
    assert found.number == first
    assert server.ask(RejectSnapshot(first, "damaged")).facts == ()
    with pytest.raises(StrataError) as refused:
        recovery_point(server.state, {first})
    assert refused.value.code is Code.CORRUPT


def test_with_all_of_history_there_a_refused_snapshot_leads_to_the_beginning() -> None:
    server = server_with(snapshot_dispatches=1)
    model_of(server)
    number = taken(server).number
    commit(server, number)
    server.ask(RejectSnapshot(number, "damaged"))
    assert recovery_point(server.state, frozenset()) is None


def test_ranks_that_die_over_a_snapshot_leave_it_due_again_but_later_each_time() -> None:
    server = server_with(snapshot_dispatches=2)
    model = model_of(server)
    train(server, model, 1)
    dispatch = server.dispatch()
    assert dispatch is not None
    assert dispatch.snapshot
    server.ask(RanksAttached("the next"))
    assert not server.state.dispatches
    assert server.dispatch() is None, "twice as many are waited for now"
    train(server, model, 2, 3)
    again = taken(server)
    assert again.path.endswith("-the next")
    (fact,) = commit(server, again.number, "the disk is full").facts
    assert isinstance(fact, SnapshotAbandoned)
    train(server, model, 4, 5, 6, 7)
    commit(server, taken(server).number)
    train(server, model, 8)
    assert due_reason(server.state, 0.0) is None
    train(server, model, 9)
    assert due_reason(server.state, 0.0) is not None


def test_a_snapshot_that_the_ranks_are_stuck_in_is_given_up() -> None:
    server = server_with(snapshot_dispatches=1)
    model_of(server)
    dispatch = server.dispatch()
    assert dispatch is not None
    server.give_up(dispatch.number)
    assert not server.state.dispatches
    assert server.state.snapshotting is None
    server.restart(from_snapshot=False)
    assert server.state.snapshotting is None


def test_files_that_ranks_read_after_a_snapshot_and_wrote_before_it_stay_when_their_checkpoint_is_deleted() -> None:
    server = server_with(snapshot_dispatches=1)
    model = model_of(server)
    commit(server, taken(server).number)
    server.accept(ops.SaveWeights(model, 1, "weights", "mine"))
    saved = server.dispatch()
    assert saved is not None
    server.answer(saved, [ops.WeightsSaved("path")])
    train(server, model, 2)
    commit(server, taken(server).number)
    server.accept(ops.LoadWeights(model, 3, model, "weights", "mine", optimizer=True))
    loaded = server.dispatch()
    assert loaded is not None
    server.answer(loaded, [ops.WeightsLoaded("path")])
    server.ask(ClientCommand(TENANT, DeleteCheckpoint(model, "weights", "mine"), 0.0))
    assert saved.path in retained_folders(server.state)
    for seq in (4, 5):
        commit(server, taken(server).number)
        train(server, model, seq)
    assert saved.path not in retained_folders(server.state)


def timed_step(server: Server, model: str, seq: int, took_s: float) -> None:
    server.accept(step(model, seq))
    dispatch = server.dispatch()
    assert dispatch is not None
    assert not dispatch.snapshot
    server.ask(CompleteDispatch(dispatch.number, (ops.StepDone({}),), server.now_s, took_s))


def test_a_snapshot_is_due_when_a_replay_would_take_so_long_and_passes_that_change_nothing_are_not_replayed() -> None:
    server = server_with(snapshot_replay_s=5.0)
    model = model_of(server)
    server.accept(forward_backward(model, 1, forward_only=True))
    forward = server.dispatch()
    assert forward is not None
    server.ask(CompleteDispatch(forward.number, (ops.PassDone(ops.InlinePayload(b"")),), server.now_s, 60.0))
    timed_step(server, model, 2, 4.0)
    assert due_reason(server.state, server.now_s) is None
    timed_step(server, model, 3, 1.0)
    assert due_reason(server.state, server.now_s) == "a replay of 5 seconds"
    commit(server, taken(server).number)
    assert due_reason(server.state, server.now_s) is None


def test_operations_that_change_no_model_make_no_snapshot_due_however_slow_they_are() -> None:
    server = server_with(snapshot_replay_s=5.0)
    model = model_of(server)
    timed_step(server, model, 1, 5.0)
    server.ask(CommitSnapshot(SnapshotWritten(1, taken(server).number, "digest", 1, 0.0, 0.0), server.now_s))
    server.accept(ops.SaveWeights(model, 2, "weights", "slow"))
    saving = server.dispatch()
    assert saving is not None
    server.ask(CompleteDispatch(saving.number, (ops.WeightsSaved("path"),), server.now_s, 60.0))
    assert due_reason(server.state, server.now_s) is None
    timed_step(server, model, 3, 4.0)
    assert due_reason(server.state, server.now_s) is None
    timed_step(server, model, 4, 1.0)
    assert due_reason(server.state, server.now_s) == "a replay of 5 seconds"


def test_the_longer_the_last_snapshot_took_the_longer_a_replay_may_take() -> None:
    server = server_with(snapshot_replay_s=5.0)
    model = model_of(server)
    timed_step(server, model, 1, 5.0)
    server.ask(CommitSnapshot(SnapshotWritten(1, taken(server).number, "digest", 1, 0.5, 1.0), server.now_s))
    timed_step(server, model, 2, 29.0)
    assert due_reason(server.state, server.now_s) is None
    timed_step(server, model, 3, 1.0)
    assert due_reason(server.state, server.now_s) is not None


@pytest.mark.parametrize("trouble", [None, "the disk is full"])
def test_a_dispatch_that_ends_while_its_snapshot_is_taken_counts_for_that_one(
    trouble: str | None,
) -> None:
    server = server_with(snapshot_replay_s=5.0)
    model = model_of(server)
    server.accept(step(model, 1))
    server.accept(step(model, 2))
    first, second = server.dispatch(), server.dispatch()
    assert first is not None
    assert second is not None
    server.ask(CompleteDispatch(first.number, (ops.StepDone({}),), server.now_s, 5.0))
    snapshot = taken(server)
    server.ask(CompleteDispatch(second.number, (ops.StepDone({}),), server.now_s, 3.0))
    commit(server, snapshot.number, trouble)
    assert server.state.snapshot_backlog.replay_s == (0.0 if trouble is None else 8.0)
    server.restart(from_snapshot=False)
    assert server.state.snapshot_backlog.replay_s == (0.0 if trouble is None else 8.0)


@given(st.lists(st.floats(0.01, LONGEST_S), min_size=1, max_size=80), st.floats(0.0, 2.0))
def test_however_long_the_load_lasts_a_replay_is_bounded(steps: list[float], written_s: float) -> None:
    server = server_with(snapshot_replay_s=5.0)
    model = model_of(server)
    behind_s = writing_s = 0.0
    for seq, took_s in enumerate(steps, 1):
        if due_reason(server.state, server.now_s) is not None:
            taken(server)
            writing_s = 0.0
        timed_step(server, model, seq, took_s)
        behind_s += took_s
        writing_s += took_s
        taking = server.state.snapshotting
        if taking is not None and writing_s >= written_s:
            server.ask(CommitSnapshot(SnapshotWritten(1, taking.number, "digest", 1, 0.0, written_s), server.now_s))
            behind_s = writing_s
        assert behind_s <= max(5.0, written_s / COST_SHARE) + written_s + 2 * LONGEST_S
