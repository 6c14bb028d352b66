"""Train a model on a training server. Needs httpx, and nothing of the server's.

    with TrainingServer("http://127.0.0.1:5555", key) as server:
        model = server.create_model("tiny", rank=8)
        done = model.forward_backward([Datum(tokens, targets)])
        model.optim_step(learning_rate=1e-3).result()
        print(done.result().loss)

Every operation returns a future at once; the server does them in the order they were given. `AsyncTrainingServer` is
the same with `await`. Both are drivers of the flows in `strata.sdk.future`.
"""

from __future__ import annotations

import array
import asyncio
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar

import httpx
import msgspec

from strata.base.errors import Code, StrataError
from strata.sdk.future import Flow, Progress, Send, call, post, run, run_async, wait
from strata.train.core import ops
from strata.train.wire import native

T = TypeVar("T")
Numbers = Sequence[float] | Sequence[int]

PROGRESS_S: Final = 2.0
"""How often whoever wants to be told of progress is."""


@dataclass(frozen=True)
class Datum:
    """One sequence: what the model reads, and per token what the loss needs. Position i predicts target i."""

    tokens: Sequence[int]
    targets: Sequence[int]
    weights: Sequence[float] | None = None
    """1 for every token unless given; any real numbers."""
    advantages: Sequence[float] | None = None
    logprobs: Sequence[float] | None = None
    """Of the sampler that the tokens came from."""
    more: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Inputs of a loss beyond these, one number per token."""

    def wire(self) -> ops.Datum:
        inputs: dict[str, ops.Tensor] = {"target_tokens": _dense(self.targets, "q", ops.DType.I64)}
        named = {"weights": self.weights, "advantages": self.advantages, "logprobs": self.logprobs}
        for name, values in {**named, **self.more}.items():
            if values is not None:
                inputs[name] = _dense(values, "f", ops.DType.F32)
        return ops.Datum(tokens=_packed(self.tokens, "i"), inputs=inputs)


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
class Order(Generic[T]):
    """An operation as it is sent, and how its result is read."""

    send: Send
    read: Callable[[httpx.Response], T]
    accept: str = "application/json"

    def submit(self) -> Flow[str]:
        future = yield from call(self.send)
        return str(future["request_id"])

    def result(self, request_id: str, timeout_s: float | None, poll_s: float | None) -> Flow[T]:
        reply = yield from wait(request_id, self.accept, timeout_s=timeout_s, poll_s=poll_s)
        return self.read(_checked(reply))


def create_order(session_id: str, number: int, base_model: str, lora: ops.LoraConfig | None) -> Order[str]:
    body = {
        "session_id": session_id,
        "model_seq_id": number,
        "base_model": base_model,
        "lora_config": None if lora is None else msgspec.to_builtins(lora),
    }
    return Order(post("/api/v1/create_model", body), lambda reply: str(reply.json()["model_id"]))


def pass_order(
    model_id: str, seq: int, data: Sequence[Datum], loss: str, config: Mapping[str, float], *, forward_only: bool
) -> Order[Pass]:
    body = native.PassBody(
        model_id=model_id,
        seq_id=seq,
        loss=loss,
        config=config,
        forward_only=forward_only,
        datums=[datum.wire() for datum in data],
    )
    headers = {"Content-Type": native.MEDIA_TYPE}
    return Order(Send("POST", "/api/v1/forward_backward", native.encode(body), headers), _pass, native.MEDIA_TYPE)


def step_order(model_id: str, seq: int, adam: ops.AdamParams) -> Order[Mapping[str, float]]:
    body = {"model_id": model_id, "seq_id": seq, "adam_params": msgspec.to_builtins(adam)}
    return Order(post("/api/v1/optim_step", body), lambda reply: dict(reply.json()["metrics"]))


def save_order(model_id: str, seq: int, name: str, *, overwrite: bool) -> Order[str]:
    body = {"model_id": model_id, "seq_id": seq, "path": name, "overwrite": overwrite}
    return Order(post("/api/v1/save_weights", body), lambda reply: str(reply.json()["path"]))


def load_order(model_id: str, seq: int, path: str, *, optimizer: bool) -> Order[None]:
    body = {"model_id": model_id, "seq_id": seq, "path": path, "optimizer": optimizer}
    return Order(post("/api/v1/load_weights", body), lambda _: None)


def abort_order(model_id: str, seq: int) -> Order[None]:
    return Order(post("/api/v1/abort_gradient_epoch", {"model_id": model_id, "seq_id": seq}), lambda _: None)


class Future(Generic[T]):
    """A result that will be there."""

    def __init__(self, server: TrainingServer, order: Order[T], request_id: str) -> None:
        self._server = server
        self._order = order
        self.request_id = request_id

    def result(self, timeout_s: float | None = None, *, progress: Progress | None = None) -> T:
        """Waits for it. INVALID if the operation could not be done as it was asked for; the next one is not harmed."""
        return self._server.wait(self._order, self.request_id, timeout_s, progress)


class Model:
    """One model. Operations are numbered as they are accepted, so use one `Model` for one model."""

    def __init__(self, server: TrainingServer, model_id: str) -> None:
        self._server = server
        self._lock = threading.Lock()
        self._next = 1
        self.model_id = model_id

    def forward_backward(self, data: Sequence[Datum], loss: str = "cross_entropy", **config: float) -> Future[Pass]:
        """Add the gradients of a batch."""
        return self._submit(lambda seq: pass_order(self.model_id, seq, data, loss, config, forward_only=False))

    def forward(self, data: Sequence[Datum], loss: str = "cross_entropy", **config: float) -> Future[Pass]:
        """Losses and log probabilities of a batch; the gradients stay as they are."""
        return self._submit(lambda seq: pass_order(self.model_id, seq, data, loss, config, forward_only=True))

    def optim_step(self, learning_rate: float, **adam: float) -> Future[Mapping[str, float]]:
        """Apply the gradients with AdamW: beta1, beta2, eps, weight_decay and grad_clip_norm may be given."""
        params = ops.AdamParams(learning_rate=learning_rate, **adam)
        return self._submit(lambda seq: step_order(self.model_id, seq, params))

    def save(self, name: str, *, overwrite: bool = False) -> Future[str]:
        """Save weights and optimizer; the result is the path to load them from."""
        return self._submit(lambda seq: save_order(self.model_id, seq, name, overwrite=overwrite))

    def load(self, path: str, *, optimizer: bool = True) -> Future[None]:
        return self._submit(lambda seq: load_order(self.model_id, seq, path, optimizer=optimizer))

    def abort_gradients(self) -> Future[None]:
        """Throw away the gradients since the last step."""
        return self._submit(lambda seq: abort_order(self.model_id, seq))

    def _submit(self, order_of: Callable[[int], Order[T]]) -> Future[T]:
        # A number counts as used only when its operation was accepted: one that was refused must not leave a gap.
        with self._lock:
            order = order_of(self._next)
            future = Future(self._server, order, self._server.drive(order.submit()))
            self._next += 1
        return future


class TrainingServer:
    """A session with a training server. `progress` is told where an operation stands while it is waited for."""

    def __init__(
        self, url: str, key: str, *, progress: Progress | None = None, transport: httpx.BaseTransport | None = None
    ) -> None:
        self._http = httpx.Client(base_url=url, headers={"X-API-Key": key}, transport=transport)
        self._progress = progress
        self._models = 0
        self.session_id = ""

    def __enter__(self) -> Self:
        self.session_id = self.drive(_opened())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.drive(_finished(self.session_id, error))
        finally:
            self._http.close()

    def create_model(self, base_model: str, *, rank: int | None = 32, seed: int | None = None, **lora: Any) -> Model:
        """A model over the server's base. `rank` None trains the base itself, on a server that is set up for it."""
        config = None if rank is None else ops.LoraConfig(rank=rank, seed=seed, **lora)
        order = create_order(self.session_id, self._models, base_model, config)
        self._models += 1
        return Model(self, self.wait(order, self.drive(order.submit()), None, None))

    def load_model(self, path: str, *, optimizer: bool = True) -> Model:
        """A new model that goes on from a checkpoint."""
        saved = self.drive(call(post("/api/v1/weights_info", {"tinker_path": path})))
        model = self.create_model(saved["base_model"], **_lora_of(saved))
        model.load(path, optimizer=optimizer).result()
        return model

    def drive(self, flow: Flow[T], progress: Progress | None = None) -> T:
        return run(flow, self._http, progress)

    def wait(self, order: Order[T], request_id: str, timeout_s: float | None, progress: Progress | None) -> T:
        told = progress or self._progress
        return self.drive(order.result(request_id, timeout_s, PROGRESS_S if told else None), told)


