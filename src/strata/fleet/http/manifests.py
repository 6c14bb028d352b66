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
from strata.fleet.core.jobspec import TrainerSpec
from strata.fleet.core.manifest import MAX_BYTES, Digests, peek_trainers
from strata.fleet.core.plan import Plan
from strata.fleet.http.call import Call
from strata.fleet.http.site import Site


async def apply(site: Site, call: Call, body: wire.ManifestRequest) -> wire.ManifestReply:
    """Show what a manifest would change, and change it unless it is a dry run."""
    return await _apply(site, call, body)


async def reload(site: Site, call: Call) -> wire.ManifestReply:
    """Apply the manifest that the hub was configured with, as it is now."""
    if site.manifest is None:
        raise StrataError(
            Code.PRECONDITION, "this hub has no manifest of its own", hint="set hub.manifest, or use strata apply"
        )
    return await _apply(site, call, await asyncio.to_thread(_read, site.manifest))


async def trainers(site: Site, call: Call) -> wire.TrainersReply:
    """How jobs are run, and the hyper-parameters that each trainer takes."""
    del call
    params = await site.schemas.schemas()
    found = await site.fleet.store.trainers()
    return wire.TrainersReply(
        trainers={name: wire.Trainer(spec=spec, params=params.get(name)) for name, spec in sorted(found.items())}
    )


async def _apply(site: Site, call: Call, wanted: wire.ManifestRequest) -> wire.ManifestReply:
    declared = peek_trainers(wanted.text, wanted.source)
    known = {**await site.schemas.schemas(), **wanted.schemas}
    schemas = {name: Schema(known[name], source=f"schema of {name}") for name in declared if name in known}
    digests = {name: _digests(spec) for name, spec in declared.items()} | wanted.digests
    plan = await site.fleet.plan_manifest(wanted.text, wanted.source, schemas=schemas, digests=digests)
    if not wanted.dry_run:
        if wanted.schemas:
            await site.schemas.put_schemas(wanted.schemas)
        await site.fleet.apply(plan, call.actor, source=wanted.source)
    return _told(plan, applied=not wanted.dry_run)


def _told(plan: Plan, *, applied: bool) -> wire.ManifestReply:
    return wire.ManifestReply(
        applied=applied,
        summary=plan.summary(),
        new=tuple(wire.PlannedJob(id=job_id, label=spec.label) for job_id, spec in plan.new.items()),
        changed=tuple(
            wire.PlannedChange(id=each.job_id, label=each.spec.label, kinds=each.kinds, deferred=each.deferred)
            for each in plan.changed
        ),
        unchanged=len(plan.unchanged),
        orphaned=plan.orphaned,
        trainers=tuple(plan.trainers),
        hosts=tuple(plan.hosts),
        released_hosts=plan.released_hosts,
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
