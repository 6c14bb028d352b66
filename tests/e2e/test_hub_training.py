"""Training through a hub: a training server that is a job, one URL, and keys that are tenants."""

from __future__ import annotations

import gc
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import tinker
from tinker import types

from strata.sdk.train import Datum, TrainingServer
from tests.e2e.machines import Machine
from tests.shell.fleet_agent.waiting import eventually

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]
SETTINGS: Final = """
[server]
poll_s = 0.3

[model]
path = "model"
name = "tiny"
"""
MANIFEST: Final = """
[trainers.server]
command = ["strata", "serve", "train.toml"]
directory = "."

[[jobs]]
name = "tiny-server"
kind = "server"
model = "tiny"
trainer = "server"
"""


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    # The paths of Unix sockets have to be short.
    made = Machine(tmp_path_factory.mktemp("m") / "h", "one")
    programs = f"{Path(sys.executable).parent}{os.pathsep}{made.environ['PATH']}"
    made.environ = {**made.environ, "PATH": programs}
    folder = made.home / "server"
    folder.mkdir()
    (folder / "train.toml").write_text(SETTINGS)
    (folder / "manifest.toml").write_text(MANIFEST)
    made.says("models", "tiny", str(folder / "model"))
    made.up()
    yield made
    if made.is_up:
        made.down()
    # The SDK leaves sockets to the garbage collector, whose complaint would be taken for ours.
    with warnings.catch_warnings(action="ignore"):
        gc.collect()


def key_of(machine: Machine, name: str) -> str:
    made = machine.knows("keys", "create", name, "--role", "researcher", "--owner")
    key: str = made["secret"]
    return key


def test_the_tinker_sdk_trains_through_the_hub_with_a_key_of_the_hub(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    assert machine.says("apply", str(machine.home / "server" / "manifest.toml"), "--no-describe").startswith("+1 new")
    eventually(lambda: machine.knows("show", "tiny-server")["serving"] == "serving", 120.0)
    assert "serving" in machine.says("list")
    key = key_of(machine, "alice")
    alice = tinker.ServiceClient(base_url=machine.url, api_key=key)
    models = [each.model_name for each in alice.get_server_capabilities().supported_models]
    assert models == ["tiny"]
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
    with pytest.raises(tinker.TinkerError):
        bob.create_training_client_from_state(path).forward(batch, "cross_entropy").result()
    with TrainingServer(machine.url, key) as server:
        own = server.create_model("tiny", rank=4, seed=1)
        passed = own.forward_backward([Datum(tokens[:-1], tokens[1:])])
        own.optim_step(learning_rate=1e-2)
        assert passed.result().loss == pytest.approx(losses[0], rel=1e-5), "our SDK, the same model, the same numbers"
    alice.close("success").result()
    bob.close("success").result()
