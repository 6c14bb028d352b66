"""The ranks as the launcher starts them: real processes, a real socket, and orchestrators that come and go."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Self

import numpy as np
import psutil  # type: ignore[import-untyped]
import pytest
import zmq.asyncio

from strata.base.settings import process_environment
from strata.train.core import commands, model_options, ops
from strata.train.link.rank import ConnectRequest, connect_rank

LONGEST_S: Final = 120

pytestmark = pytest.mark.timeout(2 * LONGEST_S)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """With a short path, for the socket."""
    with tempfile.TemporaryDirectory(prefix="s") as made:
        yield Path(made)


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    made = subprocess.run(
        [str(Path(sys.executable).with_name("strata")), "models", "tiny", str(folder / "tiny"), "--layers", "1"],
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    assert re.search(r"llama with [\d,]+ parameters", made.stderr)
    return folder / "tiny"


class RankGroup:
    def __init__(self, folder: Path, model: Path) -> None:
        settings = folder / "server.toml"
        settings.write_text(
            f'[server]\ndata = "{folder}/data"\nsockets = "{folder}/run"\n'
            f'[model]\npath = "{model}"\nname = "tiny"\n[ranks]\nnproc = 2\ncollective_timeout_s = 60\n',
            encoding="utf-8",
        )
        (folder / "run").mkdir(mode=0o700, exist_ok=True)
        self.endpoint = f"ipc://{folder}/run/rank0"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        self.process = subprocess.Popen(
            [*launcher, "-m", "strata.train.runner", "--settings", str(settings)],
            env={**process_environment(), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(LONGEST_S)


class Orchestrator:
    """One that speaks to rank 0, and may be gone at any moment."""

    def __init__(self, context: zmq.asyncio.Context, ranks: RankGroup, generation: int) -> None:
        self.generation = generation
        self._context = context
        self._ranks = ranks

    async def attach(self) -> commands.AttachReply:
        async with asyncio.timeout(LONGEST_S):
            connection = await connect_rank(
                self._context, self._ranks.endpoint, None, ConnectRequest(self.generation, 1)
            )
        assert connection is not None
        self.connection = connection
        attached = await self.say(commands.Attach(self.generation, "train/test"))
        assert isinstance(attached, commands.AttachReply), attached
        return attached

    async def say(self, message: commands.ToRank) -> commands.FromRank:
        async with asyncio.timeout(LONGEST_S):
            await self.connection.send(message)
            return await self.connection.receive()

    async def do(self, number: int, work: commands.Work, durable: int = 0) -> commands.DispatchReply:
        reply = await self.say(commands.DispatchCommand(self.generation, number, work, durable))
        assert isinstance(reply, commands.DispatchReply), reply
        return reply


def step(model: str) -> commands.StepsCommand:
    return commands.StepsCommand([ops.OptimStep(model, 2, model_options.AdamParams())])


def one_pass(model: str) -> commands.PassCommand:
    tokens = np.arange(8, dtype="<i4")
    targets = ops.Dense(ops.DType.I64, (8,), np.arange(1, 9, dtype="<i8").tobytes())
    data = ops.encode_pass_data(ops.PassData([ops.Datum(tokens.tobytes(), {"target_tokens": targets})]))
    item = commands.PassItem("r", model, model_options.LossName.CROSS_ENTROPY, {}, data)
    return commands.PassCommand(False, [item], [[[]], [[commands.Segment(0, 0)]]])


@pytest.fixture
def context() -> Iterator[zmq.asyncio.Context]:
    made = zmq.asyncio.Context()
    yield made
    made.destroy(linger=0)


async def test_the_ranks_serve_one_orchestrator_after_the_other_and_do_every_dispatch_once(
    folder: Path, model: Path, context: zmq.asyncio.Context
) -> None:
    with RankGroup(folder, model) as ranks:
        first = Orchestrator(context, ranks, generation=1)
        attached = await first.attach()
        assert (attached.world_size, attached.applied) == (2, 0)
        assert (attached.model.name, attached.model.arch, attached.model.full) == ("tiny", "llama", False)
        lora = model_options.LoraConfig(rank=2, seed=1)
        created = await first.do(1, commands.ManageModel(ops.CreateModel("m", "tiny", lora)))
        assert created.results == [ops.ModelCreated("m")]
        await first.connection.send(commands.DispatchCommand(1, 2, one_pass("m"), 1))

        second = Orchestrator(context, ranks, generation=2)
        attached = await second.attach()
        assert attached.applied in (1, 2), "whether the last words of the first one were heard is open"
        first.connection.close()
        passed = await second.do(2, one_pass("m"), durable=1)
        assert passed.timing.tokens == 8
        stepped = await second.do(3, step("m"), durable=1)
        assert (await second.do(3, step("m"), durable=1)).results == stepped.results
        await second.do(4, commands.ManageModel(ops.CreateModel("twin", "tiny", lora)))
        await second.do(5, one_pass("twin"))
        assert (await second.do(6, step("twin"))).results == stepped.results, "the pass counted once"
        healthy = await second.say(commands.RankRequest(2, 5, commands.HealthCheck()))
        assert healthy == commands.HealthReply(2, 5, [0, 1])
        assert isinstance(await second.say(commands.RankRequest(2, 7, commands.Shutdown())), commands.HealthReply)
        assert await asyncio.to_thread(ranks.process.wait, LONGEST_S) == 0
        second.connection.close()


async def test_ranks_end_when_their_launcher_is_killed(folder: Path, model: Path, context: zmq.asyncio.Context) -> None:
    """Else nobody ends them, and they keep the socket that their successors need."""
    with RankGroup(folder, model) as ranks:
        orchestrator = Orchestrator(context, ranks, generation=1)
        await orchestrator.attach()
        ranks.process.kill()
        async with asyncio.timeout(LONGEST_S):
            await orchestrator.connection.lost()
        orchestrator.connection.close()


def test_ranks_end_when_their_launcher_is_killed_while_they_still_import_the_engine(folder: Path, model: Path) -> None:
    with RankGroup(folder, model) as ranks:
        starting = importing(ranks.process.pid)
        ranks.process.kill()
        _, alive = psutil.wait_procs(starting, LONGEST_S)
        assert not alive


def importing(launcher: int) -> list[psutil.Process]:
    """The ranks, as soon as each has begun to load the engine. (They need seconds more until they meet.)"""
    while True:
        found = [
            each
            for each in psutil.Process(launcher).children()
            if "torch" in Path(f"/proc/{each.pid}/maps").read_text(encoding="utf-8")
        ]
        if len(found) == 2:
            return found


def test_a_rank_that_cannot_load_its_model_says_why_and_ends(folder: Path) -> None:
    settings = folder / "wrong.toml"
    settings.write_text(f'[model]\npath = "{folder}/nothing"\n', encoding="utf-8")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    done = subprocess.run(
        [*launcher, "-m", "strata.train.runner", "--settings", str(settings)],
        env={**process_environment(), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
        check=False,
    )
    assert done.returncode == 1
    assert "cannot load the model" in done.stderr
    assert done.stderr.count("Traceback") == 1, "the launcher's own alone"
