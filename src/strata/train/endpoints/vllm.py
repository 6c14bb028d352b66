"""Adapter for the engine vLLM: loading LoRA adapters and full weights, completions with log probabilities, streams,
detection of a restarted engine.

Adapters need `VLLM_ALLOW_RUNTIME_LORA_UPDATING=True` and `--enable-lora`, full models `VLLM_SERVER_DEV_MODE=1`, sleep
that and `--enable-sleep-mode`.

A full model has no name of its own in a request. So this client records which version was loaded, and into which
process, by its start time; a sample counts only if both were the same before and after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec
import numpy as np

from strata.base.errors import Code, StrataError
from strata.train.core.sampling import MAX_RESULT_BYTES, SampledPart, SampledSequence, SampleOperation, SampleResult
from strata.train.endpoints.client import MAX_EXCERPT, EngineClient, EngineReply, engine_error
from strata.train.endpoints.engine import ModelVersion, ReportPart
from strata.train.settings import InferenceSettings

LIST_S: Final = 10.0
_REJECTED: Final = (400, 413, 422)
"""Statuses of a rejected request: the tokens or the length are not for this engine, as it was started."""
_START_TIME: Final = b"\nprocess_start_time_seconds "


class _Card(msgspec.Struct):
    id: str
    parent: str | None = None


class _Cards(msgspec.Struct):
    data: Sequence[_Card]


class _Logprobs(msgspec.Struct):
    token_logprobs: Sequence[float]


class _Choice(msgspec.Struct):
    index: int
    token_ids: Sequence[int]
    logprobs: _Logprobs
    finish_reason: str


class _Completion(msgspec.Struct):
    model: str
    choices: Sequence[_Choice]


class _PartChoice(msgspec.Struct):
    index: int
    token_ids: Sequence[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    """An event of a stream: a part of some choices, or an error."""

    model: str = ""
    choices: Sequence[_PartChoice] = ()
    error: Any = None


_events: Final = msgspec.json.Decoder(_Event)
_DATA: Final = b"data: "
_LAST: Final = b"[DONE]"


class _Sleeping(msgspec.Struct):
    is_sleeping: bool


class _Success(msgspec.Struct):
    success: bool = True


class VllmEngine:
    def __init__(self, client: EngineClient, settings: InferenceSettings) -> None:
        self._client = client
        self._push_s = settings.push_timeout_s
        self._sample_s = settings.sample_timeout_s
        self._full: tuple[str, str] | None = None
        """The full version that was loaded, and the start time of the process that loaded it."""

    async def close(self) -> None:
        await self._client.close()

    async def versions(self) -> Sequence[str]:
        adapters = [card.id for card in await self._cards() if card.parent is not None]
        if self._full is None:
            return adapters
        if self._full[1] != await self._start_time():
            self._full = None
            return adapters
        return [*adapters, self._full[0]]

    async def load_version(self, version: ModelVersion) -> None:
        await asyncio.to_thread(version.check)
        if version.full:
            await self._load_full(version)
            return
        body = {"lora_name": version.name, "lora_path": str(version.folder)}
        reply = await self._client.post("/v1/load_lora_adapter", body, timeout_s=self._push_s)
        if reply.status != 200 and version.name not in await self.versions():
            raise engine_error(reply, "load_lora_adapter")

    async def _load_full(self, version: ModelVersion) -> None:
        """Wait for running requests, then hold new ones until the new weights are loaded."""
        if version.name in await self.versions():
            return
        started = await self._start_time()
        self._full = None
        await self._post("/pause?mode=wait", None)
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(version.folder)}}
        await self._post("/collective_rpc", body)
        # The prefix cache was computed with the old weights.
        cleared = await self._post("/reset_prefix_cache", None)
        if cleared.content and not cleared.read(_Success).success:
            raise StrataError(
                Code.UNAVAILABLE, "the engine did not reset its prefix cache, which holds results of the old weights"
            )
        await self._post("/resume", None)
        if await self._start_time() != started:
            raise StrataError(Code.UNAVAILABLE, "the engine restarted while it loaded new weights")
        self._full = version.name, started

    async def _post(self, path: str, body: dict[str, Any] | None) -> EngineReply:
        reply = await self._client.post(path, body, timeout_s=self._push_s)
        if reply.status != 200:
            raise engine_error(reply, path.strip("/").partition("?")[0])
        return reply

    async def unload_version(self, name: str) -> None:
        if self._full is not None and self._full[0] == name:
            return
        reply = await self._client.post("/v1/unload_lora_adapter", {"lora_name": name}, timeout_s=LIST_S)
        if reply.status not in (200, 404):
            raise engine_error(reply, "unload_lora_adapter")

    async def sleep(self) -> None:
        """Free the devices: weights go to the host, the KV cache is lost. Returns when the engine says that it sleeps.
        It aborts requests, so it has to have none."""
        await self._post("/sleep?level=1", None)
        if not await self.is_asleep():
            raise StrataError(Code.UNAVAILABLE, "the engine was told to sleep, and is awake")

    async def wake(self) -> None:
        """Idempotent, as `sleep` is."""
        if await self.is_asleep():
            await self._post("/wake_up", None)
            if await self.is_asleep():
                raise StrataError(Code.UNAVAILABLE, "the engine was woken, and sleeps")

    async def is_asleep(self) -> bool:
        reply = await self._client.get("/is_sleeping", timeout_s=LIST_S)
        if reply.status != 200:
            raise engine_error(reply, "is_sleeping")
        return reply.read(_Sleeping).is_sleeping

    async def sample(
        self, version: ModelVersion, sample: SampleOperation, seed: int, report: ReportPart
    ) -> SampleResult:
        model = version.name
        if version.full:
            await self._check_full(version)
            model = next((card.id for card in await self._cards() if card.parent is None), "")
        stream = _Stream(sample, report) if sample.stream else None
        reply = await self._client.post(
            "/v1/completions",
            request(model, sample, seed),
            timeout_s=self._sample_s,
            read_line=None if stream is None else stream.read_line,
        )
        if reply.status == 404:
            raise StrataError(Code.NOT_FOUND, f"the engine does not have {version.name}")
        if reply.status in _REJECTED:
            raise StrataError(Code.UNSUPPORTED, f"the engine rejects it: {reply.excerpt}")
        if reply.status != 200:
            raise engine_error(reply, "completions")
        if version.full:
            await self._check_full(version)
        return result(reply.read(_Completion) if stream is None else stream.completion(), model, sample)

    async def _check_full(self, version: ModelVersion) -> None:
        if self._full is None or self._full[0] != version.name or self._full[1] != await self._start_time():
            raise StrataError(Code.NOT_FOUND, f"the engine does not have {version.name}")

    async def _cards(self) -> Sequence[_Card]:
        reply = await self._client.get("/v1/models", timeout_s=LIST_S)
        if reply.status != 200:
            raise engine_error(reply, "models")
        return reply.read(_Cards).data

    async def _start_time(self) -> str:
        """The start time of the process, from its metrics: it identifies the process."""
        reply = await self._client.get("/metrics", timeout_s=LIST_S)
        _, match, rest = (b"\n" + reply.content).partition(_START_TIME)
        if reply.status != 200 or not match:
            raise StrataError(Code.UNSUPPORTED, "the engine does not report its start time (/metrics)")
        return rest.partition(b"\n")[0].decode("ascii", "replace")[:64]


def request(model: str, sample: SampleOperation, seed: int) -> dict[str, Any]:
    params = sample.params
    return {
        "model": model,
        "prompt": np.frombuffer(sample.prompt, "<i4").tolist(),
        # Greedy samples are all the same, and engines reject n > 1 for them.
        "n": 1 if params.temperature == 0 else sample.num_samples,
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k if params.top_k > 0 else -1,
        "seed": seed,
        "stop_token_ids": list(params.stop_tokens),
        "ignore_eos": not params.end_tokens,
        "logprobs": 0,
        "stream": sample.stream,
        "return_token_ids": True,
        "skip_special_tokens": False,
    }


@dataclass
class _Drawn:
    """What a stream has brought of a choice."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = ""


