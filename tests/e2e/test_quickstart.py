"""The quickstart, as a person follows it: a fresh environment, a checkout installed in it, every command in turn.

What is printed must be what the page shows, but for ids, times, sizes and measured figures: other machines have others.
Versions are the newest of the index, as a person gets them.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from tests.e2e.blocks import Ran, Step, blocks, steps
from tests.e2e.machines import ROOT, checkout, newcomer_environment
from tests.e2e.terminal import Terminal

pytestmark = pytest.mark.timeout(400)

PAGE: Final = ROOT / "docs" / "quickstart.md"
LONGEST_S: Final = 180.0
"""What the page promises, from its first command to its last."""
STAYS: Final = "strata up"
READY: Final = "ready"
HOME: Final = "~/.local/share"
"""As the page spells the folder that data lies in."""


@dataclass(frozen=True)
class Played:
    ran: list[Ran]
    stopped: tuple[str, int]
    took_s: float
    data: Path


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    folder = tmp_path_factory.mktemp("quickstart")
    checkout(folder / "strata")
    data = folder / "data"
    environ = newcomer_environment(folder)
    todo = [steps(block.body) for block in blocks(PAGE.read_text(encoding="utf-8")) if block.language == "console"]
    with Terminal(folder, environ) as first, Terminal(folder, environ) as second:
        began_s = time.monotonic()
        ran = play(todo, first, second)
        took_s = time.monotonic() - began_s
        return Played(ran, first.interrupt(), took_s, data)


def play(todo: list[list[Step]], first: Terminal, second: Terminal) -> list[Ran]:
    """In the first terminal until something stays there, then in the second."""
    ran: list[Ran] = []
    terminal = first
    for step in (step for block in todo for step in block):
        if step.command.startswith(STAYS):
            ran.append(Ran(step, terminal.start(step.command, READY), 0))
            terminal = second
        else:
            ran.append(Ran(step, *terminal.run(step.command)))
    assert terminal is second, "nothing was started"
    return ran


_SAME: Final = (
    # What a person who is root is warned of.
    (re.compile(r"(?m)^.*jobs_run_as_root.*\n"), ""),
    (re.compile(r"127\.0\.0\.1:\d+"), "127.0.0.1:PORT"),
    (re.compile(r"\b(?:(?:job|artifact)1_[0-9a-f]{64}|[0-9a-f]{10})\b"), "ID"),
    (re.compile(r"\b\d+(?:\.\d+)?[smh]\b"), "TIME"),
    (re.compile(r"\b\d+(?:\.\d)? (?:[KMG]i)?B\b"), "SIZE"),
    (re.compile(r"\b\d+ cores?\b"), "CORES"),
    (re.compile(r"\b\d+\.\d+\b"), "FIGURE"),
    # Where a long cell is cut depends on how long its figures are.
    (re.compile(r"(?:, )?\w*…(?=\n|\Z)"), "…"),
    # Columns are two spaces apart or more, words are one.
    (re.compile(r"(?m) {2,}"), "  "),
    (re.compile(r"(?m)^ +| +$"), ""),
)


def normal(text: str, data: Path | None = None) -> list[str]:
    if data is not None:
        text = text.replace(str(data), HOME)
    for pattern, word in _SAME:
        text = pattern.sub(word, text)
    return text.strip("\n").splitlines()


def test_every_command_of_the_quickstart_prints_what_the_page_shows(played: Played) -> None:
    problems = []
    for each, following in zip(played.ran, [*played.ran[1:], None], strict=True):
        asked = following is not None and following.step.command == "echo $?"
        if each.status != 0 and not asked:
            problems.append(f"$ {each.step.command}\nended with status {each.status}:\n{each.output}")
        if each.step.shown is not None and normal(each.step.shown) != normal(each.output, played.data):
            problems.append(f"$ {each.step.command}\nshown:\n{each.step.shown}\nprinted:\n{each.output}")
    assert "\n\n".join(problems) == ""


def test_the_quickstart_takes_less_than_three_minutes(played: Played) -> None:
    print(f"{played.took_s:.0f} s from the first command to the last")
    assert played.took_s < LONGEST_S


def test_ctrl_c_ends_it_in_good_order(played: Played) -> None:
    rest, status = played.stopped
    assert (rest, status) == ("strata up: stopped\n", 0)


SHOWN: Final = (
    "ID          JOB         STATUS     AGE  AUC\nc861445be0  gbt-oracle  completed   4m  0.9883\n1 job, 3 files\n"
)


@pytest.mark.parametrize(
    "printed",
    [
        SHOWN,
        SHOWN.replace("c861445be0", "0123456789").replace("4m", "12s").replace("0.9883", "0.98"),
        SHOWN.replace("   4m", "  14m"),
    ],
)
def test_another_id_another_time_and_another_figure_are_the_same(printed: str) -> None:
    assert normal(printed) == normal(SHOWN)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("JOB ", "NAME"),
        ("STATUS     ", ""),
        ("completed", "failed"),
        ("gbt-oracle  completed", "gbt-oracle completed"),
        ("0.9883", "-"),
        ("c861445be0", "c861445be"),
        ("3 files", "4 files"),
        ("\n1 job", "\n\n1 job"),
    ],
)
def test_another_column_message_or_count_is_not(old: str, new: str) -> None:
    assert old in SHOWN
    assert normal(SHOWN.replace(old, new)) != normal(SHOWN)
