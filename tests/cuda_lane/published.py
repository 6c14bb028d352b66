"""Counts what a row and a step of published models make a CUDA device compute, in a process with the CUDA build:
`python -m tests.cuda_lane.published` writes `published.json`, which `scripts/gpu_estimate.py` reads.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig
from transformers.utils import logging

from scripts.gpu_estimate import PUBLISHED, OperationCost, PublishedCost
from strata.train.core.model_options import AdamParams, LossName
from strata.train.runner.collectives import RankGroup
from strata.train.runner.passes.partition import PackedDatum, RankPass, RankPassItem
from strata.train.runner.passes.pass_runner import PassRunner
from strata.train.runner.settings import LOGITS_BYTES, RunnerSettings
from tests.cuda_lane import driverless, environment
from tests.cuda_lane.lane import CUDA, AllFits, DeviceModel, device_rank, new_models
from tests.shell.train_runner.driver import datum
from tests.support.device_counters import ALLOCATIONS, READS, WITHOUT_LAUNCH, DeviceCounters
from tests.support.published_models import LLAMA_8B, QWEN3_30B_A3B

LORA_RANK: Final = 32


class PublishedCase(NamedTuple):
    config: Mapping[str, Any]
    full: bool
    documents: Sequence[int]
    """Tokens of the row's documents."""
    checkpointing: int = 0


CASES: Final[Mapping[str, PublishedCase]] = {
    "llama 8B lora, 2,048 tokens, recomputed": PublishedCase(LLAMA_8B, full=False, documents=(2048,), checkpointing=1),
    "llama 8B lora, 8,192 tokens": PublishedCase(LLAMA_8B, full=False, documents=(8192,)),
    "llama 8B full, 8,192 tokens, every second layer recomputed": PublishedCase(
        LLAMA_8B, full=True, documents=(8192,), checkpointing=2
    ),
    "llama 8B full, 16,384 tokens, recomputed": PublishedCase(
        LLAMA_8B, full=True, documents=(8192, 8192), checkpointing=1
    ),
    "qwen3_moe 30B lora, 16,384 tokens, recomputed": PublishedCase(
        QWEN3_30B_A3B, full=False, documents=(8192, 8192), checkpointing=1
    ),
}


class OperationCosts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up calls, floating-point operations and bytes of what the device computes, by operation. Attention counts
    the pairs of tokens that it looks at."""

    def __init__(self, documents: Sequence[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()
        self.flops: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self._pairs = sum(length * (length + 1) // 2 for length in documents)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.is_view or name in ALLOCATIONS | WITHOUT_LAUNCH | READS:
            return output
        tensors = [each for each in torch.utils._pytree.tree_leaves((args, kwargs, output)) if _is_on_device(each)]
        if tensors:
            flops = self._flops(name, args)
            size = sum(each.nbytes for each in {id(each): each for each in tensors}.values())
            if 0 < flops < MANY_FLOPS * size:
                name = f"{name}, narrow"
            self.calls[name] += 1
            self.bytes[name] += size
            self.flops[name] += flops
        return output

    def _flops(self, name: str, args: Sequence[Any]) -> int:
        if name in MATRICES:
            first = MATRICES[name]
            return int(2 * args[first].numel() * args[first + 1].shape[-1])
        if name == "_grouped_mm":
            rows, inner = args[0].shape[-2:]
            return int(2 * rows * inner * args[1].shape[-1])
        if name == "_varlen_attn":
            query, value = args[0], args[2]
            return int(2 * self._pairs * query.shape[-2] * (query.shape[-1] + value.shape[-1]))
        if name == "_varlen_attn_backward":
            # Five products where the forward pass has two.
            query = args[1]
            return int(2 * self._pairs * query.shape[-2] * 5 * query.shape[-1])
        return 0

    def costs(self) -> dict[str, OperationCost]:
        return {name: OperationCost(calls, self.flops[name], self.bytes[name]) for name, calls in self.calls.items()}


MANY_FLOPS: Final = 200
"""Products with fewer for each byte, such as those of adapters, wait for memory on today's devices: they are summed
apart."""
MATRICES: Final = {"mm": 0, "addmm": 1, "addmm_": 1, "bmm": 0, "baddbmm": 1}
"""Which argument is the left matrix."""


def _is_on_device(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == CUDA.type


def count(case: PublishedCase, ranks: RankGroup) -> PublishedCost:
    settings = RunnerSettings(
        model=case.config["model_type"],
        sleep_folder=Path("asleep"),
        dtype="bfloat16",
        training="full" if case.full else "lora",
        logits_bytes=LOGITS_BYTES,
        replicated_bytes=1 << 50,
        activation_checkpointing=case.checkpointing,
    )
    base = DeviceModel(AutoConfig.for_model(**case.config), settings, ranks)
    models = new_models(base, ranks, LORA_RANK)
    memory: Any = AllFits()
    runner, (name, model) = PassRunner(base, ranks, models, memory), next(iter(models.items()))
    row = [PackedDatum(0, number, datum(number, length)) for number, length in enumerate(case.documents)]
    work = RankPass(
        forward_only=False,
        items=[RankPassItem(name, LossName.CROSS_ENTROPY, {}, datums=len(row))],
        rows=[row],
    )

    def run_pass() -> None:
        report = runner.run(work)
        assert not report.failures, report.failures

    def make_step() -> None:
        for _ in model.step(AdamParams(learning_rate=1e-4, grad_clip_norm=1.0)):
            """All ranks are this one."""

    return PublishedCost(
        tokens=sum(case.documents),
        parameters=base.parameters,
        row=_costs(run_pass, case.documents),
        step=_costs(make_step, case.documents),
    )


def _costs(run: Callable[[], None], documents: Sequence[int]) -> dict[str, OperationCost]:
    costs = OperationCosts(documents)
    with ExitStack() as modes:
        modes.enter_context(DeviceCounters(CUDA))
        modes.enter_context(costs)
        run()
    return costs.costs()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="all if none is named")
    parser.add_argument("--hooks", type=Path, help="the library made of hooks.cpp, in a process with the CUDA build")
    options = parser.parse_args()
    if options.hooks is None:
        environment.run_module(environment.prepare(), "tests.cuda_lane.published", "--", *options.cases)
        return
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    driverless.install(options.hooks)
    with device_rank() as ranks:
        counted = {name: count(CASES[name], ranks) for name in options.cases or CASES}
    known = msgspec.json.decode(PUBLISHED.read_bytes(), type=dict[str, PublishedCost]) if PUBLISHED.exists() else {}
    table = {name: each for name, each in {**known, **counted}.items() if name in CASES}
    PUBLISHED.write_bytes(msgspec.json.format(msgspec.json.encode(table, order="sorted"), indent=1) + b"\n")


if __name__ == "__main__":
    main()
