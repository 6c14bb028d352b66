"""lm-eval as it is published, with a task and data of our own, against a whole server: one rank of a tiny real model.

It runs as a program of a venv of its own. The oracle of its scores is the `tinker` SDK's sampling client.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import tinker
from tinker import types
from transformers import AutoTokenizer

from strata.base.settings import process_environment
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


def scored(server: Processes, model: Path, folder: Path, task: str) -> list[dict[str, Any]]:
    """What lm-eval logs of each of its samples."""
    data = folder / "data.jsonl"
    rows = [{"question": each, "choices": list(CHOICES), "answer": 1} for each in QUESTIONS]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "task.yaml").write_text(task.format(data=data))
    packages = (f"lm-eval[api]=={LM_EVAL}", f"transformers=={TRANSFORMERS}")
    programs = cached_venv(f"lm-eval-{LM_EVAL}-transformers-{TRANSFORMERS}", packages)
    name = task.split()[1]
    arguments = f"model=tiny,base_url={server.url}/v1/completions,tokenizer={model},num_concurrent=2,max_length=512"
    command = [
        str(programs / "lm_eval"),
        *("--model", "local-completions", "--model_args", arguments),
        *("--tasks", name, "--include_path", str(folder), "--output_path", str(folder / "out"), "--log_samples"),
    ]
    environment = {
        **process_environment(),
        "OPENAI_API_KEY": server.key,
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(folder / "datasets"),
        "TOKENIZERS_PARALLELISM": "false",
    }
    done = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, check=False, timeout=900
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (log,) = (folder / "out").rglob(f"samples_{name}_*.jsonl")
    return [json.loads(line) for line in log.read_text().splitlines()]


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
