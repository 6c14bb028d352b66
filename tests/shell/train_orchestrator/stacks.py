"""An orchestrator process, pretending ranks and a client of the link: real processes, sockets, journal and payloads."""

from __future__ import annotations

import array
import asyncio
import itertools
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, TypeVar

from strata.base.clock import SystemClock
from strata.journal.open import open_journal
from strata.journal.port import Snapshot
from strata.train.core import client_commands, model_options, ops
from strata.train.link import messages
from strata.train.link.api import OrchestratorClient
from strata.train.link.messages import OrchestratorRequest
from strata.train.payload import Payloads
from strata.train.settings import ServerSettings, load_settings
from strata.train.status import queries, views

TENANT: Final = "alice"
REPLY_TIMEOUT_S: Final = 60.0
Asked = TypeVar("Asked", bound=messages.Output)


class Process:
    """A child of the test. `events` are the lines it tells its launcher."""

    def __init__(self, *arguments: str) -> None:
        self._arguments = arguments
        self.events: asyncio.Queue[str] = asyncio.Queue()

    async def start(self) -> None:
        reading, writing = os.pipe()
        arguments = [each.replace("{events}", str(writing)) for each in self._arguments]
        self.process = await asyncio.create_subprocess_exec(sys.executable, "-m", *arguments, pass_fds=(writing,))
        os.close(writing)
        reader = asyncio.StreamReader()
        self._transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(reading, "rb")
        )
        self._reading = asyncio.create_task(self._read(reader))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        async for line in reader:
            self.events.put_nowait(line.decode().strip())

    async def told(self, kind: str) -> str:
        """The next event of this kind; those before it are passed over."""
        async with asyncio.timeout(REPLY_TIMEOUT_S):
            while not (event := await self.events.get()).startswith(kind):
                pass
        return event

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGKILL)
        await self.end()

    async def stop(self) -> int:
        self.process.terminate()
        return await self.end()

    async def end(self) -> int:
        code = await self.process.wait()
        self._transport.close()
        self._reading.cancel()
        await asyncio.wait([self._reading])
        return code


