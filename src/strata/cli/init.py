"""`strata init`: the choice between manifest and recipe, the check before it is written, and the lines printed."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from strata.base.errors import Code, StrataError
from strata.cli.output import print_error, printable, write

if TYPE_CHECKING:
    from strata.sdk.init.findings import FolderFindings


@click.command()
@click.argument(
    "folder", default=".", type=click.Path(path_type=Path, file_okay=False, exists=True), metavar="[FOLDER]"
)
@click.option("--recipe", is_flag=True, help="Write a recipe for the data, also if there is a script.")
def init(folder: Path, *, recipe: bool) -> None:
    """Write a first manifest or recipe from what FOLDER has.

    A folder with a script that trains gets manifest.toml, for 'strata apply'. One with rows to learn from and no script
    gets recipe.toml, for 'strata train'. Scripts are read and never run; links are not followed; a file that exists is
    not overwritten. Of several scripts it takes train.py, then main.py, then one with train or finetune in its name,
    then any with a __main__ guard, and of equal ones the nearest to the top; the file lists the others. Without any of
    these it takes the only script that does something. FOLDER is the current folder unless given.
    """
    from strata.fleet.core.manifest import parse_manifest
    from strata.sdk.init.findings import find_work
    from strata.sdk.init.folder_scan import create_file, scan_folder
    from strata.sdk.init.written_files import MANIFEST, RECIPE, manifest_text, recipe_file_text

    found = find_work(scan_folder(folder))
    for note in found.notes:
        print_error(f"strata: {note}")
    if found.script is not None and not recipe:
        path = folder / MANIFEST
        text = manifest_text(found)
        parse_manifest(text, str(path)).resolve()
    elif found.rows:
        path = folder / RECIPE
        text = recipe_file_text(found)
    else:
        _refuse(folder, found, recipe=recipe)
    create_file(path, text)
    for line in _describe(found):
        write(printable(f"found  {line}"))
    write(printable(f"wrote  {path}"))
    write(printable(f"next   strata {'apply' if path.name == MANIFEST else 'train'} {shlex.quote(str(path))}"))
    for line in _advise(found, folder, path, text):
        print_error(f"strata: {line}")


def _advise(found: FolderFindings, folder: Path, path: Path, text: str) -> Iterator[str]:
    """Yields what is to be done before the next command, and what else could be written."""
    from strata.base import toml

    model = toml.parse(text, str(path)).data.get("model")
    if isinstance(model, dict):
        if not found.model:
            yield f"the folder has no model: set model.path, or run 'strata models pull {model['path']}' first"
        return
    if found.script is not None and (required := [each.flag for each in found.script.parameters if each.required]):
        yield f"the script requires arguments: add {', '.join(required)} to the command in {path} first"
    if found.rows:
        yield f"'strata init {shlex.quote(str(folder))} --recipe' writes a recipe for the data"


def _describe(found: FolderFindings) -> Iterator[str]:
    """Yields what was found, a line each."""
    script = found.script
    if script is not None:
        facts = [found.reason]
        facts += [f"parameters {', '.join(each.name for each in script.parameters)}"] if script.parameters else []
        facts += ["uses CUDA"] if script.uses_cuda else []
        facts += ["trains with several processes"] if script.uses_distributed else []
        yield f"{script.path}: {'; '.join([*facts, *([script.problem] if script.problem else [])])}"
    if found.packages is not None:
        yield f"{found.packages.path}: packages"
    if found.model:
        yield f"{found.model}: a model"
    if found.adapter:
        yield f"{found.adapter}: an adapter"
    for rows in found.rows[:1]:
        yield f"{rows.path}: rows with {' and '.join(rows.columns)}"
    if found.held_out:
        yield f"{found.held_out}: rows to evaluate with"


def _refuse(folder: Path, found: FolderFindings, *, recipe: bool) -> NoReturn:
    """NOT_FOUND with what is missing, and what to do about it."""
    data = "a JSONL, JSON or Parquet file of rows with messages, or prompt and completion"
    if recipe:
        raise StrataError(Code.NOT_FOUND, f"{folder} has no data for a recipe", hint=f"add {data}")
    hint = f"add a train.py, or {data}; 'strata recipes show sft' prints a recipe"
    if found.notebooks:
        hint = f"make a script of the notebook: jupyter nbconvert --to script {shlex.quote(found.notebooks[0])}"
    elif found.model:
        hint = f"it has a model: add {data} to train it"
    raise StrataError(Code.NOT_FOUND, f"{folder} has no script that trains, and no data for a recipe", hint=hint)
