"""Recipes of the `tinker` cookbook, as they are published, against a whole server: two ranks of a tiny real model.

They run as programs of a venv of their own. All they are told is the address, the folder of the model, the file of the
data and how long to train: numbers on the command line, as its README has them. The tiny model's tokenizer has
the special tokens of Qwen's chat format, so one of the cookbook's own renderers fits.
"""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import pytest

from strata.base.settings import process_environment
from strata.train.runner.model.tiny import TinyModel, make
from tests.shell.train_api.processes import Processes, serving

pytestmark = [pytest.mark.timeout(1800)]
COOKBOOK: Final = os.environ.get("STRATA_TEST_TINKER_COOKBOOK", "0.6.1")  # noqa: TID251
TINKER: Final = os.environ.get("STRATA_TEST_TINKER", version("tinker"))  # noqa: TID251
"""`make newest` names the newest of both."""
OVERRIDE: Final = "tml-renderers>=0.2.1"
"""0.6.1 asks for 0.4.1, which the index has not. Recipes for text alone do not import it."""
TORCH: Final = "2.13.0"
"""Newer ones, which the cookbook would take, are gigabytes."""
RENDERER: Final = "qwen3_instruct"
SUMS: Final = 320
BATCH: Final = 32
UNTRAINED: Final = 5.0
TRAINED: Final = 3.0
"""Nats per token of the answers: the digits of a sum are nearly as likely as each other, the rest is known."""
RL_STEPS: Final = 8
ON_POLICY: Final = 1e-4
"""Nats by which trainer and sampler may differ over the same weights."""


@pytest.fixture(scope="module")
def python() -> Path:
    """An interpreter with the cookbook, kept in the cache of the user."""
    folder = Path("~/.cache/strata-tests").expanduser() / f"cookbook-{COOKBOOK}-tinker-{TINKER}"
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True, timeout=600)
        # The build of torch is the index's choice, by pip; the rest by uv, which can override a requirement.
        torch = [str(python), "-m", "pip", "install", "--quiet", f"torch=={TORCH}"]
        subprocess.run(torch, check=True, timeout=1500)
        (folder / "overrides.txt").write_text(OVERRIDE, encoding="utf-8")
        uv = Path(sys.executable).with_name("uv")
        install = [str(uv), "pip", "install", "--quiet", "--python", str(python)]
        install += ["--overrides", str(folder / "overrides.txt")]
        wanted = [f"torch=={TORCH}", f"tinker-cookbook[math-rl]=={COOKBOOK}", f"tinker=={TINKER}"]
        done = subprocess.run([*install, *wanted], check=False, timeout=1500, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-300:]
        (folder / "complete").touch()
    return python


class Cookbook:
    """The recipes, each with what every one of them is told."""

    def __init__(self, python: Path, server: Processes, model: Path, folder: Path) -> None:
        self._python = python
        self._server = server
        self._model = model
        self.folder = folder

    def run(self, recipe: str, name: str, **options: object) -> list[dict[str, Any]]:
        """What it measured, step by step."""
        done = self.attempt(recipe, name, **options)
        assert done.returncode == 0, done.stderr[-3000:]
        # The last line of a recipe of reinforcement learning may be of costs alone.
        measured = lines(self.folder / name / "metrics.jsonl")
        return [each for each in measured if each.keys() & {"train_mean_nll", "env/all/reward/total"}]

    def attempt(self, recipe: str, name: str, **options: object) -> subprocess.CompletedProcess[str]:
        told = {
            "model_name": self._model,
            "log_path": self.folder / name,
            "eval_every": 0,
            "behavior_if_log_dir_exists": "resume",
            **options,
        }
        command = [str(self._python), "-m", f"tinker_cookbook.recipes.{recipe}"]
        return subprocess.run(
            [*command, *(f"{key}={value}" for key, value in told.items())],
            env={
                **process_environment(),
                "TINKER_BASE_URL": self._server.url,
                "TINKER_API_KEY": self._server.key,
                "TINKER_TELEMETRY": "0",
                "HF_HUB_OFFLINE": "1",
                "HF_DATASETS_CACHE": str(self.folder / "datasets"),
            },
            cwd=self.folder,
            timeout=300,
            check=False,
            capture_output=True,
            text=True,
        )


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def ended(log: Path) -> bool:
    return bool(lines(log / "checkpoints.jsonl")[-1]["name"] == "final")


