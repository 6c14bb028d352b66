"""Routes of artifacts: chunks, commits, models, sources, lists, pins and exports, which attempt may upload what, and
how many copies of a server's state are kept (2).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Final

import msgspec

from strata.base.errors import Code, StrataError
from strata.base.failpoint import failpoint
from strata.fleet.artifacts import export
from strata.fleet.artifacts.manifest import ArtifactChunk, ArtifactKind, Lineage
from strata.fleet.artifacts.ports import LineageFilter
from strata.fleet.artifacts.service import BLOB_PATH
from strata.fleet.core.objective import MetricObjective, choose_objective
from strata.fleet.http.context import HubCall, HubContext, calling_host, own_hold, resolve_artifact_id, submitter_of
from strata.fleet.http.quotas import caller_account, check_stored_bytes, job_account
from strata.fleet.records import AttemptKey
from strata.fleet.wire.artifacts import (
    ArtifactRecord,
    ArtifactReply,
    ArtifactsQuery,
    ArtifactsReply,
    BestQuery,
    BlobQuery,
    ChunkQuery,
    CommitReply,
    CommitRequest,
    FileQuery,
    LatestQuery,
    LineageQuery,
    MissingReply,
    MissingRequest,
    PinRequest,
)
from strata.http.route import RawReply, Upload
from strata.identity.roles import CallerKind

_NEWEST: Final = 2**62
KEPT_COPIES: Final = 2
"""The copies of a server's state that are kept."""
_BYTES: Final = "application/octet-stream"


async def missing(call: HubCall, body: MissingRequest) -> MissingReply:
    """Returns which of these chunks have to be sent, and how much of each is there already."""
    plan = await call.context.artifacts.plan(body.chunks, call.actor)
    if plan.missing and not calling_host(call):
        # Before the bytes are sent, and not only when they are committed.
        await check_stored_bytes(call, sum(each.size for each in plan.missing))
    return plan


async def put_chunk(call: HubCall, body: Upload, query: ChunkQuery) -> None:
    """A chunk, or the rest of one from `offset` on. Verified and durable when the reply comes."""
    await call.context.artifacts.put_chunk(
        ArtifactChunk(call.path["digest"], query.size), body, call.actor, offset=query.offset
    )


async def get_chunk(call: HubCall) -> RawReply:
    """The bytes of a chunk, verified. A host reads those that its leases name; people none of a server's state."""
    context, digest = call.context, call.path["digest"]
    host = calling_host(call)
    if host:
        await context.leased.check_chunk(host, digest)
    only_open = not host and not submitter_of(call).operator
    return RawReply(await context.artifacts.read_chunk(digest, only_open=only_open), media_type=_BYTES)


async def commit(call: HubCall, body: CommitRequest) -> CommitReply:
    """Make an artifact of chunks that are there; a host's checkpoint is what the next attempt resumes from."""
    context = call.context
    held = _hold(call, body.job_id, body.epoch)
    lineage = _personal_lineage(body.lineage) if held is None else await _attempt_lineage(context, body.lineage, held)
    account = await caller_account(call) if held is None else await job_account(context, held.job_id)
    done = await context.artifacts.commit(
        body.manifest, lineage, call.actor, hold=held, owner=call.actor, account=account
    )
    if held is not None and lineage.kind is ArtifactKind.CHECKPOINT:
        failpoint("fleet.checkpoint.before")
        await context.fleet.leases.record_checkpoint(held, done.artifact_id)
        await _remove_old_copies(call, held, keep=done.artifact_id)
    return done


async def put_model(call: HubCall, body: Upload, query: BlobQuery) -> CommitReply:
    """A result as one opaque file; its id is the SHA-256 of its bytes."""
    context = call.context
    held = own_hold(call, query.job_id, query.epoch)
    lineage = await _attempt_lineage(context, Lineage(kind=ArtifactKind.RESULT), held)
    account = await job_account(context, held.job_id)
    return await context.artifacts.put_blob(call.path["id"], body, lineage, call.actor, hold=held, account=account)


async def put_source(call: HubCall, body: Upload) -> CommitReply:
    """The source of a trainer as one opaque file; its id is the SHA-256 of its bytes."""
    lineage = Lineage(kind=ArtifactKind.SOURCE)
    account = await caller_account(call)
    return await call.context.artifacts.put_blob(call.path["id"], body, lineage, call.actor, account=account)


async def get_model(call: HubCall) -> RawReply:
    """A result as it was uploaded."""
    return await _blob(call)


async def get_source(call: HubCall) -> RawReply:
    """The source of a trainer as it was uploaded. A host reads those that its leases name."""
    if host := calling_host(call):
        await call.context.leased.check_source(host, call.path["id"])
    return await _blob(call)


