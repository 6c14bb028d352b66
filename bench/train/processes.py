"""The processes of `bench train`: the server as the command line starts it, the bare loop, and a `tinker` client."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import psutil  # type: ignore[import-untyped]
import zmq

from bench.interleave import Side
from bench.load_process import STRATA
from bench.train.devices import largest_memory, process_tree
from bench.train.protocol import MODEL, BenchCommand, BenchResult, Server, Work, draw, save
from strata.base.settings import process_environment
from strata.train.key_database import KEY_FILE
from strata.train.runner.model.tiny import TinyModel, make
from strata.train.settings import ADDRESS_FILE

T = TypeVar("T")

START_S: Final = 180.0
STOP_S: Final = 60.0
ANSWER_MS: Final = 1_800_000
SETTINGS: Final = """
[server]
port = 0
data = "{folder}/d"
log_level = "warning"
[model]
path = "{model}"
name = "{name}"
training = "{work.training}"
dtype = "{work.dtype}"
max_tokens_per_row = {work.row_tokens}
[ranks]
nproc = {work.ranks}
"""
CUDA_VARIABLES: Final = ("CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH")
ENVIRONMENT: Final = {
    "PATH": os.defpath,
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "GLOO_SOCKET_IFNAME": "lo",
    **{name: value for name, value in process_environment().items() if name in CUDA_VARIABLES},
}
"""The same for both sides: one thread for each rank, and what they say to each other stays on this machine."""


class Bare:
    """The plain loop, one order at a time. A round trip is a message to rank 0 and its answer, as bare as ZMQ is."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._decode = msgspec.msgpack.Decoder(BenchResult).decode

    def carry_out(self, order: BenchCommand) -> BenchResult:
        self._socket.send(msgspec.msgpack.encode(order))
        if not self._socket.poll(ANSWER_MS):
            raise RuntimeError("the plain loop does not answer")
        return self._decode(self._socket.recv())


class TinkerClient:
    """The SDK in a process of its own, as its users have it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def carry_out(self, order: BenchCommand) -> BenchResult:
        sent, answers = self._process.stdin, self._process.stdout
        assert sent is not None
        assert answers is not None
        sent.write(msgspec.json.encode(order) + b"\n")
        await sent.drain()
        line = await answers.readline()
        if not line:
            raise RuntimeError("the client died; see above")
        return msgspec.json.decode(line, type=BenchResult)


@dataclass(frozen=True)
class Sides:
    work: Work
    parameters: int
    batches: Path
    server: Server
    bare: Bare
    pids: Mapping[Side, int]

    def cpu_s(self, side: Side) -> float:
        return tree_cpu_s(self.pids[side])

    def memory_bytes(self, side: Side) -> int | None:
        """Of the process with most, which is one of its ranks."""
        return largest_memory(process_tree(self.pids[side]))


def tree_cpu_s(pid: int) -> float:
    """Of all processes of a server or loop together: what disturbs the machine does not show in it."""
    times = [psutil.Process(each).cpu_times() for each in process_tree(pid)]
    return float(sum(each.user + each.system for each in times))


def settings_of(folder: Path, model: Path, work: Work) -> str:
    """Of a server whose files lie in `folder`."""
    return SETTINGS.format(folder=folder, model=model, name=MODEL, work=work)


def shape_of(work: Work, context: int) -> TinyModel:
    return TinyModel(
        family="qwen3_moe" if work.experts else "llama",
        layers=work.layers,
        hidden=work.hidden,
        vocabulary=work.vocabulary,
        context=context,
        experts=work.experts or 1,
    )


@asynccontextmanager
async def sides(work: Work) -> AsyncIterator[Sides]:
    """Both groups of ranks with the same model, alive and idle until they are told something."""
    # A short path: Unix sockets lie below it.
    folder = Path(tempfile.mkdtemp(prefix="strata-bench-"))
    shape = shape_of(work, max(work.length, 64))
    try:
        parameters = await asyncio.to_thread(make, folder / "model", shape)
        batches, settings = folder / "batches.npy", folder / "server.toml"
        save(batches, draw(work))
        settings.write_text(settings_of(folder, folder / "model", work), encoding="utf-8")
        endpoint = f"ipc://{folder}/bare"
        torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={work.ranks}")
        model = ("--model", str(folder / "model"), "--training", work.training, "--dtype", work.dtype)
        loop = ("-m", "bench.train.bare", *model)
        async with (
            _process(STRATA, "serve", str(settings), log=folder / "ours.log") as serving,
            _process(
                *torchrun, *loop, "--batches", str(batches), "--endpoint", endpoint, log=folder / "bare.log"
            ) as looping,
            _connected(endpoint) as bare,
        ):
            server = await _until(serving, folder / "ours.log", lambda: _address(folder / "d", serving.pid))
            ready = asyncio.create_task(asyncio.to_thread(bare.carry_out, BenchCommand(kind="empty")))
            await _until(looping, folder / "bare.log", lambda: ready.done() or None)
            yield Sides(work, parameters, batches, server, bare, {"ours": serving.pid, "bare": looping.pid})
            await asyncio.to_thread(bare.carry_out, BenchCommand(kind="end"))
    finally:
        await asyncio.to_thread(shutil.rmtree, folder)


@asynccontextmanager
async def served(folder: Path, settings: str, program: str = STRATA) -> AsyncIterator[Server]:
    """Ours alone, or that of an older commit; `folder` has a short path, because sockets lie in it."""
    file = folder / "server.toml"
    file.write_text(settings, encoding="utf-8")
    async with _process(program, "serve", str(file), log=folder / "ours.log") as serving:
        yield await _until(serving, folder / "ours.log", lambda: _address(folder / "d", serving.pid))


@asynccontextmanager
async def tinker_client(of: Sides) -> AsyncIterator[TinkerClient]:
    command = (sys.executable, "-m", "bench.train.tinker", "--url", of.server.url, "--batches", str(of.batches))
    process = await asyncio.create_subprocess_exec(
        *command,
        # A key is a secret: not in the arguments, which everybody on the machine can read.
        env={**ENVIRONMENT, "TINKER_API_KEY": of.server.key, "TINKER_TELEMETRY": "0"},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield TinkerClient(process)
    finally:
        await _stop(process)


@asynccontextmanager
async def _connected(endpoint: str) -> AsyncIterator[Bare]:
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.linger = 0
        socket.connect(endpoint)
        yield Bare(socket)


def _address(data: Path, pid: int) -> Server | None:
    """The launcher starts the API server when the ranks are there: who listens is ready."""
    address, key = data / ADDRESS_FILE, data / KEY_FILE
    if not address.exists() or not key.exists():
        return None
    return Server(address.read_text(encoding="utf-8").strip(), key.read_text(encoding="utf-8").strip(), pid)


async def _until(process: asyncio.subprocess.Process, log: Path, ready: Callable[[], T | None]) -> T:
    ending = f"was not ready within {START_S:g} seconds"
    try:
        async with asyncio.timeout(START_S):
            while process.returncode is None:
                found = ready()
                if found is not None:
                    return found
                await asyncio.sleep(0.05)
            ending = "ended before it was ready"
    except TimeoutError:
        pass
    said = (await asyncio.to_thread(log.read_text, encoding="utf-8"))[-4000:]
    raise RuntimeError(f"a process of the bench {ending}:\n{said}")


@asynccontextmanager
async def _process(*command: str, log: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            *command, env=ENVIRONMENT, stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=out
        )
    try:
        yield process
    finally:
        await _stop(process)


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
    try:
        async with asyncio.timeout(STOP_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
