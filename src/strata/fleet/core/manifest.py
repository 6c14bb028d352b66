"""The training manifest: one TOML file that says how jobs are run, who may run them, and what there is to do.

`project` says whose it is, `[trainers.NAME]` how, `[hosts.NAME]` who, `[[jobs]]` and `[[sweeps]]` what. Reading is all
or nothing, and reports every problem at once, each with file, line and path. Nothing here opens a file: the schemas of
hyper-parameters and the digests of code and data are read by the caller, who learns from `peek_trainers` which ones
there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from strata.base import toml
from strata.base.errors import Code, StrataError
from strata.fleet.core.hyper import Schema
from strata.fleet.core.jobspec import DEFAULT_PROJECT, HostSpec, JobSpec, TrainerSpec
from strata.fleet.core.manifest_jobs import Context, read_jobs
from strata.fleet.core.manifest_tables import read_hosts, read_trainers
from strata.fleet.core.problems import Problems, read_fields
from strata.fleet.core.requirement import Name

MAX_BYTES: Final = 16 * 1024 * 1024
_TABLES: Final = ("trainers", "hosts", "jobs", "sweep", "sweeps")


class Digests(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the source and the data of a trainer are just now; only asked for by `retrain_on`."""

    code: str = ""
    data: str = ""


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    source: str
    project: str = DEFAULT_PROJECT
    """Whose trainers and jobs these are. It is written in the file and never follows from the name of a folder."""
    trainers: dict[str, TrainerSpec] = {}
    hosts: dict[str, HostSpec] = {}
    jobs: dict[str, JobSpec] = {}
    """By id, in the order of the file, sweeps last."""


def read_manifest(
    text: str,
    source: str,
    *,
    schemas: Mapping[str, Schema] | None = None,
    digests: Mapping[str, Digests] | None = None,
) -> Manifest:
    """The manifest, or one INVALID error with all that is wrong. `schemas` and `digests` are by trainer."""
    document = _parsed(text, source)
    problems = Problems(document)
    data = document.data
    own: dict[str, Any] = dict.fromkeys(_TABLES, Any)
    own["retrain_on"] = tuple[Literal["code", "data"], ...]
    own["project"] = Name
    fields = read_fields(problems, (), data, own)
    trainers = read_trainers(problems, data.get("trainers", {}))
    hosts = read_hosts(problems, data.get("hosts", {}))
    context = Context(
        problems=problems,
        project=fields.get("project", DEFAULT_PROJECT),
        trainers=trainers,
        trainer_names=tuple(data["trainers"]) if isinstance(data.get("trainers"), dict) else (),
        retrain_on=fields.get("retrain_on", ()),
        schemas=schemas or {},
        code={name: each.code for name, each in (digests or {}).items()},
        data={name: each.data for name, each in (digests or {}).items()},
    )
    jobs = read_jobs(context, data)
    problems.raise_any()
    return Manifest(source=source, project=context.project, trainers=trainers, hosts=hosts, jobs=jobs)


def peek_trainers(text: str, source: str) -> dict[str, TrainerSpec]:
    """The trainers that can be read, whatever is wrong elsewhere: whose schemas and digests to fetch for the rest."""
    document = _parsed(text, source)
    return read_trainers(Problems(document), document.data.get("trainers", {}))


def peek_project(text: str, source: str) -> str:
    """The project of a manifest that may have other problems; a name that is none is reported by `read_manifest`."""
    named = _parsed(text, source).data.get("project", DEFAULT_PROJECT)
    return named if isinstance(named, str) else DEFAULT_PROJECT


def _parsed(text: str, source: str) -> toml.Document:
    if len(text) > MAX_BYTES:
        raise StrataError(
            Code.INVALID, f"{source}: a manifest has at most {MAX_BYTES} characters, this one {len(text)}"
        )
    return toml.parse(text, source)
