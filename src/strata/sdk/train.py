"""`TrainingServer`, `Model`, `Sampler`: the training SDK; connection, keys, sequence numbers, futures.

    with TrainingServer("http://127.0.0.1:5555", key) as server:
        model = server.create_model("tiny", rank=8)
        done = model.forward_backward([Datum(tokens, targets)])
        model.optim_step(learning_rate=1e-3).result()
        print(done.result().loss)
        print(model.sampler().result().sample(tokens, max_tokens=8).result()[0].tokens)

Every operation returns a future at once; the server does them in the order they were given.
"""

from __future__ import annotations

import itertools
import ssl
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, Unpack

import httpx

from strata.base.errors import Code, StrataError
from strata.base.secret import Secret
from strata.base.unix_socket import SCHEME as UNIX
from strata.base.unix_socket import connect_unix, lasting_path, parse_unix_address
from strata.http import otel
from strata.identity.tokens import is_scoped_key
from strata.sdk.operations import (
    ClientOperation,
    Datum,
    Pass,
    Sample,
    SamplingParams,
    abort_gradients_operation,
    copy_for_sampler_operation,
    create_model_operation,
    load_weights_operation,
    logprobs_operation,
    open_sampler_request,
    optim_step_operation,
    pass_operation,
    sample_operation,
    save_operation,
)
from strata.sdk.server_calls import Progress, ServerCalls, get, post
from strata.train.core import model_options
from strata.train.core.model_options import Schedule

__all__ = [
    "Datum",
    "Future",
    "Model",
    "Pass",
    "Sample",
    "Sampler",
    "SamplingParams",
    "Schedule",
    "TrainingServer",
]
T = TypeVar("T")


def _socket_of(url: str) -> str | None:
    """The path of `unix:PATH`, after a look at who is there."""
    if not url.startswith(UNIX):
        return None
    path = parse_unix_address(url)
    try:
        connect_unix(path).close()
    except OSError as error:
        raise StrataError(Code.UNAVAILABLE, f"the training server at {url} cannot be reached: {error}") from error
    return str(lasting_path(path))


def _base_url(url: str) -> str:
    return "http://server" if url.startswith(UNIX) else url


def _trusted(ca: str | Path | None) -> ssl.SSLContext | bool:
    """Returns what an https server is verified with; INVALID for a file that has no certificate."""
    if ca is None:
        return True
    try:
        return ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as error:
        raise StrataError(Code.INVALID, f"{ca} cannot be read as a certificate authority: {error}") from None


def _read_key(url: str, key: str | Path) -> str:
    """The key itself, or the one in a file, if it may be sent to this address."""
    text = _read_key_file(key) if isinstance(key, Path) else key
    if url.startswith("http:") and not is_scoped_key(Secret(text)):
        raise StrataError(
            Code.INVALID,
            f"only a key of a viewer or a researcher is sent to {url}: nothing proves who listens there",
            hint="api.key in the server's data folder is one; `strata keys create` makes more",
        )
    return text


