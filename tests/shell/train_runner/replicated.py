"""One pass over a sharded base and over one that every rank has in full: `torchrun … replicated FOLDER`.

Each rank has a row of its own and writes by how much the two differ, and whether a single bit does.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import msgspec
import torch
from torch.distributed.tensor import DTensor

from strata.train.core.model_options import LoraConfig
from strata.train.runner.collectives import RankGroup
from strata.train.runner.lora.adapter import Adapter
from strata.train.runner.lora.hooks import Span
from strata.train.runner.lora.targets import targets_of
from strata.train.runner.model.base import BaseModel
from strata.train.runner.model.offload import SleepOffload
from strata.train.runner.model.tiny import TinyModel, make
from strata.train.runner.passes.logprobs import PackedRow
from strata.train.runner.settings import RunnerSettings
from tests.support.ranks import join_ranks

TOKENS = 24
DTYPES: Final = ("float32", "bfloat16")


class Compared(msgspec.Struct):
    equal: bool
    difference: float


def compute(base: BaseModel, ranks: RankGroup) -> torch.Tensor:
    """Log probabilities of a row, and the gradient of the adapter."""
    config = LoraConfig(rank=4, alpha=8.0)
    adapter = Adapter(config, targets_of(base.lm, config), ranks.device)
    adapter.initialise("seed")
    # B begins with zeros, and A would have no gradient.
    adapter.flat.add_(0.01)
    indices = torch.arange(TOKENS, device=ranks.device)
    tokens = (indices * (ranks.rank + 3)) % base.vocabulary
    row = PackedRow(
        tokens=tokens, documents=[TOKENS], spans=[Span(adapter, TOKENS)], logit_indices=indices, targets=tokens.flip(0)
    )
    adapter.begin()
    logprobs = base.logprobs(row)
    logprobs.sum().backward()  # type: ignore[no-untyped-call]
    return torch.cat([logprobs.detach(), *adapter.take()])


def main(folder: Path) -> None:
    ranks = join_ranks(120)
    with ranks.collective_errors():
        if ranks.is_rank0:
            make(folder / "model", TinyModel())
    for dtype in DTYPES:
        results = []
        for size, is_sharded in ((0, True), (1 << 30, False)):
            settings = RunnerSettings(
                model=str(folder / "model"), sleep_folder=folder, replicated_bytes=size, dtype=dtype
            )
            base = BaseModel(settings, ranks)
            assert all(isinstance(parameter, DTensor) is is_sharded for parameter in base.lm.parameters())
            results.append(compute(base, ranks))
            if not is_sharded:
                offload = SleepOffload(base.lm.parameters(), folder / f"asleep-{ranks.rank}")
                assert not any(parameter.untyped_storage().nbytes() for parameter in base.lm.parameters())
                offload.restore()
                assert torch.equal(compute(base, ranks), results[-1]), "it has slept"
        assert float(results[0][TOKENS:].abs().max()) > 0
        difference = float((results[0] - results[1]).abs().max())
        compared = Compared(torch.equal(*results), difference)
        (folder / f"{dtype}-{ranks.rank}").write_bytes(msgspec.json.encode(compared))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
