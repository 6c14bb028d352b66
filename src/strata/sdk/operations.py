"""Operations of the training SDK as requests, and their results as values (`Datum`, `Pass`, `Sample`,
`SamplingParams`); no I/O.
"""

from __future__ import annotations

import array
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypedDict, TypeVar

import httpx
import msgspec

from strata.base.errors import Code, StrataError
from strata.sdk.server_calls import SendRequest, post
from strata.train.core import model_options, ops
from strata.train.core.sampling import VersionSpan
from strata.train.wire import native

T = TypeVar("T")
Numbers = Sequence[float] | Sequence[int]


@dataclass(frozen=True)
class Datum:
    """One sequence: what the model reads, and per token what the loss needs. Position i predicts target i."""

    tokens: Sequence[int]
    targets: Sequence[int]
    weights: Sequence[float] | None = None
    """1 for every token unless given; any real numbers."""
    advantages: Sequence[float] | None = None
    logprobs: Sequence[float] | None = None
    """Log probabilities of the sampler that the tokens came from."""
    more: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Inputs of a loss beyond these, one number per token."""

    def wire(self) -> ops.Datum:
        inputs: dict[str, ops.Tensor] = {"target_tokens": _dense(self.targets, "q", ops.DType.I64)}
        named = {"weights": self.weights, "advantages": self.advantages, "logprobs": self.logprobs}
        for name, values in {**named, **self.more}.items():
            if values is not None:
                inputs[name] = _dense(values, "f", ops.DType.F32)
        return ops.Datum(tokens=_to_bytes(self.tokens, "i"), inputs=inputs)


@dataclass(frozen=True)
class Pass:
    """What came of a pass, in the order of the datums."""

    metrics: Mapping[str, float]
    outputs: Sequence[Mapping[str, array.array[float]]]

    @property
    def loss(self) -> float:
        """The sum over all tokens, as every loss is one."""
        return self.metrics["loss:sum"]

    @property
    def logprobs(self) -> Sequence[array.array[float]]:
        return [each["logprobs"] for each in self.outputs]


@dataclass(frozen=True)
class Sample:
    """One continuation of a prompt."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    """The log probability of each token, in the distribution that it was drawn from."""
    stop_reason: str
    """`stop` or `length`."""
    versions: Sequence[VersionSpan] = ()
    """Which weights drew the tokens, if the sampler is in flight: runs of tokens, each with the number of its save."""


class SamplingParams(TypedDict, total=False):
    """How a sampler draws. What is not given is the server's default: temperature 1, the model's end of text stops."""

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    stop: Sequence[str | int]
    """Strings and tokens beside the end of text; nothing stops it if this is empty."""
    max_staleness: int
    """So many in-flight saves may end while the sample runs; the next one cancels it. Only for an in-flight sampler."""


@dataclass(frozen=True)
class ClientOperation(Generic[T]):
    """A request for an operation, and how its result is read."""

    send: SendRequest
    read: Callable[[httpx.Response], T]
    accept: str = "application/json"

    def result(self, reply: httpx.Response) -> T:
        return self.read(_raise_failure(reply))


def create_model_operation(
    session_id: str,
    number: int,
    base_model: str,
    lora: model_options.LoraConfig | None,
    *,
    schedule: model_options.Schedule | None = None,
    user_metadata: Mapping[str, str] | None = None,
) -> ClientOperation[str]:
    body = {
        "session_id": session_id,
        "model_seq_id": number,
        "base_model": base_model,
        "lora_config": None if lora is None else msgspec.to_builtins(lora),
        "schedule": None if schedule is None else msgspec.to_builtins(schedule),
        "user_metadata": user_metadata,
    }
    return ClientOperation(post("/api/v1/create_model", body), lambda reply: str(reply.json()["model_id"]))


def pass_operation(
    model_id: str, seq: int, data: Sequence[Datum], loss: str, config: Mapping[str, float], *, forward_only: bool
) -> ClientOperation[Pass]:
    body = native.PassBody(
        model_id=model_id,
        seq_id=seq,
        loss=loss,
        config=config,
        forward_only=forward_only,
        datums=[datum.wire() for datum in data],
    )
    headers = {"Content-Type": native.MEDIA_TYPE}
    return ClientOperation(
        SendRequest("POST", "/api/v1/forward_backward", native.encode(body), headers), _pass, native.MEDIA_TYPE
    )


def optim_step_operation(
    model_id: str, seq: int, adam: model_options.AdamParams
) -> ClientOperation[Mapping[str, float]]:
    body = {"model_id": model_id, "seq_id": seq, "adam_params": msgspec.to_builtins(adam)}
    return ClientOperation(post("/api/v1/optim_step", body), lambda reply: dict(reply.json()["metrics"]))


def save_operation(route: str, model_id: str, seq: int, name: str, *, overwrite: bool) -> ClientOperation[str]:
    body = {"model_id": model_id, "seq_id": seq, "path": name, "overwrite": overwrite}
    return ClientOperation(post(f"/api/v1/{route}", body), lambda reply: str(reply.json()["path"]))


def load_weights_operation(model_id: str, seq: int, path: str, *, optimizer: bool) -> ClientOperation[None]:
    body = {"model_id": model_id, "seq_id": seq, "path": path, "optimizer": optimizer}
    return ClientOperation(post("/api/v1/load_weights", body), lambda _: None)


def abort_gradients_operation(model_id: str, seq: int) -> ClientOperation[None]:
    return ClientOperation(post("/api/v1/abort_gradient_epoch", {"model_id": model_id, "seq_id": seq}), lambda _: None)


def copy_for_sampler_operation(
    model_id: str, seq: int, number: int, read: Callable[[str], T], *, inflight: bool
) -> ClientOperation[T]:
    """A copy of the model in the server's memory; `read` makes of its id what the caller wants."""
    body = {"model_id": model_id, "seq_id": seq, "sampling_session_seq_id": number}
    if inflight:
        body["kind"] = "inflight"
    send = post("/api/v1/save_weights_for_sampler", body)
    return ClientOperation(send, lambda reply: read(str(reply.json()["sampling_session_id"])))


