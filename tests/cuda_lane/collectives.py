"""What eight devices exchange, traced on ranks that do not exist as `strata plan` traces it: calls and bytes by group.

`python -m tests.cuda_lane.collectives` records `collectives.json` again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import msgspec

from strata.train.plan.memory_plan import CollectiveCost, MemoryRecipe, MeshShape, plan_device
from strata.train.runner.model.memory_trace import trace_cost
from tests.support.published_models import LLAMA_8B, QWEN3_30B_A3B

TABLE: Final = Path(__file__).with_name("collectives.json")
TOKENS: Final = 4096


class Exchange(NamedTuple):
    config: Mapping[str, Any]
    training: Literal["lora", "full"]
    mesh: MeshShape
    checkpointing: int = 0


CASES: Final[Mapping[str, Exchange]] = {
    "llama 8B full, 8 shards": Exchange(LLAMA_8B, "full", MeshShape(shard=8)),
    "llama 8B lora, 8 shards": Exchange(LLAMA_8B, "lora", MeshShape(shard=8)),
    "llama 8B lora, 2 shards of 4 tensor parts": Exchange(LLAMA_8B, "lora", MeshShape(shard=2, tensor=4)),
    "qwen3_moe 30B lora, 8 expert groups": Exchange(QWEN3_30B_A3B, "lora", MeshShape(shard=8, expert=8)),
    "qwen3_moe 30B lora, 8 expert groups, recomputed": Exchange(
        QWEN3_30B_A3B, "lora", MeshShape(shard=8, expert=8), checkpointing=1
    ),
    "qwen3_moe 30B lora, 8 shards": Exchange(QWEN3_30B_A3B, "lora", MeshShape(shard=8)),
}
Collectives = Mapping[str, Sequence[CollectiveCost]]


def trace(case: Exchange) -> Sequence[CollectiveCost]:
    """Of a row of `TOKENS` on each device, and of a step."""
    recipe = MemoryRecipe(training=case.training, row_tokens=TOKENS, checkpointing=case.checkpointing)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_bytes(msgspec.json.encode(case.config))
        cost = trace_cost(folder, recipe, case.mesh)
    return plan_device(cost, recipe, case.mesh).collectives


def read_table() -> dict[str, list[CollectiveCost]]:
    return msgspec.json.decode(TABLE.read_bytes(), type=dict[str, list[CollectiveCost]])


def grown(recorded: Sequence[CollectiveCost], traced: Sequence[CollectiveCost]) -> list[str]:
    """Says what is called more often than recorded, or sends more."""
    before = {(each.name, each.over, each.per): each for each in recorded}
    problems = []
    for each in traced:
        old = before.get((each.name, each.over, each.per))
        if old is None or each.calls > old.calls or each.bytes > old.bytes:
            problems.append(f"{each} where {old} is recorded")
    return problems


def main() -> None:
    table = {name: trace(case) for name, case in CASES.items()}
    TABLE.write_bytes(msgspec.json.format(msgspec.json.encode(table), indent=1) + b"\n")


if __name__ == "__main__":
    main()
