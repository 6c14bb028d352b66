"""Decides what the files of a folder mean: which script trains and by what rule, which file lists packages, which rows
can be learned from and by which kind of recipe, where a model is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final, NamedTuple

from strata.base import toml
from strata.base.errors import StrataError
from strata.fleet.core.jobspec import PythonVersion
from strata.fleet.core.problems import fits
from strata.fleet.core.requirement import Name
from strata.sdk.init.scripts import ScriptFacts, has_long_line, read_script
from strata.sdk.submit import ENVIRONMENT_FILES, job_name, lists_packages

_DATA: Final = (".jsonl", ".json", ".parquet")
_MODEL: Final = "config.json"
_ADAPTER: Final = "adapter_config.json"
_PYTHON: Final = ".python-version"
_PROJECT: Final = "pyproject.toml"
_OTHER_TOOLS: Final = ("environment.yml", "environment.yaml", "Pipfile", "poetry.lock")
"""Files of conda, Pipenv and Poetry, from which hosts install nothing."""
_PACKAGE: Final = "__main__.py"
_NAMES: Final = ("train.py", "main.py", _PACKAGE)
"""Names of scripts that need no guard."""
_NO_TRAINERS: Final = re.compile(r"(test_.*|.*_test|conftest|setup|noxfile|__init__)\.py")
_NO_TRAINER_FOLDERS: Final = frozenset({"tests", "test", "docs"})
_HELD_OUT: Final = frozenset({"test", "validation", "valid", "dev", "eval"})
_WORD: Final = re.compile(r"[a-z0-9]+")
_ROWS_READ: Final = 20
_FORMS: Final = (
    ("dpo", ("chosen", "rejected")),
    ("sft", ("messages",)),
    ("sft", ("prompt", "completion")),
    ("grpo", ("prompt", "answer")),
    ("sft", ("text",)),
)
"""The kind of recipe for rows with these columns; the first that fits counts."""
_KINDS: Final = tuple(dict.fromkeys(("sft", *(kind for kind, _ in _FORMS))))
"""The kinds of recipes; of data for several of them the first counts."""


@dataclass(frozen=True)
class FolderFile:
    path: str
    """Relative to the folder, with slashes."""
    size: int
    content: bytes = b""
    """Its beginning; of a Parquet file its end."""
    whole: bool = False
    """`content` is all of it."""

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def level(self) -> int:
        return self.path.count("/")


@dataclass(frozen=True)
class FolderListing:
    name: str
    files: tuple[FolderFile, ...]
    size: int = 0
    """Bytes of all files that were seen, also of those that are not listed."""
    notes: tuple[str, ...] = ()
    """What was not looked at, and why."""


@dataclass(frozen=True)
class PackageFile:
    path: str
    python: str
    extras: tuple[str, ...]
    groups: tuple[str, ...]


class RowFile(NamedTuple):
    """A file of rows that can be learned from."""

    path: str
    kind: str
    columns: tuple[str, ...]


@dataclass(frozen=True)
class FolderFindings:
    name: str
    """A name for its job."""
    script: ScriptFacts | None
    """The script that trains, with the facts of what it imports from the folder."""
    reason: str
    """Why it was taken."""
    other_scripts: tuple[str, ...]
    packages: PackageFile | None
    rows: tuple[RowFile, ...]
    """The file to learn from first, then the others."""
    held_out: str
    model: str
    adapter: str
    notebooks: tuple[str, ...]
    size: int
    notes: tuple[str, ...]


def is_script(path: str) -> bool:
    return path.endswith(".py")


def is_settings(path: str) -> bool:
    name = path.rpartition("/")[2]
    return name in (_MODEL, _ADAPTER) or path in (_PROJECT, _PYTHON)


def is_data(path: str) -> bool:
    return path.lower().endswith(_DATA)


def is_worth_listing(path: str) -> bool:
    listed = path in (*ENVIRONMENT_FILES, *_OTHER_TOOLS) or path.endswith(".ipynb")
    return listed or is_script(path) or is_settings(path) or is_data(path)


def find_work(listing: FolderListing) -> FolderFindings:
    """Decides what is in the folder; a finding that is not there is empty."""
    files = {file.path: file for file in listing.files}
    scripts = {
        path: read_script(path, file.content, whole=file.whole) for path, file in files.items() if is_script(path)
    }
    candidates = _find_candidates(scripts.values())
    script = candidates[0] if candidates else None
    rows = sorted(_row_files(listing.files), key=_row_rank)
    packages = _find_packages(files)
    tools = [] if packages else [path for path in _OTHER_TOOLS if path in files]
    held_out = [each for each in rows if _is_held_out(each.path)]
    rows = [each for each in rows if each not in held_out] or rows
    return FolderFindings(
        name=job_name(listing.name),
        script=script and script.joined(_imported(script, scripts)),
        reason=_reason(script) if script else "",
        other_scripts=tuple(each.path for each in candidates[1:]),
        packages=packages,
        rows=tuple(rows),
        held_out=next((each.path for each in held_out if rows[0] != each and rows[0].kind == each.kind), ""),
        model=_folder_with(listing.files, _MODEL, "model_type"),
        adapter=_folder_with(listing.files, _ADAPTER, "peft_type"),
        notebooks=tuple(path for path in files if path.endswith(".ipynb")),
        size=listing.size,
        notes=(*listing.notes, *(f"hosts install no packages from {path}" for path in tools)),
    )


def script_command(path: str) -> tuple[str, ...]:
    """The command of a script; a package with a `__main__` is started by its name."""
    *folders, name = path.split("/")
    if name == _PACKAGE and folders and all(folder.isidentifier() for folder in folders):
        return ("python", "-m", ".".join(folders))
    # Python would read it as an option.
    return ("python", f"./{path}" if path.startswith("-") else path)


def _find_candidates(scripts: Iterable[ScriptFacts]) -> list[ScriptFacts]:
    """The scripts that may train, the one to take first."""
    possible = [script for script in scripts if _may_train(script.path)]
    named = [script for script in possible if script.has_guard or _name(script) in _NAMES]
    if named:
        return sorted(named, key=_script_rank)
    working = [script for script in possible if script.does_work]
    return working if len(working) == 1 else []


def _may_train(path: str) -> bool:
    *folders, name = path.split("/")
    return not (_NO_TRAINERS.fullmatch(name) or _NO_TRAINER_FOLDERS.intersection(folders))


def _name(script: ScriptFacts) -> str:
    return script.path.rpartition("/")[2]


def _script_rank(script: ScriptFacts) -> tuple[int, int, str]:
    """The rule by which one script is taken: train.py, main.py, a name with train or finetune, a package with a
    `__main__`, any other; of equal ones the nearest to the top, then the first by name."""
    name = _name(script)
    if not (script.does_work or script.problem or name == _PACKAGE):
        # It only defines what another script calls.
        rank = 5
    elif name in ("train.py", "main.py"):
        rank = _NAMES.index(name)
    elif re.search(r"train|fine_?tune", name):
        rank = 2
    else:
        rank = 3 if name == _PACKAGE else 4
    return rank, script.path.count("/"), script.path


def _reason(script: ScriptFacts) -> str:
    if _name(script) in _NAMES:
        return f"it is called {_name(script)}"
    return "it has a __main__ guard" if script.has_guard else "no other script of the folder does anything"


def _imported(script: ScriptFacts, scripts: Mapping[str, ScriptFacts]) -> list[ScriptFacts]:
    """The modules of the folder that the script imports, and what they import."""
    reached: dict[str, ScriptFacts] = {}
    waiting = [script]
    while waiting:
        module = waiting.pop()
        for path in _module_paths(script.path, module):
            if path in scripts and path != script.path and path not in reached:
                reached[path] = scripts[path]
                waiting.append(scripts[path])
    return list(reached.values())


def _module_paths(script: str, module: ScriptFacts) -> Iterator[str]:
    """Yields the paths that imports of a module may have: beside the script, or at the top; relative ones beside the
    module."""
    tops = dict.fromkeys((str(PurePosixPath(script).parent), "."))
    for name in module.imports:
        bare = name.lstrip(".")
        above = len(name) - len(bare)
        starts = list(tops)
        if above:
            parents = PurePosixPath(module.path).parents
            starts = [str(parents[above - 1])] if above <= len(parents) else []
        for start in starts:
            path = PurePosixPath(start, *bare.split("."))
            yield f"{path}.py"
            yield str(path / "__init__.py")


def _find_packages(files: Mapping[str, FolderFile]) -> PackageFile | None:
    project = _text(files.get(_PROJECT))
    for path in ENVIRONMENT_FILES:
        if path not in files or (path == "uv.lock" and _PROJECT not in files):
            continue
        if path == _PROJECT and not lists_packages(project):
            continue
        read = {} if path == "requirements.txt" else _read_project(project)
        table = read.get("project")
        python = _text(files.get(_PYTHON)).strip()
        return PackageFile(
            path=path,
            python=python if fits(python, PythonVersion) else "",
            extras=_names(table.get("optional-dependencies") if isinstance(table, dict) else None),
            groups=_names(read.get("dependency-groups")),
        )
    return None


def _read_project(text: str) -> dict[str, Any]:
    try:
        return toml.parse(text, _PROJECT).data
    except StrataError:
        return {}


def _names(table: object) -> tuple[str, ...]:
    return tuple(name for name in table if fits(name, Name)) if isinstance(table, dict) else ()


def _text(file: FolderFile | None) -> str:
    if file is None or not file.whole or has_long_line(file.content):
        return ""
    return file.content.decode(errors="replace")


def _folder_with(files: Sequence[FolderFile], name: str, key: str) -> str:
    """The first folder whose file of this name is a JSON object with this key; empty if there is none."""
    for file in files:
        if file.name == name and file.whole:
            value = next(_json_values(file.content.decode(errors="replace"), "{"), None)
            if isinstance(value, dict) and isinstance(value.get(key), str):
                return str(PurePosixPath(file.path).parent)
    return ""


def _row_files(files: Sequence[FolderFile]) -> Iterator[RowFile]:
    for file in files:
        if is_data(file.path) and not is_settings(file.path):
            has = _parquet_columns(file.content) if file.path.lower().endswith(".parquet") else _columns(file)
            for kind, columns in _FORMS:
                if has.issuperset(columns):
                    yield RowFile(file.path, kind, columns)
                    break


def _row_rank(rows: RowFile) -> tuple[bool, int, int, str]:
    trains = "train" in _WORD.findall(rows.path.lower())
    return not trains, _KINDS.index(rows.kind), rows.path.count("/"), rows.path


def _is_held_out(path: str) -> bool:
    return bool(_HELD_OUT.intersection(_WORD.findall(path.lower())))


def _columns(file: FolderFile) -> frozenset[str]:
    """The columns that all of the first rows have."""
    text = file.content.decode(errors="replace").removeprefix("\ufeff").lstrip()
    if text.startswith("["):
        rows = list(_json_values(text[1:], "{"))
    elif text.startswith("{"):
        lines = text.split("\n")
        lines = lines if file.whole else lines[:-1]
        rows = [next(_json_values(line, "{"), None) for line in [line for line in lines if line.strip()][:_ROWS_READ]]
    else:
        return frozenset()
    keys = [_keys(row) for row in rows[:_ROWS_READ]]
    return frozenset.intersection(*keys) if keys else frozenset()


def _keys(row: object) -> frozenset[str]:
    if not isinstance(row, dict):
        return frozenset()
    return frozenset(key for key, value in row.items() if key != "messages" or isinstance(value, list))


def _json_values(text: str, opening: str) -> Iterator[object]:
    """The first value of a text, which begins as expected; none if it is no JSON."""
    text = text.lstrip()
    if text.startswith(opening):
        try:
            yield json.JSONDecoder().raw_decode(text)[0]
        except (ValueError, RecursionError):
            return


def _parquet_columns(content: bytes) -> frozenset[str]:
    """The columns that are named in the end of a Parquet file. Nothing of the base install reads the format, but each
    name stands there behind its length."""
    if not content.endswith(b"PAR1"):
        return frozenset()
    end = content[-(int.from_bytes(content[-8:-4], "little") + 8) :]
    every = {column for _, columns in _FORMS for column in columns}
    return frozenset(column for column in every if bytes([len(column)]) + column.encode() in end)
