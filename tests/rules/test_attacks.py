"""The attack suite has the attacks that the README counts, each once, however many cases are made of it."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Final

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
