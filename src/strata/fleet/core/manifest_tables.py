"""Reads `[trainers.NAME]` and `[hosts.NAME]` of a manifest: their keys, one source each, checks of git commits, and
refusal of variables that look like secrets.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from strata.fleet.core.jobspec import Bundle, Commit, DataSource, HostSpec, Text, TrainerSpec, parse_quiet_hours
from strata.fleet.core.problems import KeyPath, Problems, describe_value, fits, kinds_of, read_fields, table_at
from strata.fleet.core.requirement import NAME_RULE, Label, Name

_SOURCES: Final = ("directory", "git", "bundle")
_TRAINER: Final = kinds_of(TrainerSpec, without=("name", "data")) | {"data": dict[Label, Text | DataSource]}
_HOST: Final = kinds_of(HostSpec, without=("name", "quiet_hours")) | {"quiet_hours": tuple[Text, ...]}
_SECRET_WORDS: Final = ("TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL", "API_KEY", "APIKEY", "PRIVATE_KEY")


def read_trainers(problems: Problems, value: Any) -> dict[str, TrainerSpec]:
    trainers = {}
    for name, place, table in _named_tables(problems, "trainers", value):
        before = len(problems)
        fields = read_fields(problems, place, table, _TRAINER, required=("command",))
        _check_source(problems, place, table)
        _check_env(problems, place, table.get("env"))
        if fields.get("command") == ():
            problems.add((*place, "command"), 'expected at least one word, as in ["python", "train.py"]')
        if "interpreter" in table and "venv" in table:
            problems.add((*place, "venv"), "interpreter is given too; only one of them can be meant")
        if "environment" in table and ("interpreter" in table or "venv" in table):
            problems.add((*place, "environment"), "it installs a Python of its own: leave interpreter and venv out")
        fields["data"] = {
            key: DataSource(source=each) if isinstance(each, str) else each
            for key, each in fields.get("data", {}).items()
        }
        if len(problems) == before:
            trainers[name] = TrainerSpec(name=name, **fields)
    return trainers


def _check_source(problems: Problems, place: KeyPath, table: dict[str, Any]) -> None:
    given = [key for key in _SOURCES if key in table]
    if len(given) != 1:
        at = (*place, given[1]) if given else place
        problems.add(at, f"expected exactly one of {', '.join(_SOURCES)}, to say where the source comes from")
    _check_commit(problems, place, table)
    bundle = table.get("bundle")
    if isinstance(bundle, str) and not fits(bundle, Bundle):
        problems.add(
            (*place, "bundle"), f"expected the digest or the artifact of an upload, found {describe_value(bundle)}"
        )


def _check_commit(problems: Problems, place: KeyPath, table: dict[str, Any]) -> None:
    commit = table.get("commit")
    if "git" in table and commit is None:
        problems.add((*place, "git"), "commit is required with git: a branch would be another code tomorrow")
    if commit is not None and "git" not in table:
        problems.add((*place, "commit"), "there is no git repository it could be of")
    if isinstance(commit, str) and not (commit and fits(commit, Commit)):
        problems.add((*place, "commit"), f"expected the full hash of a commit, found {describe_value(commit)}")


def _check_env(problems: Problems, place: KeyPath, env: Any) -> None:
    for name in env if isinstance(env, dict) else ():
        problem = env_problem(name)
        if problem:
            problems.add((*place, "env", name), problem)


def env_problem(name: str) -> str:
    """Says why a trainer may not set this environment variable; empty if it may."""
    if not (name.isidentifier() and name.isascii()):
        return "expected letters, digits and _"
    if name.startswith("STRATA_"):
        return "names that begin with STRATA_ belong to the agent"
    if any(word in name.upper() for word in _SECRET_WORDS) and not name.upper().endswith(("_FILE", "_PATH")):
        # The manifest is stored, shown and logged, and what is in a child's environment is in its children's too.
        return f'it looks like a secret: "strata secrets set {name}", and secrets = ["{name}"] in its place'
    return ""


def read_hosts(problems: Problems, value: Any) -> dict[str, HostSpec]:
    hosts = {}
    for name, place, table in _named_tables(problems, "hosts", value):
        before = len(problems)
        fields = read_fields(problems, place, table, _HOST)
        quiet = []
        for index, text in enumerate(fields.get("quiet_hours", ())):
            hours = parse_quiet_hours(text)
            if hours is None:
                expected = 'expected hours like "22:00-07:00" or "mon-fri,sun 09:00-17:30"'
                problems.add((*place, "quiet_hours", index), f"{expected}, found {describe_value(text)}")
            else:
                quiet.append(hours)
        if len(problems) == before:
            hosts[name] = HostSpec(name=name, **fields | {"quiet_hours": tuple(quiet)})
    return hosts


def _named_tables(problems: Problems, section: str, value: Any) -> Iterator[tuple[str, KeyPath, dict[str, Any]]]:
    """The tables `[section.NAME]`; a name that is none is a problem."""
    for name, inner in (table_at(problems, (section,), value) or {}).items():
        place = (section, name)
        if not fits(name, Name):
            problems.add(place, f"expected {NAME_RULE}")
            continue
        table = table_at(problems, place, inner)
        if table is not None:
            yield name, place, table