def _read_key_file(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except FileNotFoundError as error:
        raise StrataError(
            Code.UNAVAILABLE,
            f"there is no key in {file.absolute()}: no training server has been started with that data folder",
            hint="first, in another terminal: strata serve CONFIG; it writes the key before it loads the model",
        ) from error


class Future(Generic[T]):
    """The result of an operation that the server has accepted."""

    def __init__(self, server: TrainingServer, operation: ClientOperation[T], request_id: str) -> None:
        self._server = server
        self._operation = operation
        self.request_id = request_id

    def result(self, timeout_s: float | None = None, *, progress: Progress | None = None) -> T:
        """Wait for the result. INVALID if the operation cannot be done as requested; later ones are not affected."""
        accept, report = self._operation.accept, progress or self._server.progress
        return self._operation.result(self._server.calls.wait_result(self.request_id, accept, timeout_s, report))


class SequenceNumbers:
    """Sequence numbers of a model's operations, each used once. An earlier client may have used some already."""

    def __init__(self, first: int = 1, taken: Iterable[int] = ()) -> None:
        self.next = first
        self._taken = frozenset(taken)

    def use(self) -> None:
        self.next += 1
        while self.next in self._taken:
            self.next += 1


class Model:
    """One model. Operations are numbered as they are accepted, so use one `Model` for one model."""

    def __init__(self, server: TrainingServer, model_id: str, numbers: SequenceNumbers | None = None) -> None:
        self._server = server
        self._lock = threading.Lock()
        self._numbers = numbers or SequenceNumbers()
        self.model_id = model_id

    def forward_backward(self, data: Sequence[Datum], loss: str = "cross_entropy", **config: float) -> Future[Pass]:
        """Add the gradients of a batch."""
        return self._submit(lambda seq: pass_operation(self.model_id, seq, data, loss, config, forward_only=False))

    def forward(self, data: Sequence[Datum], loss: str = "cross_entropy", **config: float) -> Future[Pass]:
        """Losses and log probabilities of a batch; the gradients stay as they are."""
        return self._submit(lambda seq: pass_operation(self.model_id, seq, data, loss, config, forward_only=True))

    def optim_step(self, learning_rate: float, **adam: float) -> Future[Mapping[str, float]]:
        """Apply the gradients with AdamW: beta1, beta2, eps, weight_decay and grad_clip_norm may be given."""
        params = model_options.AdamParams(learning_rate=learning_rate, **adam)
        return self._submit(lambda seq: optim_step_operation(self.model_id, seq, params))

    def save(self, name: str, *, overwrite: bool = False) -> Future[str]:
        """Save weights and optimizer; the result is the path to load them from."""
        return self._submit(lambda seq: save_operation("save_weights", self.model_id, seq, name, overwrite=overwrite))

    def load(self, path: str, *, optimizer: bool = True) -> Future[None]:
        return self._submit(lambda seq: load_weights_operation(self.model_id, seq, path, optimizer=optimizer))

    def sampler(self, *, inflight: bool = False) -> Future[Sampler]:
        """Makes a sampler of the model as it is when the operations before this one are done; it lives in memory
        alone. The weights of one in flight are shared: each such save replaces those of all that were made before."""
        number = self._server.count_sampler()

        def read(sampler_id: str) -> Sampler:
            return Sampler(self._server, sampler_id)

        return self._submit(lambda seq: copy_for_sampler_operation(self.model_id, seq, number, read, inflight=inflight))

    def save_for_sampling(self, name: str, *, overwrite: bool = False) -> Future[str]:
        """Save weights alone; the result is the path to sample from, as in `TrainingServer.sampler(path=…)`."""
        route = "save_weights_for_sampler"
        return self._submit(lambda seq: save_operation(route, self.model_id, seq, name, overwrite=overwrite))

    def report(self, **values: float) -> None:
        """Show what only this program knows, such as a reward, beside the loss of the next optimizer step."""
        body = {"values": values, "seq_id": self._numbers.next}
        self._server.calls.json(post(f"/api/v1/training_runs/{self.model_id}/curves", body))

    def abort_gradients(self) -> Future[None]:
        """Throw away the gradients since the last step."""
        return self._submit(lambda seq: abort_gradients_operation(self.model_id, seq))

    def _submit(self, build: Callable[[int], ClientOperation[T]]) -> Future[T]:
        # A number counts as used only when its operation was accepted: one that was refused must not leave a gap.
        with self._lock:
            future = self._server.submit(build(self._numbers.next))
            self._numbers.use()
        return future


class Sampler:
    """Weights to sample from. They stay as they are, unless the sampler is in flight."""

    def __init__(self, server: TrainingServer, sampler_id: str) -> None:
        self._server = server
        self._numbers = itertools.count()
        self.sampler_id = sampler_id

    def sample(
        self, prompt: Sequence[int], num_samples: int = 1, **params: Unpack[SamplingParams]
    ) -> Future[Sequence[Sample]]:
        """Draw samples that continue a prompt."""
        return self._server.submit(sample_operation(self.sampler_id, next(self._numbers), prompt, num_samples, params))

    def logprobs(self, tokens: Sequence[int]) -> Future[Sequence[float | None]]:
        """Returns the log probability of each token after those before it, so None for the first."""
        return self._server.submit(logprobs_operation(self.sampler_id, next(self._numbers), tokens))


class TrainingServer:
    """A session with a training server. `progress` is called with the position of an operation that is waited for.

    A `Path` as the key is a file that holds it. A server that does not listen yet is waited for, up to five minutes.
    """

    def __init__(
        self,
        url: str,
        key: str | Path,
        *,
        ca: str | Path | None = None,
        progress: Progress | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """`ca` is a PEM file of the certificate authority that an https server is trusted by; None: the system's."""
        key = _read_key(url, key)
        otel.follow_program()
        if transport is None and (path := _socket_of(url)) is not None:
            transport = httpx.HTTPTransport(uds=path)
        self._http = httpx.Client(
            base_url=_base_url(url), headers={"X-API-Key": key}, transport=transport, verify=_trusted(ca)
        )
        self.calls = ServerCalls(self._http)
        self.progress = progress
        self._models = 0
        self._samplers = itertools.count()
        self.session_id = ""

    def __enter__(self) -> Self:
        try:
            session = self.calls.json(post("/api/v1/create_session", {"tags": ["strata"], "sdk_version": "strata"}))
            self.session_id = str(session["session_id"])
        except BaseException:
            self._http.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        reason = {"type": "success" if error is None else "errored"}
        detail = None if error is None else type(error).__name__
        try:
            self.calls.json(post(f"/api/v1/sessions/{self.session_id}/finish", {"reason": reason, "detail": detail}))
        finally:
            self._http.close()

    def create_model(
        self,
        base_model: str,
        *,
        rank: int | None = 32,
        seed: int | None = None,
        schedule: Schedule | None = None,
        user_metadata: Mapping[str, str] | None = None,
        **lora: Any,
    ) -> Model:
        """A model over the server's base. `rank` None trains the base itself, on a server that is set up for it.

        A schedule multiplies the learning rate of each step. `user_metadata` {"keep_rollouts": "true"} keeps what it
        learns from, for a look at it in the dashboard.
        """
        config = None if rank is None else model_options.LoraConfig(rank=rank, seed=seed, **lora)
        operation = create_model_operation(
            self.session_id, self._models, base_model, config, schedule=schedule, user_metadata=user_metadata
        )
        self._models += 1
        return Model(self, self.submit(operation).result())

    def load_model(self, path: str, *, optimizer: bool = True, user_metadata: Mapping[str, str] | None = None) -> Model:
        """A new model that goes on from a checkpoint."""
        saved = self.calls.json(post("/api/v1/weights_info", {"tinker_path": path}))
        model = self.create_model(saved["base_model"], user_metadata=user_metadata, **_lora_of(saved))
        model.load(path, optimizer=optimizer).result()
        return model

    def attach(self, model_id: str) -> Model:
        """A model that another client made, with the same key, and that still lives: go on after what it has sent."""
        model = self.calls.json(get(f"/api/v1/models/{model_id}"))
        if model["unloaded"]:
            raise StrataError(Code.GONE, f"model {model_id!r} was unloaded")
        session = self.calls.json(get(f"/api/v1/sessions/{model['session_id']}"))
        used = [int(number) for each in session["sampler_ids"] if (number := each.rpartition(":")[2]).isdecimal()]
        self._samplers = itertools.count(max(used, default=-1) + 1)
        return Model(self, model_id, SequenceNumbers(model["next_seq_id"], model["taken_seq_ids"]))

    def sessions(self) -> Sequence[Mapping[str, Any]]:
        """All sessions of this key, the newest first: `session_id`, `opened_at`, `finished`, `models`."""
        listed: Sequence[Mapping[str, Any]] = self.calls.json(get("/api/v1/session_info"))["sessions"]
        return listed

    def close_session(self, session_id: str) -> None:
        """End a session whose client has ended; its models are unloaded after the operations accepted for them."""
        self.calls.json(post("/api/v1/kill_session", {"session_id": session_id}))

    def sampler(self, base_model: str | None = None, *, path: str | None = None) -> Sampler:
        """Makes a sampler of the base, or of saved weights."""
        request = open_sampler_request(self.session_id, self.count_sampler(), base_model, path)
        return Sampler(self, str(self.calls.json(request)["sampling_session_id"]))

    def count_sampler(self) -> int:
        """The number of the next sampler of this session."""
        return next(self._samplers)

    def submit(self, operation: ClientOperation[T]) -> Future[T]:
        return Future(self, operation, str(self.calls.json(operation.send)["request_id"]))


def _lora_of(saved: Mapping[str, Any]) -> dict[str, Any]:
    if not saved["is_lora"]:
        return {"rank": None}
    parts = {name: saved[name] for name in ("train_unembed", "train_mlp", "train_attn")}
    return {"rank": saved["lora_rank"], "alpha": saved["lora_alpha"], **parts}
