"""Starts vLLM beside the ranks (its command line, socket and key), probes its health (every 2 s), and restarts it when
it hangs.

The engine listens on a Unix socket in the folder of the server's sockets, which only the server's user can open. So no
port is taken, and the requests of vLLM that need no key are for that user alone. Its key is in the environment of the
engine and in a file of the same folder, never among the arguments of a process.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx

from strata.base import log
from strata.base.atomic import write_file, write_json
from strata.base.clock import Clock
from strata.base.errors import Code, StrataError
from strata.train.core.sampling import MAX_TOP_K
from strata.train.device_permit import read_permit
from strata.train.endpoints.engine_report import EngineCondition, EngineReport
from strata.train.hugging_face import find_folder
from strata.train.launch.supervised_process import ProcessCommand, SupervisedProcess
from strata.train.plan.device_placement import DevicePlacement, engine_size
from strata.train.settings import ServerSettings

MODULE: Final = "vllm.entrypoints.openai.api_server"
LORA_RANKS: Final = (8, 16, 32, 64, 128, 256, 320, 512)
"""The adapters' ranks that vLLM can be started for."""
MAX_LORAS: Final = 8
"""Adapters in one batch of the engine, unless its arguments say otherwise."""
POLL_S: Final = 0.25
"""Time between two probes of an engine that starts."""
PROBE_S: Final = 2.0
"""Time between two probes of an engine that runs."""
REPLY_S: Final = 5.0
FIND_S: Final = 60.0
MAX_SOCKET_BYTES: Final = 107
"""Bytes of the path of a Unix socket, on Linux."""
_PROGRESS: Final = re.compile(rb"^vllm:(?:generation|prompt)_tokens_total\{[^}]*\} (\S+)$", re.MULTILINE)
_log = log.get(__name__)


def check_engine(settings: ServerSettings, environment: Mapping[str, str]) -> None:
    """INVALID if no engine can be started: before anything is loaded."""
    inference = settings.inference
    if not inference.engine:
        return
    python = _python(settings)
    if shutil.which(python) is None:
        raise StrataError(
            Code.INVALID, f"there is no interpreter {python}", hint="inference.python is the interpreter that has vLLM"
        )
    query = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    try:
        status = subprocess.run(
            [python, "-c", query],
            env=_engine_environment(settings, environment),
            timeout=FIND_S,
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ).returncode
    except (OSError, subprocess.SubprocessError) as error:
        raise StrataError(Code.INVALID, f"{python} cannot be run: {error}") from error
    if status:
        raise StrataError(
            Code.INVALID,
            f"vLLM is not installed for {python}",
            hint="install it there, or name another interpreter in inference.python",
        )
    longest = max(len(bytes(settings.engine_socket(name))) for name in inference.engines)
    if longest > MAX_SOCKET_BYTES:
        raise StrataError(
            Code.INVALID,
            f"the path of an engine's socket would have {longest} bytes, and {MAX_SOCKET_BYTES} are the most",
            hint="server.sockets names a folder with a shorter path",
        )


