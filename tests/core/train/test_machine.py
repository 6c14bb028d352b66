"""The orchestrator's decisions on whole histories: each failure that other servers are known for, by name."""

from __future__ import annotations

import contextlib

import msgspec
import pytest

from strata.base.errors import Code, StrataError
from strata.train.core import facts, model_options, ops
from strata.train.core.checkpoint_retention import retained_folders
from strata.train.core.client_commands import AbortOperation, DeleteCheckpoint, OpenSession, SubmitOperation
from strata.train.core.facts import Dispatched, DispatchFailed
from strata.train.core.future import FutureStatus
from strata.train.core.inputs import ClientCommand, ExpireResults
from strata.train.core.lookup import checkpoints_of, find_future
from strata.train.core.state import INITIAL, Dispatch
from strata.train.status.views import view_model
from tests.core.train.servers import LORA, TENANT, Server, forward_backward, step


def save(model_id: str, seq: int, name: str, **fields: object) -> ops.SaveWeights:
    return ops.SaveWeights(model_id=model_id, seq_id=seq, kind="weights", name=name, **fields)  # type: ignore[arg-type]


def load(model_id: str, seq: int, run_id: str, name: str) -> ops.LoadWeights:
    return ops.LoadWeights(model_id=model_id, seq_id=seq, run_id=run_id, kind="weights", name=name, optimizer=True)


@pytest.mark.parametrize("loss", [model_options.LossName.CROSS_ENTROPY, model_options.LossName.CUSTOM])
@pytest.mark.parametrize("size", [0.0, 0.5, -1.0, 1e9])
def test_a_group_size_that_is_none_does_not_stop_the_dispatches(loss: model_options.LossName, size: float) -> None:
    """A journal of an earlier version may have such an operation."""
    server = Server()
    model = server.model()
    server.accept(forward_backward(model, 1, (3, 3), loss=loss, config={"group_size": size}), step(model, 2))
    assert server.run_all() == [f"{model}:1", f"{model}:2"]


# Order and identity


@pytest.mark.proves("Never: number 2 is dispatched before number 1")
def test_number_two_is_not_dispatched_before_number_one() -> None:
    server = Server()
    model = server.model()
    server.accept(step(model, 2), forward_backward(model, 3))
    assert server.dispatch() is None
    server.accept(forward_backward(model, 1))
    assert server.run_all() == [f"{model}:1", f"{model}:2", f"{model}:3"]


@pytest.mark.proves("Never: a number that comes twice drops the first request")
def test_a_duplicate_is_the_same_future_and_does_not_drop_the_first_request() -> None:
    server = Server()
    model = server.model()
    first = server.accept(forward_backward(model, 1))
    assert server.accept(forward_backward(model, 1)) == first
    assert server.run_all() == first
    assert server.accept(forward_backward(model, 1)) == first
    assert server.run_all() == []


def test_the_order_in_which_a_client_writes_its_keys_makes_no_other_operation() -> None:
    server = Server()
    model = server.model()
    one = forward_backward(model, 1, config={"a": 1.0, "b": 2.0})
    server.accept(one)
    assert server.accept(forward_backward(model, 1, config={"b": 2.0, "a": 1.0})) == [f"{model}:1"]


def test_a_number_used_twice_for_different_things_is_refused_and_the_first_one_runs() -> None:
    server = Server()
    model = server.model()
    server.accept(step(model, 1, rate=1.0))
    assert server.refusal(ClientCommand(TENANT, SubmitOperation(step(model, 1, rate=2.0)), 0.0)).code is Code.CONFLICT
    assert server.run_all() == [f"{model}:1"]


def test_creating_a_model_twice_is_one_model_and_in_another_way_a_conflict() -> None:
    server = Server()
    model = server.model()
    again = ClientCommand(TENANT, SubmitOperation(ops.CreateModel(model, "tiny", LORA), f"session-{TENANT}"), 0.0)
    assert server.ask(again).facts == ()
    other = ClientCommand(TENANT, SubmitOperation(ops.CreateModel(model, "tiny", None), f"session-{TENANT}"), 0.0)
    assert server.refusal(other).code is Code.CONFLICT


