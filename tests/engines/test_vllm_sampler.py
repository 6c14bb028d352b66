"""GRPO on sums with vLLM as the sampler of a server that starts it, while it is killed again and again.

`STRATA_TEST_ENGINE_KILLS` is how often; 20 unless set.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Final

import pytest

from soak.train.server import ServeOptions, ServeProcess, gone, make_model, serving
from strata.base.settings import process_environment
from strata.sdk.train import Sampler, TrainingServer
from strata.train.core.facts import OperationAccepted, OperationFinished, SampleReturned, SampleRouted
from strata.train.core.ops import SampleDone
from strata.train.core.sampling import SampleOperation
from strata.train.launch.supervised_process import descendants
from tests.engines import processes

pytestmark = [pytest.mark.timeout(7200), pytest.mark.filterwarnings("ignore")]
EXAMPLE: Final = Path(__file__).parents[2] / "examples" / "rl_arithmetic"
KILLS: Final = int(process_environment().get("STRATA_TEST_ENGINE_KILLS", "20"))
CALM: Final = 8
"""Steps after the last kill: their speed is compared."""
GAP: Final = 1e-4
"""Nats between sampler and trainer, in the mean."""
NOISE: Final = 0.03
"""Of a reward that is the mean of 256 answers."""
RANK: Final = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    make_model(folder)
    return folder


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(EXAMPLE)
    yield importlib.import_module("with_strata")
    for name in ("with_strata", "sums"):
        sys.modules.pop(name, None)


def vllm_settings() -> str:
    return "\n".join(
        (
            "[inference]",
            'engine = "vllm"',
            f'python = "{processes.vllm_programs() / "python"}"',
            'arguments = ["--max-model-len", "512", "--max-num-seqs", "64", "--max-loras", "2"]',
            'environment = {VLLM_CPU_KVCACHE_SPACE = "1", OMP_NUM_THREADS = "1"}',
            "",
        )
    )


@dataclass
class Learned:
    rewards: list[float] = field(default_factory=list)
    gap_sum: float = 0.0
    gap_max: float = 0.0
    tokens: int = 0
    took_s: list[Sequence[float]] = field(default_factory=list)
    """In each step to publish the weights, to draw the samples, and to train with them."""
    samples: int = 0

    @property
    def gap(self) -> float:
        return self.gap_sum / self.tokens

    @property
    def calm_s(self) -> list[float]:
        return [fmean(part) for part in zip(*self.took_s[-CALM:], strict=True)]

    def __str__(self) -> str:
        published_s, drawn_s, trained_s = self.calm_s
        parts = f"published in {published_s:.3f} s, drawn in {drawn_s:.3f} s, trained in {trained_s:.3f} s"
        return f"{60 / sum(self.calm_s):.1f} steps per minute without kills ({parts})"


def learn(server: ServeProcess, example: ModuleType, steps: int, before_draw: Callable[[int], None]) -> Learned:
    learned = Learned()
    with TrainingServer(server.url, server.key) as client:
        model = client.create_model("tiny", rank=RANK, seed=example.SEED)
        example.warm_up(model)
        for step in range(steps):
            began_s = time.monotonic()
            sampler: Sampler = model.sampler().result()
            published_s = time.monotonic()
            before_draw(step)
            groups = example.draw(sampler, step)
            drawn_s = time.monotonic()
            learned.samples += sum(map(len, groups))
            learned.rewards.append(fmean(each.reward for group in groups for each in group))
            data = [example.datum(*each) for group in groups for each in example.advantages(group)]
            metrics = model.forward_backward(data, "importance_sampling").result().metrics if data else {}
            learned.gap_sum += metrics.get("sampler_gap:sum", 0.0)
            learned.gap_max = max(learned.gap_max, metrics.get("sampler_gap:max", 0.0))
            learned.tokens += int(metrics.get("sampled_tokens:sum", 0))
            model.optim_step(example.RATE).result()
            learned.took_s.append((published_s - began_s, drawn_s - published_s, time.monotonic() - drawn_s))
    return learned


def engine_pids(server: ServeProcess) -> list[int]:
    """The first process of the engine, and those that it has started."""
    socket = os.fsencode(server.settings.engine_socket("engine-0"))
    for pid in descendants(server.launcher_pid)[::-1]:
        if socket in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
            return [pid, *descendants(pid)]
    return []


async def test_grpo_with_an_engine_that_is_killed_learns_as_with_the_built_in_sampler(
    model: Path, example: ModuleType, tmp_path: Path
) -> None:
    steps = KILLS + CALM
    async with serving(tmp_path / "b", model, "real") as server:
        built_in = await asyncio.to_thread(learn, server, example, steps, lambda _: None)
    killed: list[list[int]] = []

    def kill_soon(step: int) -> None:
        """While the samples of this step are drawn, or wait."""
        if step >= KILLS:
            return

        def kill() -> None:
            pids = engine_pids(server)
            killed.append(pids)
            # By turns its first process and the one that computes.
            os.kill(pids[0 if step % 2 == 0 else -1], signal.SIGKILL)

        threading.Timer(0.005 * (step % 10), kill).start()

    options = ServeOptions(more=vllm_settings(), start_s=600.0)
    async with serving(tmp_path / "v", model, "real", options=options) as server:
        with_vllm = await asyncio.to_thread(learn, server, example, steps, kill_soon)
        left = descendants(server.launcher_pid)
        os.kill(server.launcher_pid, signal.SIGKILL)
        assert await gone([*left, *(pid for pids in killed for pid in pids)]) == []
        facts = await server.journaled()
    returned = [fact for fact in facts if isinstance(fact, SampleReturned)]
    print(
        f"\n{len(killed)} kills, {len(returned)} samples were drawn anew; rewards {built_in.rewards[-1]:.3f} built-in, "
        f"{with_vllm.rewards[-1]:.3f} vLLM; gap of vLLM: mean {with_vllm.gap:.2e}, max {with_vllm.gap_max:.2e} nats "
        f"over {with_vllm.tokens} tokens (built-in {built_in.gap:.2e}, {built_in.gap_max:.2e}); "
        f"built-in: {built_in}; vLLM: {with_vllm}"
    )
    assert len(killed) == KILLS
    assert all(killed)
    asked = {
        fact.future_id
        for fact in facts
        if isinstance(fact, OperationAccepted) and isinstance(fact.operation, SampleOperation)
    }
    ended = Counter(fact.future_id for fact in facts if isinstance(fact, OperationFinished) and fact.future_id in asked)
    assert len(asked) == steps * len(example.PROBLEMS)
    assert ended == Counter(asked), "each sample has one result"
    results = [fact.result for fact in facts if isinstance(fact, OperationFinished) and fact.future_id in asked]
    assert all(isinstance(result, SampleDone) for result in results)
    assert {fact.future_id for fact in facts if isinstance(fact, SampleRouted)} == asked, "the engine drew all of them"
    assert all(fact.again for fact in returned)
    assert with_vllm.samples == built_in.samples
    assert with_vllm.gap < GAP
    assert fmean(with_vllm.rewards[-CALM:]) >= fmean(built_in.rewards[-CALM:]) - NOISE
