"""One model on a training server, by plain HTTP: what an operator's program would send."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.shell.train_api.processes import Processes

WAIT_S = 120.0


class Operator:
    """Has a key of the role operator, and the name of the key that was made first: one tenant."""

    def __init__(self, server: Processes) -> None:
        self.data = server.data
        token = (server.data / "operator.token").read_text().strip()
        transport = httpx.HTTPTransport(uds=str(server.data / "run" / "api"))
        self.http = httpx.Client(base_url="http://server", transport=transport, timeout=WAIT_S)
        body = {"name": "local", "role": "operator"}
        made = self.http.post("/v1/keys", json=body, headers={"X-Operator-Token": token})
        self.http.headers["X-API-Key"] = made.json()["secret"]

    def post(self, path: str, **body: Any) -> Any:
        reply = self.http.post(path, json=body)
        assert reply.status_code == 200, (path, reply.status_code, reply.text)
        return reply.json() if reply.content else None

    def result(self, future: dict[str, Any]) -> Any:
        while True:
            reply = self.http.post("/api/v1/retrieve_future", json={"request_id": future["request_id"]})
            if reply.status_code != 408:
                assert reply.status_code == 200, reply.text
                return reply.json()

    def endpoints(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.http.get("/list_inference_endpoints").json()["endpoints"]
        return found


@dataclass(frozen=True)
class Sampled:
    tokens: list[int]
    logprobs: list[float]


class Trainee:
    def __init__(self, operator: Operator, *, lora: bool = True, seed: int = 1) -> None:
        self.operator = operator
        self.session = operator.post("/api/v1/create_session", tags=[], sdk_version="x")["session_id"]
        self.model_id = f"{self.session}:train:0"
        config = {"lora_config": {"rank": 8, "alpha": 32, "seed": seed}} if lora else {}
        body = {"session_id": self.session, "model_seq_id": 0, "base_model": "tiny", **config}
        operator.result(operator.post("/api/v1/create_model", **body))
        self._seqs = itertools.count(1)
        self._samplers = itertools.count(1)
        self._samples = itertools.count(1)

    def order(self, path: str, **body: Any) -> Any:
        return self.operator.result(self.operator.post(path, model_id=self.model_id, seq_id=next(self._seqs), **body))

    def learn(self, tokens: Sequence[int], steps: int, rate: float = 1e-2) -> None:
        for _ in range(steps):
            data = [datum(tokens[:-1], target_tokens=("int64", tokens[1:]))]
            self.order("/api/v1/forward_backward", forward_backward_input={"data": data, "loss_fn": "cross_entropy"})
            self.order("/api/v1/optim_step", adam_params={"learning_rate": rate})

    def sync(self, **body: Any) -> Any:
        return self.order("/api/v1/sync_inference_weights", **body)

    def folder(self, path: str) -> Path:
        """Of saved weights, on the disk."""
        name = path.rpartition("/")[2]
        found = list((self.operator.data / "checkpoints").glob(f"*/sampler_weights/{name}@*"))
        assert len(found) == 1, found
        return found[0]

    def sampler(self, path: str) -> str:
        body = {"session_id": self.session, "sampling_session_seq_id": next(self._samplers), "model_path": path}
        sampler: str = self.operator.post("/api/v1/create_sampling_session", **body)["sampling_session_id"]
        return sampler

    def sample(self, sampler: str, prompt: Sequence[int], num_samples: int = 1, **params: Any) -> list[Sampled]:
        future = self.operator.post(
            "/api/v1/asample",
            sampling_session_id=sampler,
            seq_id=next(self._samples),
            prompt={"chunks": [{"type": "encoded_text", "tokens": list(prompt)}]},
            sampling_params={"stop": [], **params},
            num_samples=num_samples,
        )
        found = self.operator.result(future)
        assert "sequences" in found, found
        return [Sampled(each["tokens"], each["logprobs"]) for each in found["sequences"]]

    def gap(self, prompt: Sequence[int], samples: Sequence[Sampled]) -> dict[str, float]:
        """What the trainer says of these tokens, beside what the sampler said of them."""
        before = len(prompt) - 1
        data = [
            datum(
                [*prompt, *each.tokens[:-1]],
                target_tokens=("int64", [*prompt[1:], *each.tokens]),
                logprobs=("float32", [0.0] * before + each.logprobs),
                advantages=("float32", [0.0] * before + [1.0] * len(each.tokens)),
            )
            for each in samples
        ]
        done = self.order("/api/v1/forward", forward_input={"data": data, "loss_fn": "importance_sampling"})
        metrics = done["metrics"]
        tokens = metrics["sampled_tokens:sum"]
        assert tokens == sum(len(each.tokens) for each in samples)
        return {
            "tokens": tokens,
            "mean": metrics["sampler_gap:sum"] / tokens,
            "max": metrics["sampler_gap:max"],
            "kl": metrics["sampler_kl:sum"] / tokens,
        }


def datum(tokens: Sequence[int], **inputs: tuple[str, Sequence[float]]) -> dict[str, Any]:
    return {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": list(tokens)}]},
        "loss_fn_inputs": {
            name: {"data": list(values), "dtype": dtype, "shape": [len(values)]}
            for name, (dtype, values) in inputs.items()
        },
    }


def told(figures: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.3g}" for name, value in figures.items())


def secret_file(folder: Path) -> Path:
    file = folder / "engine.key"
    file.touch(mode=0o600)
    file.write_text(secrets.token_hex(16))
    return file
