"""A run that learns from rewards: killed and continued, and the end of one that has nothing to learn from."""

from __future__ import annotations

import json
from array import array
from base64 import b64decode
from pathlib import Path
from statistics import fmean
from typing import Final

import pytest
from transformers import AutoTokenizer

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


def test_a_run_that_draws_ahead_and_is_killed_learns_once_from_what_it_had_journaled(place: Path) -> None:
    text = (place / "grpo.toml").read_text(encoding="utf-8")
    (place / "ahead.toml").write_text(text + '\n[grpo]\npipeline = "bounded"\nmax_staleness = 2\n', encoding="utf-8")
    run = place / "ahead"
    kill_after(place, run, 4, group=True, recipe="ahead.toml")
    before, journaled = metrics(run), read_journal(run)
    done = train(place, "ahead.toml", "--folder", run.name)
    assert done.returncode == 0, done.stderr
    assert "continuing after step 3 of 6" in done.stderr
    assert not (run / "rollouts.jsonl").exists()
    after = metrics(run)
    assert [line["step"] for line in after] == list(range(STEPS + 1))
    assert after[: len(before)] == before, "what had been learned is learned again with the same numbers"
    assert [line["values"]["staleness"] for line in after[1:4]] == [0, 1, 2]
    assert all(line["values"]["staleness"] <= 2 for line in after[4:])
    # By the tokenizer as transformers loads it.
    tokenizer = AutoTokenizer.from_pretrained(place / "model")
    assert [*journaled] == [*range(3, 3 + len(journaled))]
    for step, answers in journaled.items():
        rewards = [rate_digits(str(tokenizer.decode(tokens, skip_special_tokens=True))) for tokens in answers]
        assert after[step + 1]["values"]["reward"] == pytest.approx(fmean(rewards)), step


def read_journal(run: Path) -> dict[int, list[list[int]]]:
    """The answers of each step in the journal, without a last line that was not written to its end."""
    lines = (run / "rollouts.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return {
        line["step"]: [array("i", b64decode(sample[0])).tolist() for group in line["groups"] for sample in group]
        for line in found
    }


def rate_digits(text: str) -> float:
    return sum(map(str.isdigit, text)) / (1 + len(text))


def test_a_run_whose_answers_all_earn_the_same_ends_and_says_so(place: Path) -> None:
    text = (place / "grpo.toml").read_text(encoding="utf-8").replace("rewards.py:digits", "exact")
    (place / "vain.toml").write_text(text + "\n[grpo]\npatience = 2\n", encoding="utf-8")
    done = train(place, "vain.toml", "--folder", "vain")
    assert done.returncode == 0, done.stderr
    # The step after these two was sent before their metrics were read.
    assert "finished after step 3: nothing to learn from: in 2 steps all answers" in done.stdout
    assert (place / "vain" / "adapter" / "adapter_model.safetensors").is_file()
