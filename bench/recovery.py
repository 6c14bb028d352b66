"""The first result after `kill -9` of a rank: `python -m bench recovery`.

A client of the `tinker` SDK trains for a while, as fast as the server takes it. Then it hands in a few steps, rank 0 is
killed, and the clock runs until the first result that the dead ranks did not have. Nothing may be lost: every step has
to end.

Bare is the least that a killed process costs: a new one that imports torch and transformers, loads the same model and
computes one batch forward and backward. It has no state to restore.

- `recovery.N`: after so many seconds of load, beside bare. The note says what was restored and replayed.

The ratio is bare by ours, so higher is better. The limit is the goal.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
from collections import deque
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import msgspec
import psutil  # type: ignore[import-untyped]
import tinker
from tinker import types

from bench.interleave import interleave
from bench.report import Report
from bench.train.processes import ENVIRONMENT, served
from bench.train.protocol import LORA_RANK, MODEL, Server, Work, draw, save
from bench.train.tinker import ADAM, datum
from strata.train.runner.model.tiny import TinyModel, make

LIMIT_S: Final = 20.0
AHEAD: Final = 4
"""Steps that the client hands in before it waits for the first."""
PENDING: Final = 6
"""Steps that wait when the rank is killed."""
STALE_S: Final = 0.5
"""A result that comes sooner after the kill was on its way already: no group starts in that time."""
WORK: Final = Work(layers=4, hidden=256, vocabulary=2048, documents=4, length=256)
SETTINGS: Final = """
[server]
port = 0
data = "{folder}/d"
[model]
path = "{folder}/model"
name = "{name}"
[ranks]
nproc = {ranks}
"""
_BARE: Final = """
import sys
import numpy, torch
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32, local_files_only=True)
rows = torch.from_numpy(numpy.load(sys.argv[2], allow_pickle=False)[0, 0]).long()
model(input_ids=rows, labels=rows).loss.backward()
"""


QUICK: Final = {2.0: 2, 60.0: 2}
LONG: Final = {60.0: 3, 1800.0: 1}
"""By the seconds of load before each, how many kills."""


async def run(report: Report, *, quick: bool) -> None:
    # A short path: Unix sockets lie below it.
    folder = Path(tempfile.mkdtemp(prefix="strata-bench-"))
    shape = TinyModel(layers=WORK.layers, hidden=WORK.hidden, vocabulary=WORK.vocabulary, context=WORK.length)
    try:
        await asyncio.to_thread(make, folder / "model", shape)
        save(folder / "batches.npy", draw(WORK))
        report.progress("the ranks start")
        settings = SETTINGS.format(folder=folder, name=MODEL, ranks=WORK.ranks)
        async with served(folder, settings) as server:
            model = await asyncio.to_thread(_training_client, server)
            for load_s, kills in (QUICK if quick else LONG).items():
                await _case(report, folder, model, load_s, kills)
    finally:
        await asyncio.to_thread(shutil.rmtree, folder)


async def _case(report: Report, folder: Path, model: tinker.TrainingClient, load_s: float, kills: int) -> None:
    """Load for so long, then kill; once more for every kill."""
    batch = [datum(document) for rank in draw(WORK)[0] for document in rank]
    replayed: list[str] = []

    async def ours() -> float:
        report.progress(f"{load_s:g} seconds of load, then a kill")
        before = (folder / "ours.log").stat().st_size
        took_s = await asyncio.to_thread(_load_and_kill, folder, model, batch, load_s)
        replayed.append(_describe(folder / "ours.log", before))
        return took_s

    async def bare() -> float:
        return await _new_process(folder)

    found = await interleave(ours, bare, kills, better="lower", warm_up=False)
    report.add(f"recovery.{load_s:g}", "s", found, limit=LIMIT_S, note="; ".join(replayed))


def _training_client(server: Server) -> tinker.TrainingClient:
    service = tinker.ServiceClient(base_url=server.url, api_key=server.key)
    return service.create_lora_training_client(base_model=MODEL, rank=LORA_RANK, seed=1)


def _load_and_kill(folder: Path, model: tinker.TrainingClient, batch: list[types.Datum], load_s: float) -> float:
    waiting: deque[Any] = deque()
    until_s = perf_counter() + load_s
    while perf_counter() < until_s:
        waiting += [model.forward_backward(batch, "cross_entropy"), model.optim_step(ADAM)]
        while len(waiting) > 2 * AHEAD:
            waiting.popleft().result()
    for _ in range(PENDING):
        waiting += [model.forward_backward(batch, "cross_entropy"), model.optim_step(ADAM)]
    waiting.popleft().result()
    killed_s = perf_counter()
    os.kill(rank0_pid(folder), signal.SIGKILL)
    first_s = 0.0
    for each in waiting:
        each.result()
        took_s = perf_counter() - killed_s
        if not first_s and took_s > STALE_S:
            first_s = took_s
    return first_s


def server_processes(folder: Path) -> list[psutil.Process]:
    """All processes of the server with the settings in this folder."""
    file = str(folder / "server.toml")
    return [each for each in psutil.process_iter(["name", "cmdline"]) if file in (each.info["cmdline"] or ())]


def rank0_pid(folder: Path) -> int:
    (pid,) = [process.pid for process in server_processes(folder) if process.info["name"] == "strata-rank-0"]
    return int(pid)


def _describe(log: Path, after: int) -> str:
    """What the orchestrator logged of the recovery."""
    lines = log.read_bytes()[after:].splitlines()
    events = [msgspec.json.decode(line) for line in lines if line.startswith(b"{")]
    replays = [each["dispatches"] for each in events if each.get("event") == "replay_finished"]
    committed = [each for each in events if each.get("event") == "model_snapshot_committed"]
    return f"{len(committed)} snapshots, {sum(replays)} dispatches replayed"


async def _new_process(folder: Path) -> float:
    started_s = perf_counter()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _BARE, str(folder / "model"), str(folder / "batches.npy"), env=ENVIRONMENT
    )
    if await process.wait():
        raise RuntimeError("the bare process failed; see above")
    return perf_counter() - started_s
