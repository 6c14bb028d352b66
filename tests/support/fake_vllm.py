"""A fake of vLLM's server, as far as an inference endpoint needs it: it passes the conformance suite that vLLM passes.

Its samples follow from the bytes of the loaded weights: two versions differ, and one is always the same.

As a process it takes the arguments of vLLM, and `--fake-delay-s`, which every sample takes; `--fake-fault` says why it
dies when it starts, `--fake-ledger` names the file that says when it slept.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import itertools
import json
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, Self

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from strata.base.settings import process_environment

BASE: Final = "tiny"
ROOT: Final = Path(__file__).parents[2]
VOCABULARY: Final = 500
_starts: Final = itertools.count(1)

Body = dict[str, Any]
Handler = Callable[[Body], Awaitable[Response]]


class FakeVllm:
    def __init__(
        self, *, uds: Path | None = None, key: str = "", delay_s: float = 0.0, ledger: Path | None = None
    ) -> None:
        self._ledger = ledger
        """The file that gets a line whenever it falls asleep or is awake."""
        self._uds = uds
        self._key = key
        self.delay_s = delay_s
        """How long a sample takes."""
        self._open_samples = 0
        self._sampled_tokens = 0
        self.adapters: dict[str, Path] = {}
        self.full_weights = "initial"
        self.requests: list[str] = []
        """Path of every POST, with the version that it names."""
        self.load_requested = asyncio.Event()
        """Set when a request to load weights arrives."""
        self.replaced = asyncio.Event()
        """Set when a full model has been loaded."""
        self.broken = False
        """Whether it replies to sample requests with an error."""
        self._unblocked = asyncio.Event()
        self._unblocked.set()
        self._started = next(_starts)
        self._paused = False
        self.asleep = False
        self.insomniac = False
        """Whether it stays awake when it is told to sleep."""
        self.url = ""
        self.authorization: set[str] = set()
        self._handlers: dict[str, Handler] = {
            "/v1/load_lora_adapter": self._load,
            "/v1/unload_lora_adapter": self._unload,
            "/v1/completions": self._complete,
            "/collective_rpc": self._replace_weights,
            "/reset_prefix_cache": self._reset_cache,
            "/pause": self._pause,
            "/resume": self._resume,
            "/sleep": self._sleep,
            "/wake_up": self._wake_up,
        }

    async def __aenter__(self) -> Self:
        routes = [
            Route("/health", self._health),
            Route("/v1/models", self._models),
            Route("/metrics", self._metrics),
            Route("/load", self._load_level),
            Route("/is_sleeping", self._is_sleeping),
            *(Route(path, self._post, methods=["POST"]) for path in self._handlers),
        ]
        config = uvicorn.Config(Starlette(routes=routes), log_level="error", lifespan="off", loop="asyncio")
        self._server = uvicorn.Server(config)
        # It listens from here on: a client that connects before it serves waits.
        if self._uds is not None:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(str(self._uds))
            listener.listen()
            self.url = f"unix:{self._uds}"
        else:
            listener = socket.create_server(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self._serving = asyncio.create_task(self._server._serve([listener]))
        return self

    async def __aexit__(self, *_: object) -> None:
        self.release()
        self._server.should_exit = True
        self._server.force_exit = True
        await self._serving

    def restart(self) -> None:
        """Forget everything, as a process that died and was restarted."""
        self.adapters.clear()
        self.full_weights = "initial"
        self.replaced.clear()
        self._started = next(_starts)
        self._move(asleep=False)

    def block(self) -> None:
        """From now on requests to load weights hang."""
        self.load_requested.clear()
        self._unblocked.clear()

    def release(self) -> None:
        self._unblocked.set()

    async def _health(self, request: Request) -> Response:
        del request
        return Response()

    async def _models(self, request: Request) -> Response:
        self.authorization.add(request.headers.get("authorization", ""))
        cards: list[dict[str, Any]] = [{"id": BASE, "parent": None}]
        return JSONResponse({"data": cards + [{"id": name, "parent": BASE} for name in self.adapters]})

    async def _metrics(self, request: Request) -> Response:
        del request
        tokens = f'vllm:generation_tokens_total{{engine="0"}} {self._sampled_tokens}.0'
        return PlainTextResponse(f"# TYPE x gauge\nprocess_start_time_seconds {self._started}.5e+09\n{tokens}\n")

    async def _load_level(self, request: Request) -> Response:
        del request
        return JSONResponse({"server_load": self._open_samples})

    async def _post(self, request: Request) -> Response:
        body: Body = json.loads(await request.body() or b"{}")
        path = request.url.path
        if self._key and path.startswith("/v1") and request.headers.get("authorization") != f"Bearer {self._key}":
            return JSONResponse({"error": "Unauthorized"}, 401)
        self.requests.append(f"{path} {body.get('lora_name') or body.get('model') or ''}".strip())
        return await self._handlers[path](body)

    async def _load(self, body: Body) -> Response:
        assert not self.asleep, "an engine that sleeps gets no weights"
        name, folder = body["lora_name"], Path(body["lora_path"])
        self.load_requested.set()
        await self._unblocked.wait()
        if name in self.adapters:
            return _error(400, f"The lora adapter '{name}' has already been loaded")
        if not (folder / "adapter_config.json").is_file():
            return _error(404, "No adapter found")
        self.adapters[name] = folder
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload(self, body: Body) -> Response:
        adapter = self.adapters.pop(body["lora_name"], None)
        return _error(404, "cannot be found") if adapter is None else PlainTextResponse("Success")

    async def _replace_weights(self, body: Body) -> Response:
        assert not self.asleep, "an engine that sleeps gets no weights"
        assert self._paused, "weights are replaced only while nothing runs"
        self.load_requested.set()
        await self._unblocked.wait()
        self.full_weights = _digest(Path(body["kwargs"]["weights_path"]))
        self.replaced.set()
        return JSONResponse({"results": [None]})

    async def _reset_cache(self, body: Body) -> Response:
        del body
        return JSONResponse({"success": True})

    async def _pause(self, body: Body) -> Response:
        del body
        self._paused = True
        return JSONResponse({"status": "pause"})

    async def _resume(self, body: Body) -> Response:
        del body
        self._paused = False
        return JSONResponse({"status": "resume"})

    def _move(self, *, asleep: bool) -> None:
        self.asleep = asleep
        if self._ledger is not None:
            name = "engine" if self._uds is None else self._uds.name
            with self._ledger.open("a", encoding="utf-8") as file:
                file.write(f"{time.time()} {name} {'asleep' if asleep else 'awake'}\n")

    async def _sleep(self, body: Body) -> Response:
        del body
        if not self.insomniac:
            self._move(asleep=True)
        return Response()

    async def _wake_up(self, body: Body) -> Response:
        del body
        self._move(asleep=False)
        return Response()

    async def _is_sleeping(self, request: Request) -> Response:
        del request
        return JSONResponse({"is_sleeping": self.asleep})

    async def _complete(self, body: Body) -> Response:
        assert not self.asleep, "an engine that sleeps is not sampled"
        model = body["model"]
        if self.broken:
            return _error(500, "EngineDeadError")
        if model != BASE and model not in self.adapters:
            return _error(404, f"The model `{model}` does not exist.")
        if body["temperature"] == 0 and body["n"] > 1:
            return _error(400, "n must be 1 when using greedy sampling")
        weights = self.full_weights if model == BASE else _digest(self.adapters[model])
        seed = "" if body["temperature"] == 0 else f"{body['seed']}"
        choices = []
        for index in range(body["n"]):
            tokens, logprobs = [], []
            for position in range(body["max_tokens"]):
                digest = hashlib.sha256(f"{weights} {body['prompt']} {seed} {index} {position}".encode()).digest()
                tokens.append(int.from_bytes(digest[:4], "big") % VOCABULARY)
                logprobs.append(-1.0 - digest[5] / 256)
            choice = {"index": index, "token_ids": tokens, "logprobs": {"token_logprobs": logprobs}}
            choices.append({**choice, "finish_reason": "length"})
        if body.get("stream"):
            return StreamingResponse(self._stream(body, choices), media_type="text/event-stream")
        async with self._sampling(body):
            await asyncio.sleep(self.delay_s)
        return JSONResponse({"model": model, "choices": choices})

    @asynccontextmanager
    async def _sampling(self, body: Body) -> AsyncIterator[None]:
        self._open_samples += 1
        try:
            yield
        finally:
            self._open_samples -= 1
        self._sampled_tokens += body["n"] * body["max_tokens"]

    async def _stream(self, body: Body, choices: Sequence[dict[str, Any]]) -> AsyncIterator[bytes]:
        """A token of each choice at a time; the reason with the last one."""
        async with self._sampling(body):
            for position in range(body["max_tokens"]):
                await asyncio.sleep(self.delay_s / body["max_tokens"])
                last = position == body["max_tokens"] - 1
                for choice in choices:
                    part = {
                        "index": choice["index"],
                        "token_ids": [choice["token_ids"][position]],
                        "logprobs": {"token_logprobs": [choice["logprobs"]["token_logprobs"][position]]},
                        "finish_reason": "length" if last else None,
                    }
                    yield b"data: " + json.dumps({"model": body["model"], "choices": [part]}).encode() + b"\n\n"
            yield b"data: [DONE]\n\n"


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "code": status}}, status)


def _digest(folder: Path) -> str:
    """The digest of the weights and their configuration."""
    digest = hashlib.sha256()
    for file in sorted(file for file in folder.iterdir() if file.suffix in (".safetensors", ".json")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


async def _serve(uds: Path, key: str, delay_s: float, ledger: Path | None) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with FakeVllm(uds=uds, key=key, delay_s=delay_s, ledger=ledger) as engine:
        engine.restart()
        await stop.wait()


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--uds", type=Path, required=True)
    parser.add_argument("--fake-delay-s", type=float, default=0.0)
    parser.add_argument("--fake-fault", default="")
    parser.add_argument("--fake-ledger", type=Path)
    options, _ = parser.parse_known_args(arguments)
    if options.fake_fault:
        raise ValueError(options.fake_fault)
    asyncio.run(_serve(options.uds, process_environment()["VLLM_API_KEY"], options.fake_delay_s, options.fake_ledger))


def make_fake_package(folder: Path) -> Path:
    """A folder for PYTHONPATH in which `vllm` is this fake."""
    package = folder / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for each in (package, *package.parents[:2]):
        (each / "__init__.py").touch()
    importable = f"sys.path.append({str(ROOT)!r})"
    lines = ("import sys", importable, "from tests.support.fake_vllm import main", "main(sys.argv[1:])", "")
    (package / "api_server.py").write_text("\n".join(lines), encoding="utf-8")
    return folder
