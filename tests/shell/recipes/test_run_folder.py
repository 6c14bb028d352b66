"""What a run folder keeps of earlier attempts, and what it does not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from strata.base.errors import Code, StrataError
from strata.sdk.recipes.run_folder import RecipeRunRecord, RunFolder

TINY: Mapping[str, str] = {"model.tiny": "llama", "teacher.tiny": "llama", "data.sha256": "a"}
MADE = ("server/server.toml", "teacher-server/server.toml", "tokenizer/x", "model/config.json", "teacher-model/x")


def make(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("earlier", encoding="utf-8")


def test_a_run_is_recorded_before_anything_is_made_for_it(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    assert run.open_run(TINY) == run.read() == RecipeRunRecord(settings=TINY)


@pytest.mark.parametrize("settings", [TINY, {**TINY, "data.sha256": "b"}, {"model.path": "b"}])
def test_an_attempt_without_a_state_leaves_nothing_to_the_next(tmp_path: Path, settings: Mapping[str, str]) -> None:
    run = RunFolder(tmp_path)
    run.write(RecipeRunRecord(settings=TINY, steps=7, sessions=("s",)))
    make(tmp_path, *MADE)
    assert run.open_run(settings) == run.read() == RecipeRunRecord(settings=settings, sessions=("s",))
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_a_run_with_a_state_keeps_its_files_and_its_settings(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    record = RecipeRunRecord(settings=TINY, step=3, state="tinker://r/weights/step-3")
    run.write(record)
    make(tmp_path, *MADE, "adapter/x")
    assert run.open_run(TINY) == record
    with pytest.raises(StrataError, match=r'data\.sha256 was "a" and is "b"') as raised:
        run.open_run({**TINY, "data.sha256": "b"})
    assert raised.value.code is Code.CONFLICT
    assert all((tmp_path / name).is_file() for name in (*MADE, "adapter/x"))


@pytest.mark.parametrize("name", [*MADE, "adapter/x"])
def test_a_folder_that_the_run_has_not_made_is_neither_used_nor_removed(tmp_path: Path, name: str) -> None:
    make(tmp_path, name)
    run = RunFolder(tmp_path)
    with pytest.raises(StrataError, match=f"has {name.partition('/')[0]}/, which this run has not made"):
        run.open_run(TINY)
    assert (tmp_path / name).is_file()
    assert run.read() is None


@pytest.mark.parametrize("settings", [{"model.path": "model"}, TINY])
def test_a_model_of_the_user_is_never_removed(tmp_path: Path, settings: Mapping[str, str]) -> None:
    run = RunFolder(tmp_path)
    run.write(RecipeRunRecord(settings={"model.path": "model"}))
    make(tmp_path, "model/config.json")
    if settings is TINY:
        with pytest.raises(StrataError, match="has model/, which this run has not made"):
            run.open_run(settings)
    else:
        run.open_run(settings)
    assert (tmp_path / "model" / "config.json").is_file()
