"""`strata init` in real folders: it runs nothing, follows no links, reads a bounded part, and overwrites nothing."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pyarrow  # type: ignore[import-untyped]
import pytest
from pyarrow import parquet

from strata.base.errors import Code, StrataError
from strata.cli.exit_codes import ExitCode
from strata.cli.main import run
from strata.fleet.core.manifest import parse_manifest
from strata.sdk.init.folder_scan import MAX_ENTRIES, MAX_OTHERS, MAX_SCRIPTS, create_file, scan_folder
from strata.sdk.recipes.recipe import read_recipe
from tests.core.sdk.test_init import GUARD

CHAT = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
NOSY = """\
import pathlib
pathlib.Path({place!r}).write_text("it ran")
"""


class Printed(NamedTuple):
    status: int
    out: str
    err: str


Init = Callable[..., Printed]


@pytest.fixture
def init(capsys: pytest.CaptureFixture[str]) -> Init:
    def call(*words: str | Path) -> Printed:
        status = run(["init", *map(str, words)])
        return Printed(int(status), *capsys.readouterr())

    return call


def test_a_folder_with_a_script_gets_a_manifest_and_the_next_command(init: Init, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text('p.add_argument("--lr", default=0.1)\nx.cuda()\n' + GUARD)
    (tmp_path / "requirements.txt").write_text("torch\n")
    done = init(tmp_path)
    assert (done.status, done.err) == (0, "")
    path = tmp_path / "manifest.toml"
    assert done.out.splitlines() == [
        "found  train.py: it is called train.py; parameters lr; uses CUDA",
        "found  requirements.txt: packages",
        f"wrote  {path}",
        f"next   strata apply {path}",
    ]
    [job] = parse_manifest(path.read_text(), str(path)).resolve().jobs.values()
    assert job.needs.min_gpus == 1


def test_the_folder_is_the_current_one_unless_given(
    init: Init, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my project").mkdir()
    monkeypatch.chdir(tmp_path / "my project")
    Path("main.py").write_text("print(1)\n")
    assert init().out.splitlines()[-1] == "next   strata apply manifest.toml"
    assert 'name = "my-project"' in Path("manifest.toml").read_text()


def test_a_script_that_requires_arguments_is_reported_before_the_next_command_fails(init: Init, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text('p.add_argument("--data", required=True)\n' + GUARD)
    assert "the script requires arguments: add --data to the command in" in init(tmp_path).err


def test_a_folder_with_data_gets_a_recipe_that_strata_train_reads(init: Init, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text(CHAT)
    (tmp_path / "data" / "test.jsonl").write_text(CHAT)
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text('{"model_type": "llama"}')
    done = init(tmp_path)
    path = tmp_path / "recipe.toml"
    assert (done.status, done.err) == (0, "")
    assert done.out.splitlines()[-2:] == [f"wrote  {path}", f"next   strata train {path}"]
    recipe = read_recipe(path)
    assert (recipe.kind, recipe.model.path, recipe.data.path) == ("sft", "base", "data/train.jsonl")
    assert recipe.eval is not None
    assert recipe.eval.path == "data/test.jsonl"


@pytest.mark.parametrize(
    ("rows", "kind"),
    [
        ('{"prompt": "a", "completion": "b"}', "sft"),
        ('{"prompt": "a", "chosen": "b", "rejected": "c"}', "dpo"),
        ('{"prompt": "a", "answer": "4"}', "grpo"),
    ],
)
def test_every_option_of_a_recipe_is_one(init: Init, tmp_path: Path, rows: str, kind: str) -> None:
    (tmp_path / '~"☃.jsonl').write_text(f"{rows}\n")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    assert init(tmp_path).status == 0
    path = tmp_path / "recipe.toml"
    assert read_recipe(path).kind == kind
    text, options = re.subn(r"^# (\w+ = .*)$", r"\1", path.read_text(), flags=re.MULTILINE)
    assert options >= 1
    path.write_text(text)
    recipe = read_recipe(path)
    assert (recipe.data.path, recipe.model.start) == ('./~"☃.jsonl', "old")


def test_columns_of_a_parquet_file_are_read_without_a_library(init: Init, tmp_path: Path) -> None:
    words = pyarrow.array(["x" * 1000] * 2000)
    parquet.write_table(pyarrow.table({"prompt": words, "chosen": words, "rejected": words}), tmp_path / "a.parquet")
    parquet.write_table(pyarrow.table({"prompted": words, "answers": words}), tmp_path / "b.parquet")
    assert init(tmp_path).status == 0
    recipe = read_recipe(tmp_path / "recipe.toml")
    assert (recipe.kind, recipe.data.path) == ("dpo", "a.parquet")
    assert "b.parquet" not in (tmp_path / "recipe.toml").read_text()


def test_of_both_kinds_the_manifest_is_written_and_the_recipe_on_request(init: Init, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(GUARD)
    (tmp_path / "chat.jsonl").write_text(CHAT)
    done = init(tmp_path)
    assert "--recipe' writes a recipe for the data" in done.err
    assert not (tmp_path / "recipe.toml").exists()
    other = init(tmp_path, "--recipe")
    assert (other.status, read_recipe(tmp_path / "recipe.toml").kind) == (0, "sft")
    assert "strata models pull Qwen/Qwen3-0.6B" in other.err


@pytest.mark.parametrize(
    ("files", "words", "hint"),
    [
        ({}, (), "add a train.py"),
        ({"a.ipynb": "{}"}, (), "jupyter nbconvert --to script a.ipynb"),
        ({"config.json": '{"model_type": "llama"}'}, (), "it has a model: add"),
        ({"train.py": GUARD}, ("--recipe",), "add a JSONL"),
        ({"model.py": "class Net: ...", "tests/train.py": GUARD}, (), "add a train.py"),
    ],
)
def test_a_folder_with_nothing_to_do_is_refused_with_a_hint(
    init: Init, tmp_path: Path, files: dict[str, str], words: tuple[str, ...], hint: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    done = init(tmp_path, *words)
    assert (done.status, done.out) == (ExitCode.NOT_FOUND, "")
    assert hint in done.err
    assert not list(tmp_path.glob("*.toml"))


def test_a_file_that_exists_is_not_overwritten(init: Init, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(GUARD)
    (tmp_path / "manifest.toml").write_text("mine")
    done = init(tmp_path)
    assert (done.status, done.out) == (ExitCode.FAILED, "")
    assert "exists already" in done.err
    assert (tmp_path / "manifest.toml").read_text() == "mine"


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_is_not_written_through(init: Init, tmp_path: Path, exists: bool) -> None:
    folder, outside = tmp_path / "folder", tmp_path / "outside.toml"
    folder.mkdir()
    (folder / "train.py").write_text(GUARD)
    (folder / "manifest.toml").symlink_to(outside)
    if exists:
        outside.write_text("mine")
    assert init(folder).status == ExitCode.FAILED
    assert (outside.read_text() if outside.exists() else "mine") == "mine"
    assert outside.exists() == exists


def test_of_several_that_write_at_once_one_succeeds(tmp_path: Path) -> None:
    path, start = tmp_path / "manifest.toml", threading.Barrier(8)
    texts = [f"{number}" * 10_000 for number in range(8)]

    def create(text: str) -> Code | str:
        start.wait()
        try:
            create_file(path, text)
        except StrataError as error:
            return error.code
        return text

    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(create, texts))
    assert outcomes.count(Code.CONFLICT) == 7
    assert path.read_text() in outcomes


def test_a_folder_that_cannot_be_written_to_is_an_error_of_the_caller(tmp_path: Path) -> None:
    with pytest.raises(StrataError, match="cannot be written"):
        create_file(tmp_path / "nowhere" / "manifest.toml", "text")


def test_no_code_of_the_folder_is_run(init: Init, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "it-ran"
    folder = tmp_path / "folder"
    (folder / "net").mkdir(parents=True)
    code = NOSY.format(place=str(place))
    for name in ("train.py", "setup.py", "conftest.py", "sitecustomize.py", "json.py", "net/__init__.py"):
        (folder / name).write_text(f"{code}import net\n{GUARD}")
    monkeypatch.chdir(folder)
    assert init().status == 0
    assert not place.exists()


def test_links_pipes_and_strange_names_are_left_out(init: Init, tmp_path: Path) -> None:
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    folder.mkdir()
    outside.mkdir()
    (outside / "train.py").write_text(GUARD)
    (outside / "chat.jsonl").write_text(CHAT)
    (folder / "train.py").symlink_to(outside / "train.py")
    (folder / "there").symlink_to(outside)
    (folder / "loop").symlink_to(folder)
    (folder / "itself").symlink_to("itself")
    (folder / "chat.jsonl").symlink_to("/dev/zero")
    os.mkfifo(folder / "main.py")
    os.mkfifo(folder / "pyproject.toml")
    (folder / "x\n[hosts.y]\n.py").write_text(GUARD)
    (folder / os.fsdecode(b"\xff.py")).write_text(GUARD)
    done = init(folder)
    assert done.status == ExitCode.NOT_FOUND
    assert "links are not followed" in done.err
    assert "left out names that are no UTF-8 text or have control characters" in done.err
    (folder / "run.py").write_text(GUARD)
    assert init(folder).status == 0
    manifest = parse_manifest((folder / "manifest.toml").read_text(), "manifest.toml").resolve()
    assert manifest.trainers["default"].command == ("python", "run.py")
    assert manifest.hosts == {}


def test_virtual_environments_caches_and_hidden_folders_are_left_out(tmp_path: Path) -> None:
    for name in ("env/pyvenv.cfg", "env/lib/train.py", "__pycache__/train.py", ".git/train.py", ".tox/train.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(GUARD)
    assert scan_folder(tmp_path).files == ()


def test_a_folder_of_many_files_is_looked_at_in_part(init: Init, tmp_path: Path) -> None:
    (tmp_path / "many").mkdir()
    for number in range(MAX_ENTRIES):
        (tmp_path / "many" / f"{number}.txt").touch()
    (tmp_path / "train.py").write_text(GUARD)
    done = init(tmp_path)
    assert done.status == 0
    assert f"looked at the first {MAX_ENTRIES} entries of the folder only" in done.err


def test_large_files_are_read_in_part_and_all_of_them_up_to_a_limit(tmp_path: Path) -> None:
    with (tmp_path / "chat.jsonl").open("w") as file:
        file.write(CHAT)
        file.truncate(1 << 40)
    for number in range(40):
        (tmp_path / f"s{number:02}.py").write_text("#" * (300 << 10))
    listing = scan_folder(tmp_path)
    assert listing.size > 1 << 40
    assert sum(len(file.content) for file in listing.files) <= MAX_SCRIPTS + MAX_OTHERS
    assert "read 1 MiB of scripts only" in listing.notes
    assert not any(file.whole for file in listing.files)


def test_folders_below_others_are_looked_into_down_to_a_level(tmp_path: Path) -> None:
    deep = tmp_path.joinpath(*"abcdefgh")
    deep.mkdir(parents=True)
    (deep / "train.py").write_text(GUARD)
    (tmp_path / "a" / "b" / "c" / "d" / "fit.py").write_text(GUARD)
    listing = scan_folder(tmp_path)
    assert [file.path for file in listing.files] == ["a/b/c/d/fit.py"]
    assert listing.notes == ("looked into folders of the first 5 levels only",)


def test_a_folder_of_more_than_a_source_may_have_is_told_how_to_send_data(init: Init, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(GUARD)
    with (tmp_path / "images.bin").open("w") as file:
        file.truncate(64 << 20)
    assert init(tmp_path).status == 0
    assert "This folder has 64 MiB, and at most 48 MiB are sent" in (tmp_path / "manifest.toml").read_text()


def test_a_folder_that_does_not_exist_is_a_usage_error(init: Init, tmp_path: Path) -> None:
    assert init(tmp_path / "nowhere").status == ExitCode.USAGE


def test_what_cannot_be_read_is_named_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.py", "b.py", "c.py"):
        (tmp_path / name).write_text(GUARD)

    def refuse(path: Path, flags: int) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "open", refuse)
    listing = scan_folder(tmp_path)
    assert (listing.files, listing.notes) == ((), ("cannot read a.py and 2 more",))
