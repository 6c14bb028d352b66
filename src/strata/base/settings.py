"""Loads settings with the precedence flag, environment, file, default, and words unknown, doubled and missing ones.
Values are converted in `convert`.

Every problem of a load is reported at once, each with the place where it can be mended. This is the only module that
reads the environment; `Secret` is how a password or a token is declared.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from strata.base import toml
from strata.base.convert import Mismatch, convert, show
from strata.base.errors import Code, StrataError
from strata.base.schema import Group, Leaf, Variable, default_value, describe, variables
from strata.base.secret import Secret
from strata.base.suggest import did_you_mean

__all__ = [
    "Secret",
    "load",
    "no_color",
    "pop_secret",
    "process_environment",
    "put_variables",
]

T = TypeVar("T", bound=msgspec.Struct)
_Path = tuple[str, ...]
SECTIONS: Final = (
    "hub",
    "agent",
    "client",
    "coordinator",
    "gang",
    "mirror",
    "worker",
    "s3",
    "server",
    "model",
    "ranks",
    "hosts",
    "limits",
    "sampling",
    "snapshots",
    "checkpoints",
    "inference",
    "rollouts",
    "parallel",
)
"""The sections of all programs: one file may serve several of them, and each reads its own."""
_BARE_KEY: Final = re.compile(r"[A-Za-z0-9_-]+")


def load(
    kind: type[T],
    *,
    section: str,
    file: Path | None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, Any],
    aliases: Mapping[str, str] | None = None,
) -> T:
    """`kind` from `[section]` of the file, `STRATA_<SECTION>_…` and flags.

    Flags are named by dotted path (`"journal.database"`); None means that the flag was not given. Text from the
    environment and from flags is read as the field's type: yes/no, numbers, `a,b,c` or `["a", "b"]`; an empty text is
    None for an optional field. Other tables of the file belong to other programs and must be among SECTIONS. `aliases`
    are variables that other programs gave a name, each with the setting it stands for: weaker than our own and than the
    file, the first counts.
    """
    if environ is None:
        environ = os.environ  # noqa: TID251 - this is the one place
    schema = describe(kind)
    given = _SettingSources(section, file)
    known = variables(section, schema)
    given.read_aliases(schema, aliases or {}, environ)
    if file is not None:
        given.read_file(schema, file)
    given.read_environment(known, environ)
    given.read_flags(schema, flags)
    build = _Build(given, {variable.leaf.path: name for name, variable in reversed(known.items())})
    value = build.struct(schema, None)
    if given.problems or value is None:
        raise StrataError(Code.INVALID, "\n".join(given.problems), problems=tuple(given.problems))
    assert isinstance(value, kind)
    return value


def no_color(environ: Mapping[str, str] | None = None) -> bool:
    """Says whether the person set NO_COLOR (https://no-color.org): to anything but the empty text."""
    return bool((os.environ if environ is None else environ).get("NO_COLOR"))  # noqa: TID251 - this is the one place


def process_environment() -> Mapping[str, str]:
    """All variables of this process, for one that starts others and decides what those get. Not for settings."""
    return dict(os.environ)  # noqa: TID251 - this is the one place


def put_variables(variables: Mapping[str, str]) -> None:
    """Set variables for processes that code of others starts from this one. Not for secrets."""
    os.environ.update(variables)  # noqa: TID251 - this is the one place


def pop_secret(name: str) -> Secret | None:
    """The secret in this variable, which is gone afterwards: no process that is started from here on inherits it."""
    text = os.environ.pop(name, "").strip()  # noqa: TID251 - this is the one place
    return Secret(text) if text else None


@dataclass(frozen=True, slots=True)
class _Value:
    value: Any
    origin: str
    """`env STRATA_…` or `flag …`; empty: the file."""
    from_text: bool


@dataclass(slots=True)
class _SettingSources:
    """What was written anywhere, the strongest source last, and what is wrong with it."""

    section: str
    file: Path | None
    values: dict[_Path, _Value] = field(default_factory=dict)
    groups: set[_Path] = field(default_factory=set)
    """Groups that some source mentions: an optional one then exists."""
    problems: list[str] = field(default_factory=list)
    document: toml.TomlDocument | None = None

    def read_file(self, schema: Group, file: Path) -> None:
        try:
            self.document = toml.parse(file.read_bytes().decode(), str(file))
        except OSError as error:
            self.problems.append(f"{file}: cannot read the settings file: {error.strerror}")
        except UnicodeDecodeError as error:
            self.problems.append(f"{file}: the settings file is not UTF-8 text (byte {error.start})")
        except StrataError as error:
            self.problems.append(str(error))
        else:
            self._refuse_unknown_sections(self.document)
            table = self.document.data.get(self.section)
            if table is not None:
                self._read_table(schema, table, self.document)

    def _refuse_unknown_sections(self, document: toml.TomlDocument) -> None:
        """A section with a spelling mistake would otherwise be one that was never written."""
        known = dict.fromkeys((self.section, *SECTIONS))
        for name in document.data:
            if name not in known:
                where, spelled = document.where((name,)), name if _BARE_KEY.fullmatch(name) else json.dumps(name)
                self.problems.append(f"{where}: {spelled}: unknown section{did_you_mean(name, known)}")

    def _read_table(self, group: Group, table: Any, document: toml.TomlDocument) -> None:
        where = document.where((self.section, *group.path))
        if not isinstance(table, dict):
            self.problems.append(f"{where}: {self.dotted(group.path)}: expected a table, found {show(table)}")
            return
        self.groups.add(group.path)
        for key, value in table.items():
            path = (*group.path, key)
            member = group.members.get(key)
            if member is None:
                where = document.where((self.section, *path))
                self.problems.append(f"{where}: {self.dotted(path)}: unknown key{did_you_mean(key, group.members)}")
            elif isinstance(member, Group):
                self._read_table(member, value, document)
            else:
                self._put(path, _Value(value, "", from_text=False))

    def read_environment(self, known: Mapping[str, Variable], environ: Mapping[str, str]) -> None:
        seen: dict[_Path, str] = {}
        prefix = f"STRATA_{self.section.upper()}_"
        for name in sorted(name for name in environ if name.startswith(prefix)):
            variable = known.get(name)
            if variable is None:
                self.problems.append(f"env {name}: unknown variable{did_you_mean(name, known, prefix=prefix)}")
                continue
            path = variable.leaf.path
            if path in seen:
                self.problems.append(f"env {name}: {seen[path]} is set too; only one of them can be meant")
            seen[path] = name
            value = {"file": environ[name]} if variable.names_file else environ[name]
            self._put(path, _Value(value, f"env {name}", from_text=not variable.names_file))

    def read_aliases(self, schema: Group, aliases: Mapping[str, str], environ: Mapping[str, str]) -> None:
        known = {".".join(leaf.path): leaf for leaf in schema.leaves()}
        for name in reversed([*aliases]):
            if environ.get(name):
                self._put(known[aliases[name]].path, _Value(environ[name], f"env {name}", from_text=True))

    def read_flags(self, schema: Group, flags: Mapping[str, Any]) -> None:
        known = {".".join(leaf.path): leaf for leaf in schema.leaves()}
        for name, value in flags.items():
            if name not in known:
                self.problems.append(f"flag {name}: unknown setting{did_you_mean(name, known)}")
            elif value is not None:
                self._put(known[name].path, _Value(value, f"flag {name}", from_text=isinstance(value, str)))

    def _put(self, path: _Path, value: _Value) -> None:
        self.values[path] = value
        self.groups.update(path[:length] for length in range(len(path)))

    def dotted(self, path: _Path) -> str:
        return ".".join(key if _BARE_KEY.fullmatch(key) else json.dumps(key) for key in (self.section, *path))

    def where(self, origin: str, path: tuple[toml.Key, ...]) -> str:
        """The beginning of a problem's line."""
        if origin or self.document is None:
            return origin
        return self.document.where((self.section, *path))


@dataclass(slots=True)
class _Build:
    """Makes the Struct from the inside out; a part with a problem is None, and so is everything around it."""

    given: _SettingSources
    variable_of: Mapping[_Path, str]

    def struct(self, group: Group, base: Any) -> Any:
        """`base` is the default of the place this group is in: what is not given keeps that default's values."""
        problems = len(self.given.problems)
        values = {}
        for member in group.members.values():
            default = getattr(base, member.attribute) if base is not None else default_value(member)
            made = self._leaf(member, default) if isinstance(member, Leaf) else self._group(member, default)
            values[member.attribute] = made
        if len(self.given.problems) > problems:
            return None
        try:
            return group.kind(**values)
        except (ValueError, TypeError, StrataError) as error:
            self._problem(self._place(group.path), str(error))
            return None

    def _group(self, group: Group, default: Any) -> Any:
        if default is None and group.path not in self.given.groups:
            return None
        return self.struct(group, default if isinstance(default, msgspec.Struct) else None)

    def _leaf(self, leaf: Leaf, default: Any) -> Any:
        written = self.given.values.get(leaf.path)
        if written is None:
            if default is msgspec.NODEFAULT:
                self._problem(self.given.dotted(leaf.path), self._required(leaf))
            return default
        try:
            return convert(leaf, written.value, from_text=written.from_text)
        except Mismatch as mismatch:
            where = self.given.where(written.origin, (*leaf.path, *mismatch.inside))
            self._problem(f"{where}: {self.given.dotted(leaf.path)}", mismatch.reason)
            return None

    def _required(self, leaf: Leaf) -> str:
        file = f"in [{self.given.section}] of {self.given.file}, " if self.given.file else ""
        return f"required but not set (set it {file}as {self.variable_of[leaf.path]} or as a flag)"

    def _place(self, path: _Path) -> str:
        name = self.given.dotted(path)
        document = self.given.document
        if document is None or path not in self.given.groups or document.line((self.given.section, *path)) is None:
            return name
        return f"{document.where((self.given.section, *path))}: {name}"

    def _problem(self, where: str, reason: str) -> None:
        self.given.problems.append(f"{where}: {reason}")
