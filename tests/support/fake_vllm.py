"""A fake of vLLM's server, as far as an inference endpoint needs it: it passes the conformance suite that vLLM passes.

It samples a model whose logits follow from the bytes of the loaded weights and the last token. Its log probabilities
are of the model itself unless it is started with `--logprobs-mode processed_logprobs`, as vLLM's are.

As a process it takes the arguments of vLLM, and `--fake-delay-s`, which every sample takes; `--fake-fault` says why it
dies when it starts, `--fake-ledger` names the file that says when it slept.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import hashlib
import itertools
import json
import math
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from strata.base.settings import process_environment

BASE: Final = "tiny"
ROOT: Final = Path(__file__).parents[2]
VOCABULARY: Final = 500
CONTEXT: Final = 512
_starts: Final = itertools.count(1)

Body = dict[str, Any]
Numbers = npt.NDArray[np.float64]
Handler = Callable[[Body], Awaitable[Response]]


@functools.lru_cache(maxsize=1000)
def logits(weights: str, last: int) -> Numbers:
    """What the model with these weights says after this token."""
    seed = hashlib.sha256(f"{weights} {last}".encode()).digest()[:8]
    return 2 * np.random.default_rng(int.from_bytes(seed)).standard_normal(VOCABULARY)


def decode(tokens: Sequence[int]) -> str:
    return "".join(chr(ord("a") + token % 26) for token in tokens)


def _log_softmax(values: Numbers) -> Numbers:
    values = values - values.max()
    total: float = np.exp(values).sum()
    return values - math.log(total)


def _process(values: Numbers, body: Body) -> Numbers:
    """Log probabilities of the distribution that is drawn from: temperature, then top-k, then top-p."""
    if body["temperature"] == 0:
        return _log_softmax(values)
    values = values / body["temperature"]
    order = np.argsort(-values)
    kept = np.ones(VOCABULARY, bool)
    if body.get("top_k", -1) > 0:
        kept[order[body["top_k"] :]] = False
    shares = np.exp(_log_softmax(np.where(kept, values, -np.inf)))[order]
    if body.get("top_p", 1.0) < 1:
        kept[order[np.cumsum(shares) - shares >= body["top_p"]]] = False
    return _log_softmax(np.where(kept, values, -np.inf))


@dataclass
class _Drawn:
    index: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[dict[str, float]] = field(default_factory=list)
    reason: str = "length"

    def part(self, start: int, end: int, *, last: bool) -> Body:
        logprobs = {"token_logprobs": self.logprobs[start:end], "top_logprobs": self.tops[start:end]}
        reason = self.reason if last else None
        return {
            "index": self.index,
            "token_ids": self.tokens[start:end],
            "logprobs": logprobs,
            "finish_reason": reason,
        }


class FakeVllm:
    def __init__(
        self,
        *,
        uds: Path | None = None,
        key: str = "",
        delay_s: float = 0.0,
        ledger: Path | None = None,
        processed: bool = True,
        max_logprobs: int = 20,
    ) -> None:
        self._processed = processed
        """Whether its log probabilities are of the distribution that it draws from."""
        self._max_logprobs = max_logprobs
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
        cards: list[dict[str, Any]] = [{"id": BASE, "parent": None, "max_model_len": CONTEXT}]
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
        self.full_weights = weights_digest(Path(body["kwargs"]["weights_path"]))
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
        if (rejected := self._rejection(body)) is not None:
            return _error(400, rejected)
        weights = self.full_weights if model == BASE else weights_digest(self.adapters[model])
        choices = [self._draw(weights, body, index) for index in range(body["n"])]
        if body.get("stream"):
            return StreamingResponse(self._stream(body, choices), media_type="text/event-stream")
        async with self._sampling(choices):
            await asyncio.sleep(self.delay_s)
        prompt = self._score_prompt(weights, body)
        parts = [{**each.part(0, len(each.tokens), last=True), "prompt_logprobs": prompt} for each in choices]
        return JSONResponse({"model": model, "choices": parts})

    def _rejection(self, body: Body) -> str | None:
        if body["temperature"] == 0 and body["n"] > 1:
            return "n must be 1 when using greedy sampling"
        numbers = max(body.get("logprobs") or 0, body.get("prompt_logprobs") or 0)
        if numbers > self._max_logprobs or (body.get("stream") and body.get("prompt_logprobs")):
            return "no such log probabilities"
        fits = len(body["prompt"]) < CONTEXT and "" not in body.get("stop", ())
        return None if fits else "it does not fit"

    def _draw(self, weights: str, body: Body, index: int) -> _Drawn:
        name = f"{weights} {body['prompt']} {body.get('seed')} {index}"
        rng = np.random.default_rng(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]))
        drawn, last = _Drawn(index), body["prompt"][-1]
        while len(drawn.tokens) < min(body["max_tokens"], CONTEXT - len(body["prompt"])):
            raw = logits(weights, last)
            allowed = body.get("allowed_token_ids")
            values = raw if allowed is None else np.where(np.isin(np.arange(VOCABULARY), allowed), raw, -np.inf)
            processed = _process(values, body)
            greedy = body["temperature"] == 0
            last = int(processed.argmax() if greedy else rng.choice(VOCABULARY, p=np.exp(processed)))
            reported = np.maximum(processed if self._processed else _log_softmax(raw), -9999.0)
            likeliest = np.argsort(-reported, kind="stable")[: body.get("logprobs") or 0].tolist()
            drawn.tokens.append(last)
            drawn.logprobs.append(float(reported[last]))
            drawn.tops.append({f"token_id:{token}": float(reported[token]) for token in (last, *likeliest)})
            stopped = any(stop in decode(drawn.tokens) for stop in body.get("stop", ()))
            if stopped or last in body.get("stop_token_ids", ()):
                drawn.reason = "stop"
                break
        return drawn

    def _score_prompt(self, weights: str, body: Body) -> list[Body | None] | None:
        if body.get("prompt_logprobs") is None:
            return None
        places: list[Body | None] = [None]
        for last, token in itertools.pairwise(body["prompt"]):
            values = _log_softmax(logits(weights, last))
            likeliest = np.argsort(-values, kind="stable")[: body["prompt_logprobs"]].tolist()
            places.append({str(each): {"logprob": float(values[each])} for each in (token, *likeliest)})
        return places

    @asynccontextmanager
    async def _sampling(self, choices: Sequence[_Drawn]) -> AsyncIterator[None]:
        self._open_samples += 1
        try:
            yield
        finally:
            self._open_samples -= 1
        self._sampled_tokens += sum(len(each.tokens) for each in choices)

    async def _stream(self, body: Body, choices: Sequence[_Drawn]) -> AsyncIterator[bytes]:
        """A token of each choice at a time; the reason with the last one."""
        async with self._sampling(choices):
            for place in range(body["max_tokens"]):
                await asyncio.sleep(self.delay_s / body["max_tokens"])
                for choice in choices:
                    if place < len(choice.tokens):
                        part = choice.part(place, place + 1, last=place == len(choice.tokens) - 1)
                        yield b"data: " + json.dumps({"model": body["model"], "choices": [part]}).encode() + b"\n\n"
            yield b"data: [DONE]\n\n"


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "code": status}}, status)


def weights_digest(folder: Path) -> str:
    """The digest of the weights and their configuration."""
    digest = hashlib.sha256()
    for file in sorted(file for file in folder.iterdir() if file.suffix in (".safetensors", ".json")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


async def _serve(key: str, options: argparse.Namespace) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with FakeVllm(
        uds=options.uds,
        key=key,
        delay_s=options.fake_delay_s,
        ledger=options.fake_ledger,
        processed=options.logprobs_mode == "processed_logprobs",
        max_logprobs=options.max_logprobs,
    ) as engine:
        engine.restart()
        await stop.wait()


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--uds", type=Path, required=True)
    parser.add_argument("--logprobs-mode", default="raw_logprobs")
    parser.add_argument("--max-logprobs", type=int, default=20)
    parser.add_argument("--fake-delay-s", type=float, default=0.0)
    parser.add_argument("--fake-fault", default="")
    parser.add_argument("--fake-ledger", type=Path)
    options, _ = parser.parse_known_args(arguments)
    if options.fake_fault:
        raise ValueError(options.fake_fault)
    asyncio.run(_serve(process_environment()["VLLM_API_KEY"], options))


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
