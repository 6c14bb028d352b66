"""`Launcher`: starts ranks, engines, orchestrator and API servers with their command lines, waits until they are ready,
and stops them; with its start and stop timeouts.

Each process reports that it is ready: rank 0 by its reply to the orchestrator, the others through a pipe. A process
that dies is restarted alone. An API server and an orchestrator keep no state that is lost with them, and the ranks do
not notice; ranks that restart restore the last snapshot, and the orchestrator replays what came after it.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

from strata.base import file_lock, log
from strata.base.clock import Clock, SystemClock
from strata.base.errors import Code, StrataError
from strata.base.ids import Ids
from strata.base.private import require_private_folder, set_private_umask
from strata.base.settings import process_environment
from strata.http import otel
from strata.train.device_permit import permit_file
from strata.train.key_database import prepare_first_key
from strata.train.launch.engine_supervisor import EngineSupervisor, check_engine, write_engine_key
from strata.train.launch.first_host import FirstHost
from strata.train.launch.preflight import (
    check_features,
    check_hosts,
    check_kernels,
    check_memory,
    check_mesh,
    check_model,
    check_quantised,
    report_experimental_features,
)
from strata.train.launch.supervised_process import EVENTS, MAX_FAILED_STARTS, ProcessCommand, SupervisedProcess
from strata.train.link.keys import make_keys, read_keys
from strata.train.plan.defaults import ResolvedSettings
from strata.train.settings import LAUNCHER_LOCK, ServerSettings, check_exposure

API_MODULE: Final = "strata.train.api"
FREE_PORT: Final = "another process may have that port; server.port = 0 takes a free one"
STOP_S: Final = 15.0
"""How long each process may take to end."""
RANKS_S: Final = 5.0
"""How long the ranks may take to end by themselves before they are signalled."""
ENGINE_STOP_S: Final = 5.0
"""How long an engine may take to end: it has no state."""
ALLOCATOR: Final = "PYTORCH_ALLOC_CONF"
OLD_ALLOCATOR: Final = "PYTORCH_CUDA_ALLOC_CONF"
FLIGHT_RECORDS: Final = 2000
"""Collectives that each rank keeps."""
START_S: Final = 60.0
"""How long orchestrator and API server may take to be ready."""

_SECRETS: Final = frozenset(
    {
        "STRATA_SERVER_OPERATOR_TOKEN",
        "STRATA_SERVER_DATABASE",
        "STRATA_SERVER_IDENTITY_DATABASE",
        "STRATA_SERVER_FRONT_KEY",
        "STRATA_SERVER_FRONT_KEY_FILE",
        # Of commands that speak to a hub.
        "STRATA_OPERATOR_TOKEN",
        "STRATA_CLIENT_TOKEN",
    }
)
"""Variables that may hold a password or a token: only a process that needs one gets it."""

_log = log.get(__name__)


def run_launcher(
    resolution: ResolvedSettings, file: Path, announce: Callable[[str], None], *, api_module: str = API_MODULE
) -> None:
    """`api_module` is what API servers run: that of the layer, or one that serves more beside the API."""
    otel.check(process_environment())
    set_private_umask()
    asyncio.run(_run_until_signal(resolution, file.absolute(), announce, api_module))


async def _run_until_signal(
    resolution: ResolvedSettings, file: Path, announce: Callable[[str], None], api_module: str
) -> None:
    settings, stop = resolution.settings, asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    require_private_folder(settings.data, "the server's files")
    with lock_folder(settings.data):
        await prepare_first_key(settings, SystemClock())
        launcher = Launcher(resolution, file, process_environment(), SystemClock(), api_module=api_module)
        await launcher.run(stop, announce)


class Launcher:
    def __init__(
        self,
        resolution: ResolvedSettings,
        file: Path,
        environment: Mapping[str, str],
        clock: Clock,
        *,
        api_module: str = API_MODULE,
    ) -> None:
        self._resolution = resolution
        self._settings = settings = resolution.settings
        self._api_module = api_module
        self._clock = clock
        holder = Ids(clock).new("launcher")
        self._attached = asyncio.Event()
        self._leading = asyncio.Event()
        self._address = ""
        self._file = file
        self._environment = environment
        check_hosts(settings)
        self._ranks: SupervisedProcess | FirstHost | None = None
        if settings.ranks.mode == "auto":
            command = rank_command(resolution, file, environment)
            self._ranks = (
                FirstHost(settings, command, clock)
                if settings.hosts.listen
                else SupervisedProcess(command, clock, lambda _: None)
            )
        self._orchestrator = SupervisedProcess(
            orchestrator_command(file, holder, {**environment, **resolution.variables}),
            clock,
            self._on_orchestrator_event,
        )
        self._engine_key = secrets.token_hex(32)
        self._engines = [
            EngineSupervisor(settings, name, environment, clock, self._engine_key, resolution.placement)
            for name in settings.inference.engines
        ]
        self._api_servers: list[SupervisedProcess] = []
        self._supervisors: list[asyncio.Task[None]] = []

    async def run(self, stop: asyncio.Event, announce: Callable[[str], None]) -> None:
        """Run until `stop` is set. `announce` gets, for people, the address where the server listens."""
        self._prepare()
        guard = _reserve_port(self._settings)
        stopping = asyncio.create_task(stop.wait())
        starting = asyncio.create_task(self._start(None if guard is None else int(guard.getsockname()[1])))
        try:
            await asyncio.wait([stopping, starting], return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                announce(starting.result())
                await asyncio.wait([stopping, *self._supervisors], return_when=asyncio.FIRST_COMPLETED)
                for task in self._supervisors:
                    if task.done():
                        task.result()
        finally:
            stopping.cancel()
            starting.cancel()
            await self._stop()
            if guard is not None:
                guard.close()

    def _prepare(self) -> None:
        resolution, settings = self._resolution, self._settings
        check_exposure(settings.server.host)
        if settings.server.listen == "tcp":
            # The API servers start last: a port that is taken is reported before anything is loaded.
            _bind(settings).close()
        elif settings.server.api_servers > 1:
            raise StrataError(Code.INVALID, 'server.listen = "unix" has one socket: set server.api_servers to 1')
        # An invalid address is reported here, once, and not by each process that would listen there.
        _log.debug("link_addresses", requests=settings.requests, outputs=settings.outputs)
        over_tcp = settings.server.transport == "tcp" or settings.rank0.startswith(("tcp:", "file:"))
        if settings.ranks.mode == "auto":
            check_mesh(settings)
            check_model(settings)
            check_quantised(settings)
            check_kernels(resolution)
            check_memory(resolution)
            shutil.rmtree(settings.compile_folder, ignore_errors=True)
            if resolution.placement.ranks:
                flight_records(settings).mkdir(mode=0o700, parents=True, exist_ok=True)
            if over_tcp:
                make_keys(settings.keys)
        else:
            check_features(settings)
            if over_tcp:
                # The operator who starts the ranks has given them a copy.
                read_keys(settings.keys)
        report_experimental_features(resolution)
        for choice in resolution.choices:
            _log.debug("setting_resolved", name=choice.setting, value=choice.value, reason=choice.reason)
        check_engine(settings, self._environment)
        # That of an earlier start: the orchestrator writes it again.
        permit_file(settings).unlink(missing_ok=True)
        if self._engines:
            write_engine_key(settings, self._engine_key)

    async def _start(self, port: int | None) -> str:
        if self._ranks is not None:
            self._supervise(self._ranks)
        for engine in self._engines:
            self._supervisors.append(asyncio.create_task(engine.supervise(), name=engine.name))
        self._supervise(self._orchestrator)
        await self._wait(self._leading, START_S, "the orchestrator does not lead its journal")
        _log.info("waiting_for_ranks", mode=self._settings.ranks.mode)
        await self._wait(self._attached, self._settings.ranks.start_timeout_s, "the ranks are not ready")
        for engine in self._engines:
            # A start that takes too long is repeated once, then its supervisor fails.
            limit_s = (MAX_FAILED_STARTS + 1) * self._settings.inference.start_timeout_s
            await self._wait(engine.ready, limit_s, f"the {engine.name} is not ready")
        # One after the other: the first creates the tables and the first key.
        for number in range(self._settings.server.api_servers):
            await self._start_api_server(number, port)
        return self._address

    async def _start_api_server(self, number: int, port: int | None) -> None:
        listening = asyncio.Event()

        def on_event(event: str) -> None:
            kind, _, address = event.partition(" ")
            if kind == "ready":
                process.was_ready = True
                self._address = address
                listening.set()

        process = SupervisedProcess(
            api_server_command(self._file, self._environment, number, port, module=self._api_module),
            self._clock,
            on_event,
        )
        self._api_servers.append(process)
        self._supervise(process)
        await self._wait(listening, START_S, f"the {process.command.name} does not listen")

    def _supervise(self, process: SupervisedProcess | FirstHost) -> None:
        self._supervisors.append(asyncio.create_task(process.supervise(), name=process.name))

    async def _wait(self, event: asyncio.Event, timeout_s: float, failure: str) -> None:
        """Wait for an event of the start; raises when it times out or when a process has failed for good."""
        waiting = asyncio.create_task(event.wait())
        try:
            await asyncio.wait([waiting, *self._supervisors], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        for task in self._supervisors:
            if task.done():
                task.result()
        if not event.is_set():
            raise StrataError(Code.DEADLINE, f"{failure} after {timeout_s:g} seconds", hint="the log above may say why")

    def _on_orchestrator_event(self, event: str) -> None:
        kind, _, group = event.partition(" ")
        match kind:
            case "leading":
                self._orchestrator.was_ready = True
                self._leading.set()
            case "attached":
                if self._ranks is not None:
                    self._ranks.ranks_attached()
                self._attached.set()
            case "stuck":
                self._restart_ranks(group)
            case "stuck-engine":
                self._restart_engine(group)
            case "snapshot":
                if isinstance(self._ranks, FirstHost):
                    self._ranks.snapshot_committed()
            case "lost":
                # They are dead or about to die: their parent kills the others as well, and forks the next group.
                pass
            case _:
                _log.warning("unknown_orchestrator_event", event_line=event)

    def _restart_ranks(self, group: str) -> None:
        if self._ranks is None:
            _log.error("ranks_stuck", group=group, action="restart them where you started them")
        else:
            _log.error("ranks_stuck", group=group, action="the launcher restarts them")
            self._ranks.kill()

    def _restart_engine(self, name: str) -> None:
        _log.error("engine_stuck", engine=name, reason="it does not sleep or wake", action="it is restarted")
        for engine in self._engines:
            if engine.name == name:
                engine.process.kill()

    async def _stop(self) -> None:
        _log.info("launcher_stopping")
        await asyncio.gather(*(process.stop(STOP_S) for process in self._api_servers))
        # Samples that run there are in the journal, and are sampled again after the next start.
        await asyncio.gather(*(engine.process.stop(ENGINE_STOP_S) for engine in self._engines))
        if self._ranks is None:
            await self._orchestrator.stop(STOP_S)
        else:
            # The orchestrator sends the ranks a shutdown; they end after the command that they execute now.
            self._ranks.disable_restart()
            await self._orchestrator.stop(STOP_S, signal.SIGUSR1)
            await self._ranks.stop(STOP_S, after_s=RANKS_S)
        for task in self._supervisors:
            task.cancel()
        if self._supervisors:
            await asyncio.wait(self._supervisors)
        _log.info("launcher_stopped")


def _reserve_port(settings: ServerSettings) -> socket.socket | None:
    """A bound socket that never listens, so that several API servers get the same port, also after a restart. A single
    API server binds its port itself."""
    return None if settings.server.api_servers == 1 else _bind(settings)


def _bind(settings: ServerSettings) -> socket.socket:
    """A socket bound to the server's port with SO_REUSEPORT, which does not listen."""
    server = settings.server
    host = server.host.strip("[]")
    guard = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            guard.setsockopt(socket.SOL_SOCKET, option, 1)
        guard.bind((host, server.port))
    except OSError as error:
        guard.close()
        raise StrataError(
            Code.UNAVAILABLE, f"cannot listen on {server.host}:{server.port}: {error}", hint=FREE_PORT
        ) from error
    return guard


