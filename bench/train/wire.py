"""A minimal client of the training server: one connection, the native wire format, and nothing else.

It measures the server. The cost of a real client shows in `bench.train.tinker`.
"""

from __future__ import annotations

import http.client
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
import numpy as np

from bench.train.protocol import (
    BETAS,
    EPS,
    LORA_ALPHA,
    LORA_RANK,
    MODEL,
    RATE,
    BenchCommand,
    BenchResult,
    Server,
    Tokens,
)
from strata.train.core import ops
from strata.train.wire import native

JSON: Final = "application/json"
ADAM: Final = {"learning_rate": RATE, "beta1": BETAS[0], "beta2": BETAS[1], "eps": EPS, "weight_decay": 0.0}
WAIT_S: Final = 600.0


class Wire:
    """One model. Operations are numbered and submitted at once; results are retrieved afterwards."""

    def __init__(self, server: Server, training: str, rank: int = LORA_RANK) -> None:
        address = urlsplit(server.url)
        assert address.hostname is not None
        self._connection = http.client.HTTPConnection(address.hostname, address.port, timeout=WAIT_S)
        self._headers = {"X-API-Key": server.key}
        session = self._json("create_session", {"tags": ["bench"], "sdk_version": "bench"})["session_id"]
        lora = {"rank": rank, "alpha": float(LORA_ALPHA), "seed": 1} if training == "lora" else None
        made = {"session_id": session, "model_seq_id": 0, "base_model": MODEL, "lora_config": lora}
        created = self._json("create_model", made)
        self.model_id = str(self._told(created["request_id"])["model_id"])
        self._seq = 0
        self._samplers = 0

    def close(self) -> None:
        self._json("unload_model", {"model_id": self.model_id})
        self._connection.close()

    def rest(self) -> None:
        """Before a while without requests: the server closes a connection on which nothing comes."""
        self._connection.close()

    def abort_gradients(self) -> str:
        return self._operation("abort_gradient_epoch", {})

    def optim_step(self) -> str:
        return self._operation("optim_step", {"adam_params": ADAM})

    def forward_backward(self, documents: Tokens) -> str:
        """(document, token), one token more than each document has."""
        self._seq += 1
        body = native.PassBody(
            model_id=self.model_id, seq_id=self._seq, loss="cross_entropy", datums=[_datum(each) for each in documents]
        )
        return str(self._ask("forward_backward", native.encode(body), native.MEDIA_TYPE)["request_id"])

    def publish(self) -> str:
        """A sampler of the weights as they are then, in memory alone."""
        self._samplers += 1
        return self._operation("save_weights_for_sampler", {"sampling_session_seq_id": self._samplers})

    def sample(self, sampler_id: str, prompt: Sequence[int], tokens: int, seq_id: int = 0) -> str:
        """The requests of a sampler are numbered from 0. Without stops, each gets as many tokens as it may have."""
        params = {"max_tokens": tokens, "stop": []}
        chunks = [{"type": "encoded_text", "tokens": list(prompt)}]
        wanted = {"prompt": {"chunks": chunks}, "sampling_params": params}
        body = {"sampling_session_id": sampler_id, "seq_id": seq_id, **wanted}
        return str(self._json("asample", body)["request_id"])

    def result(self, request_id: str) -> Any:
        """Of an operation that is no pass."""
        return self._told(request_id)

    def loss(self, request_id: str) -> float:
        """Of a pass: all of the result is read, as every client would."""
        status, content = self._post("retrieve_future", _encode({"request_id": request_id}), JSON, native.MEDIA_TYPE)
        while status == 408:
            status, content = self._post(
                "retrieve_future", _encode({"request_id": request_id}), JSON, native.MEDIA_TYPE
            )
        if status != 200 or content.startswith(b"{"):
            raise RuntimeError(f"a pass failed: {content[:500]!r}")
        return ops.decode_pass_result(content).metrics["loss:sum"]

    def _operation(self, path: str, fields: Mapping[str, Any]) -> str:
        self._seq += 1
        return str(self._json(path, {"model_id": self.model_id, "seq_id": self._seq, **fields})["request_id"])

    def _told(self, request_id: str) -> Any:
        found = self._json("retrieve_future", {"request_id": request_id})
        while found.get("type") == "try_again":
            found = self._json("retrieve_future", {"request_id": request_id})
        if "error" in found:
            raise RuntimeError(f"an operation failed: {found['error']}")
        return found

    def _json(self, path: str, fields: Mapping[str, Any]) -> Any:
        return self._ask(path, _encode(fields), JSON)

    def _ask(self, path: str, body: bytes, kind: str) -> Any:
        status, content = self._post(path, body, kind, JSON)
        if status not in (200, 408):
            raise RuntimeError(f"{path} was answered with {status}: {content[:500]!r}")
        return msgspec.json.decode(content)

    def _post(self, path: str, body: bytes, kind: str, accept: str) -> tuple[int, bytes]:
        headers = {**self._headers, "Content-Type": kind, "Accept": accept}
        self._connection.request("POST", f"/api/v1/{path}", body, headers)
        reply = self._connection.getresponse()
        return reply.status, reply.read()


_encode: Final = msgspec.json.Encoder().encode


def _datum(document: Tokens) -> ops.Datum:
    targets = document[1:].astype("<i8")
    weights = np.ones(len(targets), "<f4")
    return ops.Datum(
        document[:-1].astype("<i4").tobytes(),
        {
            "target_tokens": ops.Dense(ops.DType.I64, (len(targets),), targets.tobytes()),
            "weights": ops.Dense(ops.DType.F32, (len(weights),), weights.tobytes()),
        },
    )


def train(wire: Wire, order: BenchCommand, batches: Tokens) -> BenchResult:
    """Submits every step before it waits for the first."""
    started = perf_counter()
    passes, steps = [], []
    for number in range(order.first, order.first + order.steps):
        passes.append(wire.forward_backward(batches[number % len(batches)].reshape(-1, batches.shape[-1])))
        steps.append(wire.optim_step())
    losses = [wire.loss(each) for each in passes]
    for each in steps:
        wire.result(each)
    return BenchResult(seconds=perf_counter() - started, loss=losses[0])
