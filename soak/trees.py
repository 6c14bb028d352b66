"""Trees of the repository whose programs campaigns start: this one, and that of an older commit."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.against import PROGRAM, ROOT, checkout
from bench.regressions import RELEASED, read_release


@dataclass(frozen=True)
class Tree:
    root: Path
    python: str
    """The interpreter of its environment."""
    program: str
    """Its `strata`."""

    @property
    def python_path(self) -> str:
        return f"{self.root / 'src'}:{self.root}"


CURRENT: Final = Tree(ROOT, sys.executable, str(Path(sys.executable).with_name("strata")))


def older_revision(given: str | None) -> str | None:
    """Returns the commit of the last release unless another one is given; None while no version is released."""
    if given:
        return given
    return read_release(RELEASED).commit if RELEASED.exists() else None


@contextmanager
def older_tree(revision: str) -> Iterator[Tree]:
    """Builds the tree and the environment of a commit; RuntimeError if the history lacks it."""
    with checkout(revision) as root:
        program = root / PROGRAM
        yield Tree(root, str(program.with_name("python")), str(program))
