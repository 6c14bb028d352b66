"""A settings file of each server in which every setting is named, with another value than its default.

Values are made up: no secret, address or path in them is one of a machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import inspect

from strata.base import schema
from strata.base.secret import Secret
from strata.coord import settings as coordinator
from strata.fleet.agent import settings as agent
from strata.hub import settings as hub
from strata.train.settings import ServerSettings

SERVERS: Final[Mapping[str, Mapping[str, type[msgspec.Struct]]]] = {
    "hub": {hub.SECTION: hub.HubSettings},
    "agent": {agent.SECTION: agent.AgentSettings},
    "coordinator": {coordinator.SECTION: coordinator.CoordinatorSettings},
    "server": {each.name: each.type for each in msgspec.structs.fields(ServerSettings)},
}
"""The sections of each file."""
MADE_UP: Final = "no-secret-of-any-server"
VALUES: Final[Mapping[str, Any]] = {
    "hub.listen": "127.0.0.1:8444",
    "hub.database": "postgresql://hub@database.example/hub",
    "hub.require_sandbox": {"*": "namespaces", "trusted": "none"},
    "hub.trusted_proxies": ["192.0.2.0/24"],
    "hub.backups.folder": "/var/backups/hub",
    "hub.coordinator.address": "coordinator.example:7070",
    "hub.webhooks": [
        {"url": "https://events.example/", "secret": MADE_UP, "kinds": ["job.*"], "allow": ["192.0.2.0/24"]}
    ],
    "agent.labels": {"room": "office"},
    "agent.sandbox.allow": ["192.0.2.0/24"],
    "agent.pass_env": ["HTTP_PROXY", "NCCL_*"],
    "agent.advertise": "agent.example",
    "agent.metrics_listen": "127.0.0.1:9101",
    "agent.poll_s": 20.0,
    "agent.until": "30m",
    "coordinator.listen": "127.0.0.1:7071",
    "coordinator.database": "postgresql://coordinator@database.example/coordinator",
    "coordinator.advertise": "coordinator.example:7071",
    "coordinator.metrics_listen": "127.0.0.1:9102",
    "coordinator.job.max_workers": 3,
    "coordinator.job.slow_until": "rebalance",
    "coordinator.job.placement": "ring",
    "coordinator.job.parameters": {"rate": "0.1"},
    "server.database": "postgresql://server@database.example/server",
    "server.identity_database": "postgresql://hub@database.example/hub",
    "ranks.rank0": "file:rank0.address",
    "checkpoints.storage": "s3://bucket/prefix",
    "checkpoints.endpoint": "https://store.example",
    "inference.allow": ["http://192.0.2.1:8000"],
    "inference.keys": {"http://192.0.2.1:8000": "engine.key"},
    "inference.devices": ["2", "3"],
    "inference.environment": {"VLLM_LOGGING_LEVEL": "DEBUG"},
}
"""Of settings whose values have a form of their own."""


def write_settings(folder: Path) -> None:
    for server in SERVERS:
        (folder / f"{server}.toml").write_text(settings_file(server), encoding="utf-8")


def settings_file(server: str) -> str:
    lines = [f"# Every setting of the {server}, as this version reads it.\n"]
    for section, kind in SERVERS[server].items():
        lines += _table(section, schema.describe(kind))
    return "".join(lines)


def _table(path: str, group: schema.Group) -> Iterator[str]:
    yield f"\n[{path}]\n"
    for name, member in group.members.items():
        if isinstance(member, schema.Leaf):
            yield f"{name} = {_toml(_value(f'{path}.{name}', member))}\n"
    for name, member in group.members.items():
        if isinstance(member, schema.Group):
            yield from _table(f"{path}.{name}", member)


def _value(name: str, leaf: schema.Leaf) -> Any:
    if name in VALUES:
        return VALUES[name]
    default = schema.default_value(leaf)
    return _other(name, leaf.bare, None if default is msgspec.NODEFAULT else default)


def _other(name: str, kind: inspect.Type, default: Any) -> Any:  # noqa: PLR0911 - one line for each kind
    """A value that is not the default."""
    match kind:
        case inspect.Metadata(type=inner):
            return _other(name, inner, default)
        case inspect.UnionType(types=kinds):
            return _other(name, kinds[-1], default)
        case inspect.BoolType():
            return not default
        case inspect.IntType():
            return (default or 0) + 1
        case inspect.FloatType():
            return (default or 0.0) + 1.0
        case inspect.LiteralType(values=values):
            return next(each for each in reversed(values) if each != default)
        case inspect.StrType():
            return f"a-{name.rpartition('.')[2].replace('_', '-')}"
        case inspect.CustomType(cls=cls):
            return MADE_UP if cls is Secret else f"folder/{name.rpartition('.')[2]}"
        case inspect.VarTupleType(item_type=item):
            return [_other(name, item, None)]
        case _:
            raise TypeError(f"{name} is a {kind}: give it a value of its own")


def _toml(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case str():
            return json.dumps(value)
        case Mapping():
            return f"{{ {', '.join(f'{json.dumps(key)} = {_toml(each)}' for key, each in value.items())} }}"
        case list():
            return f"[{', '.join(map(_toml, value))}]"
        case _:
            return repr(value)
