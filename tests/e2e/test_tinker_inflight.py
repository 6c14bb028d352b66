"""In-flight samplers of a real server, with the `tinker` SDK as it is published and with ours: an asynchronous loop of
reinforcement learning, kills under running samples, and every token against PEFT and transformers."""

from __future__ import annotations

import asyncio
import gc
import itertools
import time
import warnings
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import pytest
import pytest_asyncio
import tinker
import torch
from peft import PeftModel
from tinker import types
from transformers import AutoModelForCausalLM

from soak.train.server import ServeOptions, ServeProcess, Victim, make_model, serving, until
from strata.base.errors import StrataError
from strata.sdk.train import Datum, Sample, TrainingServer
from strata.train.core import facts, ops
from strata.train.core.sampling import DrawnSequence, SampledSequence, decode_result
from strata.train.payload import Payloads
from tests.support.tinker_sessions import end_session

pytestmark = [
    # The SDK leaves sockets to the garbage collector, whose complaint would be taken for ours.
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
]
PROMPT: Final = [72, 101, 108, 108, 111]
TOKENS: Final = 12
SAMPLES: Final = 32
STEPS: Final = 30
LEARNED: Final = 0.5
NOT_LEARNED: Final = 0.3
SLICE: Final = 4
LONG: Final = 120
CLOSE: Final = 3e-5
PATIENCE_S: Final = 300.0
VICTIMS: Final[Sequence[Victim]] = ("rank", "orchestrator", "api")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    make_model(folder)
    return folder


@pytest_asyncio.fixture(loop_scope="module")
async def server(tmp_path: Path, model: Path) -> AsyncIterator[ServeProcess]:
    options = ServeOptions(more=f"[sampling]\nslice_steps = {SLICE}\n")
    async with serving(tmp_path / "s", model, "real", options=options) as found:
        yield found


@pytest.fixture
def client(server: ServeProcess) -> Iterator[tinker.ServiceClient]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TINKER_TELEMETRY", "0")
        service = tinker.ServiceClient(base_url=server.url, api_key=server.key)
        yield service
    with warnings.catch_warnings(action="ignore"):
        gc.collect()


def reward(tokens: Sequence[int]) -> float:
    return sum(token % 8 == 3 for token in tokens) / len(tokens)


def datum(tokens: Sequence[int], logprobs: Sequence[float], advantage: float) -> types.Datum:
    before = len(PROMPT) - 1
    inputs: dict[str, Any] = {
        "target_tokens": np.asarray([*PROMPT[1:], *tokens], np.int64),
        "logprobs": np.asarray([0.0] * before + list(logprobs), np.float32),
        "advantages": np.asarray([0.0] * before + [advantage] * len(tokens), np.float32),
    }
    return types.Datum(
        model_input=types.ModelInput.from_ints([*PROMPT, *tokens[:-1]]),
        loss_fn_inputs={name: types.TensorData.from_numpy(array) for name, array in inputs.items()},
    )


def draw(sampler: tinker.SamplingClient, count: int, tokens: int) -> Any:
    params = types.SamplingParams(max_tokens=tokens, stop=[])
    return sampler.sample(types.ModelInput.from_ints(PROMPT), count, params)


async def drawn_by(server: ServeProcess, model_id: str) -> Mapping[str, Sequence[SampledSequence]]:
    """The results of the samples of a session, as they are stored. The server has ended."""
    session, payloads = model_id.partition(":")[0], Payloads(server.settings.payloads)
    found = {}
    finished = [each for each in await server.journaled() if isinstance(each, facts.OperationFinished)]
    for fact in finished:
        if isinstance(fact.result, ops.SampleDone) and fact.future_id.startswith(session):
            found[fact.future_id] = decode_result(payloads.read(fact.result.payload)).sequences
    return found


@pytest.mark.proves("The `tinker` SDK trains with in-flight samplers, asynchronously, unmodified")
async def test_an_asynchronous_loop_learns_from_samples_that_change_weights_on_their_way(
    client: tinker.ServiceClient, server: ServeProcess
) -> None:
    def learn() -> tuple[list[float], str]:
        training = client.create_lora_training_client(base_model="tiny", rank=8, seed=3).result()
        sampler = training.save_weights_and_get_sampling_client(kind="inflight").result(PATIENCE_S)
        running, rewards = [draw(sampler, SAMPLES, TOKENS) for _ in range(2)], []
        for _ in range(STEPS):
            sequences = running.pop(0).result(PATIENCE_S).sequences
            running.append(draw(sampler, SAMPLES, TOKENS))
            given = np.asarray([reward(each.tokens) for each in sequences])
            rewards.append(float(given.mean()))
            advantages = (given - given.mean()) / (given.std() + 1e-6) / SAMPLES
            data = [
                datum(each.tokens, each.logprobs, float(advantage))
                for each, advantage in zip(sequences, advantages, strict=True)
            ]
            training.forward_backward(data, "importance_sampling")
            training.optim_step(types.AdamParams(learning_rate=1e-2))
            # Nothing waits for the save but the next sample.
            sampler = training.save_weights_and_get_sampling_client(kind="inflight").result(PATIENCE_S)
        return rewards, training._guaranteed_model_id()

    rewards, model_id = await asyncio.to_thread(learn)
    await asyncio.to_thread(end_session, client)
    await server.stop()
    results = await drawn_by(server, model_id)
    counts = [len(each.versions) for sequences in results.values() for each in sequences]
    print(f"reward {rewards[0]:.3f} to {np.mean(rewards[-3:]):.3f}; {np.mean(np.asarray(counts) > 1):.0%} of samples "
          f"of several versions, {max(counts)} at most")  # fmt: skip
    assert rewards[0] < NOT_LEARNED
    assert np.mean(rewards[-3:]) > LEARNED
    assert max(counts) > 1


