"""docs/comparison.md: what it says of Strata has a level and a test; what it says of others cites their pages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
TEXT: Final = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")
SHOWN: Final = re.compile(r"`((?:tests|scripts)/[^`]+)`")
CITED: Final = re.compile(r"\((https?://[^)]+)\)")
LEVEL: Final = re.compile(r"\((?:core|supported|experimental)\b")
OWN: Final = {
    "Tinker": "https://tinker-docs.thinkingmachines.ai/",
    "xorl": "https://github.com/togethercomputer/xorl",
    "SkyRL": "https://github.com/NovaSky-AI/SkyRL",
    "TuFT": "https://github.com/agentscope-ai/TuFT",
    "miles": "https://github.com/radixark/miles",
    "torchft": "https://github.com/meta-pytorch/torchft",
    "NVRx": "https://github.com/NVIDIA/nvidia-resiliency-ext",
    "DLRover": "https://github.com/intelligent-machine-learning/dlrover",
    "Ray Train": "https://docs.ray.io/",
    "Slurm": "https://slurm.schedmd.com/",
    "Kueue": "https://github.com/kubernetes-sigs/kueue",
    "SkyPilot": "https://docs.skypilot.co/",
    "dstack": "https://dstack.ai/docs/",
}
MORE: Final = (
    "https://kueue.sigs.k8s.io/docs/",
    "https://github.com/dstackai/dstack/issues/",
    "https://github.com/pytorch/pytorch/issues/",
    "https://github.com/ray-project/ray/issues/",
    "https://github.com/skypilot-org/skypilot/issues/",
    "https://github.com/thinking-machines-lab/",
)
THREAD: Final = re.compile(r"https://github\.com/[\w-]+/[\w-]+/issues/\d+")
MOST_WORDS: Final = 100
"""Of one half of a section: what is better there, or here."""


def sections() -> dict[str, str]:
    parts = re.split(r"(?m)^#{2,3} (.+)$", TEXT)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def halves(name: str) -> tuple[str, str]:
    _, there, here = re.split(r"\*\*Better (?:there|here)\.\*\*", sections()[name])
    return there, here


def rows(title: str) -> list[list[str]]:
    lines = [line for line in sections()[title].splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def test_every_file_that_is_named_exists() -> None:
    named = SHOWN.findall(TEXT)
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("name", OWN)
def test_both_halves_of_a_section_are_short_and_show_what_they_say(name: str) -> None:
    there, here = halves(name)
    assert any(url.startswith(OWN[name]) for url in CITED.findall(there))
    assert SHOWN.search(here)
    assert LEVEL.search(here)
    assert max(len(half.split()) for half in (there, here)) <= MOST_WORDS


def test_every_citation_is_a_page_of_the_projects_themselves() -> None:
    assert [url for url in CITED.findall(TEXT) if not url.startswith((*OWN.values(), *MORE))] == []


def test_every_question_is_a_thread_with_an_answer_of_a_level() -> None:
    questions = rows("Questions of their users")
    assert len(questions) >= 10
    assert [row for row in questions if not all(map(THREAD.fullmatch, CITED.findall(row[0])))] == []
    assert [row for row in questions if not LEVEL.search(row[2])] == []


def test_every_row_of_commands_names_one_that_makes_or_starts_something() -> None:
    commands = [row[0].strip("`") for row in rows("See it here")]
    assert len(commands) >= 5
    assert [command for command in commands if not command.startswith(("make ", "strata ", "python -m "))] == []
