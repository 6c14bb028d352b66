"""What passes of the runner make a device do, as figures: of a row, of each further row, document, adapter and layer,
and of a step.

`tests/shell/train_runner/test_device_counts.py` counts them on CPU. A committed table has the
figures; the test is red if one grows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from strata.train.core import ops
from strata.train.core.model_options import AdamParams, LossName
from strata.train.runner.model.trained import TrainedModel
from strata.train.runner.passes.partition import PackedDatum, RankPass, RankPassItem
from strata.train.runner.passes.pass_runner import PassRunner
from tests.shell.train_runner.driver import datum
from tests.support.device_counters import DeviceCounters, DeviceCounts

TENANTS: Final = 4
DOCUMENTS: Final = 8
"""Documents of the row that is compared with one of a single document, and with one of several tenants."""
ROWS: Final = 3
TOKENS: Final = 256
FEW_LAYERS: Final = 2
MANY_LAYERS: Final = 4
Figures = dict[str, float]


@dataclass(frozen=True)
class CountedRunner:
    """A runner, and its models by name. The first `TENANTS` of a LoRA base have an adapter each."""

    runner: PassRunner
    models: Mapping[str, TrainedModel]
    count: Callable[[], DeviceCounters]

    def row(self, documents: int = 1, tenants: int = 1, *, rows: int = 1, loss: LossName | None = None) -> DeviceCounts:
        """One pass of so many rows, each of so many documents of equal length."""
        work = _pass_of(list(self.models)[:tenants], documents, rows, loss or LossName.CROSS_ENTROPY)
        with self.count() as counters:
            report = self.runner.run(work)
        assert not report.failures, report.failures
        for model in self.models.values():
            model.abort()
        return counters.counts

    def step(self) -> DeviceCounts:
        """One optimizer step of the first model, with gradients."""
        name, model = next(iter(self.models.items()))
        with self.count():
            report = self.runner.run(_pass_of([name], 1, 1, LossName.CROSS_ENTROPY))
        assert not report.failures, report.failures
        with self.count() as counters:
            for _ in model.step(AdamParams(learning_rate=1e-4, grad_clip_norm=1.0)):
                """All ranks are this one: there is nothing to overlap."""
        return counters.counts


def _pass_of(names: Sequence[str], documents: int, rows: int, loss: LossName) -> RankPass:
    items = [RankPassItem(name, loss, {}, datums=rows * documents // len(names)) for name in names]
    length = TOKENS // documents
    return RankPass(
        forward_only=False,
        items=items,
        rows=[
            [
                PackedDatum(number % len(names), row * documents + number // len(names), _datum(number, length, loss))
                for number in range(documents)
            ]
            for row in range(rows)
        ],
    )


def _datum(seed: int, length: int, loss: LossName) -> ops.Datum:
    if loss is LossName.CROSS_ENTROPY:
        return datum(seed, length)
    made = datum(seed, length, logprobs=[-3.0] * length, advantages=[1.0] * length)
    return ops.Datum(made.tokens, {name: value for name, value in made.inputs.items() if name != "weights"})


def figures_of(make: Callable[[int], CountedRunner], *, full: bool = False) -> Figures:
    """Of a model that `make` builds with so many layers."""
    few, many = make(FEW_LAYERS), make(MANY_LAYERS)
    one, deep = few.row(), many.row()
    layers = MANY_LAYERS - FEW_LAYERS
    figures: Figures = {f"a row: {name}": value for name, value in one.figures().items()}
    figures |= _difference("a further layer", deep, one, layers, ("launches", "reads", "copies to the device"))
    figures |= _difference("a further row", few.row(rows=ROWS), one, ROWS - 1)
    documents = few.row(DOCUMENTS)
    figures |= _difference("a further document", documents, one, DOCUMENTS - 1)
    many_documents = many.row(DOCUMENTS)
    in_layers = many_documents.launches - deep.launches - documents.launches + one.launches
    figures["a further document and layer: launches"] = in_layers / layers / (DOCUMENTS - 1)
    ppo = LossName.PPO
    figures |= _difference("a further document of PPO", few.row(DOCUMENTS, loss=ppo), few.row(loss=ppo), DOCUMENTS - 1)
    if not full:
        tenants, two = few.row(DOCUMENTS, TENANTS), few.row(DOCUMENTS, 2)
        figures |= _difference("a further adapter", tenants, two, TENANTS - 2)
        many_two = many.row(DOCUMENTS, 2)
        in_layers = many_two.launches - many_documents.launches - two.launches + documents.launches
        figures["a second adapter and layer: launches"] = in_layers / layers
        in_layers = many.row(DOCUMENTS, TENANTS).launches - many_two.launches - tenants.launches + two.launches
        figures["a further adapter and layer: launches"] = in_layers / layers / (TENANTS - 2)
    figures |= {f"a step: {name}": value for name, value in few.step().figures().items()}
    return {name: round(value, 1) for name, value in figures.items()}


def _difference(
    name: str, more: DeviceCounts, less: DeviceCounts, count: int, kinds: Sequence[str] | None = None
) -> Figures:
    before = less.figures()
    return {
        f"{name}: {kind}": (value - before[kind]) / count
        for kind, value in more.figures().items()
        if kinds is None or kind in kinds
    }


def read_table(path: Path) -> dict[str, Figures]:
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Figures])


def write_table(path: Path, table: Mapping[str, Figures]) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(table, order="sorted"), indent=1) + b"\n")


def grown(recorded: Figures, counted: Figures) -> list[str]:
    """Says which figures are larger than recorded, or were not recorded."""
    return [
        f"{name}: {counted[name]:g} where {recorded.get(name, 'nothing')} is recorded"
        for name in counted
        if counted[name] > recorded.get(name, -1.0) + 0.05
    ]


def explain(counts: DeviceCounts) -> str:
    """Where the host reads and copies, and what is launched most."""
    parts = {"reads": counts.reads, "copies to the device": counts.to_device, "operations": counts.operations}
    return "\n".join(f"{name}: {dict(places.most_common(12))}" for name, places in parts.items())
