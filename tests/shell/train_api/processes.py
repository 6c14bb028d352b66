"""A whole training server as processes: ranks under torchrun, the orchestrator, the API server."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from strata.base.settings import process_environment
from tests.support.unix import short_path

START_S = 120.0


@dataclass(frozen=True)
class Processes:
    url: str
    key: str
    data: Path
    logs: Path

    @property
    def address(self) -> str:
        return f"unix:{self.data / 'run' / 'api'}"

    @contextmanager
    def private(self, **headers: str) -> Iterator[httpx.Client]:
        """Over the Unix socket, for operators."""
        with short_path(self.data / "run" / "api") as path:
            transport = httpx.HTTPTransport(uds=path)
            with httpx.Client(base_url="http://server", transport=transport, headers=headers, timeout=30) as client:
                yield client


@contextmanager
def serving(
    folder: Path,
    model: Path,
    *,
    ranks: int = 2,
    server: str = "",
    pretended: bool = False,
    api: str = "strata.train.api",
) -> Iterator[Processes]:
    """Ready to train when it is entered. `server` are further lines of that section of the settings file.

    `pretended` ranks need no torch and are there at once. `api` is the module that the API server runs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    data, logs = folder / "data", folder / "logs"
    logs.mkdir()
    settings = folder / "strata.toml"
    sections = (
        f'[server]\nport = 0\ndata = "{data}"\n{server}',
        f'[model]\npath = "{model}"\nname = "tiny"',
        f"[ranks]\nnproc = {ranks}\n",
    )
    settings.write_text("\n".join(sections), encoding="utf-8")
    python = [sys.executable, "-m"]
    torchrun = [
        *python,
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        "-m",
        "strata.train.runner",
    ]
    own = ["--settings", str(settings)]
    with ExitStack() as stack:
        for name, command in (
            ("ranks", [*python, "tests.support.fake_ranks", *own] if pretended else [*torchrun, *own]),
            ("orchestrator", [*python, "strata.train.orchestrator", *own]),
            ("api", [*python, api, *own]),
        ):
            stack.enter_context(_process(command, logs / f"{name}.log"))
        yield _ready(data, logs)


@contextmanager
def _process(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    environment = {
        **process_environment(),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    with log.open("wb") as out:
        child = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
    try:
        yield child
    finally:
        child.terminate()
        try:
            child.wait(20)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _ready(data: Path, logs: Path) -> Processes:
    deadline_s = time.monotonic() + START_S
    last = "no address"
    while time.monotonic() < deadline_s:
        address, key = data / "api.address", data / "api.key"
        if address.exists() and key.exists():
            found = Processes(address.read_text().strip(), key.read_text().strip(), data, logs)
            try:
                reply = httpx.get(f"{found.url}/health", headers={"X-API-Key": found.key}, timeout=30)
                last = reply.text
                if reply.status_code == 200:
                    return found
            except httpx.TransportError as error:
                last = repr(error)
        time.sleep(0.1)
    told = "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in sorted(logs.iterdir()))
    raise AssertionError(f"not ready within {START_S:g} s: {last}\n{told}")
