"""Two ranks of which the second has hardly any memory left: `torchrun … -m tests.shell.train_runner.low_memory OUT`."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Final

import msgspec
import torch
import torch.distributed as dist

from strata.train.core import commands, model_options, ops
from strata.train.runner.collectives import RankGroup
from strata.train.runner.model import process_memory
from strata.train.runner.model.tiny import TinyModel, make
from strata.train.runner.model_runner import ModelRunner
from strata.train.runner.runner_dispatcher import RunnerDispatcher, follow
from strata.train.runner.settings import RunnerSettings
from tests.shell.train_runner.driver import Driver, Memory, datum
from tests.support.ranks import join_ranks

LONG: Final = 12_000
LEFT: Final = 100 << 20
"""Bytes that the second rank may still allocate: too few for the long row, more than enough for the short ones."""


class Outcome(msgspec.Struct):
    together: list[ops.Result]
    """Of a pass with the long row of one model and a short one of another."""
    after: list[ops.Result]
    """Of the same short rows, of both models."""
    gradients: list[float]
    """The norm of each model's gradients in the step after both passes."""
    row_tokens: int


def main(out: Path) -> None:
    ranks = join_ranks(120)
    folder = out.parent / "model"
    with ranks.collective_errors():
        if ranks.is_rank0:
            make(folder, TinyModel(context=20_000))
    runner = ModelRunner(RunnerSettings(model=str(folder), sleep_folder=out.parent / "asleep"), ranks)
    if not ranks.is_rank0:
        limit_memory(ranks.device)
        follow(runner, ranks)
        return
    drive(runner, ranks, out)


def limit_memory(device: torch.device) -> None:
    if device.type == "cuda":
        _, total = torch.cuda.mem_get_info(device)
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_allocated(device) + LEFT) / total, device)
    else:
        resource.setrlimit(
            resource.RLIMIT_DATA, (process_memory.process_bytes("VmData") + LEFT, resource.RLIM_INFINITY)
        )


def drive(runner: ModelRunner, ranks: RankGroup, out: Path) -> None:
    link = Memory()
    dispatcher = RunnerDispatcher(runner, ranks, link, "exhausted")
    driver = Driver(dispatcher, link, ranks.size, out.parent / "files")
    driver.create("greedy", model_options.LoraConfig(rank=4, seed=1))
    driver.create("modest", model_options.LoraConfig(rank=4, seed=2))
    long, short = datum(1, LONG), datum(2, 20)
    segment = commands.Segment

    def passed(greedy: ops.Datum) -> list[ops.Result]:
        items = [
            commands.PassItem(
                f"{name}:1", name, model_options.LossName.CROSS_ENTROPY, {}, ops.encode_pass_data(ops.PassData([one]))
            )
            for name, one in (("greedy", greedy), ("modest", short))
        ]
        # The first rank has the short row, the second both.
        return [*driver.do(commands.PassCommand(False, items, [[[]], [[segment(0, 0), segment(1, 0)]]]))]

    together, after = passed(long), passed(short)
    steps = driver.do(
        commands.StepsCommand([ops.OptimStep(name, 2, model_options.AdamParams()) for name in ("greedy", "modest")])
    )
    norms = [one.metrics["grad_norm"] if isinstance(one, ops.StepDone) else -1.0 for one in steps]
    outcome = Outcome(together, after, norms, runner.memory.row_tokens)
    out.write_bytes(msgspec.msgpack.encode(outcome))
    dispatcher.run_once(commands.RankRequest(driver.generation, 1, commands.Shutdown()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    # A rank that ends with the threads of its group aborts when the other rank has gone first.
    dist.destroy_process_group()
