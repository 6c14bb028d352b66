"""Adapter for the engine vLLM: loading LoRA adapters and full weights, samples, detection of a restarted engine and of
which log probabilities it reports.

Adapters need `VLLM_ALLOW_RUNTIME_LORA_UPDATING=True` and `--enable-lora`, full models `VLLM_SERVER_DEV_MODE=1`, sleep
that and `--enable-sleep-mode`.

A full model has no name of its own in a request. So this client records which version was loaded, and into which
process, by its start time; a sample counts only if both were the same before and after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from strata.base.errors import Code, StrataError
from strata.train.core.sampling import SampledPart, SampleOperation, SampleResult
from strata.train.endpoints.client import MAX_REPLY, EngineClient, EngineReply, engine_error
from strata.train.endpoints.engine import ModelVersion, ReportPart
from strata.train.endpoints.vllm_completions import (
    Completion,
    CompletionStream,
    check_prompt_size,
    completion_bytes,
    completion_request,
    forced_token_request,
    is_forced,
    read_completion,
)
from strata.train.inference_settings import InferenceSettings

LIST_S: Final = 10.0
_REJECTED: Final = (400, 413, 422)
"""Statuses of a rejected request: the tokens or the length are not for this engine, as it was started."""
_START_TIME: Final = b"\nprocess_start_time_seconds "


class _Card(msgspec.Struct):
    id: str
    parent: str | None = None
    max_model_len: int | None = None


class _Cards(msgspec.Struct):
    data: Sequence[_Card]


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
        self._processed: bool | None = None
        """Whether log probabilities are of the distribution that tokens are drawn from; None until that was tried."""

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
        # Weights are loaded into every new process before it can be sampled, and it may have other arguments.
        self._processed = None
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
        model, base = version.name, None
        if version.full or sample.params.max_tokens is None:
            base = next((card for card in await self._cards() if card.parent is None), None)
        if version.full:
            await self._check_full(version)
            model = base.id if base else ""
        if sample.params.modifies_distribution and not await self._reports_processed(model, sample):
            raise StrataError(
                Code.UNSUPPORTED,
                "the engine's log probabilities are not those of the distribution that it draws from: it was started "
                "without --logprobs-mode processed_logprobs",
            )
        result = await self._draw(model, sample, seed, report, base.max_model_len if base else None)
        if version.full:
            await self._check_full(version)
        return result

    async def _draw(
        self, model: str, sample: SampleOperation, seed: int, report: ReportPart, context: int | None
    ) -> SampleResult:
        check_prompt_size(sample)
        body = completion_request(model, sample, seed, context)
        stream = None
        # vLLM does not stream what it says of a prompt. A stream is of any size: each line is read and forgotten.
        if not sample.wants_prompt and (sample.stream or completion_bytes(sample, body["max_tokens"]) > MAX_REPLY):
            stream = CompletionStream(sample, report if sample.stream else _forget)
        body["stream"] = stream is not None
        reply = await self._complete(body, None if stream is None else stream.read_line)
        if stream is not None:
            return read_completion(stream.completion(), model, sample)
        return await asyncio.to_thread(lambda: read_completion(reply.read(Completion), model, sample))

    async def _complete(self, body: dict[str, Any], read_line: Callable[[bytes], None] | None = None) -> EngineReply:
        reply = await self._client.post("/v1/completions", body, timeout_s=self._sample_s, read_line=read_line)
        if reply.status == 404:
            raise StrataError(Code.NOT_FOUND, f"the engine does not have {body['model']}")
        if reply.status in _REJECTED:
            raise StrataError(Code.UNSUPPORTED, f"the engine rejects it: {reply.excerpt}")
        if reply.status != 200:
            raise engine_error(reply, "completions")
        return reply

    async def _reports_processed(self, model: str, sample: SampleOperation) -> bool:
        """Tries it: a token that is the only one allowed has the probability 1 then. The model itself cannot give that
        to two tokens at one place."""
        if self._processed is None:
            bodies = [forced_token_request(model, sample.prompt, token) for token in (0, 1)]
            replies = await asyncio.gather(*(self._complete(body) for body in bodies))
            self._processed = all(is_forced(reply.read(Completion)) for reply in replies)
        return self._processed

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


def _forget(part: SampledPart) -> None:
    """No client reads the tokens while they are sampled."""
