"""The commands, make targets and links in the documents exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click
import pytest

from strata.cli.main import strata
from tests.rules.documents import Line, code_lines, dead_links, make_targets, unknown_command, unknown_targets

ROOT: Final = Path(__file__).parents[2]


def documents() -> list[Path]:
    return [
        *sorted(ROOT.glob("*.md")),
        *sorted((ROOT / "docs").rglob("*.md")),
        *sorted((ROOT / "skills").rglob("*.md")),
    ]


def lines_of(program: str) -> Iterator[Line]:
    for file in documents():
        for line in code_lines(str(file.relative_to(ROOT)), file.read_text(encoding="utf-8")):
            if line.text == program or line.text.startswith(f"{program} "):
                yield line


def test_every_strata_command_in_the_documents_exists() -> None:
    problems = [(line, unknown_command(strata, line.text)) for line in lines_of("strata")]
    assert [f"{line.file}:{line.number}: {line.text}: {why}" for line, why in problems if why] == []


def test_every_make_target_in_the_documents_exists() -> None:
    makefile = ROOT / "Makefile"
    targets = make_targets(makefile.read_text(encoding="utf-8")) if makefile.exists() else set()
    problems = [(line, unknown_targets(line.text, targets)) for line in lines_of("make")]
    assert [f"{line.file}:{line.number}: {' '.join(unknown)}" for line, unknown in problems if unknown] == []


def test_every_relative_link_points_at_a_file() -> None:
    problems = {str(file): dead_links(file, file.read_text(encoding="utf-8")) for file in documents()}
    assert {file: links for file, links in problems.items() if links} == {}


@click.group()
def sample() -> None: ...


@sample.group()
def host() -> None: ...


@host.command()
@click.argument("name")
@click.option("-o", "--output", type=click.Choice(["table", "json"]))
@click.option("--wait/--no-wait")
def drain(name: str, output: str, wait: bool) -> None: ...


@pytest.mark.parametrize(
    "text",
    [
        "strata",
        "strata --help",
        "strata host drain --help",
        "strata host drain HOST",
        "strata host drain HOST -o json --no-wait  # a comment",
        "strata host drain HOST -ojson | jq .",
        "strata host drain HOST && echo done",
        "strata host drain HOST > out.json",
    ],
)
def test_a_command_that_exists_passes(text: str) -> None:
    assert unknown_command(sample, text) is None


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("strata hosts", "No such command"),
        ("strata host drian HOST", "No such command"),
        ("strata host drain HOST --output-format json", "No such option"),
        ("strata host drain", "missing NAME"),
        ("strata host drain A B", "unexpected B"),
        ("strata --verbose host drain A", "No such option"),
        ("strata host drain A -o", "requires an argument"),
        ("strata host drain A -o xml", "is not one of"),
    ],
)
def test_a_command_that_does_not_exist_is_found(text: str, part: str) -> None:
    assert re.search(part, unknown_command(sample, text) or "")


def test_only_code_blocks_are_read_and_long_lines_are_joined() -> None:
    text = "strata prose\n```sh\n$ strata host \\\n    drain A\nmake check\n```\nstrata prose\n~~~\nstrata x\n~~~\n"
    assert [line.text for line in code_lines("a.md", text)] == ["strata host drain A", "make check", "strata x"]


def test_of_a_session_only_what_is_typed_is_read() -> None:
    text = "```console\n$ strata up \\\n    --name x\nstrata up: ready\n$ make check\nmake: done\n```\n"
    assert [line.text for line in code_lines("a.md", text)] == ["strata up --name x", "make check"]


def test_a_target_that_the_makefile_lacks_is_found() -> None:
    targets = make_targets(".PHONY: check\nX := 1\ncheck lint: deps\n\truff\nsoak:\n\tpytest\n")
    assert targets == {"check", "lint", "soak"}
    assert unknown_targets("make check soak SEEDS=3 -j2", targets) == []
    assert unknown_targets("make chekc  # typo", targets) == ["chekc"]


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "there.md").touch()
    text = "[a](there.md#part) [b](gone.md) ![c](x.png 't') [d](https://x.example) [e](#here) `[f](g.md)`\n[r]: no.md\n"
    assert dead_links(tmp_path / "README.md", text) == ["gone.md", "x.png", "no.md"]


def test_every_module_that_the_architecture_names_exists() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([a-z]+(?:/[a-z0-9_]+)+\.py)`", text))
    assert len(named) > 50
    assert sorted(path for path in named if not (ROOT / "src" / "strata" / path).is_file()) == []


def test_every_test_that_a_document_names_exists() -> None:
    missing = []
    for document in documents():
        if document.name == "CHANGELOG.md":
            continue
        for line in document.read_text(encoding="utf-8").splitlines():
            files = [ROOT / name for name in re.findall(r"`(tests/[\w/]+\.py)`", line)]
            missing += [f"{document.name}: {file.relative_to(ROOT)}" for file in files if not file.is_file()]
            text = "".join(file.read_text(encoding="utf-8") for file in files if file.is_file())
            if files:
                missing += [
                    f"{document.name}: {name} in {files[0].relative_to(ROOT)}"
                    for name in re.findall(r"`(test_\w+)`", line)
                    if f"def {name}(" not in text
                ]
    assert missing == []
