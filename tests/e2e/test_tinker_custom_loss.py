"""Losses, copies and schedules on a whole server, with the `tinker` SDK as it is published and with our own."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import AsyncIterator
from typing import Any, Final

import pytest
import pytest_asyncio
import tinker
import torch
from tinker import types
from transformers import get_cosine_schedule_with_warmup

from soak.train.server import ServeProcess, make_model, serving
from strata.sdk.train import Datum, Schedule, TrainingServer
from tests.e2e.test_tinker_weights import connected
from tests.shell.train_runner.test_custom_loss import BETA, dpo, reference_kl

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]
PATIENCE_S: Final = 90.0
EQUAL: Final = 1e-6


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ServeProcess]:
    folder = tmp_path_factory.mktemp("w")
    make_model(folder / "model")
    async with serving(folder / "s", folder / "model", "real") as found:
        yield found
    with warnings.catch_warnings(action="ignore"):
        gc.collect()


def datum(place: int, **inputs: torch.Tensor) -> types.Datum:
    tokens = [(13 * place + 7 * token) % 200 for token in range(9)]
    given: Any = {"target_tokens": tokens[1:], **inputs}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=given)


def grad_norm(model: tinker.TrainingClient) -> float:
    """Of what the model has accumulated, by a step that changes nothing."""
    stepped = model.optim_step(types.AdamParams(learning_rate=0.0)).result(PATIENCE_S)
    assert stepped.metrics is not None
    return stepped.metrics["grad_norm"]


def held(service: tinker.ServiceClient) -> tuple[Any, Any, float, float]:
    model = service.create_lora_training_client(base_model="tiny", rank=8, seed=7)
    torch.manual_seed(1)
    data = [datum(place, advantages=torch.randn(8), reference=-torch.rand(8) * 5) for place in range(4)]
    ranks: Any = {"logprobs": 1, "advantages": 1, "reference": 1}
    handle = service.create_custom_loss(reference_kl, ranks).result(PATIENCE_S)
    assert handle.loss_id is not None, "it runs on the server"
    on_server = model.forward_backward_custom(data, handle).result(PATIENCE_S)
    norm = grad_norm(model)

    def in_client(all_of: list[types.Datum], logprobs: list[torch.Tensor]) -> Any:
        found = [
            reference_kl(each, one.loss_fn_inputs["advantages"].to_torch(), one.loss_fn_inputs["reference"].to_torch())
            for one, each in zip(all_of, logprobs, strict=True)
        ]
        return sum(loss for loss, _ in found), {}

    return on_server, model.forward_backward_custom(data, in_client).result(PATIENCE_S), norm, grad_norm(model)


async def test_a_loss_with_a_reference_runs_on_the_server_as_it_would_in_the_client(server: ServeProcess) -> None:
    def run() -> tuple[Any, Any, float, float]:
        with connected(server) as service:
            return held(service)

    on_server, in_client, norm, expected = await asyncio.to_thread(run)
    assert on_server.metrics["loss:sum"] == pytest.approx(in_client.metrics["loss:sum"], rel=EQUAL)
    assert norm == pytest.approx(expected, rel=EQUAL)
    assert on_server.metrics["custom/tokens:sum"] == 32
    assert [each["logprobs"].data for each in on_server.loss_fn_outputs] == [
        each["logprobs"].data for each in in_client.loss_fn_outputs
    ]


async def test_preferences_are_learned_by_pairs_on_the_server(server: ServeProcess) -> None:
    def run() -> tuple[float, float, list[float], float]:
        with connected(server) as service:
            model = service.create_lora_training_client(base_model="tiny", rank=8, seed=7)
            bare = [datum(place) for place in range(4)]
            found = model.forward(bare, "cross_entropy").result(PATIENCE_S)
            references = [each["logprobs"].to_torch() for each in found.loss_fn_outputs]
            data = [
                datum(place, reference=references[place], sign=torch.full((8,), 1.0 if place % 2 == 0 else -1.0))
                for place in range(4)
            ]
            ranks: Any = {"logprobs": 1, "reference": 1, "sign": 1}
            handle = service.create_custom_loss(dpo, ranks).result(PATIENCE_S)
            config: Any = {"loss_id": handle.loss_id, "group_size": 2}

            def in_client(_: list[types.Datum], logprobs: list[torch.Tensor]) -> Any:
                # The published formula (Rafailov et al., 2023).
                gains = [(each - reference).sum() for each, reference in zip(logprobs, references, strict=True)]
                return sum(-torch.nn.functional.logsigmoid(BETA * (gains[i] - gains[i + 1])) for i in (0, 2)), {}

            model.forward_backward_custom(data, in_client).result(PATIENCE_S)
            expected = grad_norm(model)
            model.forward_backward(data, "custom", config).result(PATIENCE_S)
            norm = grad_norm(model)
            losses = []
            for _ in range(6):
                done = model.forward_backward(data, "custom", config)
                model.optim_step(types.AdamParams(learning_rate=1e-2)).result(PATIENCE_S)
                losses.append(done.result(PATIENCE_S).metrics["loss:sum"])
            last = model.forward(data, "custom", config).result(PATIENCE_S)
            return expected, norm, losses, last.metrics["custom/accuracy:mean"]

    expected, norm, losses, accuracy = await asyncio.to_thread(run)
    assert norm == pytest.approx(expected, rel=EQUAL)
    assert losses[0] == pytest.approx(2 * 0.693147, abs=1e-4)
    assert losses[-1] < losses[0] / 2
    assert accuracy == 1.0


async def test_new_ranks_replay_a_custom_loss_bit_by_bit(server: ServeProcess) -> None:
    """There are no snapshots here: ranks that start again have nothing but the journal and the payloads."""
    data = [
        datum(place, reference=torch.full((8,), -5.0), sign=torch.full((8,), 1.0 - 2 * (place % 2)))
        for place in range(4)
    ]

    def logprobs(model: tinker.TrainingClient) -> list[Any]:
        found = model.forward([datum(place) for place in range(4)], "cross_entropy").result(PATIENCE_S)
        return [each["logprobs"].data for each in found.loss_fn_outputs]

    def begin(service: tinker.ServiceClient) -> tuple[tinker.TrainingClient, list[Any], list[Any]]:
        model = service.create_lora_training_client(base_model="tiny", rank=8, seed=3)
        fresh = logprobs(model)
        ranks: Any = {"logprobs": 1, "reference": 1, "sign": 1}
        handle = service.create_custom_loss(dpo, ranks).result(PATIENCE_S)
        config: Any = {"loss_id": handle.loss_id, "group_size": 2}
        for _ in range(3):
            model.forward_backward(data, "custom", config).result(PATIENCE_S)
            model.optim_step(types.AdamParams(learning_rate=1e-2)).result(PATIENCE_S)
        return model, fresh, logprobs(model)

    with connected(server) as service:
        model, fresh, before = await asyncio.to_thread(begin, service)
        assert before != fresh
        assert await server.stop() == 0
        await server.start()
        assert await asyncio.to_thread(logprobs, model) == before


async def test_a_copied_checkpoint_is_trained_on_after_the_original_is_gone(server: ServeProcess) -> None:
    def run() -> tuple[list[Any], list[Any]]:
        rest = tinker.RestClient(base_url=server.url, api_key=server.key)
        with connected(server) as service:
            model = service.create_lora_training_client(base_model="tiny", rank=8, seed=5)
            model.forward_backward([datum(1, weights=torch.ones(8))], "cross_entropy").result(PATIENCE_S)
            model.optim_step(types.AdamParams(learning_rate=1e-2)).result(PATIENCE_S)
            path = model.save_state("gift").result(PATIENCE_S).path
            copied = rest.copy_weights(path, "local").result(PATIENCE_S)
            rest.delete_checkpoint_from_tinker_path(path).result(PATIENCE_S)
            again = service.create_training_client_from_state_with_optimizer(copied)
            found = [
                each.forward([datum(2)], "cross_entropy").result(PATIENCE_S).loss_fn_outputs[0]["logprobs"].data
                for each in (model, again)
            ]
            return found[0], found[1]

    original, copy = await asyncio.to_thread(run)
    assert original == copy


async def test_a_schedule_is_applied_step_by_step(server: ServeProcess) -> None:
    def run() -> list[float]:
        with TrainingServer(server.url, server.key) as service:
            schedule = Schedule(kind="cosine", warmup_steps=2, total_steps=6)
            model = service.create_model("tiny", rank=4, seed=1, schedule=schedule)
            rates = []
            for _ in range(6):
                model.forward_backward([Datum([1, 2, 3], [2, 3, 4])])
                rates.append(model.optim_step(1e-3).result()["lr"])
            return rates

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    reference = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=6)
    expected = []
    for _ in range(6):
        optimizer.step()
        reference.step()
        expected.append(reference.get_last_lr()[0])
    assert await asyncio.to_thread(run) == pytest.approx(expected, abs=1e-12)
