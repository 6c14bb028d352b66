"""Training through a hub: a training server that is a job, one URL, and keys that are tenants."""

from __future__ import annotations

import gc
import importlib
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import tinker
from mcp import Client, StdioServerParameters
from tinker import types

from strata.sdk.train import Datum, TrainingServer
from tests.e2e.machines import STRATA, Machine
from tests.shell.fleet_agent.waiting import eventually
from tests.support.tinker_sessions import end_session

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]
SETTINGS: Final = """
[server]
poll_s = 0.3

[model]
path = "model"
name = "tiny"
"""
OTHER: Final = SETTINGS.replace('"model"', '"other"').replace('"tiny"', '"small"')
"""Of a second server, with another base model."""
MANIFEST: Final = """
[trainers.server]
command = ["strata", "serve", "train.toml"]
directory = "."

[[jobs]]
name = "tiny-server"
kind = "server"
model = "tiny"
trainer = "server"
min_cores = 1
"""


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    # A home whose sockets have paths longer than a socket can have.
    made = Machine(tmp_path_factory.mktemp("a-rather-long-name-of-a-home-folder-of-somebody") / "home", "one")
    programs = f"{Path(sys.executable).parent}{os.pathsep}{made.environ['PATH']}"
    made.environ = {**made.environ, "PATH": programs}
    folder = made.home / "server"
    folder.mkdir()
    (folder / "train.toml").write_text(SETTINGS)
    (folder / "manifest.toml").write_text(MANIFEST)
    made.says("models", "tiny", str(folder / "model"))
    other = folder / "other"
    other.mkdir()
    (other / "train.toml").write_text(OTHER)
    (other / "manifest.toml").write_text('project = "other"\n' + MANIFEST.replace("tiny", "small"))
    made.says("models", "tiny", str(other / "other"))
    made.up()
    for manifest in (folder / "manifest.toml", other / "manifest.toml"):
        assert made.says("apply", str(manifest), "--no-describe").startswith("+1 new")
    for name in ("tiny-server", "small-server"):
        serves(made, name)
    yield made
    if made.is_up:
        made.down()
    # The SDK leaves sockets to the garbage collector, whose complaint would be taken for ours.
    with warnings.catch_warnings(action="ignore"):
        gc.collect()


def serves(machine: Machine, name: str) -> None:
    """Wait until a server serves; if it never does, what it has logged says why."""
    try:
        eventually(lambda: machine.knows("show", name)["serving"] == "serving", 240.0)
    except AssertionError as error:
        raise AssertionError(f"{error}: {machine.says('show', name)}\n{machine.says('logs', name)}") from error


def key_of(machine: Machine, name: str) -> str:
    made = machine.knows("keys", "create", name, "--role", "researcher", "--owner")
    key: str = made["secret"]
    return key


def test_the_tinker_sdk_trains_through_the_hub_with_a_key_of_the_hub(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    assert "serving" in machine.says("list")
    key = key_of(machine, "alice")
    alice = tinker.ServiceClient(base_url=machine.url, api_key=key)
    models = {each.model_name for each in alice.get_server_capabilities().supported_models}
    assert models == {"tiny", "small"}
    model = alice.create_lora_training_client(base_model="tiny", rank=4, seed=1)
    tokens = list(range(3, 40))
    inputs: Any = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
    batch = [types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)]
    losses = []
    for _ in range(8):
        done = model.forward_backward(batch, "cross_entropy")
        model.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        losses.append(done.result().metrics["loss:sum"])
    assert losses[-1] < losses[0] / 2, losses
    sampler = model.save_weights_and_get_sampling_client(name="half")
    prompt = types.ModelInput.from_ints(tokens[:10])
    sampled = sampler.sample(prompt, num_samples=2, sampling_params=types.SamplingParams(max_tokens=4)).result()
    assert [len(each.tokens) for each in sampled.sequences] == [4, 4]
    path = model.save_state("kept").result().path
    runs = alice.create_rest_client().list_training_runs().result().training_runs
    assert [run.training_run_id for run in runs] == [model.model_id]
    assert "." in model.model_id, "it names its server"

    bob = tinker.ServiceClient(base_url=machine.url, api_key=key_of(machine, "bob"))
    assert bob.create_rest_client().list_training_runs().result().training_runs == []
    with pytest.raises(tinker.NotFoundError):
        bob.create_rest_client().get_training_run(model.model_id).result()
    foreign = bob.create_lora_training_client(base_model="tiny", rank=4)
    with pytest.raises((tinker.NotFoundError, tinker.RequestFailedError)):
        foreign.load_state(path).result()
    with pytest.raises((tinker.NotFoundError, tinker.RequestFailedError)):
        bob.create_training_client_from_state(path).result()
    again = alice.create_training_client_from_state_with_optimizer(path).result()
    assert "." not in again.model_id, "it is composed, of two servers it names none"
    assert again.get_info().model_data.model_name == "tiny"
    results = [each.forward(batch, "cross_entropy").result().metrics["loss:sum"] for each in (model, again)]
    assert results[0] == pytest.approx(results[1], rel=1e-6), "a saved state, through the hub"
    with TrainingServer(machine.url, key) as server:
        own = server.create_model("tiny", rank=4, seed=1)
        passed = own.forward_backward([Datum(tokens[:-1], tokens[1:])])
        own.optim_step(learning_rate=1e-2)
        assert passed.result().loss == pytest.approx(losses[0], rel=1e-5), "our SDK, the same model, the same numbers"
    end_session(alice)
    end_session(bob)


