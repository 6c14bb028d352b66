"""What the tests of this version found for each family of models (`families.json`, written by `make families`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Final, Literal, get_args

import msgspec

from strata.train.plan.model_files import read_config

FAMILIES: Final = "families.json"
"""A file in the package `strata.train`."""
Rows = Literal["packed", "one document", "own attention"]
"""What is in a row: documents packed one after the other; or one alone, because layers carry state from a document into
the next; or one alone that the family's own attention computes, because ours does not have its features."""
ROWS: Final[Sequence[Rows]] = get_args(Rows)
"""The fastest first."""
Support = Literal["yes", "experimental", "no", "unproven"]


class FamilyOutcome(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the tests of this version found for a family."""

    result: Literal["equal", "refused", "not built"]
    rows: Rows = "packed"
    lora: str = ""
    sampler: str = ""
    why: str = ""

    @property
    def support(self) -> Support:
        if self.result == "equal":
            return "yes" if self.rows == "packed" else "experimental"
        return "no" if self.result == "refused" else "unproven"

    @property
    def row_sentence(self) -> str:
        """Says what a server does otherwise for a family whose documents are not packed; empty for others."""
        if self.rows == "packed":
            return ""
        why = {
            "one document": "its layers carry state from a document into the next",
            "own attention": "its own attention computes them, in memory that grows with the square of a document",
        }[self.rows]
        return f"one document per row, not packed and so slower: {why}; the ranks do not sample"


@cache
def known_families() -> Mapping[str, FamilyOutcome]:
    content = (files("strata.train") / FAMILIES).read_bytes()
    return msgspec.json.decode(content, type=dict[str, FamilyOutcome])


def family_of(folder: Path) -> str:
    return str(read_config(folder).get("model_type", ""))


def support_of(family: str) -> FamilyOutcome:
    unknown = FamilyOutcome(
        result="refused", why=f"{family or 'a model without a family'} is no causal language model of transformers"
    )
    return known_families().get(family, unknown)