def sample_operation(
    sampler_id: str, seq: int, prompt: Sequence[int], num_samples: int, params: SamplingParams
) -> ClientOperation[Sequence[Sample]]:
    drawing = params.copy()
    staleness = drawing.pop("max_staleness", None)
    body = {
        **_sample_body(sampler_id, seq, prompt, drawing),
        "num_samples": num_samples,
        "max_staleness": staleness,
    }
    return ClientOperation(post("/api/v1/asample", body), _samples)


def logprobs_operation(sampler_id: str, seq: int, tokens: Sequence[int]) -> ClientOperation[Sequence[float | None]]:
    # The server samples at least one token; it is not used here.
    body = {**_sample_body(sampler_id, seq, tokens, {"max_tokens": 1}), "prompt_logprobs": True}
    return ClientOperation(post("/api/v1/asample", body), lambda reply: list(reply.json()["prompt_logprobs"]))


def open_sampler_request(session_id: str, number: int, base_model: str | None, path: str | None) -> SendRequest:
    body = {
        "session_id": session_id,
        "sampling_session_seq_id": number,
        "base_model": base_model,
        "model_path": path,
    }
    return post("/api/v1/create_sampling_session", body)


def _sample_body(sampler_id: str, seq: int, prompt: Sequence[int], params: SamplingParams) -> dict[str, Any]:
    return {
        "sampling_session_id": sampler_id,
        "seq_id": seq,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": list(prompt)}]},
        "sampling_params": params,
    }


def _samples(reply: httpx.Response) -> Sequence[Sample]:
    sequences = reply.json()["sequences"]
    return [
        Sample(
            each["tokens"],
            each["logprobs"],
            str(each["stop_reason"]),
            [VersionSpan(**span) for span in each.get("versions", ())],
        )
        for each in sequences
    ]


def _raise_failure(reply: httpx.Response) -> httpx.Response:
    """The reply, unless it says that the operation failed."""
    if reply.headers.get("content-type", "").startswith("application/json"):
        content = reply.json()
        if isinstance(content, dict) and "error" in content:
            code = Code.INVALID if content.get("category") == "user" else Code.UNAVAILABLE
            raise StrataError(code, content["error"], category=content.get("category"))
    return reply


def _pass(reply: httpx.Response) -> Pass:
    result = ops.decode_pass_result(reply.content)
    outputs = [{name: _floats(dense) for name, dense in each.fields.items()} for each in result.outputs]
    return Pass(dict(result.metrics), outputs)


def _floats(dense: ops.Dense) -> array.array[float]:
    return _native(array.array("f", dense.data))


def _dense(values: Numbers, typecode: str, dtype: ops.DType) -> ops.Dense:
    return ops.Dense(dtype, (len(values),), _to_bytes(values, typecode))


def _to_bytes(values: Numbers, typecode: str) -> bytes:
    try:
        return _native(array.array(typecode, values)).tobytes()
    except (TypeError, OverflowError) as error:
        raise StrataError(Code.INVALID, f"these numbers do not fit: {error}") from None


def _native(numbers: array.array[Any]) -> array.array[Any]:
    """Converts between this machine's order of bytes and the wire's, which is little-endian."""
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
