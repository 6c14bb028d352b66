"""vLLM as it is published, told of weights by a whole training server, and asked for samples of them by it."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import torch
from transformers import AutoTokenizer

from strata.train.core.state import InferenceEndpoint
from strata.train.endpoints.client import EngineClient
from strata.train.endpoints.engine import ModelVersion
from strata.train.endpoints.vllm import VllmEngine
from strata.train.inference_settings import InferenceSettings
from strata.train.runner.model.tiny import TinyModel, make
from tests.engines import processes
from tests.engines.conformance import SAMPLERS, Case
from tests.engines.processes import EngineProcess
from tests.engines.reference import greedy, load, made_weights
from tests.engines.trainee import Operator, Trainee, told
from tests.shell.train_api.processes import serving

pytestmark = [pytest.mark.timeout(1800), pytest.mark.filterwarnings("ignore")]
PROMPT: Final = [72, 101, 108, 108, 111]
TEXT: Final = [72, 101, 108, 108, 111, 44, 32, 119, 111, 114, 108, 100, 33, 10, 65, 66, 67, 68, 69, 70]
TOKENS: Final = 24
SAME: Final = 1e-3
"""Nats by which two programs may differ that compute the same in 32 bits."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    make(folder, TinyModel())
    return folder


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    found = processes.vllm(model, tmp_path_factory.mktemp("vllm") / "log").start()
    try:
        yield found
    finally:
        found.close()


@pytest.fixture
def plain_engine(model: Path, tmp_path: Path) -> Iterator[EngineProcess]:
    found = processes.vllm(model, tmp_path / "log", lora=False).start()
    try:
        yield found
    finally:
        found.close()


def settings(engine: EngineProcess, *more: str) -> str:
    return "\n".join(("poll_s = 2.0", "[inference]", f'allow = ["{engine.url}"]', "sample = true", *more, ""))


