"""Decides which files a bundle leaves out: patterns of .gitignore or .strataignore, and those that are always left out.

The patterns are those of git, read by `pathspec`: nested files, `!`, `**`, escapes, `.git/info/exclude`, and the files
of the folders above as far as the repository goes. Whether git tracks a file makes no difference here, and a person's
own ignore file (`core.excludesFile`) does not count: the bundle of a commit is the same for everybody.
"""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from strata.base.errors import Code, StrataError

GITIGNORE: Final = ".gitignore"
STRATAIGNORE: Final = ".strataignore"
_ALWAYS: Final = (
    ".git", ".hg", ".svn", "__pycache__", "*.pyc", ".venv", "venv", "node_modules", ".mypy_cache", ".pytest_cache",
    ".ruff_cache", ".ipynb_checkpoints", ".DS_Store", ".env",
)  # fmt: skip
"""`.env` is where people keep credentials; a trainer gets those from a file on its host."""


@dataclass(frozen=True)
class _Pattern:
    """One line. It is asked about an entry itself and never about what is below one: nothing below is looked at."""

    ignores: bool
    matches: re.Pattern[str]
    folders_only: bool

    def is_about(self, path: str, *, folder: bool) -> bool:
        return (folder or not self.folders_only) and self.matches.fullmatch(path) is not None


@dataclass(frozen=True)
class _Patterns:
    """The patterns of one file, the last line first, for the paths below `base`, which is relative to the
    repository."""

    base: str
    lines: tuple[_Pattern, ...]

    def verdict(self, path: str, *, folder: bool) -> bool | None:
        """Says whether it is ignored; None if nothing here is about it."""
        own = path.removeprefix(self.base)
        return next((line.ignores for line in self.lines if line.is_about(own, folder=folder)), None)


@dataclass(frozen=True)
class IgnoreRules:
    """The rules for the entries of one folder, those that count most first."""

    above: str
    """What stands before the paths of the bundle in paths of the repository: `sub/` or nothing."""
    patterns: tuple[_Patterns, ...]
    nested: bool
    """Files of this kind in folders below count too."""

    def covers(self, path: str, *, folder: bool) -> bool:
        name = path.rpartition("/")[2]
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in _ALWAYS) or (folder and name.endswith(".egg-info")):
            return True
        verdicts = (each.verdict(self.above + path, folder=folder) for each in self.patterns)
        return next((verdict for verdict in verdicts if verdict is not None), False)

    def below(self, top: Path, path: str) -> IgnoreRules:
        """Returns the rules for the entries of the folder `path`, which ends with /."""
        found = _read(top / path / GITIGNORE, self.above + path) if self.nested else None
        return self if found is None else IgnoreRules(self.above, (found, *self.patterns), self.nested)


def read_ignore_rules(folder: Path) -> IgnoreRules:
    own = _read(folder / STRATAIGNORE, "")
    if own is not None:
        return IgnoreRules("", (own,), nested=False)
    top = _repository(folder)
    if top is None:
        return IgnoreRules("", tuple(_some(_read(folder / GITIGNORE, ""))), nested=True)
    above = folder.resolve().relative_to(top).as_posix()
    steps = [] if above == "." else above.split("/")
    found = [*_some(_read(_common(top / ".git") / "info" / "exclude", "")), *_some(_read(top / GITIGNORE, ""))]
    for number in range(1, len(steps) + 1):
        here = "/".join(steps[:number])
        around = IgnoreRules("", tuple(reversed(found)), nested=True)
        if around.covers(here, folder=True):
            # A folder that git does not look into is sent by itself.
            return IgnoreRules("", tuple(_some(_read(folder / GITIGNORE, ""))), nested=True)
        found += _some(_read(top / here / GITIGNORE, f"{here}/"))
    return IgnoreRules(f"{above}/" if steps else "", tuple(reversed(found)), nested=True)


def _repository(folder: Path) -> Path | None:
    """The folder above, or this one, that has a .git."""
    here = folder.resolve()
    return next((each for each in (here, *here.parents) if (each / ".git").exists()), None)


def _common(git: Path) -> Path:
    """The folder of the repository itself: `.git` is a file where there are several work trees."""
    if git.is_dir():
        return git
    try:
        own = Path(git.parent, git.read_text(encoding="utf-8").partition("gitdir:")[2].strip())
        common = own / "commondir"
        return Path(own, common.read_text(encoding="utf-8").strip()) if common.is_file() else own
    except (OSError, ValueError):
        return git


def _read(path: Path, base: str) -> _Patterns | None:
    try:
        text = path.read_text(encoding="utf-8-sig", errors="surrogateescape")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StrataError(Code.INVALID, f"{path} cannot be read: {error.strerror}") from error
    lines = [_pattern(line.removesuffix("\r")) for line in text.split("\n")]
    return _Patterns(base, tuple(line for line in reversed(lines) if line is not None))


def _pattern(line: str) -> _Pattern | None:
    """None for a comment, and for what is no pattern: git passes over both."""
    from pathspec.patterns.gitignore.spec import GitIgnoreSpecPattern

    text = line
    while text.endswith(" ") and not text.endswith("\\ "):
        text = text[:-1]
    folders_only = text.endswith("/")
    text = text.removesuffix("/")
    if text.endswith("/**"):
        # What is in the folder, and not the folder.
        text += "/*"
    try:
        regex, ignores = GitIgnoreSpecPattern.pattern_to_regex(text)
    except ValueError:
        return None
    if regex is None or ignores is None:
        return None
    # pathspec writes a single dot for whatever there is.
    return _Pattern(ignores, re.compile(".+" if regex == "." else regex, re.DOTALL), folders_only)


def _some(found: _Patterns | None) -> list[_Patterns]:
    return [] if found is None else [found]
