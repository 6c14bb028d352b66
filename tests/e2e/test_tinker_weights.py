"""The life of checkpoints with the `tinker` SDK as it is published: resumed by others, archived, imported, ended."""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import pytest_asyncio
import tinker
from tinker import types
from tinker.types.optimizer import OptimizerConfigBase, OptimParamsBase

from soak.train.server import ServeProcess, make_model, serving
from strata.base.settings import process_environment
from tests.e2e.test_tinker_sdk import JSON_ERA, other_tinker
from tests.support.tinker_sessions import end_session

pytestmark = [
    # The SDK leaves sockets to the garbage collector, whose complaint would be taken for ours.
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]
PATIENCE_S: Final = 90.0
ASK: Final = Path(__file__).with_name("archive_url.py")
STRATA: Final = Path(sys.executable).with_name("strata")
ADAPTER: Final = "adapter_model.safetensors"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ServeProcess]:
    folder = tmp_path_factory.mktemp("w")
    make_model(folder / "model")
    async with serving(folder / "s", folder / "model", "real") as found:
        yield found
    with warnings.catch_warnings(action="ignore"):
        gc.collect()


@contextmanager
def connected(server: ServeProcess) -> Iterator[tinker.ServiceClient]:
    """A client of its own, with a session of its own."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TINKER_TELEMETRY", "0")
        service = tinker.ServiceClient(base_url=server.url, api_key=server.key)
        yield service
        end_session(service)


def batch(step: int) -> list[types.Datum]:
    data = []
    for place in range(3):
        tokens = [(7 * step + 13 * place + token) % 200 for token in range(9)]
        inputs: Any = {"target_tokens": tokens[1:], "weights": [1.0] * 8}
        data.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
    return data


ADAM: Final = types.AdamParams(learning_rate=1e-2, weight_decay=0.01)
MUON: Final = OptimParamsBase(type="muon", learning_rate=2e-2)  # type: ignore[call-arg]


async def test_checkpoints_say_what_they_were_trained_with(server: ServeProcess) -> None:
    """As `strata weights list` shows it: through the SDK, with tokens that the client declared to be sampled."""
    listed = await asyncio.to_thread(train_with_provenance, server)
    first, second = listed
    assert (first["steps"], first["datums"], first["tokens"], first["passes"]) == (2, 6, 48, 2)
    assert (first["sampled"], first["total tokens"], first["parent"]) == (15, 48, "")
    assert (second["steps"], second["datums"], second["tokens"], second["sampled"]) == (1, 3, 24, 0)
    assert (second["total tokens"], second["parent"]) == (72, first["checkpoint"])


def train_with_provenance(server: ServeProcess) -> list[dict[str, Any]]:
    prompt = types.PromptProvenanceSpan(sequence_id="drawn", length=3)
    sampled = types.SampledProvenanceSpan(sequence_id="drawn", length=5)
    drawn = [each.with_provenance([prompt, sampled], [prompt, sampled]) for each in batch(1)]
    with connected(server) as service:
        training = service.create_lora_training_client(base_model="tiny", rank=4)
        for data in (drawn, batch(2)):
            training.forward_backward(data, "cross_entropy").result(PATIENCE_S)
            training.optim_step(ADAM).result(PATIENCE_S)
        # Its gradients are in no step.
        training.forward_backward(batch(3), "cross_entropy").result(PATIENCE_S)
        first = training.save_state("counted").result(PATIENCE_S).path
        other = service.create_training_client_from_state_with_optimizer(first)
        other.forward_backward(batch(4), "cross_entropy").result(PATIENCE_S)
        other.optim_step(ADAM).result(PATIENCE_S)
        second = other.save_state("counted-on").result(PATIENCE_S).path
    shown = subprocess.run(
        [
            STRATA,
            "weights",
            "list",
            "--server",
            server.url,
            "--key-file",
            server.settings.data / "api.key",
            "-o",
            "json",
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    rows = {row["checkpoint"]: row for row in json.loads(shown.stdout)}
    return [rows[first], rows[second]]


def train(model: tinker.TrainingClient, steps: range, params: types.OptimParams = ADAM) -> list[list[float]]:
    """The log probabilities that every pass saw, and at the end those of a pass over the first batch."""
    seen = []
    for step in steps:
        passed = model.forward_backward(batch(step), "cross_entropy")
        stepped = model.optim_step(params)
        seen.append(logprobs(passed.result(PATIENCE_S)))
        stepped.result(PATIENCE_S)
    return [*seen, logprobs(model.forward(batch(0), "cross_entropy").result(PATIENCE_S))]


def logprobs(output: types.ForwardBackwardOutput) -> list[float]:
    return [number for each in output.loss_fn_outputs for number in each["logprobs"].data]


def saved_adapter(server: ServeProcess, model: tinker.TrainingClient, name: str) -> bytes:
    """What lies on the disk after the model is saved."""
    model.save_weights_for_sampler(name).result(PATIENCE_S)
    (folder,) = server.settings.checkpoint_folder.glob(f"*/sampler_weights/{name}@*")
    return (folder / ADAPTER).read_bytes()


async def test_a_new_client_goes_on_bit_by_bit_with_muon_too(server: ServeProcess) -> None:
    """The SDK does not name the optimizer again: the server knows it from the checkpoint."""

    def begun() -> tuple[str, list[list[float]]]:
        with connected(server) as client:
            optimizer = OptimizerConfigBase(type="muon")
            model = client.create_lora_training_client(base_model="tiny", rank=8, seed=7, optimizer=optimizer)
            train(model, range(2), MUON)
            path = model.save_state("muon").result(PATIENCE_S).path
            with pytest.raises(tinker.RequestFailedError, match="created with muon"):
                model.optim_step(ADAM).result(PATIENCE_S)
            return path, train(model, range(2, 4), MUON)

    def resumed(path: str) -> list[list[float]]:
        with connected(server) as client:
            return train(client.create_training_client_from_state_with_optimizer(path), range(2, 4), MUON)

    path, whole = await asyncio.to_thread(begun)
    assert await asyncio.to_thread(resumed, path) == whole


async def test_a_new_client_goes_on_bit_by_bit_as_if_nobody_had_stopped(server: ServeProcess) -> None:
    """Also after the whole server was stopped and started; and without the optimizer it is not the same."""

    def begun() -> tuple[str, list[list[float]], bytes]:
        with connected(server) as client:
            model = client.create_lora_training_client(base_model="tiny", rank=8, seed=7)
            train(model, range(3))
            path = model.save_state("half", user_metadata={"why": "resume"}).result(PATIENCE_S).path
            return path, train(model, range(3, 6)), saved_adapter(server, model, "whole")

    def resumed(path: str, name: str, *, by_load: bool = True) -> tuple[list[list[float]], bytes]:
        """By one request that makes the model, or by one that makes it and one that loads into it."""
        with connected(server) as client:
            if by_load:
                model = client.create_training_client_from_state_with_optimizer(path)
            else:
                model = client.create_lora_training_client(base_model="tiny", rank=8)
                model.load_state_with_optimizer(path).result(PATIENCE_S)
            return train(model, range(3, 6)), saved_adapter(server, model, name)

    def without_optimizer(path: str) -> list[list[float]]:
        with connected(server) as client:
            return train(client.create_training_client_from_state(path), range(3, 6))

    path, whole, files = await asyncio.to_thread(begun)
    assert await asyncio.to_thread(resumed, path, "by-load") == (whole, files)
    assert await asyncio.to_thread(resumed, path, "by-create", by_load=False) == (whole, files)
    other = await asyncio.to_thread(without_optimizer, path)
    assert other[0] == whole[0]
    assert other[-1] != whole[-1]
    assert await server.stop() == 0
    await server.start()
    assert await asyncio.to_thread(resumed, path, "restarted") == (whole, files)


def trained(server: ServeProcess) -> tuple[str, list[float]]:
    with connected(server) as client:
        model = client.create_lora_training_client(base_model="tiny", rank=4, seed=3, train_unembed=False)
        seen = train(model, range(2))
        return model.save_state("mine").result(PATIENCE_S).path, seen[-1]


def archived(server: ServeProcess, path: str) -> httpx.Response:
    """Where the last version of the SDK that can ask says that it is, without credentials, as that SDK's users do."""
    environment = {**process_environment(), "TINKER_BASE_URL": server.url, "TINKER_API_KEY": server.key}
    asked = subprocess.run(
        [other_tinker(JSON_ERA), ASK, path],
        env=environment | {"TINKER_TELEMETRY": "0"},
        timeout=PATIENCE_S,
        capture_output=True,
        text=True,
        check=False,
    )
    assert asked.returncode == 0, asked.stderr
    return httpx.get(asked.stdout)


