"""Chooses the training server of a request by the ids in it, wakes it (a request waits 25 s), records its use (each
second at most), asks several servers at once (10 s), and words that none is there.

The ids of models, samplers, futures and checkpoints at a server begin with `SESSION.TAG`, so every id says which job
serves it. A request is not decoded to find one: its body may be a batch of 256 MiB, in protobuf, msgpack or JSON, and
the first id in the bytes is found in microseconds, where parsing takes a tenth of a second for 40 MB.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Final
from urllib.parse import quote

import msgspec

from strata.base.errors import Code, StrataError
from strata.base.ids import Ids
from strata.fleet.core.job import UNFINISHED
from strata.fleet.core.jobspec import MIN_IDLE_S
from strata.fleet.core.ownership import OPERATOR, Submitter
from strata.fleet.records import JobFilter, ServerRow
from strata.http.errors import STATUS_OF
from strata.http.route import RawReply, Upload
from strata.http.zstd import decompress_pieces
from strata.hub.context import GatewayCall, GatewayContext
from strata.hub.gateway.proxy import MAX_BODY, ForwardedRequest, Tenant, passed_headers, read_whole
from strata.identity.roles import CallerKind, Role
from strata.train.api import front

BASE: Final = "/api/v1"
WAKE_S: Final = 25.0
"""How long a request waits for a server that starts; then its client is told to try again."""
WAKE_POLL_S: Final = 0.25
ASK_S: Final = 10.0
"""How long a server may take when all are asked."""
TOUCH_S: Final = 1.0
"""How often the use of a server is written down at most."""
IN_USE_S: Final = MIN_IDLE_S / 3
"""How often it is written down while a request is under way."""
BAD_REQUEST: Final = STATUS_OF[Code.INVALID]
BROKEN: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What the JSON of a client or a server raises that cannot be read."""
JSON: Final = {"content-type": "application/json"}
_TAG_CHARACTERS: Final = 12
_LONGEST_ID: Final = 128
_MAX_COMPOSED: Final = 10_000
_SESSION: Final = re.compile(r"session_[0-9a-z]{1,64}(\.[0-9a-f]{12})?")
_TAGGED: Final = re.compile(r"session_[0-9a-z]+\.([0-9a-f]{12})")
_NAMED: Final = re.compile(rb"(session_[0-9a-z]{1,64})(?:\.(?P<tag>[0-9a-f]{12})|:train:(?P<number>[0-9]{1,10}))")
"""An id that names its server, or one that a client composed from its session at the hub."""


class _Total(msgspec.Struct, frozen=True):
    total_count: int = 0


class ServerReply(msgspec.Struct, frozen=True):
    """What the hub reads of the replies of several servers, to make one of them. The entries pass as they came."""

    supported_models: list[msgspec.Raw] = []
    data: list[msgspec.Raw] = []
    training_runs: list[msgspec.Raw] = []
    checkpoints: list[msgspec.Raw] = []
    sessions: list[msgspec.Raw] = []
    training_run_ids: list[msgspec.Raw] = []
    sampler_ids: list[msgspec.Raw] = []
    user_metadata: dict[str, msgspec.Raw] = {}
    cursor: _Total | None = None


class _Reason(msgspec.Struct):
    message: str
    hint: str | None = None


class _FailedReply(msgspec.Struct):
    """An error of the training protocol, or of the OpenAI-compatible endpoints."""

    error: _Reason


def tag_of(job_id: str) -> str:
    return job_id.removeprefix("job1_")[:_TAG_CHARACTERS]


def named_tag(text: str) -> str:
    """The tag of the server that an id in the text names; empty if there is none."""
    match = _TAGGED.search(text)
    return "" if match is None else match[1]


def session_at(session: str, tag: str) -> str:
    """The id of a session at the server with this tag; an id that names its server already stays."""
    if not _SESSION.fullmatch(session):
        raise StrataError(Code.INVALID, f"{session[:100]!r} is not the id of a session")
    return session if named_tag(session) else f"{session}.{tag}"


async def tenant_of(call: GatewayCall) -> Tenant:
    key = await call.context.identity.key(call.caller.id) if call.caller.kind is CallerKind.KEY else None
    if key is None or call.caller.role is None:
        raise StrataError(
            Code.FORBIDDEN,
            "a training server of this hub has tenants, each with an API key; the operator token is no such key",
            hint="strata keys create NAME --role researcher",
        )
    return Tenant(key.name, call.caller.role, key_id=key.id)


@asynccontextmanager
async def read_body(call: GatewayCall, body: Upload) -> AsyncIterator[bytes]:
    """The whole body, within the memory that all bodies to be forwarded share."""
    with call.context.proxy.bodies.reserve(call.actor) as reservation:
        parts: list[bytes] = []
        size = 0
        async for part in body:
            size += len(part)
            await reservation.resize(size)
            parts.append(part)
        content = b"".join(parts)
        parts.clear()
        yield content


def forwarded_request(call: GatewayCall, content: bytes) -> ForwardedRequest:
    headers = passed_headers(dict(call.headers), tls=call.context.tls)
    return ForwardedRequest(method=call.method, target=call.target, headers=headers, content=content)


