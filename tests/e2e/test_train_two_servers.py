"""Two API servers on one port: one that is killed is started again, and a client that polls notices nothing."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from soak.train.server import ServeProcess, serving
from strata.base.settings import process_environment

pytestmark = [pytest.mark.timeout(300), pytest.mark.proves("API servers are killed and their clients get every result")]
PATIENCE_S = 60.0
STEPS = 6


class Client:
    """The `tinker` SDK in a process of its own, as its users have it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def hear(self, count: int) -> list[float | None]:
        assert self.process.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            return [json.loads(await self.process.stdout.readline()) for _ in range(count)]


async def start(server: ServeProcess) -> Client:
    environment = {**process_environment(), "TINKER_API_KEY": server.key, "TINKER_TELEMETRY": "0"}
    command = (sys.executable, "-m", "tests.e2e.tinker_steps", server.url, str(STEPS))
    return Client(
        await asyncio.create_subprocess_exec(*command, env=environment, stdout=asyncio.subprocess.PIPE, limit=1 << 20)
    )


def connections(pid: int) -> int:
    found = psutil.Process(pid).net_connections(kind="tcp")
    return sum(each.status == psutil.CONN_ESTABLISHED for each in found)


async def both(server: ServeProcess, without: int = 0) -> list[int]:
    """The API servers, once there are two of them."""
    async with asyncio.timeout(PATIENCE_S):
        while len(pids := [pid for pid in server.pids("api") if pid != without]) != 2:
            await asyncio.sleep(0.05)
    return pids


async def test_api_servers_are_killed_one_after_the_other_and_a_tinker_client_gets_every_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRATA_SERVER_API_SERVERS", "2")
    async with serving(tmp_path / "s", tmp_path / "none", "pretending") as server:
        first, second = await both(server)
        client = await start(server)
        heard = await client.hear(1)
        cut = connections(first)
        os.kill(first, signal.SIGKILL)
        heard += await client.hear(1)
        (third,) = set(await both(server, without=first)) - {second}
        heard += await client.hear(2)
        cut += connections(second)
        os.kill(second, signal.SIGKILL)
        assert cut > 0, "nobody was connected to those that were killed"
        heard += await client.hear(2 * STEPS - len(heard))
        assert await client.process.wait() == 0
        # Each done once and in its order: every step changes what the next pass finds.
        assert len(set(heard[::2])) == STEPS
        assert set(heard[1::2]) == {None}
        applied = [line.split(" ")[1] for line in server.applied_file.read_text(encoding="utf-8").splitlines()]
        assert [int(name.rpartition(":")[2]) for name in applied[-2 * STEPS :]] == [*range(1, 2 * STEPS + 1)]
        assert third in await both(server, without=second)
