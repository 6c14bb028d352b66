"""Engines that `strata serve` starts: real processes that are killed, stopped and cannot start."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import pytest_asyncio

from soak.train.server import ServeOptions, ServeProcess, gone, serving
from strata.sdk.train import Sampler, TrainingServer
from strata.train.core.facts import OperationAccepted, OperationFinished, SampleReturned, SampleRouted
from strata.train.core.sampling import SampleOperation
from strata.train.launch.supervised_process import descendants
from tests.shell.train_endpoints.fake_engines import engine_settings
from tests.support.fake_vllm import make_fake_package

pytestmark = [pytest.mark.timeout(180), pytest.mark.asyncio(loop_scope="module")]
PATIENCE_S: Final = 60.0
SEEDS: Final = range(40)
MODULE: Final = b"vllm.entrypoints.openai.api_server"


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_fake_package(tmp_path_factory.mktemp("package"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(package: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ServeProcess]:
    """Two engines; each sample takes a while, so that it is under way when an engine dies."""
    more = engine_settings(package, "count = 2", "stall_s = 2.0", 'arguments = ["--fake-delay-s", "0.3"]')
    folder = tmp_path_factory.mktemp("e")
    async with serving(folder / "s", folder / "none", "pretending", options=ServeOptions(more=more)) as found:
        yield found


def engines(server: ServeProcess) -> dict[str, int]:
    """The processes of the engines, by the name of their sockets."""
    found = {}
    for pid in descendants(server.launcher_pid):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if MODULE in words:
            found[Path(os.fsdecode(words[words.index(b"--uds") + 1])).name] = pid
    return found


async def get(server: ServeProcess, path: str) -> httpx.Response:
    async with httpx.AsyncClient(base_url=server.url, headers={"X-API-Key": server.key}, timeout=30) as http:
        return (await http.get(path)).raise_for_status()


async def reported(server: ServeProcess) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in (await get(server, "/api/v1/status")).json()["engines"]}


async def ready_after(server: ServeProcess, name: str, starts: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            found = (await reported(server))[name]
            if found["state"] == "ready" and found["starts"] > starts:
                return
            await asyncio.sleep(0.1)


async def test_engines_are_started_registered_and_shown_and_their_key_is_in_no_argument(server: ServeProcess) -> None:
    assert {name: (each["state"], each["starts"]) for name, each in (await reported(server)).items()} == {
        "engine-0": ("ready", 1),
        "engine-1": ("ready", 1),
    }
    key = server.settings.engine_key.read_bytes().strip()
    assert server.settings.engine_key.stat().st_mode & 0o077 == 0
    found = engines(server)
    assert sorted(found) == ["engine-0", "engine-1"]
    for pid in found.values():
        assert key not in Path(f"/proc/{pid}/cmdline").read_bytes()
        assert b"VLLM_API_KEY=" + key in Path(f"/proc/{pid}/environ").read_bytes()
        assert b"STRATA_" not in Path(f"/proc/{pid}/environ").read_bytes()
    socket = server.settings.engine_socket("engine-0")
    async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=str(socket))) as http:
        assert (await http.post("http://engine/v1/load_lora_adapter", json={})).status_code == 401
    text = (await get(server, "/metrics")).text
    assert 'strata_train_engine_ready{engine="engine-1"} 1.0' in text


def draw(sampler: Sampler) -> list[list[list[int]]]:
    """Prompts of many first blocks, so that all engines get some."""
    futures = [sampler.sample([seed, 2, 3], 2, max_tokens=4, seed=seed) for seed in SEEDS]
    return [[list(each.tokens) for each in future.result()] for future in futures]


async def test_samples_survive_the_death_of_engines_each_once_and_from_their_own_weights(
    server: ServeProcess,
) -> None:
    def work(disturb: Any) -> tuple[Any, Any]:
        with TrainingServer(server.url, server.key) as client:
            model = client.create_model("tiny", rank=8)
            first = model.sampler().result()
            undisturbed = draw(first)
            model.optim_step(1e-2).result()
            second = model.sampler().result()
            disturb()
            again, newer = draw(first), draw(second)
            assert draw(second) == newer
            return (undisturbed, again), newer

    stop = asyncio.Event()
    started = asyncio.Event()
    loop = asyncio.get_running_loop()

    async def kill_engines() -> int:
        """Five times, each when both run again."""
        await started.wait()
        deaths = 0
        while not stop.is_set() and deaths < 5:
            found = engines(server)
            if len(found) == 2:
                before = (await reported(server))[name := f"engine-{deaths % 2}"]["starts"]
                os.kill(found[name], signal.SIGKILL)
                deaths += 1
                await ready_after(server, name, before)
            await asyncio.sleep(0.1)
        return deaths

    killing = asyncio.create_task(kill_engines())
    (before, after), newer = await asyncio.to_thread(work, lambda: loop.call_soon_threadsafe(started.set))
    stop.set()
    deaths = await killing
    assert deaths >= 1
    assert before == after
    assert all(one != other for one, other in zip(before, newer, strict=True))
    text = (await get(server, "/metrics")).text
    assert 'returned_samples_total{to="engine"}' in text, "no sample was under way when an engine died"
    assert 'returned_samples_total{to="ranks"}' not in text


async def test_an_engine_that_hangs_is_restarted(server: ServeProcess) -> None:
    before = (await reported(server))["engine-1"]["starts"]
    os.kill(engines(server)["engine-1"], signal.SIGSTOP)
    await ready_after(server, "engine-1", before)
    assert any("did not reply" in each["reason"] for each in server.logged("engine_stuck"))


async def test_engines_end_with_their_launcher_and_the_journal_has_each_sample_once(server: ServeProcess) -> None:
    """The last one."""
    assert len(engines(server)) == 2
    pids = descendants(server.launcher_pid)
    os.kill(server.launcher_pid, signal.SIGKILL)
    assert await gone(pids) == []
    facts = await server.journaled()
    asked = [
        fact.future_id
        for fact in facts
        if isinstance(fact, OperationAccepted) and isinstance(fact.operation, SampleOperation)
    ]
    ended = [fact.future_id for fact in facts if isinstance(fact, OperationFinished) and fact.future_id in asked]
    assert sorted(ended) == sorted(asked)
    assert len(asked) == 4 * len(SEEDS)
    assert {fact.future_id for fact in facts if isinstance(fact, SampleRouted)} == set(asked)
    assert all(fact.again for fact in facts if isinstance(fact, SampleReturned)), "the ranks drew nothing"
