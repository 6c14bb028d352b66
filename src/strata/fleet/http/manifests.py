"""Routes of manifests: plan, apply, reload the hub's own file, list trainers; limits of the schemas sent along (64 KiB
each, 4 MiB in all).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from strata.base.errors import Code, StrataError
from strata.base.secret import MASK
from strata.fleet.core.hyper import HyperSchema
from strata.fleet.core.jobspec import TrainerSpec, qualified_trainer
from strata.fleet.core.manifest import (
    MAX_BYTES,
    MAX_SOURCE,
    JobManifest,
    ManifestDraft,
    parse_manifest,
    validate_manifest,
)
from strata.fleet.core.ownership import Submitter
from strata.fleet.core.plan import ApplyOptions, ApplyPlan
from strata.fleet.core.requirement import with_sandbox
from strata.fleet.http.context import HubCall, HubContext, submitter_of
from strata.fleet.http.quotas import check_stored_bytes
from strata.fleet.http.secrets import check_secrets
from strata.fleet.http.validation import Checkpoint
from strata.fleet.records import StoredSchedule, StoredSweep
from strata.fleet.wire.manifests import (
    ManifestReply,
    ManifestRequest,
    PlannedChange,
    PlannedJob,
    Trainer,
    TrainersReply,
)
from strata.http.disconnect import until_disconnect
from strata.identity.roles import Role

MAX_SCHEMA: Final = 64 * 1024
MAX_SCHEMAS: Final = 4 * 1024 * 1024
"""Bytes as JSON, of one schema and of all of one manifest."""


async def apply(call: HubCall, body: ManifestRequest) -> ManifestReply:
    """Show what a manifest would change, and change it unless it is a dry run."""
    context = call.context
    manifest = body.manifest
    _check_named(manifest.trainers, body.schemas)
    schemas = await _schemas(context, manifest.project, manifest.trainers, body.schemas)

    def check(checkpoint: Checkpoint) -> None:
        _check_sizes(body.schemas)
        validate_manifest(manifest, _compile(schemas, checkpoint))

    # A manifest may have 200,000 jobs, each with an id to compute: other callers are served meanwhile.
    await until_disconnect(call, context.stopping, context.validation.run(call.caller.owner, check))
    return await _apply(call, body)


async def reload(call: HubCall) -> ManifestReply:
    """Apply the manifest that the hub was configured with, as it is now."""
    context = call.context
    if context.manifest is None:
        raise StrataError(
            Code.PRECONDITION, "this hub has no manifest of its own", hint="set hub.manifest, or use strata apply"
        )
    draft, declared = await asyncio.to_thread(_read, context.manifest)
    schemas = await _schemas(context, draft.project, draft.trainers, declared)

    def resolve(checkpoint: Checkpoint) -> JobManifest:
        _check_sizes(declared)
        return draft.resolve(schemas=_compile(schemas, checkpoint))

    manifest = await until_disconnect(call, context.stopping, context.validation.run(call.caller.owner, resolve))
    path = await asyncio.to_thread(context.manifest.resolve)
    manifest = msgspec.structs.replace(manifest, source=str(path)[-MAX_SOURCE:])
    return await _apply(call, ManifestRequest(manifest=manifest, schemas=declared))


async def trainers(call: HubCall) -> TrainersReply:
    """Returns how jobs are run, and the hyper-parameters that each trainer takes; values of `env` for operators
    only."""
    context = call.context
    params = await context.schemas.schemas()
    specs = {
        qualified_trainer(project, name): each
        for (project, name), each in (await context.fleet.store.plans.trainers()).items()
    }
    return TrainersReply(
        trainers={
            name: Trainer(spec=_for_caller(call, each.spec), digest=each.digest, params=_raw(params.get(name)))
            for name, each in sorted(specs.items())
        }
    )


def _for_caller(call: HubCall, spec: TrainerSpec) -> TrainerSpec:
    """People put credentials into `env`, whatever the documents say: only operators read the values."""
    if call.caller.role is not None and call.caller.role >= Role.OPERATOR:
        return spec
    return msgspec.structs.replace(spec, env=dict.fromkeys(spec.env, MASK))


async def _schemas(
    context: HubContext, project: str, trainers: Collection[str], given: Mapping[str, Any]
) -> dict[str, Any]:
    """The schemas of these trainers: those that came with the manifest, else those of an earlier one as JSON."""
    keys = {qualified_trainer(project, name): name for name in trainers if name not in given}
    stored = await context.schemas.schemas(keys) if keys else {}
    return {keys[key]: msgspec.Raw(encoded) for key, encoded in stored.items()} | dict(given)


def _raw(encoded: bytes | None) -> msgspec.Raw | None:
    """Returns the bytes as they are in a reply: whoever lists all trainers has none of their schemas decoded."""
    return None if encoded is None else msgspec.Raw(encoded)


def _check_named(trainers: Collection[str], schemas: Collection[str]) -> None:
    for name in schemas:
        if name not in trainers:
            raise StrataError(Code.INVALID, f"schemas.{name[:100]}: the manifest has no trainer of this name")


def _check_sizes(schemas: Mapping[str, Any]) -> None:
    """Checks sizes in a thread: encoding them takes time in proportion to the body."""
    total = 0
    for name, schema in schemas.items():
        size = len(msgspec.json.encode(schema))
        total += size
        if size > MAX_SCHEMA:
            raise StrataError(Code.INVALID, f"schemas.{name}: it takes {size} bytes as JSON, and at most {MAX_SCHEMA}")
    if total > MAX_SCHEMAS:
        raise StrataError(Code.INVALID, f"the schemas take {total} bytes as JSON, and at most {MAX_SCHEMAS} together")


def _compile(schemas: Mapping[str, Any], checkpoint: Checkpoint) -> dict[str, HyperSchema]:
    return {
        name: HyperSchema(
            msgspec.json.decode(schema) if isinstance(schema, msgspec.Raw) else schema,
            source=f"schema of {name}",
            checkpoint=checkpoint,
        )
        for name, schema in schemas.items()
    }


async def _apply(call: HubCall, body: ManifestRequest) -> ManifestReply:
    context = call.context
    manifest = _with_sandbox(context, body.manifest)
    _check_gangs(context, manifest)
    for trainer in manifest.trainers.values():
        await check_secrets(context, call.caller.owner, manifest.project, trainer.secrets)
        await context.leased.check_inputs(trainer)
    options = ApplyOptions(accept=body.accept, retrain=body.retrain, take_over=body.take_over)
    submitter = submitter_of(call)
    due = await context.schedules.check(manifest.project, manifest.schedules, submitter)
    plan = await context.fleet.jobs.plan_manifest(manifest, options, submitter)
    sweeps = _sweeps(manifest, plan, str(call.actor), submitter)
    stopped = await context.sweeps.check(sweeps, plan, manifest.source, take_over=body.take_over)
    new = {job_id: spec for job_id, spec in plan.new.items() if spec.sweep not in stopped}
    plan = msgspec.structs.replace(plan, new=new)
    if plan.new or plan.requeued:
        await check_stored_bytes(call)
    if not body.dry_run:
        if body.schemas:
            schemas = {qualified_trainer(manifest.project, name): schema for name, schema in body.schemas.items()}
            await context.schemas.put_schemas(schemas)
        await context.fleet.jobs.apply(plan, call.actor, source=manifest.source, submitter=submitter)
        await context.sweeps.declare(sweeps, take_over=body.take_over)
        digests = _digests(plan)
        schedules = {
            name: StoredSchedule(
                schedule=schedule,
                trainer=digests.get(schedule.base.trainer, ""),
                actor=str(call.actor),
                submitter=submitter,
            )
            for name, schedule in manifest.schedules.items()
        }
        await context.schedules.declare(manifest.project, schedules)
    return _manifest_reply(plan, due, stopped, applied=not body.dry_run)


def _sweeps(manifest: JobManifest, plan: ApplyPlan, actor: str, submitter: Submitter) -> list[StoredSweep]:
    """All sweeps that the manifest names: those that search, and those whose points are jobs of it."""
    names = dict.fromkeys([*(spec.sweep for spec in manifest.jobs.values() if spec.sweep), *manifest.searches])
    digests, searches = _digests(plan), manifest.searches
    return [
        StoredSweep(
            project=manifest.project,
            name=name,
            source=manifest.source,
            sweep=searches.get(name),
            trainer=digests.get(searches[name].base.trainer, "") if name in searches else "",
            actor=actor,
            submitter=submitter,
        )
        for name in names
    ]


def _digests(plan: ApplyPlan) -> Mapping[str, str]:
    """Returns what the names of the manifest's trainers stand for once it is applied."""
    return plan.seen | {name: spec.digest for name, spec in plan.trainers.items()}


