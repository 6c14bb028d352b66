"""No module imports itself by way of others when it runs, and neither it nor a class outgrows its idea."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import grimp

ROOT: Final = Path(__file__).parents[2] / "src" / "strata"
LINES: Final = 600
GENERATED: Final = "pb"
LARGE: Final = frozenset[str]()
"""Not divided yet: take a module off the list with the change that divides it."""
METHODS: Final = 30
FACADES: Final = frozenset({("coord/worker/client.py", "AsyncWorker")})
"""Public classes: each method is something that a program may do with the whole."""
WIDE: Final = frozenset[tuple[str, str]]()
"""Not divided yet: take a class off the list with the change that divides it."""


def _sources() -> Iterator[tuple[str, str]]:
    for path in sorted(ROOT.rglob("*.py")):
        if GENERATED not in path.relative_to(ROOT).parts:
            yield path.relative_to(ROOT).as_posix(), path.read_text()


def test_no_module_is_longer_than_an_idea() -> None:
    long = {name for name, text in _sources() if text.count("\n") > LINES}
    assert long - LARGE == set()
    assert LARGE - long == set(), "these are short enough now: take them off the list"


def test_no_class_has_more_methods_than_one_idea_needs() -> None:
    wide = {(module, name) for module, text in _sources() for name in _wide_classes(text)}
    assert wide == FACADES | WIDE, "divide what is new, and take off the lists what is narrow enough now"


def test_a_class_of_too_many_methods_is_found() -> None:
    methods = ["    def m(self): ...", *["    async def m(self): ..."] * METHODS]
    assert _wide_classes("\n".join(["class Wide:", *methods, "class Narrow:", *methods[1:]])) == ["Wide"]


def test_there_is_no_cycle_of_imports_at_run_time() -> None:
    graph = grimp.build_graph("strata", exclude_type_checking_imports=True, cache_dir=None)
    assert _cycles({name: graph.find_modules_directly_imported_by(name) for name in graph.modules}) == []


def test_a_cycle_is_found_with_what_lies_on_it() -> None:
    assert _cycles({"root": {"a"}, "a": {"b"}, "b": {"a", "leaf"}, "leaf": set()}) == [["a", "b"]]


def _wide_classes(text: str) -> list[str]:
    return [
        node.name
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef)
        and sum(isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) for each in node.body) > METHODS
    ]


def _cycles(imports: dict[str, set[str]]) -> list[list[str]]:
    """What is left when modules that import nothing of the rest are taken away, and those that nothing imports."""
    rest = {name: set(imported) for name, imported in imports.items()}
    while leaves := [name for name, imported in rest.items() if not imported & rest.keys()]:
        for name in leaves:
            del rest[name]
    while roots := rest.keys() - set().union(*rest.values()):
        for name in roots:
            del rest[name]
    return [sorted(rest)] if rest else []
