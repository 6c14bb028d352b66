"""The shape of everything that a later version has to read: facts, states, manifests, tables and settings.

`python -m tests.rules.stored_formats` writes them to tests/golden/formats.json. A shape is a set of lines, one for each
place where a value is stored, so two versions are compared line by line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import inspect

from strata.base.digest import sha256_hex
from strata.coord.core.facts import Fact as CoordinatorFact
from strata.coord.core.state import JobState
from strata.coord.settings import CoordinatorSettings
from strata.database.migrations import Component
from strata.fleet.agent.settings import AgentSettings
from strata.hub.settings import HubSettings
from strata.hub.tables import SQLITE, postgres_components
from strata.journal import postgres_sql, sqlite
from strata.train.api.rollout_files import FORMAT as ROLLOUT_FORMAT
from strata.train.api.rollout_files import SessionHead
from strata.train.checkpoints.checkpoint import FORMAT as CHECKPOINT_FORMAT
from strata.train.checkpoints.checkpoint import CheckpointManifest
from strata.train.core.facts import Fact as ServerFact
from strata.train.core.rollout_session import Turn
from strata.train.core.state import SavedState
from strata.train.settings import ServerSettings

GOLDEN: Final = Path(__file__).parents[1] / "golden" / "formats.json"


class StoredFormat(msgspec.Struct, frozen=True):
    version: int
    """The number that is stored beside the values; 0 where unknown tags and fields are refused instead."""
    lines: frozenset[str]


def stored_formats() -> dict[str, StoredFormat]:
    # The ranks' folder imports torch.
    from strata.train.runner.snapshot.files import FORMAT as SNAPSHOT_FORMAT
    from strata.train.runner.snapshot.files import SnapshotManifest

    return {
        "journal of the coordinator": shape(CoordinatorFact),
        "state of the coordinator": shape(JobState),
        "journal of the training server": shape(ServerFact),
        "state of the training server": shape(SavedState),
        "checkpoint": shape(CheckpointManifest, CHECKPOINT_FORMAT),
        "snapshot": shape(SnapshotManifest, SNAPSHOT_FORMAT),
        "head of a rollout session": shape(SessionHead, ROLLOUT_FORMAT),
        "turn of a rollout session": shape(Turn, ROLLOUT_FORMAT),
        "settings of the hub": shape(HubSettings),
        "settings of the agent": shape(AgentSettings),
        "settings of the coordinator": shape(CoordinatorSettings),
        "settings of the training server": shape(ServerSettings),
        "journal in SQLite": text(sqlite._SCHEMA, sqlite._SCHEMA_VERSION),
        "journal in PostgreSQL": text(postgres_sql.SCHEMA, postgres_sql.SCHEMA_VERSION),
        **{f"tables of {each.name} in SQLite": tables(each) for each in SQLITE},
        **{f"tables of {each.name} in PostgreSQL": tables(each) for each in postgres_components()},
    }


def tables(component: Component) -> StoredFormat:
    return text("\n".join(component.steps), component.version)


def text(statements: str, version: int) -> StoredFormat:
    """The statements as a digest: they may change only with the version."""
    digest = sha256_hex(" ".join(statements.split()).encode())
    return StoredFormat(version, frozenset({f"sha256:{digest}"}))


def shape(kind: Any, version: int = 0) -> StoredFormat:
    return StoredFormat(version, frozenset(_lines(inspect.type_info(kind), "", ())))


def _lines(node: inspect.Type, path: str, parents: tuple[type, ...]) -> Iterator[str]:
    match node:
        case inspect.StructType():
            yield from _struct_lines(node, path, parents)
        case inspect.EnumType(cls=cls):
            yield from (f"{path} = {each.value!r}" for each in cls)
        case inspect.LiteralType(values=values):
            yield from (f"{path} = {each!r}" for each in values)
        case inspect.CustomType(cls=cls):
            yield f"{path} {cls.__name__}"
        case _:
            parts = _parts(node)
            for suffix, part in parts:
                yield from _lines(part, path + suffix, parents)
            if not parts:
                yield f"{path} {type(node).__name__.removesuffix('Type').lower()}"


def _struct_lines(node: inspect.StructType, path: str, parents: tuple[type, ...]) -> Iterator[str]:
    here = path if node.tag is None else f"{path}|{node.tag}"
    if node.cls in parents:
        yield f"{here} again"
        return
    yield f"{here} {'array' if node.array_like else 'object'}"
    for field in node.fields:
        place = f"{here}.{field.encode_name}"
        if field.required:
            yield f"{place} required"
        yield from _lines(field.type, place, (*parents, node.cls))


def _parts(node: inspect.Type) -> Sequence[tuple[str, inspect.Type]]:
    """The types of the values inside, each with how its place is written; none for a value of one piece."""
    match node:
        case inspect.UnionType(types=types):
            return [("", each) for each in types]
        case inspect.TupleType(item_types=items):
            return [(f"[{place}]", each) for place, each in enumerate(items)]
        case inspect.DictType(value_type=value):
            return [("{}", value)]
        case inspect.CollectionType(item_type=item):
            return [("[]", item)]
        case inspect.Metadata(type=inner):
            return [("", inner)]
        case _:
            return []


def differences(before: StoredFormat, now: StoredFormat) -> list[str]:
    """What a version with the shape `now` cannot read of what one with the shape `before` has stored."""
    if now.version > before.version:
        return []
    if now.version < before.version:
        return [f"its version fell from {before.version} to {now.version}"]
    gone = sorted(line for line in before.lines - now.lines if not line.endswith(" required"))
    places = {line.rpartition(" ")[0] for line in before.lines}
    demanded = sorted(
        line
        for line in now.lines - before.lines
        if line.endswith(" required") and re.sub(r"\.[^.]*$", "", line.removesuffix(" required")) in places
    )
    return [f"{line}: gone" for line in gone] + [f"{line}: demanded of older values" for line in demanded]


def read_golden() -> Mapping[str, StoredFormat]:
    return msgspec.json.decode(GOLDEN.read_bytes(), type=dict[str, StoredFormat])


if __name__ == "__main__":
    GOLDEN.parent.mkdir(exist_ok=True)
    ordered = {name: {"version": each.version, "lines": sorted(each.lines)} for name, each in stored_formats().items()}
    GOLDEN.write_bytes(msgspec.json.format(msgspec.json.encode(ordered), indent=1) + b"\n")