async def _blob(call: HubCall) -> RawReply:
    context = call.context
    artifact_id = await context.artifacts.index.blob(call.path["id"])
    row = await context.artifacts.open(artifact_id)
    (file,) = row.manifest.files
    headers = {"Content-Length": str(file.size)}
    return RawReply(context.artifacts.stream(file, 0, file.size), media_type=_BYTES, headers=headers)


async def listed(call: HubCall, query: ArtifactsQuery) -> ArtifactsReply:
    """Artifacts and where they came from, the latest first; or the best, by a metric."""
    if query.metric and query.before is not None:
        raise StrataError(Code.INVALID, "what is ordered by a metric has one page only")
    wanted = LineageFilter(
        model=query.model,
        mode=query.mode,
        kind=query.kind,
        job_id=query.job_id,
        parents=[query.parent] if query.parent else [],
        metric=query.metric,
        best="min" if query.lowest else "max",
        removed=query.removed,
        # What is ordered by a figure is chosen by it.
        completed=bool(query.metric) and query.kind is ArtifactKind.RESULT,
        before_seq=_NEWEST if query.before is None else query.before,
        limit=query.limit,
    )
    rows = await call.context.artifacts.index.lineages(wanted)
    more = rows[-1].seq if len(rows) == query.limit and not query.metric else None
    return ArtifactsReply(artifacts=tuple(rows), next=more, objective=_objective(rows))


async def latest(call: HubCall, query: LatestQuery) -> ArtifactRecord:
    """The newest artifact of a model."""
    return await call.context.artifacts.latest(query.model, query.mode, kind=query.kind)


async def best(call: HubCall, query: BestQuery) -> ArtifactRecord:
    """The result of a model with the highest, or lowest, figure."""
    return await call.context.artifacts.best(query.model, query.metric, query.mode, lowest=query.lowest)


async def show(call: HubCall) -> ArtifactReply:
    """The files of an artifact and their chunks. A host reads those that its leases name."""
    context = call.context
    if host := calling_host(call):
        await context.leased.check_artifact(host, call.path["id"])
    artifact_id = await resolve_artifact_id(call)
    await _check_reader(call, artifact_id)
    download = await context.artifacts.download(artifact_id)
    row = download.artifact
    return ArtifactReply(
        id=row.id,
        size=row.size,
        committed_at_s=row.committed_at_s,
        pinned=row.pinned,
        manifest=row.manifest,
        urls=download.urls,
    )


async def ancestry(call: HubCall, query: LineageQuery) -> ArtifactsReply:
    """Returns where an artifact came from, and what that came from; or what was made from it as well."""
    context = call.context
    artifact_id = await resolve_artifact_id(call)
    rows = list(await context.artifacts.ancestry(artifact_id, limit=query.limit))
    if query.descendants:
        known = {row.lineage_id for row in rows}
        rows += [
            each
            for each in await context.artifacts.descendants(artifact_id, limit=query.limit)
            if each.lineage_id not in known
        ]
    return ArtifactsReply(artifacts=tuple(rows), objective=_objective(rows))


async def file(call: HubCall, query: FileQuery) -> RawReply:
    """One file of an artifact, verified."""
    context = call.context
    artifact_id = await resolve_artifact_id(call)
    await _check_reader(call, artifact_id)
    row = await context.artifacts.open(artifact_id)
    entry = row.manifest.file(query.path)
    headers = {"Content-Length": str(entry.size), "Content-Disposition": "attachment"}
    return RawReply(context.artifacts.stream(entry, 0, entry.size), media_type=_BYTES, headers=headers)


async def bundle(call: HubCall) -> RawReply:
    """An artifact as one deterministic `bundle.tar.zst`."""
    context = call.context
    artifact_id = await resolve_artifact_id(call)
    await _check_reader(call, artifact_id)
    await context.artifacts.open(artifact_id)
    headers = {"Content-Disposition": f'attachment; filename="{BLOB_PATH}"'}
    return RawReply(export.bundle(context.artifacts, artifact_id), media_type="application/zstd", headers=headers)


async def index(call: HubCall) -> RawReply:
    """`index.jsonl`: all results, a line each, with the path of their bundle below /v1/export/."""
    return RawReply(_lines(call.context), media_type="application/x-ndjson")


async def exported(call: HubCall) -> RawReply:
    """`<model>_<mode>/<sha256>/bundle.tar.zst` of the export."""
    context = call.context
    path = f"{call.path['name']}/{call.path['sha256']}/{BLOB_PATH}"
    artifact_id = await export.find(context.artifacts, path)
    return RawReply(export.bundle(context.artifacts, artifact_id), media_type="application/zstd")


