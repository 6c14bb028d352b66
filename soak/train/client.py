"""A client that trains over HTTP and never gives up: the same request again until there is an answer, as SDKs do."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import httpx

from soak.train.result_times import ResultTimes
from soak.trials import seeded_random

GIVE_UP_S: Final = 240.0
AGAIN_S: Final = 0.05
WINDOW: Final = 4
"""Operations sent ahead, in any order."""
LARGE_EVERY: Final = 8
"""So often a step has more data than the journal takes, and it goes into a file."""
LARGE: Final = (8, 900)
"""Datums, and tokens of each."""


def texts(place: int, number: int, *, large: bool = False) -> Sequence[list[int]]:
    """What a model is trained on follows from its place and the number of the operation."""
    dice = seeded_random(1000 * place + number)
    if large:
        count, tokens = LARGE
        return [[dice.randrange(300) for _ in range(tokens)] for _ in range(count)]
    return [[dice.randrange(300) for _ in range(dice.randrange(4, 24))] for _ in range(3)]


class Trainer:
    """One model trained step by step; what is sent ahead goes out of order, which no SDK does."""

    def __init__(self, client: httpx.AsyncClient, place: int, result_times: ResultTimes | None = None) -> None:
        self._client = client
        self._place = place
        self._result_times = result_times or ResultTimes()
        self._model_id = ""
        self.results: dict[int, Any] = {}
        """By the number of the operation."""

    @property
    def operations(self) -> int:
        """With its creation and its first checkpoint."""
        return 2 + len(self.results)

    async def begin(self) -> None:
        session = (await self._post("create_session", {}))["session_id"]
        lora = {"rank": 4, "alpha": 8.0, "seed": self._place}
        body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": lora}
        self._model_id = f"{session}:train:0"
        created = await self._post("create_model", body)
        result = await self._result(created["request_id"])
        if "error" in result:
            raise RuntimeError(f"no model: {result}")

    async def save(self, name: str, number: int) -> str:
        """The path of a checkpoint that is made at this place of the model's order."""
        body = {"model_id": self._model_id, "seq_id": number, "path": name}
        return str((await self._result((await self._post("save_weights", body))["request_id"]))["path"])

    async def train(self, until: asyncio.Event, most: int) -> int:
        """Steps until told, or so many; returns how many. Every one of them has its results then."""
        first = steps = max(self.results, default=0) // 2
        most += first
        while steps < most and not until.is_set():
            ahead = min(WINDOW // 2, most - steps)
            numbers = [*range(2 * steps + 1, 2 * (steps + ahead) + 1)]
            sent_s = asyncio.get_running_loop().time()
            shuffled = seeded_random(steps).sample(numbers, len(numbers))
            ids = dict(zip(shuffled, await asyncio.gather(*map(self._submit, shuffled)), strict=True))
            for number in numbers:
                self.results[number] = await self._result(ids[number])
                self._result_times.note(sent_s)
            steps += ahead
        return steps - first

    async def finish(self) -> None:
        """Ranks that pretend have no weights to save."""

    async def _submit(self, number: int) -> str:
        head = {"model_id": self._model_id, "seq_id": number}
        if number % 2:
            body = head | {"forward_backward_input": {"data": self._data(number), "loss_fn": "cross_entropy"}}
            return str((await self._post("forward_backward", body))["request_id"])
        body = head | {"adam_params": {"learning_rate": 1e-2}}
        return str((await self._post("optim_step", body))["request_id"])

    def _data(self, number: int) -> Sequence[dict[str, Any]]:
        made = []
        for tokens in texts(self._place, number):
            inputs = {
                "target_tokens": {"data": [*tokens[1:], 7], "dtype": "int64", "shape": [len(tokens)]},
                "weights": {"data": [1.0] * len(tokens), "dtype": "float32", "shape": [len(tokens)]},
            }
            chunk = {"type": "encoded_text", "tokens": tokens}
            made.append({"model_input": {"chunks": [chunk]}, "loss_fn_inputs": inputs})
        return made

    async def _result(self, request_id: str) -> Any:
        return await self._post("retrieve_future", {"request_id": request_id})

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        async with asyncio.timeout(GIVE_UP_S):
            while True:
                try:
                    reply = await self._client.post(f"/api/v1/{path}", json=body)
                except httpx.TransportError:
                    await asyncio.sleep(AGAIN_S)
                    continue
                if reply.status_code == 200:
                    return reply.json()
                if reply.status_code not in (408, 429) and reply.status_code < 500:
                    raise RuntimeError(f"{path}: {reply.status_code} {reply.text}")
                if reply.status_code != 408:
                    await asyncio.sleep(AGAIN_S)
