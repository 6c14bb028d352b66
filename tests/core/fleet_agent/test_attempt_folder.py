"""Which checkpoint is sent: the newest that is whole, once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from strata.fleet.agent.attempt_folder import newest_checkpoint
from strata.fleet.artifacts.files import Tree
from strata.fleet.trainer import new_checkpoint, output_folder, resume_from


def make(folder: Path, name: str, at_s: int) -> None:
    (folder / name).mkdir()
    os.utime(folder / name, (at_s, at_s))


def test_the_newest_whole_checkpoint_is_sent_once(tmp_path: Path) -> None:
    make(tmp_path, "step-9", 100)
    make(tmp_path, "step-10", 200)
    make(tmp_path, ".step-11", 300)
    make(tmp_path, "step-12.tmp", 300)
    make(tmp_path, "step-13.partial", 300)
    (tmp_path / "notes.txt").write_text("no folder")
    (tmp_path / "latest").symlink_to(tmp_path / "step-9")
    assert newest_checkpoint(Tree(tmp_path), ()) == "step-10"
    assert newest_checkpoint(Tree(tmp_path), ("step-10",)) == ""
    assert newest_checkpoint(Tree(tmp_path / "nothing"), ()) == ""


def test_a_checkpoint_has_its_name_only_when_the_block_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRATA_CHECKPOINT", str(tmp_path))
    with new_checkpoint("step-1") as folder:
        (folder / "w").write_text("1")
        assert newest_checkpoint(Tree(tmp_path), ()) == ""
    assert newest_checkpoint(Tree(tmp_path), ()) == "step-1"
    assert (tmp_path / "step-1" / "w").read_text() == "1"


def test_a_checkpoint_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_CHECKPOINT", str(tmp_path))
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError), new_checkpoint("step-1") as folder:
        (folder / "w").rename(tmp_path / "file" / "x")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("name", ["", ".step", "step.tmp", "a/b", "../x"])
def test_a_checkpoint_cannot_have_a_name_that_means_something_else(name: str) -> None:
    with pytest.raises(ValueError, match="cannot be the name"), new_checkpoint(name):
        pass


def test_outside_of_an_agent_a_trainer_starts_afresh_in_its_own_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STRATA_CHECKPOINT_IN", "STRATA_OUTPUT"):
        monkeypatch.delenv(name, raising=False)
    assert resume_from() is None
    assert output_folder() == Path()
