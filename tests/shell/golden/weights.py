"""What one rank stores of small models: checkpoints of an adapter and of a whole model, and snapshots of all of a rank.

The base is smaller than what `strata models tiny` makes, and its weights are computed and not drawn.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from strata.train.checkpoints.checkpoint import read_header
from strata.train.core import commands, model_options, ops
from strata.train.runner.collectives import RankGroup
from tests.shell.golden.folder import SnapshotMeaning, write_meaning
from tests.shell.train_runner.driver import Driver, dense
from tests.shell.train_runner.single_rank import driver_of, one_rank

Training = Literal["lora", "full"]

VOCABULARY: Final = 32
BASE: Final = "base"
"""The folder of the base, and what manifests call it."""
CHECKPOINT: Final = "checkpoint"
SNAPSHOT: Final = "snapshot"
MODEL: Final = "model"
SAMPLER: Final = "sampler"
ADAPTER: Final = model_options.LoraConfig(rank=2, alpha=4.0, seed=1)
TRAININGS: Final[Sequence[Training]] = ("lora", "full")
WAIT_S: Final = 60.0


def write_base(folder: Path) -> None:
    """Writes a model with weights that follow from their place, so that every version of torch has the same."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        config, dtype=torch.float32, trust_remote_code=False
    )
    with torch.no_grad():
        for number, (_, weight) in enumerate(sorted(model.named_parameters())):
            places = torch.arange(weight.numel(), dtype=torch.float64).reshape(weight.shape)
            weight.copy_((0.1 * torch.sin(places * 0.7 + number)).float() + (1.0 if weight.dim() == 1 else 0.0))
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    save_file(model.state_dict(), folder / "model.safetensors", {"format": "pt"})


def write_weights(folder: Path, scratch: Path) -> None:
    """Writes what a rank stores of a model of each kind; a sampler and gradients are in its snapshot as well."""
    write_base(folder / BASE)
    with one_rank(scratch) as ranks:
        write_meaning(folder, {training: _train(folder, scratch, training, ranks) for training in TRAININGS})


def _train(folder: Path, scratch: Path, training: Training, ranks: RankGroup) -> SnapshotMeaning:
    driver = driver_for(folder / BASE, scratch / training, training, ranks)
    create(driver, training)
    driver.train(MODEL, [datum(8), datum(5)])
    driver.step(MODEL, learning_rate=0.01)
    driver.train(MODEL, [datum(6)])
    driver.do(commands.MakeSampler(ops.SaveSampler(MODEL, 3, SAMPLER), ""))
    written = take_snapshot(driver, SNAPSHOT)
    _save(driver)
    for name in (CHECKPOINT, SNAPSHOT):
        shutil.copytree(scratch / training / name, folder / training / name)
    return SnapshotMeaning(number=written.number, digest=written.digest)


def _save(driver: Driver) -> None:
    """Saves until the entries of each header are in order: safetensors writes them in any."""
    folder, seq = driver.folder / CHECKPOINT, driver.seq
    while not folder.exists() or not all(map(_is_ordered, folder.glob("*.safetensors"))):
        shutil.rmtree(folder, ignore_errors=True)
        driver.seq = seq
        driver.save(MODEL, CHECKPOINT)


def _is_ordered(file: Path) -> bool:
    names = list(read_header(file).metadata)
    return names == sorted(names)


def driver_for(base: Path, scratch: Path, training: Training, ranks: RankGroup) -> Driver:
    return driver_of(ranks, base, scratch, training=training)


def create(driver: Driver, training: Training) -> None:
    driver.create(MODEL, ADAPTER if training == "lora" else None)


def take_snapshot(driver: Driver, name: str) -> commands.SnapshotWritten:
    assert driver.do(commands.TakeSnapshot(str(driver.folder / name))) == []
    driver.dispatcher._runner.snapshots.join(WAIT_S)
    driver.dispatcher.report_snapshot()
    written = driver.link.sent.pop()
    assert isinstance(written, commands.SnapshotWritten), written
    assert written.trouble is None, written
    return written


def datum(length: int) -> ops.Datum:
    """Tokens and targets that follow from their place."""
    tokens = np.arange(length) * 7 % VOCABULARY
    return ops.Datum(
        tokens.astype("<i4").tobytes(),
        {
            "target_tokens": dense((tokens + 1) % VOCABULARY, ops.DType.I64),
            "weights": dense(np.ones(length), ops.DType.F32),
        },
    )
