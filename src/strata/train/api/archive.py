"""Routes that export and import weights: signed download URLs (valid for 900 s), tar archives of checkpoints, and
upload of PEFT adapters.

A client that has a signed URL can fetch a checkpoint without a key until the grant in it expires.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
from collections.abc import AsyncIterator
from email.utils import formatdate
from pathlib import Path
from typing import Final
from urllib.parse import urlencode

import msgspec
from starlette.datastructures import Headers

from strata.base.digest import sha256_hex
from strata.base.errors import Code, StrataError
from strata.http.errors import HttpRefusal
from strata.http.route import KIB, LIMIT_FROM_SETTINGS, PUBLIC, RESEARCHER, VIEWER, RawBody, RawReply, Route
from strata.identity.roles import CallerKind
from strata.train.api.context import ApiCall
from strata.train.api.front import AT_FRONT, key_at_front
from strata.train.checkpoints.archive import MEDIA_TYPE, Archive, open_archive, read_members
from strata.train.checkpoints.checkpoint import CheckpointManifest
from strata.train.core import client_commands, model_options
from strata.train.core.state import IMPORTED
from strata.train.peft import importer
from strata.train.peft.layers import ADAPTER, ADAPTER_CONFIG
from strata.train.status import queries, views
from strata.train.status.reports import TimelinesView
from strata.train.wire import bodies, replies
from strata.train.wire.grants import ArchiveGrant, TraceGrant, sign_token, token_refused, verify_token
from strata.train.wire.timeline import chrome_trace

DOWNLOAD: Final = "/api/v1/archive"
VALID_S: Final = 900.0
"""How long a signed URL is valid."""
IGNORED: Final = ("README.md",)
"""What PEFT writes beside an adapter."""


async def locate(call: ApiCall) -> RawReply:
    """Returns where the archive of a checkpoint can be fetched for a while, as a redirect (302)."""
    folder, expires_at_s = await _find_checkpoint(call)
    # Opened now, not only when it is fetched: the caller who requests the URL gets the error.
    archive = await asyncio.to_thread(open_archive, call.context.settings.checkpoint_folder / folder)
    archive.closing.close()
    headers = {
        "Location": _signed_url(call, folder, "", expires_at_s),
        "Expires": formatdate(expires_at_s, usegmt=True),
        "Cache-Control": "no-store",
    }
    return RawReply(b"", 302, headers=headers)


async def locate_files(call: ApiCall) -> replies.ExternalWeights:
    """Returns where each file of a checkpoint can be fetched for a while."""
    folder, expires_at_s = await _find_checkpoint(call)
    archive = await asyncio.to_thread(open_archive, call.context.settings.checkpoint_folder / folder)
    archive.closing.close()
    urls = {name: _signed_url(call, folder, name, expires_at_s) for name, _, _ in archive.files}
    return replies.ExternalWeights(urls=urls, expires=replies.to_datetime(expires_at_s))


async def _find_checkpoint(call: ApiCall) -> tuple[str, float]:
    """The folder of the checkpoint that the path names, and when signed URLs of it expire."""
    kind, name = bodies.checkpoint_id(call.path["checkpoint_id"])
    checkpoint = await call.request(
        queries.DescribeCheckpoint(call.path["run_id"], kind, name), views.ModelCheckpointView
    )
    until_s = call.context.clock.wall_s() + VALID_S
    return checkpoint.folder, until_s if checkpoint.expires_at_s is None else min(until_s, checkpoint.expires_at_s)


def _signed_url(call: ApiCall, folder: str, file: str, expires_at_s: float) -> str:
    grant = ArchiveGrant(folder, file, expires_at_s, _key_of(call))
    return signed_url(call.headers, DOWNLOAD, token=sign_token(grant, call.context.signing_key))


def _key_of(call: ApiCall) -> str:
    return call.caller.id if call.caller.kind is CallerKind.KEY else key_at_front(call.caller, call.headers)


async def trace_url(call: ApiCall, session_id: str) -> str:
    """Returns where the trace of this session of the caller can be fetched for a while."""
    until_s = call.context.clock.wall_s() + VALID_S
    grant = TraceGrant(session_id, await call.context.tenant(call.caller), until_s, _key_of(call))
    return signed_url(call.headers, DOWNLOAD, token=sign_token(grant, call.context.signing_key))


async def fetch(call: ApiCall, query: bodies.ArchiveTokenQuery) -> RawReply:
    """Returns what such an address names: a tar file of PEFT's or Hugging Face's form, one file of it, or a session's
    trace."""
    grant = verify_token(query.token, call.context.signing_key, call.context.clock.wall_s())
    if grant.key_id and not grant.key_id.startswith(AT_FRONT):
        key = await call.context.identity.key(grant.key_id)
        if key is None or key.revoked_at_s is not None:
            raise token_refused()
    if isinstance(grant, TraceGrant):
        return await _trace(call, grant)
    archive = await asyncio.to_thread(
        open_archive, call.context.settings.checkpoint_folder / grant.folder, grant.file or None
    )
    name = grant.file or f"{grant.folder.replace('/', '-').replace('@', '-')}.tar"
    headers = {
        "Content-Length": str(archive.files[0][1] if grant.file else archive.size),
        "Content-Disposition": f'attachment; filename="{name}"',
        "Cache-Control": "no-store",
    }
    media_type = "application/octet-stream" if grant.file else MEDIA_TYPE
    return RawReply(_stream(archive, plain=bool(grant.file)), media_type=media_type, headers=headers)


async def _trace(call: ApiCall, grant: TraceGrant) -> RawReply:
    view = await call.request_as(grant.tenant, queries.ListTimelines(grant.session_id), TimelinesView)
    content = await asyncio.to_thread(lambda: msgspec.json.encode(chrome_trace(view.timelines, shared=False)))
    headers = {
        "Content-Disposition": f'attachment; filename="{grant.session_id}.pftrace"',
        "Cache-Control": "no-store",
    }
    return RawReply(content, headers=headers)


async def _stream(archive: Archive, *, plain: bool) -> AsyncIterator[bytes]:
    parts = archive.content() if plain else archive.parts()
    try:
        while (part := await asyncio.to_thread(next, parts, None)) is not None:
            yield part
    finally:
        archive.closing.close()


async def import_adapter(call: ApiCall, query: bodies.ImportQuery, body: RawBody) -> replies.Imported:
    """Make a checkpoint of a PEFT adapter, sent as a tar file of its safetensors and its config."""
    if body.media_type != MEDIA_TYPE:
        raise HttpRefusal(415, Code.UNSUPPORTED, f"an adapter is read as {MEDIA_TYPE}, not as {body.media_type!r}")
    context, tenant = call.context, await call.context.tenant(call.caller)
    name = bodies.checkpoint_name(query.name)
    server = await call.request(queries.DescribeServer(), views.ServerView)
    if server.full:
        raise StrataError(Code.PRECONDITION, "this server does full fine-tunes: it has no adapters")
    if not server.ready:
        raise StrataError(Code.UNAVAILABLE, "the ranks are starting")
    import_id = f"{context.number}.{context.ids.new('import')}"
    folder = context.settings.imports / import_id
    try:
        run_id, lora = await asyncio.to_thread(_stage, call, body.content, (tenant, name, import_id), server)
        request = client_commands.ImportCheckpoint(import_id, name, run_id, server.base_model, lora, query.ttl_seconds)
        await call.request(request, client_commands.Done)
    finally:
        await asyncio.to_thread(_remove, folder)
    return replies.Imported(path=f"tinker://{run_id}/weights/{name}")


async def import_files(call: ApiCall, request: client_commands.ImportCheckpoint, source: Path) -> None:
    """Make a checkpoint of the files of another. They are shared with it: no file of a checkpoint is ever changed."""
    folder = call.context.settings.imports / request.import_id
    try:
        await asyncio.to_thread(_link_files, source, folder / call.context.settings.staged)
        await call.request(request, client_commands.Done)
    finally:
        await asyncio.to_thread(_remove, folder)


def _link_files(source: Path, target: Path) -> None:
    target.mkdir(parents=True, mode=0o700)
    try:
        for file in source.iterdir():
            os.link(file, target / file.name)
    except FileNotFoundError:
        raise StrataError(Code.UNAVAILABLE, "the files of the checkpoint are not on this server now") from None


def _remove(folder: Path) -> None:
    """Renamed first: an orchestrator that takes the folder at this moment gets all of it, or nothing."""
    removed = folder.with_name(f"{folder.name}.gone")
    with contextlib.suppress(FileNotFoundError):
        folder.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)


def _stage(
    call: ApiCall, raw: bytes, key: tuple[str, str, str], server: views.ServerView
) -> tuple[str, model_options.LoraConfig]:
    tenant, name, import_id = key
    settings = call.context.settings
    files = read_members(raw, (ADAPTER, ADAPTER_CONFIG), IGNORED)
    config = importer.read_config(files[ADAPTER_CONFIG], settings.model.base_models, settings.model.max_lora_rank)
    folder = settings.imports / import_id
    folder.mkdir(parents=True, mode=0o700)
    temporary = folder / ADAPTER
    temporary.write_bytes(files[ADAPTER])
    lora = importer.examine(temporary, config, Path(settings.model.path))
    adapter_config = importer.stored_config(config, importer.layers_of(temporary), settings.model.public_name)
    temporary.unlink()
    # Idempotent: the same upload is the same run, so a client that retries makes no second one.
    content = "\n".join((tenant, name, *(sha256_hex(files[each]) for each in sorted(files))))
    run_id = f"{IMPORTED}{sha256_hex(content.encode())[:24]}"
    manifest = CheckpointManifest(
        model_id=run_id, seq_id=0, kind="weights", base_model=server.base_model, arch=server.arch, lora=lora, steps=0
    )
    importer.stage(folder / settings.staged, manifest, {ADAPTER: files[ADAPTER], ADAPTER_CONFIG: adapter_config})
    return run_id, lora


_HOST: Final = re.compile(r"[A-Za-z0-9.\-_\[\]:]{1,255}")


def signed_url(headers: Headers, path: str, **query: str) -> str:
    """A URL of this server, by the name that the caller reaches it by."""
    scheme = headers.get("x-forwarded-proto", "http")
    host = headers.get("host", "")
    if scheme not in ("http", "https") or not _HOST.fullmatch(host):
        raise StrataError(Code.INVALID, "the Host of the request is not a name of this server")
    return f"{scheme}://{host}{path}?{urlencode(query)}"


ROUTES = (
    Route("GET", DOWNLOAD, PUBLIC, fetch, KIB),
    Route("GET", "/api/v1/training_runs/{run_id}/checkpoints/{checkpoint_id:path}/archive", VIEWER, locate, KIB),
    Route(
        "GET",
        "/api/v1/training_runs/{run_id}/checkpoints/{checkpoint_id:path}/external_weights_urls",
        VIEWER,
        locate_files,
        KIB,
    ),
    Route(
        "POST",
        "/api/v1/import_weights",
        RESEARCHER,
        import_adapter,
        LIMIT_FROM_SETTINGS,
        owner="caller",
        operation="archive.take",
    ),
)
