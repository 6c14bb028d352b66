"""The figures of the README are those of the pages and lists that it speaks of."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from strata.train.settings import EXPERT_FAMILIES, PIPELINE_FAMILIES, TENSOR_FAMILIES

ROOT: Final = Path(__file__).parents[2]
WORDS: Final = {
    word: number
    for number, word in enumerate(["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"], 1)
}


def find(pattern: str, path: str) -> tuple[str, ...]:
    found = re.search(pattern, " ".join((ROOT / path).read_text(encoding="utf-8").split()))
    assert found is not None, f"{path} does not say: {pattern}"
    return found.groups()


def test_the_families_are_counted_as_in_their_table() -> None:
    said = find(r"Of (\d+) \[model families\]\S+ (\d+) match the unmodified .*? and (\d+) are refused", "README.md")
    assert said == find(r"(\d+) families: (\d+) equal, (\d+) refused", "docs/families.md")


def test_the_families_of_each_kind_of_group_are_counted() -> None:
    pattern = r"Layers of (\w+) families .*? tensor groups, experts of (\w+) over .*? layers of (\w+) over pipeline"
    counts = tuple(map(len, (TENSOR_FAMILIES, EXPERT_FAMILIES, PIPELINE_FAMILIES)))
    assert tuple(WORDS[word] for word in find(pattern, "README.md")) == counts