def test_a_model_on_a_base_that_the_server_does_not_have_is_refused_with_the_name_of_the_one_it_has() -> None:
    server = Server(base_models=("tiny", "tiny-1"))
    server.model()
    session_id = f"session-{TENANT}"
    refused = server.refusal(
        ClientCommand(TENANT, SubmitOperation(ops.CreateModel(f"{session_id}:train:1", "huge", LORA), session_id), 0.0)
    )
    assert refused.code is Code.INVALID
    assert "'huge'" in refused.message
    assert refused.hint is not None
    assert "'tiny'" in refused.hint
    server.ask(
        ClientCommand(
            TENANT, SubmitOperation(ops.CreateModel(f"{session_id}:train:1", "tiny-1", LORA), session_id), 0.0
        )
    )


@pytest.mark.parametrize("model_id", ["x", "session-bob:train:0", "session-alice:train:", "session-alice:train:1/2"])
def test_a_model_id_that_does_not_follow_from_its_session_is_refused(model_id: str) -> None:
    server = Server()
    server.model()
    create = ClientCommand(TENANT, SubmitOperation(ops.CreateModel(model_id, "tiny", LORA), f"session-{TENANT}"), 0.0)
    assert server.refusal(create).code is Code.INVALID


def test_what_belongs_to_another_tenant_does_not_exist() -> None:
    server = Server()
    model = server.model()
    future_id = server.accept(step(model, 1))[0]
    for given in (
        ClientCommand("bob", SubmitOperation(step(model, 2)), 0.0),
        ClientCommand("bob", AbortOperation(future_id), 0.0),
    ):
        assert server.refusal(given).code is Code.NOT_FOUND
    with pytest.raises(StrataError) as refused:
        server.future(future_id, "bob")
    assert refused.value.code is Code.NOT_FOUND
    assert server.refusal(ClientCommand("bob", OpenSession(f"session-{TENANT}"), 0.0)).code is Code.INVALID


# Queues


def test_a_full_queue_refuses_with_a_reply_and_drops_nothing() -> None:
    server = Server(max_pending=3, max_pending_per_tenant=3)
    model = server.model()
    accepted = server.accept(*(step(model, seq) for seq in (1, 2, 3)))
    assert server.refusal(ClientCommand(TENANT, SubmitOperation(step(model, 4)), 0.0)).code is Code.EXHAUSTED
    assert server.run_all() == accepted


def test_a_queue_full_of_held_operations_lets_in_the_one_they_wait_for() -> None:
    server = Server(max_pending=3, max_pending_per_tenant=3)
    model = server.model()
    server.accept(*(step(model, seq) for seq in (2, 3, 4)))
    assert server.refusal(ClientCommand(TENANT, SubmitOperation(step(model, 5)), 0.0)).code is Code.EXHAUSTED
    server.accept(step(model, 1))
    assert len(server.run_all()) == 4


def test_a_high_number_that_comes_first_makes_no_room_for_those_below_it() -> None:
    server = Server(max_pending=3, max_pending_per_tenant=3)
    model = server.model()
    server.accept(*(step(model, seq) for seq in (9, 1, 2)))
    assert server.refusal(ClientCommand(TENANT, SubmitOperation(step(model, 3)), 0.0)).code is Code.EXHAUSTED
    server.run_all()
    server.accept(step(model, 3))


def test_one_that_was_held_when_its_model_went_is_gone_in_the_end_and_not_unknown() -> None:
    server = Server(result_ttl_s=10.0)
    model = server.model()
    (held,) = server.accept(step(model, 2))
    server.accept(ops.UnloadModel(model))
    server.run_all()
    server.ask(ExpireResults(server.now_s + 11.0))
    with pytest.raises(StrataError) as refused:
        find_future(server.state, TENANT, held)
    assert refused.value.code is Code.GONE


