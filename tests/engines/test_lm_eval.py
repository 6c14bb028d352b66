"""lm-eval as it is published, with a task and data of our own, against a whole server: one rank of a tiny real model.

It runs as a program of a venv of its own. The oracle of its scores is the `tinker` SDK's sampling client.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import tinker
from tinker import types
from transformers import AutoTokenizer

from strata.base.secret import Secret
from strata.base.settings import process_environment
from strata.fleet.client.hub_client import HubClient
from strata.sdk.checkpoints import list_checkpoints
from strata.train.runner.model.tiny import TinyModel, make
from tests.engines.processes import TRANSFORMERS
from tests.shell.train_api.processes import Processes, serving
from tests.support.venvs import cached_venv

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(1800)]
LM_EVAL: Final = os.environ.get("STRATA_TEST_LM_EVAL", "0.4.13")  # noqa: TID251
"""`make newest ARGS=engines` names the newest."""
CHOICES: Final = (" is gone.", " can be read again.")
QUESTIONS: Final = ("What was written down", "What was only said", "What is", "A small thing that works")
NATS: Final = 1e-4
CHOICE_TASK: Final = """
task: own_choices
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: question
doc_to_choice: choices
doc_to_target: answer
target_delimiter: ""
metric_list:
  - metric: acc
"""
TEXT_TASK: Final = """
task: own_texts
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: generate_until
doc_to_text: question
doc_to_target: answer
generation_kwargs:
  max_gen_toks: 8
  until: []
  temperature: 0
metric_list:
  - metric: exact_match
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    make(folder, TinyModel(seed=3))
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Processes]:
    with serving(tmp_path_factory.mktemp("s"), model, ranks=1) as found:
        yield found


def lm_eval_programs() -> Path:
    packages = (f"lm-eval[api]=={LM_EVAL}", f"transformers=={TRANSFORMERS}")
    return cached_venv(f"lm-eval-{LM_EVAL}-transformers-{TRANSFORMERS}", packages)


def write_task(folder: Path, task: str) -> str:
    """The name of a task whose data is in this folder."""
    data = folder / "data.jsonl"
    rows = [{"question": each, "choices": list(CHOICES), "answer": 1} for each in QUESTIONS]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    name = task.split()[1]
    (folder / f"{name}.yaml").write_text(task.format(data=data))
    return name


def scored(server: Processes, model: Path, folder: Path, task: str, weights: str = "tiny") -> list[dict[str, Any]]:
    """What lm-eval logs of each of its samples."""
    name = write_task(folder, task)
    arguments = (
        f"model={weights},base_url={server.url}/v1/completions,tokenizer={model},num_concurrent=2,max_length=512"
    )
    command = [
        str(lm_eval_programs() / "lm_eval"),
        *("--model", "local-completions", "--model_args", arguments),
        *("--tasks", name, "--include_path", str(folder), "--output_path", str(folder / "out"), "--log_samples"),
    ]
    environment = {**process_environment(), **offline(folder), "OPENAI_API_KEY": server.key}
    done = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, check=False, timeout=900
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (log,) = (folder / "out").rglob(f"samples_{name}_*.jsonl")
    return [json.loads(line) for line in log.read_text().splitlines()]


def offline(folder: Path) -> dict[str, str]:
    cache = str(folder / "datasets")
    return {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": cache, "TOKENIZERS_PARALLELISM": "false"}


def sampler_of(server: Processes) -> tinker.SamplingClient:
    return tinker.ServiceClient(base_url=server.url, api_key=server.key).create_sampling_client(base_model="tiny")


def test_choices_are_scored_by_the_log_probabilities_of_the_tinker_client(
    server: Processes, model: Path, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(model))
    sampler = sampler_of(server)
    samples = scored(server, model, tmp_path, CHOICE_TASK)
    assert len(samples) == len(QUESTIONS)
    for sample in samples:
        question = sample["doc"]["question"]
        prompt = tokenizer.encode(question)
        for choice, (told, _) in zip(CHOICES, sample["filtered_resps"], strict=True):
            whole = tokenizer.encode(question + choice)
            assert whole[: len(prompt)] == prompt, "the question ends where a token does"
            logprobs = sampler.compute_logprobs(types.ModelInput.from_ints(whole)).result(90)
            assert abs(float(told) - sum(each or 0.0 for each in logprobs[len(prompt) :])) < NATS


def test_greedy_texts_are_those_of_the_tinker_client(server: Processes, model: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(model))
    sampler = sampler_of(server)
    params = types.SamplingParams(max_tokens=8, temperature=0.0)
    for sample in scored(server, model, tmp_path, TEXT_TASK):
        prompt = tokenizer.encode(sample["doc"]["question"])
        (one,) = sampler.sample(types.ModelInput.from_ints(prompt), 1, params).result(90).sequences
        assert sample["filtered_resps"] == [tokenizer.decode(one.tokens, skip_special_tokens=True)]


def test_a_recipe_scores_its_model_as_lm_eval_by_hand_does(server: Processes, model: Path, tmp_path: Path) -> None:
    tasks = [write_task(tmp_path, each) for each in (CHOICE_TASK, TEXT_TASK)]
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": QUESTIONS[0] + CHOICES[1]}) + "\n")
    recipe = f"""
kind = "sft"
[model]
rank = 4
[data]
path = "texts.jsonl"
[train]
steps = 6
batch_size = 1
learning_rate = 1e-2
[eval]
every = 6
tasks = {json.dumps(tasks)}
task_folder = "{tmp_path}"
task_tokens = 512
task_python = "{lm_eval_programs() / "python"}"
"""
    (tmp_path / "r.toml").write_text(recipe)
    (tmp_path / "key").write_text(server.key)
    (tmp_path / "key").chmod(0o600)
    strata = str(Path(sys.executable).with_name("strata"))
    done = subprocess.run(
        [strata, "train", "r.toml", "--folder", "run", "--server", server.url, "--key-file", "key"],
        cwd=tmp_path,
        env={**process_environment(), **offline(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    run = tmp_path / "run"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    scores = {line["step"]: {name: value for name, value in line["values"].items() if "own_" in name} for line in lines}
    assert scores[6].keys() == scores[0].keys() == {"eval_own_choices_acc", "eval_own_texts_exact_match"}
    exported = json.loads((run / "run.json").read_text())["exported"]
    for step, weights in ((0, "tiny"), (6, exported)):
        for task, metric in ((CHOICE_TASK, "acc"), (TEXT_TASK, "exact_match")):
            by_hand = tmp_path / f"{task.split()[1]}-{step}"
            by_hand.mkdir()
            samples = scored(server, model, by_hand, task, weights)
            mean = sum(float(each[metric]) for each in samples) / len(samples)
            assert scores[step][f"eval_{task.split()[1]}_{metric}"] == mean
    assert scores[6]["eval_own_choices_acc"] != scores[0]["eval_own_choices_acc"], "training changes the answers"
    left = {each.tinker_path for each in list_checkpoints(HubClient(server.url, bearer=Secret(server.key)))}
    assert not any("evaluated" in path for path in left)
