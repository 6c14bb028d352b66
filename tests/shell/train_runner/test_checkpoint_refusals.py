"""Checkpoints that are not what was written here: each is refused in words, and the model stays as it was."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from strata.base.digest import sha256_hex
from strata.base.errors import StrataError
from strata.train.checkpoints import checkpoint
from strata.train.checkpoints.checkpoint import (
    FORMAT,
    HEADER_LIMIT,
    LEAF,
    MANIFEST,
    TREE,
    CheckpointFile,
    CheckpointManifest,
)
from strata.train.core import model_options, ops
from strata.train.runner.collectives import RankGroup
from strata.train.runner.model.tiny import TinyModel, make
from tests.shell.train_runner.driver import Driver, apart_by, batch
from tests.shell.train_runner.single_rank import driver_of, one_rank

pytestmark = pytest.mark.proves(
    "A checkpoint that was said to be saved is there whole after a kill or a power cut, and one that was "
    "changed is refused"
)

LORA: Final = model_options.LoraConfig(rank=4, alpha=8.0, seed=1)
SHARD: Final = "shard-00001-model-00001-of-00001.safetensors"
ADAPTER_FILES: Final = ("adapter_config.json", "adapter_model.safetensors", "optimizer.safetensors", MANIFEST)
WHOLE_FILES: Final = (SHARD, "config.json", "tokenizer.json", MANIFEST)
PLACES: Final = [("adapter", file) for file in ADAPTER_FILES] + [("whole", file) for file in WHOLE_FILES]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankGroup]:
    with one_rank(tmp_path_factory.mktemp("ranks")) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def drivers(ranks: RankGroup, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Driver]:
    """Of an adapter and of a full fine-tune, each trained a little and saved as `good`."""
    folder = tmp_path_factory.mktemp("refusals")
    make(folder / "llama", TinyModel(family="llama", seed=0))
    made = {
        "adapter": driver_of(ranks, folder / "llama", folder / "adapter"),
        "whole": driver_of(ranks, folder / "llama", folder / "whole", training="full"),
    }
    for kind, driver in made.items():
        driver.create("m", LORA if kind == "adapter" else None)
        driver.train("m", batch())
        driver.step("m", learning_rate=0.01)
        assert isinstance(driver.save("m", "good"), ops.WeightsSaved)
    return made


def refused(driver: Driver, change: Callable[[Path], None], *words: str, optimizer: bool = True) -> None:
    """A copy of the good checkpoint with `change` in it is refused, and leaves weights, moments and gradients."""
    copy = driver.folder / "changed"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(driver.folder / "good", copy)
    change(copy)
    model = driver.dispatcher._runner.models["m"]
    before = [tensor.clone() for tensor in (*model.optimizer.parameters, *model.tensors())]
    result = driver.load("m", "changed", optimizer=optimizer)
    assert isinstance(result, ops.Failed), result
    for word in words:
        assert word in result.message
    assert "Traceback" not in result.message
    after = [*model.optimizer.parameters, *model.tensors()]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def tree_digest(file: Path) -> str:
    data = file.read_bytes()
    leaves = [hashlib.sha256(data[start : start + LEAF]).digest() for start in range(0, len(data), LEAF)]
    return f"{TREE}{sha256_hex(b''.join(leaves))}"


def forge(folder: Path, **changes: Any) -> None:
    """Write a manifest that fits whatever lies in the folder now."""
    manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=CheckpointManifest)
    there = [file for file in folder.iterdir() if file.name != MANIFEST]
    files = {file.name: CheckpointFile(tree_digest(file), file.lstat().st_size) for file in there}
    made = msgspec.structs.replace(manifest, **{"files": dict(sorted(files.items())), **changes})
    (folder / MANIFEST).write_bytes(msgspec.json.encode(made.sealed))


@pytest.mark.parametrize("kind", ["adapter", "whole"])
def test_a_checkpoint_that_nobody_touched_is_loaded_also_with_its_manifest_made_again(
    drivers: dict[str, Driver], kind: str
) -> None:
    """What the other tests forge is refused for what they changed, not for the forging."""
    driver = drivers[kind]
    before = driver.state("m")
    shutil.copytree(driver.folder / "good", driver.folder / "forged")
    forge(driver.folder / "forged")
    for name in ("good", "forged"):
        assert isinstance(driver.load("m", name), ops.WeightsLoaded)
    assert apart_by(before, driver.state("m")) == 0


@pytest.mark.parametrize("number", [1, 2, FORMAT + 1])
def test_a_checkpoint_of_another_format_is_refused_with_both_numbers(drivers: dict[str, Driver], number: int) -> None:
    words = f"has format {number}, and this version of Strata reads format {FORMAT} only"
    refused(drivers["adapter"], lambda folder: forge(folder, format=number), words)


@pytest.mark.parametrize(("kind", "file"), PLACES)
@pytest.mark.parametrize("place", [0.0, 0.3, 0.999])
def test_one_flipped_bit_is_refused(drivers: dict[str, Driver], kind: str, file: str, place: float) -> None:
    def flip(folder: Path) -> None:
        data = bytearray((folder / file).read_bytes())
        data[int(place * len(data))] ^= 1
        (folder / file).write_bytes(data)

    refused(drivers[kind], flip, "manifest" if file == MANIFEST else file)


def test_no_byte_of_a_manifest_can_change(drivers: dict[str, Driver]) -> None:
    """Not to another letter, nor to what is none."""
    folder = drivers["adapter"].folder / "bits"
    shutil.copytree(drivers["adapter"].folder / "good", folder)
    whole = (folder / MANIFEST).read_bytes()
    for place in range(len(whole)):
        for bit in {1 << place % 7, 128}:
            (folder / MANIFEST).write_bytes(whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :])
            with pytest.raises(StrataError):
                checkpoint.read(folder)


@pytest.mark.parametrize(("kind", "file"), PLACES)
def test_a_missing_file_is_refused(drivers: dict[str, Driver], kind: str, file: str) -> None:
    word = "there is no checkpoint" if file == MANIFEST else file
    refused(drivers[kind], lambda folder: (folder / file).unlink(), word)


@pytest.mark.parametrize(("kind", "file"), PLACES)
def test_a_link_instead_of_a_file_is_refused(drivers: dict[str, Driver], kind: str, file: str) -> None:
    def link(folder: Path) -> None:
        shutil.copy(folder / file, folder.parent / "elsewhere")
        (folder / file).unlink()
        (folder / file).symlink_to(folder.parent / "elsewhere")

    refused(drivers[kind], link, "link" if file == MANIFEST else "not a plain file")


def test_a_link_instead_of_the_folder_is_refused(drivers: dict[str, Driver]) -> None:
    def link(folder: Path) -> None:
        shutil.rmtree(folder)
        folder.symlink_to(folder.with_name("good"))

    refused(drivers["adapter"], link, "link")
    (drivers["adapter"].folder / "changed").unlink()


def as_pickle(folder: Path, name: str) -> None:
    """Bytes that write a file when they are unpickled: `c os system ( S 'touch …' t R .`."""
    (folder / name).write_bytes(f"cos\nsystem\n(S'touch {folder.parent / 'touched'}'\ntR.".encode())


def folder_inside(folder: Path, name: str) -> None:
    (folder / name).mkdir()


def a_pipe(folder: Path, name: str) -> None:
    os.mkfifo(folder / name)


EXTRA: Final[list[tuple[str, Callable[[Path, str], None]]]] = [
    (".metadata", as_pickle),
    ("__0.metadata", as_pickle),
    ("__0_0.distcp", as_pickle),
    ("pytorch_model.bin", as_pickle),
    ("modeling.py", as_pickle),
    ("more.json", folder_inside),
    ("pipe.json", a_pipe),
]


@pytest.mark.parametrize("kind", ["adapter", "whole"])
@pytest.mark.parametrize(("name", "make_it"), EXTRA, ids=[name for name, _ in EXTRA])
def test_a_file_that_is_none_of_ours_is_refused_and_never_unpickled_even_if_the_manifest_names_it(
    drivers: dict[str, Driver], kind: str, name: str, make_it: Callable[[Path, str], None]
) -> None:
    driver = drivers[kind]
    refused(driver, lambda folder: make_it(folder, name), name)

    def forged(folder: Path) -> None:
        forge(folder)
        make_it(folder, name)
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=CheckpointManifest)
        plain = (folder / name).is_file()
        digest = tree_digest(folder / name) if plain else "sha256:0"
        file = CheckpointFile(digest, (folder / name).lstat().st_size)
        made = msgspec.structs.replace(manifest, files=dict(sorted({**manifest.files, name: file}.items())))
        (folder / MANIFEST).write_bytes(msgspec.json.encode(made.sealed))

    refused(driver, forged, name)
    assert not (driver.folder / "touched").exists()


@pytest.mark.parametrize("name", ["../good/manifest.json", "/etc/hostname", "a/../b.json", "..", "a\0.json"])
def test_names_that_lead_out_of_the_folder_are_refused(drivers: dict[str, Driver], name: str) -> None:
    def lead_out(folder: Path) -> None:
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=CheckpointManifest)
        forge(folder, files={**manifest.files, name: CheckpointFile("sha256:0", 1)})

    refused(drivers["adapter"], lead_out, "is not as it was written")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"base_model": "another"}, "another base"),
        ({"arch": "qwen3"}, "another architecture"),
        ({"lora": None}, "other kind of training"),
        ({"lora": model_options.LoraConfig(rank=4, alpha=16.0)}, "alpha is 16"),
        ({"kind": "sampler_weights"}, "no optimizer state"),
        ({"format": 99}, "format 99"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(
    drivers: dict[str, Driver], changes: dict[str, Any], words: str
) -> None:
    refused(drivers["adapter"], lambda folder: forge(folder, **changes), words)


@pytest.mark.parametrize(
    "lora",
    [model_options.LoraConfig(rank=8, alpha=16.0), model_options.LoraConfig(rank=4, alpha=8.0, train_mlp=False)],
    ids=["rank", "targets"],
)
def test_an_adapter_of_another_shape_is_refused(drivers: dict[str, Driver], lora: model_options.LoraConfig) -> None:
    driver = drivers["adapter"]
    driver.create("other", lora)
    saved = driver.save("other", f"other-{lora.rank}-{lora.train_mlp}")
    assert isinstance(saved, ops.WeightsSaved)
    driver.unload("other")

    def take(folder: Path) -> None:
        shutil.rmtree(folder)
        shutil.copytree(driver.folder / f"other-{lora.rank}-{lora.train_mlp}", folder)

    refused(driver, take, "in the checkpoint" if lora.rank == 8 else "does not train what the model trains")


def test_a_manifest_with_a_field_that_we_do_not_know_is_refused(drivers: dict[str, Driver]) -> None:
    def add(folder: Path) -> None:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        (folder / MANIFEST).write_text(json.dumps(manifest | {"run_this": "x"}), encoding="utf-8")

    refused(drivers["adapter"], add, "manifest", "run_this")


def no_tensors(data: bytes) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        file.write_bytes(data)

    return change


def header(said: object, *, length: int | None = None, rest: bytes = b"") -> bytes:
    data = json.dumps(said).encode()
    return (len(data) if length is None else length).to_bytes(8, "little") + data + rest


def resaved(**metadata: str) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        save_file(load_file(file), file, metadata)

    return change


def damaged(file: Path) -> None:
    """Well formed, and of other numbers than its manifest of tensors needs: half the names are gone."""
    tensors = load_file(file)
    save_file({name: tensors[name] for name in sorted(tensors)[::2]}, file, {"format": "pt"})


HEADERS: Final[dict[str, tuple[Callable[[Path], None], str]]] = {
    "pickle": (no_tensors(b"cos\nsystem\n(S'true'\ntR."), "not a file of tensors"),
    "empty": (no_tensors(b""), "not a file of tensors"),
    "huge header": (no_tensors(header({}, length=HEADER_LIMIT + 1, rest=bytes(64))), "header would have"),
    "endless header": (no_tensors(header({}, length=2**64 - 1)), "header would have"),
    "deep header": (no_tensors(header({}, length=200_000)[:8] + b"[" * 200_000), "not a file of tensors"),
    "list": (no_tensors(header([])), "not a file of tensors"),
    "words as offsets": (
        no_tensors(header({"a": {"dtype": "F32", "shape": [1], "data_offsets": ["0", "4"]}}, rest=bytes(4))),
        "not a file of tensors",
    ),
    "more in a tensor": (
        no_tensors(header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], "x": 1}}, rest=bytes(4))),
        "not a file of tensors",
    ),
    "beyond its end": (
        no_tensors(header({"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}, rest=bytes(4))),
        "",
    ),
    "strange metadata": (resaved(format="pt", auto_map="evil.Model"), "auto_map"),
    "half of it": (damaged, ""),
}


@pytest.mark.parametrize("kind", ["adapter", "whole"])
@pytest.mark.parametrize("case", HEADERS)
def test_a_file_of_tensors_that_is_none_is_refused_whatever_the_manifest_says(
    drivers: dict[str, Driver], kind: str, case: str
) -> None:
    change, words = HEADERS[case]
    name = "adapter_model.safetensors" if kind == "adapter" else SHARD

    def put(folder: Path) -> None:
        change(folder / name)
        forge(folder)

    refused(drivers[kind], put, words)


def shifted(offsets: dict[str, Any]) -> dict[str, Any]:
    return {name: {"saved_offsets": [1, *own["saved_offsets"][1:]]} for name, own in offsets.items()}


@pytest.mark.parametrize(
    "change",
    [shifted, lambda offsets: {}, lambda offsets: {name: {"saved_offsets": [-1]} for name in offsets}],
    ids=["a hole", "nowhere", "other dimensions"],
)
def test_shards_that_leave_a_hole_are_refused(
    drivers: dict[str, Driver], change: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    """The engine would leave the memory of a hole as it was, and say nothing."""

    def put(folder: Path) -> None:
        with safe_open(folder / SHARD, "pt") as file:
            metadata = file.metadata()
        offsets = change(json.loads(metadata["DCP_SHARDING_INFO"]))
        save_file(load_file(folder / SHARD), folder / SHARD, metadata | {"DCP_SHARDING_INFO": json.dumps(offsets)})
        forge(folder)

    refused(drivers["whole"], put, "is not part of a full model")