def test_one_tenant_cannot_take_more_of_the_queue_than_its_quota() -> None:
    server = Server(max_pending=10, max_pending_per_tenant=2)
    model, other = server.model(), server.model(tenant="bob")
    server.accept(step(model, 1), step(model, 2))
    assert server.refusal(ClientCommand(TENANT, SubmitOperation(step(model, 3)), 0.0)).code is Code.EXHAUSTED
    server.accept(step(other, 1), tenant="bob")


@pytest.mark.parametrize(("max_pending", "own"), [(100, 50), (5, 2), (1, 1)])
def test_without_a_quota_one_tenant_fills_half_the_queue_and_not_the_other_half(max_pending: int, own: int) -> None:
    """A gap holds its operations for ever: a tenant that leaves one would shut all others out."""
    server = Server(max_pending=max_pending)
    model = server.model()
    server.accept(*(step(model, seq) for seq in range(2, 2 + own)))
    assert server.refusal(ClientCommand(TENANT, SubmitOperation(step(model, 2 + own)), 0.0)).code is Code.EXHAUSTED
    server.accept(step(model, 1))
    server.run_all()
    server.accept(*(step(model, seq) for seq in range(3 + own, 3 + 2 * own)))
    if own < max_pending:
        server.model(tenant="bob")


def test_a_server_full_of_one_tenants_held_operations_creates_a_model_for_another() -> None:
    server = Server()
    model = server.model()
    for seq in range(2, 102):
        with contextlib.suppress(StrataError):
            server.accept(step(model, seq))
    server.model(tenant="bob")


def test_no_more_is_at_the_ranks_than_allowed() -> None:
    server = Server(max_running=2)
    model = server.model()
    server.accept(*(step(model, seq) for seq in (1, 2, 3)))
    first, second = server.dispatch(), server.dispatch()
    assert first is not None
    assert second is not None
    assert server.dispatch() is None
    server.answer(first)
    third = server.dispatch()
    assert third is not None
    assert third.future_ids == [f"{model}:3"]


def test_operations_of_different_tenants_share_a_pass_and_each_gets_its_own_result() -> None:
    server = Server()
    model, other = server.model(), server.model(tenant="bob")
    server.accept(forward_backward(model, 1, [5, 6]))
    server.accept(forward_backward(other, 1, [7]), tenant="bob")
    dispatch = server.dispatch()
    assert dispatch is not None
    assert set(dispatch.future_ids) == {f"{model}:1", f"{other}:1"}
    results = [ops.StepDone({"of": float(place)}) for place in range(2)]
    server.answer(dispatch, results)
    for place, future_id in enumerate(dispatch.future_ids):
        tenant = TENANT if future_id.startswith(model) else "bob"
        assert server.result(future_id, tenant) == results[place]


@pytest.mark.parametrize("packing", [False, True])
def test_a_forward_pass_and_one_with_gradients_never_share(packing: bool) -> None:
    server = Server(pack_tenants=packing)
    model, other = server.model(), server.model(tenant="bob")
    server.accept(forward_backward(model, 1))
    server.accept(forward_backward(other, 1, forward_only=True), tenant="bob")
    dispatch = server.dispatch()
    assert dispatch is not None
    assert len(dispatch.future_ids) == 1


def test_without_packing_of_tenants_every_operation_has_its_own_pass() -> None:
    server = Server(pack_tenants=False)
    models = [server.model(), server.model(tenant="bob")]
    for model, tenant in zip(models, (TENANT, "bob"), strict=True):
        server.accept(forward_backward(model, 1), tenant=tenant)
    dispatch = server.dispatch()
    assert dispatch is not None
    assert len(dispatch.future_ids) == 1


