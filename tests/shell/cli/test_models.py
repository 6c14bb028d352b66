"""`strata models` with the Hub's own client library, against a double of its HTTP API."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from strata.base.settings import process_environment
from strata.train.families import known_families
from strata.train.runner.model.tiny import TinyModel, make
from tests.shell.train_runner.family_table import DATA, DOCUMENT, as_data, rows
from tests.support.hugging_face import TOKEN, HuggingFaceDouble, Repository

STRATA = Path(sys.executable).parent / "strata"
CODE = b"raise SystemExit('code of a model was run')"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make(folder, TinyModel(family="qwen3"))
    return folder


@pytest.fixture
def hub(model: Path) -> Iterator[HuggingFaceDouble]:
    """It has one model, with code and a second format of the weights beside it."""
    with HuggingFaceDouble() as double:
        files = {file.name: file.read_bytes() for file in model.iterdir()}
        double.repositories["lab/tiny"] = Repository(files={**files, "modeling.py": CODE, "pytorch_model.bin": CODE})
        yield double


class Cli:
    def __init__(self, hub: HuggingFaceDouble, home: Path) -> None:
        self._environment = {
            **process_environment(),
            "HF_ENDPOINT": hub.url,
            "HF_TOKEN": TOKEN,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        }
        self.home = home

    def run(self, *arguments: str, status: int = 0, **more: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [str(STRATA), "models", *arguments],
            env={**self._environment, **more},
            capture_output=True,
            text=True,
            check=False,
            timeout=110,
        )
        assert done.returncode == status, (done.returncode, done.stdout, done.stderr)
        return done

    def data(self, *arguments: str) -> Any:
        return json.loads(self.run(*arguments, "-o", "json").stdout)


@pytest.fixture
def cli(hub: HuggingFaceDouble, tmp_path: Path) -> Cli:
    return Cli(hub, tmp_path / "home")


def test_a_model_is_pulled_listed_and_checked_by_its_id(cli: Cli, hub: HuggingFaceDouble, model: Path) -> None:
    assert cli.data("list") == []
    folder = Path(cli.run("pull", "lab/tiny").stdout.strip())
    assert {file.name for file in folder.iterdir()} == {file.name for file in model.iterdir()}
    assert not {"modeling.py", "pytorch_model.bin"} & set(hub.fetched), "no code, and no pickle"
    (listed,) = cli.data("list", str(model))[:1]
    assert (listed["model"], listed["family"], listed["supported"]) == ("lab/tiny", "qwen3", "yes")
    report = cli.data("check", "lab/tiny", "--ranks", "2")
    with safe_open(model / "model.safetensors", "np") as opened:
        expected = sum(math.prod(opened.get_slice(name).get_shape()) for name in opened.keys())  # noqa: SIM118
    assert report["parameters"] == expected
    assert (report["family"], report["support"], report["ranks"]) == ("qwen3", "yes", 2)
    full = {(need["training"], need["dtype"]): need["start_bytes"] for need in report["memory"]}
    # Each rank holds a small frozen base in full.
    assert full["lora", "float32"] - full["lora", "bfloat16"] == pytest.approx((4 - 2) * expected, abs=1)
    # AdamW in float32: weight, gradient and two moments of each parameter, on two ranks; gradients that are whole until
    # the end of a pass, and what a pass gathers.
    trained = full["full", "float32"] - (full["lora", "float32"] - 4 * expected)
    assert (16 / 2) * expected < trained < (16 / 2 + 8) * expected


def test_a_folder_is_checked_in_words_and_a_refused_family_by_the_exit_status(
    cli: Cli, tmp_path: Path, model: Path
) -> None:
    said = cli.run("check", str(model))
    assert "qwen3: supported" in said.stderr
    assert "model.fused_layers: experimental\nmodel.attention: experimental\n" in said.stderr
    assert "lora" in said.stdout
    refused = tmp_path / "refused"
    refused.mkdir()
    (refused / "config.json").write_text('{"model_type": "bart"}')
    (refused / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes())
    assert "bart cannot be trained here" in cli.run("check", str(refused), status=2).stderr
    assert "strata models pull lab/other" in cli.run("check", "lab/other", status=102).stderr
    other = shutil.copytree(model, tmp_path / "other")
    (other / "chat_template.jinja").write_text("{{ ('a' * 1500000000) | length }}")
    assert "its chat template cannot be served: it takes more than" in cli.run("check", str(other), status=2).stderr
    (other / "chat_template.jinja").write_text("{{ raise_exception('who are you?') }}")
    assert "rejects a chat of one message: who are you?" in cli.run("check", str(other)).stderr


def test_what_is_trained_of_a_model_that_also_takes_images_is_said_in_words(cli: Cli, tmp_path: Path) -> None:
    weight = np.zeros((8, 8), dtype=np.float32)
    parts = ("vision_tower.encoder.layers.0.self_attn.q_proj", "language_model.layers.0.self_attn.q_proj")
    save_file({f"model.{name}.weight": weight for name in parts}, tmp_path / "model.safetensors")

    def checked(family: str, status: int = 0) -> str:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
        return str(cli.run("check", str(tmp_path), status=status).stderr)

    said = checked("gemma3")
    assert "gemma3: supported" in said
    assert "it is trained on text alone, and its vision_tower never: gemma3 takes no images here" in said
    assert "no test has trained it" in checked("blt", status=2)
    assert "qwen2_5_vl: supported" in checked("qwen2_5_vl")
    assert "qwen3_5: experimental" in checked("qwen3_5")
    assert "one document per row, not packed and so slower" in checked("qwen3_5")
    assert "parallel.context: refused: layers of this family follow a document" in checked("qwen3_5")
    assert "blip-2 is no causal language model of transformers" in checked("blip-2", status=2)


def test_an_adapter_and_a_model_are_pushed_and_can_be_fetched_by_the_hubs_client(
    cli: Cli, hub: HuggingFaceDouble, tmp_path: Path, model: Path
) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "lab/tiny"}')
    (adapter / "adapter_model.safetensors").write_bytes((model / "model.safetensors").read_bytes())
    (adapter / "optimizer.safetensors").write_bytes(b"moments")
    url = cli.run("push", str(adapter), "me/adapter", "-m", "the first").stdout.strip()
    pushed = hub.repositories["me/adapter"]
    assert (pushed.private, pushed.messages) == (True, ["the first"])
    assert set(pushed.files) == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    assert b"base_model: lab/tiny" in pushed.files["README.md"]
    assert url == f"{hub.url}/me/adapter/commit/{pushed.commit}"
    cli.run("push", str(model), "me/model", "--public")
    assert not hub.repositories["me/model"].private
    copy = tmp_path / "copy"
    cli.run("pull", "me/model", "--to", str(copy))
    for file in model.iterdir():
        assert (copy / file.name).read_bytes() == file.read_bytes()


def test_what_the_hub_refuses_is_an_error_with_the_reason(cli: Cli, tmp_path: Path) -> None:
    assert "there is no model lab/none" in cli.run("pull", "lab/none", status=102).stderr
    assert "is not the id of a model" in cli.run("pull", "not an id", status=2).stderr
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "neither a LoRA adapter nor a model" in cli.run("push", str(empty), "me/empty", status=2).stderr
    cli.run("pull", "lab/tiny", status=3, HF_ENDPOINT="http://127.0.0.1:9")
    assert "hf auth login" in cli.run("pull", "lab/tiny", status=4, HF_TOKEN="hf_wrong").stderr


@pytest.mark.parametrize(("name", "to"), [("../../evil.json", True), ("a/../../../evil.json", False)])
def test_a_model_whose_files_lie_elsewhere_is_refused_in_words(
    cli: Cli, hub: HuggingFaceDouble, tmp_path: Path, name: str, *, to: bool
) -> None:
    hub.repositories["lab/evil"] = Repository(files={"config.json": b"{}", name: b"{}"})
    target = ("--to", str(tmp_path / "deep" / "er" / "model")) if to else ()
    stderr = cli.run("pull", "lab/evil", *target, status=2).stderr
    assert "lab/evil" in stderr
    assert "internal error" not in stderr
    assert not list(tmp_path.rglob("evil.json"))


def test_the_families_of_the_package_are_those_of_the_document() -> None:
    assert as_data(rows(DOCUMENT.read_text(encoding="utf-8")).values()) == DATA.read_bytes()
    assert known_families()["llama"].support == "yes"
    assert known_families()["bamba"].support == "experimental"
    assert known_families()["bart"].support == "no"