async def find_id(request: ForwardedRequest) -> tuple[str, str]:
    """The tag in the first id of a request, or that id if its client composed it; both empty if there is none."""
    found = _NAMED.search(request.target.replace("%3A", ":").encode())
    if found is None and request.is_compressed:
        found = await asyncio.to_thread(_search_compressed, request.content)
    elif found is None:
        found = _NAMED.search(request.content)
    if found is None:
        return "", ""
    return (found["tag"].decode(), "") if found["tag"] else ("", found[0].decode())


def _search_compressed(content: bytes) -> re.Match[bytes] | None:
    """The first id in a compressed body. Only a piece of it is unpacked at a time: nothing counts that memory."""
    held, found = b"", None
    for piece in decompress_pieces(content, MAX_BODY):
        held = held[-_LONGEST_ID:] + piece
        found = _NAMED.search(held)
        # At the end of a piece it may be the beginning of a longer one.
        if found is not None and found.end() < len(held):
            break
    return found


def with_tag(composed: str, tag: str) -> str:
    """The id at its server of the model that a client calls so."""
    session, _, rest = composed.partition(":")
    return f"{session}.{tag}:{rest}"


def remember(context: GatewayContext, tenant: Tenant, composed: str, tag: str) -> None:
    if len(context.composed) >= _MAX_COMPOSED:
        context.composed.pop(next(iter(context.composed)))
    context.composed[tenant.name, composed] = tag


async def locate(context: GatewayContext, rows: Sequence[ServerRow], tenant: Tenant, composed: str) -> str:
    """The tag of the server that has this model of the tenant; empty if none has. Sleeping ones are woken for it."""
    known = context.composed.get((tenant.name, composed))
    if known is not None:
        return known
    unsure: StrataError | None = None
    for row in sorted((row for row in rows if not has_ended(row)), key=by_readiness):
        tag = tag_of(row.job.id)
        asking = ForwardedRequest(method="GET", target=f"{BASE}/models/{quote(with_tag(composed, tag))}", headers={})
        try:
            reply = await send(context, await wake_server(context, row, tenant), asking, tenant)
            await read_whole(reply)
        except StrataError as error:
            if context.stopping.is_set():
                raise
            unsure = error
            continue
        if reply.status == 200:
            remember(context, tenant, composed, tag)
            return tag
    if unsure is not None:
        # The one that was not reached may have it.
        raise unsure
    return ""


async def send_opening(
    context: GatewayContext, server: ServerRow, request: ForwardedRequest, tenant: Tenant
) -> RawReply:
    """Sends with the id for a session that the server may have to open."""
    session = session_at(Ids(context.clock).new("session"), tag_of(server.job.id))
    return await send(context, server, request.with_headers({front.SESSION: session}), tenant)


async def send(context: GatewayContext, server: ServerRow, request: ForwardedRequest, tenant: Tenant) -> RawReply:
    if tenant.role >= Role.RESEARCHER and context.fleet.now_s() - server.used_at_s > TOUCH_S:
        await context.fleet.servers.touch(server)
    key = context.front_key(server.job.id, server.epoch)
    async with _in_use(context, server, tenant):
        reply = await context.proxy.send(server.address, request, key=key, tenant=tenant)
    if isinstance(reply.content, bytes):
        return reply
    return replace(reply, content=_pieces_in_use(context, server, tenant, reply.content))


@asynccontextmanager
async def _in_use(context: GatewayContext, server: ServerRow, tenant: Tenant) -> AsyncIterator[None]:
    """The server stays awake as long as a request of a researcher is under way: a long poll, a large body."""

    async def touch() -> None:
        while True:
            await asyncio.sleep(IN_USE_S)
            # The next one makes up for one that fails.
            with suppress(StrataError):
                await context.fleet.servers.touch(server)

    if tenant.role < Role.RESEARCHER:
        yield
        return
    touching = asyncio.create_task(touch())
    try:
        yield
    finally:
        touching.cancel()
        await asyncio.wait([touching])


async def _pieces_in_use(
    context: GatewayContext, server: ServerRow, tenant: Tenant, pieces: AsyncIterable[bytes]
) -> AsyncIterator[bytes]:
    async with _in_use(context, server, tenant):
        async for piece in pieces:
            yield piece


async def select_server(context: GatewayContext, rows: Sequence[ServerRow], tag: str, base_model: str) -> ServerRow:
    """The server with this tag, or the one of the base model, or one that can answer; NOT_FOUND if there is none."""
    live = [row for row in rows if not has_ended(row)]
    if tag:
        named = [row for row in rows if tag_of(row.job.id) == tag]
        missing = StrataError(Code.NOT_FOUND, "the training server of this id is no job of this hub any more")
    elif base_model:
        # The only one knows best whether it has another name for its model, and says so.
        named = [row for row in live if base_model in row.models] or (live if len(live) == 1 else [])
        missing = StrataError(Code.NOT_FOUND, f"no training server of this hub has the model {base_model[:200]!r}")
    else:
        # A question to no server in particular: one that is awake can answer it.
        named, missing = live, no_server()
    if named:
        return min(named, key=by_readiness)
    if not tag and await pending_servers(context, base_model.rpartition("/")[2]):
        raise _starting(base_model)
    raise missing


