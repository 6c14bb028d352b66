"""vLLM's OpenAI server. Adapters are loaded beside the base under a name each; a whole model takes the base's place.

Adapters need `VLLM_ALLOW_RUNTIME_LORA_UPDATING=True` and `--enable-lora`, whole models `VLLM_SERVER_DEV_MODE=1`.

A whole model has no name of its own in a request. So we remember which one the process was told of, and which process
that was, by when it was started; a sample counts only if both were the same before and after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec
import numpy as np

from strata.base.errors import Code, StrataError
from strata.train.core.sampling import Sample, SampledSequence, SampleResult
from strata.train.endpoints.client import EngineClient, Reply, refuse
from strata.train.endpoints.engine import Version
from strata.train.settings import Inference

LIST_S: Final = 10.0
_STARTED: Final = b"\nprocess_start_time_seconds "


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


class _Success(msgspec.Struct):
    success: bool = True


class VllmEngine:
    def __init__(self, client: EngineClient, settings: Inference) -> None:
        self._client = client
        self._push_s = settings.push_timeout_s
        self._sample_s = settings.sample_timeout_s
        self._whole: tuple[str, str] | None = None
        """The version that was put in the base's place, and when the process that was told so began."""

    async def close(self) -> None:
        await self._client.close()

    async def versions(self) -> Sequence[str]:
        adapters = [card.id for card in await self._cards() if card.parent is not None]
        if self._whole is None:
            return adapters
        if self._whole[1] != await self._started():
            self._whole = None
            return adapters
        return [*adapters, self._whole[0]]

    async def take(self, version: Version) -> None:
        await asyncio.to_thread(version.check)
        if version.whole:
            await self._take_whole(version)
            return
        body = {"lora_name": version.name, "lora_path": str(version.folder)}
        reply = await self._client.post("/v1/load_lora_adapter", body, timeout_s=self._push_s)
        if reply.status != 200 and version.name not in await self.versions():
            raise refuse(reply, "load_lora_adapter")

    async def _take_whole(self, version: Version) -> None:
        """Requests that run are waited for, then nothing runs until the new weights are in place."""
        if version.name in await self.versions():
            return
        started = await self._started()
        self._whole = None
        await self._told("/pause?mode=wait", None)
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(version.folder)}}
        await self._told("/collective_rpc", body)
        # What it remembers of prompts was computed with the weights before.
        cleared = await self._told("/reset_prefix_cache", None)
        if cleared.content and not cleared.read(_Success).success:
            raise StrataError(Code.UNAVAILABLE, "the engine did not forget what it computed with the weights before")
        await self._told("/resume", None)
        if await self._started() != started:
            raise StrataError(Code.UNAVAILABLE, "the engine was started anew while it was told of new weights")
        self._whole = version.name, started

    async def _told(self, path: str, body: dict[str, Any] | None) -> Reply:
        reply = await self._client.post(path, body, timeout_s=self._push_s)
        if reply.status != 200:
            raise refuse(reply, path.strip("/").partition("?")[0])
        return reply

    async def drop(self, name: str) -> None:
        if self._whole is not None and self._whole[0] == name:
            return
        reply = await self._client.post("/v1/unload_lora_adapter", {"lora_name": name}, timeout_s=LIST_S)
        if reply.status not in (200, 404):
            raise refuse(reply, "unload_lora_adapter")

    async def sample(self, version: Version, sample: Sample, seed: int) -> SampleResult:
        model = version.name
        if version.whole:
            await self._check_whole(version)
            model = next((card.id for card in await self._cards() if card.parent is None), "")
        reply = await self._client.post("/v1/completions", request(model, sample, seed), timeout_s=self._sample_s)
        if reply.status == 404:
            raise StrataError(Code.NOT_FOUND, f"the engine does not have {version.name}")
        if reply.status != 200:
            raise refuse(reply, "completions")
        if version.whole:
            await self._check_whole(version)
        return result(reply.read(_Completion), model, sample)

    async def _check_whole(self, version: Version) -> None:
        if self._whole is None or self._whole[0] != version.name or self._whole[1] != await self._started():
            raise StrataError(Code.NOT_FOUND, f"the engine does not have {version.name}")

    async def _cards(self) -> Sequence[_Card]:
        reply = await self._client.get("/v1/models", timeout_s=LIST_S)
        if reply.status != 200:
            raise refuse(reply, "models")
        return reply.read(_Cards).data

    async def _started(self) -> str:
        """Which process this is: the moment it began, as its metrics say."""
        reply = await self._client.get("/metrics", timeout_s=LIST_S)
        _, found, rest = (b"\n" + reply.content).partition(_STARTED)
        if reply.status != 200 or not found:
            raise StrataError(Code.UNSUPPORTED, "the engine does not say when it was started (/metrics)")
        return rest.partition(b"\n")[0].decode("ascii", "replace")[:64]


def request(model: str, sample: Sample, seed: int) -> dict[str, Any]:
    params = sample.params
    return {
        "model": model,
        "prompt": np.frombuffer(sample.prompt, "<i4").tolist(),
        # Without chance all samples are the same one, and engines refuse to draw it twice.
        "n": 1 if params.temperature == 0 else sample.num_samples,
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k if params.top_k > 0 else -1,
        "seed": seed,
        "stop_token_ids": list(params.stop_tokens),
        "ignore_eos": not params.end_tokens,
        "logprobs": 0,
        "return_token_ids": True,
        "skip_special_tokens": False,
    }


def result(completion: _Completion, model: str, sample: Sample) -> SampleResult:
    """Refused unless every number is there that was asked for, from the weights that were asked for."""
    choices = sorted(completion.choices, key=lambda each: each.index)
    wanted = 1 if sample.params.temperature == 0 else sample.num_samples
    if completion.model != model or len(choices) != wanted:
        raise StrataError(Code.UNAVAILABLE, f"the engine answered with {len(choices)} samples of {completion.model!r}")
    sequences = []
    for choice in choices:
        tokens, logprobs = list(choice.token_ids), list(choice.logprobs.token_logprobs)
        if not tokens or len(tokens) != len(logprobs) or not np.isfinite(logprobs).all():
            raise StrataError(Code.UNAVAILABLE, "the engine's log probabilities are not those of its tokens")
        try:
            packed = np.asarray(tokens, "<i4").tobytes()
        except OverflowError:
            raise StrataError(Code.UNAVAILABLE, "the engine's tokens are no tokens") from None
        stopped: Literal["stop", "length"] = "length" if choice.finish_reason == "length" else "stop"
        sequences.append(SampledSequence(packed, np.asarray(logprobs, "<f4").tobytes(), stopped))
    return SampleResult(sequences * (sample.num_samples if wanted == 1 and sample.num_samples > 1 else 1))
