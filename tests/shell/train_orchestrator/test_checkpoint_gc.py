"""Files of checkpoints follow the facts, whatever dies in between: an orchestrator process, pretending ranks."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Final

import pytest

from strata.base import failpoint
from strata.base.clock import SystemClock
from strata.base.errors import Code
from strata.train.checkpoints import checkpoint
from strata.train.checkpoints.checkpoint import CheckpointManifest
from strata.train.core import client_commands, model_options, ops
from strata.train.orchestrator.maintenance.checkpoint_gc import CheckpointGc
from strata.train.peft.importer import stage
from strata.train.peft.layers import ADAPTER, ADAPTER_CONFIG
from strata.train.settings import ServerSettings
from strata.train.status import queries, views
from tests.shell.train_orchestrator.leaders import leading, settings_in
from tests.shell.train_orchestrator.stacks import Stack, running
from tests.support.memory_journal import MemoryJournal

SWEEP: Final = "sweep_s = 0.05\n"
PATIENCE_S: Final = 30.0


async def saved(stack: Stack, model_id: str, seq: int, name: str, **more: Any) -> None:
    operation = ops.SaveWeights(model_id, seq, "weights", name, **more)
    assert isinstance(await stack.result(await stack.submit(operation)), ops.WeightsSaved)


def folders(stack: Stack) -> set[str]:
    """Everything that lies where checkpoints lie."""
    return {path.name for path in stack.settings.checkpoint_folder.glob("*/*/*")}


async def until(stack: Stack, wanted: set[str]) -> None:
    """Looks as often as the orchestrator answers: it is asked something in between."""
    async with asyncio.timeout(PATIENCE_S):
        while folders(stack) != wanted:
            await stack.look(views.SessionList, queries.ListSessions())


async def names(stack: Stack) -> list[str]:
    found = await stack.look(views.CheckpointList, queries.ListCheckpoints())
    return sorted(each.name for each in found.checkpoints)


async def test_what_overwritten_failed_and_killed_saves_left_is_swept_away(tmp_path: Path) -> None:
    async with running(tmp_path, checkpoints=SWEEP) as stack:
        model = await stack.model()
        await saved(stack, model, 1, "a")
        await saved(stack, model, 2, "a", overwrite=True)
        kind = next(stack.settings.checkpoint_folder.glob("*/weights"))
        (kind / "nobody@9").mkdir()
        (kind / ".nobody@9.part").mkdir()
        (kind / ".a@1.0123.gone").mkdir()
        await until(stack, {"a@2"})
        assert await names(stack) == ["a"]


async def test_the_newest_are_kept_and_the_files_of_the_others_go(tmp_path: Path) -> None:
    async with running(tmp_path, checkpoints="keep = 2\n" + SWEEP) as stack:
        model = await stack.model()
        for seq in range(1, 5):
            await saved(stack, model, seq, f"c{seq}")
        assert await names(stack) == ["c3", "c4"]
        await until(stack, {"c3@3", "c4@4"})


@pytest.mark.parametrize("name", ["checkpoint_let_go", "checkpoint_out_of_place"])
async def test_a_death_between_the_fact_and_the_files_is_made_good_by_the_next_one(name: str, tmp_path: Path) -> None:
    async with running(tmp_path, armed=(f"train.orchestrator.{name}", 0), checkpoints=SWEEP) as stack:
        model = await stack.model()
        await saved(stack, model, 1, "short", ttl_s=1e-3)
        await until(stack, set())
        assert stack.deaths == 1, "the failpoint was not reached"
        assert await names(stack) == []


async def test_ranks_that_start_anew_leave_nothing_of_what_was_deleted(tmp_path: Path) -> None:
    """They save it again, because a later load may need it; then it goes again."""
    async with running(tmp_path, checkpoints=SWEEP) as stack:
        model = await stack.model()
        await saved(stack, model, 1, "a")
        await saved(stack, model, 2, "b")
        loaded = await stack.submit(ops.LoadWeights(model, 3, model, "weights", "a", optimizer=True))
        assert isinstance(await stack.result(loaded), ops.WeightsLoaded)
        await stack.look(client_commands.Done, client_commands.DeleteCheckpoint(model, "weights", "a"))
        await until(stack, {"b@2"})
        await stack.ranks.kill()
        await stack.start_ranks()
        stepped = await stack.result(await stack.submit(stack.step(model, 4)))
        assert isinstance(stepped, ops.StepDone)
        await until(stack, {"b@2"})


def staged(settings: ServerSettings, import_id: str) -> client_commands.ImportCheckpoint:
    lora = model_options.LoraConfig(rank=4)
    manifest = CheckpointManifest(
        model_id="import-x", seq_id=0, kind="weights", base_model="pretended", arch="pretended", lora=lora, steps=0
    )
    header = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    tensors = len(header).to_bytes(8, "little") + header + bytes(4)
    folder = settings.imports / import_id / settings.staged
    stage(folder, manifest, {ADAPTER: tensors, ADAPTER_CONFIG: b"{}"})
    return client_commands.ImportCheckpoint(import_id, "theirs", "import-x", "pretended", lora)


async def test_an_import_is_a_checkpoint_once_and_damaged_files_are_none(tmp_path: Path) -> None:
    async with running(tmp_path, checkpoints=SWEEP) as stack:
        for import_id in ("one", "two"):
            await stack.look(client_commands.Done, staged(stack.settings, import_id))
        assert await names(stack) == ["theirs"]
        assert folders(stack) == {"theirs@0"}
        await stack.look(client_commands.Done, client_commands.DeleteCheckpoint("import-x", "weights", "theirs"))
        await until(stack, set())
        damaged = staged(stack.settings, "three")
        (stack.settings.imports / "three" / stack.settings.staged / ADAPTER_CONFIG).write_bytes(b"[]")
        assert (await stack.look(views.ErrorResponse, damaged)).code is Code.CORRUPT
        up = client_commands.ImportCheckpoint("../up", "theirs", "import-x", "pretended", model_options.LoraConfig())
        assert (await stack.look(views.ErrorResponse, up)).code is Code.INVALID
        assert await names(stack) == []


async def test_an_import_whose_orchestrator_dies_is_taken_by_the_next_one(tmp_path: Path) -> None:
    """The question is asked again; the files are in place then, and not in the folder of imports."""
    async with running(tmp_path, armed=("train.orchestrator.import_in_place", 0), checkpoints=SWEEP) as stack:
        await stack.look(client_commands.Done, staged(stack.settings, "one"))
        assert stack.deaths == 1, "the failpoint was not reached"
        assert await names(stack) == ["theirs"]
        assert folders(stack) == {"theirs@0"}


async def test_an_import_that_is_taken_away_while_it_is_put_in_place_is_whole(tmp_path: Path) -> None:
    """Its sender tires of waiting."""
    settings = settings_in(tmp_path)
    asked = staged(settings, "one")

    def tired(_: str) -> None:
        (settings.imports / "one" / settings.staged / ADAPTER).unlink(missing_ok=True)

    failpoint.arm("train.orchestrator.import_checked", tired)
    await CheckpointGc(await leading(MemoryJournal(SystemClock())), settings).import_checkpoint("alice", asked)
    assert checkpoint.read(settings.checkpoint_folder / "import-x" / "weights" / "theirs@0").model_id == "import-x"


async def test_an_import_that_is_repeated_makes_a_damaged_one_whole(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    retention = CheckpointGc(await leading(MemoryJournal(SystemClock())), settings)
    place = settings.checkpoint_folder / "import-x" / "weights" / "theirs@0"
    await retention.import_checkpoint("alice", staged(settings, "one"))
    (place / ADAPTER).unlink()
    await retention.import_checkpoint("alice", staged(settings, "two"))
    assert checkpoint.read(place).model_id == "import-x"
    assert [each.name for each in place.parent.iterdir()] == ["theirs@0"]