def rank_command(resolution: ResolvedSettings, file: Path, environment: Mapping[str, str]) -> ProcessCommand:
    """The parent of all ranks of this machine, which forks them, and forks the next group when one of them dies."""
    settings, placement = resolution.settings, resolution.placement
    variables = {
        "OMP_NUM_THREADS": str(settings.by_device.threads),
        # The model is a local folder or in the local cache: nothing is fetched while a server starts.
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # To ask for a device without it would initialise CUDA, after which a process cannot fork.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }
    if sys.platform == "linux":
        # A single node: the traffic between the ranks stays on it.
        variables |= {"GLOO_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo"}
    variables |= resolution.variables | placement.rank_variables
    if placement.ranks:
        variables |= {name: value for name, value in _cuda_variables(settings).items() if name not in environment}
        if OLD_ALLOCATOR in environment:
            # torch takes the older name before the newer one.
            del variables[ALLOCATOR]
    arguments = (sys.executable, "-m", "strata.train.runner.single_node", "--settings", str(file))
    return ProcessCommand("ranks", arguments, _without(environment, _SECRETS) | variables)


def flight_records(settings: ServerSettings) -> Path:
    """Returns where ranks on CUDA devices write what collectives they were in when one took too long."""
    return settings.data / "logs" / "collectives"


def _cuda_variables(settings: ServerSettings) -> dict[str, str]:
    """Returns what torch reads when it is imported or when ranks connect, unless the environment says otherwise."""
    return {
        # Rows of ever new lengths would leave holes in memory that no later row fits into.
        ALLOCATOR: "expandable_segments:True",
        # Every rank keeps its last collectives, and writes them when one takes too long: `rank_0`, `rank_1`, …
        "TORCH_FR_BUFFER_SIZE": str(FLIGHT_RECORDS),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": str(flight_records(settings) / "rank_"),
    }


def orchestrator_command(file: Path, holder: str, environment: Mapping[str, str]) -> ProcessCommand:
    """The lease holder is the launcher: a restarted orchestrator need not wait for the lease of its predecessor."""
    module = ("-m", "strata.train.orchestrator", "--settings", str(file))
    arguments = (sys.executable, *module, "--events-fd", EVENTS, "--holder", holder)
    return ProcessCommand("orchestrator", arguments, _without(environment, _SECRETS - {"STRATA_SERVER_DATABASE"}))


def api_server_command(
    file: Path, environment: Mapping[str, str], number: int = 0, port: int | None = None, *, module: str = API_MODULE
) -> ProcessCommand:
    arguments = [sys.executable, "-m", module, "--settings", str(file), "--ready-fd", EVENTS]
    arguments += ["--number", str(number)]
    if port is not None:
        arguments += ["--port", str(port)]
    name = f"API server {number}" if number else "API server"
    return ProcessCommand(name, arguments, _without(environment, {"STRATA_SERVER_DATABASE"}))


def _without(environment: Mapping[str, str], names: frozenset[str] | set[str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in names}


def lock_folder(folder: Path) -> AbstractContextManager[None]:
    """Lock the folder until this process ends, whatever kills it: two launchers would replace each other's sockets."""
    return file_lock.lock_folder(
        folder, LAUNCHER_LOCK, taken=f"another server runs in {folder}", hint="give each one a server.data of its own"
    )
