"""Drives a RunnerDispatcher as an orchestrator would, but without a socket: for checks that run on rank 0.

Rows are composed here in the simplest way, so that a check says itself what lies together in a row and on which rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from strata.train.core import commands, model_options, ops
from strata.train.core.loss_graph import CustomLoss
from strata.train.runner.checkpoint import shards
from strata.train.runner.runner_dispatcher import RunnerDispatcher

VOCABULARY = 512
Layout = Callable[[Sequence[Sequence[ops.Datum]], int], list[list[list[commands.Segment]]]]


class Memory:
    """A link that keeps what was sent."""

    def __init__(self) -> None:
        self.sent: list[commands.FromRank] = []
        self.full = False

    def receive(self) -> commands.ToRank | None:
        raise AssertionError("the driver calls run_once")

    def send(self, message: commands.FromRank) -> bool:
        if self.full:
            return False
        self.sent.append(message)
        return True

    def wake(self) -> None:
        """Nobody waits here."""


def dense(array: Any, dtype: ops.DType) -> ops.Dense:
    kind = {ops.DType.F32: "<f4", ops.DType.I64: "<i8"}[dtype]
    made = np.ascontiguousarray(np.asarray(array, dtype=kind))
    return ops.Dense(dtype, tuple(made.shape), made.tobytes())


def datum(seed: int, length: int, **inputs: Any) -> ops.Datum:
    """Random tokens and targets; weights 1 unless given. An input may be a `Tensor` as it goes over the wire."""
    chance = np.random.default_rng(seed)
    tokens = chance.integers(0, VOCABULARY, length)
    given: dict[str, ops.Tensor] = {
        "target_tokens": dense(chance.integers(0, VOCABULARY, length), ops.DType.I64),
        "weights": dense(np.ones(length), ops.DType.F32),
    }
    for name, value in inputs.items():
        given[name] = value if isinstance(value, ops.Dense | ops.Sparse) else dense(value, ops.DType.F32)
    return ops.Datum(tokens.astype("<i4").tobytes(), given)


def batch(count: int = 4, seed: int = 0) -> list[ops.Datum]:
    return [datum(seed * 100 + number, 5 + 3 * number) for number in range(count)]


def tokens_of(one: ops.Datum) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(one.tokens, "<i4").astype(np.int64))


def array_of(tensor: ops.Tensor) -> np.ndarray[Any, Any]:
    kind = {ops.DType.F32: "<f4", ops.DType.I64: "<i8"}[tensor.dtype]
    return np.frombuffer(tensor.data, kind).reshape(tensor.shape)


def packed(items: Sequence[Sequence[ops.Datum]], ranks: int) -> list[list[list[commands.Segment]]]:
    """Everything in one row of each rank, in turn."""
    rows: list[list[list[commands.Segment]]] = [[[]] for _ in range(ranks)]
    for number, place in enumerate(_places(items)):
        rows[number % ranks][0].append(place)
    return rows


def apart(items: Sequence[Sequence[ops.Datum]], ranks: int) -> list[list[list[commands.Segment]]]:
    """Every datum in a row of its own; some rows are empty if they do not come out even."""
    rows: list[list[list[commands.Segment]]] = [[] for _ in range(ranks)]
    for number, place in enumerate(_places(items)):
        rows[number % ranks].append([place])
    longest = max(len(own) for own in rows)
    return [own + [[] for _ in range(longest - len(own))] for own in rows]


def backwards(items: Sequence[Sequence[ops.Datum]], ranks: int) -> list[list[list[commands.Segment]]]:
    return [[row[::-1] for row in own] for own in packed(items, ranks)[::-1]]


def on_last(items: Sequence[Sequence[ops.Datum]], ranks: int) -> list[list[list[commands.Segment]]]:
    """All on the last rank; the others have an empty row."""
    rows: list[list[list[commands.Segment]]] = [[[]] for _ in range(ranks)]
    rows[-1][0] = _places(items)
    return rows


def _places(items: Sequence[Sequence[ops.Datum]]) -> list[commands.Segment]:
    return [commands.Segment(item, number) for item, datums in enumerate(items) for number in range(len(datums))]


class Driver:
    """One conversation. Every call is a dispatch with the next number."""

    def __init__(self, dispatcher: RunnerDispatcher, link: Memory, ranks: int, folder: Path) -> None:
        self.dispatcher = dispatcher
        self.link = link
        self.ranks = ranks
        self.folder = folder
        self.number = 0
        self.seq = 0
        self.generation = 0
        self.attach()

    def attach(self) -> commands.AttachReply:
        """As the next orchestrator."""
        self.generation += 1
        attached = self.say(commands.Attach(self.generation, "train/kit"))
        assert isinstance(attached, commands.AttachReply), attached
        self.layout = apart if attached.model.one_document_per_row else packed
        return attached

    def say(self, message: commands.ToRank) -> commands.FromRank:
        assert self.dispatcher.run_once(message)
        return self.link.sent.pop()

    def do(self, work: commands.Work) -> Sequence[ops.Result]:
        self.number += 1
        reply = self.say(commands.DispatchCommand(self.generation, self.number, work, self.number - 1))
        assert isinstance(reply, commands.DispatchReply), reply
        assert reply.number == self.number
        return reply.results

    def create(
        self,
        name: str,
        lora: model_options.LoraConfig | None,
        schedule: model_options.Schedule | None = None,
        optimizer: model_options.OptimizerName = "adamw",
    ) -> None:
        (result,) = self.do(commands.ManageModel(ops.CreateModel(name, "tiny", lora, schedule, optimizer=optimizer)))
        assert result == ops.ModelCreated(name), result

    def unload(self, name: str) -> None:
        assert self.do(commands.ManageModel(ops.UnloadModel(name))) == [ops.ModelUnloaded(name)]

    def passes(
        self,
        *items: tuple[str, Sequence[ops.Datum]],
        loss: model_options.LossName = model_options.LossName.CROSS_ENTROPY,
        config: Mapping[str, float] | None = None,
        forward_only: bool = False,
        layout: Layout | None = None,
        custom: CustomLoss | None = None,
    ) -> Sequence[ops.Result]:
        """One pass with one item for each (model, datums)."""
        made = [
            commands.PassItem(
                f"request-{number}", model, loss, config or {}, ops.encode_pass_data(ops.PassData(datums, custom))
            )
            for number, (model, datums) in enumerate(items)
        ]
        rows = (layout or self.layout)([datums for _, datums in items], self.ranks)
        return self.do(commands.PassCommand(forward_only, made, rows))

    def train(self, model: str, datums: Sequence[ops.Datum], **options: Any) -> ops.PassResult:
        (result,) = self.passes((model, datums), **options)
        return outcome(result)

    def step(self, model: str, **adam: float) -> Mapping[str, float]:
        return self._step(ops.OptimStep(model, self.seq + 1, model_options.AdamParams(**adam)))

    def muon_step(self, model: str, params: model_options.MuonParams) -> Mapping[str, float]:
        return self._step(ops.OptimStep(model, self.seq + 1, None, params))

    def _step(self, operation: ops.OptimStep) -> Mapping[str, float]:
        self.seq += 1
        (result,) = self.do(commands.StepsCommand([operation]))
        assert isinstance(result, ops.StepDone), result
        return result.metrics

    def save(self, model: str, name: str, kind: Any = "weights", *, overwrite: bool = False) -> ops.Result:
        self.seq += 1
        operation = ops.SaveWeights(model, self.seq, kind, name, overwrite)
        return self.do(commands.SaveState(operation, str(self.folder / name)))[0]

    def load(self, model: str, name: str, *, optimizer: bool = True) -> ops.Result:
        self.seq += 1
        operation = ops.LoadWeights(model, self.seq, "run", "weights", name, optimizer)
        return self.do(commands.LoadState(operation, str(self.folder / name)))[0]

    def state(self, model: str) -> dict[str, torch.Tensor]:
        """Weights and moments as a checkpoint has them."""
        name = f"state-{self.number}"
        saved = self.save(model, name)
        assert isinstance(saved, ops.WeightsSaved), saved
        if shards.has_shards(self.folder / name):
            return shards.read_unsharded(self.folder / name)
        files = sorted((self.folder / name).glob("*.safetensors"))
        return {key: value for file in files for key, value in load_file(file).items()}

    def gradient(self, model: str) -> dict[str, torch.Tensor]:
        """The sum over all ranks of what the model has, by a step that only remembers it; the model has none after."""
        self.step(model, learning_rate=0.0, beta1=0.0, beta2=0.0)
        return {
            name.removeprefix("exp_avg."): value
            for name, value in self.state(model).items()
            if name.startswith("exp_avg.")
        }


def outcome(result: ops.Result) -> ops.PassResult:
    assert isinstance(result, ops.PassDone), result
    assert isinstance(result.payload, ops.InlinePayload)
    return ops.decode_pass_result(result.payload.data)


def logprobs_of(result: ops.PassResult) -> list[np.ndarray[Any, Any]]:
    return [array_of(output.fields["logprobs"]) for output in result.outputs]


def loss_of(result: ops.PassResult) -> float:
    return result.metrics["loss:sum"]


def apart_by(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    """The largest difference, beside the largest number of `one`."""
    assert one.keys() == other.keys()
    largest = max(float(value.abs().max()) for value in one.values())
    return max(float((one[name] - other[name]).abs().max()) for name in one) / max(largest, 1e-12)
