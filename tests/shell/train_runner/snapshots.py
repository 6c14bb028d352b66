"""Snapshots on real ranks: `torchrun … -m tests.shell.train_runner.snapshots FOLDER`, first on two ranks, then on one.

Two ranks train, take a snapshot in the midst of a step, and go on. Ranks that know nothing restore it and go on the
same way: bit for bit the same. One rank alone then restores what two have written. Each kind of training says in a file
of FOLDER what it found: nothing, or what is wrong.
"""

from __future__ import annotations

import array
import json
import sys
import threading
import traceback
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from strata.base import failpoint
from strata.train.core import commands, model_options, ops
from strata.train.core.sampling import AddedSample, SampleOperation, SampleParams, SamplingSlice, SliceResult
from strata.train.runner.model.tiny import TinyModel, make
from strata.train.runner.model_runner import ModelRunner
from strata.train.runner.runner_dispatcher import RunnerDispatcher, follow
from strata.train.runner.settings import RunnerSettings
from tests.shell.train_runner.driver import Driver, Memory, apart_by, batch, on_last
from tests.support.ranks import join_ranks

Training = Literal["lora", "full"]
WAIT_S = 60.0


def main(folder: Path) -> None:
    ranks = join_ranks(60)
    with ranks.collective_errors():
        if ranks.is_rank0 and not (folder / "llama").exists():
            make(folder / "llama", TinyModel(family="llama"))
    kinds: tuple[Training, ...] = ("lora", "full")
    for training in kinds:
        lives = (make_one, restore_it) if ranks.size > 1 else (restore_on_fewer,)
        for life in lives:
            settings = RunnerSettings(
                model=str(folder / "llama"), name="llama", sleep_folder=folder / "asleep", training=training
            )
            runner = ModelRunner(settings, ranks)
            if not ranks.is_rank0:
                follow(runner, ranks)
                continue
            link = Memory()
            driver = Driver(RunnerDispatcher(runner, ranks, link, "snapshots"), link, ranks.size, folder / training)
            found = ""
            try:
                life(driver, runner, folder / training)
            except AssertionError:
                found = traceback.format_exc(limit=-4)
            name = f"{training}-{life.__name__}.txt"
            (folder / name).write_text(found, encoding="utf-8")
            driver.dispatcher.run_once(commands.RankRequest(driver.generation, 1, commands.Shutdown()))
    dist.destroy_process_group()


def make_one(driver: Driver, runner: ModelRunner, folder: Path) -> None:
    driver.create("m", model_options.LoraConfig(rank=4, alpha=8.0, seed=3) if not runner.settings.full else None)
    driver.train("m", batch(seed=1))
    driver.step("m", learning_rate=0.01)
    if not runner.settings.full:
        driver.create("muon", model_options.LoraConfig(rank=2, alpha=8.0, seed=4), optimizer="muon")
        driver.train("muon", batch(seed=6))
        driver.muon_step("muon", model_options.MuonParams(0.01))
    assert driver.do(commands.MakeSampler(ops.SaveSampler("m", 2, "copy"), "")) == [ops.SamplerOpened("copy")]
    # Waits for a step; one rank has all its tokens.
    driver.train("m", batch(seed=2), layout=on_last)
    path = folder / "snapshots" / "7-group"
    go = threading.Event()
    failpoint.arm("train.snapshot.before_file", lambda _: _wait(go))
    assert driver.do(commands.TakeSnapshot(str(path))) == []
    number = driver.number
    (busy,) = driver.do(commands.TakeSnapshot(str(path)))
    assert isinstance(busy, ops.Failed), "a second one is not begun before the first is written"
    # The ranks train while it is written, and what they change then is not in it.
    driver.train("m", batch(seed=5))
    driver.do(commands.ManageModel(ops.AbortGradients("m", 4)))
    go.set()
    runner.snapshots.join(WAIT_S)
    driver.dispatcher.report_snapshot()
    written = driver.link.sent.pop()
    assert isinstance(written, commands.SnapshotWritten), written
    assert (written.number, written.trouble) == (number, None)
    print(f"{folder.name}: {written.size} bytes, held {written.held_s:.4f} s, written {written.written_s:.3f} s")
    said = {"number": number, "digest": written.digest, "path": str(path)}
    (folder / "written.json").write_text(json.dumps(said), encoding="utf-8")
    driver.train("m", batch(seed=2), layout=on_last)
    save_file(go_on(driver), folder / "expected.safetensors")


def _wait(go: threading.Event) -> None:
    assert go.wait(WAIT_S)


def go_on(driver: Driver) -> dict[str, torch.Tensor]:
    """What later work builds on, all of it: weights, moments, gradients, samplers."""
    driver.train("m", batch(seed=4))
    driver.step("m", learning_rate=0.01)
    state = driver.state("m")
    if "muon" in driver.dispatcher._runner.models:
        driver.train("muon", batch(seed=4))
        driver.muon_step("muon", model_options.MuonParams(0.01))
        state |= {f"muon.{name}": value for name, value in driver.state("muon").items()}
    prompt = array.array("i", [5, 6, 7, 8]).tobytes()
    params = SampleParams(max_tokens=6, seed=1, end_tokens=False)
    driver.number += 1
    time_slice = SamplingSlice(
        8, [AddedSample("copy:0", SampleOperation("copy", 0, prompt, params, prompt_logprobs=True))]
    )
    reply = driver.say(commands.DispatchCommand(driver.generation, driver.number, time_slice, driver.number - 1))
    assert isinstance(reply, commands.DispatchReply)
    assert isinstance(reply.sampled, SliceResult)
    (ended,) = reply.sampled.ended
    sampled = ended.outcome.sequences[0]  # type: ignore[union-attr]
    state["sampled"] = torch.frombuffer(bytearray(sampled.logprobs), dtype=torch.float32)
    return state


def restoring(driver: Driver, folder: Path) -> commands.Restore:
    said = json.loads((folder / "written.json").read_text(encoding="utf-8"))
    return commands.Restore(driver.generation, said["number"], said["path"], said["digest"])


def restore_it(driver: Driver, runner: ModelRunner, folder: Path) -> None:
    restore = restoring(driver, folder)
    for file in sorted(Path(restore.path).iterdir()):
        whole = file.read_bytes()
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        refused = driver.say(restore)
        assert isinstance(refused, commands.Restored)
        assert refused.refused, f"{file.name} was damaged"
        assert refused.damaged
        assert not runner.models
        file.write_bytes(whole)
    assert driver.say(restore) == commands.Restored(driver.generation, restore.number)
    driver.number = restore.number
    expected, found = load_file(folder / "expected.safetensors"), go_on(driver)
    assert expected.keys() == found.keys()
    for name, wanted in expected.items():
        assert torch.equal(wanted, found[name]), f"{name} is not the same bit for bit"


def restore_on_fewer(driver: Driver, runner: ModelRunner, folder: Path) -> None:
    del runner
    restore = restoring(driver, folder)
    assert driver.say(restore) == commands.Restored(driver.generation, restore.number)
    driver.number = restore.number
    assert apart_by(load_file(folder / "expected.safetensors"), go_on(driver)) < 1e-3


if __name__ == "__main__":
    main(Path(sys.argv[1]))
