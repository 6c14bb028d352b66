"""One rank in the process of the tests, driven as an orchestrator would."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from strata.train.runner.collectives import RankGroup
from strata.train.runner.model_runner import ModelRunner
from strata.train.runner.runner_dispatcher import RunnerDispatcher
from strata.train.runner.settings import RunnerSettings
from tests.shell.train_runner.driver import Driver, Memory


@contextmanager
def one_rank(folder: Path) -> Iterator[RankGroup]:
    """Tests of another file may have made the group already, and need it after these."""
    if dist.is_initialized():
        yield RankGroup(torch.device("cpu"))
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'rendezvous'}", rank=0, world_size=1)
    yield RankGroup(torch.device("cpu"))
    dist.destroy_process_group()
    torch.set_num_threads(threads)


def driver_of(ranks: RankGroup, model: Path, folder: Path, **options: Any) -> Driver:
    settings = RunnerSettings(model=str(model), name=model.name, sleep_folder=folder / "asleep", **options)
    link = Memory()
    return Driver(RunnerDispatcher(ModelRunner(settings, ranks), ranks, link, "alone"), link, ranks.size, folder)