@pytest.fixture(scope="module")
def operator(engine: EngineProcess, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    with serving(tmp_path_factory.mktemp("t") / "s", model, ranks=1, server=settings(engine)) as server:
        print(f"\nvLLM is up after another {engine.ready():.1f} s")
        found = Operator(server)
        assert found.post("/add_inference_endpoint", url=engine.url, engine="vllm", name="engine") == {"name": "engine"}
        yield found
        found.http.close()


def asked(engine: EngineProcess, **body: Any) -> list[int]:
    """The engine itself, greedily."""
    body |= {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    reply = httpx.post(f"{engine.url}/v1/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    found: list[int] = reply.json()["choices"][0]["token_ids"]
    return found


def requests(engine: EngineProcess) -> float:
    """That the engine has answered so far."""
    text = httpx.get(f"{engine.url}/metrics", timeout=30).text
    return sum(float(each) for each in re.findall(r"^vllm:request_success_total\{.*\} (\S+)$", text, re.MULTILINE))


def only(outcome: dict[str, Any]) -> dict[str, Any]:
    assert "endpoints" in outcome, outcome
    (found,) = outcome["endpoints"]
    assert found["ok"], found
    return dict(found)


def test_an_adapter_is_pushed_and_gives_the_tokens_that_hugging_face_gives(
    operator: Operator, engine: EngineProcess, model: Path
) -> None:
    # Before there is any adapter: on processors, vLLM applies the one in its last place to what asks for none.
    untrained = asked(engine, model="tiny")
    trainee = Trainee(operator)
    trainee.learn(TEXT, 6)
    first = trainee.sync()
    trainee.learn(TEXT, 6)
    second = trainee.sync()
    print(f"\npush of an adapter: {only(first)['seconds'] * 1e3:.1f} ms, {only(second)['seconds'] * 1e3:.1f} ms")
    answers = {}
    for synced in (first, second):
        expected = greedy(load(model, trainee.folder(synced["path"])), PROMPT, TOKENS)
        answers[synced["version"]] = asked(engine, model=synced["version"])
        assert answers[synced["version"]] == expected
    assert untrained == greedy(load(model), PROMPT, TOKENS)
    assert len({tuple(each) for each in (*answers.values(), untrained)}) == 3


def test_a_sampler_of_pushed_weights_is_sampled_by_the_engine_and_says_what_the_trainer_says(
    operator: Operator, engine: EngineProcess
) -> None:
    trainee = Trainee(operator, seed=2)
    trainee.learn(TEXT, 6)
    synced = trainee.sync()
    sampler = trainee.sampler(synced["path"])
    (by_ranks,) = trainee.sample(sampler, PROMPT, max_tokens=TOKENS, temperature=0.5, seed=3)
    before = requests(engine)
    (likeliest,) = trainee.sample(sampler, PROMPT, max_tokens=TOKENS, temperature=0)
    drawn = trainee.sample(sampler, PROMPT, 8, max_tokens=64, seed=3)
    again = trainee.sample(sampler, PROMPT, 8, max_tokens=64, seed=3)
    other = trainee.sample(sampler, PROMPT, 8, max_tokens=64, seed=4)
    assert requests(engine) > before
    assert len(by_ranks.tokens) == TOKENS
    assert likeliest.tokens == asked(engine, model=synced["version"])
    assert [each.tokens for each in drawn] == [each.tokens for each in again] != [each.tokens for each in other]
    found = trainee.gap(PROMPT, [*drawn, *other])
    print(f"\ngap between trainer and vLLM, adapter: {told(found)}")
    assert 0 < found["max"] < SAME
    trainee.learn(TEXT, 2)
    moved = trainee.gap(PROMPT, [*drawn, *other])
    print(f"after two steps of training: {told(moved)}")
    assert moved["max"] > 10 * SAME


def test_old_versions_are_let_go_of_and_the_newest_two_stay(operator: Operator, engine: EngineProcess) -> None:
    trainee = Trainee(operator, seed=3)
    synced = []
    for _ in range(4):
        trainee.learn(TEXT, 1)
        synced.append(trainee.sync())
    versions = [each["version"] for each in synced]
    assert [each for one in synced for each in only(one)["retired"]] == versions[:2]
    (listed,) = operator.endpoints()
    assert [each for each in listed["versions"] if each in versions] == versions[2:]
    assert listed["reachable"]


def test_an_engine_that_was_started_anew_gets_the_newest_weights_again(
    operator: Operator, engine: EngineProcess
) -> None:
    trainee, other = Trainee(operator, seed=4), Trainee(operator, seed=5)
    for each in (trainee, other):
        each.learn(TEXT, 4)
    synced, others = trainee.sync(), other.sync()
    expected = asked(engine, model=synced["version"])
    sampler = trainee.sampler(synced["path"])
    engine.kill()
    dead = trainee.sync(name="while-dead")
    assert [each["ok"] for each in dead["endpoints"]] == [False]
    print(f"\na dead engine: {dead['endpoints'][0]['message']}")
    (by_ranks,) = trainee.sample(sampler, PROMPT, max_tokens=TOKENS, temperature=0)
    assert by_ranks.tokens == expected
    assert [each["reachable"] for each in operator.endpoints()] == [False]
    engine.start()
    print(f"started anew in {engine.ready():.1f} s")
    assert operator.endpoints()[0]["versions"] == []
    (by_engine,) = trainee.sample(sampler, PROMPT, max_tokens=TOKENS, temperature=0)
    assert by_engine.tokens == expected
    assert requests(engine) == 1
    assert operator.endpoints()[0]["versions"] == [synced["version"]]
    pushed = only(trainee.sync(name="after"))
    assert others["version"] in pushed["message"]
    assert others["version"] in operator.endpoints()[0]["versions"]


@pytest.fixture
async def case(engine: EngineProcess, model: Path, tmp_path: Path) -> AsyncIterator[Case]:
    first, second = made_weights(model, tmp_path)
    engine.ready()
    settings = InferenceSettings(allow=(engine.url,))
    adapter = VllmEngine(EngineClient(InferenceEndpoint("e", engine.url, "127.0.0.1", "vllm", 0.0), settings), settings)

    async def ask(version: ModelVersion) -> list[int]:
        return asked(engine, model=version.name)

    oracles = {version.name: load(model, version.folder) for version in (first, second)}
    tokenizer = AutoTokenizer.from_pretrained(model)

    def after(version: ModelVersion, tokens: Sequence[int]) -> Any:
        with torch.no_grad():
            return oracles[version.name](torch.tensor([list(tokens)])).logits[0, -1]

    def decode(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(list(tokens)))

    yield Case(adapter, first, second, ask, after, decode)
    for version in (first, second):
        await adapter.unload_version(version.name)
    await adapter.close()


@pytest.mark.parametrize("check", SAMPLERS)
async def test_the_suite_of_engines(case: Case, check: Callable[[Case], Awaitable[None]]) -> None:
    await check(case)


def test_a_whole_model_takes_the_bases_place(
    engine: EngineProcess,
    model: Path,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With an engine that has no adapters: those of another base would mean nothing."""
    engine.kill()
    engine = request.getfixturevalue("plain_engine")
    monkeypatch.setenv("STRATA_MODEL_TRAINING", "full")
    with serving(tmp_path_factory.mktemp("f") / "s", model, ranks=1, server=settings(engine)) as server:
        engine.ready()
        whole = Operator(server)
        whole.post("/add_inference_endpoint", url=engine.url, name="engine")
        trainee = Trainee(whole, lora=False)
        before = asked(engine, model="tiny")
        answers, path = [], ""
        for _ in range(2):
            trainee.learn(TEXT, 3, rate=3e-3)
            synced = trainee.sync()
            path = synced["path"]
            print(f"\npush of a full fine-tune: {only(synced)['seconds'] * 1e3:.1f} ms")
            answers.append(asked(engine, model="tiny"))
            assert answers[-1] == greedy(load(trainee.folder(path)), PROMPT, TOKENS)
        assert len({tuple(each) for each in (before, *answers)}) == 3
        sampler, count = trainee.sampler(path), requests(engine)
        drawn = trainee.sample(sampler, PROMPT, 8, max_tokens=64, seed=3)
        assert requests(engine) > count
        found = trainee.gap(PROMPT, drawn)
        print(f"gap between trainer and vLLM, full fine-tune: {told(found)}")
        assert 0 < found["max"] < SAME
        whole.http.close()
