"""What a replay that differs does to a model: when it is stopped, what runs meanwhile, and how it goes on."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.base.errors import Code
from strata.train.core import ops
from strata.train.core.client_commands import Accepted, DeleteCheckpoint, Done, ResolveReplay, SetCheckpointTtl
from strata.train.core.commands import SnapshotWritten
from strata.train.core.facts import CheckpointDeleted, ReplayCompared
from strata.train.core.inputs import (
    ClientCommand,
    CommitSnapshot,
    CompareReplay,
    CompleteSnapshotCopy,
    Decision,
    DeleteExpiredCheckpoints,
    RanksAttached,
)
from strata.train.core.replay_differences import (
    LARGEST,
    TOLERANCES,
    OperationDifference,
    RankNumerics,
    ReplayDifferences,
    distance,
    pass_difference,
    promise_same_bits,
    step_difference,
    sum_differences,
)
from strata.train.core.state import ReplayStop
from tests.core.train.servers import TENANT, Server, forward_backward, step

HERE = RankNumerics("2 ranks", "float32", deterministic=True)
ABOVE = OperationDifference(logprobs=1.0, above=True)


def differing(number: int, *, same: bool = True) -> ReplayDifferences:
    return ReplayDifferences().with_operation(number, ABOVE, same=same)


def compare(server: Server, model: str, found: ReplayDifferences) -> ReplayCompared:
    through = server.state.dispatched
    decision = server.ask(CompareReplay("next", through, {model: found}, server.now_s))
    (fact,) = decision.facts
    assert isinstance(fact, ReplayCompared)
    return fact


def resolve(model: str, action: Any, *, everything: bool = False, tenant: str = TENANT) -> ClientCommand:
    return ClientCommand(tenant, ResolveReplay(model, action, everything), 1_000.0)


def saved(server: Server, model: str, seq: int, name: str, **fields: Any) -> None:
    server.accept(ops.SaveWeights(model, seq, "weights", name, **fields))
    server.run_all()


def stopped_server() -> tuple[Server, str]:
    """A model with a checkpoint at 2, and a stop at its fourth operation."""
    server = Server()
    model = server.model()
    server.accept(step(model, 1))
    server.run_all()
    saved(server, model, 2, "good")
    server.accept(step(model, 3), step(model, 4))
    server.run_all()
    number = server.future(f"{model}:4").number
    assert compare(server, model, differing(number)).stopped == (model,)
    return server, model


def stop_of(server: Server, model: str) -> ReplayStop | None:
    return server.state.models[model].stopped


def refused(server: Server, future_id: str) -> ops.Failed:
    result = server.result(future_id)
    assert isinstance(result, ops.Failed), result
    return result


# What is a difference


def test_nothing_is_different_from_itself_also_if_it_is_no_number() -> None:
    for value in (0.0, -1.5, math.inf, -math.inf, math.nan):
        assert distance(value, value) == 0
    assert distance(1.0, math.nan) == distance(math.inf, -math.inf) == distance(0.0, math.inf) == LARGEST


@given(first=st.floats(-1e6, 1e6), now=st.floats(-1e6, 1e6), dtype=st.sampled_from(sorted(TOLERANCES)))
def test_a_step_is_above_its_tolerance_exactly_if_its_norm_differs_by_more_relative_to_it(
    first: float, now: float, dtype: str
) -> None:
    found = step_difference(first, now, dtype)
    assert found.gradient_norm == abs(first - now)
    assert found.above == (abs(first - now) > TOLERANCES[dtype] * max(1.0, abs(first)))


def test_a_pass_is_above_its_tolerance_by_one_token_or_by_the_loss_of_all() -> None:
    assert not pass_difference((10.0, 10.0), 3e-5, 100, "float32").above
    assert pass_difference((10.0, 10.0), 3.1e-5, 100, "float32").above
    assert not pass_difference((10.0, 10.002), 0.0, 100, "float32").above
    assert pass_difference((10.0, 10.004), 0.0, 100, "float32").above
    assert not pass_difference((1e6, 1e6 + 20), 0.0, 100, "float32").above
    assert not pass_difference((10.0, 10.0), 0.06, 100, "bfloat16").above
    assert pass_difference((10.0, math.nan), 0.0, 100, "bfloat16").above


def test_the_largest_difference_of_each_kind_and_the_first_dispatch_above_are_kept() -> None:
    found = ReplayDifferences()
    for number, difference, same in (
        (3, OperationDifference(loss=0.5), True),
        (4, None, True),
        (5, OperationDifference(logprobs=2.0, above=True), False),
        (6, OperationDifference(gradient_norm=1.0, above=True), True),
        (7, OperationDifference(loss=0.25, above=True), True),
    ):
        found = found.with_operation(number, difference, same=same)
    assert found == ReplayDifferences(4, 1, 0.5, 1.0, 2.0, above=5, stops_at=6)
    both = sum_differences([found, ReplayDifferences(1, 0, 3.0), ReplayDifferences(2, 0, above=2)])
    assert both == ReplayDifferences(7, 1, 3.0, 1.0, 2.0, above=2, stops_at=6)
    assert sum_differences([]) == ReplayDifferences()


def test_only_deterministic_kernels_on_one_mesh_promise_the_same_bits() -> None:
    assert promise_same_bits(HERE, HERE)
    assert not promise_same_bits(None, HERE)
    assert not promise_same_bits(None, None)
    assert not promise_same_bits(RankNumerics("4 ranks", "float32", deterministic=True), HERE)
    assert not promise_same_bits(RankNumerics("2 ranks", "bfloat16", deterministic=True), HERE)
    loose = RankNumerics("2 ranks", "float32")
    assert not promise_same_bits(loose, loose)
    assert not promise_same_bits(loose, HERE)


# When a model is stopped


def test_what_is_above_the_tolerance_elsewhere_is_journaled_and_stops_nothing() -> None:
    server = Server()
    model = server.model()
    fact = compare(server, model, differing(1, same=False))
    assert (fact.stopped, fact.models[model].above) == ((), 1)
    assert stop_of(server, model) is None


def test_a_replay_of_nothing_is_not_journaled() -> None:
    server = Server()
    assert not server.ask(CompareReplay("next", 0, {}, 1.0)).facts


def test_a_stopped_model_refuses_what_comes_with_the_reason_and_others_train_on() -> None:
    server, model = stopped_server()
    other = server.model(1)
    ids = server.accept(
        forward_backward(model, 5), step(model, 6), ops.SaveWeights(model, 7, "weights", "late"), step(other, 1)
    )
    server.run_all()
    for future_id in ids[:3]:
        failure = refused(server, future_id)
        assert failure.category == "server"
        assert f"strata serve resolve {model}" in failure.message
        assert "differs from its first run" in failure.message
    assert isinstance(server.result(ids[3]), ops.StepDone)
    assert "late" not in [name for _, _, name in server.state.checkpoints]


def test_a_stop_outlives_a_restart_and_is_not_repeated_by_the_next_replay() -> None:
    for from_snapshot in (True, False):
        server, model = stopped_server()
        before = stop_of(server, model)
        server.restart(from_snapshot=from_snapshot)
        assert stop_of(server, model) == before is not None
        assert compare(server, model, differing(1)).stopped == ()
        assert stop_of(server, model) == before


def test_a_stopped_model_can_be_unloaded_and_is_then_nobodys_concern() -> None:
    server, model = stopped_server()
    server.accept(ops.UnloadModel(model))
    server.run_all()
    assert server.state.models[model].unloaded
    assert server.refusal(resolve(model, "accept")).code is Code.PRECONDITION


# How it goes on


def test_accepted_numbers_resume_the_model_and_the_same_difference_does_not_stop_it_again() -> None:
    server, model = stopped_server()
    assert server.ask(resolve(model, "accept")).reply == Done()
    assert stop_of(server, model) is None
    (future_id,) = server.accept(step(model, 5))
    server.run_all()
    assert isinstance(server.result(future_id), ops.StepDone)
    assert compare(server, model, differing(server.future(f"{model}:4").number)).stopped == ()
    later = server.future(future_id).number
    assert compare(server, model, differing(later)).stopped == (model,)


def test_a_roll_back_loads_the_last_checkpoint_of_the_first_run_and_resumes_when_it_is_loaded() -> None:
    server, model = stopped_server()
    reply = server.ask(resolve(model, "roll_back")).reply
    assert isinstance(reply, Accepted)
    assert server.ask(resolve(model, "roll_back")).reply == reply
    assert server.refusal(resolve(model, "accept")).code is Code.CONFLICT
    dispatch = server.dispatch()
    assert dispatch is not None
    load = server.future(reply.future_id).operation
    assert isinstance(load, ops.LoadWeights)
    assert (load.name, load.optimizer) == ("good", True)
    assert dispatch.path == server.state.checkpoints[model, "weights", "good"].path
    (early,) = server.accept(step(model, 5))
    assert server.dispatch() is None
    assert "is stopped" in refused(server, early).message
    server.answer(dispatch, [ops.WeightsLoaded("tinker://x")])
    assert stop_of(server, model) is None
    assert server.state.models[model].lineage.parent == f"tinker://{model}/weights/good"
    (future_id,) = server.accept(step(model, 6))
    server.run_all()
    assert isinstance(server.result(future_id), ops.StepDone)
    assert compare(server, model, differing(server.future(f"{model}:4").number)).stopped == ()


def test_a_roll_back_that_fails_leaves_the_model_stopped_and_can_be_tried_again() -> None:
    server, model = stopped_server()
    first = server.ask(resolve(model, "roll_back")).reply
    assert isinstance(first, Accepted)
    dispatch = server.dispatch()
    assert dispatch is not None
    server.answer(dispatch, [ops.Failed("server", "the disk is gone")])
    assert stop_of(server, model) is not None
    second = server.ask(resolve(model, "roll_back")).reply
    assert isinstance(second, Accepted)
    assert second.future_id != first.future_id


def test_a_checkpoint_that_the_replayed_numbers_are_in_is_not_rolled_back_to() -> None:
    server = Server()
    model = server.model()
    saved(server, model, 1, "good")
    server.accept(step(model, 2))
    server.run_all()
    server.accept(ops.SaveWeights(model, 3, "weights", "late"))
    sent = server.dispatch()
    assert sent is not None
    through = sent.number - 1
    server.ask(CompareReplay("next", through, {model: differing(through)}, 1.0))
    server.answer(sent, [ops.WeightsSaved("tinker://x")])
    reply = server.ask(resolve(model, "roll_back")).reply
    assert isinstance(reply, Accepted)
    load = server.future(reply.future_id).operation
    assert isinstance(load, ops.LoadWeights)
    assert load.name == "good"


def test_without_a_checkpoint_there_is_nothing_to_roll_back_to() -> None:
    server = Server()
    model = server.model()
    compare(server, model, differing(1))
    error = server.refusal(resolve(model, "roll_back"))
    assert error.code is Code.PRECONDITION
    assert "no checkpoint" in error.message
    server.ask(resolve(model, "accept"))
    assert server.refusal(resolve(model, "accept")).code is Code.PRECONDITION


def test_only_its_owner_and_an_operator_resolve_a_model() -> None:
    server, model = stopped_server()
    for action in ("accept", "roll_back"):
        stranger = server.refusal(resolve(model, action, tenant="bob"))
        assert (stranger.code, stranger.message) == (Code.NOT_FOUND, f"there is no model {model!r}")
    assert server.ask(resolve(model, "accept", everything=True, tenant="bob")).reply == Done()


def test_a_client_cannot_pass_a_load_off_as_a_roll_back() -> None:
    server, model = stopped_server()
    load = ops.LoadWeights(model, 0, model, "weights", "good", optimizer=True, rollback=7)
    with pytest.raises(Exception, match="only the server itself"):
        server.accept(load)


# What is kept meanwhile


def test_checkpoints_of_a_stopped_model_expire_when_it_goes_on() -> None:
    server, model = stopped_server()
    server.ask(ClientCommand(TENANT, SetCheckpointTtl(model, "weights", "good", 1.0), server.now_s))
    later = DeleteExpiredCheckpoints(server.now_s + 10)
    assert not server.ask(later).facts
    server.ask(resolve(model, "accept"))
    (gone,) = server.ask(later).facts
    assert isinstance(gone, CheckpointDeleted)
    saved(server, model, 5, "another")
    assert server.ask(ClientCommand(TENANT, DeleteCheckpoint(model, "weights", "another"), 1.0)).facts


def snapshot(server: Server, model: str, seq: int) -> int:
    """Train until one is due, and commit it."""
    if (taking := server.state.snapshotting) is not None:
        commit(server, taking.number)
    server.accept(step(model, seq))
    while (dispatch := server.dispatch()) is not None:
        if dispatch.snapshot:
            server.ask(CompleteSnapshotCopy(dispatch.number, None))
            commit(server, dispatch.number)
            return dispatch.number
        server.answer(dispatch)
    raise AssertionError("no snapshot was due")


def commit(server: Server, number: int) -> Decision:
    return server.ask(CommitSnapshot(SnapshotWritten(1, number, f"digest-{number}", 1, 0.1, 1.0), server.now_s))


def test_the_snapshot_from_before_the_difference_is_kept_with_the_journal_after_it() -> None:
    server = Server(snapshot_dispatches=1)
    server.ask(RanksAttached("group", HERE))
    model, other = server.model(), server.model(1)
    numbers = [snapshot(server, model, seq) for seq in (1, 2)]
    last = server.state.dispatched
    compare(server, model, differing(last + 1))
    more = [snapshot(server, other, seq) for seq in (1, 2, 3)]
    kept = [each.number for each in server.state.snapshots]
    good = max(number for number in numbers if number <= last)
    assert kept == [good, *more[-2:]]
    assert server.state.truncated_through == good
    assert server.state.snapshots[0].numerics == HERE
    server.ask(resolve(model, "accept"))
    more.append(snapshot(server, other, 4))
    assert [each.number for each in server.state.snapshots] == more[-2:]
    assert server.state.truncated_through == more[-2]


def test_without_a_snapshot_from_before_the_difference_the_journal_stays_whole() -> None:
    server = Server(snapshot_dispatches=1000)
    server.ask(RanksAttached("group", HERE))
    model, other = server.model(), server.model(1)
    compare(server, model, differing(1))
    server.machine = type(server.machine)(type(server.state.rules)(base_models=("tiny",), snapshot_dispatches=1))
    server.restart()
    for seq in (1, 2, 3):
        snapshot(server, other, seq)
    assert (len(server.state.snapshots), server.state.truncated_through) == (2, 0)