def no_server() -> StrataError:
    return StrataError(Code.NOT_FOUND, "this hub has no training server", hint='kind = "server" in a manifest')


def by_readiness(row: ServerRow) -> tuple[bool, bool]:
    """Sorts servers that serve before those that start, and those before the ones that have to be woken."""
    return not row.serving, row.asleep


def has_ended(row: ServerRow) -> bool:
    """Says whether a person, or its failures, ended this server: a request does not start it again."""
    return row.job.status not in UNFINISHED and not row.asleep


async def pending_servers(context: GatewayContext, model: str) -> bool:
    """Says whether a server for this model, or any, waits for a host or starts for the first time."""
    rows = await context.fleet.store.jobs.select(JobFilter(status=UNFINISHED, model=model, limit=1000))
    return any(row.spec.kind == "server" for row in rows)


async def wake_server(context: GatewayContext, server: ServerRow, tenant: Tenant) -> ServerRow:
    """The server when it serves; UNAVAILABLE if that takes long, so that the client tries again.

    FORBIDDEN if it is asleep and the caller only reads, or if the quota of its owner is full.
    """
    until_s = context.fleet.now_s() + WAKE_S
    while not server.serving:
        # Also one that falls asleep while a request waits for it: as it starts, nothing has used it yet.
        if server.asleep:
            await _start_again(context, server, tenant)
        if has_ended(server) or context.fleet.now_s() > until_s:
            raise _starting(server.models[0] if server.models else "")
        await asyncio.sleep(WAKE_POLL_S)
        rows = await context.fleet.store.jobs.servers()
        server = next(row for row in rows if row.job.id == server.job.id)
        await _close_unused(context, rows)
    return server


async def _start_again(context: GatewayContext, server: ServerRow, tenant: Tenant) -> None:
    asleep = f"the training server of {server.models[0] if server.models else server.job.spec.label} is asleep"
    if tenant.role < Role.RESEARCHER:
        raise StrataError(Code.FORBIDDEN, asleep, hint="a request of a researcher wakes it")
    owner = server.job.owner
    operators = {key.name for key in await context.identity.keys() if key.role >= Role.OPERATOR}
    submitter = Submitter(owner=owner, operator=owner == OPERATOR.owner or owner in operators)
    try:
        await context.fleet.jobs.wake_server(server.job.id, "hub", submitter)
    except StrataError as error:
        if error.code is not Code.EXHAUSTED:
            raise
        # Clients try it again at once, and a quota is not free again that soon.
        raise StrataError(Code.FORBIDDEN, f"{asleep}, and may not start: {error.message}", hint=error.hint) from error


async def _close_unused(context: GatewayContext, rows: Iterable[ServerRow]) -> None:
    for connections in context.proxy.forget({row.address for row in rows if row.serving}):
        await connections.close()


def _starting(model: str) -> StrataError:
    what = f"the training server of {model}" if model else "the training server"
    return StrataError(Code.UNAVAILABLE, f"{what} is starting", hint="try again", retry_after_s=2)


async def ask_all(call: GatewayCall, method: str, request: Callable[[str], tuple[str, bytes]]) -> Sequence[ServerReply]:
    """The replies of all servers that serve. `request` makes target and content for the server with a tag."""
    context = call.context
    tenant = await tenant_of(call)

    async def ask(server: ServerRow) -> ServerReply | None:
        target, content = request(tag_of(server.job.id))
        forwarded = ForwardedRequest(method=method, target=target, headers=JSON, content=content)
        key = context.front_key(server.job.id, server.epoch)
        try:
            async with asyncio.timeout(ASK_S):
                reply = await context.proxy.send(server.address, forwarded, key=key, tenant=tenant)
                content = await read_whole(reply)
            # Entries pass as they came, and nothing else checks that they are text.
            replied = msgspec.json.decode(content.decode() or "{}", type=ServerReply) if reply.status == 200 else None
        except (StrataError, TimeoutError, *BROKEN):
            # One that has just gone, or replies with what nobody can read, has nothing to say; the others have.
            return None
        if reply.status == BAD_REQUEST and method == "POST":
            # Whoever sends a heartbeat that no server takes would lose the session without a word.
            raise refusal(content)
        if reply.status == 200 and method == "POST":
            await context.fleet.servers.touch(server)
        return replied

    rows = [row for row in await context.fleet.store.jobs.servers() if row.serving]
    return [reply for reply in await asyncio.gather(*map(ask, rows)) if reply is not None]


def refusal(content: bytes, code: Code = Code.INVALID, unread: str = "") -> StrataError:
    """The error of a training server in its own words; `unread` if the reply has none."""
    try:
        reason = msgspec.json.decode(content, type=_FailedReply).error
    except BROKEN:
        return StrataError(code, unread or "the training server refused the body, and did not say why")
    return StrataError(code, reason.message, hint=reason.hint)
