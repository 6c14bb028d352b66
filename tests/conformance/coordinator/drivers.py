"""Drivers of worker SDKs as child processes, and how the one in C++ is built."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from strata.base.settings import process_environment

ROOT: Final = Path(__file__).parents[3]
CPP: Final = ROOT / "examples" / "cpp-worker"
PYTHON_DRIVER: Final = Path(__file__).with_name("python_driver.py")

TOOLS: Final = ("g++", "cmake", "make", "pkg-config", "protoc", "grpc_cpp_plugin")
INSTALL: Final = "apt-get install -y --no-install-recommends"
PACKAGES: Final = "g++ cmake make pkg-config libgrpc++-dev libprotobuf-dev protobuf-compiler-grpc nlohmann-json3-dev"
REPLY_TIMEOUT_S: Final = 30.0
BUILDS: Final = {"default": "build", "tsan": "build-tsan"}
"""By preset of CMakePresets.json, the folder."""
PRESET: Final = process_environment().get("STRATA_TEST_CPP_PRESET", "default")
SANITIZER: Final = {"TSAN_OPTIONS": "halt_on_error=1 exitcode=66 ignore_noninstrumented_modules=1"}
"""A data race of ours ends the driver, and so the test. gRPC and abseil of the distribution are not instrumented: what
they do with memory looks like races, because how they synchronise it is not seen."""

Answer = dict[str, Any]


class NotBuiltError(Exception):
    """The worker in C++ cannot be built; the text says what to do."""


def build_cpp(search: str = os.defpath, preset: str = PRESET) -> Path:
    """The folder with the program, built if something changed. Of several processes one builds and the others wait."""
    missing = [tool for tool in TOOLS if shutil.which(tool, path=search) is None]
    if missing:
        raise NotBuiltError(f"no {', '.join(missing)} here; run: {INSTALL} {PACKAGES}")
    build = CPP / BUILDS[preset]
    build.mkdir(exist_ok=True)
    with (build / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (build / "Makefile").exists():
            run_tool(["cmake", "--preset", preset], search)
        run_tool(["cmake", "--build", "--preset", preset], search)
    return build


def run_tool(command: Sequence[str], search: str = os.defpath) -> None:
    """In the folder of the worker in C++."""
    made = subprocess.run(command, capture_output=True, text=True, check=False, cwd=CPP, env={"PATH": search})
    if made.returncode:
        raise NotBuiltError(f"{made.stdout[-2000:]}{made.stderr[-4000:]}\nneeded: {INSTALL} {PACKAGES}")


class RefusedError(Exception):
    """A command was answered with an error."""

    def __init__(self, error: Answer) -> None:
        super().__init__(str(error))
        self.code: str = error["code"]
        self.reason: str = error["reason"]
        self.message: str = error["message"]
        self.detail = error


class Driver:
    """One worker process that does what it is told; one command at a time."""

    def __init__(self, process: asyncio.subprocess.Process, sdk: str) -> None:
        self.process = process
        self.sdk = sdk

    @classmethod
    async def start(cls, sdk: str, command: Sequence[str], environ: Mapping[str, str], folder: Path) -> Driver:
        process = await asyncio.create_subprocess_exec(
            *command,
            env={"PATH": os.defpath, **SANITIZER, **environ},
            cwd=folder,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 24,
        )
        return cls(process, sdk)

    async def ask(self, do: str, **given: Any) -> Answer:
        """What it answers; raises `RefusedError`."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"do": do, **given}).encode() + b"\n")
        async with asyncio.timeout(REPLY_TIMEOUT_S):
            line = await self.process.stdout.readline()
        assert line, f"the {self.sdk} driver ended at {do!r} with status {await self.process.wait()}"
        answer: Answer = json.loads(line)
        if "error" in answer:
            raise RefusedError(answer["error"])
        found: Answer = answer["ok"]
        return found

    async def refused(self, do: str, **given: Any) -> RefusedError:
        """The error of a command that must fail."""
        try:
            answer = await self.ask(do, **given)
        except RefusedError as error:
            return error
        raise AssertionError(f"{do} was answered: {answer}")

    async def call(self, method: str, request: Answer, **metadata: str) -> Answer:
        """One message of the contract, as it is; `worker="w"` is the metadata key `strata-worker`."""
        named = {f"strata-{key}": value for key, value in metadata.items()}
        return await self.ask("call", method=method, request=request, metadata=named)

    async def die(self) -> None:
        """Without a goodbye."""
        assert self.process.stdin is not None
        self.process.stdin.write(b'{"do": "die"}\n')
        async with asyncio.timeout(REPLY_TIMEOUT_S):
            await self.process.wait()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def close(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
            await self.process.wait()


def command_of(sdk: str, search: str = os.defpath) -> list[str]:
    match sdk:
        case "python":
            return [sys.executable, str(PYTHON_DRIVER)]
        case "cpp":
            return [str(build_cpp(search) / "strata-worker"), "--conformance"]
        case _:
            raise ValueError(sdk)


class DriverCommands(Mapping[str, Sequence[str]]):
    """By SDK, how its driver is started. A driver is built when a test first asks for it: tests of one language need no
    compiler of another."""

    def __init__(self, sdks: Sequence[str], search: str = os.defpath) -> None:
        self._sdks = sdks
        self._search = search
        self._built: dict[str, Sequence[str]] = {}

    def __getitem__(self, sdk: str) -> Sequence[str]:
        if sdk not in self._built:
            try:
                self._built[sdk] = command_of(sdk, self._search)
            except NotBuiltError as error:
                pytest.fail(str(error), pytrace=False)
        return self._built[sdk]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sdks)

    def __len__(self) -> int:
        return len(self._sdks)
