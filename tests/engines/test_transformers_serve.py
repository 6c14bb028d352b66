"""`transformers serve` as it is published, told of weights by a whole training server.

It answers in text, and has no tokens or log probabilities in its answers: what it says is compared as text, and
nothing is sampled through it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Final

import httpx
import pytest
from transformers import AutoTokenizer

from strata.train.core.state import InferenceEndpoint
from strata.train.endpoints.client import EngineClient
from strata.train.endpoints.engine import ModelVersion
from strata.train.endpoints.transformers_serve import TransformersEngine
from strata.train.inference_settings import InferenceSettings
from strata.train.runner.model.tiny import TinyModel, make
from tests.engines import processes
from tests.engines.conformance import ADAPTERS, Case
from tests.engines.processes import EngineProcess
from tests.engines.reference import greedy, load, made_weights
from tests.engines.trainee import Operator, Trainee
from tests.shell.train_api.processes import Processes, serving

pytestmark = [pytest.mark.timeout(1800), pytest.mark.filterwarnings("ignore")]
PROMPT: Final = "The first step"
TOKENS: Final = 24


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    make(folder, TinyModel())
    return folder


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    found = processes.transformers_serve(tmp_path_factory.mktemp("serve") / "log").start()
    try:
        found.ready()
        yield found
    finally:
        found.close()


def settings(engine: EngineProcess) -> str:
    return f'poll_s = 2.0\n[inference]\nallow = ["{engine.url}"]\nsample = true\n'


def said(engine: EngineProcess, folder: Path) -> str:
    """By the engine itself, greedily, of the model in this folder."""
    body = {"model": str(folder), "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
    reply = httpx.post(f"{engine.url}/v1/completions", json=body, timeout=120)
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["choices"][0]["text"]
    return text


def expected(model: Path, folder: Path, *, whole: bool) -> str:
    tokenizer = AutoTokenizer.from_pretrained(str(model))
    loaded = load(folder) if whole else load(model, folder)
    tokens = greedy(loaded, tokenizer.encode(PROMPT), TOKENS)
    assert tokenizer.eos_token_id not in tokens, "where it ends would be another question"
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


@pytest.mark.parametrize("training", ["lora", "full"])
def test_pushed_weights_give_the_text_that_hugging_face_gives_also_after_a_restart(
    training: str,
    engine: EngineProcess,
    model: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = training == "full"
    monkeypatch.setenv("STRATA_MODEL_TRAINING", training)
    with serving(tmp_path_factory.mktemp("t") / "s", model, ranks=1, server=settings(engine)) as server:
        operator = Operator(server)
        operator.post("/add_inference_endpoint", url=engine.url, engine="transformers", name="serve")
        trainee = Trainee(operator, lora=not whole)
        tokens = AutoTokenizer.from_pretrained(str(model)).encode("The first step is the hardest one; and so on.")
        answers = {}
        for _ in range(3):
            trainee.learn(tokens, 3, rate=3e-3 if whole else 1e-2)
            synced = trainee.sync()
            (outcome,) = synced["endpoints"]
            assert outcome["ok"], outcome
            print(f"\npush to transformers serve, {training}: {outcome['seconds'] * 1e3:.0f} ms")
            folder = server.data / "published" / synced["version"]
            answers[synced["version"]] = said(engine, folder)
            assert answers[synced["version"]] == expected(model, trainee.folder(synced["path"]), whole=whole)
        assert len(set(answers.values())) == 3
        kept = list(answers)[-1 if whole else -2 :]
        assert operator.endpoints()[0]["versions"] == sorted(kept)
        check_restart(server, operator, engine, {name: answers[name] for name in kept})
        operator.http.close()


def check_restart(server: Processes, operator: Operator, engine: EngineProcess, answers: dict[str, str]) -> None:
    """A folder is there again as soon as the engine is."""
    engine.kill()
    assert not operator.endpoints()[0]["reachable"]
    engine.start()
    engine.ready()
    assert operator.endpoints()[0]["reachable"]
    for version, text in answers.items():
        assert said(engine, server.data / "published" / version) == text


@pytest.fixture
async def case(engine: EngineProcess, model: Path, tmp_path: Path) -> AsyncIterator[Case]:
    first, second = made_weights(model, tmp_path)
    settings = InferenceSettings(allow=(engine.url,))
    client = EngineClient(InferenceEndpoint("e", engine.url, "127.0.0.1", "transformers", 0.0), settings)
    adapter = TransformersEngine(client, settings, tmp_path / "published", model)

    async def ask(version: ModelVersion) -> str:
        return said(engine, tmp_path / "published" / version.name)

    yield Case(adapter, first, second, ask)
    await adapter.close()


@pytest.mark.parametrize("check", ADAPTERS)
async def test_the_suite_of_engines(case: Case, check: Callable[[Case], Awaitable[None]]) -> None:
    await check(case)