class _Stream:
    """Reads the events of a stream, reports their tokens, and puts the completion together."""

    def __init__(self, sample: SampleOperation, report: ReportPart) -> None:
        greedy = sample.params.temperature == 0
        self._copies, self._choices = (sample.num_samples, 1) if greedy else (1, sample.num_samples)
        self._room = MAX_RESULT_BYTES // (2 * np.dtype("<f4").itemsize)
        self._report = report
        self._model = ""
        self._drawn: dict[int, _Drawn] = {}
        self._ended = False

    def read_line(self, line: bytes) -> None:
        if not line.startswith(_DATA):
            return
        data = line.removeprefix(_DATA).strip()
        if data == _LAST:
            self._ended = True
            return
        try:
            event = _events.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise StrataError(Code.UNAVAILABLE, f"the engine's stream cannot be read: {error}") from None
        if event.error is not None:
            raise StrataError(Code.UNAVAILABLE, f"the engine failed: {str(event.error)[:MAX_EXCERPT]!r}")
        self._model = event.model or self._model
        for choice in event.choices:
            self._read(choice)

    def _read(self, choice: _PartChoice) -> None:
        tokens = list(choice.token_ids or ())
        logprobs = [] if choice.logprobs is None else list(choice.logprobs.token_logprobs)
        self._room -= max(len(tokens), len(logprobs))
        if self._room < 0 or not 0 <= choice.index < self._choices:
            raise StrataError(Code.UNAVAILABLE, "the engine's stream has more than was requested")
        drawn = self._drawn.setdefault(choice.index, _Drawn())
        start = len(drawn.tokens)
        drawn.tokens += tokens
        drawn.logprobs += logprobs
        drawn.finish_reason = choice.finish_reason or drawn.finish_reason
        # The last token may be one that is not shown.
        shown = len(tokens) - (1 if drawn.finish_reason else 0)
        if shown > 0:
            packed, numbers = _pack(tokens[:shown], logprobs[:shown])
            # Greedy samples are all the same, and one was drawn for all of them.
            for index in range(self._copies) if self._copies > 1 else (choice.index,):
                self._report(SampledPart(index, start, packed, numbers))

    def completion(self) -> _Completion:
        if not self._ended:
            raise StrataError(Code.UNAVAILABLE, "the engine's stream broke off")
        choices = [
            _Choice(index, drawn.tokens, _Logprobs(drawn.logprobs), drawn.finish_reason)
            for index, drawn in self._drawn.items()
        ]
        return _Completion(self._model, choices)