@pytest.fixture(scope="module")
def cookbook(tmp_path_factory: pytest.TempPathFactory, python: Path) -> Iterator[Cookbook]:
    folder = tmp_path_factory.mktemp("c")
    make(folder / "model", TinyModel())
    chance = random.Random(1)
    with (folder / "sums.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(SUMS):
            x, y = chance.randrange(101), chance.randrange(101)
            # As the cookbook's environment asks, with its example before the question.
            turns = [("What is 4 + 5?", "9"), (f"What is {x} + {y}?", str(x + y))]
            messages = [
                {"role": role, "content": text}
                for turn in turns
                for role, text in zip(("user", "assistant"), turn, strict=True)
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
    with serving(folder / "s", folder / "model", ranks=2) as server:
        yield Cookbook(python, server, folder / "model", folder)


@pytest.fixture(scope="module")
def supervised(cookbook: Cookbook) -> list[dict[str, Any]]:
    """An epoch, and then another one by a new process, which goes on from what the first one saved."""
    options = {
        "dataset": cookbook.folder / "sums.jsonl",
        "renderer_name": RENDERER,
        "lora_rank": 8,
        "train_on_what": "last_assistant_message",
        "learning_rate": 5e-3,
        "batch_size": BATCH,
        "save_every": 4,
    }
    cookbook.run("chat_sl.train", "sl", **options, num_epochs=1)
    return cookbook.run("chat_sl.train", "sl", **options, num_epochs=2)


def test_the_supervised_recipe_learns(supervised: list[dict[str, Any]], cookbook: Cookbook) -> None:
    print([round(each["train_mean_nll"], 2) for each in supervised])
    assert [each["step"] for each in supervised] == list(range(2 * SUMS // BATCH))
    assert supervised[0]["train_mean_nll"] > UNTRAINED
    assert supervised[-1]["train_mean_nll"] < TRAINED
    assert ended(cookbook.folder / "sl")


def reinforced(cookbook: Cookbook, name: str, **options: object) -> list[dict[str, Any]]:
    """The renderer is not told: the recipe reads it from what the supervised one saved with its checkpoint."""
    begun = lines(cookbook.folder / "sl" / "checkpoints.jsonl")[0]["state_path"]
    measured = cookbook.run(
        "math_rl.train",
        name,
        load_checkpoint_path=begun,
        lora_rank=8,
        learning_rate=1e-3,
        groups_per_batch=16,
        group_size=8,
        save_every=4,
        max_steps=RL_STEPS,
        **options,
    )
    print([round(each["env/all/reward/total"], 4) for each in measured])
    assert ended(cookbook.folder / name)
    for each in measured:
        assert all(math.isfinite(value) for value in each.values() if isinstance(value, float)), each
    return measured


@pytest.mark.usefixtures("supervised")
@pytest.mark.parametrize(
    "options",
    [{"loss_fn": "importance_sampling", "compute_post_kl": True}, {"loss_fn": "ppo", "num_substeps": 2}],
    ids=["importance_sampling", "ppo"],
)
def test_the_reward_of_the_reinforcement_learning_recipe_rises(cookbook: Cookbook, options: dict[str, object]) -> None:
    """Of sums up to 200 a model this small guesses none; what it can learn in so few steps is to end its answers."""
    measured = reinforced(cookbook, "-".join(["rl", *options]), **options)
    assert len(measured) == RL_STEPS
    rewards = [each["env/all/reward/total"] for each in measured]
    assert rewards[0] < -0.01
    assert min(rewards[-2:]) > rewards[0] / 2
    if "num_substeps" not in options:
        # What was sampled is trained on by the same weights: the two agree on every token.
        assert max(abs(each["optim/kl_sample_train_v1"]) for each in measured) < ON_POLICY


@pytest.mark.usefixtures("supervised")
def test_the_recipe_that_samples_while_it_trains_runs_to_its_end(cookbook: Cookbook) -> None:
    """It begins by saving a checkpoint under the name of the server's own first one.

    What was sampled too long ago is thrown away, so there may be fewer steps than batches.
    """
    measured = reinforced(cookbook, "rl-off-policy", loss_fn="importance_sampling", max_steps_off_policy=2)
    assert 1 < len(measured) <= RL_STEPS
    assert lines(cookbook.folder / "rl-off-policy" / "checkpoints.jsonl")[0]["name"] == "000000"


def test_the_recipe_of_prompt_distillation_learns(cookbook: Cookbook) -> None:
    measured = cookbook.run(
        "prompt_distillation.train",
        "distilled",
        file_path=cookbook.folder / "sums.jsonl",
        renderer_name=RENDERER,
        lora_rank=8,
        learning_rate=5e-3,
        batch_size=BATCH,
        num_epochs=1,
    )
    assert measured[-1]["train_mean_nll"] < measured[0]["train_mean_nll"] - 1.0
    assert ended(cookbook.folder / "distilled")


@pytest.mark.parametrize("recipe", ["multiplayer_rl.guess_number.train", "preference.shorter.train"])
def test_a_recipe_of_reinforcement_learning_runs_with_the_loss_that_it_has(cookbook: Cookbook, recipe: str) -> None:
    measured = cookbook.run(
        recipe, recipe, renderer_name=RENDERER, group_size=4, batch_size=4, max_tokens=8, max_steps=2
    )
    assert len(measured) == 2
    assert ended(cookbook.folder / recipe)


def test_a_recipe_with_a_loss_that_is_not_published_ends_with_the_option_to_set(cookbook: Cookbook) -> None:
    stopped = cookbook.attempt(
        "math_rl.train", "rl-default", renderer_name=RENDERER, groups_per_batch=2, group_size=2, max_steps=1
    )
    assert stopped.returncode != 0
    assert "loss_fn=importance_sampling" in stopped.stderr
