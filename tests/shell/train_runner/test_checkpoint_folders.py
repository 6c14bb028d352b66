"""Folders of checkpoints when an operation is told again: a whole one is left alone, anything less is made anew."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from strata.train.checkpoints import checkpoint
from strata.train.checkpoints.checkpoint import CheckpointManifest
from strata.train.core import model_options


def manifest(seq: int = 3) -> CheckpointManifest:
    return CheckpointManifest(
        model_id="s:train:0",
        seq_id=seq,
        kind="weights",
        base_model="b",
        arch="a",
        lora=model_options.LoraConfig(),
        steps=0,
    )


def fill(folder: Path) -> None:
    (folder / "weights.json").write_bytes(b"1234")
    (folder / "moments.json").write_bytes(b"5678")


def refuse(folder: Path) -> None:
    raise AssertionError(f"{folder} is written again")


def test_a_checkpoint_that_is_whole_is_not_written_again(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "weights" / "mine@3"
    checkpoint.write(folder, manifest(), fill, overwrite=False)
    checkpoint.write(folder, manifest(), refuse, overwrite=False)
    assert checkpoint.read(folder).seq_id == 3


def test_a_checkpoint_of_which_a_file_is_gone_is_made_whole_again(tmp_path: Path) -> None:
    """A deletion that was broken off leaves part of a folder; ranks that start anew load from it all the same."""
    folder = tmp_path / "run" / "weights" / "mine@3"
    checkpoint.write(folder, manifest(), fill, overwrite=False)
    (folder / "weights.json").unlink()
    checkpoint.write(folder, manifest(), fill, overwrite=False)
    assert checkpoint.read(folder).seq_id == 3


def test_two_that_write_the_same_checkpoint_never_mix_their_files(tmp_path: Path) -> None:
    """A group of ranks that is over may be at it still when the next one is told the same."""
    folder = tmp_path / "run" / "weights" / "mine@3"

    def overtaken(part: Path) -> None:
        def beside(other: Path) -> None:
            fill(other)
            with pytest.raises(FileNotFoundError):
                (part / "late.json").write_bytes(b"1")

        checkpoint.write(folder, manifest(), beside, overwrite=False)
        fill(part)

    with pytest.raises(FileNotFoundError):
        checkpoint.write(folder, manifest(), overtaken, overwrite=False)
    assert sorted(checkpoint.read(folder).files) == ["moments.json", "weights.json"]


def test_numbers_are_the_same_however_they_are_written(tmp_path: Path) -> None:
    """A whole number is a good alpha, and comes back as 8.0."""
    whole = msgspec.structs.replace(manifest(), lora=model_options.LoraConfig(alpha=8))
    checkpoint.write(tmp_path / "mine", whole, fill, overwrite=False)
    assert checkpoint.read(tmp_path / "mine").lora == model_options.LoraConfig(alpha=8.0)


@pytest.mark.parametrize("again", [False, True])
def test_the_names_of_all_folders_above_a_checkpoint_are_brought_to_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """After a loss of power a checkpoint in a folder without a name is gone, whatever was synced inside."""
    folder = tmp_path / "data" / "checkpoints" / "run" / "weights" / "mine@3"
    if again:
        checkpoint.write(folder, manifest(), fill, overwrite=False)
    synced: set[Path] = set()
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.add(Path(f"/proc/self/fd/{descriptor}").readlink()))
    checkpoint.write(folder, manifest(), fill, overwrite=False)
    assert synced >= {*folder.parents[:4]}