# Operations that cannot work take their number all the same


def test_an_operation_that_could_not_be_read_fails_in_its_turn_and_the_next_one_runs() -> None:
    server = Server()
    model = server.model()
    ids = server.accept(ops.MalformedOperation(model, 1, "the body is no protobuf"), step(model, 2))
    assert server.run_all() == [ids[1]]
    assert server.result(ids[0]) == ops.Failed("user", "the body is no protobuf")


@pytest.mark.parametrize(
    ("lengths", "words"), [([1_001], "1,001 tokens"), ([3, 0], "datum 1"), ([], "empty")], ids=["long", "none", "empty"]
)
def test_data_that_no_rank_can_take_fails_as_the_clients_and_the_sequence_goes_on(
    lengths: list[int], words: str
) -> None:
    server = Server()
    model = server.model()
    ids = server.accept(forward_backward(model, 1, lengths), step(model, 2))
    assert server.run_all() == [ids[1]]
    result = server.result(ids[0])
    assert isinstance(result, ops.Failed)
    assert result.category == "user"
    assert words in result.message


def test_a_failed_operation_is_a_result_and_the_sequence_goes_on() -> None:
    server = Server()
    model = server.model()
    ids = server.accept(forward_backward(model, 1), step(model, 2))
    dispatch = server.dispatch()
    assert dispatch is not None
    server.answer(dispatch, [ops.Failed("user", "datum 0: the loss is NaN")])
    assert server.future(ids[0]).status is FutureStatus.FAILED
    assert server.run_all() == [ids[1]]


def test_ranks_that_give_too_few_results_fail_the_operations_and_lose_none() -> None:
    server = Server()
    model = server.model()
    ids = server.accept(step(model, 1))
    dispatch = server.dispatch()
    assert dispatch is not None
    server.answer(dispatch, [])
    assert server.future(ids[0]).status is FutureStatus.FAILED


# Giving up


def test_what_waits_can_be_given_up_and_the_sequence_goes_on() -> None:
    server = Server()
    model = server.model()
    ids = server.accept(step(model, 1), step(model, 2), step(model, 3))
    server.abort(ids[1])
    assert server.run_all() == [ids[0], ids[2]]
    assert server.future(ids[1]).status is FutureStatus.CANCELLED
    assert view_model(server.state.models[model], None).next_seq == 4


def test_one_that_is_held_can_be_given_up_before_its_gap_closes() -> None:
    server = Server()
    model = server.model()
    ids = server.accept(step(model, 2), step(model, 3))
    server.abort(ids[0])
    server.accept(step(model, 1))
    assert server.run_all() == [f"{model}:1", ids[1]]


def test_what_runs_cannot_be_given_up() -> None:
    server = Server()
    model = server.model()
    ids = server.accept(step(model, 1))
    server.dispatch()
    assert server.refusal(ClientCommand(TENANT, AbortOperation(ids[0]), 0.0)).code is Code.PRECONDITION


def test_one_operation_that_never_ends_fails_and_a_late_answer_to_it_changes_nothing() -> None:
    server = Server()
    model = server.model()
    ids = server.accept(step(model, 1), step(model, 2))
    stuck, behind = server.dispatch(), server.dispatch()
    assert stuck is not None
    assert behind is not None
    server.give_up(stuck.number)
    assert server.result(ids[0]) == ops.Failed("server", "stuck")
    before = server.saved
    assert server.answer(stuck, [ops.StepDone({"late": 1.0})]).facts == ()
    assert server.saved == before
    server.answer(behind, [ops.StepDone({"right": 1.0})])
    assert server.result(ids[1]) == ops.StepDone({"right": 1.0})
    assert server.state.failed_dispatches == {stuck.number}
    assert server.state.settled_through == behind.number


