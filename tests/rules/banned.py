"""Rules over the syntax tree that neither ruff nor import-linter can state. A rule returns the violations of a file."""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath
from typing import Final

UNPICKLERS: Final = {"_pickle", "cloudpickle", "dill", "joblib", "jsonpickle", "marshal", "pickle", "shelve"}
_MAY_UNPICKLE: Final = re.compile("|".join([*UNPICKLERS, "torch"]))

CORE_IMPORTS: Final = (
    "__future__", "bisect", "collections", "dataclasses", "datetime", "enum", "fnmatch", "heapq", "itertools", "math",
    "msgspec", "re", "typing", "strata.base.digest", "strata.base.errors", "strata.base.ids", "strata.base.retry",
    "strata.base.stored", "strata.base.suggest", "strata.base.toml", "strata.database.event_kinds",
)  # fmt: skip
CORE_NUMPY: Final = {
    "src/strata/coord/core/permutation.py",
    "src/strata/coord/core/placement.py",
    "src/strata/coord/core/rendezvous_hashing.py",
}
"""numpy is arithmetic here, no I/O: a placement scores millions of pairs, which takes seconds in plain Python."""
CORE_CALLS: Final = (
    "asyncio", "date.today", "datetime.now", "datetime.today", "datetime.utcnow", "eval", "exec", "input", "open", "os",
    "print", "random", "secrets", "threading", "time", "uuid.uuid1", "uuid.uuid4", "__import__",
)  # fmt: skip
ENVIRONMENT: Final = ("os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv", "os.unsetenv")
_MAY_READ: Final = re.compile("environ|getenv|putenv|unsetenv")
READS_ENVIRONMENT: Final = {"src/strata/base/settings.py", "src/strata/fleet/trainer/settings.py"}
"""The settings; those of a trainer in an environment of its own have the standard library alone."""
_MAY_CATCH: Final = re.compile(r"\b(?:Base)?Exception\b|\bexcept\s*:")
_NOTE: Final = re.compile(r"\b(?:TODO|FIXME|XXX)\b[:\s]*(.*)")

BASE_THIRD_PARTY: Final = {"msgspec", "rfc8785"}
CLI_TOP_LEVEL: Final = ("click", "strata.base", "strata.cli")
CLI_LOADED: Final = "src/strata/cli/mcp"
"""Only the function of its command imports the modules of this folder."""
CLI_SLOW: Final = {"asyncio", "concurrent", "http", "json", "multiprocessing", "sqlite3", "ssl", "urllib"}

MAY_CATCH_ALL: Final = {
    "src/strata/base/loop.py",
    "src/strata/cli/main.py",
    "src/strata/database/sqlite.py",
    "src/strata/fleet/agent/attempt.py",
    "src/strata/http/root.py",
    "src/strata/hub/subscriptions.py",
    "src/strata/hub/sweeps.py",
    "src/strata/sdk/recipes/environment_program.py",
}
"""The periodic loop and the outermost handler of each process, thread, attempt, subscription, sweep or episode."""


@dataclass(frozen=True)
class Source:
    path: PurePosixPath
    """Relative to the repository."""
    text: str

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        return tuple(ast.walk(self.parse()))

    @cached_property
    def names(self) -> dict[str, str]:
        return aliases(self.nodes)

    def parse(self) -> ast.Module:
        return ast.parse(self.text, str(self.path))

    def within(self, folder: str) -> bool:
        return self.path.is_relative_to(folder)


Rule = Callable[[Source], list[str]]


def unpickling(source: Source) -> list[str]:
    """Nothing is ever unpickled: not by an import, a dynamic import, `torch.load` or numpy's `allow_pickle`."""
    if not _MAY_UNPICKLE.search(source.text):
        return []
    found = [
        at(source, node, f"imports {name}") for node, name in imports(source.nodes) if name.split(".")[0] in UNPICKLERS
    ]
    for call in calls(source.nodes):
        called = qualified(call.func, source.names)
        keywords = {keyword.arg: keyword.value for keyword in call.keywords}
        if called == "torch.load" and not _is(keywords.get("weights_only"), True):
            found.append(at(source, call, "torch.load without weights_only=True"))
        if "allow_pickle" in keywords and not _is(keywords["allow_pickle"], False):
            found.append(at(source, call, "allow_pickle"))
        if called in ("__import__", "importlib.import_module") and call.args:
            module = ast.unparse(call.args[0]).strip("'")
            if module.split(".")[0] in UNPICKLERS:
                found.append(at(source, call, f"imports {module}"))
    return found


def core_imports(source: Source) -> list[str]:
    """A core imports values and errors, and its own siblings; nothing that could bring I/O, a clock or chance."""
    own = _pure_packages(source.path)
    if not own:
        return []
    allowed = (*CORE_IMPORTS, *own, *(("numpy",) if str(source.path) in CORE_NUMPY else ()))
    return [
        at(source, node, f"a core may not import {name}")
        for node, name in imports(source.nodes)
        if not _under(name, allowed)
    ]


def core_calls(source: Source) -> list[str]:
    """A core does not ask for the time, chance, the system or the terminal, whatever way the name got there."""
    if not _pure_packages(source.path):
        return []
    found = []
    for call in calls(source.nodes):
        called = qualified(call.func, source.names)
        # `datetime.datetime.now` and `datetime.now` are the same clock.
        if _under(called, CORE_CALLS) or _under(".".join(called.split(".")[-2:]), CORE_CALLS):
            found.append(at(source, call, f"a core may not call {called}"))
    return found


