"""The code in the documents does what they say: files are written, commands run, outputs compared, types checked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.e2e.blocks import Step, blocks, matches, play, problems, steps

ROOT: Final = Path(__file__).parents[2]
PROGRAMS: Final = Path(sys.executable).parent
PLAYED: Final = ("docs/journal.md", "docs/settings.md", "docs/simulation.md", "docs/state-machine.md")
PLAYED_ELSEWHERE: Final = {"README.md", "docs/quickstart.md", "docs/starts.md"}
"""They need environments of their own: test_starts and test_quickstart."""


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def stand_in_a_checkout(folder: Path) -> None:
    """Programs of docs/simulation.md import the repository's tests."""
    (folder / "tests").symlink_to(ROOT / "tests")


def test_the_documents_with_sessions_are_the_ones_played() -> None:
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    names = {str(file.relative_to(ROOT)) for file in found}
    shown = {name for name in names if any(block.language == "console" for block in blocks(text_of(name)))}
    assert shown == {*PLAYED} | PLAYED_ELSEWHERE


@pytest.mark.parametrize("name", PLAYED)
def test_a_document_played_from_top_to_bottom_prints_what_it_shows(name: str, tmp_path: Path) -> None:
    stand_in_a_checkout(tmp_path)
    ran = play(text_of(name), PROGRAMS, tmp_path)
    assert ran
    assert "\n\n".join(problems(ran)) == ""


def test_every_program_in_the_documents_is_typed(tmp_path: Path) -> None:
    stand_in_a_checkout(tmp_path)
    files = []
    for name in ("README.md", "docs/starts.md", *PLAYED):
        for block in blocks(text_of(name)):
            if block.language == "python":
                assert block.title is not None, f"{name}: a Python block needs a title, so that it is a file"
                file = tmp_path / block.title
                assert not file.exists(), f"{block.title} is in the documents twice"
                file.write_text(block.body, encoding="utf-8")
                files.append(block.title)
    assert files
    mypy = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", "cache", *files],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert mypy.returncode == 0, mypy.stdout


def test_blocks_know_their_language_and_title() -> None:
    text = 'a\n```python title="x.py"\nprint(1)\n```\n```sh\nls\n```\n~~~\n```\nplain\n```\n'
    assert [(block.language, block.title, block.body) for block in blocks(text)] == [
        ("python", "x.py", "print(1)\n"),
        ("sh", None, "ls\n"),
        ("", None, "plain\n"),
    ]


def test_a_session_has_commands_and_what_they_show() -> None:
    assert steps("$ one\n$ two x\nout\n\nmore\n$ three\n") == [
        Step("one", None),
        Step("two x", "out\n\nmore"),
        Step("three", None),
    ]
    with pytest.raises(ValueError, match="begins with a command"):
        steps("out\n$ one\n")


@pytest.mark.parametrize("shown", ["a b c\nd", "a … c\nd", "…", "a b …", "a b c  \nd"])
def test_an_output_matches_what_is_shown_up_to_the_wildcard(shown: str) -> None:
    assert matches(shown, "a b c\nd  \n")


@pytest.mark.parametrize("shown", ["a b c", "b c\nd", "a … x\nd", "A b c\nd", "a.b c\nd"])
def test_an_output_that_differs_does_not_match(shown: str) -> None:
    assert not matches(shown, "a b c\nd\n")


def test_a_session_keeps_its_status_and_names_every_problem(tmp_path: Path) -> None:
    text = (
        '```text title="a.txt"\nhello\n```\n'
        "```console\n$ cat a.txt\nhello\n$ x=1\n$ echo $x\n2\n$ false\n$ echo $?\n1\n$ exit 3 | false\n```\n"
    )
    found = problems(play(text, PROGRAMS, tmp_path))
    assert [problem.splitlines()[0] for problem in found] == ["$ echo $x", "$ exit 3 | false"]
