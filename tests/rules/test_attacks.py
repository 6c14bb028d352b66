"""The attack suite has the attacks that the README counts, each once, however many cases are made of it."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from tests.abuse.conftest import PROPERTY, count_attacks

ROOT: Final = Path(__file__).parents[2]
README: Final = re.compile(r"`tests/abuse`, a suite of (\d+) attacks")


def test_the_attack_suite_has_as_many_attacks_as_the_readme_says() -> None:
    said = README.search((ROOT / "README.md").read_text(encoding="utf-8"))
    assert said is not None
    attacks = [
        node
        for file in (ROOT / "tests" / "abuse").glob("test_*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "attack"
    ]
    assert len(attacks) == int(said[1])


def test_the_summary_counts_an_attack_once_and_as_broken_if_one_of_its_tries_is() -> None:
    def one(attempt: str, tries: int) -> Any:
        properties = [(PROPERTY, json.dumps(["hub", attempt, "held"])), ("tries", tries)]
        return SimpleNamespace(user_properties=properties, when="call")

    stats = {"failed": [one("a", 1)], "passed": [one("a", 1), one("a", 2), one("b", 1), one("b", 4)]}
    assert count_attacks(SimpleNamespace(stats=stats)) == ({"hub": {"held": 1, "BROKEN": 1}}, 9)
