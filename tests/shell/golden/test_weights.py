"""Checkpoints and snapshots of earlier versions are verified, and loaded bit for bit."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from strata.base.errors import Code, StrataError
from strata.train.checkpoints import checkpoint
from strata.train.core import commands, ops
from strata.train.runner.collectives import RankGroup
from strata.train.runner.snapshot.files import read_manifest
from tests.shell.golden.folder import SnapshotMeaning, read_meaning
from tests.shell.golden.weights import (
    BASE,
    CHECKPOINT,
    MODEL,
    SNAPSHOT,
    TRAININGS,
    Training,
    create,
    datum,
    driver_for,
    take_snapshot,
)
from tests.shell.train_runner.driver import Driver
from tests.shell.train_runner.single_rank import one_rank


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankGroup]:
    with one_rank(tmp_path_factory.mktemp("ranks")) as group:
        yield group


@pytest.fixture(params=TRAININGS)
def training(request: pytest.FixtureRequest) -> Training:
    chosen: Training = request.param
    return chosen


@pytest.fixture
def stored(part: Path, training: Training, tmp_path: Path) -> Path:
    """A copy of the checkpoint and the snapshot of one kind of training."""
    return Path(shutil.copytree(part / training, tmp_path / "stored"))


@pytest.fixture
def driver(part: Path, training: Training, stored: Path, ranks: RankGroup) -> Driver:
    """Of a rank that has nothing; its folder is that of the copy."""
    return driver_for(part / BASE, stored, training, ranks)


def tensors_of(folder: Path) -> Mapping[str, torch.Tensor]:
    """Read by the library alone."""
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def assert_same_bits(found: Mapping[str, torch.Tensor], stored: Mapping[str, torch.Tensor]) -> None:
    """What was stored is there; a later version may store more."""
    assert stored
    for name, value in stored.items():
        assert torch.equal(found[name], value), name


def test_every_file_of_a_checkpoint_has_the_digest_of_its_manifest(stored: Path) -> None:
    manifest = checkpoint.read(stored / CHECKPOINT)
    files = {file.name: file.read_bytes() for file in (stored / CHECKPOINT).iterdir() if file.suffix != ".json"}
    assert files
    for name, content in files.items():
        # The digest of a tree with one leaf.
        digest = hashlib.sha256(hashlib.sha256(content).digest()).hexdigest()
        assert manifest.files[name].digest == f"sha256-tree:{digest}"
    assert (manifest.model_id, manifest.kind, manifest.steps) == (MODEL, "weights", 1)


def test_a_checkpoint_is_loaded_with_its_optimizer_and_saved_again_with_the_same_bits(
    driver: Driver, stored: Path, training: Training
) -> None:
    create(driver, training)
    assert isinstance(driver.load(MODEL, CHECKPOINT), ops.WeightsLoaded)
    assert isinstance(driver.save(MODEL, "again"), ops.WeightsSaved)
    assert_same_bits(tensors_of(stored / "again"), tensors_of(stored / CHECKPOINT))
    driver.train(MODEL, [datum(8)])
    assert driver.step(MODEL, learning_rate=0.01)["grad_norm"] > 0
    assert checkpoint.read(stored / "again").steps == 1


def restore(driver: Driver, stored: Path, meaning: SnapshotMeaning) -> commands.Restored:
    reply = driver.say(commands.Restore(driver.generation, meaning.number, str(stored / SNAPSHOT), meaning.digest))
    assert isinstance(reply, commands.Restored)
    driver.number = meaning.number
    return reply


@pytest.fixture
def meaning(part: Path, training: Training) -> SnapshotMeaning:
    return read_meaning(part, dict[str, SnapshotMeaning])[training]


def test_a_snapshot_is_restored_and_taken_again_with_the_same_bits(
    driver: Driver, stored: Path, meaning: SnapshotMeaning
) -> None:
    assert restore(driver, stored, meaning) == commands.Restored(driver.generation, meaning.number)
    take_snapshot(driver, "again")
    assert_same_bits(tensors_of(stored / "again"), tensors_of(stored / SNAPSHOT))
    assert driver.step(MODEL, learning_rate=0.01)["grad_norm"] > 0, "the gradients were in it"


def test_a_checkpoint_with_a_changed_byte_is_refused(driver: Driver, stored: Path, training: Training) -> None:
    file = next((stored / CHECKPOINT).glob("*.safetensors"))
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    create(driver, training)
    refused = driver.load(MODEL, CHECKPOINT)
    assert isinstance(refused, ops.Failed)
    assert "is not as it was written" in refused.message


@pytest.mark.parametrize("change", [-1, 1])
@pytest.mark.parametrize("name", [CHECKPOINT, SNAPSHOT])
def test_a_manifest_with_another_number_is_refused(stored: Path, name: str, change: int) -> None:
    file = stored / name / "manifest.json"
    manifest = msgspec.json.decode(file.read_bytes())
    manifest["format"] += change
    file.write_bytes(msgspec.json.encode(manifest))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    with pytest.raises(StrataError) as refused:
        checkpoint.read(file.parent) if name == CHECKPOINT else read_manifest(file.parent, digest)
    assert refused.value.code is Code.UNSUPPORTED
    assert f"has format {manifest['format']}, and this version of Strata reads format" in refused.value.message
