"""Reads a checkpoint of a full fine-tune, writes it again, trains on, writes that: `torchrun … reshard MODEL FOLDER`.

The checkpoint is `one` in FOLDER; it becomes `two` and then `trained`. Each rank writes down what was unpickled
meanwhile. At the end the last rank is killed in the midst of saving over `trained`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from strata.base.failpoint import arm, kill
from strata.train.core import ops
from strata.train.runner.model_runner import ModelRunner
from strata.train.runner.runner_dispatcher import RunnerDispatcher, follow
from strata.train.runner.settings import RunnerSettings
from tests.shell.train_runner.driver import Driver, Memory, batch
from tests.support.ranks import join_ranks


def main(model: Path, folder: Path) -> None:
    ranks = join_ranks(60)
    settings = RunnerSettings(model=str(model), name=model.name, sleep_folder=folder / "asleep", training="full")
    runner = ModelRunner(settings, ranks)
    unpickled: list[str] = []
    sys.addaudithook(
        lambda event, args: unpickled.append(f"{args[0]}.{args[1]}") if event == "pickle.find_class" else None
    )
    if ranks.is_rank0:
        drive(RunnerDispatcher(runner, ranks, Memory(), "reshard"), folder, ranks.size, unpickled)
    else:
        arm("train.checkpoint.after_shard", lambda name: end(folder, ranks.rank, unpickled, name), skip=2)
        follow(runner, ranks)


def drive(dispatcher: RunnerDispatcher, folder: Path, ranks: int, unpickled: list[str]) -> None:
    link = dispatcher._link
    assert isinstance(link, Memory)
    driver = Driver(dispatcher, link, ranks, folder)
    driver.create("m", None)
    assert isinstance(driver.load("m", "one"), ops.WeightsLoaded)
    assert isinstance(driver.save("m", "two"), ops.WeightsSaved)
    driver.train("m", batch(seed=9))
    driver.step("m", learning_rate=0.01)
    assert isinstance(driver.save("m", "trained"), ops.WeightsSaved)
    write_down(folder, 0, unpickled)
    driver.train("m", batch(seed=10))
    driver.step("m", learning_rate=0.01)
    raise AssertionError(driver.save("m", "trained", overwrite=True))


def write_down(folder: Path, rank: int, unpickled: list[str]) -> None:
    (folder / f"unpickled-{rank}.json").write_text(json.dumps(unpickled), encoding="utf-8")


def end(folder: Path, rank: int, unpickled: list[str], failpoint: str) -> None:
    write_down(folder, rank, unpickled)
    kill(failpoint)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
