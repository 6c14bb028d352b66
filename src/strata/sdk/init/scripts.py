"""Reads a Python script as a syntax tree, never by importing or running it: its `__main__` guard, the flags of argparse
and click, the names it takes from `hyper()`, and whether it uses CUDA or torch.distributed.
"""

from __future__ import annotations

import ast
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from strata.base.digest import MAX_SAFE_INTEGER

ParameterValue = bool | int | float | str | list["ParameterValue"]
MAX_PARAMETERS: Final = 24
MAX_LINE: Final = 2_000
"""Python takes the square of its length for a dotted name, in time and memory, and TOML for a dotted key."""
_MAX_MODULE: Final = 200
_MAX_TEXT: Final = 80
_MAX_ITEMS: Final = 8
_KEY: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
_FLAGS: Final = ("add_argument", "option")
"""The functions of argparse and click that declare a flag."""
_NO_PARAMETERS: Final = frozenset({"help", "version", "describe", "local_rank"})
_DISTRIBUTED: Final = ("torch.distributed", "accelerate", "deepspeed", "strata.coord.worker")
_TRAINER: Final = "strata.fleet.trainer"


@dataclass(frozen=True)
class ScriptParameter:
    name: str
    value: ParameterValue | None = None
    """Its default; None if it has none that is written as a constant."""
    flag: str = ""
    """How the command line spells it; empty for one of `hyper()`."""
    required: bool = False


@dataclass(frozen=True)
class ScriptFacts:
    path: str
    problem: str = ""
    """Why its syntax tree could not be read."""
    has_guard: bool = False
    does_work: bool = False
    """Its top level has a guard, a loop or a call, and does not only define things."""
    parameters: tuple[ScriptParameter, ...] = ()
    reads_hyper: bool = False
    uses_cuda: bool = False
    checks_cuda: bool = False
    """It calls `torch.cuda.is_available()`, so it may train without a GPU."""
    uses_distributed: bool = False
    imports: frozenset[str] = frozenset()
    """Modules by dotted name; relative ones with their dots."""

    def joined(self, modules: Sequence[ScriptFacts]) -> ScriptFacts:
        """Returns the facts with those of the modules that the script imports."""
        every = (self, *modules)
        parameters = {each.name: each for facts in reversed(every) for each in reversed(facts.parameters)}
        return replace(
            self,
            parameters=tuple(reversed(parameters.values()))[:MAX_PARAMETERS],
            reads_hyper=any(facts.reads_hyper for facts in every),
            uses_cuda=any(facts.uses_cuda for facts in every),
            checks_cuda=any(facts.checks_cuda for facts in every),
            uses_distributed=any(facts.uses_distributed for facts in every),
        )


def read_script(path: str, content: bytes, *, whole: bool = True) -> ScriptFacts:
    """Reads the facts of a script; one that is no Python has a problem and no facts."""
    if not whole:
        return ScriptFacts(path, problem="it is too large to be read")
    if has_long_line(content):
        return ScriptFacts(path, problem=f"it has a line of more than {MAX_LINE} bytes")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # A text, so that the file names no codec.
            tree = ast.parse(content.decode("utf-8-sig", errors="replace"))
        nodes = list(ast.walk(tree))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ScriptFacts(path, problem="it is not Python as this version reads it")
    imports = frozenset(_imports(nodes))
    hyper = _HyperUse(nodes)
    parameters = {each.name: each for each in (*hyper.parameters(nodes), *_flags(nodes))}
    return ScriptFacts(
        path,
        has_guard=any(_is_guard(node) for node in tree.body),
        does_work=any(_is_guard(node) or _is_work(node) for node in tree.body),
        parameters=tuple(parameters.values())[:MAX_PARAMETERS],
        reads_hyper=hyper.is_called,
        uses_cuda=_uses_cuda(nodes),
        checks_cuda=any(_is_chain(node, "cuda", "is_available") for node in nodes),
        uses_distributed=_uses_distributed(nodes, imports),
        imports=imports,
    )


def has_long_line(content: bytes) -> bool:
    """Says whether a line, with those that it continues, is longer than is safe to be parsed."""
    joined = re.sub(rb"\\(\r\n|\r|\n)", b"", content)
    return any(len(line) > MAX_LINE for line in joined.splitlines())


def _is_guard(node: ast.stmt) -> bool:
    if not isinstance(node, ast.If) or not isinstance(node.test, ast.Compare):
        return False
    sides = [node.test.left, *node.test.comparators]
    return any(isinstance(each, ast.Name) and each.id == "__name__" for each in sides) and any(
        isinstance(each, ast.Constant) and each.value == "__main__" for each in sides
    )


def _is_work(node: ast.stmt) -> bool:
    calls = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    return calls or isinstance(node, ast.For | ast.While | ast.With)