async def pin(call: HubCall, body: PinRequest) -> None:
    """Keep an artifact whatever the retention says; without a reason, let it go. A researcher: only one of her own."""
    artifact_id, submitter = await resolve_artifact_id(call), submitter_of(call)
    owner = None if submitter.operator else submitter.owner
    await call.context.artifacts.pin(artifact_id, body.reason, call.actor, owner=owner)


async def remove(call: HubCall) -> None:
    """Let go of an artifact; where it came from stays known. A researcher: of her own jobs and data.

    Its bytes stay while another owner has committed the same.
    """
    artifact_id, submitter = await resolve_artifact_id(call), submitter_of(call)
    artifacts, reason = call.context.artifacts, "removed by hand"
    if submitter.operator:
        await artifacts.remove(artifact_id, reason, call.actor)
    else:
        await artifacts.withdraw(artifact_id, submitter.owner, reason, call.actor)


async def _lines(context: HubContext) -> AsyncIterator[bytes]:
    async for lines in export.index_lines(context.artifacts, context.bundle_digests):
        yield lines


async def _remove_old_copies(call: HubCall, held: AttemptKey, *, keep: str) -> None:
    """Removes old copies of the state of a server, which is saved every few minutes for months."""
    context = call.context
    if (await context.fleet.store.jobs.get(held.job_id)).spec.kind != "server":
        return
    wanted = LineageFilter(job_id=held.job_id, kind=ArtifactKind.CHECKPOINT)
    rows = await context.artifacts.index.lineages(wanted)
    kept = {keep, *(row.artifact_id for row in rows[:KEPT_COPIES])}
    for row in rows[KEPT_COPIES:]:
        if row.artifact_id not in kept and not row.pinned:
            await context.artifacts.remove(row.artifact_id, "a newer copy of the server is there", call.actor)


async def _check_reader(call: HubCall, artifact_id: str) -> None:
    """FORBIDDEN for people, except operators, if it is the state of a server: that has the data of all its tenants."""
    context = call.context
    if calling_host(call) or submitter_of(call).operator:
        return
    wanted = LineageFilter(artifact_ids=[artifact_id], kind=ArtifactKind.CHECKPOINT, removed=True, limit=1000)
    for job_id in {row.lineage.job_id for row in await context.artifacts.index.lineages(wanted)} - {""}:
        if (await context.fleet.store.jobs.get(job_id)).spec.kind == "server":
            raise StrataError(Code.FORBIDDEN, "the state of a training server is for operators alone")


def _hold(call: HubCall, job_id: str | None, epoch: int | None) -> AttemptKey | None:
    """A host speaks for an attempt of its own, always; a person never does."""
    if call.caller.kind is not CallerKind.HOST:
        if job_id is not None or epoch is not None:
            raise StrataError(Code.FORBIDDEN, "only the host that holds an attempt may speak for it")
        return None
    if job_id is None or epoch is None:
        raise StrataError(Code.INVALID, "a host says for which attempt: job_id and epoch")
    return own_hold(call, job_id, epoch)


def _personal_lineage(given: Lineage) -> Lineage:
    """Returns what a person may say of an upload: nothing that attributes it to a job or a host."""
    if given.kind not in (ArtifactKind.SOURCE, ArtifactKind.DATA):
        raise StrataError(
            Code.FORBIDDEN,
            f"a {given.kind} is made by an attempt of a job, and committed by its host",
            hint="commit it as kind source or data",
        )
    return msgspec.structs.replace(given, job_id="", epoch=0, host_id="")


async def _attempt_lineage(context: HubContext, given: Lineage, held: AttemptKey) -> Lineage:
    """Returns what was trained, with which code and on which data is what the job says, whatever its host writes."""
    if given.kind in (ArtifactKind.SOURCE, ArtifactKind.DATA):
        raise StrataError(Code.FORBIDDEN, "an attempt has results and checkpoints; sources and data come from people")
    spec = (await context.fleet.store.jobs.get(held.job_id)).spec
    attempts = [each for each in await context.fleet.store.jobs.attempts(held.job_id) if each.epoch == held.epoch]
    digest = attempts[0].trainer_digest if attempts else ""
    trainer = await context.fleet.store.plans.trainer(digest) if digest else None
    code = "" if trainer is None else trainer.commit or trainer.bundle
    return msgspec.structs.replace(given, model=spec.model, mode=spec.mode, code=code[:256], data=spec.data[:256])


def _objective(rows: Sequence[ArtifactRecord]) -> MetricObjective | None:
    return choose_objective(row.lineage.metrics for row in rows)
