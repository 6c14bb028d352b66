"""Ranks that do again what others did: which of them are used, what is left out, and what must come out the same."""

from __future__ import annotations

import pytest

from strata.base.errors import Code
from strata.train.core import ops
from strata.train.core.inputs import RanksAttached
from strata.train.core.replay import CompletedDispatch, divergence, reject_reason, skip_on_replay
from strata.train.core.state import Dispatch
from tests.core.train.servers import LORA, Server, forward_backward, step

MODEL = "session-alice:train:0"
FAILED = ops.Failed("server", "input/output error")
CREATE = ops.CreateModel(MODEL, "tiny", LORA)
LOAD = ops.LoadWeights(MODEL, 1, MODEL, "weights", "mine", optimizer=True)
SAVE = ops.SaveWeights(MODEL, 1, "weights", "mine")
OPEN = ops.OpenSampler("session-alice:sample:0", "tiny", ops.SavedWeights(MODEL, "weights", "mine"))
PASS = forward_backward(MODEL, 1)
LOOK = forward_backward(MODEL, 1, forward_only=True)


def past(*operations: ops.Operation, failed: bool = False) -> CompletedDispatch:
    ids = [str(place) for place, _ in enumerate(operations)]
    return CompletedDispatch(Dispatch(7, ids, path="run/weights/mine@1"), operations, [failed] * len(operations))


@pytest.mark.parametrize(
    ("operation", "words"),
    [
        (CREATE, "max_models"),
        (LOAD, "run/weights/mine@1"),
        (SAVE, "run/weights/mine@1"),
        (ops.SyncWeights(MODEL, 1, "mine"), "run/weights/mine@1"),
        (PASS, "settings"),
        (step(MODEL, 1), "settings"),
        (ops.AbortGradients(MODEL, 1), "settings"),
    ],
)
def test_what_changed_a_model_and_fails_when_it_is_done_again_is_told_with_what_to_do(
    operation: ops.Operation, words: str
) -> None:
    error = divergence(past(operation), [FAILED])
    assert error is not None
    assert error.code is Code.CORRUPT
    assert "dispatch 7" in error.message
    assert FAILED.message in error.message
    assert words in str(error)
    assert divergence(past(operation), [ops.StepDone({})]) is None
    assert divergence(past(operation, failed=True), [FAILED]) is None


@pytest.mark.parametrize("operation", [PASS, step(MODEL, 1)])
def test_what_changes_a_model_now_and_failed_for_its_client_is_told_too(operation: ops.Operation) -> None:
    error = divergence(past(operation, failed=True), [ops.StepDone({})])
    assert error is not None
    assert "once failed and succeeded" in error.message


@pytest.mark.parametrize("operation", [SAVE, OPEN, LOOK])
def test_what_failed_once_and_changes_no_model_may_succeed_now(operation: ops.Operation) -> None:
    assert divergence(past(operation, failed=True), [ops.StepDone({})]) is None


@pytest.mark.parametrize("operation", [OPEN, ops.SaveSampler(MODEL, 1, OPEN.sampler_id), LOOK, ops.Sleep()])
def test_what_changed_no_model_may_fail_when_it_is_done_again(operation: ops.Operation) -> None:
    assert divergence(past(operation), [FAILED]) is None


def test_each_operation_of_a_shared_pass_has_to_come_out_as_it_did() -> None:
    done = ops.PassDone(ops.InlinePayload(b""))
    shared = past(PASS, PASS)._replace(failed=[False, True])
    assert divergence(shared, [done, FAILED]) is None
    assert divergence(shared, [FAILED, FAILED]) is not None
    assert divergence(shared, [done]) is not None


@pytest.mark.proves(
    "Never again: a dispatch that succeeded was rejected for memory in the replay, and the orchestrator ended"
)
def test_ranks_that_have_no_memory_for_what_others_did_are_no_divergence() -> None:
    short = ops.Failed("user", "out of memory", memory=True)
    error = divergence(past(PASS), [short])
    assert error is not None
    assert error.code is Code.EXHAUSTED
    assert divergence(past(LOOK), [short]) is None
    assert divergence(past(PASS, failed=True), [short]) is None


def test_what_failed_without_a_trace_is_not_done_again_and_a_step_that_failed_is() -> None:
    for operation in (CREATE, LOAD, ops.Sleep(), ops.AbortGradients(MODEL, 1)):
        assert skip_on_replay(past(operation, failed=True))
        assert not skip_on_replay(past(operation))
    for other in (step(MODEL, 1), PASS, SAVE, OPEN):
        assert not skip_on_replay(past(other, failed=True))


def test_a_group_goes_on_only_if_it_is_the_one_that_caught_up_last() -> None:
    server = Server()
    server.ask(RanksAttached("first"))
    model = server.model()
    server.accept(step(model, 1))
    server.run_all()
    done = server.state.dispatched
    assert reject_reason(server.state, "first", done) is None
    assert reject_reason(server.state, "second", 0) is None
    assert "another group took over" in str(reject_reason(server.state, "second", done))
    server.ask(RanksAttached("second"))
    assert reject_reason(server.state, "second", done) is None
    assert reject_reason(server.state, "first", done) is not None
    assert "the journal knows of" in str(reject_reason(server.state, "second", done + 1))


@pytest.mark.parametrize("from_snapshot", [True, False])
def test_a_group_that_was_told_what_was_given_up_is_not_used_also_when_another_was_there_since(
    from_snapshot: bool,
) -> None:
    server = Server()
    server.ask(RanksAttached("first"))
    model = server.model()
    server.accept(step(model, 1))
    dispatch = server.dispatch()
    assert dispatch is not None
    server.give_up(dispatch.number)
    assert reject_reason(server.state, "first", dispatch.number) == "it has applied a dispatch that was failed since"
    server.ask(RanksAttached("second"))
    server.restart(from_snapshot=from_snapshot)
    assert reject_reason(server.state, "first", dispatch.number) is not None
    assert reject_reason(server.state, "second", 0) is None