def environment(source: Source) -> list[str]:
    """The environment is read by the settings."""
    if not source.within("src") or str(source.path) in READS_ENVIRONMENT or not _MAY_READ.search(source.text):
        return []
    found = [at(source, node, f"imports {name}") for node, name in imports(source.nodes) if _under(name, ENVIRONMENT)]
    attributes = [node for node in source.nodes if isinstance(node, ast.Attribute)]
    read = [(node, name) for node in attributes if (name := qualified(node, source.names)) in ENVIRONMENT]
    return found + [at(source, node, f"reads {name}") for node, name in read]


def catch_all(source: Source) -> list[str]:
    """Only a loop and an outermost handler may swallow anything. A handler that ends in `raise` swallows nothing."""
    if not source.within("src") or str(source.path) in MAY_CATCH_ALL or not _MAY_CATCH.search(source.text):
        return []
    found = []
    for node in source.nodes:
        if isinstance(node, ast.ExceptHandler) and _catches_all(node.type) and not _reraises(node):
            found.append(at(source, node, "catches everything"))
        if (
            isinstance(node, ast.Call)
            and qualified(node.func, source.names) == "contextlib.suppress"
            and any(map(_catches_all, node.args))
        ):
            found.append(at(source, node, "suppresses everything"))
    return found


def base_imports(source: Source) -> list[str]:
    """base stands on the standard library, msgspec and rfc8785."""
    if not source.within("src/strata/base"):
        return []
    return [
        at(source, node, f"base may not import {name}")
        for node, name in imports(source.nodes)
        if not _under(name, ("strata.base",)) and name.split(".")[0] not in sys.stdlib_module_names | BASE_THIRD_PARTY
    ]


def cli_top_level(source: Source) -> list[str]:
    """At module level a command imports click and what is fast; its layer comes inside the function."""
    loaded = source.within(CLI_LOADED) and source.path.name != "command.py"
    if loaded or not source.within("src/strata/cli"):
        return []
    found = []
    for node, name in imports(ast.walk(_module_level(source.parse()))):
        fast = name.split(".")[0] in sys.stdlib_module_names - CLI_SLOW
        if not (fast or name in ("strata", "strata.__version__") or _under(name, CLI_TOP_LEVEL)):
            found.append(at(source, node, f"imports {name} at module level"))
    return found


def unfinished(source: Source, limits: str) -> list[str]:
    """A note of unfinished work stands, word for word, in the document of limits too."""
    if not _NOTE.search(source.text):
        return []
    found = []
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type == tokenize.COMMENT and (note := _NOTE.search(token.string)):
            words = note[1].strip()
            if not words or not any(words in line for line in limits.splitlines()):
                found.append(f"{source.path}:{token.start[0]}: not in docs/limits.md: {token.string}")
    return found


def at(source: Source, node: ast.AST, what: str) -> str:
    return f"{source.path}:{getattr(node, 'lineno', 0)}: {what}"


def imports(nodes: Iterable[ast.AST]) -> Iterator[tuple[ast.AST, str]]:
    """Every imported name with its module: `from a import b` is `a.b`."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from ((node, f"{module}.{alias.name}") for alias in node.names)


def calls(nodes: Iterable[ast.AST]) -> Iterator[ast.Call]:
    return (node for node in nodes if isinstance(node, ast.Call))


def aliases(nodes: Iterable[ast.AST]) -> dict[str, str]:
    """What each imported name of the file stands for."""
    known: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                known[alias.asname or first] = alias.name if alias.asname else first
        if isinstance(node, ast.ImportFrom):
            known.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    return known


def qualified(node: ast.expr, names: dict[str, str]) -> str:
    """The dotted name of an expression with import aliases resolved; empty if it is not a name."""
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        owner = qualified(node.value, names)
        return f"{owner}.{node.attr}" if owner else ""
    return ""


def _under(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def _pure_packages(path: PurePosixPath) -> tuple[str, ...]:
    """The dotted names of the core that a file belongs to, or of the views of a core and that core; else none."""
    parts = path.with_suffix("").parts
    if parts[:4] == ("src", "strata", "train", "status"):
        return "strata.train.status", "strata.train.core"
    if parts[:2] != ("src", "strata") or "core" not in parts:
        return ()
    return (".".join(parts[1 : parts.index("core") + 1]),)


def _is(node: ast.expr | None, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def _catches_all(node: ast.expr | None) -> bool:
    if isinstance(node, ast.Tuple):
        return any(map(_catches_all, node.elts))
    return node is None or (isinstance(node, ast.Name) and node.id in ("Exception", "BaseException"))


def _reraises(handler: ast.ExceptHandler) -> bool:
    return isinstance(handler.body[-1], ast.Raise)


def _module_level(tree: ast.Module) -> ast.Module:
    """The statements that run when the module is imported: no function bodies, nothing under TYPE_CHECKING."""

    class Strip(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> None: ...

        def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None: ...

        def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
            if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
                return node.orelse
            return self.generic_visit(node)

    return Strip().visit(tree)  # type: ignore[no-any-return]
