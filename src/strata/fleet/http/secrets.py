"""Routes of secrets of owners and projects: set, list, remove; who may see them; and which values go out in the lease
of a job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from strata.base.errors import Code, StrataError
from strata.fleet.core.jobspec import TrainerSpec
from strata.fleet.core.plan import ApplyPlan
from strata.fleet.http.context import HubCall, HubContext, named_in_path, submitter_of
from strata.fleet.wire.owners import SecretName, SecretQuery, SecretRequest, SecretsReply, StoredSecretReply

_OWNER: Final = "owner:"
_PROJECT: Final = "project:"


async def put(call: HubCall, query: SecretQuery, body: SecretRequest) -> None:
    """Set a secret: for the caller's own jobs, or by the owner of a project or an operator for all jobs of it."""
    context = call.context
    name = _name(call)
    if query.project:
        # A project without an owner becomes the caller's: else the next person to use it would get the value.
        plan, submitter = ApplyPlan(project=query.project), submitter_of(call)
        await context.fleet.jobs.apply(plan, call.actor, source="secret", declared=False, submitter=submitter)
    scope = await _scope(call, query)
    await context.secrets.put(scope, name, body.value, actor=call.actor, now_s=context.fleet.now_s())


async def listed(call: HubCall, query: SecretQuery) -> SecretsReply:
    """The names of the caller's own secrets, or of those of a project, for its owner and operators."""
    scope = await _scope(call, query)
    return SecretsReply(
        secrets=tuple(
            StoredSecretReply(
                name=each.name, project=query.project, changed_at_s=each.changed_at_s, changed_by=each.changed_by
            )
            for each in await call.context.secrets.names([scope])
        )
    )


async def remove(call: HubCall, query: SecretQuery) -> None:
    """Remove a secret; jobs that name it cannot start any more."""
    name = _name(call)
    if not await call.context.secrets.remove(await _scope(call, query), name):
        raise StrataError(Code.NOT_FOUND, f"there is no secret {name}", hint="strata secrets list")


async def for_lease(context: HubContext, job_id: str, trainer: TrainerSpec | None) -> Mapping[str, str]:
    """The values that the trainer of a job names: those of the job's owner first, then those of its project."""
    if trainer is None or not trainer.secrets:
        return {}
    row = await context.fleet.store.jobs.get(job_id)
    return await context.secrets.reveal(_scopes(row.owner, row.spec.project), trainer.secrets)


async def check_secrets(context: HubContext, owner: str, project: str, names: Sequence[str]) -> None:
    """PRECONDITION if a job of this owner would not get one of these."""
    if not names:
        return
    known = {each.name for each in await context.secrets.names(_scopes(owner, project))}
    for name in names:
        if name not in known:
            raise StrataError(
                Code.PRECONDITION, f"there is no secret {name} for this job", hint=f"strata secrets set {name}"
            )


def _scopes(owner: str, project: str) -> tuple[str, str]:
    return f"{_OWNER}{owner}", f"{_PROJECT}{project}"


async def _scope(call: HubCall, query: SecretQuery) -> str:
    if not query.project:
        return f"{_OWNER}{call.caller.owner}"
    owner = (await call.context.fleet.store.owners.projects()).get(query.project, "")
    if not submitter_of(call).may_change(owner):
        raise StrataError(
            Code.FORBIDDEN,
            f"the project {query.project!r} belongs to {owner or 'all'}",
            hint="only its owner or an operator may see and change its secrets",
        )
    return f"{_PROJECT}{query.project}"


def _name(call: HubCall) -> str:
    return named_in_path(
        call, SecretName, "the name of a secret is that of a variable: letters, digits and _, not STRATA_"
    )
