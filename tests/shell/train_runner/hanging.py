"""Two ranks, of which one leaves the other alone in collectives: `tests.shell.train_runner.hanging FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path
from time import perf_counter
from typing import Final

import msgspec
import torch
import torch.distributed as dist

from tests.support.ranks import join_ranks

LIMIT_S: Final = 2.0
KIND: Final = 7


def main(folder: Path) -> None:
    ranks = join_ranks(120)
    # As those of a mesh are made: with the longest default of torch.
    group = dist.new_group()
    ranks.limit_collectives(LIMIT_S)
    if not ranks.is_rank0:
        # The wait for a command goes on while the other rank runs into the limit, twice.
        kind, _ = ranks.receive_header()
        assert kind == KIND
        return
    waited_s = []
    for each in (None, group):
        started_s = perf_counter()
        try:
            dist.all_reduce(torch.zeros(1, device=ranks.device), group=each)
        except RuntimeError:
            waited_s.append(perf_counter() - started_s)
    (folder / "waited").write_bytes(msgspec.json.encode(waited_s))
    ranks.broadcast_header(KIND, [0, 0])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