def test_a_dispatch_that_was_answered_is_not_given_up_afterwards() -> None:
    server = Server()
    model = server.model()
    server.accept(step(model, 1))
    dispatch = server.dispatch()
    assert dispatch is not None
    server.answer(dispatch)
    server.give_up(dispatch.number)
    assert not [fact for fact in server.facts if isinstance(fact, DispatchFailed)]


# Restarts


@pytest.mark.proves("Never: futures are lost by a restart")
@pytest.mark.parametrize("from_snapshot", [True, False])
def test_no_future_is_lost_by_a_restart_whatever_it_was_doing(from_snapshot: bool) -> None:
    server = Server(max_running=1, initial_checkpoint=True)
    model = server.model()
    ids = server.accept(*(step(model, seq) for seq in (1, 2, 3, 5)))
    finished = server.dispatch()
    assert finished is not None
    server.answer(finished)
    running = server.dispatch()
    before = server.saved
    server.restart(from_snapshot=from_snapshot)
    assert server.saved == before
    statuses = [server.future(future_id).status for future_id in ids]
    pending = FutureStatus.PENDING
    assert statuses == [FutureStatus.FINISHED, FutureStatus.DISPATCHED, pending, pending]
    assert list(server.state.dispatches.values()) == [running]
    assert running is not None
    server.answer(running)
    server.accept(step(model, 4))
    assert server.run_all() == [ids[2], f"{model}:4", ids[3]]


def test_what_was_dispatched_before_a_restart_is_told_again_in_the_same_composition_and_not_chosen_again() -> None:
    server = Server()
    model, other = server.model(), server.model(tenant="bob")
    server.accept(forward_backward(model, 1, [5, 6, 7]))
    server.accept(forward_backward(other, 1, [7, 9]), tenant="bob")
    dispatch = server.dispatch()
    server.restart()
    assert list(server.state.dispatches.values()) == [dispatch]
    assert server.dispatch() is None
    numbers = [fact.number for fact in server.facts if isinstance(fact, Dispatched)]
    assert numbers == sorted(set(numbers))


# Results and their time


def test_a_result_that_had_its_time_is_gone_and_not_unknown_also_after_a_restart() -> None:
    server = Server(result_ttl_s=60, initial_checkpoint=True)
    model = server.model()
    ids = server.accept(step(model, 1), ops.Sleep())
    server.run_all()
    assert server.ask(ExpireResults(server.now_s + 59)).facts == ()
    server.ask(ExpireResults(server.now_s + 60))
    server.restart(from_snapshot=False)
    for future_id in [*ids, f"{model}:create", f"{model}:{INITIAL}"]:
        with pytest.raises(StrataError) as refused:
            server.future(future_id)
        assert refused.value.code is Code.GONE
    for future_id in [f"{model}:2", f"{model}:unload", "op:2", "nonsense", f"{model}:x"]:
        with pytest.raises(StrataError) as refused:
            server.future(future_id)
        assert refused.value.code is Code.NOT_FOUND
    assert server.refusal(ClientCommand(TENANT, SubmitOperation(step(model, 1)), 0.0)).code is Code.GONE


# Sessions and models


def test_finishing_a_session_unloads_its_models_after_what_was_accepted_for_them() -> None:
    server = Server()
    model = server.model()
    ids = server.accept(step(model, 1), step(model, 3))
    server.finish_session()
    assert server.run_all() == [ids[0], f"{model}:unload"]
    held = server.result(ids[1])
    assert isinstance(held, ops.Failed)
    assert held.category == "cancelled"
    assert server.state.models[model].unloaded
    assert server.refusal(ClientCommand(TENANT, SubmitOperation(step(model, 2)), 0.0)).code is Code.GONE
    assert server.finish_session().facts == ()


def test_unloading_twice_is_once() -> None:
    server = Server()
    model = server.model()
    first = server.accept(ops.UnloadModel(model))
    assert server.accept(ops.UnloadModel(model)) == first
    assert server.run_all() == first


# Checkpoints


