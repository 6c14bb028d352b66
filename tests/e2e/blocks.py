"""The fenced blocks of a document as things to do: files to write, commands to run, outputs to expect.

A block with a `title` in its info string is a file of that name. A `console` block is one shell session: lines that
begin with `$ ` are commands, the lines below a command are its output, where `…` stands for anything. Other blocks are
prose.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_FENCE: Final = re.compile(r"(?ms)^(?P<fence>```+)(?P<info>[^`\n]*)\n(?P<body>.*?)^(?P=fence)[ \t]*$")
_TITLE: Final = re.compile(r'\btitle="([^"/]+)"')
_PROMPT: Final = "$ "
_ANYTHING: Final = "…"
_END: Final = "--- end of output, status "


@dataclass(frozen=True)
class Block:
    language: str
    title: str | None
    body: str


@dataclass(frozen=True)
class Step:
    """A command and the output the document shows for it; None where it shows none."""

    command: str
    shown: str | None


@dataclass(frozen=True)
class Ran:
    step: Step
    output: str
    status: int


def blocks(text: str) -> Iterator[Block]:
    return (block for _, block in passages(text))


def passages(text: str) -> Iterator[tuple[str, Block]]:
    """Each block, after the prose between the block before and itself."""
    end = 0
    for found in _FENCE.finditer(text):
        language, _, rest = found["info"].strip().partition(" ")
        title = _TITLE.search(rest)
        yield text[end : found.start()], Block(language, title[1] if title else None, found["body"])
        end = found.end()


def steps(body: str) -> list[Step]:
    found: list[Step] = []
    for part in re.split(r"(?m)^(?=\$ )", body):
        if part.startswith(_PROMPT):
            command, _, shown = part.removeprefix(_PROMPT).partition("\n")
            found.append(Step(command, shown.rstrip("\n") or None))
        elif part.strip():
            raise ValueError(f"a console block begins with a command, not with {part!r}")
    return found


def matches(shown: str, output: str) -> bool:
    """Whether the output is what the document shows. Spaces at the end of a line do not count."""
    pattern = ".*?".join(re.escape(part) for part in _stripped(shown).split(_ANYTHING))
    return re.fullmatch(pattern, _stripped(output), re.DOTALL) is not None


def play(text: str, programs: Path, folder: Path) -> list[Ran]:
    """Do what the document says, in order, in a folder, with `programs` at the front of PATH."""
    ran: list[Ran] = []
    for block in blocks(text):
        if block.title is not None:
            (folder / block.title).write_text(block.body, encoding="utf-8")
        elif block.language == "console":
            ran += _session(steps(block.body), programs, folder)
    return ran


def problems(ran: list[Ran]) -> list[str]:
    """What went otherwise than shown. A command may fail only if the document looks at its status next."""
    found = []
    for each, following in zip(ran, [*ran[1:], None], strict=True):
        if each.step.shown is not None and not matches(each.step.shown, each.output):
            found.append(f"$ {each.step.command}\nshown:\n{each.step.shown}\nprinted:\n{each.output}")
        if each.status != 0 and (following is None or following.step.command != "echo $?"):
            found.append(f"$ {each.step.command}\nended with status {each.status}:\n{each.output}")
    return found


def _session(todo: list[Step], programs: Path, folder: Path) -> list[Ran]:
    script = [f"PATH={shlex.quote(str(programs))}:$PATH"]
    for step in todo:
        script += [step.command, "status=$?", f"echo '{_END}'$status", "(exit $status)"]
    shell = subprocess.run(
        ["bash"],
        input="\n".join(script) + "\n",
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    parts = re.split(rf"{re.escape(_END)}(\d+)\n", shell.stdout)
    assert len(parts) == 2 * len(todo) + 1, f"the shell stopped early:\n{shell.stdout}"
    return [Ran(step, parts[2 * i], int(parts[2 * i + 1])) for i, step in enumerate(todo)]


def _stripped(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines())
