"""The recipes of examples/recipes beside supervised fine-tuning, on one server: each learns what it is for."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from soak.train.server import make_model
from strata.base.settings import process_environment
from tests.e2e.served import served

pytestmark = pytest.mark.timeout(600)
RECIPES: Final = Path(__file__).parents[2] / "examples" / "recipes"
STRATA: Final = str(Path(sys.executable).with_name("strata"))
INDIFFERENT: Final = 0.6931


def environment() -> dict[str, str]:
    return {**process_environment(), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a server that runs."""
    folder = tmp_path_factory.mktemp("kinds")
    make_model(folder / "model")
    text = '[server]\ndata = "data"\nport = 0\n[model]\npath = "model"\n[limits]\npack_tenants = false\n'
    (folder / "server.toml").write_text(text, encoding="utf-8")
    with served([STRATA, "serve", "server.toml"], folder, environment()):
        yield folder


def strata(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [STRATA, *arguments], cwd=place, env=environment(), capture_output=True, text=True, timeout=400, check=False
    )


def train(place: Path, recipe: Path, run: str) -> list[dict[str, Any]]:
    done = strata(place, "train", str(recipe), "--folder", run, "--server", "server.toml")
    assert done.returncode == 0, done.stderr
    assert (place / run / "adapter" / "adapter_model.safetensors").is_file()
    lines = (place / run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["values"] for line in lines]


def test_a_preference_is_learned_and_holds_for_pairs_that_were_not_shown(place: Path) -> None:
    values = train(place, RECIPES / "dpo.toml", "dpo")
    assert round(values[1]["loss"], 4) == INDIFFERENT, "the model is its own reference at first"
    assert values[-1]["loss"] < 0.2
    assert values[-1]["eval_loss"] < 0.2
    assert values[-1]["eval_accuracy"] == 1.0


def test_digits_near_the_sum_are_learned_from_rewards_alone(place: Path) -> None:
    values = train(place, RECIPES / "grpo.toml", "grpo")
    assert values[1]["reward"] < 0.05
    assert values[-1]["reward"] > 0.35


@pytest.mark.parametrize("mode", ["on_policy", "off_policy"])
def test_a_student_comes_near_its_teacher(place: Path, mode: str) -> None:
    """The teacher is the adapter of the preference, over the same base."""
    train(place, RECIPES / "dpo.toml", "dpo")
    text = (RECIPES / "distill.toml").read_text(encoding="utf-8")
    text = text.replace('tiny = "llama"\ntiny_seed = 7', f'adapter = "{place / "dpo" / "adapter"}"')
    text = text.replace('mode = "on_policy"', f'mode = "{mode}"').replace("data/", f"{RECIPES}/data/")
    (place / f"{mode}.toml").write_text(text, encoding="utf-8")
    values = train(place, place / f"{mode}.toml", mode)
    if mode == "on_policy":
        assert values[-1]["kl"] < 0.5 * values[1]["kl"]
        assert values[-1]["eval_kl"] < 0.5 * values[0]["eval_kl"]
    else:
        # The teacher is almost as random as its base: its answers cannot be predicted better than that.
        assert values[-1]["eval_loss"] < values[0]["eval_loss"] - 0.1


def test_a_teacher_on_a_server_of_its_own_must_have_the_same_tokens(place: Path) -> None:
    text = (RECIPES / "distill.toml").read_text(encoding="utf-8").replace("data/", f"{RECIPES}/data/")
    text = text.replace("steps = 30", "steps = 1")
    (place / "taught.toml").write_text(text, encoding="utf-8")
    assert train(place, place / "taught.toml", "taught")[0]["eval_kl"] > 0
    assert strata(place, "models", "tiny", "other", "--vocab", "300").returncode == 0
    other = text.replace('tiny = "llama"\ntiny_seed = 7', 'path = "other"')
    (place / "other.toml").write_text(other, encoding="utf-8")
    refused = strata(place, "train", "other.toml", "--folder", "refused", "--server", "server.toml")
    assert refused.returncode != 0
    assert "the teacher has another tokenizer: it has 3" in refused.stderr
