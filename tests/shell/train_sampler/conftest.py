"""One group of one rank in the process of the tests, and small models of every kind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from strata.train.runner.collectives import RankGroup
from strata.train.runner.model.base import BaseModel
from strata.train.runner.model.tiny import Family, TinyModel, make
from tests.shell.train_sampler.stage import BASE, Stage, base_of


@pytest.fixture(scope="package")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankGroup]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    meet = tmp_path_factory.mktemp("ranks") / "rendezvous"
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=0, world_size=1)
    yield RankGroup(torch.device("cpu"))
    dist.destroy_process_group()
    torch.set_num_threads(threads)


@pytest.fixture(scope="package")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    families: dict[str, Family] = {
        "llama": "llama",
        "qwen3": "qwen3",
        "qwen3_moe": "qwen3_moe",
        "window": "qwen3",
        "tied": "llama",
        "untied": "llama",
    }
    for seed, (name, family) in enumerate(families.items()):
        make(folder / name, TinyModel(family=family, seed=seed, context=512))
    half = {"use_sliding_window": True, "sliding_window": 9, "layer_types": ["full_attention", "sliding_attention"]}
    _configure(folder / "window", half)
    for name in ("tied", "untied"):
        _configure(folder / name, {"tie_word_embeddings": True})
    weights = load_file(folder / "tied" / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "tied" / "model.safetensors", {"format": "pt"})
    return folder


def _configure(model: Path, changes: dict[str, object]) -> None:
    file = model / "config.json"
    file.write_bytes(msgspec.json.encode(msgspec.json.decode(file.read_bytes()) | changes))


@pytest.fixture(scope="package")
def llama(models: Path, ranks: RankGroup) -> BaseModel:
    return base_of(models / "llama", ranks)


@pytest.fixture
def stage(llama: BaseModel, ranks: RankGroup) -> Stage:
    """A sampler of the plain base, with room for a few sequences."""
    made = Stage(llama, ranks, sequences=16, cached_tokens=4096, prompt_tokens=64)
    made.sampler.open_base(BASE)
    return made
