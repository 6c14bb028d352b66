"""Models on meshes of four ranks: `torchrun … -m tests.shell.train_runner.mesh FOLDER`. Rank 0 writes what was found.

The losses and gradients of rows that lie on four ranks are compared with those of the unmodified model that
one process computes of all rows: in float64, or in float32 of experts, whose grouped multiplication has no float64.
Then a full fine-tune is saved on one mesh and read on another.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from strata.train.parallel import ParallelSettings
from strata.train.runner.collectives import RankGroup
from strata.train.runner.lora.adapter import Adapter
from strata.train.runner.lora.targets import targets_of
from strata.train.runner.model.base import DTYPES, BaseModel
from strata.train.runner.model.tiny import TinyModel, make
from strata.train.runner.model.trained import local, own_slice
from strata.train.runner.settings import RunnerSettings
from tests.shell.train_runner.resharding import LENGTHS, LORA, reshard, row_of
from tests.support.ranks import join_ranks

Family = Literal["llama", "qwen3_moe"]
MODELS: tuple[Family, ...] = ("llama", "qwen3_moe")


class Parity(msgspec.Struct):
    case: str
    loss: float
    """By how much the sum of log probabilities differs, by that sum."""
    gradient: float
    """By how much a gradient differs at most, by the largest of its tensor."""
    shards_equal: bool
    """Whether each rank has loaded its slice of what the unmodified loader reads."""


class Found(msgspec.Struct):
    parity: list[Parity]
    resharded: dict[str, bool]


def tie(folder: Path) -> None:
    """Make the head the embedding: the files then store one of them."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}), encoding="utf-8")
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def new_adapter(lm: Any, device: torch.device) -> Adapter:
    adapter = Adapter(LORA, targets_of(lm, LORA), device, torch.float64)
    adapter.initialise("seed")
    # B begins with zeros, and A would have no gradient; nor would the head's, if all rows of its B were the same.
    adapter.flat.add_(0.01 * torch.sin(torch.arange(adapter.size, dtype=torch.float64)).to(device))
    return adapter


def oracle(folder: Path, adapter: Adapter | None, dtype: torch.dtype) -> tuple[float, dict[str, torch.Tensor], Any]:
    """The unmodified model in this process, with plain LoRA layers around its linear ones. Its eager attention computes
    the softmax in float32, so it is not used."""
    lm = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="sdpa", experts_implementation="eager"
    )
    own: dict[str, torch.Tensor] = {}
    if adapter is not None:
        lm.requires_grad_(requires_grad=False)
        for name, (a, b) in adapter.pairs.items():
            own[f"{name}.lora_A"], own[f"{name}.lora_B"] = (
                each.detach().cpu().clone().requires_grad_() for each in (a, b)
            )
            lm.get_submodule(name).register_forward_hook(add_product(own[f"{name}.lora_A"], own[f"{name}.lora_B"]))
    total = torch.zeros((), dtype=dtype)
    for rank in range(len(LENGTHS)):
        row = row_of(rank, lm.config.vocab_size, None)
        logits = lm(input_ids=row.tokens[None], use_cache=False).logits[0]
        total = total + torch.log_softmax(logits, dim=-1)[row.logit_indices, row.targets].sum()
    total.backward()  # type: ignore[no-untyped-call]
    trained = own or dict(lm.named_parameters())
    return float(total.detach()), {name: value.grad for name, value in trained.items() if value.grad is not None}, lm


def add_product(a: torch.Tensor, b: torch.Tensor) -> Any:
    """A hook that adds a plain LoRA layer."""
    scale = LORA.alpha / LORA.rank
    return lambda module, args, output: output + scale * (args[0] @ a.T) @ b.T


def compare(folder: Path, ranks: RankGroup, training: Any, parallel: ParallelSettings) -> Parity:
    dtype: Literal["float32", "float64"] = "float32" if folder.name == "qwen3_moe" else "float64"
    settings = RunnerSettings(model=str(folder), training=training, sleep_folder=folder, dtype=dtype, parallel=parallel)
    base = BaseModel(settings, ranks)
    adapter = None if settings.full else new_adapter(base.lm, ranks.device)
    expected, gradients, whole = oracle(folder, adapter, DTYPES[dtype])
    equal = all(
        isinstance(parameter, DTensor)
        and name == other
        and torch.equal(local(parameter), own_slice(value.detach(), parameter))
        for (name, parameter), (other, value) in zip(base.lm.named_parameters(), whole.named_parameters(), strict=True)
    )
    if adapter is not None:
        adapter.begin()
    total = base.logprobs(row_of(ranks.rank, base.vocabulary, adapter, ranks.device)).sum()
    total.backward()  # type: ignore[no-untyped-call]
    if adapter is not None:
        (staged,) = adapter.take()
        own = adapter.views(ranks.start_all_reduce(staged)())
        worst = max(
            float((own[name].cpu() - value).abs().max() / value.abs().max()) for name, value in gradients.items()
        )
    else:
        worst = max(_differences(base, gradients))
    loss = ranks.start_all_reduce(total.detach().clone())()
    case = f"{folder.name} {training} {parallel.replicate}x{ranks.size // parallel.replicate}"
    return Parity(case, abs(float(loss) - expected) / abs(expected), worst, equal)


def _differences(base: BaseModel, gradients: dict[str, torch.Tensor]) -> Iterator[float]:
    for name, parameter in base.lm.named_parameters():
        assert isinstance(parameter, DTensor)
        expected = gradients[name]
        difference = torch.zeros((), dtype=expected.dtype, device=local(parameter).device)
        if local(parameter).numel():
            assert parameter.grad is not None
            difference = (local(parameter.grad) - own_slice(expected, parameter)).abs().max() / expected.abs().max()
        dist.all_reduce(difference, dist.ReduceOp.MAX)
        yield float(difference)


def main(folder: Path) -> None:
    ranks = join_ranks(120)
    with ranks.collective_errors():
        if ranks.is_rank0:
            for family in MODELS:
                make(folder / family, TinyModel(family=family))
            tie(folder / "llama")
    parity = []
    for parallel in (ParallelSettings(replicate=2, shard=2), ParallelSettings(shard=4)):
        parity += [compare(folder / "llama", ranks, training, parallel) for training in ("full", "lora")]
        parity.append(compare(folder / "qwen3_moe", ranks, "full", parallel))
    meshes = {"2x2": ParallelSettings(replicate=2), "1x4": ParallelSettings()}
    found = Found(parity, reshard(folder, folder / "llama", ranks, meshes))
    if ranks.is_rank0:
        (folder / "found.json").write_bytes(msgspec.json.encode(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    # A rank that ends with the threads of its group aborts when the other rank has gone first.
    dist.destroy_process_group()