def test_a_new_model_is_saved_before_anything_is_trained() -> None:
    server = Server(initial_checkpoint=True)
    model = server.model(done=False)
    server.accept(step(model, 1))
    assert server.run_all() == [f"{model}:create", f"{model}:{INITIAL}", f"{model}:1"]
    assert (
        server.refusal(ClientCommand(TENANT, DeleteCheckpoint(model, "weights", INITIAL), 0.0)).code
        is Code.PRECONDITION
    )


def test_a_checkpoint_exists_when_it_is_saved_and_each_save_has_its_own_folder() -> None:
    server = Server()
    model = server.model()
    server.accept(save(model, 1, "a"), save(model, 2, "a", overwrite=True))
    first = server.dispatch()
    assert first is not None
    assert checkpoints_of(server.state, TENANT, model) == []
    server.answer(first)
    assert [each.path for each in checkpoints_of(server.state, TENANT, None)] == [first.path]
    second = server.dispatch()
    assert second is not None
    assert second.path != first.path
    server.answer(second, [ops.Failed("server", "the disk is full")])
    assert [each.path for each in checkpoints_of(server.state, TENANT, model)] == [first.path]
    deleted = server.ask(ClientCommand(TENANT, DeleteCheckpoint(model, "weights", "a"), 0.0))
    assert deleted.deleted_folders == (first.path,)
    assert checkpoints_of(server.state, TENANT, model) == []


def test_a_client_that_counts_from_zero_replaces_the_first_checkpoint_and_no_other() -> None:
    server = Server(initial_checkpoint=True)
    model = server.model()
    (first,) = checkpoints_of(server.state, TENANT, model)
    ids = server.accept(save(model, 1, INITIAL), save(model, 2, INITIAL))
    server.run_all()
    assert not isinstance(server.result(ids[0]), ops.Failed)
    (own,) = checkpoints_of(server.state, TENANT, model)
    assert own.path != first.path
    again = server.result(ids[1])
    assert isinstance(again, ops.Failed)
    assert "already" in again.message


def two_saves(server: Server, name: str) -> tuple[str, Dispatch, Dispatch]:
    """Under one name, and both at the ranks."""
    if name == INITIAL:
        model = server.model(done=False)
        created = server.dispatch()
        assert created is not None
        server.answer(created)
        server.accept(save(model, 1, name))
    else:
        model = server.model()
        server.accept(save(model, 1, name), save(model, 2, name, overwrite=True))
    first, second = server.dispatch(), server.dispatch()
    assert first is not None
    assert second is not None
    return model, first, second


def paths(server: Server, model: str) -> list[str]:
    """Of the checkpoints that there are, also to one who knows only the journal."""
    server.restart(from_snapshot=False)
    return [each.path for each in checkpoints_of(server.state, TENANT, model)]


@pytest.mark.parametrize("name", [INITIAL, "mine"])
def test_of_two_saves_under_one_name_at_the_ranks_each_is_there_when_it_is_saved(name: str) -> None:
    server = Server(initial_checkpoint=name == INITIAL)
    model, first, second = two_saves(server, name)
    server.answer(first)
    assert paths(server, model) == [first.path]
    assert second.path in retained_folders(server.state)
    server.answer(second)
    assert paths(server, model) == [second.path]
    assert not server.state.saving


@pytest.mark.parametrize("name", [INITIAL, "mine"])
@pytest.mark.parametrize("lost", [0, 1])
def test_of_two_saves_under_one_name_at_the_ranks_one_may_be_given_up(name: str, lost: int) -> None:
    server = Server(initial_checkpoint=name == INITIAL)
    model, *saves = two_saves(server, name)
    for place, each in enumerate(saves):
        if place == lost:
            server.give_up(each.number)
        else:
            server.answer(each)
    assert paths(server, model) == [saves[1 - lost].path]
    assert not server.state.saving