def _check_gangs(context: HubContext, manifest: JobManifest) -> None:
    if context.coordinator is not None:
        return
    gangs = sorted({spec.gang.name for spec in manifest.jobs.values() if spec.gang is not None})
    if gangs:
        raise StrataError(
            Code.UNSUPPORTED,
            f"{gangs[0]} is a gang, and this hub has no coordinator for gangs",
            hint="start 'strata coordinator' and name it in [hub.coordinator] (address, token_secret, ca); with"
            " 'strata up' it is enough to install the extra coordinator: pip install 'strata-train[coordinator]'",
        )


def _with_sandbox(context: HubContext, manifest: JobManifest) -> JobManifest:
    """Adds the sandbox that this hub requires of the project's jobs; what a job needs of a host is not in its id."""
    if not context.require_sandbox:
        return manifest
    jobs = {
        job_id: msgspec.structs.replace(spec, needs=with_sandbox(spec.needs, context.require_sandbox, manifest.project))
        for job_id, spec in manifest.jobs.items()
    }
    return msgspec.structs.replace(manifest, jobs=jobs)


def _manifest_reply(
    plan: ApplyPlan, due: Mapping[str, float], stopped: Sequence[str], *, applied: bool
) -> ManifestReply:
    return ManifestReply(
        applied=applied,
        project=plan.project,
        summary=plan.summary(),
        new=tuple(PlannedJob(id=job_id, label=spec.label) for job_id, spec in plan.new.items()),
        changed=tuple(
            PlannedChange(id=each.job_id, label=each.spec.label, kinds=each.kinds, deferred=each.deferred)
            for each in plan.changed
        ),
        unchanged=len(plan.unchanged),
        orphaned=plan.orphaned,
        trainers=tuple(plan.trainers),
        takers=plan.takers,
        requeued=tuple(PlannedJob(id=job_id, label=spec.label) for job_id, spec in plan.requeued.items()),
        outdated=plan.outdated,
        hosts=tuple(plan.hosts),
        schedules=dict(due),
        stopped=tuple(stopped),
    )


def _read(path: Path) -> tuple[ManifestDraft, dict[str, Any]]:
    """The hub's own manifest, and the schemas that lie beside it, by trainer."""
    draft = parse_manifest(_text(path), path.name)
    return draft, {
        name: _schema(path.parent, trainer.params) for name, trainer in draft.trainers.items() if trainer.params
    }


def _schema(folder: Path, name: str) -> Mapping[str, Any]:
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise StrataError(Code.INVALID, f"{name}: the schema of a trainer lies beside the manifest")
    try:
        schema = json.loads(_text(path))
    except ValueError as error:
        raise StrataError(Code.INVALID, f"{name}: {error}") from None
    if not isinstance(schema, dict):
        raise StrataError(Code.INVALID, f"{name}: a JSON Schema is an object")
    return schema


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise StrataError(Code.INVALID, f"{path.name} is longer than {MAX_BYTES} bytes")
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StrataError(Code.PRECONDITION, f"the hub cannot read {path.name}: {error}") from None
