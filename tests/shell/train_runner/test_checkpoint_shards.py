"""Whole models in shards: each rank writes its own, any number of ranks reads them, and so does the bare engine."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from strata.base.settings import process_environment
from strata.train.checkpoints import checkpoint
from strata.train.core import commands, ops
from strata.train.runner.checkpoint import shards
from strata.train.runner.collectives import RankGroup
from strata.train.runner.model.tiny import TinyModel, make
from tests.shell.train_runner.driver import Driver, apart_by, batch
from tests.shell.train_runner.single_rank import driver_of, one_rank

ROOT: Final = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankGroup]:
    with one_rank(tmp_path_factory.mktemp("ranks")) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def driver(ranks: RankGroup, tmp_path_factory: pytest.TempPathFactory) -> Driver:
    """Of one rank, with the checkpoint `one` of its own, and `two` and `trained` of two ranks."""
    folder = tmp_path_factory.mktemp("shards")
    make(folder / "llama", TinyModel(family="llama", seed=0))
    driver = driver_of(ranks, folder / "llama", folder / "files", training="full")
    driver.create("m", None)
    driver.train("m", batch())
    driver.step("m", learning_rate=0.01)
    assert isinstance(driver.save("m", "one"), ops.WeightsSaved)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launcher, "-m", "tests.shell.train_runner.reshard", str(folder / "llama"), str(driver.folder)],
        cwd=ROOT,
        env={**process_environment(), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (driver.folder / "unpickled-1.json").exists(), done.stderr[-4000:]
    # Whoever saves next there sweeps it.
    (left,) = driver.folder.glob(".trained.*.part")
    shutil.copytree(left, folder / "left")
    return driver


def test_what_one_rank_wrote_two_read_and_what_two_wrote_one_reads(driver: Driver) -> None:
    one, two, trained = (shards.read_unsharded(driver.folder / name) for name in ("one", "two", "trained"))
    assert {"lm_head.weight", "exp_avg.lm_head.weight", "exp_avg_sq.lm_head.weight"} <= one.keys()
    assert apart_by(one, two) == 0
    assert apart_by(one, trained) > 0
    assert isinstance(driver.load("m", "trained"), ops.WeightsLoaded)
    assert apart_by(trained, driver.state("m")) == 0
    assert driver.dispatcher._runner.models["m"].optimizer.steps == 2


def test_a_rank_killed_in_a_save_leaves_the_checkpoint_that_was_there_and_the_next_save_sweeps(driver: Driver) -> None:
    assert (driver.folder.parent / "left" / "shard-00002-model-00001-of-00001.safetensors").exists()
    assert checkpoint.read(driver.folder / "trained").steps == 2
    assert isinstance(driver.save("m", "after"), ops.WeightsSaved)
    assert not list(driver.folder.glob(".*"))


def test_each_rank_writes_its_own_half(driver: Driver) -> None:
    manifest = checkpoint.read(driver.folder / "trained")
    sizes = [file.size for name, file in sorted(manifest.files.items()) if name.startswith("shard-")]
    assert len(sizes) == 2
    assert sizes[0] == pytest.approx(sizes[1], rel=0.01)
    halves = [load_file(file) for file in sorted((driver.folder / "trained").glob(shards.SHARDS))]
    whole = shards.read_unsharded(driver.folder / "trained")
    for name, tensor in whole.items():
        assert torch.equal(torch.cat([half[name] for half in halves if name in half]), tensor), name


def test_nothing_is_unpickled_by_the_ranks(driver: Driver) -> None:
    for rank in range(2):
        assert json.loads((driver.folder / f"unpickled-{rank}.json").read_text(encoding="utf-8")) == []


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_bare_engine_reads_our_shards_and_we_read_its_own(driver: Driver, tmp_path: Path) -> None:
    ours = shards.read_unsharded(driver.folder / "trained")
    state = {name: torch.zeros_like(tensor) for name, tensor in ours.items()}
    load(state, storage_reader=HuggingFaceStorageReader(str(driver.folder / "trained")), no_dist=True)
    assert apart_by(ours, state) == 0
    save(state, storage_writer=HuggingFaceStorageWriter(str(tmp_path), save_distributed=True))
    assert apart_by(ours, shards.read_unsharded(tmp_path)) == 0


def test_a_sampler_opens_the_shards_of_a_checkpoint(driver: Driver) -> None:
    for name in ("one", "trained"):
        making = ops.OpenSampler(f"sampler-{name}", "llama", ops.SavedWeights("run", "weights", name))
        (opened,) = driver.do(commands.MakeSampler(making, str(driver.folder / name), []))
        assert opened == ops.SamplerOpened(f"sampler-{name}")
