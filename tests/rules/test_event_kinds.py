"""The kinds of events stand in one module: no other spells one, so a search for the constant finds every use."""

from __future__ import annotations

import ast
import re
from typing import Final

from strata.database.event_kinds import PREDICATES
from tests.rules.language import sources

HOME: Final = "strata.database.event_kinds"
STORED: Final = {
    "strata.database.events": "its migrations are frozen text",
    "strata.cli.fleet.events": "an example in a help text",
    "strata.cli.examples": "an example of a command",
}
_KINDS: Final = re.compile(rf"(?<![\w.])({'|'.join(map(re.escape, PREDICATES))})(?![\w.])")


def _spelt(tree: ast.Module) -> set[str]:
    """The kinds in strings that are no docstrings."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    strings = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in docstrings)
    return {kind for node in strings if isinstance(node.value, str) for kind in _KINDS.findall(node.value)}


def test_no_other_module_spells_a_kind() -> None:
    spelt = {name: kinds for name, tree in sources() if name not in {HOME, *STORED} and (kinds := _spelt(tree))}
    assert spelt == {}


def test_every_kind_is_a_thing_and_a_verb() -> None:
    assert all(re.fullmatch(r"[a-z]+\.[a-z_]+", kind) for kind in PREDICATES)
