"""Describes a settings Struct: its leaves and groups, their names in files and environment variables, and the types
that settings may have.

A mistake found here is a mistake of the program, not of its user: `Code.INTERNAL`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import inspect

from strata.base.errors import Code, StrataError
from strata.base.secret import Secret

_SECTION: Final = re.compile(r"[a-z][a-z0-9]*")


@dataclass(frozen=True, slots=True)
class Leaf:
    """One value. `path` has the names of the file, `attribute` is the name in the Struct."""

    path: tuple[str, ...]
    attribute: str
    type: Any
    bare: inspect.Type
    """The type without `None` around it."""
    optional: bool
    secret: bool
    default: Any
    factory: Any


@dataclass(frozen=True, slots=True)
class Group:
    """A nested Struct; `optional` if it may be None as a whole."""

    path: tuple[str, ...]
    attribute: str
    kind: type[msgspec.Struct]
    optional: bool
    members: dict[str, Leaf | Group]
    default: Any
    factory: Any

    def leaves(self) -> Iterator[Leaf]:
        for member in self.members.values():
            if isinstance(member, Leaf):
                yield member
            else:
                yield from member.leaves()


@dataclass(frozen=True, slots=True)
class Variable:
    """An environment variable: it holds the value of `leaf`, or the path of the file that does."""

    leaf: Leaf
    names_file: bool


def default_value(member: Leaf | Group) -> Any:
    """The default of the Struct, or `msgspec.NODEFAULT`."""
    return member.default if member.factory is msgspec.NODEFAULT else member.factory()


def describe(kind: type[msgspec.Struct]) -> Group:
    members = _members(kind, (), (kind,))
    nothing = msgspec.NODEFAULT
    return Group(path=(), attribute="", kind=kind, optional=False, members=members, default=nothing, factory=nothing)


def variables(section: str, schema: Group) -> dict[str, Variable]:
    """Environment name → what it sets. Sections have no underscores, so no section's prefix contains another's."""
    if not _SECTION.fullmatch(section):
        raise _defect(f"the settings section {section!r} must be one lower-case word")
    known: dict[str, Variable] = {}
    for leaf in schema.leaves():
        name = "_".join(("STRATA", section, *leaf.path)).replace("-", "_").upper()
        forms = {name: Variable(leaf, names_file=False)}
        if leaf.bare == inspect.CustomType(Secret):
            forms[f"{name}_FILE"] = Variable(leaf, names_file=True)
        for form, variable in forms.items():
            if form in known:
                both = f"{'.'.join(known[form].leaf.path)} and {'.'.join(leaf.path)}"
                raise _defect(f"the settings {both} would both be the environment variable {form}")
            known[form] = variable
    return known


def walk_types(outer: inspect.Type) -> Iterator[inspect.Type]:
    """`outer` and every type inside it; each Struct once, so a Struct that contains itself ends too."""
    seen: set[Any] = set()
    waiting: list[Any] = [outer]
    while waiting:
        here = waiting.pop()
        if isinstance(here, inspect.StructType):
            if here.cls in seen:
                continue
            seen.add(here.cls)
        yield here
        inside = [getattr(here, name, None) for name in ("type", "item_type", "key_type", "value_type")]
        inside += [*getattr(here, "types", ()), *getattr(here, "item_types", ())]
        inside += [field.type for field in getattr(here, "fields", ())]
        waiting += [inner for inner in inside if isinstance(inner, inspect.Type)]


def _members(
    kind: type[msgspec.Struct], path: tuple[str, ...], around: tuple[type[msgspec.Struct], ...]
) -> dict[str, Leaf | Group]:
    members: dict[str, Leaf | Group] = {}
    for field in msgspec.structs.fields(kind):
        here = (*path, field.encode_name)
        bare, optional = _without_none(inspect.type_info(field.type))
        default, factory = field.default, field.default_factory
        if isinstance(bare, inspect.StructType) and bare.tag is None:
            inner: type[msgspec.Struct] = bare.cls
            if inner in around:
                raise _defect(f"the settings {inner.__name__} contain themselves at {'.'.join(here)}")
            below = _members(inner, here, (*around, inner))
            members[field.encode_name] = Group(here, field.name, inner, optional, below, default, factory)
        else:
            secret = _checked(bare, here)
            members[field.encode_name] = Leaf(here, field.name, field.type, bare, optional, secret, default, factory)
    return members


def _without_none(outer: inspect.Type) -> tuple[inspect.Type, bool]:
    if isinstance(outer, inspect.Metadata):
        return _without_none(outer.type)
    if not isinstance(outer, inspect.UnionType):
        return outer, False
    others = tuple(inner for inner in outer.types if not isinstance(inner, inspect.NoneType))
    bare = others[0] if len(others) == 1 else inspect.UnionType(others)
    return bare, len(others) < len(outer.types)


def _checked(bare: inspect.Type, path: tuple[str, ...]) -> bool:
    """Says whether a secret is anywhere in this leaf; a leaf that could not be checked when loading is refused."""
    secret = False
    for inner in walk_types(bare):
        if isinstance(inner, inspect.StructType) and not inner.forbid_unknown_fields:
            # Inside a list, a dict or a union msgspec does the checking, and by default it ignores unknown keys.
            raise _defect(f"{inner.cls.__name__}, used in the setting {'.'.join(path)}, must forbid unknown fields")
        if isinstance(inner, inspect.CustomType):
            if inner.cls not in {Path, Secret}:
                raise _defect(f"the setting {'.'.join(path)} has a type that settings do not know: {inner.cls}")
            secret = secret or inner.cls is Secret
    return secret


def _defect(message: str) -> StrataError:
    return StrataError(Code.INTERNAL, message)
