"""The pages of docs/how-to as tests follow them: what each block is for, and a folder in which a page is lived through.

A block with a title is a file. `sh` blocks are commands of one terminal; a block that is one of `SERVERS` has a
terminal of its own and ends at the next "Ctrl-C" of the prose. A `text` block below commands is what they print, where
`…` stands for anything and other lines may come between. `python` blocks without a title are the cells of one program,
which runs where the last of them is. Every other block has a reason above it, in a line that begins with "Not run by
the tests:"; or the page says which test runs its blocks.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from tests.e2e.blocks import Block, passages
from tests.e2e.served import TRAINING_SERVER, served
from tests.e2e.terminal import Terminal

ROOT: Final = Path(__file__).parents[2]
FOLDER: Final = ROOT / "docs" / "how-to"
REASON: Final = re.compile(r"(?m)^Not run by the tests: \S.*$")
RUN_BY: Final = re.compile(r"(?m)^The blocks of this page are run by `(tests/\S+\.py)`")
SERVERS: Final[Mapping[str, str]] = {
    r"strata serve (\S+\.toml|model)": TRAINING_SERVER,
    r"strata up": "strata up: ready",
    r"strata hub": "listening on ",
    r"strata agent": "host_registered",
}
"""Commands that keep their terminal, before their options, and what each prints when it serves."""
STOP: Final = "Ctrl-C"
CELLS: Final = "cells.py"
ADDRESS: Final = "127.0.0.1:5555"
HUB_ADDRESS: Final = "127.0.0.1:8443"
_BIN: Final = Path(sys.executable).parent


class Use(Enum):
    FILE = "file"
    COMMANDS = "commands"
    OUTPUT = "output"
    CELL = "cell"
    REASON = "reason"
    """Not run, and the page has the reason."""
    NONE = "none"


@dataclass(frozen=True)
class Part:
    prose: str
    block: Block
    use: Use


def pages() -> list[Path]:
    return sorted(FOLDER.glob("*.md"))


def parts(text: str) -> list[Part]:
    found: list[Part] = []
    for prose, block in passages(text):
        found.append(Part(prose, block, _use(prose, block, found[-1].use if found else Use.NONE)))
    return found


def unexplained(text: str) -> list[str]:
    """The blocks that no test runs and the page gives no reason for; files that no block names; fences in a list."""
    found = parts(text)
    problems = [
        f"{part.block.language}: {part.block.body.splitlines()[0]}"
        for part in found
        if part.use is Use.NONE and not RUN_BY.search(text)
    ]
    problems += [
        f"{part.block.title} is written and never used"
        for part in found
        if part.use is Use.FILE
        and not any(str(part.block.title) in other.block.body for other in found if other is not part)
    ]
    return problems + [f"indented: {fence}" for fence in re.findall(r"(?m)^[ \t]+```.*$", text)]


def runs(text: str) -> bool:
    """Whether `Reader` follows the page; others are run elsewhere, or have nothing but blocks with reasons."""
    return not RUN_BY.search(text) and any(part.use in (Use.COMMANDS, Use.CELL) for part in parts(text))


class Reader:
    """Follows a page from top to bottom, and says what went otherwise than shown."""

    def __init__(self, folder: Path, environment: Mapping[str, str], replaced: Mapping[str, str]) -> None:
        self.problems: list[str] = []
        self._folder = folder
        self._environment = {**environment, "PATH": f"{_BIN}:{environment['PATH']}"}
        self._replaced = replaced

    def follow(self, text: str) -> None:
        found = parts(text)
        cells = [place for place, part in enumerate(found) if part.use is Use.CELL]
        printed = ""
        with ExitStack() as server, Terminal(self._folder, self._environment) as terminal:
            for place, part in enumerate(found):
                if STOP in part.prose:
                    server.close()
                body = self._here(part.block.body)
                if part.use is Use.FILE:
                    self._write(str(part.block.title), body)
                elif part.use is Use.OUTPUT:
                    self._compare(body, printed)
                elif part.use is Use.COMMANDS and (ready := ready_line(body)) is not None:
                    command = [str(_BIN / "strata"), *shlex.split(body)[1:]]
                    server.enter_context(served(command, self._folder, self._environment, ready))
                    printed = ""
                elif part.use is Use.COMMANDS:
                    printed = self._run(terminal, commands(body))
                elif place == max(cells, default=-1):
                    self._write(CELLS, "\n".join(self._here(found[each].block.body) for each in cells))
                    printed = self._run(terminal, [f"python {CELLS}"])

    def _run(self, terminal: Terminal, todo: list[str]) -> str:
        printed = ""
        for command in todo:
            output, status = terminal.run(command)
            printed += output
            print(f"$ {command}\n{output}")
            if status != 0:
                self.problems.append(f"$ {command}\nended with status {status}:\n{output}")
        return printed

    def _compare(self, shown: str, printed: str) -> None:
        """Each shown line is printed, in this order. How many spaces there are between words does not count."""
        lines = [re.escape(line).replace("…", ".*") for line in _without_layout(shown).splitlines() if line]
        pattern = "(?s)" + ".*?".join(rf"(?m:^(?-s:{line})$)" for line in lines)
        if re.search(pattern, _without_layout(printed)) is None:
            self.problems.append(f"shown:\n{shown}\nprinted:\n{printed}")

    def _here(self, text: str) -> str:
        for old, new in self._replaced.items():
            text = text.replace(old, new)
        return text

    def _write(self, name: str, body: str) -> None:
        (self._folder / name).write_text(body, encoding="utf-8")


def ready_line(body: str) -> str | None:
    """What the server of this block prints when it serves; None for other blocks."""
    todo = commands(body)
    found = [ready for server, ready in SERVERS.items() if re.fullmatch(rf"{server}( --.*)?", todo[0].strip())]
    return found[0] if found and len(todo) == 1 else None


def commands(body: str) -> list[str]:
    """One for each line; a line that ends with a backslash goes on in the next."""
    return [line for line in re.sub(r"\\\n\s*", "", body).splitlines() if line.strip() and not line.startswith("#")]


def _without_layout(text: str) -> str:
    return "\n".join(" ".join(line.split()) for line in text.splitlines())


def _use(prose: str, block: Block, before: Use) -> Use:
    if REASON.search(prose):
        return Use.REASON
    if block.title is not None:
        return Use.FILE
    by_language = {"sh": Use.COMMANDS, "python": Use.CELL}
    if block.language == "text" and before in (Use.COMMANDS, Use.CELL):
        return Use.OUTPUT
    return by_language.get(block.language, Use.NONE)
