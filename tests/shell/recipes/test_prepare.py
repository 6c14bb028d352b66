"""Which rows are used, and how the others are named; which changes make another run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from strata.base.errors import Code, StrataError
from strata.sdk.recipes.prepare import ChosenRows, read_recipe_rows, render_rows
from strata.sdk.recipes.recipe import Recipe, RecipeData, RecipeEvaluation, RecipeModel, RecipeTeacher
from strata.sdk.recipes.rows import Row


def no_store(path: str) -> bytes:
    raise AssertionError(path)


def written(folder: Path, name: str, texts: list[str]) -> None:
    (folder / name).write_text("".join(f"{json.dumps({'text': text})}\n" for text in texts), encoding="utf-8")


def text_of(row: Row) -> str:
    if not row["text"]:
        raise StrataError(Code.INVALID, "no text")
    return str(row["text"])


def render(chosen: ChosenRows, limit: int = 3) -> tuple[list[str], str]:
    return render_rows(chosen, text_of, len, limit)


def test_rows_that_are_too_long_are_counted(tmp_path: Path) -> None:
    written(tmp_path, "d.jsonl", ["a", "long", "b", "longer"])
    written(tmp_path, "e.jsonl", ["c", "d"])
    recipe = Recipe(kind="sft", data=RecipeData(path="d.jsonl"), eval=RecipeEvaluation(path="e.jsonl"))
    rows = read_recipe_rows(recipe, tmp_path, no_store)
    sentence = "2 of 4 rows of the training data (d.jsonl) are longer than data.max_tokens = 3 and are left out"
    assert render(rows.train) == (["a", "b"], sentence)
    assert render(rows.evaluation) == (["c", "d"], "")
    with pytest.raises(StrataError, match=r"all rows of the evaluation data \(e\.jsonl\) are longer than"):
        render(rows.evaluation, 0)


def test_a_row_that_cannot_be_used_is_named_by_its_place_in_the_file(tmp_path: Path) -> None:
    texts = [f"{number}" for number in range(20)]
    for bad in range(20):
        written(tmp_path, "d.jsonl", [*texts[:bad], "", *texts[bad + 1 :]])
        recipe = Recipe(kind="sft", data=RecipeData(path="d.jsonl"), eval=RecipeEvaluation(share=0.4))
        rows = read_recipe_rows(recipe, tmp_path, no_store)
        chosen, purpose = (rows.evaluation, "evaluation")
        if any(number == bad + 1 for number, _ in rows.train.rows):
            chosen, purpose = rows.train, "training"
        with pytest.raises(StrataError) as raised:
            render(chosen)
        assert raised.value.message == f"row {bad + 1} of the {purpose} data (d.jsonl): no text"


@pytest.mark.parametrize("changed", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_adapter_that_has_changed_makes_another_run(tmp_path: Path, changed: str) -> None:
    written(tmp_path, "d.jsonl", ["a"])
    (tmp_path / "old").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors", "README.md"):
        (tmp_path / "old" / name).write_text("1", encoding="utf-8")

    def settings(**more: Any) -> dict[str, Any]:
        recipe = Recipe(kind="distill", data=RecipeData(path="d.jsonl"), **more)
        return read_recipe_rows(recipe, tmp_path, no_store).settings

    cases: list[dict[str, Any]] = [{"model": RecipeModel(start="old")}, {"teacher": RecipeTeacher(adapter="old")}]
    before = [settings(**each) for each in cases]
    (tmp_path / "old" / "README.md").write_text("2", encoding="utf-8")
    assert [settings(**each) for each in cases] == before
    (tmp_path / "old" / changed).write_text("2", encoding="utf-8")
    after = [settings(**each) for each in cases]
    differing = [{key for key in one if one[key] != other[key]} for one, other in zip(before, after, strict=True)]
    assert differing == [{"model.start.sha256"}, {"teacher.adapter.sha256"}]


def test_an_adapter_on_the_server_has_no_digest(tmp_path: Path) -> None:
    written(tmp_path, "d.jsonl", ["a"])
    recipe = Recipe(kind="sft", data=RecipeData(path="d.jsonl"), model=RecipeModel(start="tinker://r/weights/x"))
    assert "model.start.sha256" not in read_recipe_rows(recipe, tmp_path, no_store).settings
