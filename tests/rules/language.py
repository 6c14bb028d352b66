"""The names of `src`, and which of them are not in the language of docs/glossary.md."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[2]
SOURCE: Final = ROOT / "src" / "strata"

REMOVED_WORDS: Final = frozenset(
    {
        "amnesty", "anew", "asking", "astray", "beside", "books", "burial", "burials", "catching", "condemned",
        "courier", "crew", "deposed", "everybody", "forgiven", "goodbye", "grave", "graves", "greet", "greeted",
        "greeting", "greets", "hear", "heard", "hears", "hello", "hellos", "herd", "knock", "knocks", "lent",
        "life", "lives", "nobody", "overlook", "parked", "patience", "patiently", "quanta", "question",
        "questions", "reign", "reigns", "ruling", "said", "saying", "says", "shelf", "silence", "somebody",
        "spoiled", "tell", "telling", "tells", "together", "told", "tombstone", "tombstones", "trimming", "twin",
        "unheard", "whoever", "whomever",
    }
)  # fmt: skip
"""Parts of a name that no module, class, function or parameter has any more. The glossary has the terms instead."""

LOG_METHODS: Final = frozenset({"critical", "debug", "error", "exception", "info", "warning"})
_EVENT: Final = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_PART: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


class Name(NamedTuple):
    module: str
    line: int
    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}:{self.line}: {self.kind} {self.name}"


class LogCall(NamedTuple):
    module: str
    line: int
    event: str
    level: str
    fields: tuple[str, ...]


@cache
def modules() -> Mapping[str, Path]:
    """Every module of the package but generated ones, by dotted name."""
    paths = (path for path in sorted(SOURCE.rglob("*.py")) if "pb" not in path.relative_to(SOURCE).parts[:-1])
    return {
        ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for path in paths
    }


@cache
def sources() -> tuple[tuple[str, ast.Module], ...]:
    """Read and parsed once for all rules."""
    return tuple((module, ast.parse(path.read_text(encoding="utf-8"))) for module, path in modules().items())


def names(module: str, tree: ast.Module) -> Iterator[Name]:
    """Of the module itself, and of its classes, functions, methods and their parameters."""
    yield Name(module, 1, "module", module.rpartition(".")[2])
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield Name(module, node.lineno, "class", node.name)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield Name(module, node.lineno, "function", node.name)
            arguments = node.args
            for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
                yield Name(module, argument.lineno, "parameter", argument.arg)


def words(name: str) -> frozenset[str]:
    return frozenset(part.lower() for part in _PART.findall(name))


def removed_words(module: str, tree: ast.Module) -> Iterator[Name]:
    return (name for name in names(module, tree) if words(name.name) & REMOVED_WORDS)


def log_events(module: str, tree: ast.Module) -> Iterator[Name]:
    """The event of each call of a log method; one that is not a constant is shown as it is written."""
    return (Name(module, call.line, "log event", call.event) for call in log_calls(module, tree))


def log_calls(module: str, tree: ast.Module) -> Iterator[LogCall]:
    """The calls of log methods; one whose event is chosen between two is both."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or not node.args:
            continue
        logger = node.func.value
        named = logger.id if isinstance(logger, ast.Name) else logger.attr if isinstance(logger, ast.Attribute) else ""
        if node.func.attr in LOG_METHODS and named in ("_log", "log", "logger", "_logger"):
            event = node.args[0]
            fields = tuple(keyword.arg for keyword in node.keywords if keyword.arg and keyword.arg != "exc_info")
            for each in (event.body, event.orelse) if isinstance(event, ast.IfExp) else (event,):
                text = str(each.value) if isinstance(each, ast.Constant) else ast.unparse(each)
                yield LogCall(module, node.lineno, text, node.func.attr, fields)


def is_event(text: str) -> bool:
    """A stable identifier in snake_case without a removed word."""
    return _EVENT.fullmatch(text) is not None and not words(text) & REMOVED_WORDS


PREPOSITIONS: Final = frozenset(
    {
        "about", "above", "across", "after", "against", "along", "among", "around", "as", "at", "before", "behind",
        "below", "beneath", "beside", "besides", "between", "beyond", "by", "despite", "down", "during", "for", "from",
        "in", "inside", "into", "like", "near", "of", "off", "on", "onto", "out", "outside", "over", "past", "per",
        "since", "than", "through", "throughout", "to", "toward", "towards", "under", "underneath", "until", "up",
        "upon", "via", "with", "within", "without",
    }
)  # fmt: skip
"""Words with which a fragment begins: the reader has to guess what it speaks of."""
CLAUSES: Final = frozenset({"how", "that", "what", "when", "where", "whether", "which", "who", "whom", "whose", "why"})
"""Words with which the docstring of a function begins that lacks a verb: "Returns whether …" has one."""


def fragments(module: str, tree: ast.Module) -> Iterator[Name]:
    """Yields the docstrings, of attributes too, that begin with a preposition, and clauses for functions."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for place, each in enumerate(body if isinstance(body, list) else ()):
            if not isinstance(each, ast.Expr) or not isinstance(each.value, ast.Constant):
                continue
            text = str(each.value.value).strip()
            first = text.split(maxsplit=1)[0].strip(",:;.").lower() if text else ""
            function = place == 0 and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            if first in PREPOSITIONS or (function and first in CLAUSES):
                yield Name(module, each.lineno, "docstring", text.partition("\n")[0])


def homonyms() -> Mapping[str, frozenset[str]]:
    """Public classes that several modules define, with those modules."""
    defined: defaultdict[str, set[str]] = defaultdict(set)
    for module, tree in sources():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                defined[node.name].add(module)
    return {name: frozenset(modules) for name, modules in sorted(defined.items()) if len(modules) > 1}
