"""The attack suite keeps at least the attacks that it had. An attack counts once, however many cases are made of it."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
FEWEST: Final = 369


def test_the_attack_suite_has_not_become_smaller() -> None:
    attacks = [
        node
        for file in (ROOT / "tests" / "abuse").glob("test_*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "attack"
    ]
    assert len(attacks) >= FEWEST
