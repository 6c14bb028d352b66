"""Planned memory of a rank beside measured memory: `python -m bench plan`.

Gloo ranks load a small model in float32, make a step with a short row, then two passes of two rows and a second step.
The kernel reports the peak of their memory (`VmHWM`), of which pages of files are taken off. The plan is that
of `strata plan`, without its part for the process. The figure is the plan by the measured peak of the rank with most;
both sides of the table are in MiB.

The ranks are forked from this process. Their allocator returns freed memory at once, as that of a device reuses it: so
it does if the memory has a mapping of its own. A hole in the heap that a rank inherits is filled first and stays. Hence
this process sets the allocator before it allocates anything large, and models are made in processes of their own.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import torch
import torch.distributed as dist

from bench.interleave import Comparison
from bench.report import Report
from strata.train.core.model_options import AdamParams, LoraConfig
from strata.train.core.ops import CreateModel
from strata.train.parallel import ParallelSettings
from strata.train.plan.memory_plan import MemoryRecipe, MeshShape, plan_device
from strata.train.plan.quantisation import NF4_BLOCK
from strata.train.runner.collectives import RankGroup
from strata.train.runner.lora.adapter import Adapter
from strata.train.runner.lora.hooks import Span
from strata.train.runner.model import process_memory
from strata.train.runner.model.base import BaseModel
from strata.train.runner.model.loading import build_skeleton
from strata.train.runner.model.memory_trace import trace_cost
from strata.train.runner.model.quantised import quantise_rows
from strata.train.runner.model.tiny import TinyModel, make
from strata.train.runner.model.trained import FullModel, LoraModel, TrainedModel
from strata.train.runner.model_runner import run_interleaved
from strata.train.runner.passes.logprobs import PackedRow
from strata.train.runner.settings import RunnerSettings

TOKENS: Final = 512
WARM_UP: Final = 64
DENSE: Final = TinyModel(family="llama", layers=8, hidden=384, vocabulary=8192, context=TOKENS)
EXPERTS: Final = TinyModel(family="qwen3_moe", layers=6, hidden=256, vocabulary=8192, experts=16, context=TOKENS)
M_TRIM_THRESHOLD: Final = -1
M_MMAP_THRESHOLD: Final = -3
"""Options of the allocator."""
UNDER: Final = 0.95
OVER: Final = 1.15
"""How small and how large a plan may be, by what was measured."""


class PlanCase(msgspec.Struct, frozen=True):
    name: str
    tiny: TinyModel
    recipe: MemoryRecipe
    mesh: MeshShape


def _case(name: str, tiny: TinyModel, mesh: MeshShape, **recipe: object) -> PlanCase:
    common = {"dtype": "float32", "row_tokens": TOKENS, "cached_tokens": 0, "replicated_bytes": 0, "device": "cpu"}
    return PlanCase(name, tiny, msgspec.convert({**common, **recipe}, MemoryRecipe), mesh)


SHARED: Final = MeshShape(shard=2)
CASES: Final = (
    _case("dense LoRA 1x2", DENSE, SHARED, lora_rank=32),
    _case("dense full 1x2", DENSE, SHARED, training="full"),
    _case("experts LoRA 1x2", EXPERTS, SHARED, lora_rank=8),
    _case("experts full 1x2", EXPERTS, SHARED, training="full"),
    _case("dense LoRA tensor 2", DENSE, MeshShape(tensor=2), lora_rank=32),
    _case("dense full tensor 2", DENSE, MeshShape(tensor=2), training="full"),
    _case("experts LoRA expert 2", EXPERTS, MeshShape(shard=2, expert=2), lora_rank=8),
    _case("experts full expert 2", EXPERTS, MeshShape(shard=2, expert=2), training="full"),
    _case("dense LoRA context 2", DENSE, MeshShape(context=2), lora_rank=32),
    _case("dense full context 2", DENSE, MeshShape(context=2), training="full"),
    _case("dense LoRA nf4 1x1", DENSE, MeshShape(), lora_rank=32, quantise="nf4"),
    _case("dense LoRA nf4 1x2", DENSE, SHARED, lora_rank=32, quantise="nf4"),
    _case("dense LoRA int8 1x2", DENSE, SHARED, lora_rank=32, quantise="int8"),
)
SHORT: Final = ("dense full 1x2", "experts LoRA 1x2")


async def run(report: Report, *, quick: bool) -> None:
    torch.set_num_threads(1)
    for option in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
        ctypes.CDLL(None).mallopt(option, 1 << 16)
    for case in CASES:
        if not quick or case.name in SHORT:
            report.progress(case.name)
            with tempfile.TemporaryDirectory(prefix="bench-plan-") as folder:
                planned, measured = compare(case, Path(folder))
            ratio = planned / measured
            verdict = "within the limits" if UNDER <= ratio <= OVER else "OUTSIDE the limits"
            found = Comparison([planned / 2**20], [measured / 2**20])
            report.add(case.name, "MiB", found, goal=UNDER, note=f"{verdict}: {UNDER:g} to {OVER:g}")


def compare(case: PlanCase, folder: Path) -> tuple[int, int]:
    """Planned and measured bytes of a rank, without those that the process has before."""
    model = str(folder / "model")
    # In processes of their own: autograd does not survive a fork.
    _run_all([partial(make, Path(model), case.tiny)], folder / "made")
    (planned,) = _run_all([partial(_plan, case, model)], folder / "planned")
    ranks = [partial(_measure, case, model, rank, folder) for rank in range(case.mesh.devices)]
    return planned, max(_run_all(ranks, folder / "measured"))


def _run_all(functions: Sequence[Callable[[], int]], out: Path) -> list[int]:
    """What each returns, in a process of its own, all at once. They write it to files."""
    files = [out.with_name(f"{out.name}-{number}") for number in range(len(functions))]
    children = []
    for file, function in zip(files, functions, strict=True):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                file.write_text(str(function()), "ascii")
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    for child in children:
        _, status = os.waitpid(child, 0)
        if status:
            raise RuntimeError(f"a process ended with status {status}")
    return [int(file.read_text("ascii")) for file in files]


def _plan(case: PlanCase, model: str) -> int:
    plan = plan_device(trace_cost(model, case.recipe, case.mesh), case.recipe, case.mesh)
    return sum(part.bytes for part in plan.parts if part.name != "process")


def _measure(case: PlanCase, model: str, rank: int, folder: Path) -> int:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=case.mesh.devices,
        timeout=timedelta(seconds=300),
    )
    ranks = RankGroup(torch.device("cpu"))
    build_skeleton(model, torch.float32)
    if case.recipe.quantise:
        quantise_rows(torch.zeros(1, NF4_BLOCK), case.recipe.quantise)
    settings = RunnerSettings(
        model=model,
        sleep_folder=folder,
        training=case.recipe.training,
        dtype=case.recipe.dtype,
        quantise=case.recipe.quantise,
        replicated_bytes=case.recipe.replicated_bytes,
        activation_checkpointing=case.recipe.checkpointing,
        parallel=ParallelSettings(
            replicate=case.mesh.replicate,
            context=case.mesh.context,
            tensor=case.mesh.tensor,
            expert=case.mesh.expert,
        ),
    )
    # What the first process left behind, garbage with it, is not freed meanwhile.
    process_memory.release_memory()
    before = process_memory.process_bytes("RssAnon")
    peak = train(BaseModel(settings, ranks), case.recipe, ranks) - before
    dist.barrier()
    return peak


def train(base: BaseModel, recipe: MemoryRecipe, ranks: RankGroup) -> int:
    """The peak of anonymous memory meanwhile. Pages of libraries are there after a first step of a short row."""
    lora = LoraConfig(rank=recipe.lora_rank, alpha=1.0)
    created = CreateModel(model_id="measured", base_model="", lora=None if recipe.full else lora)
    adapter: Adapter | None = None
    trained: TrainedModel
    if recipe.full:
        trained = FullModel(created, base.packed, ranks)
    else:
        adapter = base.new_adapter(lora, ranks.device)
        trained = LoraModel(created, adapter, ranks)
    compute_pass(base, trained, adapter, 1, WARM_UP)
    run_interleaved([trained.step(AdamParams())])
    process_memory.release_memory()
    resident, anonymous = process_memory.process_bytes("VmRSS"), process_memory.process_bytes("RssAnon")
    process_memory.reset_peak(ranks.device)
    for _ in range(2):
        compute_pass(base, trained, adapter, 2, recipe.row_tokens)
    run_interleaved([trained.step(AdamParams())])
    return process_memory.process_bytes("VmHWM") - resident + anonymous


def compute_pass(base: BaseModel, trained: TrainedModel, adapter: Adapter | None, rows: int, tokens: int) -> None:
    content = torch.arange(tokens) % base.vocabulary
    indices = torch.arange(tokens)
    spans = [Span(adapter, tokens)]
    row = PackedRow(tokens=content, documents=[tokens], spans=spans, logit_indices=indices, targets=content)
    if adapter is not None:
        base.adapters.in_pass = [adapter]
    trained.begin()
    for number in range(1, rows + 1):
        base.reduce_gradients(enabled=number == rows)
        base.logprobs(row).sum().backward()  # type: ignore[no-untyped-call]
    if trained.is_finite():
        trained.commit()
