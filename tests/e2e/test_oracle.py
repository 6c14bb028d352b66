"""Families of models on one rank, on two, and on each axis of a mesh, beside unmodified transformers and PEFT: log
probabilities and losses of three steps of AdamW, and the trained adapters. Each part starts its ranks once.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import pytest

from strata.train.combinations import CONTEXT_FAMILIES, EXPERT_FAMILIES, PIPELINE_FAMILIES, TENSOR_FAMILIES
from strata.train.parallel import ParallelSettings
from tests.e2e.oracle_ranks import Differences, Stage
from tests.support.torchrun import run_on_ranks

NATS: Final = 3e-5
"""Of float32, for each log probability. Where unmodified transformers in float32 is further than half of that from
itself in float64, as for some experts, `ROUNDINGS` times that."""
LOSS: Final = 1e-6
WEIGHTS: Final = 1e-3
"""Of the largest way that a weight has gone in three steps: AdamW divides gradients by their own size."""
ROUNDINGS: Final = 2.0
"""Both the ranks and unmodified transformers round, each in another order: their results are on both sides of the exact
one, each about as far from it as transformers alone is."""
WITHIN_S: Final = 800

DENSE: Final = ("gemma2", "gemma3_text", "llama", "mistral", "qwen3")
MORE_DENSE: Final = ("glm4", "granite", "olmo2", "olmo3", "phi3")
EXPERTS: Final = ("deepseek_v3", "gpt_oss", "mixtral", "qwen3_moe")
ONE_DOCUMENT: Final = ("bamba", "jamba", "lfm2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5_text")
"""One document per row: linear attention, state-space layers and short convolutions."""
WHOLE: Final = ("gemma2", "llama", "qwen3_moe")


def stages(families: Sequence[str] | frozenset[str], **mesh: int) -> list[Stage]:
    return [Stage(family, ParallelSettings(**mesh)) for family in sorted(families)]


def whole(**mesh: int) -> list[Stage]:
    return [Stage(family, ParallelSettings(**mesh), training="full") for family in WHOLE]


PARTS: Final[dict[str, tuple[int, list[Stage]]]] = {
    "one rank, dense": (1, stages(DENSE)),
    "one rank, further dense": (1, stages(MORE_DENSE)),
    "one rank, experts": (1, stages(EXPERTS)),
    "one rank, one document per row": (1, stages(ONE_DOCUMENT)),
    "one rank, full": (1, whole()),
    "two ranks, dense": (2, stages(DENSE)),
    "two ranks, further dense": (2, stages(MORE_DENSE)),
    "two ranks, experts": (2, stages(EXPERTS)),
    "two ranks, one document per row": (2, stages(("bamba", "lfm2", "qwen3_5_text"))),
    "two ranks, full": (2, whole()),
    "tensor": (2, stages(TENSOR_FAMILIES - EXPERT_FAMILIES, tensor=2)),
    "tensor and expert": (2, stages(EXPERT_FAMILIES, tensor=2, expert=2)),
    "expert": (2, stages(EXPERT_FAMILIES, expert=2)),
    "pipeline": (2, stages(PIPELINE_FAMILIES, pipeline=2)),
    "context": (2, stages(CONTEXT_FAMILIES, context=2)),
    "context and tensor": (4, stages(TENSOR_FAMILIES - EXPERT_FAMILIES, context=2, tensor=2)),
}
HALF: Final = [Stage(family, dtype="bfloat16") for family in ("gemma2", "llama", "olmo2", "qwen3")]


def run_part(folder: Path, ranks: int, part: Sequence[Stage]) -> list[Differences]:
    plan, results = folder / "plan.json", folder / "results.json"
    plan.write_bytes(msgspec.json.encode(part))
    run_on_ranks("tests.e2e.oracle_ranks", ranks, str(plan), str(results), within_s=WITHIN_S)
    found = msgspec.json.decode(results.read_bytes(), type=list[Differences])
    for each in found:
        # Shown with `-rP`: how far below the limits they are.
        print(each)
    return found


@pytest.mark.timeout(WITHIN_S + 20)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.proves("Log probabilities, losses and trained adapters are those of unmodified transformers and PEFT")
def test_numbers_are_those_of_transformers_and_peft(tmp_path: Path, part: str) -> None:
    found = run_part(tmp_path, *PARTS[part])
    assert len(found) == len(PARTS[part][1])
    assert [each for each in found if each.loss > LOSS or each.weights > WEIGHTS] == []
    assert [each for each in found if each.logprobs > max(NATS, ROUNDINGS * each.rounding)] == []


@pytest.mark.timeout(WITHIN_S + 20)
def test_numbers_in_bfloat16_are_within_its_rounding(tmp_path: Path) -> None:
    found = run_part(tmp_path, 1, HALF)
    assert [each for each in found if not 0 < each.logprobs < ROUNDINGS * each.rounding] == []


def test_the_axes_have_twelve_families_on_one_rank_and_on_two() -> None:
    for ranks in (1, 2):
        families = {
            stage.family
            for size, part in PARTS.values()
            for stage in part
            if size == ranks and stage.parallel == ParallelSettings()
        }
        assert len(families) >= 12, ranks
