"""A group of ranks as a process, real or pretending, and somebody who speaks to its rank 0."""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal, TypeVar

import zmq.asyncio

from strata.base.settings import process_environment
from strata.train.core import commands, model_options, ops
from strata.train.core.pack import pack
from strata.train.launch.launcher import rank_command
from strata.train.launch.supervised_process import descendants
from strata.train.link.rank import ConnectRequest, RankConnection, connect_rank
from strata.train.plan.defaults import resolve_settings
from strata.train.plan.devices import Hardware
from strata.train.settings import ServerSettings, load_settings

RANKS: Final = 2
RUN: Final = "train/conformance"
PATIENCE_S: Final = 90.0
Heard = TypeVar("Heard", bound=commands.FromRank)

TINY: Final = """
import sys
from pathlib import Path
from strata.train.runner.model.tiny import TinyModel, make
make(Path(sys.argv[1]), TinyModel())
"""


class Group:
    """One life of a group of ranks. Numbers and generations go on from test to test, as they do in a server."""

    def __init__(self, kind: Literal["pretending", "real"], folder: Path) -> None:
        self.folder = folder
        self.generation = 0
        self.number = 0
        self.durable = 0
        self.requests = 0
        self.file = folder / "server.toml"
        model = folder / "tiny"
        if kind == "real":
            subprocess.run([sys.executable, "-c", TINY, str(model)], check=True, timeout=120)
        self.file.write_text(
            f'[server]\ndata = "{folder}/d"\nlog_level = "warning"\n[model]\npath = "{model}"\nmax_lora_rank = 8\n'
            f'slots = 16\n[ranks]\nnproc = {RANKS}\nbackend = "gloo"\n',
            encoding="utf-8",
        )
        self.settings: ServerSettings = load_settings(self.file, environ={})
        pretending = (sys.executable, "-m", "tests.support.fake_ranks", "--settings", str(self.file))
        command = rank_command(resolve_settings(self.settings, Hardware(), None), self.file, process_environment())
        self._arguments = command.arguments if kind == "real" else pretending
        self._environment = dict(command.environment)
        self.start()

    def start(self) -> None:
        """All ranks, from nothing. Numbers go on, so that the new ones are told of dispatches that they never saw."""
        self.process = subprocess.Popen(self._arguments, env=self._environment)

    def kill(self) -> None:
        """All of them, whatever they are doing."""
        for pid in [self.process.pid, *descendants(self.process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(PATIENCE_S)

    async def ended(self) -> int:
        return await asyncio.to_thread(self.process.wait, PATIENCE_S)


class Speaker:
    """Speaks to rank 0 as an orchestrator would, one connection after the other."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._context = zmq.asyncio.Context()
        self._connection: RankConnection | None = None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._context.destroy(linger=0)

    async def say(self, message: commands.ToRank, kind: type[Heard]) -> Heard:
        assert self._connection is not None
        async with asyncio.timeout(PATIENCE_S):
            await self._connection.send(message)
            heard = await self._connection.receive()
        assert isinstance(heard, kind), heard
        return heard

    async def attach(self, *, generation: int | None = None, run: str = RUN) -> commands.AttachReply | commands.Fenced:
        """On a connection of its own, again until there is somebody to answer."""
        if generation is None:
            self.group.generation += 1
            generation = self.group.generation
        async with asyncio.timeout(PATIENCE_S):
            while True:
                # The listener only knows the order of requests; generations are checked in the handshake.
                self.group.requests += 1
                try:
                    async with asyncio.timeout(2.0):
                        opened = await connect_rank(
                            self._context,
                            self.group.settings.rank0,
                            None,
                            ConnectRequest(1, self.group.requests),
                        )
                except TimeoutError:
                    continue
                assert opened is not None
                if self._connection is not None:
                    self._connection.close()
                self._connection = opened
                return await self.say(commands.Attach(generation, run), commands.AttachReply | commands.Fenced)  # type: ignore[arg-type]

    async def garbage(self, data: bytes) -> None:
        assert self._connection is not None
        await self._connection._socket.send(data)

    def command(self, work: commands.Work, number: int | None = None) -> commands.DispatchCommand:
        if number is None:
            self.group.number += 1
            number = self.group.number
        return commands.DispatchCommand(self.group.generation, number, work, self.group.durable)

    async def do(self, work: commands.Work) -> commands.DispatchReply:
        return await self.say(self.command(work), commands.DispatchReply)

    async def until_reply(self, work: commands.Work) -> tuple[list[commands.SampleProgress], commands.DispatchReply]:
        """The reply, and what rank 0 says before it. After a health check nothing of this is left to be heard."""
        assert self._connection is not None
        progress: list[commands.SampleProgress] = []
        reply: commands.DispatchReply | None = None
        async with asyncio.timeout(PATIENCE_S):
            await self._connection.send(self.command(work))
            await self._connection.send(commands.RankRequest(self.group.generation, 1, commands.HealthCheck()))
            while not isinstance(heard := await self._connection.receive(), commands.HealthReply):
                if isinstance(heard, commands.SampleProgress):
                    progress.append(heard)
                else:
                    assert isinstance(heard, commands.DispatchReply), heard
                    reply = heard
        assert reply is not None
        return progress, reply

    async def hear(self, kind: type[Heard]) -> Heard:
        """What rank 0 says without being asked."""
        assert self._connection is not None
        async with asyncio.timeout(PATIENCE_S):
            heard = await self._connection.receive()
        assert isinstance(heard, kind), heard
        return heard

    async def one(self, work: commands.Work) -> ops.Result:
        (result,) = (await self.do(work)).results
        return result

    # Work

    async def create(self, model_id: str) -> str:
        lora = model_options.LoraConfig(rank=4, alpha=8.0, seed=7)
        created = await self.one(
            commands.ManageModel(ops.CreateModel(model_id, self.group.settings.model.base_model, lora))
        )
        assert created == ops.ModelCreated(model_id)
        return model_id

    def passes(
        self, items: Sequence[tuple[str, Sequence[Sequence[int]]]], *, forward_only: bool = False
    ) -> commands.PassCommand:
        made = [
            commands.PassItem(f"{model}:{place}", model, model_options.LossName.CROSS_ENTROPY, {}, encoded(tokens))
            for place, (model, tokens) in enumerate(items)
        ]
        lengths = [[len(each) for each in tokens] for _, tokens in items]
        rows = pack(lengths, ranks=RANKS, max_tokens_per_row=16, max_context=64).rows
        return commands.PassCommand(forward_only, made, rows)

    async def train(self, model: str, tokens: Sequence[Sequence[int]], *, forward_only: bool = False) -> ops.PassResult:
        return outputs(await self.one(self.passes([(model, tokens)], forward_only=forward_only)))

    async def step(self, model: str, seq: int = 1) -> ops.Result:
        return await self.one(
            commands.StepsCommand([ops.OptimStep(model, seq, model_options.AdamParams(learning_rate=0.01))])
        )


def encoded(batch: Sequence[Sequence[int]]) -> bytes:
    datums = []
    for tokens in batch:
        shape = (len(tokens),)
        targets = ops.Dense(ops.DType.I64, shape, array.array("q", [*tokens[1:], 5]).tobytes())
        weights = ops.Dense(ops.DType.F32, shape, array.array("f", [1.0] * len(tokens)).tobytes())
        inputs = {"target_tokens": targets, "weights": weights}
        datums.append(ops.Datum(array.array("i", tokens).tobytes(), inputs))
    return ops.encode_pass_data(ops.PassData(datums))


def outputs(result: ops.Result) -> ops.PassResult:
    assert isinstance(result, ops.PassDone), result
    assert isinstance(result.payload, ops.InlinePayload), "rank 0 sends results inline"
    return ops.decode_pass_result(result.payload.data)