@pytest.mark.parametrize(("name", "words"), [("a", "already"), ("../x", "cannot name"), ("", "cannot name")])
def test_a_name_that_is_taken_or_is_none_fails_the_save_as_the_clients(name: str, words: str) -> None:
    server = Server()
    model = server.model()
    ids = server.accept(save(model, 1, "a"), save(model, 2, name))
    server.run_all()
    result = server.result(ids[1])
    assert isinstance(result, ops.Failed)
    assert words in result.message


def test_loading_finds_the_folder_of_the_save_also_one_that_the_ranks_are_still_told_to_do() -> None:
    server = Server()
    model = server.model()
    server.accept(save(model, 1, "a"), load(model, 2, model, "a"))
    saving, loading = server.dispatch(), server.dispatch()
    assert saving is not None
    assert loading is not None
    assert loading.path == saving.path


def test_a_checkpoint_of_another_tenant_cannot_be_loaded() -> None:
    server = Server()
    model, other = server.model(), server.model(tenant="bob")
    server.accept(save(model, 1, "a"))
    server.run_all()
    ids = server.accept(load(other, 1, model, "a"), tenant="bob")
    server.run_all()
    result = server.result(ids[0], "bob")
    assert isinstance(result, ops.Failed)
    assert "there is no checkpoint" in result.message


def test_a_checkpoint_that_the_ranks_are_told_to_load_cannot_be_deleted_under_them() -> None:
    """The load would fail now and succeed when ranks that start anew have saved the checkpoint once more."""
    server = Server()
    model = server.model()
    server.accept(save(model, 1, "mine"))
    server.run_all()
    server.accept(load(model, 2, model, "mine"))
    loading = server.dispatch()
    assert loading is not None
    delete = ClientCommand(TENANT, DeleteCheckpoint(model, "weights", "mine"), 0.0)
    assert server.refusal(delete).code is Code.UNAVAILABLE
    server.answer(loading)
    assert server.ask(delete).deleted_folders


def test_tags_of_facts_stay_and_those_of_earlier_versions_are_refused_by_name() -> None:
    """The list is written out: a class that is renamed would have another tag, which old journals do not have."""
    tags = {fact.__struct_config__.tag for fact in facts.Fact.__args__}
    assert tags == {
        "checkpoint_deleted", "checkpoint_imported", "checkpoint_published", "checkpoint_ttl_set",
        "custom_loss_created", "device_turn_requested", "device_turn_taken", "dispatch_failed", "dispatched",
        "endpoint_added", "endpoint_removed",
        "operation_accepted", "operation_finished", "push_begun", "push_ended", "ranks_renewed", "replay_accepted",
        "replay_compared", "results_expired", "sample_returned", "sample_routed", "session_finished", "session_opened",
        "sessions_forgotten", "slice_ended", "snapshot_abandoned", "snapshot_committed", "snapshot_copied",
        "snapshot_rejected",
    }  # fmt: skip
    assert not tags & facts.REMOVED_TAGS
    machine = Server().machine
    for tag in facts.REMOVED_TAGS:
        with pytest.raises(StrataError, match=f"holds a fact '{tag}' of an earlier version") as refused:
            machine.apply(machine.initial(), msgspec.msgpack.encode({"type": tag, "number": 1}))
        assert refused.value.code is Code.UNSUPPORTED
    with pytest.raises(StrataError, match="holds a fact 'model_dreamt' of another version"):
        machine.apply(machine.initial(), msgspec.msgpack.encode({"type": "model_dreamt"}))


def test_a_snapshot_of_another_version_is_refused_in_words() -> None:
    machine = Server().machine
    others: list[dict[str, object]] = [{"given_up": []}, {"format": 1}, {"format": 3}]
    for saved in others:
        with pytest.raises(StrataError, match="holds a snapshot of another version") as refused:
            machine.load(msgspec.msgpack.encode(saved))
        assert refused.value.code is Code.UNSUPPORTED