class Books:
    """What the journal says of the samples of one session."""

    def __init__(self, session: str) -> None:
        self.durable: dict[str, DrawnSequence] = {}
        self.running: set[str] = set()
        self.ended: dict[str, ops.Result] = {}
        self.resumed = 0
        self.idle: list[str] = []
        self.most_between = 0
        """Dispatches between two slices."""
        self._between = 0
        self._session = session
        self._added: dict[int, Sequence[str]] = {}

    def take(self, fact: facts.Fact) -> None:
        match fact:
            case facts.Dispatched():
                self._dispatch(fact)
            case facts.SliceEnded():
                self._slice(fact)
            case facts.RanksRenewed():
                self.running.clear()
            case facts.OperationFinished() if fact.future_id in self.running:
                assert fact.future_id not in self.ended, "it ended twice"
                self.ended[fact.future_id] = fact.result
                self.running.discard(fact.future_id)
            case _:
                pass

    def _dispatch(self, fact: facts.Dispatched) -> None:
        if fact.slice is None:
            self._between += bool(self.running)
        else:
            self.most_between, self._between = max(self.most_between, self._between), 0
            added = [each for each in fact.future_ids if each.startswith(self._session)]
            self.running.update(added)
            self.resumed += sum(each in self.durable for each in added)

    def _slice(self, fact: facts.SliceEnded) -> None:
        for future_id, parts in fact.drawn.items():
            for part in parts:
                known = self.durable.get(future_id, DrawnSequence())
                assert part.start == known.length, f"{future_id} was drawn again, or has a gap"
                self.durable[future_id] = known.plus(part.added)
        self.idle += [each for each in self.running if each not in fact.drawn]


