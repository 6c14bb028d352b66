"""What `-o json` prints is an interface: names and kinds of every field are those of shapes.json.

A field may be added: add it there too. One that is renamed, removed or of another kind breaks somebody's script.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from strata.fleet.wire.leases import CompleteRequest
from tests.shell.cli_fleet.driving import HostByHand, Person

FROZEN = Path(__file__).with_name("shapes.json")


def shape(value: Any) -> Any:
    """Kinds in the place of values; what has names of the user's own is an object without any."""
    if isinstance(value, dict):
        return {name: "object" if name in _FREE else shape(each) for name, each in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return {bool: "bool", int: "number", float: "number", str: "text", type(None): "null"}[type(value)]


_FREE = ("hyper", "facts", "metrics", "labels")


def test_the_json_of_every_command_keeps_its_shape(person: Person, host: HostByHand, manifest: Path) -> None:
    found: dict[str, Any] = {"apply": shape(person.says("apply", str(manifest), "-o", "json").value)}
    lease = host.claim()
    line = b'{"type":"metrics","at_s":1.5,"step":3,"values":{"loss":0.5}}\n'
    host.hub.append(lease, "metrics", 0, line, last=True)
    host.hub.complete(lease, CompleteRequest(epoch=lease.epoch))
    asked = {
        "list": ("list", "--status", "completed"),
        "show": ("show", "tree-small"),
        "status": ("status",),
        "workers": ("workers",),
        "why": ("why", "tree-large"),
        "metrics": ("metrics",),
        "metrics --over-time": ("metrics", "--over-time", "tree-small"),
        "cancel": ("cancel", "tree-large"),
        "requeue": ("requeue", "tree-large"),
        "drain": ("drain", host.name),
        "keys create": ("keys", "create", "bob", "--role", "viewer"),
        "keys list": ("keys", "list"),
        "artifacts list": ("artifacts", "list", "--kind", "source"),
        "invite": ("invite",),
        "contexts": ("contexts",),
    }
    for name, words in asked.items():
        found[name] = shape(person.says(*words, "-o", "json").value)
    assert found == json.loads(FROZEN.read_text())


def test_a_line_for_each_row_is_the_same_rows(person: Person, manifest: Path) -> None:
    person.says("apply", str(manifest))
    rows = person.says("list", "-o", "json").value
    lines = [json.loads(line) for line in person.says("list", "-o", "jsonl").out.splitlines()]
    assert sorted(lines, key=lambda row: row["id"]) == sorted(rows, key=lambda row: row["id"])