class AsyncFuture(Generic[T]):
    """A result that will be there."""

    def __init__(self, server: AsyncTrainingServer, order: Order[T], request_id: str) -> None:
        self._server = server
        self._order = order
        self.request_id = request_id

    async def result(self, timeout_s: float | None = None, *, progress: Progress | None = None) -> T:
        return await self._server.wait(self._order, self.request_id, timeout_s, progress)


class AsyncModel:
    """`Model` with `await`."""

    def __init__(self, server: AsyncTrainingServer, model_id: str) -> None:
        self._server = server
        self._lock = asyncio.Lock()
        self._next = 1
        self.model_id = model_id

    async def forward_backward(
        self, data: Sequence[Datum], loss: str = "cross_entropy", **config: float
    ) -> AsyncFuture[Pass]:
        return await self._submit(lambda seq: pass_order(self.model_id, seq, data, loss, config, forward_only=False))

    async def forward(self, data: Sequence[Datum], loss: str = "cross_entropy", **config: float) -> AsyncFuture[Pass]:
        return await self._submit(lambda seq: pass_order(self.model_id, seq, data, loss, config, forward_only=True))

    async def optim_step(self, learning_rate: float, **adam: float) -> AsyncFuture[Mapping[str, float]]:
        params = ops.AdamParams(learning_rate=learning_rate, **adam)
        return await self._submit(lambda seq: step_order(self.model_id, seq, params))

    async def save(self, name: str, *, overwrite: bool = False) -> AsyncFuture[str]:
        return await self._submit(lambda seq: save_order(self.model_id, seq, name, overwrite=overwrite))

    async def load(self, path: str, *, optimizer: bool = True) -> AsyncFuture[None]:
        return await self._submit(lambda seq: load_order(self.model_id, seq, path, optimizer=optimizer))

    async def abort_gradients(self) -> AsyncFuture[None]:
        return await self._submit(lambda seq: abort_order(self.model_id, seq))

    async def _submit(self, order_of: Callable[[int], Order[T]]) -> AsyncFuture[T]:
        async with self._lock:
            order = order_of(self._next)
            future = AsyncFuture(self._server, order, await self._server.drive(order.submit()))
            self._next += 1
        return future


