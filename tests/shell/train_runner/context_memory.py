"""The memory of a long row on four ranks: `torchrun … -m tests.shell.train_runner.context_memory FOLDER TOKENS`.

Rank 0 writes, for context groups of each size, the bytes that a pass over a row adds to what a rank has before it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import torch.distributed as dist

from strata.train.parallel import ParallelSettings
from strata.train.runner.collectives import RankGroup
from strata.train.runner.model import process_memory, row_limit
from strata.train.runner.model.base import BaseModel
from strata.train.runner.model.tiny import TinyModel, make
from strata.train.runner.settings import RunnerSettings
from tests.support.ranks import join_ranks

SIZES = (1, 2, 4)


def peak_of_row(folder: Path, context: int, tokens: int, ranks: RankGroup) -> int:
    """The largest of all ranks."""
    parallel = ParallelSettings(context=context)
    base = BaseModel(RunnerSettings(model=str(folder / "model"), sleep_folder=folder, parallel=parallel), ranks)
    adapter = row_limit._measuring_adapter(base, ranks.device)
    # Libraries and what a first pass leaves behind are no part of a row.
    row_limit._peak_of(base, adapter, ranks, 64)
    process_memory.release_memory()
    before = process_memory.process_bytes("VmRSS")
    peak = row_limit._peak_of(base, adapter, ranks, tokens) - before
    return max(ranks.all_gather_int(peak))


def main(folder: Path, tokens: int) -> None:
    ranks = join_ranks(300)
    with ranks.collective_errors():
        if ranks.is_rank0:
            make(folder / "model", TinyModel(layers=4, hidden=256, context=tokens))
    peaks = {size: peak_of_row(folder, size, tokens, ranks) for size in SIZES}
    if ranks.is_rank0:
        (folder / "peaks.json").write_bytes(msgspec.json.encode(peaks))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
    # A rank that ends with the threads of its group aborts when the other rank has gone first.
    dist.destroy_process_group()
