"""Real ranks and an engine that take turns on shared devices: who is awake when, while any of them is killed."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable
from datetime import datetime
from pathlib import Path
from typing import Final

import pytest
import pytest_asyncio

from soak.train.server import ServeOptions, ServeProcess, make_model, serving, until
from strata.sdk.train import TrainingServer
from strata.train.core import ops
from strata.train.core.facts import DeviceTurnRequested, DeviceTurnTaken
from strata.train.endpoints.publisher import Publisher
from strata.train.settings import load_settings
from tests.shell.train_endpoints.fake_engines import engine_settings
from tests.shell.train_endpoints.test_engine_supervision import draw, engines
from tests.shell.train_orchestrator.leaders import leading
from tests.support.fake_vllm import make_fake_package
from tests.support.manual_clock import ManualClock
from tests.support.memory_journal import MemoryJournal

pytestmark = [pytest.mark.timeout(240), pytest.mark.asyncio(loop_scope="module")]
RANKS: Final = {"ranks_may_start": "awake", "devices_taken": "awake", "devices_yielded": "asleep"}
"""What rank 0, and who starts the ranks, log when they have the devices or leave them."""

MOMENTS: Final = ("device_turn_requested", "devices_yielded", "device_turn_taken")
"""The side that has the devices is to leave them; ranks sleep, which is not in the journal yet; the other side has them
and is not awake yet."""
PATIENCE_S: Final = 60.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ServeProcess]:
    folder = tmp_path_factory.mktemp("t")
    model, package = folder / "model", make_fake_package(folder / "package")
    await asyncio.to_thread(make_model, model)
    more = engine_settings(
        package,
        'share_devices = "turns"',
        "turn_s = 1.0",
        f'arguments = ["--fake-delay-s", "0.05", "--fake-ledger", "{folder}/ledger"]',
    )
    async with serving(folder / "s", model, "real", options=ServeOptions(more=more)) as found:
        yield found


def ledger(server: ServeProcess) -> Path:
    return server.folder.parent / "ledger"


def kill(server: ServeProcess, side: str) -> None:
    """All processes of a side, at once. They have left the devices then."""
    pids = server.pids("rank") if side == "ranks" else [*engines(server).values()]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    with ledger(server).open("a", encoding="utf-8") as file:
        file.write(f"{time.time()} {side.removesuffix('-0')} dead\n")


def moves(server: ServeProcess) -> list[tuple[float, str, str]]:
    """When which side was awake, asleep or dead, in order."""
    found = []
    for line in ledger(server).read_text(encoding="utf-8").splitlines():
        at, name, condition = line.split()
        found.append((float(at), "engines" if name.startswith("engine") else name, condition))
    for event, condition in RANKS.items():
        for logged in server.logged(event):
            assert not logged.get("failure")
            # Times of the log are cut to milliseconds.
            cut_s = 0.001 if condition == "awake" else 0.0
            found.append((datetime.fromisoformat(logged["ts"]).timestamp() + cut_s, "ranks", condition))
    return sorted(found)


def check_never_both_awake(server: ServeProcess) -> int:
    """Returns how often the devices went from one side to the other."""
    awake: set[str] = set()
    last, changes = "", 0
    for at, side, condition in moves(server):
        (awake.add if condition == "awake" else awake.discard)(side)
        assert len(awake) < 2, f"both are awake at {at}: {moves(server)}"
        if condition == "awake" and side != last:
            last, changes = side, changes + 1
    return changes


def train(client: TrainingServer, stop: Callable[[int], bool]) -> None:
    """Each step makes other weights, and the engine samples from them: twice the same."""
    model = client.create_model("tiny", rank=8)
    drawn: list[list[list[list[int]]]] = []
    while not stop(len(drawn)):
        model.optim_step(1e-2).result()
        sampler = model.sampler().result()
        drawn.append(draw(sampler))
        assert draw(sampler) == drawn[-1]
    assert all(one != other for one, other in itertools.pairwise(drawn))


async def work(server: ServeProcess, stop: Callable[[int], bool]) -> None:
    def run() -> None:
        with TrainingServer(server.url, server.key) as client:
            train(client, stop)

    await asyncio.to_thread(run)


async def test_they_are_never_awake_together_while_a_client_trains_and_samples_in_turn(server: ServeProcess) -> None:
    await work(server, lambda steps: steps == 2)
    assert check_never_both_awake(server) >= 4


async def test_they_are_not_when_one_is_killed_in_any_part_of_a_handover_either(server: ServeProcess) -> None:
    """The last one: it ends the server."""
    killed = threading.Event()
    working = asyncio.create_task(work(server, lambda _: killed.is_set()))
    try:
        for moment, victim in itertools.product(MOMENTS, ("ranks", "engines", "orchestrator")):
            before = len(server.logged(moment))
            async with asyncio.timeout(PATIENCE_S):
                await until(lambda moment=moment, before=before: len(server.logged(moment)) > before)  # type: ignore[misc]
            if victim == "orchestrator":
                server.kill("orchestrator")
            else:
                kill(server, victim)
    finally:
        killed.set()
        await working
    assert check_never_both_awake(server) >= len(MOMENTS)
    await check_journal(server)


async def check_journal(server: ServeProcess) -> None:
    """It has each turn once and in order. A journal in SQLite is read when its server has ended."""
    await server.stop()
    facts = [each for each in await server.journaled() if isinstance(each, DeviceTurnRequested | DeviceTurnTaken)]
    taken = [each for each in facts if isinstance(each, DeviceTurnTaken)]
    assert [each.number for each in facts] == [number // 2 + 1 for number in range(len(facts))]
    assert [each.side for each in taken] == [("engines", "ranks")[number % 2] for number in range(len(taken))]
    assert [bool(each.group) for each in taken] == [each.side == "engines" for each in taken]


async def test_only_tasks_of_the_engines_that_share_devices_hold_up_a_turn(tmp_path: Path) -> None:
    clock = ManualClock()
    store = await leading(MemoryJournal(clock), clock)
    file = tmp_path / "server.toml"
    engine = '[inference]\nengine = "vllm"\nshare_devices = "turns"\n'
    file.write_text(f'[server]\ndata = "{tmp_path}"\n[model]\npath = "tiny"\n{engine}', encoding="utf-8")

    async def keep(result: ops.Result) -> ops.Result:
        return result

    over = asyncio.Event()

    async def work() -> None:
        await over.wait()

    publisher = Publisher(load_settings(file, environ={}), store, keep)
    publisher._start_task("sample elsewhere", work, frozenset({"elsewhere"}))
    idle = [publisher.is_idle]
    publisher._start_task("sample here", work, frozenset({"engine-0"}))
    idle.append(publisher.is_idle)
    over.set()
    await clock.advance(0.0)
    assert [*idle, publisher.is_idle] == [True, False, True]
