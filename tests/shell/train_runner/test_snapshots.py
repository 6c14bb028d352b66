"""Snapshots of adapters and of a full fine-tune, by two ranks and read by one."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Final

import msgspec
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from strata.base.errors import Code, StrataError
from strata.train.checkpoints.checkpoint import CheckpointFile
from strata.train.core.model_options import LoraConfig
from strata.train.runner.collectives import ShareGroup
from strata.train.runner.lora.adapter import Adapter, AdapterPlacement, LoraPart
from strata.train.runner.lora.targets import LoraTarget
from strata.train.runner.snapshot import files
from strata.train.runner.snapshot.state import HostCopies, SamplerTensors, SnapshotReader, check_layout
from tests.support.torchrun import run_on_ranks

ROOT: Final = Path(__file__).parents[3]
LONGEST_S: Final = 240

pytestmark = pytest.mark.timeout(2 * LONGEST_S + 20)


def run(folder: Path, ranks: int) -> None:
    print(run_on_ranks("tests.shell.train_runner.snapshots", ranks, str(folder), within_s=LONGEST_S))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("snapshots")
    run(made, 2)
    run(made, 1)
    return made


def found(folder: Path, training: str, life: str) -> str:
    return (folder / f"{training}-{life}.txt").read_text(encoding="utf-8")


@pytest.mark.gpu
@pytest.mark.parametrize("training", ["lora", "full"])
def test_ranks_that_restore_a_snapshot_go_on_bit_for_bit_and_never_load_a_damaged_one(
    training: str, folder: Path
) -> None:
    assert found(folder, training, "make_one") == ""
    assert found(folder, training, "restore_it") == ""


@pytest.mark.gpu
@pytest.mark.parametrize("training", ["lora", "full"])
def test_a_snapshot_of_two_ranks_is_restored_by_one(training: str, folder: Path) -> None:
    assert found(folder, training, "restore_on_fewer") == ""


def test_a_writer_that_is_killed_anywhere_leaves_a_whole_snapshot_or_none(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.shell.train_runner.snapshot_crash", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.splitlines()) >= 7


def manifest_of(number: int, ranks: int, written: dict[str, CheckpointFile]) -> files.SnapshotManifest:
    """Of a snapshot in a format, without models."""
    return files.SnapshotManifest(
        format=number,
        base_model="tiny",
        arch="llama",
        parameters=4,
        full=False,
        ranks=ranks,
        base_modified=False,
        models=[],
        samplers=[],
        files=written,
    )


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5, files.FORMAT + 1])
def test_a_snapshot_of_another_format_is_refused_with_both_numbers(number: int, tmp_path: Path) -> None:
    data = msgspec.json.encode(manifest_of(number, ranks=1, written={}))
    (tmp_path / files.MANIFEST).write_bytes(data)
    with pytest.raises(StrataError, match=f"has format {number}, .* reads format {files.FORMAT} only") as refused:
        files.read_manifest(tmp_path, hashlib.sha256(data).hexdigest())
    assert refused.value.code is Code.UNSUPPORTED


def write_runs(folder: Path, adapter: Adapter, numbers: dict[str, torch.Tensor]) -> int:
    """Ranks have every third run of ten numbers, of two blocks. Returns how many ranks there are."""
    runs = [(start, min(start + 10, adapter.size)) for start in range(0, adapter.size, 10)]
    for rank in range(3):
        tensors, places = {}, {}
        for kind, flat in numbers.items():
            for block in range(2):
                places[f"models.0.{kind}.{block}"] = own = runs[rank::3][block::2]
                tensors[f"models.0.{kind}.{block}"] = torch.cat([flat[start:stop] for start, stop in own])
        save_file(tensors, folder / files.rank_file(rank), {files.RUNS: msgspec.json.encode(places).decode()})
    return 3


def test_a_rank_takes_its_experts_and_its_parts_of_layers_from_a_snapshot_of_other_ranks(tmp_path: Path) -> None:
    targets = [LoraTarget("q_proj", 2, 3), LoraTarget("experts.down_proj", 2, 5, experts=4), LoraTarget("o_proj", 3, 2)]

    parts = {
        "q_proj": LoraPart(rows=range(1, 2)),
        "experts.down_proj": LoraPart(experts=range(2, 4)),
        "o_proj": LoraPart(columns=range(1, 2)),
    }
    placement = AdapterPlacement(
        lambda target: parts[target.name], ShareGroup(1, 4), ShareGroup(0, 2), ShareGroup(1, 2)
    )
    adapter = Adapter(LoraConfig(rank=2, alpha=2.0), targets, torch.device("cpu"), placement=placement)
    numbers = torch.arange(float(adapter.size))
    ranks = write_runs(tmp_path, adapter, {"weights": numbers, "exp_avg": -numbers})
    reader = SnapshotReader(tmp_path, manifest_of(files.FORMAT, ranks=ranks, written={}), rank=1)
    for name, written in (("models.0.weights", numbers), ("models.0.exp_avg", -numbers)):
        read = [reader.part(name, block, slice(0, block.size)) for block in adapter.blocks]
        held = adapter.held_views([block for block in read if block is not None])
        whole = adapter.views(written)
        assert all(torch.equal(held[each], adapter.take_own(each, whole[each])) for each in adapter.shapes)
        shares = [reader.part(name, block, block.share) for block in adapter.blocks]
        for own, block, full in zip(shares, adapter.blocks, read, strict=True):
            assert own is not None
            assert full is not None
            assert torch.equal(own, full[block.share])
    assert all(reader.part("models.0.gradient", block, block.share) is None for block in adapter.blocks)


def test_a_snapshot_that_lacks_numbers_of_an_adapter_is_refused(tmp_path: Path) -> None:
    adapter = Adapter(LoraConfig(rank=2, alpha=2.0), [LoraTarget("q_proj", 2, 3)], torch.device("cpu"))
    runs = {files.RUNS: msgspec.json.encode({"models.0.weights.0": [(0, adapter.size - 1)]}).decode()}
    save_file({"models.0.weights.0": torch.zeros(adapter.size - 1)}, tmp_path / files.rank_file(0), runs)
    reader = SnapshotReader(tmp_path, manifest_of(files.FORMAT, ranks=1, written={}), rank=0)
    with pytest.raises(StrataError, match="does not fit"):
        reader.part("models.0.weights", adapter.blocks[0], slice(0, adapter.size))


def test_numbers_of_an_adapter_of_other_layers_are_refused() -> None:
    written, other = (
        Adapter(LoraConfig(rank=2, alpha=2.0), [LoraTarget(name, 2, 3)], torch.device("cpu")) for name in ("q", "o")
    )
    check_layout("models.0.weights", written.layout, written)
    with pytest.raises(StrataError, match="does not fit"):
        check_layout("models.0.weights", written.layout, other)


def test_a_rank_without_numbers_of_an_adapter_writes_nothing_of_it() -> None:
    """Otherwise a kind of numbers that no rank has would be there, and lack all numbers."""
    targets = [LoraTarget("q_proj", 2, 3)]
    elsewhere = AdapterPlacement(lambda _: None, is_staged=True)
    adapter = Adapter(LoraConfig(rank=2, alpha=2.0), targets, torch.device("cpu"), placement=elsewhere)
    assert list(SamplerTensors("s", adapter, None).own()) == []


def test_a_rank_that_has_nothing_to_write_writes_a_file_that_is_read(tmp_path: Path) -> None:
    """One that has the second copy of a full model, for example."""
    writer = files.SnapshotWriter(0, 30.0)
    writer.start(1, tmp_path / "1-group", files.SnapshotCopy(manifest_of(files.FORMAT, ranks=1, written={}), {}), 0.0)
    writer.join(30.0)
    written = writer.take()
    assert written is not None
    manifest = files.read_manifest(tmp_path / "1-group", written.digest)
    files.verify(tmp_path / "1-group", manifest, rank=0, ranks=1)


def test_a_file_is_written_when_the_copies_of_the_device_are_there(tmp_path: Path) -> None:
    copied = torch.zeros(5)
    manifest = manifest_of(files.FORMAT, ranks=1, written={})
    writer = files.SnapshotWriter(0, 30.0)
    writer.start(
        1, tmp_path / "1-group", files.SnapshotCopy(manifest, {"own": copied}, wait=lambda: copied.fill_(3.0)), 0.0
    )
    writer.join(30.0)
    with safe_open(tmp_path / "1-group" / files.rank_file(0), framework="pt") as written:
        assert torch.equal(written.get_tensor("own"), torch.full((5,), 3.0))


def test_a_copy_on_the_host_has_the_numbers_of_the_moment_when_it_was_made() -> None:
    copies, numbers = HostCopies(torch.device("cpu")), torch.arange(6.0).view(2, 3)
    copied = copies.copy(numbers.t())
    numbers.zero_()
    copies.hold_writes()
    copies.wait()
    assert torch.equal(copied, torch.arange(6.0).view(2, 3).t())
    assert copied.is_contiguous()
