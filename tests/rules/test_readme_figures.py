"""The figures of the README, and the families that docs/training-mesh.md names, are those of the lists behind them."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Final

from strata.train.combinations import EXPERT_FAMILIES, PIPELINE_FAMILIES, TENSOR_FAMILIES

ROOT: Final = Path(__file__).parents[2]


def find(pattern: str, path: str) -> tuple[str, ...]:
    found = re.search(pattern, " ".join((ROOT / path).read_text(encoding="utf-8").split()))
    assert found is not None, f"{path} does not say: {pattern}"
    return found.groups()


def test_the_families_are_counted_as_in_their_table() -> None:
    said = find(r"Of (\d+) \[model families\]\S+ (\d+) match the unmodified .*? and (\d+) are refused", "README.md")
    assert said == find(r"(\d+) families: (\d+) equal, (\d+) refused", "docs/families.md")


def count_deep_families() -> int:
    """How many families are compared in depth, by the source: an import would load torch."""
    tree = ast.parse((ROOT / "tests/shell/train_runner/test_families.py").read_text(encoding="utf-8"))
    (deep,) = [
        node.value
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "DEEP"
    ]
    assert isinstance(deep, ast.Dict)
    return len(deep.keys)


def test_the_families_that_are_compared_in_depth_are_counted() -> None:
    counts = (
        *find(r"gradients and sampling were compared with PEFT and `generate` for (\d+), of", "README.md"),
        *find(r"gradients and the sampler were compared with PEFT and `generate` for (\d+) of", "docs/families.md"),
    )
    assert counts == (str(count_deep_families()),) * 2


def test_the_families_of_each_kind_of_group_are_named() -> None:
    for dimension, families in {
        "tensor": TENSOR_FAMILIES,
        "expert": EXPERT_FAMILIES,
        "pipeline": PIPELINE_FAMILIES,
    }.items():
        (row,) = find(rf"\| `{dimension}` \| [^|]+ \| ([^|]+) \|", "docs/training-mesh.md")
        assert set(re.findall(r"`(\w+)`", row)) == families
