"""The manifest: planned, applied, or read again from the hub's own file."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from strata.base.digest import digest
from strata.base.errors import Code, StrataError
from strata.fleet import wire
from strata.fleet.core.hyper import Schema
from strata.fleet.core.jobspec import DEFAULT_PROJECT, TrainerSpec
from strata.fleet.core.manifest import MAX_BYTES, Digests, peek_project, peek_trainers
from strata.fleet.core.plan import ApplyOptions, Plan
from strata.fleet.http.context import Call, Site


async def apply(call: Call, body: wire.ManifestRequest) -> wire.ManifestReply:
    """Show what a manifest would change, and change it unless it is a dry run."""
    site = call.site
    return await _apply(site, call, body)


async def reload(call: Call) -> wire.ManifestReply:
    """Apply the manifest that the hub was configured with, as it is now."""
    site = call.site
    if site.manifest is None:
        raise StrataError(
            Code.PRECONDITION, "this hub has no manifest of its own", hint="set hub.manifest, or use strata apply"
        )
    return await _apply(site, call, await asyncio.to_thread(_read, site.manifest))


async def trainers(call: Call) -> wire.TrainersReply:
    """How jobs are run, and the hyper-parameters that each trainer takes."""
    site = call.site
    params = await site.schemas.schemas()
    found = {qualified(project, name): each for (project, name), each in (await site.fleet.store.trainers()).items()}
    return wire.TrainersReply(
        trainers={
            name: wire.Trainer(spec=each.spec, digest=each.digest, params=params.get(name))
            for name, each in sorted(found.items())
        }
    )


def qualified(project: str, trainer: str) -> str:
    """How the trainers of all projects are told apart; those of the default project go by their own names."""
    return trainer if project == DEFAULT_PROJECT else f"{project}/{trainer}"


async def _apply(site: Site, call: Call, wanted: wire.ManifestRequest) -> wire.ManifestReply:
    declared = peek_trainers(wanted.text, wanted.source)
    project = peek_project(wanted.text, wanted.source)
    given = {qualified(project, name): schema for name, schema in wanted.schemas.items()}
    known = {**await site.schemas.schemas(), **given}
    schemas = {
        name: Schema(known[key], source=f"schema of {name}")
        for name, key in ((name, qualified(project, name)) for name in declared)
        if key in known
    }
    digests = {name: _digests(spec) for name, spec in declared.items()} | wanted.digests
    options = ApplyOptions(accept=wanted.accept, retrain=wanted.retrain, take_over=wanted.take_over)
    plan = await site.fleet.plan_manifest(wanted.text, wanted.source, schemas=schemas, digests=digests, options=options)
    if not wanted.dry_run:
        if given:
            await site.schemas.put_schemas(given)
        await site.fleet.apply(plan, call.actor, source=wanted.source)
    return _told(plan, applied=not wanted.dry_run)


def _told(plan: Plan, *, applied: bool) -> wire.ManifestReply:
    return wire.ManifestReply(
        applied=applied,
        project=plan.project,
        summary=plan.summary(),
        new=tuple(wire.PlannedJob(id=job_id, label=spec.label) for job_id, spec in plan.new.items()),
        changed=tuple(
            wire.PlannedChange(id=each.job_id, label=each.spec.label, kinds=each.kinds, deferred=each.deferred)
            for each in plan.changed
        ),
        unchanged=len(plan.unchanged),
        orphaned=plan.orphaned,
        trainers=tuple(plan.trainers),
        takers=plan.takers,
        requeued=tuple(wire.PlannedJob(id=job_id, label=spec.label) for job_id, spec in plan.requeued.items()),
        outdated=plan.outdated,
        hosts=tuple(plan.hosts),
    )


def _digests(trainer: TrainerSpec) -> Digests:
    """What the manifest itself says of code and data; a directory may be anything tomorrow, so it says nothing."""
    data = {name: source.digest for name, source in trainer.data.items()}
    known = data and all(data.values())
    return Digests(code=trainer.commit or trainer.bundle, data=digest(data) if known else "")


def _read(path: Path) -> wire.ManifestRequest:
    text = _text(path)
    schemas: dict[str, Any] = {}
    for name, trainer in peek_trainers(text, path.name).items():
        if trainer.params:
            schemas[name] = _schema(path.parent, trainer.params)
    return wire.ManifestRequest(text=text, source=path.name, schemas=schemas)


def _schema(folder: Path, name: str) -> Mapping[str, Any]:
    place = folder / name
    if not place.resolve().is_relative_to(folder.resolve()):
        raise StrataError(Code.INVALID, f"{name}: the schema of a trainer lies beside the manifest")
    try:
        found = json.loads(_text(place))
    except ValueError as error:
        raise StrataError(Code.INVALID, f"{name}: {error}") from None
    if not isinstance(found, dict):
        raise StrataError(Code.INVALID, f"{name}: a JSON Schema is an object")
    return found


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise StrataError(Code.INVALID, f"{path.name} is longer than {MAX_BYTES} bytes")
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StrataError(Code.PRECONDITION, f"the hub cannot read {path.name}: {error}") from None
