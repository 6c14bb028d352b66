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
from safetensors.torch import save_file

from strata.base.errors import StrataError
from strata.train.checkpoints.checkpoint import CheckpointFile
from strata.train.core.ops import LoraConfig
from strata.train.runner.checkpoint.shards import SHARDING, ShardOffsets
from strata.train.runner.collectives import ShareGroup
from strata.train.runner.lora import Adapter, AdapterPlacement, LoraPart, LoraTarget
from strata.train.runner.snapshot import files
from strata.train.runner.snapshot.state import SnapshotReader
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
    manifest = manifest_of(2, ranks=3, written={})
    for rank, share in enumerate((slice(0, 3), slice(3, 5))):
        reader = SnapshotReader(tmp_path, manifest, rank=rank)
        like = torch.zeros(share.stop - share.start)
        moments, gradient = (reader.share(f"models.0.{name}", share, like) for name in ("exp_avg", "gradient"))
        assert moments is not None
        assert gradient is not None
        assert moments.tolist() == torch.arange(5.0)[share].tolist()
        assert gradient.tolist() == (torch.arange(5.0) + 0.5)[share].tolist()
        assert reader.share("models.0.exp_avg_sq", share, like) is None


def test_a_rank_takes_its_experts_from_a_snapshot_of_the_format_before(tmp_path: Path) -> None:
    """An adapter was one flat tensor: its weights in the shared file, shares of its moments in those of the ranks."""
    targets = [LoraTarget("q_proj", 2, 3), LoraTarget("experts.down_proj", 2, 5, experts=4), LoraTarget("o_proj", 3, 2)]

    def part_of(target: LoraTarget) -> LoraPart:
        return LoraPart(experts=range(2, 4) if target.experts else None)

    placement = AdapterPlacement(part_of, ShareGroup(1, 4), ShareGroup(0, 2))
    adapter = Adapter(LoraConfig(rank=2, alpha=2.0), targets, torch.device("cpu"), placement=placement)
    weights = torch.arange(float(adapter.size))
    save_file({"models.0.weights": weights}, tmp_path / files.SHARED)
    for rank, share in enumerate(torch.split(-weights, 33)):
        offsets = {"models.0.exp_avg": ShardOffsets([33 * rank])}
        save_file({"models.0.exp_avg": share}, tmp_path / files.rank_file(rank), {SHARDING: encode_offsets(offsets)})
    reader = SnapshotReader(tmp_path, manifest_of(3, ranks=-(-adapter.size // 33), written={}), rank=1)
    for name, written in (("weights", weights), ("exp_avg", -weights)):
        read = [reader.part(f"models.0.{name}", block, slice(0, block.size)) for block in adapter.blocks]
        held = adapter.held_views([block for block in read if block is not None])
        whole = adapter.views(written)
        assert all(torch.equal(held[each], adapter.take_own(each, whole[each])) for each in adapter.shapes)
        shares = [reader.part(f"models.0.{name}", block, block.share) for block in adapter.blocks]
        for own, block, full in zip(shares, adapter.blocks, read, strict=True):
            assert own is not None
            assert full is not None
            assert torch.equal(own, full[block.share])
    assert all(reader.part("models.0.gradient", block, block.share) is None for block in adapter.blocks)


def encode_offsets(offsets: dict[str, ShardOffsets]) -> str:
    return msgspec.json.encode(offsets).decode()
