"""The training server beside TuFT: `python -m bench peers`.

TuFT is the published package in an environment of its own, which the first run makes in the user's cache. It is made
for GPUs: without its pins of torch and vLLM, and with the answers of `bench/peers/serve.py`, its backend `hf` trains on
a CPU. Ray listens on all interfaces, so TuFT runs in namespaces of its own, with a loopback interface alone.

Each side has one process that computes, one arithmetic thread, the same model, an adapter of the same rank and scale,
and a client of the same `tinker` SDK. Ours commits each operation to its journal; TuFT keeps nothing by default.

- `forward_backward`, `optim_step`: milliseconds of one operation, by the SDK: 64 tokens, and a step after each.
- `tokens`: tokens a second of fine-tuning, with every step submitted before the first is awaited.

The notes have the processor time of each server for one operation or 1,000 tokens, because others may use the machine,
and the last one what became of 12 operations when the process that computes was killed.
"""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Final

import msgspec
import psutil  # type: ignore[import-untyped]

from bench.interleave import Better, Comparison, Measure, interleave
from bench.load_process import Clients, started
from bench.recovery import rank0_pid, server_processes
from bench.report import Report
from bench.train.processes import ENVIRONMENT, served
from bench.train.protocol import LORA_ALPHA, MODEL, Work, draw, save
from strata.train.runner.model.tiny import TinyModel, make
from tests.support.venvs import cached_venv

TUFT: Final = "0.2.2"
# What TuFT names without a bound, in versions that it was seen to run with; it takes no newer SDK than this.
PACKAGES: Final = (
    "torch==2.13.0",
    "transformers==5.22.2",
    "accelerate==1.15.0",
    "peft==0.20.0",
    "ray==2.60.0",
    "tinker==0.25.0",
    "fastapi<0.137",
    "nvidia-ml-py",
    "omegaconf",
    "opentelemetry-exporter-otlp",
    "opentelemetry-instrumentation-fastapi",
    "opentelemetry-instrumentation-logging",
    "psutil",
    "typer",
    "uvicorn[standard]",
)
WORK: Final = Work(layers=4, hidden=256, vocabulary=2048, documents=16, length=256, ranks=1)
RANK: Final = 8
SAME_LOSS: Final = 1e-4
KEY: Final = "tml-bench"
URL: Final = "http://127.0.0.1:10610"
"""In the namespace of TuFT, where every port is free."""
NAMESPACES: Final = ("unshare", "-Urnpf", "--mount-proc", "--kill-child")
OURS: Final = """
[server]
port = 0
data = "{folder}/d"
log_level = "warning"
[model]
path = "{folder}/model"
name = "{name}"
[ranks]
nproc = 1
"""
THEIRS: Final = """
checkpoint_dir: {folder}/checkpoints
authorized_users: {{{key}: bench}}
supported_models:
- model_name: {name}
  model_path: {folder}/model
  max_model_len: {length}
  max_lora_rank: {rank}
  # Ours has an alpha of 32.
  lora_alpha_ratio: {ratio}
  micro_batch_size: {documents}
  capabilities: [training]
"""


class _Loss(msgspec.Struct, frozen=True, tag="loss"):
    """No fields."""


class _Passes(msgspec.Struct, frozen=True, tag="passes"):
    count: int


class _Steps(msgspec.Struct, frozen=True, tag="steps"):
    count: int


class _Tokens(msgspec.Struct, frozen=True, tag="tokens"):
    steps: int


class _Survive(msgspec.Struct, frozen=True, tag="survive"):
    pid: int


class Side:
    """A server with its client, and the processor time of its turns."""

    def __init__(self, client: Clients, processes: Callable[[], Iterable[psutil.Process]]) -> None:
        self.client = client
        self._processes = processes
        self.spent_ms: list[float] = []

    def measure(self, order: msgspec.Struct, units: float) -> Measure:
        async def once() -> float:
            before_s = self._cpu_s()
            (value,) = await self.client.carry_out(order)
            self.spent_ms.append(1e3 * (self._cpu_s() - before_s) / units)
            return value

        return once

    def _cpu_s(self) -> float:
        times = [process.cpu_times() for process in self._processes()]
        return float(sum(each.user + each.system for each in times))


