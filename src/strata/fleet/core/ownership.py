"""Who owns jobs and projects and who may change them: reserved names of owners, at most 100 projects of one owner, and
the wording of refusals.

An owner is a person or a program by name: the name of the API key, so that a renewed key keeps its jobs. A project
belongs to the owner who used it first. Operators may change everything; others change their own jobs, and apply
manifests to projects of their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from strata.base.errors import Code, StrataError
from strata.fleet.core.jobspec import DEFAULT_PROJECT, MIN_IDLE_S, JobSpec
from strata.fleet.core.quota import EVERYBODY


class Submitter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The person or program for whom a plan is applied."""

    owner: str
    operator: bool = False
    """May change the jobs, projects and host policies of all owners."""

    def may_change(self, owner: str) -> bool:
        return self.operator or owner == self.owner


MAX_PROJECTS: Final = 100
"""The most projects of an owner who is no operator."""
OPERATOR: Final = Submitter(owner="operator", operator=True)
"""Owns the jobs that were queued with the operator token."""


def check_owner_name(name: str) -> None:
    """INVALID for a key that would own what belongs to others: the operator token's jobs, or the quota of everybody."""
    if name in (OPERATOR.owner, EVERYBODY) or ":" in name:
        raise StrataError(
            Code.INVALID,
            f"a key cannot be called {name!r}: its name is the owner of its jobs",
            hint=f"choose a name other than {OPERATOR.owner} and {EVERYBODY}, without a colon",
        )


def check_project(submitter: Submitter, project: str, owner: str) -> None:
    """FORBIDDEN unless the submitter may apply a manifest to `project`; `owner` is empty for a project without one."""
    if submitter.operator or (project != DEFAULT_PROJECT and owner in ("", submitter.owner)):
        return
    if project == DEFAULT_PROJECT:
        message, hint = "the project 'default' belongs to all", 'write project = "NAME" into the manifest'
    else:
        message, hint = f"the project {project!r} belongs to {owner}", "choose another name for the project"
    raise StrataError(Code.FORBIDDEN, f"{message}; only an operator may apply a manifest to it", hint=hint)


def check_project_count(submitter: Submitter, owned: int) -> None:
    """EXHAUSTED if one more project would be too many: a name that is taken is lost for all others."""
    if not submitter.operator and owned >= MAX_PROJECTS:
        raise StrataError(
            Code.EXHAUSTED,
            f"{submitter.owner} has {owned} projects, and no more are possible",
            hint="use one of them, or ask an operator to apply the first manifest",
        )


def check_submission(submitter: Submitter, project: str, owner: str) -> None:
    """FORBIDDEN unless the submitter may queue single jobs in `project`: all may do so in the default project."""
    if project != DEFAULT_PROJECT:
        check_project(submitter, project, owner)


def check_servers(submitter: Submitter, specs: Iterable[JobSpec]) -> None:
    """FORBIDDEN if one of these jobs is a server and the submitter no operator: all who train send their data to it.

    INVALID if it would sleep before it is up.
    """
    for spec in specs:
        if spec.kind == "server" and not submitter.operator:
            raise StrataError(
                Code.FORBIDDEN,
                f"{spec.label} is a server, and only an operator may queue one",
                hint="it gets the requests and the data of all who train",
            )
        if 0 < spec.idle_s < MIN_IDLE_S:
            raise StrataError(
                Code.INVALID,
                f"idle_s of {spec.label} is {spec.idle_s:g}; a server sleeps after {MIN_IDLE_S:g} s or more",
                hint="0 means that it never sleeps",
            )


def check_owners(submitter: Submitter, jobs: Iterable[tuple[str, str]]) -> None:
    """FORBIDDEN if one of these jobs, given as label and owner, is another owner's."""
    for label, owner in jobs:
        if not submitter.may_change(owner):
            raise foreign(label, owner)


def foreign(label: str, owner: str) -> StrataError:
    """FORBIDDEN for what belongs to another owner."""
    return StrataError(
        Code.FORBIDDEN,
        f"{label} belongs to {owner or 'nobody'}",
        hint="only its owner or an operator may change it",
    )
