"""The numerical checks on one rank and on two, each group started once by the engine's own launcher.

`make gpu` runs them on eight CUDA devices too; then the group of two is one of eight.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from strata.base.errors import StrataError
from strata.train.runner.model.compiled import prepare_compiling
from strata.train.runner.passes.optimizer import sum_squares
from tests.support.ranks import group_size
from tests.support.torchrun import run_on_ranks

LONGEST_S: Final = 240

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(LONGEST_S + 20),
    pytest.mark.proves("Never: fractional weights are refused"),
    pytest.mark.proves("Never: NaN is told as 0.0"),
    pytest.mark.proves("Never: the weight decay of a step is accepted and lost"),
    pytest.mark.proves("Never: gradients are zeroed between chunks"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kit")


def run_kit(folder: Path, name: str, ranks: int, *options: str, within_s: int = LONGEST_S) -> dict[str, Any]:
    out = folder / f"{name}.json"
    run_on_ranks("tests.shell.train_runner.numerics", ranks, str(out), *options, within_s=within_s)
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


@pytest.fixture(scope="module")
def one_rank(folder: Path) -> dict[str, Any]:
    return run_kit(folder, "one", 1)


@pytest.fixture(scope="module")
def two_ranks(folder: Path, one_rank: dict[str, Any]) -> dict[str, Any]:
    """After the other: they share the models, and the machine."""
    del one_rank
    return run_kit(folder, "two", group_size())


def failures(found: dict[str, Any]) -> str:
    return "\n".join(f"{name}\n{trouble}" for name, trouble in found["checks"].items() if trouble)


def test_every_check_holds_on_one_rank(one_rank: dict[str, Any]) -> None:
    assert failures(one_rank) == ""


def test_every_check_holds_on_two_ranks(two_ranks: dict[str, Any]) -> None:
    assert failures(two_ranks) == ""


def test_one_rank_and_two_make_the_same_numbers(one_rank: dict[str, Any], two_ranks: dict[str, Any]) -> None:
    assert one_rank["checks"].keys() == two_ranks["checks"].keys()
    assert one_rank["numbers"].keys() == two_ranks["numbers"].keys()
    for name, number in one_rank["numbers"].items():
        if name != "bits":
            close = 1e-2 if name.startswith("half.") else 1e-4
            assert two_ranks["numbers"][name] == pytest.approx(number, rel=close), name


def test_logits_in_pieces_and_layers_computed_twice_make_the_same_numbers(one_rank: dict[str, Any]) -> None:
    plain = {name: number for name, number in one_rank["numbers"].items() if name.startswith("sum.")}
    assert len(plain) > 20
    for name, number in plain.items():
        assert one_rank["numbers"][name.replace("sum.", "thrifty.")] == pytest.approx(number, rel=1e-4), name


def test_half_precision_is_close_to_full_precision(one_rank: dict[str, Any]) -> None:
    assert one_rank["numbers"]["half.loss"] == pytest.approx(one_rank["numbers"]["sum.loss"], rel=1e-2)


def test_two_starts_make_the_same_bits(folder: Path, two_ranks: dict[str, Any]) -> None:
    again = run_kit(folder, "again", group_size(), "--once-more")
    assert failures(again) == ""
    assert again["numbers"]["bits"] == two_ranks["numbers"]["bits"]


@pytest.mark.timeout(1220)
def test_compiled_layers_compute_what_peft_and_hugging_face_compute(folder: Path) -> None:
    compiled = run_kit(folder, "compiled", group_size(), "--compiled", within_s=1200)
    assert failures(compiled) == ""
    assert len(compiled["checks"]) == 8


def test_layers_are_not_compiled_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", ("no-such-compiler",))
    with pytest.raises(StrataError, match=r"model\.compile needs a C\+\+ compiler"):
        prepare_compiling(tmp_path / "compiled")
    assert not (tmp_path / "compiled").exists()


@pytest.mark.parametrize("shape", [(0,), (5,), (4096,), (3, 5000), (40, 512, 256)])
def test_squares_are_summed_as_precisely_as_in_float64(shape: tuple[int, ...]) -> None:
    numbers = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(sum_squares([numbers]), numbers.double().square().sum(), rtol=1e-6, atol=0.0)
    others = [numbers / 3, torch.full((7,), 1e-3), numbers[:0]]
    exact = sum(tensor.double().square().sum() for tensor in (numbers, *others))
    torch.testing.assert_close(sum_squares([numbers, *others]), exact, rtol=1e-6, atol=0.0)
