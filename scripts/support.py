"""Writes the levels and combinations of docs/support.md from their tables in the code."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from strata.base.support import CAPABILITIES
from strata.train.combinations import FAMILIES, NEEDS, PAIRS

PAGE: Final = Path(__file__).parents[1] / "docs" / "support.md"
BEGIN: Final = "<!-- support: begin -->\n"
END: Final = "<!-- support: end -->\n"


def render(page: str) -> str:
    """Returns the page with its generated part as the tables are now."""
    head, _, rest = page.partition(BEGIN)
    return head + BEGIN + "\n".join([*_levels(), *_combinations(), ""]) + END + rest.partition(END)[2]


def _levels() -> Iterator[str]:
    for area, rows in CAPABILITIES.items():
        yield from ("", f"### {area}", "", "| capability | CPU | CUDA | tests | tier | where they ran |")
        yield "|---|---|---|---|---|---|"
        for row in rows:
            tests = f"`{row.tests}`" if row.tests else ""
            yield f"| {row.name} | {row.cpu or ''} | {row.cuda or ''} | {tests} | {row.tier} | {row.ran} |"


def _combinations() -> Iterator[str]:
    yield from ("", "### Combinations", "", "| feature | with | level | why |", "|---|---|---|---|")
    for pair in PAIRS:
        yield f"| `{pair.first}` | {_named(pair.second)} | refused | {pair.why} |"
    for row in FAMILIES:
        families = ", ".join(f"`{family}`" for family in sorted(row.families))
        why = row.why.format(family="others", families="these")
        yield f"| `{row.feature}` | families other than {families} | {row.level} | {why} |"
    for need in NEEDS:
        families = ", ".join(f"`{family}`" for family in sorted(need.families))
        why = need.why.format(family="these families", value="its size")
        yield f"| `{need.feature}` | {families}, without `{need.needs}` | refused | {why} |"


def _named(feature: str) -> str:
    return f"`{feature}`" if "." in feature else feature


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