class Stack:
    def __init__(self, folder: Path, **sections: str) -> None:
        self.folder = folder
        self.applied_file = folder / "applied.log"
        self.file = folder / "server.toml"
        given = {
            "server": f'data = "{folder}/d"\nlease_s = 20.0\nlog_level = "warning"\n' + sections.get("server", ""),
            "model": 'path = "pretended"\nslots = 100\n' + sections.get("model", "initial_checkpoint = false"),
            "ranks": "nproc = 2\n" + sections.get("group", ""),
            "checkpoints": sections.get("checkpoints", ""),
            "snapshots": sections.get("snapshots", ""),
            "limits": sections.get("limits", ""),
        }
        if "sampling" in sections:
            given["sampling"] = sections["sampling"]
        self.file.write_text("".join(f"[{name}]\n{lines}\n" for name, lines in given.items()), encoding="utf-8")
        self.settings: ServerSettings = load_settings(self.file, environ={})
        self._questions = itertools.count()
        self.deaths = 0
        self.client: OrchestratorClient
        self.orchestrator: Process
        self.ranks: Process

    async def start_orchestrator(self, *, attached: bool = True) -> None:
        await self._start_orchestrator("strata.train.orchestrator")
        await self.orchestrator.told("attached" if attached else "leading")

    async def _start_orchestrator(self, *module: str) -> None:
        own = ("--settings", str(self.file), "--events-fd", "{events}", "--holder", "the-test")
        self.orchestrator = Process(*module, *own)
        await self.orchestrator.start()

    async def keep_orchestrator(self, name: str, skip: int) -> None:
        """One that dies at a failpoint, and whenever one has died the next one."""
        await self._start_orchestrator("tests.shell.train_orchestrator.armed", name, str(skip))
        while True:
            await self.orchestrator.end()
            self.deaths += 1
            await self._start_orchestrator("strata.train.orchestrator")

    async def start_ranks(self, *arguments: str, die_at: str = "") -> None:
        own = ("--settings", str(self.file), "--applied", str(self.applied_file), *arguments)
        self.ranks = Process("tests.support.fake_ranks", *own, *(("--die-at", die_at) if die_at else ()))
        await self.ranks.start()

    async def restart_client(self) -> None:
        """As if the API server had died and another one had taken its place."""
        await self.client.__aexit__(None, None, None)
        self.client = await OrchestratorClient(self.settings).__aenter__()

    async def snapshot(self) -> Snapshot | None:
        async with await open_journal(self.settings.database, SystemClock()) as journal:
            return await journal.load_snapshot(self.settings.stream)

    def applied(self) -> list[tuple[str, str]]:
        """What the ranks say they did: group and operation, in order."""
        lines = self.applied_file.read_text(encoding="utf-8").splitlines() if self.applied_file.exists() else []
        return [(line.split(" ")[0], line.split(" ")[1]) for line in lines]

    # Questions

    async def look(
        self, kind: type[Asked], body: client_commands.Command | queries.Query, tenant: str = TENANT
    ) -> Asked:
        output = await self._ask(body, tenant)
        assert isinstance(output, kind), output
        return output

    async def _ask(self, body: client_commands.Command | queries.Query, tenant: str) -> messages.Output:
        request = OrchestratorRequest(f"q{next(self._questions)}", tenant, body)
        return await self.client.request(request, timeout_s=REPLY_TIMEOUT_S)

    async def submit(self, operation: ops.Operation, tenant: str = TENANT, session_id: str = "") -> str:
        return (
            await self.look(client_commands.Accepted, client_commands.SubmitOperation(operation, session_id), tenant)
        ).future_id

    async def refused(self, operation: ops.Operation, tenant: str = TENANT) -> views.ErrorResponse:
        return await self.look(views.ErrorResponse, client_commands.SubmitOperation(operation), tenant)

    async def watch(self, future_id: str, wait_s: float = 0.0, tenant: str = TENANT) -> messages.Output:
        return await self._ask(queries.WatchFuture(future_id, wait_s), tenant)

    async def watch_tokens(self, future_id: str, counts: Sequence[int], wait_s: float = 5.0) -> messages.Output:
        return await self._ask(queries.WatchTokens(future_id, counts, wait_s), TENANT)

    async def result(self, future_id: str, tenant: str = TENANT) -> ops.Result:
        async with asyncio.timeout(REPLY_TIMEOUT_S):
            while True:
                output = await self.watch(future_id, 5.0, tenant)
                if isinstance(output, views.FutureResult):
                    return output.result
                assert isinstance(output, views.QueuePosition), output

    async def model(self, number: int = 0, tenant: str = TENANT) -> str:
        session_id = f"session-{tenant}"
        await self.look(client_commands.Done, client_commands.OpenSession(session_id), tenant)
        model_id = f"{session_id}:train:{number}"
        created = await self.submit(
            ops.CreateModel(model_id, "pretended", model_options.LoraConfig()), tenant, session_id
        )
        assert await self.result(created, tenant) == ops.ModelCreated(model_id)
        return model_id

    def batch(self, model_id: str, seq: int, tokens: Sequence[Sequence[int]], **config: float) -> ops.ForwardBackward:
        data = ops.encode_pass_data(ops.PassData([ops.Datum(array.array("i", each).tobytes(), {}) for each in tokens]))
        payload = Payloads(self.settings.payloads).keep(data)
        loss = model_options.LossName.CROSS_ENTROPY
        return ops.ForwardBackward(model_id, seq, loss, config, False, [len(each) for each in tokens], payload)

    def step(self, model_id: str, seq: int, rate: float = 1e-3) -> ops.OptimStep:
        return ops.OptimStep(model_id, seq, model_options.AdamParams(learning_rate=rate))

    def outputs(self, result: ops.Result) -> ops.PassResult:
        assert isinstance(result, ops.PassDone), result
        return ops.decode_pass_result(Payloads(self.settings.payloads).read(result.payload))


@asynccontextmanager
async def running(
    folder: Path, *, ranks: bool = True, armed: tuple[str, int] | None = None, **sections: str
) -> AsyncIterator[Stack]:
    stack = Stack(folder, **sections)
    stack.client = await OrchestratorClient(stack.settings).__aenter__()
    keeping: asyncio.Task[None] | None = None
    try:
        if ranks:
            await stack.start_ranks()
        if armed is None:
            await stack.start_orchestrator(attached=ranks)
        else:
            keeping = asyncio.create_task(stack.keep_orchestrator(*armed))
        yield stack
    finally:
        if keeping is not None:
            keeping.cancel()
            await asyncio.wait([keeping])
        for name in ("orchestrator", "ranks"):
            if hasattr(stack, name):
                await getattr(stack, name).kill()
        await stack.client.__aexit__(None, None, None)
