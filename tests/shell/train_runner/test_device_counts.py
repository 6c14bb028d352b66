"""What a pass would make a device do, counted on CPU: no figure of `device_counts.json` grows.

`python -m tests.shell.train_runner.test_device_counts` records the figures again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from strata.train.core import ops
from strata.train.core.model_options import LoraConfig
from strata.train.runner.collectives import RankGroup
from strata.train.runner.model.base import BaseModel
from strata.train.runner.model.row_limit import RowMemory
from strata.train.runner.model.tiny import TinyModel, make
from strata.train.runner.model.trained import FullModel, LoraModel, TrainedModel
from strata.train.runner.passes.pass_runner import PassRunner
from strata.train.runner.settings import RunnerSettings
from tests.shell.train_runner.single_rank import one_rank
from tests.support.counted_passes import (
    FEW_LAYERS,
    ROWS,
    TENANTS,
    CountedRunner,
    Figures,
    figures_of,
    grown,
    read_table,
    write_table,
)
from tests.support.device_counters import CPU_DEVICE, DeviceCounters

TABLE: Final = Path(__file__).with_name("device_counts.json")
CASES: Final[dict[str, dict[str, Any]]] = {
    "llama lora": {"family": "llama"},
    "llama lora, logits in chunks": {"family": "llama", "logits_bytes": 4 * 512 * 100},
    "llama full": {"family": "llama", "training": "full"},
    "qwen3_moe lora": {"family": "qwen3_moe"},
}


class CpuRunners:
    """Runners on one rank whose device is `CPU_DEVICE`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ranks = RankGroup(CPU_DEVICE)

    def figures(self, *, family: Any, training: Any = "lora", **options: Any) -> Figures:
        return figures_of(
            lambda layers: self.runner(layers, family, training=training, **options), full=training == "full"
        )

    def runner(self, layers: int, family: Any, **options: Any) -> CountedRunner:
        model = self._folder / f"{family}-{layers}"
        if not model.exists():
            make(model, TinyModel(family=family, layers=layers))
        settings = RunnerSettings(
            model=str(model),
            sleep_folder=self._folder / "asleep",
            row_tokens=1 << 16,
            replicated_bytes=1 << 30,
            **options,
        )
        base = BaseModel(settings, self._ranks)
        memory = RowMemory(base, self._ranks, self._folder / "row")
        models = (
            {"whole": self._full(base)} if settings.full else {f"m{n}": self._lora(base, n) for n in range(TENANTS)}
        )
        return CountedRunner(PassRunner(base, self._ranks, models, memory), models, lambda: DeviceCounters(CPU_DEVICE))

    def _lora(self, base: BaseModel, number: int) -> TrainedModel:
        lora = LoraConfig(rank=8, alpha=16.0)
        adapter = base.new_adapter(lora, self._ranks.device)
        adapter.initialise(f"seed-{number}")
        return LoraModel(ops.CreateModel(f"m{number}", "tiny", lora), adapter, self._ranks)

    def _full(self, base: BaseModel) -> TrainedModel:
        return FullModel(ops.CreateModel("whole", "tiny", None), base.packed, self._ranks)


@pytest.fixture(scope="module")
def runners(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CpuRunners]:
    folder = tmp_path_factory.mktemp("counts")
    with one_rank(folder):
        yield CpuRunners(folder)


@pytest.mark.parametrize("case", CASES)
def test_no_figure_grows(runners: CpuRunners, case: str) -> None:
    assert grown(read_table(TABLE)[case], runners.figures(**CASES[case])) == []


def test_every_recorded_figure_is_counted() -> None:
    assert read_table(TABLE).keys() == CASES.keys()


def test_a_read_in_each_row_is_noticed(runners: CpuRunners, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = runners.runner(FEW_LAYERS, "llama")
    before = counted.row(rows=ROWS).reads.total()
    logprobs = BaseModel.logprobs

    def read_after(self: BaseModel, row: Any) -> Any:
        result = logprobs(self, row)
        result.sum().item()
        return result

    monkeypatch.setattr(BaseModel, "logprobs", read_after)
    assert counted.row(rows=ROWS).reads.total() == before + ROWS


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, one_rank(Path(folder)):
        runners = CpuRunners(Path(folder))
        write_table(TABLE, {case: runners.figures(**options) for case, options in CASES.items()})


if __name__ == "__main__":
    main()
