"""Models trained with the `tinker` SDK as it is published: its own retries carry it over whatever happens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import tinker
from tinker import types

from soak.train.client import GIVE_UP_S, LARGE_EVERY, texts
from soak.train.result_times import ResultTimes

AHEAD: Final = 2
"""Steps sent before the results of the first are asked for."""
SAVE_EVERY: Final = 4
FINAL: Final = "final"


class SdkTrainer:
    """One model, by its place among those of a client."""

    def __init__(self, service: tinker.ServiceClient, place: int, result_times: ResultTimes) -> None:
        self._service = service
        self._place = place
        self._result_times = result_times
        self._model: tinker.TrainingClient | None = None
        self.results: dict[int, Any] = {}
        """By the number of the operation."""
        self.steps = 0

    @property
    def model_id(self) -> str:
        assert self._model is not None
        return str(self._model.model_id)

    @property
    def operations(self) -> int:
        """With its creation and its first checkpoint, and that it is let go of when its client ends."""
        return 3 + len(self.results)

    async def begin(self) -> None:
        async with asyncio.timeout(GIVE_UP_S):
            self._model = await self._service.create_lora_training_client_async("tiny", rank=4, seed=self._place)

    async def train(self, until: asyncio.Event, most: int) -> int:
        """Steps until told, or so many; returns how many. Every operation of them has its result then."""
        assert self._model is not None
        while self.steps < most and not until.is_set():
            sent_s = asyncio.get_running_loop().time()
            pending: list[tinker.APIFuture[Any]] = []
            for step in range(self.steps, min(self.steps + AHEAD, most)):
                data = _data(texts(self._place, step, large=step % LARGE_EVERY == self._place))
                pending.append(await self._model.forward_backward_async(data, "cross_entropy"))
                pending.append(await self._model.optim_step_async(types.AdamParams(learning_rate=1e-2)))
                if step % SAVE_EVERY == SAVE_EVERY - 1:
                    pending.append(await self._model.save_state_async(f"step-{step}"))
                self.steps += 1
            for each in pending:
                await self._hear(each, sent_s)
        return self.steps

    async def finish(self) -> None:
        assert self._model is not None
        await self._hear(await self._model.save_state_async(FINAL), asyncio.get_running_loop().time())

    async def _hear(self, future: tinker.APIFuture[Any], sent_s: float) -> None:
        async with asyncio.timeout(GIVE_UP_S):
            result = await future.result_async()
        self.results[len(self.results)] = _bits(result)
        self._result_times.note(sent_s)


def _bits(result: Any) -> Any:
    """All that can be compared of a result with that of another run, whose paths are others."""
    if isinstance(result, types.ForwardBackwardOutput):
        tensors = [
            {name: (found.dtype, found.shape, found.to_numpy().tobytes()) for name, found in each.items()}
            for each in result.loss_fn_outputs
        ]
        return {"metrics": result.metrics, "tensors": tensors}
    if isinstance(result, types.SaveWeightsResponse):
        return {"name": result.path.rpartition("/")[2]}
    return {"metrics": result.metrics}


def _data(found: Sequence[list[int]]) -> list[types.Datum]:
    made = []
    for tokens in found:
        inputs: Any = {"target_tokens": [*tokens[1:], 7], "weights": [1.0] * len(tokens)}
        made.append(types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs))
    return made


@asynccontextmanager
async def trainers(
    url: str, key: str, places: Iterable[int], result_times: ResultTimes
) -> AsyncIterator[list[SdkTrainer]]:
    """All of one client. The server is there when this ends, or the client is left to itself."""
    service = tinker.ServiceClient(base_url=url, api_key=key)
    made = [SdkTrainer(service, place, result_times) for place in places]
    for each in made:
        await each.begin()
    yield made
    async with asyncio.timeout(GIVE_UP_S):
        await service.close("success")