async def test_an_archive_is_a_folder_for_peft_and_comes_back_as_a_checkpoint_to_train_on(
    server: ServeProcess, tmp_path: Path
) -> None:
    path, before = await asyncio.to_thread(trained, server)
    fetched = await asyncio.to_thread(archived, server, path)
    assert fetched.status_code == 200
    (tmp_path / "a.tar").write_bytes(fetched.content)
    subprocess.run(["tar", "-xf", "a.tar"], cwd=tmp_path, check=True, timeout=10)
    (folder,) = server.settings.checkpoint_folder.glob("*/weights/mine@*")
    assert (tmp_path / ADAPTER).read_bytes() == (folder / ADAPTER).read_bytes()
    assert {file.name for file in tmp_path.iterdir()} == {"a.tar", ADAPTER, "adapter_config.json"}
    again = httpx.get(str(fetched.request.url))
    assert again.content == fetched.content
    forged = str(fetched.request.url)[:-4] + "AAAA"
    assert httpx.get(forged).status_code == 403

    def taken() -> tuple[str, str, list[float], list[list[float]]]:
        headers = {"X-API-Key": server.key, "Content-Type": "application/x-tar"}
        where = f"{server.url}/api/v1/import_weights?name=theirs"
        first = httpx.post(where, content=fetched.content, headers=headers)
        assert first.status_code == 200, first.text
        key_file = server.settings.data / "api.key"
        second = subprocess.run(
            [STRATA, "weights", "import", tmp_path, "--name=theirs", "--server", server.url, "--key-file", key_file],
            timeout=PATIENCE_S,
            check=True,
            capture_output=True,
            text=True,
        )
        with connected(server) as client:
            model = client.create_training_client_from_state(first.json()["path"])
            here = logprobs(model.forward(batch(0), "cross_entropy").result(PATIENCE_S))
            return first.json()["path"], second.stdout.strip(), here, train(model, range(2, 4))

    first, second, here, seen = await asyncio.to_thread(taken)
    assert first == second
    assert first.endswith("/weights/theirs")
    assert here == before
    assert seen[-1] != before


