"""The text of the manifest or the recipe that `strata init` writes: what it sets, what it offers as an option behind
`# `, and the spelling of names and values in TOML.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Final

from strata.sdk.bundle import MAX_BYTES
from strata.sdk.init.findings import FolderFindings, script_command
from strata.sdk.init.scripts import ParameterValue, ScriptFacts, ScriptParameter
from strata.sdk.recipes.recipe import recipe_text

MANIFEST: Final = "manifest.toml"
RECIPE: Final = "recipe.toml"
_MAX_LISTED: Final = 8
_COLUMN: Final = 28
"""Where the comments behind values begin."""


def manifest_text(found: FolderFindings) -> str:
    """The manifest for the script of a folder. What is behind `# ` and has a `=` or is a header, is an option."""
    script = found.script
    assert script is not None
    lines = [
        f"# A first manifest of {found.name}. A line such as # seed = 1 is an option: take the # away to use it.",
        f"# Next: strata apply {MANIFEST}. Every key: docs/fleet-manifest.md, etc/training_manifest.toml.example.",
        *_script_notes(found, script),
        "",
        "[trainers.default]",
        _commented(f"command = {_toml(list(script_command(script.path)))}", found.reason),
        _commented('directory = "."', "goes to the hosts, without what .strataignore or else .gitignore names"),
        _commented('# secrets = ["HF_TOKEN"]', "set by: strata secrets set HF_TOKEN"),
        *_environment(found),
        *_size_note(found),
        "",
        "# [trainers.default.env]",
        '# OMP_NUM_THREADS = "4"',
        "",
        "[[jobs]]",
        f"name = {_toml(found.name)}",
        f"model = {_toml(found.name)}",
        *_hyper(script),
        *_needs(script),
        _commented("# seed = 1", "another seed is another job"),
        _commented("# max_attempts = 1", "do not try again after an error of the script"),
        _commented("# timeout_s = 14400", "of one attempt"),
        _commented('# not_before = "+2h"', "or a time"),
        *_gang(script),
        *_sweep(found.name, script),
    ]
    return "\n".join(lines) + "\n"


def recipe_file_text(found: FolderFindings) -> str:
    """The recipe for the rows of a folder: the example of its kind with the folder's own paths."""
    rows = found.rows[0]
    title, *lines = recipe_text(rows.kind).rstrip("\n").split("\n")
    others = [each.path for each in found.rows[1:]]
    written = [
        f"{title.partition(':')[0]}: strata train {RECIPE}",
        f"# {_shown([rows.path])}: rows with {' and '.join(rows.columns)}.",
        *([f"# Other data of this folder: {_shown(others)}."] if others else []),
    ]
    section = ""
    for line in lines:
        section = line if line.startswith("[") else section
        written += _recipe_lines(found, section, line)
    return "\n".join(written) + "\n"


def _recipe_lines(found: FolderFindings, section: str, line: str) -> list[str]:
    if section == "[model]" and line.startswith("path = "):
        model = [_with_value(line, found.model)] if found.model else [line]
        return model + ([f"# start = {_toml(_recipe_path(found.adapter))}"] if found.adapter else [])
    if section == "[model]" and line.startswith("# start = ") and found.adapter:
        return []
    if section == "[data]" and line.startswith("path = "):
        return [_with_value(line, found.rows[0].path)]
    if section == "[eval]" and line.startswith("share = ") and found.held_out:
        return [f"path = {_toml(_recipe_path(found.held_out))}"]
    return [line]


def _with_value(line: str, path: str) -> str:
    """A line of the example with another path, and its own comment."""
    comment = re.fullmatch(r'path = "[^"]*"\s*(?:# (.*))?', line)
    assert comment is not None, line
    value = f"path = {_toml(_recipe_path(path))}"
    return _commented(value, comment[1]) if comment[1] else value


def _recipe_path(path: str) -> str:
    # A recipe reads `~` as the home folder.
    return f"./{path}" if path.startswith("~") else path


def _script_notes(found: FolderFindings, script: ScriptFacts) -> Iterator[str]:
    if script.problem:
        yield f"# {script.path} was not looked into: {script.problem}."
    if found.other_scripts:
        yield f"# Other scripts of this folder: {_shown(found.other_scripts)}."
    if found.notebooks:
        yield f"# No job runs a notebook: {_shown(found.notebooks)}."


