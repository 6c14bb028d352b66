"""The `tinker` SDK as it is published sends images to a whole server: what they show is learned, and wrong ones fail
their own operation."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Final

import httpx
import pytest
import tinker
from tinker import types

from tests.shell.train_api.processes import Processes, serving
from tests.support import tiny_vision
from tests.support.tinker_sessions import end_session
from tests.support.tiny_vision import encoded, photo

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]
CAT, DOG = photo(1, 100, 60), photo(2, 60, 100)
CAT_TEXT, DOG_TEXT = [40, 41, 42, 43], [60, 61, 62, 63]
STEPS: Final = 40
RATE: Final = 1e-2


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    folder = tmp_path_factory.mktemp("i")
    tiny_vision.make(folder / "model")
    with serving(folder / "s", folder / "model", ranks=2, server="poll_s = 0.3\n") as found:
        yield found
    with warnings.catch_warnings(action="ignore"):
        gc.collect()


@pytest.fixture
def client(server: Processes, monkeypatch: pytest.MonkeyPatch) -> Iterator[tinker.ServiceClient]:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    service = tinker.ServiceClient(base_url=server.url, api_key=server.key)
    yield service
    end_session(service)


def loss(model: tinker.TrainingClient, datum: types.Datum, tokens: Sequence[int]) -> float:
    """Nats per token of the text."""
    return model.forward([datum], "cross_entropy").result().metrics["loss:sum"] / len(tokens)


def caption(picture: Any, tokens: list[int]) -> types.Datum:
    return tiny_vision.datum_of((picture, tokens))


@pytest.mark.proves("the unmodified `tinker` SDK trains on image chunks of the family mistral3")
def test_captions_are_learned_by_what_their_images_show(client: tinker.ServiceClient) -> None:
    model = client.create_lora_training_client(base_model="tiny", rank=8, seed=1, train_unembed=False)
    batch = [caption(CAT, CAT_TEXT), caption(DOG, DOG_TEXT)]
    before = loss(model, batch[0], CAT_TEXT)
    pending: list[Any] = []
    for _ in range(STEPS):
        pending.append(model.forward_backward(batch, "cross_entropy"))
        pending.append(model.optim_step(types.AdamParams(learning_rate=RATE)))
    for each in pending:
        each.result()
    own = loss(model, batch[0], CAT_TEXT), loss(model, batch[1], DOG_TEXT)
    exchanged = loss(model, caption(DOG, CAT_TEXT), CAT_TEXT), loss(model, caption(CAT, DOG_TEXT), DOG_TEXT)
    assert before > 2.0
    assert max(own) < 0.5
    assert min(exchanged) > 2.0


def test_a_wrong_image_fails_its_operation_and_the_next_one_runs(client: tinker.ServiceClient) -> None:
    model = client.create_lora_training_client(base_model="tiny", rank=2, seed=1)
    wrong: list[tuple[types.ImageChunk, str]] = [
        (types.ImageChunk(data=encoded(CAT)[:200], format="png"), "this is no image that can be decoded as png"),
        (types.ImageChunk(data=encoded(CAT), format="png", expected_tokens=9), "expected_tokens is 9, and 100x60"),
        (types.ImageChunk(data=encoded(CAT), format="jpeg"), "this is no image that can be decoded as jpeg"),
    ]
    good = caption(CAT, CAT_TEXT)
    for chunk, reason in wrong:
        chunks = [chunk, *good.model_input.chunks[1:]]
        bad = types.Datum(model_input=types.ModelInput(chunks=chunks), loss_fn_inputs=good.loss_fn_inputs)
        with pytest.raises(tinker.RequestFailedError, match=r"data\[0\].model_input\[0\]: ") as caught:
            model.forward_backward([bad], "cross_entropy").result()
        assert reason in str(caught.value)
    assert loss(model, good, CAT_TEXT) > 0


def test_the_server_says_that_passes_take_images_and_samplers_do_not(
    client: tinker.ServiceClient, server: Processes
) -> None:
    reply = httpx.get(f"{server.url}/api/v1/get_server_capabilities", headers={"X-API-Key": server.key})
    assert reply.json()["supported_models"][0]["images"] is True
    sampler = client.create_sampling_client(base_model="tiny")
    prompt = types.ModelInput(chunks=[tiny_vision.chunk_of(CAT)])
    with pytest.raises(tinker.APIStatusError, match="samples from tokens, not from image"):
        sampler.sample(prompt, num_samples=1, sampling_params=types.SamplingParams(max_tokens=1)).result()
