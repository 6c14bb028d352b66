"""Rows from every format that pyarrow and json write."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

import pyarrow  # type: ignore[import-untyped]
import pytest
from pyarrow import ipc, parquet

from strata.base.errors import StrataError
from strata.sdk.recipes.rows import HubDataset, choose_files, parse_dataset, read_rows

ROWS: Final[list[dict[str, Any]]] = [{"prompt": f"{n}+1=", "answer": n + 1} for n in range(5)]

REVISION: Final = "0" * 40


def no_store(path: str) -> bytes:
    raise AssertionError(path)


def write(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.Table.from_pylist(ROWS)
    if path.suffix == ".parquet":
        parquet.write_table(table, path)
    elif path.suffix == ".arrow":
        with ipc.new_stream(str(path), table.schema) as stream:
            stream.write_table(table)
    elif path.suffix == ".json":
        path.write_text(json.dumps(ROWS), encoding="utf-8")
    else:
        path.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS), encoding="utf-8")


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet", "a.arrow"])
def test_a_file_is_the_same_rows_and_the_same_digest_in_every_format(tmp_path: Path, name: str) -> None:
    write(tmp_path / name)
    write(tmp_path / "same.jsonl")
    found = read_rows(name, "train", tmp_path, no_store)
    assert found.rows == ROWS
    assert found.digest == read_rows("same.jsonl", "train", tmp_path, no_store).digest


def test_a_folder_gives_the_files_of_the_split(tmp_path: Path) -> None:
    write(tmp_path / "d" / "data" / "train-00000-of-00002.parquet")
    write(tmp_path / "d" / "data" / "train-00001-of-00002.parquet")
    write(tmp_path / "d" / "data" / "test-00000-of-00001.parquet")
    assert len(read_rows("d", "train", tmp_path, no_store).rows) == 10
    assert len(read_rows("d", "test", tmp_path, no_store).rows) == 5
    with pytest.raises(StrataError, match="no files of the split 'dev'"):
        read_rows("d", "dev", tmp_path, no_store)


@pytest.mark.parametrize("names", [("main/train.jsonl", "socratic/train.jsonl"), ("train.jsonl", "train.parquet")])
def test_configurations_and_copies_of_a_dataset_are_not_mixed(tmp_path: Path, names: tuple[str, str]) -> None:
    for name in names:
        write(tmp_path / "d" / name)
    with pytest.raises(StrataError) as raised:
        read_rows("d", "train", tmp_path, no_store)
    for name in names:
        assert f"{Path(name).parent}/*{Path(name).suffix}".removeprefix("./") in raised.value.message
    assert len(read_rows(f"d/{names[0]}", "train", tmp_path, no_store).rows) == len(ROWS)
    if Path(names[0]).parent.name:
        assert len(read_rows(f"d/{Path(names[0]).parent}", "train", tmp_path, no_store).rows) == len(ROWS)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("hf://squad", HubDataset("squad", "", "")),
        ("hf://a/b", HubDataset("a/b", "", "")),
        ("hf://a/b@refs/pr/1", HubDataset("a/b", "refs/pr/1", "")),
        ("hf://a/b/main", HubDataset("a/b", "", "main")),
        ("hf://a/b/data/main@v2", HubDataset("a/b", "v2", "data/main")),
    ],
)
def test_a_dataset_of_the_hub_may_have_a_revision_and_a_subfolder(source: str, expected: HubDataset) -> None:
    assert parse_dataset(source) == expected


def test_a_subfolder_chooses_a_configuration_of_a_dataset_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "cache" / "datasets--a--b"
    for name in ("main/train.jsonl", "socratic/train.jsonl"):
        write(repository / "snapshots" / REVISION / name)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(REVISION, encoding="utf-8")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert len(read_rows("hf://a/b/main", "train", tmp_path, no_store).rows) == len(ROWS)
    with pytest.raises(StrataError, match="in several folders or formats"):
        read_rows("hf://a/b", "train", tmp_path, no_store)
    with pytest.raises(StrataError, match="the dataset a/b has no folder 'other'"):
        read_rows("hf://a/b/other", "train", tmp_path, no_store)


def test_files_that_name_no_split_are_all_of_any() -> None:
    assert choose_files(["b.jsonl", "a.jsonl", "README.md"], "train") == ["a.jsonl", "b.jsonl"]
    assert choose_files(["a.jsonl", "test.jsonl"], "train") == []


def test_an_object_store_is_read_through_the_function_that_was_given(tmp_path: Path) -> None:
    content = b'{"text": "x"}\n'
    assert read_rows("s3://b/k.jsonl", "train", tmp_path, lambda path: content).rows == [{"text": "x"}]


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.jsonl", b'{"a": 1}\n[2]\n', r"a\.jsonl:2: not a JSON object"),
        ("a.json", b"[1]", "not an array of JSON objects"),
        ("a.parquet", b"PAR1", "cannot be read"),
        ("a.txt", b"x", "a file of data ends with"),
        ("a.jsonl", b"\n", "has no rows"),
    ],
)
def test_a_file_that_is_broken_is_named(tmp_path: Path, name: str, content: bytes, problem: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(StrataError) as raised:
        read_rows(name, "train", tmp_path, no_store)
    assert re.search(problem, str(raised.value))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(StrataError, match=r"there is no .*x\.jsonl"):
        read_rows("x.jsonl", "train", tmp_path, no_store)
