"""How long checkpoints are kept: decided by facts, the same after every restart."""

from __future__ import annotations

from typing import Any

import pytest

from strata.base.errors import Code, StrataError
from strata.fleet.artifacts.paths import check_path
from strata.train.core import model_options, ops
from strata.train.core.checkpoint_retention import EXPIRED, SUPERSEDED, retained_folders
from strata.train.core.client_commands import (
    DeleteCheckpoint,
    ImportCheckpoint,
    OpenSession,
    SetCheckpointTtl,
    SubmitOperation,
)
from strata.train.core.facts import CheckpointDeleted
from strata.train.core.inputs import ClientCommand, DeleteExpiredCheckpoints
from strata.train.core.lookup import checkpoints_of, find_checkpoint
from strata.train.core.state import INITIAL, ModelSnapshot, folder_of
from tests.core.train.servers import LORA, TENANT, Server

HOUR_S = 3600.0


def save(model_id: str, seq: int, name: str, **more: Any) -> ops.SaveWeights:
    return ops.SaveWeights(model_id, seq, more.pop("kind", "weights"), name, **more)


def load(model_id: str, seq: int, run_id: str, name: str) -> ops.LoadWeights:
    return ops.LoadWeights(model_id, seq, run_id, "weights", name, optimizer=False)


def names(server: Server) -> list[str]:
    return sorted(each.operation.name for each in checkpoints_of(server.state, TENANT, None))


def retain(server: Server) -> list[CheckpointDeleted]:
    server.ask(DeleteExpiredCheckpoints(server.now_s))
    return [each for each in server.facts if isinstance(each, CheckpointDeleted)]


def saved(server: Server, count: int) -> str:
    """A model with checkpoints c1 to cN, a second between each."""
    model_id = server.model()
    for seq in range(1, count + 1):
        server.now_s += 1.0
        server.accept(save(model_id, seq, f"c{seq}"))
        server.run_all()
    return model_id


def test_a_checkpoint_goes_when_its_time_is_over_and_not_before() -> None:
    server = Server()
    model_id = server.model()
    server.accept(save(model_id, 1, "short", ttl_s=HOUR_S), save(model_id, 2, "long"))
    server.run_all()
    server.now_s += HOUR_S - 1
    assert retain(server) == []
    server.now_s += 1
    assert retain(server) == [CheckpointDeleted(model_id, "weights", "short", EXPIRED)]
    assert names(server) == ["long"]
    with pytest.raises(StrataError) as gone:
        find_checkpoint(server.state, TENANT, model_id, "weights", "short")
    assert gone.value.code is Code.NOT_FOUND
    server.restart(from_snapshot=False)
    assert names(server) == ["long"]


def test_a_time_that_is_set_counts_from_then_and_can_be_taken_back() -> None:
    server = Server()
    model_id = saved(server, 2)
    server.now_s += 10 * HOUR_S
    server.ask(ClientCommand(TENANT, SetCheckpointTtl(model_id, "weights", "c1", HOUR_S), server.now_s))
    server.ask(ClientCommand(TENANT, SetCheckpointTtl(model_id, "weights", "c2", HOUR_S), server.now_s))
    server.ask(ClientCommand(TENANT, SetCheckpointTtl(model_id, "weights", "c2", None), server.now_s))
    server.restart()
    server.now_s += HOUR_S
    retain(server)
    assert names(server) == ["c2"]
    assert (
        server.refusal(ClientCommand("bob", SetCheckpointTtl(model_id, "weights", "c2", 1.0), 0.0)).code
        is Code.NOT_FOUND
    )


def test_a_load_that_waited_too_long_finds_nothing() -> None:
    server = Server()
    model_id = server.model()
    server.accept(save(model_id, 1, "short", ttl_s=HOUR_S))
    server.run_all()
    (future_id,) = server.accept(load(model_id, 2, model_id, "short"))
    server.now_s += HOUR_S
    server.run_all()
    result = server.result(future_id)
    assert isinstance(result, ops.Failed)
    assert result.category == "user"
    assert "there is no checkpoint" in result.message


