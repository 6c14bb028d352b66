"""A run that learns from rewards: killed and continued, and the end of one that has nothing to learn from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import pytest

from soak.train.server import make_model
from tests.e2e.test_recipes import RECIPES, kill_after, metrics, train

pytestmark = pytest.mark.timeout(600)
STEPS: Final = 6
DIGITS: Final = "def digits(text, row):\n    return sum(map(str.isdigit, text)) / (1 + len(text))\n"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rewards")
    make_model(folder / "model")
    text = (RECIPES / "grpo.toml").read_text(encoding="utf-8")
    text = text.replace('tiny = "llama"', f'path = "{folder / "model"}"').replace("data/", f"{RECIPES}/data/")
    text = text.replace("steps = 40", f"steps = {STEPS}\nsave_every = 3").replace("max_tokens = 1", "max_tokens = 4")
    text = (
        text.replace("every = 10", "every = 6")
        .replace("near_sum", "digits")
        .replace("group_size = 16", "group_size = 8")
    )
    (folder / "grpo.toml").write_text(text, encoding="utf-8")
    (folder / "rewards.py").write_text(DIGITS, encoding="utf-8")
    return folder


def test_a_run_by_rewards_that_is_killed_ends_bit_equal_to_one_that_is_not(place: Path) -> None:
    done = train(place, "grpo.toml", "--folder", "undisturbed")
    assert done.returncode == 0, done.stderr
    run, undisturbed = place / "killed", place / "undisturbed"
    kill_after(place, run, 4, group=True, recipe="grpo.toml")
    kept = [json.loads(line)["step"] for line in (run / "rollouts.jsonl").read_text(encoding="utf-8").splitlines()]
    assert kept[0] == 3, "answers of steps that no state has"
    done = train(place, "grpo.toml", "--folder", run.name)
    assert done.returncode == 0, done.stderr
    assert "continuing after step 3 of 6" in done.stderr
    assert not (run / "rollouts.jsonl").exists()
    for name in ("metrics.jsonl", "adapter/adapter_model.safetensors"):
        assert (run / name).read_bytes() == (undisturbed / name).read_bytes(), name
    # Sampler and trainer differ by rounding alone, which limits no weight.
    assert [line["values"]["sampler_gap"] for line in metrics(run)[1:]] == [0.0] * STEPS
    assert [line["values"]["limited_share"] for line in metrics(run)[1:]] == [0.0] * STEPS


def test_a_run_whose_answers_all_earn_the_same_ends_and_says_so(place: Path) -> None:
    text = (place / "grpo.toml").read_text(encoding="utf-8").replace("rewards.py:digits", "exact")
    (place / "vain.toml").write_text(text + "\n[grpo]\npatience = 2\n", encoding="utf-8")
    done = train(place, "vain.toml", "--folder", "vain")
    assert done.returncode == 0, done.stderr
    # The step after these two was sent before their metrics were read.
    assert "finished after step 3: nothing to learn from: in 2 steps all answers" in done.stdout
    assert (place / "vain" / "adapter" / "adapter_model.safetensors").is_file()