class AsyncTrainingServer:
    """`TrainingServer` with `await`."""

    def __init__(
        self,
        url: str,
        key: str,
        *,
        progress: Progress | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._http = httpx.AsyncClient(base_url=url, headers={"X-API-Key": key}, transport=transport)
        self._progress = progress
        self._models = 0
        self.session_id = ""

    async def __aenter__(self) -> Self:
        self.session_id = await self.drive(_opened())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.drive(_finished(self.session_id, error))
        finally:
            await self._http.aclose()

    async def create_model(
        self, base_model: str, *, rank: int | None = 32, seed: int | None = None, **lora: Any
    ) -> AsyncModel:
        config = None if rank is None else ops.LoraConfig(rank=rank, seed=seed, **lora)
        order = create_order(self.session_id, self._models, base_model, config)
        self._models += 1
        return AsyncModel(self, await self.wait(order, await self.drive(order.submit()), None, None))

    async def load_model(self, path: str, *, optimizer: bool = True) -> AsyncModel:
        saved = await self.drive(call(post("/api/v1/weights_info", {"tinker_path": path})))
        model = await self.create_model(saved["base_model"], **_lora_of(saved))
        await (await model.load(path, optimizer=optimizer)).result()
        return model

    async def drive(self, flow: Flow[T], progress: Progress | None = None) -> T:
        return await run_async(flow, self._http, progress)

    async def wait(self, order: Order[T], request_id: str, timeout_s: float | None, progress: Progress | None) -> T:
        told = progress or self._progress
        return await self.drive(order.result(request_id, timeout_s, PROGRESS_S if told else None), told)


def _opened() -> Flow[str]:
    session = yield from call(post("/api/v1/create_session", {"tags": ["strata"], "sdk_version": "strata"}))
    return str(session["session_id"])


def _finished(session_id: str, error: BaseException | None) -> Flow[None]:
    reason = {"type": "success" if error is None else "errored"}
    detail = None if error is None else type(error).__name__
    yield from call(post(f"/api/v1/sessions/{session_id}/finish", {"reason": reason, "detail": detail}))


def _lora_of(saved: Mapping[str, Any]) -> dict[str, Any]:
    if not saved["is_lora"]:
        return {"rank": None}
    parts = {name: saved[name] for name in ("train_unembed", "train_mlp", "train_attn")}
    return {"rank": saved["lora_rank"], **parts}


def _checked(reply: httpx.Response) -> httpx.Response:
    """The reply, unless it says that the operation failed."""
    if reply.headers.get("content-type", "").startswith("application/json"):
        found = reply.json()
        if isinstance(found, dict) and "error" in found:
            code = Code.INVALID if found.get("category") == "user" else Code.UNAVAILABLE
            raise StrataError(code, found["error"], category=found.get("category"))
    return reply


def _pass(reply: httpx.Response) -> Pass:
    result = ops.decode_pass_result(reply.content)
    outputs = [{name: _floats(dense) for name, dense in each.fields.items()} for each in result.outputs]
    return Pass(dict(result.metrics), outputs)


def _floats(dense: ops.Dense) -> array.array[float]:
    return _native(array.array("f", dense.data))


def _dense(values: Numbers, typecode: str, dtype: ops.DType) -> ops.Dense:
    return ops.Dense(dtype, (len(values),), _packed(values, typecode))


def _packed(values: Numbers, typecode: str) -> bytes:
    try:
        return _native(array.array(typecode, values)).tobytes()
    except (TypeError, OverflowError) as error:
        raise StrataError(Code.INVALID, f"these numbers do not fit: {error}") from None


def _native(numbers: array.array[Any]) -> array.array[Any]:
    """Between this machine's order of bytes and the wire's, which is little-endian."""
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
