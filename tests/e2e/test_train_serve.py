"""`strata serve`: starts everything in order, ends everything in order, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import httpx
import pytest

from soak.train.server import ServeProcess, Victim, serving
from strata.train.launch.supervised_process import descendants

pytestmark = pytest.mark.timeout(300)
STRATA: Final = str(Path(sys.executable).with_name("strata"))
PATIENCE_S: Final = 60.0


async def healthy(server: ServeProcess) -> bool:
    async with httpx.AsyncClient(base_url=server.url, headers={"X-API-Key": server.key}, timeout=30) as http:
        return (await http.get("/health")).status_code == 200


async def gone(pids: list[int]) -> None:
    """A process that is not our child can only be looked at."""
    async with asyncio.timeout(PATIENCE_S):
        while any(running(pid) for pid in pids):
            await asyncio.sleep(0.05)


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def test_a_server_ends_in_order_and_leaves_no_process_behind(tmp_path: Path) -> None:
    async with serving(tmp_path / "s", tmp_path / "none", "pretending") as server:
        assert await healthy(server)
        pids = descendants(server.launcher_pid)
        assert len(pids) == 2
        assert await server.stop() == 0
        assert not any(running(pid) for pid in pids)


async def test_processes_end_when_their_launcher_is_killed(tmp_path: Path) -> None:
    async with serving(tmp_path / "s", tmp_path / "none", "pretending") as server:
        pids = descendants(server.launcher_pid)
        os.kill(server.launcher_pid, signal.SIGKILL)
        await gone(pids)


@pytest.mark.proves("Never: the death of any worker ends the service")
async def test_an_api_server_and_an_orchestrator_come_back_and_the_ranks_do_not_notice(tmp_path: Path) -> None:
    async with serving(tmp_path / "s", tmp_path / "none", "pretending") as server:
        before = server.group()
        victims: tuple[Victim, ...] = ("api", "orchestrator")
        for victim in victims:
            assert server.kill(victim)
            async with asyncio.timeout(PATIENCE_S):
                while not await answers(server):
                    await asyncio.sleep(0.05)
        assert server.group() == before


async def answers(server: ServeProcess) -> bool:
    try:
        return await healthy(server)
    except httpx.TransportError:
        return False


def configured(folder: Path, model: bytes | None, weights: bytes = b"") -> Path:
    """A settings file for a model with this config.json, or for one that is not there."""
    if model is not None:
        (folder / "m").mkdir()
        (folder / "m" / "config.json").write_bytes(model)
        if weights:
            (folder / "m" / "model.safetensors").write_bytes(weights)
    file = folder / "server.toml"
    file.write_text(
        f'[server]\ndata = "{folder}/d"\nport = 0\nlog_level = "error"\n[model]\npath = "{folder}/m"\n'
        '[ranks]\nbackend = "gloo"\n',
        encoding="utf-8",
    )
    return file


def serve(config: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([STRATA, "serve", str(config)], capture_output=True, text=True, timeout=240, check=False)


def test_ranks_that_cannot_start_end_the_server_with_a_word_why(tmp_path: Path) -> None:
    ended = serve(configured(tmp_path, b"{}"))
    assert ended.returncode == 3
    assert "the ranks died 2 times before they were ready" in ended.stderr


def test_a_model_that_is_not_there_is_refused_in_one_line(tmp_path: Path) -> None:
    ended = serve(configured(tmp_path, None))
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"strata: there is no model in {tmp_path}/m")


def test_a_model_that_does_not_fit_is_refused_in_one_line(tmp_path: Path) -> None:
    header = b'{"w":{"dtype":"F32","shape":[10000000,1000000],"data_offsets":[0,0]}}'
    ended = serve(configured(tmp_path, b"{}", len(header).to_bytes(8, "little") + header))
    assert ended.returncode == 2
    # The weights, and what FSDP gathers of them for a pass: all, as they are in no block.
    assert ended.stderr.startswith("strata: m needs 8e+04 GB, and there are ")