def test_a_checkpoint_that_is_being_loaded_goes_afterwards() -> None:
    server = Server(keep_checkpoints=1)
    model_id = server.model()
    server.accept(save(model_id, 1, "short", ttl_s=HOUR_S), save(model_id, 2, "other"))
    server.run_all()
    server.accept(load(model_id, 3, model_id, "short"))
    dispatch = server.dispatch()
    assert dispatch is not None
    server.now_s += HOUR_S
    assert retain(server) == []
    server.answer(dispatch, [ops.WeightsLoaded("path")])
    assert [each.reason for each in retain(server)] == [EXPIRED]


def test_the_newest_of_each_run_and_kind_are_kept() -> None:
    server = Server(keep_checkpoints=2, initial_checkpoint=True)
    model_id = saved(server, 4)
    server.accept(save(model_id, 5, "s", kind="sampler_weights"))
    server.run_all()
    assert {each.name for each in retain(server)} == {"c1", "c2"}
    assert names(server) == ["000000", "c3", "c4", "s"]
    assert {each.reason for each in retain(server)} == {SUPERSEDED}
    server.restart(from_snapshot=False)
    assert names(server) == ["000000", "c3", "c4", "s"]


def test_the_beginning_stays_until_a_client_saves_under_its_name_and_then_that_goes_as_any_other() -> None:
    server = Server(keep_checkpoints=1, initial_checkpoint=True)
    model_id = server.model()
    initial: tuple[str, ops.WeightsKind, str] = (model_id, "weights", INITIAL)
    for command in (DeleteCheckpoint(*initial), SetCheckpointTtl(*initial, HOUR_S)):
        assert server.refusal(ClientCommand(TENANT, command, server.now_s)).code is Code.PRECONDITION
    server.accept(save(model_id, 1, INITIAL))
    server.run_all()
    server.ask(ClientCommand(TENANT, SetCheckpointTtl(*initial, HOUR_S), server.now_s))
    server.now_s += HOUR_S
    assert retain(server) == [CheckpointDeleted(model_id, "weights", INITIAL, EXPIRED)]
    server.accept(save(model_id, 2, INITIAL))
    server.run_all()
    server.now_s += 1.0
    server.accept(save(model_id, 3, "newer"))
    server.run_all()
    assert [each.reason for each in retain(server)] == [EXPIRED, SUPERSEDED]
    server.accept(save(model_id, 4, INITIAL))
    server.run_all()
    server.ask(ClientCommand(TENANT, DeleteCheckpoint(*initial), server.now_s))
    assert names(server) == ["newer"]
    # Weights from elsewhere have no number either, and are no beginning.
    server.ask(imported(server))
    server.ask(ClientCommand(TENANT, DeleteCheckpoint("import-1", "weights", "mine"), 0.0))
    assert names(server) == ["newer"]


def test_what_a_sampler_or_a_waiting_load_needs_is_kept_beyond_the_number() -> None:
    server = Server(keep_checkpoints=1)
    model_id = saved(server, 4)
    session_id = f"session-{TENANT}"
    weights = ops.SavedWeights(model_id, "weights", "c1")
    server.ask(
        ClientCommand(
            TENANT,
            SubmitOperation(ops.OpenSampler(f"{session_id}:sample:0", "tiny", weights), session_id),
            server.now_s,
        )
    )
    server.run_all()
    server.accept(load(model_id, 9, model_id, "c2"))
    assert {each.name for each in retain(server)} == {"c3"}
    assert names(server) == ["c1", "c2", "c4"]


def imported(server: Server, name: str = "mine", tenant: str = TENANT, run_id: str = "import-1") -> ClientCommand:
    return ClientCommand(tenant, ImportCheckpoint("upload", name, run_id, "tiny", LORA), server.now_s)


def test_weights_from_elsewhere_can_be_loaded_and_the_same_again_changes_nothing() -> None:
    server = Server()
    model_id = server.model()
    server.ask(imported(server))
    assert server.ask(imported(server)).facts == ()
    assert server.refusal(imported(server, tenant="bob")).code is Code.CONFLICT
    assert server.refusal(imported(server, name="../up")).code is Code.INVALID
    (future_id,) = server.accept(load(model_id, 1, "import-1", "mine"))
    server.run_all()
    assert not isinstance(server.result(future_id), ops.Failed)
    server.restart(from_snapshot=False)
    assert names(server) == ["mine"]