class Campaign:
    """A client that trains and saves, others that sample, and somebody who kills."""

    def __init__(self, server: ServeProcess, training: Any, saves: int, kills: int) -> None:
        self.killed: list[Victim] = []
        self.saved = [save(training)]
        self._done = False
        self._server = server
        self._training = training
        self._saves = saves
        self._kills = kills

    async def run(self, samples: int) -> int:
        """Returns how many samples were drawn."""
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(samples + 8))
        sampling = [asyncio.create_task(self._keep_sampling()) for _ in range(samples)]
        killing = asyncio.create_task(self._keep_killing())
        await asyncio.to_thread(self._train)
        await killing
        self._done = True
        return sum(await asyncio.gather(*sampling))

    def _train(self) -> None:
        for _ in range(self._saves - 1):
            self._training.forward_backward([datum([9, 8, 7, 6], [-1.0] * 4, 1.0)], "importance_sampling")
            self._training.optim_step(types.AdamParams(learning_rate=2e-3))
            self.saved.append(save(self._training))

    def _sample(self) -> None:
        (one,) = draw(self.saved[-1], 1, LONG).result(PATIENCE_S).sequences
        assert len(one.tokens) == len(one.logprobs) == LONG

    async def _keep_sampling(self) -> int:
        count = 0
        while not self._done:
            await asyncio.to_thread(self._sample)
            count += 1
        return count

    async def _keep_killing(self) -> None:
        """Spread over the saves; each of the three in turn."""
        for number in range(self._kills):
            await until(partial(self._has_saved, (number + 1) * self._saves // (self._kills + 1)))
            victim = VICTIMS[number % len(VICTIMS)]
            await until(partial(self._server.kill, victim))
            self.killed.append(victim)

    def _has_saved(self, times: int) -> bool:
        return len(self.saved) >= times


@pytest.mark.proves(
    "In-flight saves under running samples, and kills of ranks, orchestrator and API servers, lose no sample, draw "
    "none twice, and let none idle for more than a slice"
)
@pytest.mark.parametrize(("saves", "samples", "kills"), [(12, 16, 3), (100, 64, 20)])
async def test_kills_under_saves_and_running_samples_lose_and_double_nothing(
    client: tinker.ServiceClient, server: ServeProcess, saves: int, samples: int, kills: int
) -> None:
    training: Any = await asyncio.to_thread(
        lambda: client.create_lora_training_client(base_model="tiny", rank=8, seed=5).result()
    )
    model_id = training._guaranteed_model_id()
    campaign = await asyncio.to_thread(Campaign, server, training, saves, kills)
    started_s = time.monotonic()
    count = await campaign.run(samples)
    took_s = time.monotonic() - started_s
    await asyncio.to_thread(end_session, client)
    await server.stop()
    books = Books(model_id.partition(":")[0])
    for fact in await server.journaled():
        books.take(fact)
    results = await drawn_by(server, model_id)
    for future_id, (sequence,) in results.items():
        durable = books.durable.get(future_id, DrawnSequence())
        assert sequence.tokens.startswith(durable.tokens), "what was durable was drawn again"
        assert sequence.logprobs.startswith(durable.logprobs)
        assert len(sequence.tokens) == 4 * LONG
    several = np.mean([len({span.version for span in each.versions}) for (each,) in results.values()])
    print(f"{saves} saves, {count} samples, {campaign.killed} killed in {took_s:.0f} s: {books.resumed} resumed, "
          f"{several:.1f} versions a sample, {books.most_between} dispatches between two slices")  # fmt: skip
    assert (len(campaign.killed), len(campaign.saved)) == (kills, saves)
    assert count == len(results)
    assert not [each for each in books.ended.values() if isinstance(each, ops.Failed)]
    assert books.resumed > 0
    assert not books.idle
    assert books.most_between <= 1


def save(training: Any) -> Any:
    return training.save_weights_and_get_sampling_client(kind="inflight").result(PATIENCE_S)


@pytest.mark.proves("Every token of an in-flight sample is that of the versions that its spans name, within 3e-5 nats")
@pytest.mark.parametrize("cache", ["keep", "recompute"])
async def test_every_token_is_that_of_peft_with_the_weights_that_its_spans_name(
    server: ServeProcess, model: Path, cache: str
) -> None:
    def work() -> tuple[dict[int, str], list[Sample], dict[str, Any], str]:
        with TrainingServer(server.url, server.key) as ours:
            trained = ours.create_model("tiny", rank=8, seed=1, user_metadata={"inflight_cache": cache})
            versions: dict[int, str] = {}
            samples, samplers, stale = [], [], []
            for number in range(8):
                trained.forward_backward([Datum([9, 8, 7, 6, 5], [8, 7, 6, 5, 4 + number])])
                trained.optim_step(learning_rate=2e-2)
                name = f"{cache}-{number}"
                trained.save_for_sampling(name)
                versions[trained._numbers.next] = name
                sampler = trained.sampler(inflight=True).result()
                samplers.append(sampler)
                samples.append(sampler.sample(PROMPT, 2, max_tokens=LONG, seed=number, stop=[]))
                if number == 2:
                    stale.append(sampler.sample(PROMPT, max_tokens=LONG, max_staleness=0, stop=[]))
            shown = httpx.get(
                f"{server.url}/api/v1/samplers/{samplers[-1].sampler_id}", headers={"X-API-Key": server.key}
            )
            with pytest.raises(StrataError, match="max_staleness is 0"):
                stale[0].result()
            return versions, list(itertools.chain(*(each.result() for each in samples))), shown.json(), trained.model_id

    versions, samples, shown, model_id = await asyncio.to_thread(work)
    assert shown["kind"] == "inflight"
    base: Any = AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.float32)
    references: dict[int, Any] = {}
    for version, name in versions.items():
        (folder,) = server.settings.checkpoint_folder.glob(f"*/sampler_weights/{name}@*")
        references[version] = PeftModel.from_pretrained(base, str(folder)).merge_and_unload()
        base = AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.float32)
    distance = max(float(np.abs(np.asarray(each.logprobs) - follow(references, each)).max()) for each in samples)
    spans = [span for each in samples for span in each.versions[1:]]
    print(f"{cache}: {len(samples)} samples, {len(spans)} swaps, largest distance {distance:.2e} nats")
    assert distance <= CLOSE
    assert len(spans) > len(samples) / 2
    assert all(span.recomputed == (cache == "recompute") for span in spans)
    assert model_id


@torch.no_grad()
def follow(references: Mapping[int, Any], sample: Sample) -> np.ndarray[Any, Any]:
    """The log probability of each token, by unmodified models that follow the spans."""
    found, place, waiting, cache = list[float](), 0, list(PROMPT), None
    for span in sample.versions:
        if span.recomputed:
            waiting, cache = [*PROMPT, *sample.tokens[:place]], None
        for token in sample.tokens[place : place + span.tokens]:
            out = references[span.version](torch.tensor([waiting]), past_key_values=cache, use_cache=True)
            waiting, cache = [token], out.past_key_values
            found.append(float(torch.log_softmax(out.logits[0, -1].float(), -1)[token]))
        place += span.tokens
    return np.asarray(found)
