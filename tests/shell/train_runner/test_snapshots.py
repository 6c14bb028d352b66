"""Snapshots of adapters and of a full fine-tune, by two ranks and read by one."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from strata.base.errors import StrataError
from strata.train.checkpoints.checkpoint import CheckpointFile
from strata.train.core.ops import LoraConfig
from strata.train.runner.checkpoint.shards import SHARDING, ShardOffsets
from strata.train.runner.collectives import ShareGroup
from strata.train.runner.lora import Adapter, AdapterPlacement, LoraPart, LoraTarget
from strata.train.runner.snapshot import files
from strata.train.runner.snapshot.state import SamplerTensors, SnapshotReader
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


def test_a_snapshot_of_the_format_before_with_digests_of_whole_files_is_verified(tmp_path: Path) -> None:
    tensors = tmp_path / files.rank_file(0)
    save_file({"weights": torch.arange(4.0)}, tensors)
    entry = CheckpointFile(f"sha256:{hashlib.sha256(tensors.read_bytes()).hexdigest()}", tensors.stat().st_size)
    manifest = manifest_of(1, ranks=1, written={tensors.name: entry})
    data = msgspec.json.encode(manifest)
    (tmp_path / files.MANIFEST).write_bytes(data)
    read = files.read_manifest(tmp_path, hashlib.sha256(data).hexdigest())
    files.verify(tmp_path, read, rank=0, ranks=1)
    damaged = bytearray(tensors.read_bytes())
    damaged[-1] ^= 1
    tensors.write_bytes(damaged)
    with pytest.raises(StrataError, match="not as it was written"):
        files.verify(tmp_path, read, rank=0, ranks=1)


def test_each_rank_takes_its_share_from_a_snapshot_of_the_format_before(tmp_path: Path) -> None:
    """Moments of an adapter were in the shared file, and each rank had the gradients of its own tokens."""
    save_file({"models.0.exp_avg": torch.arange(5.0)}, tmp_path / files.SHARED)
    summands = [torch.full((5,), 0.5), torch.arange(5.0), torch.zeros(5)]
    for rank, summand in enumerate(summands):
        own = {"models.0.gradient": summand} if rank < 2 else {"other": summand}
        save_file(own, tmp_path / files.rank_file(rank))
    manifest = manifest_of(2, ranks=3, written={files.SHARED: CheckpointFile("", 0)})
    for rank, share in enumerate((slice(0, 3), slice(3, 5))):
        reader = SnapshotReader(tmp_path, manifest, rank=rank)
        like = torch.zeros(share.stop - share.start)
        moments, gradient = (reader.share(f"models.0.{name}", share, like) for name in ("exp_avg", "gradient"))
        assert moments is not None
        assert gradient is not None
        assert moments.tolist() == torch.arange(5.0)[share].tolist()
        assert gradient.tolist() == (torch.arange(5.0) + 0.5)[share].tolist()
        assert reader.share("models.0.exp_avg_sq", share, like) is None


def write_flat(folder: Path, adapter: Adapter, numbers: dict[str, torch.Tensor]) -> int:
    """Format 3: an adapter as one flat tensor, its weights in the shared file, shares of others in those of the ranks.
    Returns how many ranks there were."""
    save_file({"models.0.weights": numbers["weights"]}, folder / files.SHARED)
    shares = torch.split(numbers["exp_avg"], 33)
    for rank, share in enumerate(shares):
        offsets = {"models.0.exp_avg": ShardOffsets([33 * rank])}
        save_file({"models.0.exp_avg": share}, folder / files.rank_file(rank), {SHARDING: encode_offsets(offsets)})
    return len(shares)


def write_pieces(folder: Path, adapter: Adapter, numbers: dict[str, torch.Tensor]) -> int:
    """Format 4: of each tensor two pieces, and adapters of samplers in the shared file."""
    save_file({"samplers.0.weights": numbers["weights"]}, folder / files.SHARED)
    for rank in range(2):
        tensors, offsets = {}, {}
        for kind, flat in numbers.items():
            for name, view in adapter.views(flat).items():
                half = view.numel() // 2
                tensors[f"models.0.{kind}.{name}"] = view.flatten()[half:] if rank else view.flatten()[:half]
                offsets[f"models.0.{kind}.{name}"] = ShardOffsets([half * rank])
        save_file(tensors, folder / files.rank_file(rank), {SHARDING: encode_offsets(offsets)})
    return 2


def write_runs(folder: Path, adapter: Adapter, numbers: dict[str, torch.Tensor]) -> int:
    """The present format. Ranks have every third run of ten numbers, of two blocks."""
    runs = [(start, min(start + 10, adapter.size)) for start in range(0, adapter.size, 10)]
    for rank in range(3):
        tensors, places = {}, {}
        for kind, flat in numbers.items():
            for block in range(2):
                places[f"models.0.{kind}.{block}"] = own = runs[rank::3][block::2]
                tensors[f"models.0.{kind}.{block}"] = torch.cat([flat[start:stop] for start, stop in own])
        save_file(tensors, folder / files.rank_file(rank), {files.RUNS: msgspec.json.encode(places).decode()})
    return 3


@pytest.mark.parametrize(("number", "write"), [(3, write_flat), (4, write_pieces), (5, write_runs)])
def test_a_rank_takes_its_experts_and_its_parts_of_layers_from_a_snapshot_of_any_format(
    number: int, write: Callable[[Path, Adapter, dict[str, torch.Tensor]], int], tmp_path: Path
) -> None:
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
    ranks = write(tmp_path, adapter, {"weights": numbers, "exp_avg": -numbers})
    shared = {files.SHARED: CheckpointFile("", 0)} if (tmp_path / files.SHARED).exists() else {}
    reader = SnapshotReader(tmp_path, manifest_of(number, ranks=ranks, written=shared), rank=1)
    sampled = [("samplers.0.weights", numbers)] if number == 4 else []
    for name, written in (("models.0.weights", numbers), ("models.0.exp_avg", -numbers), *sampled):
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
    reader = SnapshotReader(tmp_path, manifest_of(5, ranks=1, written={}), rank=0)
    with pytest.raises(StrataError, match="does not fit"):
        reader.part("models.0.weights", adapter.blocks[0], slice(0, adapter.size))


def test_numbers_of_an_adapter_of_other_layers_are_refused(tmp_path: Path) -> None:
    save_file({"models.0.weights": torch.zeros(20)}, tmp_path / files.SHARED)
    save_file({}, tmp_path / files.rank_file(0))
    written, other = (
        Adapter(LoraConfig(rank=2, alpha=2.0), [LoraTarget(name, 2, 3)], torch.device("cpu")) for name in ("q", "o")
    )
    new = SnapshotReader(tmp_path, manifest_of(5, ranks=1, written={}), rank=0)
    new.check_layout("models.0.weights", written.layout, written)
    with pytest.raises(StrataError, match="does not fit"):
        new.check_layout("models.0.weights", written.layout, other)
    old = SnapshotReader(tmp_path, manifest_of(2, ranks=1, written={files.SHARED: CheckpointFile("", 0)}), rank=0)
    with pytest.raises(StrataError, match="does not fit"):
        old.check_layout("models.0.weights", "", written)


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


def encode_offsets(offsets: dict[str, ShardOffsets]) -> str:
    return msgspec.json.encode(offsets).decode()
