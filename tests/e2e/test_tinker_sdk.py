"""The `tinker` SDK as it is published, against a whole server: two ranks of a tiny real model and all before them."""

from __future__ import annotations

import gc
import json
import logging
import random
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import tinker
import torch
from tinker import types

from strata.base.settings import process_environment
from strata.train.runner.model.tiny import TinyModel, make
from tests.shell.train_api.processes import Processes, serving
from tests.support.tinker_sessions import end_session

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]
LOOP: Final = Path(__file__).with_name("tinker_loop.py")
JSON_ERA: Final = "0.16.1"
"""The last version that sends and reads everything as JSON."""
TEXT: Final = "Who asks twice gets the same answer twice, and what was only said is gone before anybody wrote it down."
STEPS: Final = 60
RATE: Final = 5e-3
MEMORISED: Final = 0.1
"""Nats per token: below it every token of the text is more likely than all others together."""
UNTOLD: Final = 2.0
"""What an untrained model, and one whose targets are shuffled before every step, stay above."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    folder = tmp_path_factory.mktemp("t")
    make(folder / "model", TinyModel())
    with serving(folder / "s", folder / "model", ranks=2, server="poll_s = 0.3\n") as found:
        yield found
    # The SDK leaves sockets to the garbage collector, whose complaint would be taken for ours.
    with warnings.catch_warnings(action="ignore"):
        gc.collect()


@pytest.fixture
def client(server: Processes, monkeypatch: pytest.MonkeyPatch) -> Iterator[tinker.ServiceClient]:
    yield from connected(server, server.key, monkeypatch)


def connected(server: Processes, key: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[tinker.ServiceClient]:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    service = tinker.ServiceClient(base_url=server.url, api_key=key)
    yield service
    end_session(service)


def datum(tokens: list[int], targets: list[int], weight: float = 1.0) -> types.Datum:
    inputs: Any = {"target_tokens": targets, "weights": [weight] * len(targets)}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


def per_token(output: types.ForwardBackwardOutput, tokens: list[int]) -> float:
    return output.metrics["loss:sum"] / len(tokens)


def train(model: tinker.TrainingClient, tokens: list[int], *, shuffled: bool) -> float:
    """The loss per token of the text after training on it, or on its tokens in another order at every step."""
    chance = random.Random(7)
    pending: list[Any] = []
    for _ in range(STEPS):
        targets = tokens[1:]
        if shuffled:
            chance.shuffle(targets)
        pending.append(model.forward_backward([datum(tokens[:-1], targets)], "cross_entropy"))
        pending.append(model.optim_step(types.AdamParams(learning_rate=RATE)))
    for each in pending:
        each.result()
    return per_token(model.forward([datum(tokens[:-1], tokens[1:])], "cross_entropy").result(), tokens[1:])


def test_a_text_is_memorised_and_only_if_it_is_what_was_shown(client: tinker.ServiceClient) -> None:
    model = client.create_lora_training_client(base_model="tiny", rank=8, seed=1)
    tokens = model.get_tokenizer().encode(TEXT)
    untrained = model.forward([datum(tokens[:-1], tokens[1:])], "cross_entropy").result()
    other = client.create_lora_training_client(base_model="tiny", rank=8, seed=1)
    assert per_token(untrained, tokens[1:]) > UNTOLD
    assert train(model, tokens, shuffled=False) < MEMORISED
    assert train(other, tokens, shuffled=True) > UNTOLD


def test_a_batch_in_many_chunks_gives_outputs_in_its_order(
    client: tinker.ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The SDK sends the chunks at once and the first one last."""
    model = client.create_lora_training_client(base_model="tiny", rank=4, seed=1)
    config = model.holder._client_config.model_copy(update={"fwdbwd_max_chunk_len": 3})
    monkeypatch.setattr(model.holder, "_client_config", config)
    lengths = [5, 1, 9, 2, 2, 7, 3, 8, 4, 6]
    batch = [datum([length] * length, [length] * length) for length in lengths]
    whole = model.forward(batch, "cross_entropy").result()
    assert [each["logprobs"].shape for each in whole.loss_fn_outputs] == [[length] for length in lengths]
    alone = [model.forward([each], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data for each in batch]
    for one, together in zip(alone, whole.loss_fn_outputs, strict=True):
        assert one == pytest.approx(together["logprobs"].data, abs=1e-4)
    assert whole.metrics["loss:sum"] == pytest.approx(-sum(map(sum, alone)), rel=1e-4)


def test_preferences_are_learned_with_a_loss_of_the_clients_own(client: tinker.ServiceClient) -> None:
    """DPO, which runs in the client: the server is sent the weights that its gradient comes down to."""
    model = client.create_lora_training_client(base_model="tiny", rank=8, seed=2)
    tokenizer = model.get_tokenizer()
    chosen, rejected = tokenizer.encode("The answer is yes."), tokenizer.encode("The answer is no.")
    pair = [datum(each[:-1], each[1:]) for each in (chosen, rejected)]
    before = model.forward(pair, "cross_entropy").result()
    reference = [torch.tensor(each["logprobs"].data).sum() for each in before.loss_fn_outputs]

    def dpo(data: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        assert len(data) == 2
        margin = (logprobs[0].sum() - reference[0]) - (logprobs[1].sum() - reference[1])
        loss = -torch.nn.functional.logsigmoid(0.5 * margin)
        return loss, {"margin:mean": float(margin.detach())}

    seen = []
    for _ in range(12):
        seen.append(model.forward_backward_custom(pair, dpo).result().metrics["margin:mean"])
        model.optim_step(types.AdamParams(learning_rate=2e-3)).result()
    after = model.forward(pair, "cross_entropy").result()
    margins = [
        sum(found.loss_fn_outputs[0]["logprobs"].data) - sum(found.loss_fn_outputs[1]["logprobs"].data)
        for found in (before, after)
    ]
    assert abs(seen[0]) < 1e-4
    assert margins[1] > margins[0] + 5.0


def test_a_bad_batch_fails_with_its_place_and_the_model_goes_on(client: tinker.ServiceClient) -> None:
    model = client.create_lora_training_client(base_model="tiny", rank=4)
    with pytest.raises(tinker.RequestFailedError, match=r"data\[1\].loss_fn_inputs.\w+: has the shape") as failed:
        model.forward_backward([datum([1, 2], [2, 3]), datum([1], [2, 3])], "cross_entropy").result()
    assert failed.value.category is types.RequestErrorCategory.User
    with pytest.raises(tinker.RequestFailedError, match="logprobs is missing"):
        model.forward_backward([datum([1], [2])], "ppo").result()
    model.forward_backward([datum([1, 2], [2, 3])], "cross_entropy").result()
    assert model.optim_step(types.AdamParams()).result().metrics


def test_a_checkpoint_goes_on_where_it_was_saved(client: tinker.ServiceClient, server: Processes) -> None:
    model = client.create_lora_training_client(base_model="tiny", rank=4, seed=3)
    batch = [datum([5, 6, 7], [6, 7, 8])]

    def step(trained: tinker.TrainingClient) -> float:
        found = trained.forward_backward(batch, "cross_entropy").result().metrics["loss:sum"]
        trained.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        return found

    step(model)
    saved = model.save_state("halfway", user_metadata={"renderer": "none"}).result().path
    went_on = [step(model) for _ in range(3)]
    again = client.create_training_client_from_state_with_optimizer(saved)
    assert [step(again) for _ in range(3)] == pytest.approx(went_on, rel=1e-4)
    rest = tinker.RestClient(base_url=server.url, api_key=server.key)
    listed = rest.list_checkpoints(model.model_id).result().checkpoints
    assert [each.checkpoint_id for each in listed] == ["weights/halfway", "weights/000000"]
    rest.delete_checkpoint(model.model_id, "weights/halfway").result()
    assert [each.checkpoint_id for each in rest.list_checkpoints(model.model_id).result().checkpoints] == [
        "weights/000000"
    ]


def test_whoever_waits_for_others_is_told_so(
    client: tinker.ServiceClient,
    server: Processes,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "tinker")
    # It reports a pause only after a quarter of an hour.
    monkeypatch.setattr("tinker.lib.queue_state_logger.PAUSE_GRACE_PERIOD", 0)
    token = (server.data / "operator.token").read_text().strip()
    body = {"name": "bob", "role": "researcher"}
    with server.private(**{"X-Operator-Token": token}) as http:
        made = http.post("/v1/keys", json=body).json()
    model = client.create_lora_training_client(base_model="tiny", rank=4)
    long = [datum([9] * 1500, [9] * 1500) for _ in range(8)]
    slow = [model.forward_backward(long, "cross_entropy") for _ in range(4)]
    bob: Any
    for bob in connected(server, made["secret"], monkeypatch):
        bob.create_lora_training_client(base_model="tiny", rank=4).result()
    for each in slow:
        each.result()
    told = [record.getMessage() for record in caplog.records if "is paused. Reason:" in record.getMessage()]
    assert any("in queue" in line and "running local/forward_backward" in line for line in told), told


def other_tinker(version: str) -> Path:
    """An interpreter with this version of the SDK, kept in the cache of the user."""
    folder = Path("~/.cache/strata-tests").expanduser() / f"tinker-{version}"
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True, timeout=120)
        install = [str(python), "-m", "pip", "install", "--quiet", f"tinker=={version}"]
        done = subprocess.run(install, check=False, timeout=280, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-300:]
        (folder / "complete").touch()
    return python


def test_a_client_that_speaks_json_trains_to_the_same_numbers(server: Processes) -> None:
    environment = {**process_environment(), "TINKER_BASE_URL": server.url, "TINKER_API_KEY": server.key}
    told = []
    for python in (other_tinker(JSON_ERA), Path(sys.executable)):
        command = [str(python), str(LOOP), TEXT]
        done = subprocess.run(
            command,
            env=environment | {"TINKER_TELEMETRY": "0"},
            timeout=200,
            check=False,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        told.append(json.loads(done.stdout))
    old, new = told
    assert old["version"] == JSON_ERA != new["version"]
    assert old["losses"] == pytest.approx(new["losses"], rel=1e-4)
    assert old["losses"][0] > UNTOLD
    assert old["losses"][1] < MEMORISED
    assert old["lengths"] == [old["tokens"]]
    assert old["saved"].endswith("/weights/old")
