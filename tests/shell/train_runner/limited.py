"""Ranks that may not allocate as much memory as the model has: `torchrun … limited FOLDER lora`, or `full`.

Each rank limits its memory (a control group, version 1) before it loads the model, to what it has then and 98 % of the
bytes of all weights. The kernel kills a process that needs more; pages of files count, but it takes them back. `limited
FOLDER export` exports what was saved, in one process with the same limit. A rank of a full fine-tune has four numbers
for each weight of its shard, and a snapshot copies three of them: it takes eight ranks to stay below the weights.
"""

from __future__ import annotations

import array
import os
import sys
from pathlib import Path
from typing import Final, Literal

import msgspec
import torch.distributed as dist

from strata.train.core import commands, model_options, ops
from strata.train.core.sampling import AddedSample, SampleOperation, SampleParams, SamplingSlice, SliceResult
from strata.train.runner.checkpoint.export import export
from strata.train.runner.model.tiny import TinyModel, make
from strata.train.runner.model_runner import ModelRunner
from strata.train.runner.runner_dispatcher import RunnerDispatcher, follow
from strata.train.runner.settings import RunnerSettings
from tests.shell.train_runner.driver import Driver, Memory, batch
from tests.support.ranks import join_ranks

TINY: Final = TinyModel(family="llama", layers=20, hidden=768, vocabulary=1024, context=128)
GROUPS: Final = Path("/sys/fs/cgroup/memory")
SHARE: Final = 0.98
"""How much memory a rank may allocate, by the bytes of all weights."""


def main(folder: Path, training: Literal["lora", "full"]) -> None:
    ranks = join_ranks(300)
    with ranks.collective_errors():
        if ranks.is_rank0 and not (folder / "model").exists():
            make(folder / "model", TINY)
            make(folder / "small", TinyModel(family="llama"))
    # A small model first: what it imports and allocates belongs to every process.
    ModelRunner(RunnerSettings(model=str(folder / "small"), sleep_folder=folder / "asleep"), ranks)
    limit_memory(folder)
    settings = RunnerSettings(
        model=str(folder / "model"),
        name="model",
        sleep_folder=folder / "asleep",
        training=training,
        activation_checkpointing=True,
    )
    runner = ModelRunner(settings, ranks)
    if not ranks.is_rank0:
        follow(runner, ranks)
        return
    link = Memory()
    driver = Driver(RunnerDispatcher(runner, ranks, link, "limited"), link, ranks.size, folder / "files")
    drive(driver, runner, folder / "files")
    driver.dispatcher.run_once(commands.RankRequest(driver.generation, 1, commands.Shutdown()))
    (folder / "done").touch()


def limit_memory(folder: Path) -> None:
    """Move this process into a control group of its own. What it holds already is not counted there."""
    whole = sum(file.stat().st_size for file in (folder / "model").glob("*.safetensors"))
    group = GROUPS / f"strata-limited-{os.getpid()}"
    group.mkdir()
    (folder / f"group-{os.getpid()}").write_text(str(group), encoding="utf-8")
    (group / "memory.limit_in_bytes").write_text(str(int(SHARE * whole)), encoding="ascii")
    (group / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")


def leave_group() -> None:
    """Back to the group of all others, so that the own one can be removed."""
    (GROUPS / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")


def drive(driver: Driver, runner: ModelRunner, folder: Path) -> None:
    driver.create("m", None if runner.settings.full else model_options.LoraConfig(rank=4, alpha=8.0, seed=3))
    driver.train("m", batch(seed=1))
    driver.step("m", learning_rate=0.01)
    assert driver.do(commands.TakeSnapshot(str(folder / "snapshot"))) == []
    runner.snapshots.join(120)
    result = runner.snapshots.take()
    assert result is not None
    assert result.trouble is None, result
    assert driver.do(commands.MakeSampler(ops.SaveSampler("m", 2, "copy"), "")) == [ops.SamplerOpened("copy")]
    assert sample(driver) == 8
    assert isinstance(driver.save("m", "weights"), ops.WeightsSaved)
    assert isinstance(driver.save("m", "sampled", kind="sampler_weights"), ops.WeightsSaved)
    assert isinstance(driver.load("m", "weights"), ops.WeightsLoaded)


def sample(driver: Driver) -> int:
    """One rank has a sequence, and the others take part in its passes. Returns how many tokens were sampled."""
    params = SampleParams(max_tokens=8, seed=1, end_tokens=False)
    prompt = array.array("i", [5, 6, 7]).tobytes()
    driver.number += 1
    work = SamplingSlice(8, [AddedSample("copy:0", SampleOperation("copy", 0, prompt, params))])
    reply = driver.say(commands.DispatchCommand(driver.generation, driver.number, work, driver.number - 1))
    assert isinstance(reply, commands.DispatchReply)
    assert isinstance(reply.sampled, SliceResult)
    (ended,) = reply.sampled.ended
    return len(ended.outcome.sequences[0].logprobs) // 4  # type: ignore[union-attr]


def export_saved(folder: Path) -> None:
    limit_memory(folder)
    export(folder / "files" / "weights", folder / "exported", "hf", str(folder / "model"))


if __name__ == "__main__":
    if sys.argv[2] == "export":
        export_saved(Path(sys.argv[1]))
    else:
        main(Path(sys.argv[1]), msgspec.convert(sys.argv[2], Literal["lora", "full"]))
        # A rank that ends with the threads of its group aborts when the other rank has gone first.
        dist.destroy_process_group()
    leave_group()