def _imports(nodes: Sequence[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = "." * node.level + (node.module or "")
            if len(start) > _MAX_MODULE:
                continue
            yield start
            yield from (f"{start}{'' if start.endswith('.') else '.'}{alias.name}" for alias in node.names)


def _uses_distributed(nodes: Sequence[ast.AST], imports: frozenset[str]) -> bool:
    imported = any(name == each or name.startswith(f"{each}.") for name in imports for each in _DISTRIBUTED)
    return imported or any(_is_chain(node, "torch", "distributed") for node in nodes)


def _uses_cuda(nodes: Sequence[ast.AST]) -> bool:
    """A comparison with "cuda" and the choices of a flag use no device."""
    apart: set[int] = set()
    waiting: list[ast.AST] = [node for node in nodes if _is_apart(node)]
    while waiting:
        inner = waiting.pop()
        if id(inner) not in apart:
            apart.add(id(inner))
            waiting.extend(ast.iter_child_nodes(inner))
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in apart:
            if node.value == "cuda" or re.fullmatch(r"cuda:\d+", node.value):
                return True
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "cuda":
            return True
    return False


def _is_apart(node: ast.AST) -> bool:
    return isinstance(node, ast.Compare) or (isinstance(node, ast.keyword) and node.arg in ("choices", "help"))


def _is_chain(node: ast.AST, before: str, name: str) -> bool:
    """Says whether this is `….before.name`."""
    if not isinstance(node, ast.Attribute) or node.attr != name:
        return False
    inner = node.value
    return (isinstance(inner, ast.Name) and inner.id == before) or (
        isinstance(inner, ast.Attribute) and inner.attr == before
    )


class _HyperUse:
    """The names under which a script has `hyper` of the trainer library, and the variables with its values."""

    def __init__(self, nodes: Sequence[ast.AST]) -> None:
        self._functions = {
            alias.asname or alias.name
            for node in nodes
            if isinstance(node, ast.ImportFrom) and node.module == _TRAINER
            for alias in node.names
            if alias.name == "hyper"
        }
        self.is_called = any(self._is_call(node) for node in nodes)
        self._variables = {
            target.id
            for node in nodes
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None and self._is_call(node.value)
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if isinstance(target, ast.Name)
        }

    def parameters(self, nodes: Sequence[ast.AST]) -> Iterator[ScriptParameter]:
        for node in nodes:
            if isinstance(node, ast.Subscript) and self._is_values(node.value):
                yield from _parameter(node.slice, None)
            elif (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "get"
                and node.args
                and self._is_values(node.func.value)
            ):
                yield from _parameter(node.args[0], node.args[1] if len(node.args) > 1 else None)

    def _is_call(self, node: ast.AST) -> bool:
        if not isinstance(node, ast.Call):
            return False
        called = node.func
        return (isinstance(called, ast.Name) and called.id in self._functions) or _is_chain(called, "trainer", "hyper")

    def _is_values(self, node: ast.expr) -> bool:
        return self._is_call(node) or (isinstance(node, ast.Name) and node.id in self._variables)


def _parameter(key: ast.expr, default: ast.expr | None) -> Iterator[ScriptParameter]:
    name = _constant(key)
    if isinstance(name, str) and _KEY.fullmatch(name):
        yield ScriptParameter(name, None if default is None else _constant(default))


def _flags(nodes: Sequence[ast.AST]) -> Iterator[ScriptParameter]:
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _FLAGS:
            yield from _flag(node)


def _flag(call: ast.Call) -> Iterator[ScriptParameter]:
    words = [each.value for each in call.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    options = {each.arg: _constant(each.value) for each in call.keywords if each.arg}
    # click has `--shuffle/--no-shuffle`.
    words = [word.partition("/")[0] for word in words]
    flag = next((word for word in words if word.startswith("--")), words[0] if words else "")
    dest = options.get("dest")
    name = dest if isinstance(dest, str) else flag.lstrip("-").replace("-", "_")
    if not _KEY.fullmatch(name) or not _KEY.fullmatch(flag.lstrip("-")) or name in _NO_PARAMETERS:
        return
    value = options.get("default")
    if value is None and options.get("action") in ("store_true", "store_false"):
        value = options["action"] == "store_false"
    positional = not flag.startswith("-")
    required = options.get("required") is True or (positional and options.get("nargs") not in ("?", "*"))
    yield ScriptParameter(name, value, flag, required)


def _constant(node: ast.expr) -> ParameterValue | None:
    """Returns the value of a constant that JSON and TOML have; None for everything else."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _constant(node.operand)
        return -value if isinstance(value, int | float) and not isinstance(value, bool) else None
    if isinstance(node, ast.List | ast.Tuple):
        items = [_constant(each) for each in node.elts[: _MAX_ITEMS + 1]]
        kept = [each for each in items if each is not None and not isinstance(each, list)]
        return [*kept] if len(kept) == len(items) <= _MAX_ITEMS else None
    written = node.value if isinstance(node, ast.Constant) else None
    if isinstance(written, str):
        return written if len(written) <= _MAX_TEXT and written.isprintable() else None
    if isinstance(written, float):
        return written if math.isfinite(written) else None
    return written if isinstance(written, int) and abs(written) <= MAX_SAFE_INTEGER else None
