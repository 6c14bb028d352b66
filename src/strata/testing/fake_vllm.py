"""As much of vLLM's server as an inference endpoint needs, without a model: it passes the suite that vLLM passes.

What it answers follows from the bytes of the weights it was told of: two versions differ, and one is always the same.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import socket
from pathlib import Path
from typing import Any, Final, Self

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

BASE: Final = "tiny"
VOCABULARY: Final = 500
_starts: Final = itertools.count(1)


class FakeVllm:
    def __init__(self) -> None:
        self.adapters: dict[str, Path] = {}
        self.whole = "as it was started"
        self.asked: list[str] = []
        """Method and path of every request, with the name that it gave."""
        self.told = asyncio.Event()
        """Set when it is told of weights while it is blocked."""
        self.replaced = asyncio.Event()
        """Set when a whole model has taken the place of another."""
        self.broken = False
        """Whether it answers requests for samples with an error."""
        self._free = asyncio.Event()
        self._free.set()
        self._started = next(_starts)
        self._paused = False
        self.url = ""
        self.authorization: set[str] = set()

    async def __aenter__(self) -> Self:
        routes = [
            Route("/health", self._health),
            Route("/v1/models", self._models),
            Route("/metrics", self._metrics),
            *(
                Route(path, self._post, methods=["POST"])
                for path in (
                    "/v1/load_lora_adapter",
                    "/v1/unload_lora_adapter",
                    "/v1/completions",
                    "/pause",
                    "/resume",
                    "/reset_prefix_cache",
                    "/collective_rpc",
                )
            ),
        ]
        config = uvicorn.Config(Starlette(routes=routes), log_level="error", lifespan="off", loop="asyncio")
        self._server = uvicorn.Server(config)
        # Listening from here on: who connects before it serves waits.
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
        """As if the process had died and another had taken its place."""
        self.adapters.clear()
        self.whole = "as it was started"
        self.replaced.clear()
        self._started = next(_starts)

    def block(self) -> None:
        """From now on weights are not taken, and who tells of them is not answered."""
        self.told.clear()
        self._free.clear()

    def release(self) -> None:
        self._free.set()

    async def _health(self, request: Request) -> Response:
        del request
        return Response()

    async def _models(self, request: Request) -> Response:
        self.authorization.add(request.headers.get("authorization", ""))
        cards: list[dict[str, Any]] = [{"id": BASE, "parent": None}]
        return JSONResponse({"data": cards + [{"id": name, "parent": BASE} for name in self.adapters]})

    async def _metrics(self, request: Request) -> Response:
        del request
        return PlainTextResponse(f"# TYPE x gauge\nprocess_start_time_seconds {self._started}.5e+09\n")

    async def _post(self, request: Request) -> Response:
        body: dict[str, Any] = json.loads(await request.body() or b"{}")
        path = request.url.path
        self.asked.append(f"{path} {body.get('lora_name') or body.get('model') or ''}".strip())
        match path:
            case "/v1/load_lora_adapter":
                return await self._load(body["lora_name"], Path(body["lora_path"]))
            case "/v1/unload_lora_adapter":
                gone = self.adapters.pop(body["lora_name"], None)
                return _error(404, "cannot be found") if gone is None else PlainTextResponse("Success")
            case "/v1/completions":
                return self._complete(body)
            case "/collective_rpc":
                assert self._paused, "weights are replaced only while nothing runs"
                self.told.set()
                await self._free.wait()
                self.whole = _digest(Path(body["kwargs"]["weights_path"]))
                self.replaced.set()
                return JSONResponse({"results": [None]})
            case "/reset_prefix_cache":
                return JSONResponse({"success": True})
            case _:
                self._paused = path == "/pause"
                return JSONResponse({"status": path.strip("/")})

    async def _load(self, name: str, folder: Path) -> Response:
        self.told.set()
        await self._free.wait()
        if name in self.adapters:
            return _error(400, f"The lora adapter '{name}' has already been loaded")
        if not (folder / "adapter_config.json").is_file():
            return _error(404, "No adapter found")
        self.adapters[name] = folder
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    def _complete(self, body: dict[str, Any]) -> Response:
        model = body["model"]
        if self.broken:
            return _error(500, "EngineDeadError")
        if model != BASE and model not in self.adapters:
            return _error(404, f"The model `{model}` does not exist.")
        if body["temperature"] == 0 and body["n"] > 1:
            return _error(400, "n must be 1 when using greedy sampling")
        weights = self.whole if model == BASE else _digest(self.adapters[model])
        chance = "" if body["temperature"] == 0 else f"{body['seed']}"
        choices = []
        for index in range(body["n"]):
            tokens, logprobs = [], []
            for place in range(body["max_tokens"]):
                drawn = hashlib.sha256(f"{weights} {body['prompt']} {chance} {index} {place}".encode()).digest()
                tokens.append(int.from_bytes(drawn[:4], "big") % VOCABULARY)
                logprobs.append(-1.0 - drawn[5] / 256)
            told = {"index": index, "token_ids": tokens, "logprobs": {"token_logprobs": logprobs}}
            choices.append({**told, "finish_reason": "length"})
        return JSONResponse({"model": model, "choices": choices})


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "code": status}}, status)


def _digest(folder: Path) -> str:
    """Of the weights themselves; what else lies in the folder is about them."""
    found = hashlib.sha256()
    for file in sorted(each for each in folder.iterdir() if each.suffix in (".safetensors", ".json")):
        found.update(file.read_bytes())
    return found.hexdigest()
