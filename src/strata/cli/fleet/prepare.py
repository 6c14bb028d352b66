"""Prepares a manifest on this machine: bundles of folders, schemas of trainers by `--describe` (60 s), and the check of
hyper-parameters.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from strata.base.errors import Code, StrataError

if TYPE_CHECKING:
    from strata.fleet.core.hyper import HyperSchema
    from strata.fleet.core.jobspec import DataSource, TrainerSpec
    from strata.fleet.core.manifest import JobManifest, ManifestDraft
    from strata.sdk.bundle import Bundle

DESCRIBE_S: Final = 60.0
_MAX_PROGRAM: Final = 1 << 20
_ENTRY: Final = "handle_describe"
"""The function of `strata.fleet.trainer` that prints the parameters and exits."""


@dataclass(frozen=True)
class PreparedManifest:
    """A manifest that does not depend on this machine any more, and what the hub needs beside it."""

    draft: ManifestDraft
    manifest: JobManifest
    schemas: dict[str, Any]
    """JSON Schemas of hyper-parameters by trainer, as found on this machine."""
    bundles: dict[str, Bundle]
    """The source of each trainer that has to be at the hub before the manifest is applied."""

    def check_hyper(self, registered: Mapping[str, Any]) -> None:
        """INVALID where a job does not fit the schema that only the hub has of its trainer, by the trainer's name.

        The hub checks this too. Here the lines of the file are known.
        """
        if registered.keys() - self.schemas.keys():
            self.draft.resolve(trainers=self.manifest.trainers, schemas=_compile({**registered, **self.schemas}))


def prepare_manifest(
    path: Path,
    warn: Callable[[str], None],
    find_artifacts: Callable[[Mapping[str, DataSource]], dict[str, DataSource]],
    *,
    describe: bool | None = None,
    dry_run: bool = False,
) -> PreparedManifest:
    """Parse the manifest once, describe its trainers, bundle their relative folders, and check all of it.

    `find_artifacts` is called for trainers that name datasets of the hub. Without `describe`, a trainer is run for its
    parameters if its program calls `handle_describe`; never for a dry run.
    """
    from msgspec.structs import replace

    from strata.fleet.core.manifest import MAX_SOURCE, parse_manifest
    from strata.sdk.bundle import make_bundle

    draft = parse_manifest(_read(path), str(path)[-MAX_SOURCE:])
    folders = {name: _folder(path, trainer) for name, trainer in draft.trainers.items()}
    schemas = {name: _read_schema(path.parent, each) for name, each in draft.trainers.items() if each.params}
    asked = [
        name
        for name, folder in folders.items()
        if name not in schemas and folder is not None and folder.is_dir()
        if (calls_handle_describe(folder, draft.trainers[name]) if describe is None else describe)
    ]
    if asked and not dry_run:
        # All that is wrong in the file itself is found before a program is started.
        draft.resolve(schemas=_compile(schemas))
    bundles: dict[str, Bundle] = {}
    resolved: dict[str, TrainerSpec] = {}
    # A folder that cannot be sent is found before a program is started too, whichever trainer it belongs to.
    for name, trainer in draft.trainers.items():
        folder = folders[name]
        if folder is not None and not Path(trainer.directory).is_absolute():
            bundles[name] = make_bundle(folder)
            resolved[name] = replace(trainer, directory="", bundle=bundles[name].sha256)
        if any(source.dataset and not source.digest for source in trainer.data.values()):
            resolved[name] = replace(resolved.get(name, trainer), data=find_artifacts(trainer.data))
    for name in asked:
        folder = folders[name]
        assert folder is not None
        schema = _describe(folder, bundles.get(name), draft.trainers[name], warn, dry_run=dry_run)
        if schema is not None:
            schemas[name] = schema
    manifest = draft.resolve(trainers=resolved, schemas=_compile(schemas))
    manifest = replace(manifest, source=str(path.resolve())[-MAX_SOURCE:])
    return PreparedManifest(draft, manifest, schemas, bundles)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise StrataError(Code.NOT_FOUND, f"there is no file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise StrataError(Code.INVALID, f"{path} cannot be read: {error}") from None


def _compile(schemas: Mapping[str, Any]) -> dict[str, HyperSchema]:
    from strata.fleet.core.hyper import HyperSchema

    return {name: HyperSchema(schema, source=f"schema of {name}") for name, schema in schemas.items()}


def _folder(path: Path, trainer: TrainerSpec) -> Path | None:
    """The folder of a trainer on this machine. INVALID if it is relative to the manifest and not there."""
    folder = (path.parent / trainer.directory).resolve() if trainer.directory else None
    if folder is not None and not Path(trainer.directory).is_absolute() and not folder.is_dir():
        raise StrataError(Code.INVALID, f"{path}: trainers.{trainer.name}.directory: there is no folder {folder}")
    return folder


def _read_schema(manifest_folder: Path, trainer: TrainerSpec) -> Any:
    """The schema in the file that the trainer names."""
    import json

    try:
        return json.loads((manifest_folder / trainer.params).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StrataError(Code.INVALID, f"trainers.{trainer.name}.params: {trainer.params}: {error}") from None


def _describe(
    folder: Path, bundle: Bundle | None, trainer: TrainerSpec, warn: Callable[[str], None], *, dry_run: bool
) -> Any:
    """The schema that the trainer prints; None if it prints none."""
    if dry_run:
        warn(f"trainer {trainer.name}: its parameters are not checked, a dry run starts no program")
        return None
    from strata.base.describe import FLAG

    warn(f"asking trainer {trainer.name} for its parameters: {' '.join(trainer.command)} {FLAG}")
    found, problem = _describe_in_copy(folder, bundle, trainer)
    if problem:
        warn(f"trainer {trainer.name}: its parameters are not checked now, only when it runs: {problem}")
    return found


def calls_handle_describe(folder: Path, trainer: TrainerSpec) -> bool:
    """Says whether a file that the command names, or the module behind its `-m`, calls `handle_describe`."""
    words = trainer.command
    modules = [module.replace(".", "/") for before, module in itertools.pairwise(words) if before == "-m"]
    names = [*words, *(f"{module}{end}" for module in modules for end in (".py", "/__main__.py"))]
    return any(_has_call(folder / name) for name in names if not Path(name).is_absolute())


def _has_call(path: Path) -> bool:
    import ast
    import warnings

    try:
        if not path.is_file() or path.stat().st_size > _MAX_PROGRAM:
            return False
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nodes = list(ast.walk(ast.parse(path.read_bytes())))
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return False
    imported = [each for node in nodes if isinstance(node, ast.ImportFrom) for each in node.names]
    names = {_ENTRY} | {each.asname for each in imported if each.name == _ENTRY and each.asname}
    called = [node.func for node in nodes if isinstance(node, ast.Call)]
    return any(
        (isinstance(each, ast.Name) and each.id in names) or (isinstance(each, ast.Attribute) and each.attr == _ENTRY)
        for each in called
    )


def _describe_in_copy(folder: Path, bundle: Bundle | None, trainer: TrainerSpec) -> tuple[Any, str]:
    """The JSON Schema that the trainer prints for `--describe` in a copy of its folder, or why there is none.

    The copy is of `bundle`, where the folder goes along in one.
    """
    from strata.sdk.bundle import make_bundle

    with tempfile.TemporaryDirectory(prefix="strata-describe-") as copy:
        try:
            (bundle or make_bundle(folder)).unpack(Path(copy))
        except StrataError as error:
            return None, error.message
        return _run_describe(Path(copy), trainer)


def _run_describe(folder: Path, trainer: TrainerSpec) -> tuple[Any, str]:
    import json

    from strata.base.describe import FLAG
    from strata.base.settings import process_environment
    from strata.fleet.core.job_command import inherited_by_jobs, job_command

    words = [*job_command(trainer, sys.executable), FLAG]
    if trainer.venv and not trainer.interpreter and words[0].startswith("python"):
        words[0] = str(Path(trainer.venv) / "bin" / words[0])
    try:
        done = subprocess.run(
            words,
            cwd=folder,
            env=inherited_by_jobs(process_environment()) | dict(trainer.env) | {"PYTHONDONTWRITEBYTECODE": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=DESCRIBE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None, f"{FLAG} took more than {DESCRIBE_S:.0f} s"
    except OSError as error:
        return None, f"{words[0]}: {error.strerror}"
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        return None, f"{FLAG} failed: {said[-1] if said else f'status {done.returncode}'}"
    try:
        found = json.loads(done.stdout)
    except ValueError:
        found = None
    return (found, "") if isinstance(found, dict) else (None, f"{FLAG} printed no JSON Schema")