def test_the_imports_of_a_tenant_have_a_limit_until_it_deletes_one() -> None:
    server = Server(max_imports_per_tenant=2)
    for number in (1, 2):
        server.ask(imported(server, run_id=f"import-{number}"))
    refused = server.refusal(imported(server, run_id="import-3"))
    assert (refused.code, "2 checkpoints" in refused.message) == (Code.PRECONDITION, True)
    assert server.ask(imported(server, run_id="import-2")).facts == (), "the same again"
    server.ask(imported(server, tenant="bob", run_id="import-4"))
    server.ask(ClientCommand(TENANT, DeleteCheckpoint("import-1", "weights", "mine"), 0.0))
    assert server.ask(imported(server, run_id="import-3")).facts


def begins_after(server: Server, number: int) -> None:
    """Ranks that start anew are told what came after this, and cannot be told what came before."""
    server.state.snapshots = [ModelSnapshot(number, "snapshot")]
    server.state.truncated_through = number


def test_files_that_no_rank_could_save_again_stay_while_a_replay_may_read_them() -> None:
    """Ranks that start anew are told all from the beginning: a load whose files are gone would end in other weights."""
    server = Server()
    model_id = saved(server, 1)
    server.ask(imported(server))
    unread = imported(server, name="x", run_id="import-2")
    server.ask(unread)
    server.accept(load(model_id, 2, "import-1", "mine"), load(model_id, 3, model_id, "c1"))
    server.run_all()
    for run_id, name in (("import-1", "mine"), ("import-2", "x"), (model_id, "c1")):
        server.ask(ClientCommand(TENANT, DeleteCheckpoint(run_id, "weights", name), 0.0))
    server.restart()
    assert names(server) == []
    assert retained_folders(server.state) == {folder_of(ops.SaveWeights("import-1", 0, "weights", "mine"))}
    begins_after(server, server.state.dispatched)
    assert retained_folders(server.state) == set()


def test_files_saved_before_a_snapshot_of_the_ranks_stay_until_no_replay_reads_them() -> None:
    server = Server()
    model_id = saved(server, 1)
    before = server.state.dispatched
    server.accept(load(model_id, 2, model_id, "c1"))
    server.run_all()
    path = server.state.checkpoints[model_id, "weights", "c1"].path
    begins_after(server, before)
    server.ask(ClientCommand(TENANT, DeleteCheckpoint(model_id, "weights", "c1"), 0.0))
    assert path in retained_folders(server.state)
    begins_after(server, before - 1)
    assert path not in retained_folders(server.state)


def test_a_model_may_begin_with_saved_weights_before_its_first_operation() -> None:
    server = Server()
    run_id = saved(server, 1)
    session_id = "session-later"
    server.ask(ClientCommand(TENANT, OpenSession(session_id), server.now_s))
    model_id = f"{session_id}:train:0"
    create = ops.CreateModel(model_id, "tiny", LORA)
    server.ask(ClientCommand(TENANT, SubmitOperation(create, session_id), server.now_s))
    first = load(model_id, 0, run_id, "c1")
    step = ops.OptimStep(model_id, 1, model_options.AdamParams())
    (loaded,) = server.accept(first)
    assert server.accept(first, step) == [loaded, f"{model_id}:1"]
    assert server.run_all() == [f"{model_id}:create", loaded, f"{model_id}:1"]
    assert server.accept(first) == [loaded]
    assert (
        server.refusal(ClientCommand(TENANT, SubmitOperation(load(model_id, 0, run_id, "c2")), server.now_s)).code
        is Code.CONFLICT
    )
    server.restart(from_snapshot=False)
    assert server.state.models[model_id].done == 1


@pytest.mark.parametrize(
    "name", ["aux.x", "CON.1", "nul.tar.gz", "Com1.a", "lpt9.b", "prn..", "aux", "auxiliary.x", "x.aux"]
)
def test_the_folder_of_a_checkpoint_can_be_copied_whatever_its_name(name: str) -> None:
    folder = folder_of(save("session_1.0123456789ab:train:0", 3, name))
    assert check_path(f"checkpoints/{folder}/manifest.json").endswith(f"{name}@3/manifest.json")
