"""Router replay on two ranks of each kind of group, one after the other: whether they can, and what they compute."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from strata.train.parallel import ParallelSettings
from strata.train.runner.collectives import RankGroup
from strata.train.runner.model.base import BaseModel
from strata.train.runner.model.replay_check import verify_router_replay
from strata.train.runner.passes.logprobs import PackedRow
from strata.train.runner.settings import RunnerSettings

MESHES: Final = {
    "shards": ParallelSettings(),
    "expert": ParallelSettings(expert=2),
    "tensor": ParallelSettings(tensor=2, expert=2),
    "context": ParallelSettings(context=2),
}
TOKENS: Final = 23


def told_row(experts: int, layers: int) -> PackedRow:
    """A row that replays all but its last tokens."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(256, (TOKENS,), generator=generator)
    first = torch.randint(experts, (TOKENS, layers, 1), generator=generator)
    told = torch.cat([first, (first + 1) % experts], dim=-1).to(torch.int32)
    told[-5:] = -1
    indices = torch.arange(TOKENS - 1)
    return PackedRow(tokens, [TOKENS], (), indices, tokens[1:], routing=told)


def main(model: str, out: str) -> None:
    dist.init_process_group("gloo")
    ranks = RankGroup(torch.device("cpu"))
    found: dict[str, Any] = {}
    for name, parallel in MESHES.items():
        settings = RunnerSettings(model=model, sleep_folder=Path(out).parent / "asleep", parallel=parallel)
        base = BaseModel(settings, ranks)
        problem = verify_router_replay(base, ranks)
        found[name] = {"problem": problem}
        if not problem:
            with torch.no_grad():
                logprobs = base.logprobs(told_row(base.routers.experts, base.routers.layers))
            found[name]["logprobs"] = logprobs.tolist()
    if ranks.is_rank0:
        Path(out).write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
