"""Runs every numerical check on the ranks of one group: `torchrun … -m tests.shell.train_runner.numerics OUT`.

One start serves all checks, since starting costs more than they do. Rank 0 drives; the others follow its commands. What
each check found goes into one file: nothing, or what failed, and numbers to compare with those of other groups.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter

import torch.distributed as dist

from strata.train.core import commands, ops
from strata.train.runner.model.tiny import TinyModel, make
from strata.train.runner.model_runner import ModelRunner
from strata.train.runner.runner_dispatcher import RunnerDispatcher, follow
from strata.train.runner.settings import RunnerSettings
from tests.shell.train_runner import (
    checks_custom_loss,
    checks_dispatch,
    checks_files,
    checks_full,
    checks_lora,
    checks_losses,
    shared_passes,
)
from tests.shell.train_runner.check_results import Check, Found
from tests.shell.train_runner.driver import Driver, Memory
from tests.support.ranks import join_ranks

GENERAL: Sequence[Check] = (
    *checks_lora.CHECKS,
    *checks_losses.CHECKS,
    *checks_custom_loss.CHECKS,
    *checks_files.CHECKS,
    *checks_dispatch.CHECKS,
    *shared_passes.CHECKS,
)


def main(out: Path, *, once_more: bool, compiled: bool) -> None:
    """`once_more` does only what is to have the same bits in every start, `compiled` only what compiled layers are to
    compute as well."""
    ranks = join_ranks(60)
    models = out.parent / "models"
    found = Found(ranks.size, models)
    with ranks.collective_errors():
        if ranks.is_rank0 and not models.exists():
            _make_models(models)
    folder = out.parent / f"{out.stem}-files"
    thrifty: dict[str, object] = {"activation_checkpointing": 2, "logits_bytes": 4 * 512 * 7}
    stages: Sequence[tuple[str, dict[str, object], Sequence[Check]]] = (
        ("llama", {}, GENERAL),
        ("llama", {"training": "full", "replicated_bytes": 1 << 30}, checks_full.CHECKS),
        ("llama", {"training": "full", "offload": True}, checks_full.OFFLOADED),
        ("llama", {"offload": True}, checks_lora.PARITY),
        ("llama", thrifty, checks_lora.SAME_NUMBERS),
        ("llama", {"dtype": "bfloat16"}, checks_lora.ROUGHLY),
        ("qwen3", {}, checks_lora.PARITY),
        ("qwen3_moe", {}, (*checks_lora.PARITY, checks_files.steps_are_those_of_muon)),
        ("qwen3_moe", {"training": "full"}, checks_full.PARITY),
    )
    if once_more:
        stages = (("llama", {}, (checks_lora.the_same_again_is_the_same_bits,)),)
    if compiled:
        own: dict[str, object] = {"compile_folder": folder / "compiled"}
        stages = (
            ("llama", own, checks_lora.PARITY),
            ("llama", {"training": "full", **own}, checks_full.PARITY),
            ("llama", {**thrifty, **own}, checks_lora.PARITY),
            ("qwen3_moe", own, checks_lora.PARITY),
            ("qwen3_moe", {"training": "full", **own}, checks_full.PARITY),
        )
    for number, (model, options, checks) in enumerate(stages):
        started = perf_counter()
        settings = RunnerSettings(
            model=str(models / model),
            name=model,
            sleep_folder=folder / "asleep",
            # Fewer than most checks have: models go to the memory and to the disk, and come back, all the time.
            slots=2,
            max_models=8,
            models_in_memory=1,
            **options,  # type: ignore[arg-type]
        )
        runner = ModelRunner(settings, ranks)
        if not ranks.is_rank0:
            follow(runner, ranks)
            continue
        link = Memory()
        dispatcher = RunnerDispatcher(runner, ranks, link, "kit")
        driver = Driver(dispatcher, link, ranks.size, folder / str(number))
        for check in checks:
            _run(f"{number}:{check.__name__}", check, driver, found)
        dispatcher.run_once(commands.RankRequest(driver.generation, 1, commands.Shutdown()))
        print(f"stage {number} {model} {options} {perf_counter() - started:.1f} s", file=sys.stderr, flush=True)
    if ranks.is_rank0:
        out.write_text(json.dumps({"checks": found.outcomes, "numbers": found.numbers}), encoding="utf-8")
    dist.destroy_process_group()


def _make_models(folder: Path) -> None:
    for seed, family in enumerate(("llama", "qwen3", "qwen3_moe")):
        make(folder / family, TinyModel(family=family, seed=seed))  # type: ignore[arg-type]
    make(folder / "again", TinyModel(family="llama", seed=0))
    for file in (folder / "llama").iterdir():
        assert file.read_bytes() == (folder / "again" / file.name).read_bytes(), file
    make(folder / "other", TinyModel(family="llama", seed=1))
    assert (folder / "other" / "model.safetensors").read_bytes() != (
        folder / "llama" / "model.safetensors"
    ).read_bytes()


def _run(name: str, check: Callable[[Driver, Found], None], driver: Driver, found: Found) -> None:
    try:
        check(driver, found)
    except AssertionError:
        found.outcomes[name] = traceback.format_exc(limit=-4)
    else:
        found.outcomes[name] = ""
    # A check that failed has left its models: they must not fail those that come after it.
    driver.do(commands.ManageModel(ops.Wake()))
    for model in [*driver.dispatcher._runner.models]:
        driver.unload(model)


if __name__ == "__main__":
    main(Path(sys.argv[1]), once_more="--once-more" in sys.argv, compiled="--compiled" in sys.argv)
