"""Checkpoints for others: what Hugging Face and PEFT compute is what the ranks compute."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from strata.base.errors import Code, StrataError
from strata.cli.main import run
from strata.train.core import model_options, ops
from strata.train.peft.importer import examine, read_config
from strata.train.peft.layers import ADAPTER, ADAPTER_CONFIG
from strata.train.runner.checkpoint.export import export
from strata.train.runner.collectives import RankGroup
from strata.train.runner.model.tiny import TinyModel, make
from tests.shell.train_runner import reference, tiny_families
from tests.shell.train_runner.driver import VOCABULARY, Driver, batch, logprobs_of
from tests.shell.train_runner.single_rank import driver_of, one_rank

CLOSE: Final = 2e-4
"""How far the log-probabilities may be apart: float32, added in another order."""
LORA: Final = model_options.LoraConfig(rank=4, alpha=8.0, seed=1)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankGroup]:
    with one_rank(tmp_path_factory.mktemp("ranks")) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make(folder / "llama", TinyModel(family="llama", seed=0))
    make(folder / "qwen3_moe", TinyModel(family="qwen3_moe", seed=1))
    make(folder / "tied", TinyModel(family="llama", seed=2))
    without = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    tiny_families.make("gpt2", folder / "gpt2", vocab_size=VOCABULARY, **without)
    config = json.loads((folder / "tied" / "config.json").read_text(encoding="utf-8"))
    (folder / "tied" / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}), encoding="utf-8")
    # Its configuration ties what its files store apart, as some fine-tuned models do.
    shutil.copytree(folder / "tied", folder / "untied")
    weights = load_file(folder / "tied" / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "tied" / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def drivers(ranks: RankGroup, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Driver]:
    made: dict[tuple[str, str], Driver] = {}

    def driver(model: str, training: str) -> Driver:
        if (model, training) not in made:
            folder = tmp_path_factory.mktemp(f"{model}-{training}")
            made[model, training] = driver_of(ranks, models / model, folder, training=training)
        return made[model, training]

    return driver


def trained(driver: Driver, training: str) -> list[np.ndarray[Any, Any]]:
    """A model `m` that is saved as `saved`, and `sampler`; what it says."""
    if "m" not in driver.dispatcher._runner.models:
        driver.create("m", LORA if training == "lora" else None)
        driver.train("m", batch(seed=50))
        driver.step("m", learning_rate=0.02)
        for name, kind in (("saved", "weights"), ("sampler", "sampler_weights")):
            assert isinstance(driver.save("m", name, kind), ops.WeightsSaved)
    return logprobs_of(driver.train("m", batch(), forward_only=True))


def close(model: Any, expected: list[np.ndarray[Any, Any]], tolerance: float = CLOSE) -> None:
    for one, ours in zip(batch(), expected, strict=True):
        np.testing.assert_allclose(ours, reference.logprobs(model, one).detach().numpy(), atol=tolerance)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`", "ignore:fan_in_fan_out is set to")
@pytest.mark.parametrize("model", ["llama", "tied", "untied", "qwen3_moe", "gpt2"])
def test_an_exported_adapter_says_the_same_in_peft_and_merged_in_hugging_face(
    model: str, models: Path, drivers: Callable[[str, str], Driver], tmp_path: Path
) -> None:
    driver = drivers(model, "lora")
    expected = trained(driver, "lora")
    export(driver.folder / "saved", tmp_path / "peft", "peft")
    assert {file.name for file in (tmp_path / "peft").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    close(reference.with_adapter(models / model, tmp_path / "peft"), expected)
    export(driver.folder / "saved", tmp_path / "merged", "hf", str(models / model))
    close(reference.plain(tmp_path / "merged"), expected)
    base = [reference.logprobs(reference.plain(models / model), one).detach().numpy() for one in batch()]
    assert max(float(np.abs(one - other).max()) for one, other in zip(base, expected, strict=True)) > 100 * CLOSE


@pytest.mark.parametrize("model", ["llama", "tied", "qwen3_moe", "gpt2"])
def test_a_saved_adapter_of_every_base_is_one_that_can_be_imported(
    model: str, models: Path, drivers: Callable[[str, str], Driver]
) -> None:
    driver = drivers(model, "lora")
    trained(driver, "lora")
    folder = driver.folder / "saved"
    config = read_config((folder / ADAPTER_CONFIG).read_bytes(), [model], LORA.rank)
    assert examine(folder / ADAPTER, config, models / model) == msgspec.structs.replace(LORA, seed=None)
    other = "llama" if model == "qwen3_moe" else "qwen3_moe"
    with pytest.raises(StrataError, match="the base has no layer"):
        examine(folder / ADAPTER, config, models / other)


@pytest.mark.parametrize("model", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("saved", ["saved", "sampler"])
def test_an_exported_whole_model_says_the_same_in_hugging_face(
    model: str, saved: str, drivers: Callable[[str, str], Driver], tmp_path: Path
) -> None:
    driver = drivers(model, "full")
    expected = trained(driver, "full")
    export(driver.folder / saved, tmp_path / "model", "hf")
    close(reference.plain(tmp_path / "model"), expected)
    assert (tmp_path / "model" / "tokenizer.json").exists()
    assert not list((tmp_path / "model").glob("shard-*"))


def test_an_export_is_refused_of_what_is_damaged_or_no_adapter_and_over_what_is_there(
    drivers: Callable[[str, str], Driver], models: Path, tmp_path: Path
) -> None:
    driver = drivers("llama", "lora")
    trained(driver, "lora")
    shutil.copytree(driver.folder / "saved", tmp_path / "damaged")
    data = bytearray((tmp_path / "damaged" / "adapter_model.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "damaged" / "adapter_model.safetensors").write_bytes(data)
    whole = drivers("llama", "full")
    trained(whole, "full")
    (tmp_path / "there").mkdir()
    cases: list[tuple[tuple[Path, Path, Any, str], Code, str]] = [
        ((tmp_path / "damaged", tmp_path / "out", "peft", ""), Code.CORRUPT, "not as it was written"),
        ((whole.folder / "saved", tmp_path / "out", "peft", ""), Code.INVALID, "not an adapter"),
        ((driver.folder / "saved", tmp_path / "there", "peft", ""), Code.CONFLICT, "there already"),
        ((driver.folder / "saved", tmp_path / "out", "hf", str(models / "qwen3_moe")), Code.INVALID, "belongs to a"),
        ((driver.folder / "saved", tmp_path / "out", "hf", str(models / "none")), Code.INVALID, "cannot"),
    ]
    for arguments, code, words in cases:
        with pytest.raises(StrataError, match=words) as refused:
            export(*arguments)
        assert refused.value.code is code
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged", "there"]


def test_the_command_line_exports_an_adapter_and_nothing_over_what_is_there(
    drivers: Callable[[str, str], Driver], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    driver = drivers("llama", "lora")
    trained(driver, "lora")
    folder, out = driver.folder / "saved", tmp_path / "out"
    assert run(["weights", "export", str(folder), str(out), "--format", "peft"]) == 0
    assert (out / ADAPTER).read_bytes() == (folder / ADAPTER).read_bytes()
    assert run(["weights", "export", str(folder), str(out), "--format", "hf"]) != 0
    assert "there already" in capsys.readouterr().err