def result(completion: _Completion, model: str, sample: SampleOperation) -> SampleResult:
    """UNAVAILABLE unless the reply has every requested number, from the requested weights."""
    choices = sorted(completion.choices, key=lambda choice: choice.index)
    wanted = 1 if sample.params.temperature == 0 else sample.num_samples
    if completion.model != model or len(choices) != wanted:
        raise StrataError(Code.UNAVAILABLE, f"the engine replied with {len(choices)} samples of {completion.model!r}")
    sequences = [_sequence(choice) for choice in choices]
    return SampleResult(sequences * (sample.num_samples if wanted == 1 and sample.num_samples > 1 else 1))


def _sequence(choice: _Choice) -> SampledSequence:
    tokens, logprobs = _pack(choice.token_ids, choice.logprobs.token_logprobs)
    stopped: Literal["stop", "length"] = "length" if choice.finish_reason == "length" else "stop"
    return SampledSequence(tokens, logprobs, stopped)


def _pack(tokens: Sequence[int], logprobs: Sequence[float]) -> tuple[bytes, bytes]:
    if not tokens or len(tokens) != len(logprobs) or not np.isfinite(logprobs).all():
        raise StrataError(Code.UNAVAILABLE, "the engine's log probabilities are not those of its tokens")
    try:
        return np.asarray(tokens, "<i4").tobytes(), np.asarray(logprobs, "<f4").tobytes()
    except OverflowError:
        raise StrataError(Code.UNAVAILABLE, "the engine's tokens are out of range") from None