async def run(report: Report, *, quick: bool) -> None:
    rounds, count, steps = (5, 30, 3) if quick else (15, 60, 6)
    # A short path: Unix sockets lie below it.
    folder = Path(tempfile.mkdtemp(prefix="strata-bench-"))
    shape = TinyModel(layers=WORK.layers, hidden=WORK.hidden, vocabulary=WORK.vocabulary, context=WORK.length)
    try:
        report.progress("TuFT is installed, if it is not there")
        python = await asyncio.to_thread(_install)
        await asyncio.to_thread(make, folder / "model", shape)
        save(folder / "batches.npy", draw(WORK)[:, 0])
        report.progress("both servers start")
        async with _ours(python, folder) as ours, _theirs(python, folder) as theirs:
            await _check_loss(ours.client, theirs.client)
            for case, order in (("forward_backward", _Passes(count)), ("optim_step", _Steps(count))):
                found, note = await _in_turns(ours, theirs, order, rounds, units=count, better="lower")
                report.add(case, "ms", found, note=note)
            trained = steps * WORK.step_tokens / 1000
            found, note = await _in_turns(ours, theirs, _Tokens(steps), rounds, units=trained)
            report.progress("the processes that compute are killed")
            own = await ours.client.carry_out(_Survive(rank0_pid(folder)))
            other = await theirs.client.carry_out(_Survive(0))
            report.add("tokens", "tokens/s", found, note=f"{note}; killed: {_fate(own)}, TuFT: {_fate(other)}")
    finally:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


async def _in_turns(
    ours: Side, theirs: Side, order: msgspec.Struct, rounds: int, *, units: float, better: Better = "higher"
) -> tuple[Comparison, str]:
    for side in (ours, theirs):
        side.spent_ms.clear()
    found = await interleave(ours.measure(order, units), theirs.measure(order, units), rounds, better=better)
    spent = f"server {median(ours.spent_ms):.1f} ms, TuFT {median(theirs.spent_ms):.1f} ms"
    return found, f"{spent}; load {os.getloadavg()[0]:.1f}"


async def _check_loss(ours: Clients, theirs: Clients) -> None:
    """Both sides do the same work: before anything is trained, the same batch has the same loss."""
    (own,), (other,) = await ours.carry_out(_Loss()), await theirs.carry_out(_Loss())
    if not math.isclose(own, other, rel_tol=SAME_LOSS):
        raise RuntimeError(f"both sides should have the same loss: ours is {own}, the other {other}")


def _fate(values: list[float]) -> str:
    ended, failed, first_s, last_s = values
    times = f", the first after {first_s:.1f} s, the last after {last_s:.1f} s" if ended else ""
    return f"{ended:.0f} of {ended + failed:.0f} operations ended{times}"


def _install() -> str:
    return str(cached_venv(f"tuft-{TUFT}", PACKAGES, bare=[f"tuft=={TUFT}"]) / "python")


@asynccontextmanager
async def _ours(python: str, folder: Path) -> AsyncIterator[Side]:
    async with served(folder, OURS.format(folder=folder, name=MODEL)) as server:
        settings = {**ENVIRONMENT, "TINKER_API_KEY": server.key, "TINKER_TELEMETRY": "0"}
        async with started(*_client(python, server.url, folder), settings=settings) as load:
            yield Side(Clients(load), lambda: server_processes(folder))


@asynccontextmanager
async def _theirs(python: str, folder: Path) -> AsyncIterator[Side]:
    config = folder / "tuft.yaml"
    ratio = LORA_ALPHA // RANK
    text = THEIRS.format(
        folder=folder, key=KEY, name=MODEL, rank=RANK, ratio=ratio, length=WORK.length, documents=WORK.documents
    )
    config.write_text(text, encoding="utf-8")
    settings = {
        **ENVIRONMENT,
        "HOME": str(folder),
        "RAY_TMPDIR": str(folder),
        "RAY_USAGE_STATS_ENABLED": "0",
        # Its workers would give way to ours.
        "RAY_worker_niceness": "0",
        "TINKER_API_KEY": KEY,
        "TINKER_TELEMETRY": "0",
    }
    server = (python, str(Path(__file__).with_name("serve.py")), "launch", "--config", str(config))
    inside = ("sh", "-c", 'ip link set lo up && exec "$@"', "sh", *_client(python, URL, folder))
    command = (*NAMESPACES, *inside, "--serve", *server, "--log-level", "error")
    async with started(*command, settings=settings) as load:
        # All that runs in the namespaces, without the client, their first process.
        yield Side(Clients(load), lambda: psutil.Process(load.pid).children(recursive=True)[1:])


def _client(python: str, url: str, folder: Path) -> tuple[str, ...]:
    client = str(Path(__file__).with_name("client.py"))
    return (python, client, "--url", url, "--batches", str(folder / "batches.npy"))