def engine_command(
    settings: ServerSettings, name: str, environment: Mapping[str, str], key: str, placement: DevicePlacement
) -> ProcessCommand:
    """The engine sees the devices that it is placed on, and no others."""
    model, inference = settings.model, settings.inference
    arguments = [
        *(_python(settings), "-m", MODULE),
        *("--model", str(find_folder(model.path) or model.path), "--served-model-name", model.base_model),
        *("--dtype", settings.by_device.dtype, "--uds", str(settings.engine_socket(name))),
        *("--enable-server-load-tracking", "--disable-uvicorn-access-log"),
        *("--logprobs-mode", "processed_logprobs", "--max-logprobs", str(MAX_TOP_K)),
    ]
    variables = {
        "VLLM_API_KEY": key,
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
    if model.training == "lora":
        rank = next((each for each in LORA_RANKS if each >= model.max_lora_rank), LORA_RANKS[-1])
        loras = min(model.slots, MAX_LORAS)
        held = max(model.slots * inference.keep, loras)
        arguments += ["--enable-lora", "--max-lora-rank", str(rank), "--max-loras", str(loras)]
        arguments += ["--max-cpu-loras", str(held)]
        variables["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
    else:
        variables["VLLM_SERVER_DEV_MODE"] = "1"
    if inference.takes_turns:
        arguments.append("--enable-sleep-mode")
        # The routes of sleep are for development; only the server's user can open this socket.
        variables["VLLM_SERVER_DEV_MODE"] = "1"
    devices = len(placement.engines.get(name, ()))
    if devices > 1 and engine_size(inference.arguments) is None:
        arguments += ["--tensor-parallel-size", str(devices)]
    return ProcessCommand(
        name=f"engine {name}",
        arguments=[*arguments, *inference.arguments],
        environment=_engine_environment(settings, environment) | variables | placement.engine_variables(name),
        log=settings.engine_log(name),
    )


def _engine_environment(settings: ServerSettings, environment: Mapping[str, str]) -> dict[str, str]:
    """The launcher's without our own variables, some of which are secrets."""
    inherited = {each: value for each, value in environment.items() if not each.startswith("STRATA_")}
    return inherited | settings.inference.environment


def write_engine_key(settings: ServerSettings, key: str) -> None:
    settings.sockets.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_file(settings.engine_key, f"{key}\n".encode())


@dataclass(frozen=True)
class EngineProbe:
    """What an engine replies to one probe."""

    loaded: int
    """Requests that it has."""
    tokens: float
    """Tokens that it has read and made since it started."""


@dataclass(frozen=True)
class EngineHealth:
    """What the probes of one process say. Pure: the supervisor probes, waits and kills."""

    started_s: float
    heard_s: float | None = None
    """When it last replied; None until it was ready."""
    tokens: float = 0.0
    moved_s: float = 0.0
    """When it last had nothing to do, or had made tokens since the probe before."""

    @property
    def ready(self) -> bool:
        return self.heard_s is not None

    def observe(self, probe: EngineProbe | None, now_s: float) -> EngineHealth:
        if probe is None:
            return self
        moves = not self.ready or probe.loaded == 0 or probe.tokens != self.tokens
        return EngineHealth(self.started_s, now_s, probe.tokens, now_s if moves else self.moved_s)

    def fault(self, now_s: float, *, start_timeout_s: float, stall_s: float) -> str | None:
        """Says why the process has to be restarted; None if it need not."""
        if self.heard_s is None:
            waited_s = now_s - self.started_s
            return f"it was not ready after {waited_s:.0f} seconds" if waited_s >= start_timeout_s else None
        if now_s - self.heard_s >= stall_s:
            return f"it did not reply for {now_s - self.heard_s:.0f} seconds"
        if now_s - self.moved_s >= stall_s:
            return f"it has requests, and made no token for {now_s - self.moved_s:.0f} seconds"
        return None


class EngineSupervisor:
    def __init__(
        self,
        settings: ServerSettings,
        name: str,
        environment: Mapping[str, str],
        clock: Clock,
        key: str,
        placement: DevicePlacement,
    ) -> None:
        self.name = name
        self.ready = asyncio.Event()
        """Set when it was ready for the first time."""
        self._settings = settings
        self._clock = clock
        self._key = key
        self._fault = ""
        self._reported: EngineReport | None = None
        command = engine_command(settings, name, environment, key, placement)
        self.process = SupervisedProcess(command, clock, lambda _: None, self._on_start, self._wait_for_devices)

    async def supervise(self) -> None:
        """Supervises until stopped. UNAVAILABLE if the engine dies again before it was ever ready."""
        tasks = [
            asyncio.create_task(self.process.supervise(), name=self.name),
            asyncio.create_task(self._watch(), name=f"watch {self.name}"),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            self._settings.engine_report(self.name).unlink(missing_ok=True)
        for task in tasks:
            if not task.cancelled():
                task.result()

    async def _wait_for_devices(self) -> None:
        """Return when engines may start on the devices. Until then the report has the permit that forbids it: the
        orchestrator then knows that there is no process."""
        while self._settings.inference.takes_turns:
            permit = read_permit(self._settings)
            if permit is not None and permit.side == "engines":
                return
            self._report("waiting", "ranks have its devices", None if permit is None else permit.number)
            await self._clock.sleep(POLL_S)

    def _on_start(self) -> None:
        # vLLM does not bind a path that exists, and the process that had it is dead.
        self._settings.engine_socket(self.name).unlink(missing_ok=True)
        if not self.process.starts:
            self._report("starting", "it loads the model")
            return
        reason = self._fault or self.process.last_error() or "it died"
        self._fault = ""
        _log.warning("engine_restarted", engine=self.name, reason=reason, starts=self.process.starts)
        self._report("restarting", reason)

    async def _watch(self) -> None:
        inference, clock = self._settings.inference, self._clock
        transport = httpx.AsyncHTTPTransport(uds=str(self._settings.engine_socket(self.name)))
        reply_s = min(REPLY_S, inference.stall_s)
        # While an engine loads the weights of a full model, it holds requests and makes no token.
        loads_full = self._settings.model.training == "full"
        stall_s = max(inference.stall_s, inference.push_timeout_s) if loads_full else inference.stall_s
        headers = {"Authorization": f"Bearer {self._key}"}
        async with httpx.AsyncClient(
            transport=transport, base_url="http://engine", headers=headers, timeout=reply_s, trust_env=False
        ) as http:
            watched, health = 0, EngineHealth(clock.monotonic_s())
            while True:
                await clock.sleep(PROBE_S if health.ready else POLL_S)
                if self.process.pid is None:
                    continue
                if self.process.starts != watched:
                    watched, health = self.process.starts, EngineHealth(clock.monotonic_s())
                probe = await probe_engine(http)
                if self.process.starts != watched:
                    continue
                health = health.observe(probe, clock.monotonic_s())
                if probe is not None:
                    self._on_ready()
                fault = health.fault(clock.monotonic_s(), start_timeout_s=inference.start_timeout_s, stall_s=stall_s)
                if fault is not None:
                    self._fault = fault
                    _log.error("engine_stuck", engine=self.name, reason=fault, action="the launcher restarts it")
                    self.process.kill()

    def _on_ready(self) -> None:
        self.process.was_ready = True
        self._report("ready", "")
        if not self.ready.is_set():
            _log.info("engine_ready", engine=self.name)
            self.ready.set()

    def _report(self, condition: EngineCondition, reason: str, permit: int | None = None) -> None:
        reported = self._reported
        # The start that is under way is not counted before it has happened.
        starts = self.process.starts + (condition != "ready")
        if reported is not None and (reported.condition, reported.starts, reported.permit) == (
            condition,
            starts,
            permit,
        ):
            return
        self._reported = EngineReport(
            condition=condition, reason=reason, starts=starts, since_s=self._clock.wall_s(), permit=permit
        )
        try:
            write_json(self._settings.engine_report(self.name), self._reported)
        except OSError as error:
            # The status is behind until the next probe writes it; the engine need not die for it.
            self._reported = None
            _log.warning("engine_report_not_written", engine=self.name, reason=str(error))


async def probe_engine(http: httpx.AsyncClient) -> EngineProbe | None:
    """None if it does not reply as an engine that is healthy."""
    with contextlib.suppress(httpx.HTTPError, ValueError, TypeError, KeyError):
        if (await http.get("/health")).status_code != 200:
            return None
        loaded = int((await http.get("/load")).json()["server_load"])
        metrics = (await http.get("/metrics")).content
        return EngineProbe(loaded, sum(float(each) for each in _PROGRESS.findall(metrics)))
    return None


def _python(settings: ServerSettings) -> str:
    return str(Path(settings.inference.python).expanduser()) if settings.inference.python else sys.executable