def _size_note(found: FolderFindings) -> Iterator[str]:
    if found.size > MAX_BYTES:
        yield ""
        yield f"# This folder has {found.size >> 20} MiB, and at most {MAX_BYTES >> 20} MiB are sent: name data in"
        yield "# .strataignore, send it by 'strata data push', and name it here:"
        yield "# [trainers.default.data]"
        yield '# dataset = "strata:dataset"'


def _environment(found: FolderFindings) -> Iterator[str]:
    packages = found.packages
    yield ""
    if packages is None:
        yield "# No file of this folder lists packages, so the host's own Python runs the script."
        yield "# [trainers.default.environment]"
        yield '# file = "requirements.txt"'
        yield '# python = "3.12"'
        return
    yield "[trainers.default.environment]"
    yield _commented(f"file = {_toml(packages.path)}", "the host installs these packages with uv")
    yield _commented(f"# python = {_toml(packages.python or '3.12')}", "a version that the host has")
    if packages.extras:
        yield f"# extras = {_toml([*packages.extras[:_MAX_LISTED]])}"
    if packages.groups:
        yield f"# groups = {_toml([*packages.groups[:_MAX_LISTED]])}"


def _hyper(script: ScriptFacts) -> Iterator[str]:
    flags = [each for each in script.parameters if each.flag]
    required = [each.flag for each in flags if each.required]
    if required:
        yield f"# The script requires arguments: add them to its command ({_shown(required)})."
    if flags and not script.reads_hyper:
        yield "# The script has flags: write them into its command, or let it take values of each job by"
        yield "# parser.set_defaults(**hyper()), with hyper from strata.fleet.trainer:"
    values = [each for each in script.parameters if each.value is not None]
    if values:
        inner = ", ".join(f"{each.name} = {_toml(each.value)}" for each in values if each.value is not None)
        yield f"# hyper = {{ {inner} }}"
    elif script.parameters:
        yield f"# hyper = {{ {script.parameters[0].name} = 1 }}"
    elif not script.reads_hyper:
        yield _commented("# hyper = { learning_rate = 0.001 }", "the script reads it by strata.fleet.trainer.hyper()")
    unset = [each.name for each in script.parameters if each.value is None and not each.required]
    if unset:
        yield f"# Parameters without a default: {_shown(unset)}."


def _needs(script: ScriptFacts) -> Iterator[str]:
    if script.uses_cuda and script.checks_cuda:
        yield _commented("prefer_cuda = true", "it uses CUDA where there is a GPU")
        yield _commented("# min_gpus = 1", "only on a host with a GPU")
    elif script.uses_cuda:
        yield _commented("min_gpus = 1", "it uses CUDA")
    else:
        yield "# min_gpus = 1"
    if script.uses_cuda:
        yield _commented("# min_vram_gib = 16", "of each GPU")
    yield _commented("# min_ram_gib = 4", "what a job declares it takes; else it takes the whole host")
    yield "# min_cores = 2"


def _gang(script: ScriptFacts) -> Iterator[str]:
    if not script.uses_distributed:
        return
    if script_command(script.path)[1] == "-m":
        yield "# The script trains with several processes. A gang needs a command such as python FILE, and no -m."
        return
    yield "# The script trains with several processes: as a gang, torchrun starts it once for each worker."
    yield "# workers = 2"
    yield _commented("# workers_per_host = 2", "all on one host; with 1 on two hosts")


def _sweep(name: str, script: ScriptFacts) -> Iterator[str]:
    axis = next((each for each in script.parameters if _is_scale(each)), None)
    if axis is None or not script.reads_hyper:
        return
    value = axis.value
    assert isinstance(value, int | float)
    points: list[ParameterValue] = [value * 2, value * 4] if isinstance(value, int) else [value / 2, value * 2]
    yield ""
    yield "# [[sweeps]]"
    yield _commented(f"# name = {_toml(f'{name[:50]}-{axis.name[:8]}')}", "a job for each value")
    yield f"# model = {_toml(name)}"
    yield f"# grid = {{ {axis.name} = {_toml(points)} }}"


def _is_scale(parameter: ScriptParameter) -> bool:
    """Says whether twice its value makes sense."""
    value = parameter.value
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e6


def _commented(line: str, comment: str) -> str:
    return f"{line:<{_COLUMN}}  # {comment}"


def _toml(value: ParameterValue) -> str:
    """A value as TOML. Names of files and texts of scripts are printable, so the strings of JSON are those of TOML."""
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False)


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more