async def test_weights_can_be_taken_away_file_by_file(server: ServeProcess) -> None:
    def taken() -> dict[str, bytes]:
        rest = tinker.RestClient(base_url=server.url, api_key=server.key)
        with connected(server) as client:
            model = client.create_lora_training_client(base_model="tiny", rank=4, seed=3)
            path = model.save_weights_external("out").result(PATIENCE_S).path
            assert path == f"tinker://{model.model_id}/external_weights/out"
            urls = rest.get_external_weights_urls(path).result().urls
            kinds = [each.checkpoint_type for each in rest.list_checkpoints(model.model_id).result().checkpoints]
            assert kinds == ["external", "training"]
        return {name: httpx.get(url).raise_for_status().content for name, url in urls.items()}

    files = await asyncio.to_thread(taken)
    (folder,) = server.settings.checkpoint_folder.glob("*/external_weights/out@*")
    assert files.keys() == {ADAPTER, "adapter_config.json"}
    assert files == {name: (folder / name).read_bytes() for name in files}
    # What is damaged is not handed out.
    (folder / "adapter_config.json").write_bytes(b"{}")
    run = folder.parent.parent.name.replace("-train-", ":train:")
    where = f"{server.url}/api/v1/training_runs/{run}/checkpoints/external_weights/out/archive"
    reply = httpx.get(where, headers={"X-API-Key": server.key})
    assert (reply.status_code, reply.headers["x-should-retry"]) == (500, "false")


async def test_a_checkpoint_whose_time_is_over_is_gone_for_lists_loads_and_samplers(server: ServeProcess) -> None:
    def lived() -> None:
        rest = tinker.RestClient(base_url=server.url, api_key=server.key)
        with connected(server) as client:
            model = client.create_lora_training_client(base_model="tiny", rank=4, seed=3)
            short = model.save_state("short", ttl_seconds=3600).result(PATIENCE_S).path
            kept = model.save_state("kept", ttl_seconds=3600).result(PATIENCE_S).path
            rest.set_checkpoint_ttl_from_tinker_path(kept, None).result()
            listed = {each.checkpoint_id: each for each in rest.list_user_checkpoints().result().checkpoints}
            assert listed["weights/short"].expires_at is not None
            assert listed["weights/kept"].expires_at is None
            for change, is_public in (
                (rest.publish_checkpoint_from_tinker_path, True),
                (rest.unpublish_checkpoint_from_tinker_path, False),
            ):
                change(kept).result()
                listed = {each.checkpoint_id: each for each in rest.list_user_checkpoints().result().checkpoints}
                assert [listed[f"weights/{name}"].public for name in ("kept", "short")] == [is_public, False]
            end = httpx.put(
                f"{server.url}/api/v1/training_runs/{model.model_id}/checkpoints/weights/short/ttl",
                json={"ttl_seconds": 1e-3},
                headers={"X-API-Key": server.key},
            )
            assert end.status_code == 204, end.text
            first = f"{server.url}/api/v1/training_runs/{model.model_id}/checkpoints/weights/000000"
            assert httpx.delete(first, headers={"X-API-Key": server.key}).status_code == 422
            names = {each.checkpoint_id for each in rest.list_checkpoints(model.model_id).result().checkpoints}
            assert names == {"weights/kept", "weights/000000"}
            with pytest.raises(tinker.NotFoundError):
                rest.get_weights_info_by_tinker_path(short).result()
            futures: Any = client
            with pytest.raises(tinker.NotFoundError):
                futures.create_training_client_from_state(short).result(PATIENCE_S)
            with pytest.raises(tinker.NotFoundError):
                futures.create_sampling_client(model_path=short).result(PATIENCE_S)
            with pytest.raises(tinker.RequestFailedError, match="there is no checkpoint"):
                model.load_state(short).result(PATIENCE_S)
            rest.delete_checkpoint_from_tinker_path(kept).result()
            assert not list(server.settings.checkpoint_folder.glob("*/weights/short@*"))

    await asyncio.to_thread(lived)
