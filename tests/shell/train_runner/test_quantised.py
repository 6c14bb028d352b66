"""Quantised bases: the numbers of transformers, bitsandbytes and PEFT; the memory; and what is refused."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file

from strata.base.errors import Code, StrataError
from strata.train.core import commands, model_options, ops
from strata.train.inference_settings import InferenceSettings
from strata.train.launch.preflight import check_features, check_quantised
from strata.train.parallel import ParallelSettings
from strata.train.plan.devices import Hardware
from strata.train.plan.memory_plan import QUANTISING_BYTES
from strata.train.plan.model_check import check_model_files
from strata.train.plan.quantisation import QuantisedKind
from strata.train.runner.checkpoint.export import export
from strata.train.runner.checkpoint.formats import to_peft
from strata.train.runner.collectives import RankGroup
from strata.train.runner.model.quantised import QuantisedLinear, quantised_layers
from strata.train.runner.model.tiny import Family, TinyModel, make
from strata.train.settings import (
    LimitSettings,
    ModelSettings,
    RankSettings,
    ServerSection,
    ServerSettings,
    load_settings,
)
from tests.shell.train_runner import reference
from tests.shell.train_runner.driver import Driver, apart_by, batch, logprobs_of, loss_of
from tests.shell.train_runner.quantised import KINDS, Compared
from tests.shell.train_runner.single_rank import driver_of, one_rank
from tests.support.torchrun import run_on_ranks

LORA: Final = model_options.LoraConfig(rank=4, alpha=8.0, seed=1)
CLOSE: Final = 1e-5
"""Of losses and gradients, by the largest: both sides compute in float32 with the same dequantised weights."""
LONGEST_S: Final = 200


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankGroup]:
    with one_rank(tmp_path_factory.mktemp("group")) as group:
        yield group


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    families: tuple[Family, ...] = ("llama", "qwen3", "qwen3_moe")
    for family in families:
        make(folder / family, TinyModel(family=family, hidden=128))
    (folder / "narrow").mkdir()
    (folder / "narrow" / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    narrow = {"model.layers.0.self_attn.q_proj.weight": torch.zeros(96, 96), "lm_head.weight": torch.zeros(64, 64)}
    save_file(narrow, folder / "narrow" / "model.safetensors")
    (folder / "conv1d").mkdir()
    (folder / "conv1d" / "config.json").write_text('{"model_type": "gpt2"}', encoding="utf-8")
    save_file({"h.0.attn.c_attn.weight": torch.zeros(64, 192)}, folder / "conv1d" / "model.safetensors")
    (folder / "small").mkdir()
    (folder / "small" / "config.json").write_text('{"quantization_config": {"bits": 4}}', encoding="utf-8")
    return folder


def trained(driver: Driver) -> None:
    driver.create("m", LORA)
    driver.train("m", batch(seed=50))
    driver.step("m", learning_rate=0.02)
    assert isinstance(driver.save("m", "adapter"), ops.WeightsSaved)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_losses_and_gradients_are_those_of_transformers_bitsandbytes_and_peft(
    family: str, kind: QuantisedKind, ranks: RankGroup, models: Path, tmp_path: Path
) -> None:
    driver = driver_of(ranks, models / family, tmp_path, quantise=kind)
    theirs = reference.bitsandbytes_model(models / family, kind, torch.float32).train()
    layers = dict(quantised_layers(driver.dispatcher._runner.base.lm))
    assert len(layers) == 14
    for name, layer in layers.items():
        other = theirs.get_submodule(name)
        scales = other.weight.quant_state.absmax if kind == "nf4" else other.weight.SCB
        assert torch.equal(own(layer.codes).flatten(), other.weight.data.flatten()), name
        assert torch.equal(own(layer.scales).view(torch.float32).flatten(), scales.flatten()), name

    trained(driver)
    peft = PeftModel.from_pretrained(theirs, str(tmp_path / "adapter"), is_trainable=True).train()
    loss, logprobs, gradients = reference.train(peft, batch())
    result = driver.train("m", batch())
    for ours, expected in zip(logprobs_of(result), logprobs, strict=True):
        np.testing.assert_allclose(ours, expected.numpy(), atol=CLOSE * 10)
    assert abs(loss_of(result) - loss) < CLOSE * abs(loss)
    gradient = to_peft(driver.gradient("m"))
    assert apart_by({name.replace("default.", ""): value for name, value in gradients.items()}, gradient) < CLOSE


def own(parameter: torch.Tensor) -> torch.Tensor:
    full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    assert isinstance(full, torch.Tensor)
    return full.detach()


@pytest.mark.parametrize("kind", KINDS)
def test_an_exported_model_computes_what_was_trained(
    kind: QuantisedKind, ranks: RankGroup, models: Path, tmp_path: Path
) -> None:
    driver = driver_of(ranks, models / "llama", tmp_path, quantise=kind)
    trained(driver)
    result = driver.train("m", batch())
    export(tmp_path / "adapter", tmp_path / "merged", "hf", str(models / "llama"))
    merged = reference.plain(tmp_path / "merged")
    for ours, one in zip(logprobs_of(result), batch(), strict=True):
        np.testing.assert_allclose(ours, reference.logprobs(merged, one).detach().numpy(), atol=2e-4)
    adapted = reference.with_adapter(models / "llama", tmp_path / "adapter")
    unquantised = [reference.logprobs(adapted, one).detach().numpy() for one in batch()]
    largest = max(float(np.abs(a - b).max()) for a, b in zip(logprobs_of(result), unquantised, strict=True))
    assert largest > 2e-3, "a merge into the base as it is in its files would be another model"


@pytest.mark.parametrize(("dtype", "kind"), [("bfloat16", "nf4"), ("float32", "int8")])
def test_a_quantised_base_is_sampled_and_sleeps(
    dtype: str, kind: QuantisedKind, ranks: RankGroup, models: Path, tmp_path: Path
) -> None:
    driver = driver_of(ranks, models / "llama", tmp_path, quantise=kind, dtype=dtype)
    trained(driver)
    # It compares decoding with training, and refuses if they differ.
    driver.dispatcher._runner.sampler.check_architecture()
    before = logprobs_of(driver.train("m", batch()))
    (asleep,) = driver.do(commands.ManageModel(ops.Sleep()))
    assert isinstance(asleep, ops.Asleep)
    assert driver.do(commands.ManageModel(ops.Wake())) == [ops.Awake()]
    for ours, other in zip(logprobs_of(driver.train("m", batch())), before, strict=True):
        np.testing.assert_array_equal(ours, other)


def test_experts_routers_embeddings_norms_and_the_head_stay_as_they_are(
    ranks: RankGroup, models: Path, tmp_path: Path
) -> None:
    driver = driver_of(ranks, models / "qwen3_moe", tmp_path, quantise="nf4", dtype="bfloat16")
    lm = driver.dispatcher._runner.base.lm
    assert {name.rpartition(".")[2] for name, _ in quantised_layers(lm)} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    for name, parameter in lm.named_parameters():
        module = lm.get_submodule(name.rpartition(".")[0])
        assert isinstance(module, QuantisedLinear) or parameter.dtype == torch.bfloat16, name
    trained(driver)


@pytest.mark.timeout(LONGEST_S + 20)
def test_two_ranks_that_share_a_quantised_base_make_the_numbers_of_one(tmp_path: Path) -> None:
    run_on_ranks("tests.shell.train_runner.quantised", 2, str(tmp_path), within_s=LONGEST_S)
    for kind in KINDS:
        for rank in (0, 1):
            compared = msgspec.json.decode((tmp_path / f"{kind}-{rank}").read_bytes(), type=Compared)
            assert compared.equal, (kind, rank, compared.difference)
            assert compared.unsampled == ""
            assert compared.held_bytes <= 0.51 * compared.all_bytes, (kind, rank)


def test_a_check_of_a_model_shows_how_much_less_it_needs_quantised(models: Path) -> None:
    needs = {
        need.quantise or need.dtype: need for need in check_model_files(str(models / "llama"), Hardware(), 1).memory[:4]
    }
    # The package itself takes more than so small a model saves.
    assert needs["nf4"].start_bytes < needs["int8"].start_bytes < needs["bfloat16"].start_bytes + QUANTISING_BYTES


def settings_of(folder: Path, **sections: Any) -> ServerSettings:
    options: dict[str, Any] = {"model": ModelSettings(path=str(folder), quantise="nf4"), **sections}
    return ServerSettings(server=ServerSection(), limits=LimitSettings(), ranks=RankSettings(nproc=2), **options)


def check(settings: ServerSettings) -> None:
    check_features(settings)
    check_quantised(settings)


def test_what_a_quantised_base_cannot_do_is_refused_before_anything_starts(models: Path) -> None:
    llama = models / "llama"
    full = ModelSettings(path=str(llama), quantise="nf4", training="full")
    for settings, reason in (
        (
            settings_of(llama, model=full),
            "model.quantise is nf4, and model.training is full: the weights of a quantised base cannot be trained",
        ),
        (settings_of(llama, parallel=ParallelSettings(tensor=2)), "parallel.tensor is 2, and model.quantise is nf4"),
        (settings_of(llama, parallel=ParallelSettings(expert=2)), "parallel.expert is 2, and model.quantise is nf4"),
        (settings_of(llama, inference=InferenceSettings(engine="vllm")), "model.quantise is nf4, and inference.engine"),
        (settings_of(models / "narrow"), "narrow has no layer that can be quantised to nf4"),
        (settings_of(models / "conv1d"), "conv1d has no layer that can be quantised to nf4"),
        (settings_of(models / "small"), "model.quantise is nf4: the files of the model are quantised already"),
    ):
        with pytest.raises(StrataError, match="^" + re.escape(reason)) as refused:
            check(settings)
        assert refused.value.code is Code.INVALID
    check(settings_of(llama, parallel=ParallelSettings(replicate=2)))


def test_an_unknown_kind_is_refused_with_those_that_there_are(tmp_path: Path) -> None:
    (tmp_path / "server.toml").write_text('[model]\npath = "m"\nquantise = "fp8"\n', encoding="utf-8")
    with pytest.raises(StrataError, match="quantise") as refused:
        load_settings(tmp_path / "server.toml")
    assert refused.value.code is Code.INVALID


def test_a_missing_package_is_named_with_the_extra_that_has_it(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(StrataError, match="needs bitsandbytes, and that is not installed") as refused:
        check_quantised(settings_of(models / "llama"))
    assert refused.value.code is Code.UNSUPPORTED
    assert "strata-train[quantised]" in str(refused.value.detail) + str(refused.value)


def test_ranks_refuse_a_snapshot_of_a_base_that_was_quantised_otherwise(
    ranks: RankGroup, models: Path, tmp_path: Path
) -> None:
    driver = driver_of(ranks, models / "llama", tmp_path, quantise="nf4")
    trained(driver)
    runner = driver.dispatcher._runner
    assert driver.do(commands.TakeSnapshot(str(tmp_path / "snapshot"))) == []
    runner.snapshots.join(60)
    result = runner.snapshots.take()
    assert result is not None
    assert result.trouble is None, result
    other = driver_of(ranks, models / "llama", tmp_path / "other").dispatcher._runner
    with pytest.raises(StrataError, match="the snapshot is of a server with quantise 'nf4', here it is ''"):
        other.restore(tmp_path / "snapshot", result.digest)