def test_two_base_models_stand_behind_one_url(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    carla = tinker.ServiceClient(base_url=machine.url, api_key=key_of(machine, "carla"))
    models = {str(each.model_name) for each in carla.get_server_capabilities().supported_models}
    assert models == {"tiny", "small"}
    trained = {name: carla.create_lora_training_client(base_model=name, rank=4, seed=1) for name in sorted(models)}
    tags = {model.model_id.partition(":")[0].rpartition(".")[2] for model in trained.values()}
    assert len(tags) == 2, "each id names its server"
    prompt = types.ModelInput.from_ints(list(range(3, 13)))
    for name, model in trained.items():
        assert model.get_info().model_data.model_name == name
        sampler = model.save_weights_and_get_sampling_client(name="now")
        sampled = sampler.sample(prompt, num_samples=1, sampling_params=types.SamplingParams(max_tokens=3)).result()
        assert len(sampled.sequences[0].tokens) == 3
    runs = carla.create_rest_client().list_training_runs().result().training_runs
    assert {run.training_run_id: run.base_model for run in runs} == {
        model.model_id: name for name, model in trained.items()
    }
    with pytest.raises(tinker.NotFoundError):
        carla.create_lora_training_client(base_model="neither", rank=4).result()
    end_session(carla)


def test_the_openai_client_uses_the_checkpoints_of_its_tenant_through_the_hub(machine: Machine) -> None:
    openai: Any = importlib.import_module("openai")
    key = key_of(machine, "dora")
    with TrainingServer(machine.url, key) as server:
        model = server.create_model("tiny", rank=4, seed=1)
        path = model.save_for_sampling("told").result()
    with openai.OpenAI(base_url=f"{machine.url}/v1", api_key=key, max_retries=0) as dora:
        names = {each.id for each in dora.models.list()}
        assert names == {"tiny", "small", path, f"tinker://{model.model_id}/weights/000000"}
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 8}
        whole = {name: dora.chat.completions.create(model=name, **asked) for name in ("tiny", "small", path)}
        # An adapter that was not trained changes nothing.
        assert whole[path].choices[0].message.content == whole["tiny"].choices[0].message.content
        chunks = list(dora.chat.completions.create(model=path, **asked, stream=True))
        assert "".join(each.choices[0].delta.content or "" for each in chunks) == whole[path].choices[0].message.content
    with (
        openai.OpenAI(base_url=f"{machine.url}/v1", api_key=key_of(machine, "emil"), max_retries=0) as emil,
        pytest.raises(openai.NotFoundError),
    ):
        emil.chat.completions.create(model=path, **asked)


async def test_an_agent_samples_a_checkpoint_of_its_key_through_the_hub(machine: Machine, tmp_path: Path) -> None:
    key = key_of(machine, "fay")
    with TrainingServer(machine.url, key) as server:
        path = server.create_model("tiny", rank=4, seed=1).save_for_sampling("told").result()
    secret = tmp_path / "fay.key"
    secret.write_text(key)
    secret.chmod(0o600)
    own = {"HOME": str(tmp_path), "STRATA_URL": machine.url, "STRATA_OPERATOR_TOKEN_FILE": str(secret)}
    program = StdioServerParameters(command=STRATA, args=["mcp", "--write"], env=own, cwd=tmp_path)
    asked = {"prompt": "Hello", "max_tokens": 8, "temperature": 0.0}
    async with Client(program) as agent:
        texts = []
        for name in (path, "tiny"):
            reply = (await agent.call_tool("sample", {"model": name, **asked})).structured_content
            assert reply["model"] == name
            texts.append(str(reply["text"]).replace(reply["untrusted"]["boundary"], "of this reply"))
        assert texts[0] == texts[1], "an adapter that was not trained changes nothing"
