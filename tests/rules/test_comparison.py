"""What docs/comparison.md says of Strata names a file that shows it; what it says of others names a page of theirs, or
the command that measures it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
TEXT: Final = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")
SHOWN: Final = re.compile(r"`((?:tests|scripts)/[^`]+)`")
OWN: Final = {
    "SkyPilot": "https://docs.skypilot.co/",
    "dstack": "https://dstack.ai/docs/",
    "ClearML Agent": "https://clear.ml/docs/",
    "Slurm": "https://slurm.schedmd.com/",
    "torchft": "https://github.com/meta-pytorch/torchft",
    "NVRx": "https://nvidia.github.io/nvidia-resiliency-ext/",
    "xorl": "https://github.com/togethercomputer/xorl",
    "SkyRL": "https://github.com/NovaSky-AI/SkyRL",
    "miles": "https://github.com/radixark/miles",
}


MEASURED: Final = "python -m bench "
"""A section with this command says what it measures."""


def rows() -> list[tuple[str, str]]:
    """Of all tables that were not measured: who, and what is said."""
    said = "".join(section for section in TEXT.split("\n## ") if MEASURED not in section)
    return re.findall(r"(?m)^\| (\w[\w ]*?) \| (.+) \|$", said)


def test_every_file_that_is_named_exists() -> None:
    named = SHOWN.findall(TEXT)
    assert named
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_every_row_is_supported() -> None:
    assert {who for who, _ in rows()} == {"Strata", *OWN}
    for who, said in rows():
        support = SHOWN.search(said) if who == "Strata" else OWN[who] in said
        assert support, (who, said)


def test_every_citation_is_a_page_of_the_projects_themselves() -> None:
    cited = re.findall(r"\((https?://[^)]+)\)", TEXT)
    assert [url for url in cited if not url.startswith(tuple(OWN.values()))] == []
