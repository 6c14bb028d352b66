"""Fused kernels on doubles of their packages: they are used where they agree with the plain path, and else nowhere."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.nn.attention import register_flash_attention_impl
from torch.nn.attention._registry import _FLASH_ATTENTION_IMPLS

from strata.base.errors import Code, StrataError
from strata.train.plan.fused_kernels import AttentionKernel, FusedLayers, check_fused_kernels
from strata.train.runner.collectives import RankGroup
from strata.train.runner.model.base import BaseModel
from strata.train.runner.model.fused_kernels import kernel_errors, kernels_of
from strata.train.runner.model.tiny import Family, TinyModel, make
from strata.train.runner.sampling.inference_model import InferenceModel, verify_decode_matches_training
from strata.train.runner.settings import RunnerSettings
from tests.shell.train_runner.liger_double import liger_modules
from tests.shell.train_runner.replicated import compute
from tests.shell.train_runner.single_rank import one_rank
from tests.support.torchrun import run_on_ranks

LAYERS = 2
CLOSE = 1e-5


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankGroup]:
    with one_rank(tmp_path_factory.mktemp("group")) as group:
        yield group


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    families: tuple[Family, ...] = ("llama", "qwen3", "qwen3_moe")
    for family in families:
        make(folder / family, TinyModel(family=family, layers=LAYERS))
    return folder


Install = Callable[[str], Counter[str]]


@pytest.fixture
def liger(monkeypatch: pytest.MonkeyPatch) -> Install:
    def install(wrong: str = "") -> Counter[str]:
        calls: Counter[str] = Counter()
        for name, module in liger_modules(calls, wrong).items():
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        return calls

    return install


def base_of(ranks: RankGroup, model: Path, folder: Path, **options: Any) -> BaseModel:
    return BaseModel(
        RunnerSettings(model=str(model), sleep_folder=folder, **{"replicated_bytes": 1 << 30, **options}), ranks
    )


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_adapters_of_fused_layers_have_the_gradients_of_plain_ones(
    family: str, checkpointing: bool, ranks: RankGroup, models: Path, tmp_path: Path, liger: Install
) -> None:
    calls = liger("")
    options: dict[str, Any] = {"activation_checkpointing": checkpointing}
    plain = compute(base_of(ranks, models / family, tmp_path, **options), ranks)
    assert not calls
    base = base_of(ranks, models / family, tmp_path, **options, fused_layers="liger")
    calls.clear()
    fused = compute(base, ranks)
    norms = {"llama": 2, "qwen3": 4, "qwen3_moe": 4}[family]
    repeated = 2 if checkpointing else 1
    # Experts keep their own products; the last norm is in no layer.
    expected = {"norm": repeated * norms * LAYERS + 1, "rope": repeated * LAYERS, "mlp": repeated * LAYERS}
    if family == "qwen3_moe":
        del expected["mlp"]
    assert calls == expected
    assert float((fused - plain).norm() / plain.norm()) < CLOSE
    assert float(plain.abs().max()) > 0


def test_the_sampler_computes_with_the_same_kernels(
    ranks: RankGroup, models: Path, tmp_path: Path, liger: Install
) -> None:
    calls = liger("")
    base = base_of(ranks, models / "qwen3", tmp_path, fused_layers="liger")
    calls.clear()
    model = InferenceModel(base, ranks)
    with torch.no_grad():
        assert verify_decode_matches_training(model, base, ranks.device) == ""
    passes = calls["rope"] // LAYERS
    assert passes > 2
    assert calls == {"rope": passes * LAYERS, "mlp": passes * LAYERS, "norm": passes * (4 * LAYERS + 1)}


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("values", r"its log probabilities are not those of the plain path \(off by .* nats\)"),
        ("gradients", r"its gradients are not those of the plain path \(off by .* of their norm\)"),
        ("nothing works", r"it fails with RuntimeError: 0 active drivers \(\[\]\). There should only be one."),
    ],
)
def test_layers_that_disagree_are_refused(
    wrong: str, why: str, ranks: RankGroup, models: Path, tmp_path: Path, liger: Install
) -> None:
    liger(wrong)
    message = rf"^model.fused_layers cannot be liger here: {why}; leave model.fused_layers out$"
    with pytest.raises(StrataError, match=message) as refused:
        base_of(ranks, models / "llama", tmp_path, fused_layers="liger")
    assert refused.value.code is Code.UNSUPPORTED


def test_no_gradient_is_left_of_the_check(ranks: RankGroup, models: Path, tmp_path: Path, liger: Install) -> None:
    liger("")
    base = base_of(ranks, models / "llama", tmp_path, fused_layers="liger", training="full")
    assert all(parameter.grad is None for parameter in base.lm.parameters())


def test_slices_of_two_ranks_have_fused_layers_too(tmp_path: Path) -> None:
    run_on_ranks("tests.shell.train_runner.fused_ranks", 2, str(tmp_path), within_s=200)
    for rank in range(2):
        apart = msgspec.json.decode((tmp_path / f"apart-{rank}").read_bytes(), type=dict[str, float])
        assert apart.keys() == {"shard", "tensor", "context"}
        assert max(apart.values()) < CLOSE


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (("liger", "", "bfloat16", True), "model.fused_layers is liger, which needs liger_kernel, and that is not"),
        (("liger", "", "bfloat16", False), "model.fused_layers is liger, which needs CUDA devices"),
        (("", "FA3", "bfloat16", True), "model.attention is FA3, which needs flash_attn_interface, and that is not"),
        (("", "FA4", "bfloat16", True), "model.attention is FA4, which needs flash_attn, and that is not installed"),
        (("", "FA4", "float32", True), "model.attention is FA4, which needs CUDA devices and bfloat16"),
        (("", "FA3", "bfloat16", False), "model.attention is FA3, which needs CUDA devices and bfloat16"),
    ],
)
def test_what_a_machine_cannot_run_is_refused_before_the_model_is_read(
    asked: tuple[FusedLayers, AttentionKernel, str, bool], why: str, ranks: RankGroup, tmp_path: Path
) -> None:
    layers, attention, dtype, on_cuda = asked
    with pytest.raises(StrataError, match=f"^{why}") as refused:
        check_fused_kernels(layers, attention, dtype, on_cuda=on_cuda)
    assert refused.value.code is Code.UNSUPPORTED
    assert refused.value.hint
    if not on_cuda:
        settings = RunnerSettings(
            model=str(tmp_path / "none"), sleep_folder=tmp_path, fused_layers=layers, attention=attention
        )
        with pytest.raises(StrataError, match="which needs CUDA devices"):
            BaseModel(settings, ranks)


@pytest.fixture
def registry() -> Iterator[None]:
    """Torch's own, which is of the process."""
    kept = dict(_FLASH_ATTENTION_IMPLS)
    yield
    _FLASH_ATTENTION_IMPLS.clear()
    _FLASH_ATTENTION_IMPLS.update(kept)


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("kernel", ["FA3", "FA4"])
def test_attention_is_activated_in_torch_by_its_name(kernel: AttentionKernel, tmp_path: Path) -> None:
    activated: list[str] = []
    register_flash_attention_impl(kernel, register_fn=lambda: activated.append(kernel))
    settings = RunnerSettings(model="", sleep_folder=tmp_path, attention=kernel)
    lm: Any = None
    (used,) = kernels_of(settings, lm)
    assert activated == []
    used.use()
    assert activated == [kernel]


@pytest.mark.parametrize(("kernel", "module"), [("FA3", "flash_attn_interface"), ("FA4", "flash_attn")])
def test_a_package_that_torch_cannot_import_is_a_refusal(kernel: AttentionKernel, module: str, tmp_path: Path) -> None:
    lm: Any = None
    (used,) = kernels_of(RunnerSettings(model="", sleep_folder=tmp_path, attention=kernel), lm)
    why = f"model.attention cannot be {kernel} here: it fails with ModuleNotFoundError: No module named '{module}'"
    with pytest.raises(StrataError, match=why), kernel_errors(used):
        used.use()
