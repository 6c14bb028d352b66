"""Counts passes of the runner on a CUDA device that does not exist, in a process with the CUDA build of torch.

The branches for CUDA run, forward and backward, with tensors without content in bfloat16. Weights are not read and the
start-up check does not run. What is not seen: time, memory inside kernels, streams, and whether a kernel would take its
arguments.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from strata.train.core import ops
from strata.train.core.model_options import LoraConfig
from strata.train.runner.collectives import RankGroup
from strata.train.runner.lora import span_products
from strata.train.runner.mesh import make_mesh
from strata.train.runner.model.base import DTYPES, BaseModel
from strata.train.runner.model.startup_check import find_decoder
from strata.train.runner.model.trained import FullModel, LoraModel, TrainedModel
from strata.train.runner.passes.pass_runner import PassRunner
from strata.train.runner.settings import RunnerSettings
from tests.cuda_lane import driverless
from tests.cuda_lane.cases import CASES, FAMILIES, SIZES, VOCABULARY, Case
from tests.cuda_lane.table import CaseCounts
from tests.support.counted_passes import FEW_LAYERS, TENANTS, CountedRunner, figures_of
from tests.support.device_counters import DeviceCounters

CUDA: Final = torch.device("cuda", 0)
CHUNK: Final = 100
"""Tokens whose logits are computed at once: rows have more, as they do with real vocabularies."""
KERNELS: Final = ("_varlen_attn", "_scaled_dot_product", "_grouped_mm", "_fused_adamw", "bmm", "_softmax")
"""What says which branch was taken: beginnings of names."""


class DeviceModel(BaseModel):
    """A model that was never loaded, on `CUDA`."""

    def __init__(self, config: Any, settings: RunnerSettings, ranks: RankGroup) -> None:
        self.settings = settings
        self.arch = str(config.model_type)
        with torch.device("meta"):
            lm = AutoModelForCausalLM.from_config(config, dtype=self.storage_dtype)  # type: ignore[no-untyped-call]
        lm.tie_weights()
        lm.requires_grad_(requires_grad=settings.full)
        _materialise(lm)
        lm.tie_weights()
        lm.eval()
        self.vocabulary, self.max_context = config.vocab_size, int(config.max_position_embeddings)
        self.parameters = sum(parameter.numel() for parameter in lm.parameters())
        self.decoder = find_decoder(lm)
        with unset_fake_temporarily():
            self.mesh = make_mesh(settings.parallel, ranks.shares, CUDA, DTYPES[settings.dtype])
        self.packed = self._pack(lm)
        if settings.full:
            self.mesh.shard(self.packed)
        self.lm, self.adapters, self.all_stages = lm, self.packed.adapters, lm
        self._add_hooks(lm)


def _materialise(lm: torch.nn.Module) -> None:
    """Not by `to_empty`, which swaps tensors that others refer to."""
    for module in lm.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                empty = torch.empty(weight.shape, dtype=weight.dtype, device=CUDA)
                module._parameters[name] = torch.nn.Parameter(empty, requires_grad=weight.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=CUDA)


class AllFits:
    """Instead of a measured limit of rows: nothing here has a size in memory."""

    limit = row_tokens = 1 << 20

    def fits(self, tokens: int) -> bool:
        return tokens <= self.limit

    @contextmanager
    def computing(self, model_id: str, tokens: int) -> Iterator[None]:
        del model_id, tokens
        yield


def new_runner(case: Case, layers: int, ranks: RankGroup) -> CountedRunner:
    config = AutoConfig.for_model(case.family, **{**SIZES, **FAMILIES[case.family], "num_hidden_layers": layers})
    settings = RunnerSettings(
        model=case.family,
        sleep_folder=Path(tempfile.gettempdir()),
        dtype="bfloat16",
        training="full" if case.kind == "full" else "lora",
        logits_bytes=4 * VOCABULARY * CHUNK,
        replicated_bytes=1 << 40,
    )
    base = DeviceModel(config, settings, ranks)
    memory: Any = AllFits()
    models = new_models(base, ranks)
    return CountedRunner(PassRunner(base, ranks, models, memory), models, lambda: DeviceCounters(CUDA, answer))


def new_models(base: BaseModel, ranks: RankGroup, rank: int = 8) -> dict[str, TrainedModel]:
    if base.settings.full:
        return {"whole": FullModel(ops.CreateModel("whole", base.arch, None), base.packed, ranks)}
    lora = LoraConfig(rank=rank, alpha=16.0)
    names = [f"m{number}" for number in range(TENANTS)]
    return {
        name: LoraModel(ops.CreateModel(name, base.arch, lora), base.new_adapter(lora, CUDA), ranks) for name in names
    }


def answer(place: str, tensor: torch.Tensor) -> Any:
    """Rows have one target for each token, so that a chunk of targets begins where its tokens do."""
    if place.endswith(":_chunks"):
        return [CHUNK * number for number in range(len(tensor))]
    kind: Any = bool if tensor.dtype == torch.bool else float if tensor.is_floating_point() else int
    values = torch.ones(tensor.shape, device="meta")
    return kind(1) if not values.ndim else [kind(1)] * values.numel()


def count(case: Case, ranks: RankGroup) -> CaseCounts:
    has_kernel = case.kind == "lora, grouped products"
    span_products._has_kernel = lambda device, dtype: has_kernel  # type: ignore[assignment]
    figures = figures_of(partial(new_runner, case, ranks=ranks), full=case.kind == "full")
    runner = new_runner(case, FEW_LAYERS, ranks)
    row, step = runner.row(4, min(TENANTS, len(runner.models))), runner.step()
    operations = row.operations + step.operations
    kernels = {name: number for name, number in operations.items() if name.startswith(KERNELS)}
    return CaseCounts(figures, kernels, dict(row.reads + step.reads), dict(row.to_device + step.to_device))


def read_in_each_row() -> None:
    """A defect that has to be noticed."""
    logprobs = BaseModel.logprobs

    def read_after(self: BaseModel, row: Any) -> Any:
        result = logprobs(self, row)
        result.sum().item()
        return result

    BaseModel.logprobs = read_after  # type: ignore[method-assign]


@contextmanager
def device_rank() -> Iterator[RankGroup]:
    """The only rank, whose device is `CUDA`."""
    with tempfile.TemporaryDirectory() as folder:
        address = f"file://{folder}/rendezvous"
        dist.init_process_group("cpu:gloo,cuda:fake", init_method=address, rank=0, world_size=1)
        ranks = RankGroup(CUDA)
    # Another thread of autograd would wait for this one, which has the lock of Python.
    with FakeTensorMode(allow_non_fake_inputs=True), torch.autograd.set_multithreading_enabled(False):
        yield ranks
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hooks", type=Path, required=True, help="the library made of hooks.cpp")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("cases", nargs="+", metavar="CASE")
    parser.add_argument("--planted", action="store_true", help="with a read in each row")
    options = parser.parse_args()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    driverless.install(options.hooks)
    if options.planted:
        read_in_each_row()
    with device_rank() as ranks:
        table = {name: count(CASES[name], ranks) for name in options.cases}
    options.out.write_bytes(msgspec.json.encode(table))


if __name__ == "__main__":
    main()
