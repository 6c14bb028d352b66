"""`/api/v1`: the training servers that are jobs of this fleet, behind the one URL and the keys of the hub.

The hub opens a session for a client, and a session of its own with each server that the client uses. The id of the
latter is `SESSION.TAG`, and the ids of models, samplers, futures and checkpoints at a server begin with it: so every id
says which job serves it, after any restart, and the hub keeps no table. A model that is created goes to the server of
its base model. A server that is asleep is woken by the first request of a researcher for it.

A client that makes a model from a checkpoint composes the id from its session at the hub, without a server in it: the
hub asks the servers who has such a model, remembers it, and tells the server which of its models is meant.

The OpenAI-compatible endpoints of the servers are at `/v1`, beside the hub's own API: a request goes to the server
that its model names.
"""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from typing import Any, Final
from urllib.parse import parse_qsl, quote, urlencode

import msgspec

from strata.base.errors import Code, StrataError
from strata.base.ids import Ids
from strata.fleet.core.job import UNFINISHED
from strata.fleet.core.jobspec import MIN_IDLE_S
from strata.fleet.core.ownership import OPERATOR, Submitter
from strata.fleet.ports import JobFilter, ServerRow
from strata.fleet.wire.servers import ServerCompletion
from strata.http.disconnect import until_disconnect
from strata.http.errors import STATUS_OF
from strata.http.problem import ErrorReply
from strata.http.route import KIB, MIB, PUBLIC, READS, RESEARCHER, VIEWER, RawReply, Route, Upload
from strata.http.zstd import decompress_frames, decompress_pieces
from strata.hub.context import GatewayCall, GatewayContext
from strata.hub.gateway.proxy import ARCHIVE, MAX_BODY, TOKEN, ForwardedRequest, Tenant, passed_headers, read_whole
from strata.identity.roles import CallerKind, Role

BASE: Final = "/api/v1"
OPENAI: Final = "/v1"
MAX_COMPLETION: Final = 4 * MIB
COMPLETE_S: Final = 600.0
"""How long a completion may take before its reply begins, as long as OpenAI's client library waits."""
TOKENIZER: Final = "/hf/{repository:path}/resolve/{revision}/{file}"
WAKE_S: Final = 25.0
"""How long a request waits for a server that starts; then its client is told to try again."""
WAKE_POLL_S: Final = 0.25
ASK_S: Final = 10.0
"""How long a server may take when all are asked."""
TOUCH_S: Final = 1.0
"""How often the use of a server is written down at most."""
IN_USE_S: Final = MIN_IDLE_S / 3
"""How often it is written down while a request is under way."""
_TAG_CHARACTERS: Final = 12
_LONGEST_ID: Final = 128
_TAGGED: Final = re.compile(rb"session_[0-9a-z]+\.([0-9a-f]{12})")
_NAMED: Final = re.compile(rb"(session_[0-9a-z]{1,64})(?:\.(?P<tag>[0-9a-f]{12})|:train:(?P<number>[0-9]{1,10}))")
"""An id that names its server, or one that a client composed from its session at the hub."""
_SIGNED_FOR: Final = re.compile(rb"hub:([0-9a-z_]{4,64})\Z")
"""At the end of a signed token: the key of this hub that requested it."""
_OPENING: Final = frozenset({f"{BASE}/{name}" for name in ("create_model", "create_sampling_session", "load_weights")})
"""What a client sends with the id of its session at the hub."""
_READING: Final = ("get_info", "weights_info", "list_checkpoints", "client/config", "client/dynamic_config")
"""What is sent with POST and changes nothing."""
_BAD_REQUEST: Final = STATUS_OF[Code.INVALID]
_MAX_SESSIONS: Final = 10_000
_MAX_OWN_SESSIONS: Final = 1000
_MAX_COMPOSED: Final = 10_000
_SESSION: Final = re.compile(r"session_[0-9a-z]{1,64}(\.[0-9a-f]{12})?")
_LISTS: Final = {"training_runs": "last_request_time", "checkpoints": "time", "sessions": ""}
"""Lists of all servers, by the field that says how new an entry is; the ids of sessions say so themselves."""
MAX_PAGE: Final = 1000


def tag_of(job_id: str) -> str:
    return job_id.removeprefix("job1_")[:_TAG_CHARACTERS]


def _at_server(session: str, tag: str) -> str:
    """The id of a session at the server with this tag; an id that names its server already stays."""
    if not _SESSION.fullmatch(session):
        raise StrataError(Code.INVALID, f"{session[:100]!r} is not the id of a session")
    return session if _TAGGED.fullmatch(session.encode()) else f"{session}.{tag}"


async def forward(call: GatewayCall, body: Upload) -> RawReply:
    """Forward a request to the training server that its ids or its base model name."""
    tenant = await _tenant(call)
    async with _read_body(call, body) as content:
        request = _request(call, content)
        return await until_disconnect(call, call.context.stopping, _forward(call.context, request, tenant))


async def download(call: GatewayCall, body: Upload) -> RawReply:
    """The content of a URL that a training server has signed. Anybody may ask, so that wakes no server."""
    context = call.context
    async for _ in body:
        pass
    rows = await context.fleet.store.servers()
    token = _unsigned(call.target.partition("?")[2])
    found = _TAGGED.search(token)
    tag = "" if found is None else found[1].decode()
    server = next((row for row in rows if len(rows) == 1 or tag_of(row.job.id) == tag), None)
    if server is None:
        raise StrataError(Code.NOT_FOUND, "no training server of this hub has signed this address")
    if not server.serving:
        raise StrataError(Code.UNAVAILABLE, "the training server that signed this address does not serve now")
    signed_for = _SIGNED_FOR.search(token)
    key = None if signed_for is None else await context.identity.key(signed_for[1].decode())
    if key is None or not key.valid(context.clock.wall_s()):
        # In the words of the server, which checks the signature and the time.
        raise StrataError(Code.FORBIDDEN, "this address is not valid, or not any more", hint="request a new one")
    sending = context.proxy.send(server.address, _request(call, b""), key="", tenant=None)
    return await until_disconnect(call, context.stopping, sending)


async def tokenizer_file(call: GatewayCall, body: Upload) -> RawReply:
    """A file of the tokenizer of a base model, at the address that a Hugging Face Hub has."""
    context = call.context
    tenant = await _tenant(call)
    async for _ in body:
        pass
    repository = call.path["repository"]
    rows = [row for row in await context.fleet.store.servers() if not _ended(row)]
    # A server may know its tokenizer by a name that is none of its base model.
    named = [row for row in rows if repository in row.models] or [row for row in rows if row.serving]
    reply = failure = None
    for row in sorted(named, key=_by_readiness):
        try:
            server = await _awake(context, row, tenant)
            reply = await until_disconnect(call, context.stopping, _send(context, server, _request(call, b""), tenant))
        except StrataError as error:
            if error.code is not Code.UNAVAILABLE or context.stopping.is_set():
                raise
            failure = error
            continue
        if reply.status != 404:
            return reply
    if failure is not None:
        # Also after a 404 of another server: the one that is not reached may have the file.
        raise failure
    if reply is not None:
        return reply
    raise StrataError(Code.NOT_FOUND, f"no training server of this hub has the model {repository[:200]!r}")


async def tokenizer_head(call: GatewayCall, body: Upload) -> RawReply:
    """Whether there is such a file, and which one."""
    return await tokenizer_file(call, body)


async def create_session(call: GatewayCall, body: Upload) -> RawReply:
    """Open a session at the hub; servers learn of it when it uses them."""
    context = call.context
    rows = await context.fleet.store.servers()
    if not rows and not await _pending_servers(context, ""):
        raise StrataError(Code.NOT_FOUND, "this hub has no training server", hint='kind = "server" in a manifest')
    tenant = await _tenant(call)
    async with _read_body(call, body) as content:
        session = Ids(context.clock).new("session")
        own = [id_ for id_, (owner, _) in context.sessions.items() if owner == tenant.name]
        if len(own) >= _MAX_OWN_SESSIONS or len(context.sessions) >= _MAX_SESSIONS:
            context.sessions.pop(own[0] if len(own) >= _MAX_OWN_SESSIONS else next(iter(context.sessions)))
        context.sessions[session] = (tenant.name, content)
    return _json({"type": "create_session", "session_id": session})


async def session_heartbeat(call: GatewayCall, body: Upload) -> RawReply:
    """Keep a session alive at all servers that have it."""
    await _send_to_all(call, body, "session_heartbeat")
    return _json({"type": "session_heartbeat"})


async def kill_session(call: GatewayCall, body: Upload) -> RawReply:
    """End a session at all servers that have it, and unload its models."""
    await _send_to_all(call, body, "kill_session")
    return RawReply(b"", 204)


async def finish_session(call: GatewayCall, body: Upload) -> RawReply:
    """Finish a session at all servers that have it."""
    session = call.path["session_id"]
    async with _read_body(call, body) as content:
        await _ask_all(call, "POST", lambda tag: (f"{BASE}/sessions/{_at_server(session, tag)}/finish", content))
    if _opened_by(call.context, session) == (await _tenant(call)).name:
        call.context.sessions.pop(session)
    return RawReply(b"", 204)


async def capabilities(call: GatewayCall) -> RawReply:
    """The models that can be trained here, of all servers; those that sleep by their names alone."""
    rows = await call.context.fleet.store.servers()
    replies = await _ask_all(call, "GET", lambda _: (f"{BASE}/get_server_capabilities", b""))
    models = [model for reply in replies for model in _listed(reply, "supported_models")]
    models += [{"model_name": row.models[0]} for row in rows if row.asleep and row.models]
    return _json({"supported_models": models})


async def listed(call: GatewayCall, body: Upload) -> RawReply:
    """Training runs, checkpoints or sessions of the caller: of the only server, or of all that are awake."""
    rows = await call.context.fleet.store.servers()
    if len([row for row in rows if not _ended(row)]) <= 1:
        return await forward(call, body)
    path, _, query = call.target.partition("?")
    name = path.rpartition("/")[2]
    asked = dict(parse_qsl(query))
    offset, limit = _whole_number(asked, "offset", 0), _whole_number(asked, "limit", 100)
    page = urlencode({"offset": 0, "limit": min(offset + limit, MAX_PAGE)})
    replies = await _ask_all(call, "GET", lambda _: (f"{path}?{page}", b""))
    entries = [entry for reply in replies for entry in _listed(reply, name)]
    entries.sort(key=lambda entry: str(entry.get(_LISTS[name], "") if isinstance(entry, dict) else entry), reverse=True)
    merged: dict[str, Any] = {name: entries[offset : offset + limit]}
    cursors = [reply["cursor"] for reply in replies if isinstance(reply.get("cursor"), dict)]
    if cursors:
        counts = [cursor.get("total_count") for cursor in cursors]
        total = sum(count for count in counts if isinstance(count, int))
        merged["cursor"] = {"offset": offset, "limit": limit, "total_count": total}
    return _json(merged)


async def show_session(call: GatewayCall, body: Upload) -> RawReply:
    """One session with its models and samplers, at all servers that have it."""
    session = call.path["session_id"]
    if _TAGGED.fullmatch(session.encode()):
        return await forward(call, body)
    replies = await _ask_all(call, "GET", lambda tag: (f"{BASE}/sessions/{_at_server(session, tag)}", b""))
    parts = [reply for reply in replies if reply]
    if not parts and _opened_by(call.context, session) != (await _tenant(call)).name:
        raise StrataError(Code.NOT_FOUND, f"there is no session {session[:100]!r}")
    merged: dict[str, Any] = {"training_run_ids": [], "sampler_ids": [], "user_metadata": {}}
    for part in parts:
        merged["training_run_ids"] += _listed(part, "training_run_ids")
        merged["sampler_ids"] += _listed(part, "sampler_ids")
        metadata = part.get("user_metadata")
        merged["user_metadata"] |= metadata if isinstance(metadata, dict) else {}
    return _json(merged)


def _opened_by(context: GatewayContext, session: str) -> str:
    """The tenant that opened this session at this hub; empty if none did since the hub started."""
    return context.sessions[session][0] if session in context.sessions else ""


def _listed(reply: Mapping[str, Any], name: str) -> list[Any]:
    """A list in the reply of a server; empty if the server put something else there."""
    found = reply.get(name)
    return found if isinstance(found, list) else []


def _whole_number(query: Mapping[str, str], name: str, default: int) -> int:
    text = query.get(name, "")
    return min(int(text), MAX_PAGE) if text.isdecimal() and len(text) < 10 else default


async def telemetry(call: GatewayCall, body: Upload) -> RawReply:
    """Accepted and discarded."""
    async with _read_body(call, body):
        return _json({"status": "accepted"})


async def _forward(context: GatewayContext, request: ForwardedRequest, tenant: Tenant) -> RawReply:
    document = _document(request)
    rows = await context.fleet.store.servers()
    tag, composed = await _find_server(request)
    if composed:
        tag = await _locate(context, rows, tenant, composed)
        if tag:
            named = {"x-strata-model": _with_tag(composed, tag)}
            request = replace(request, headers={**request.headers, **named})
    # The only server is asked whatever the ids say.
    server = await _select(context, rows, tag if len(rows) > 1 else "", document.get("base_model"))
    server = await _awake(context, server, tenant)
    session = document.get("session_id")
    if not isinstance(session, str):
        return await _send(context, server, request, tenant)
    reply = await _send(context, server, await _with_session(context, server, tenant, request, document), tenant)
    if reply.status == 200 and "model_seq_id" in document:
        _remember(context, tenant, f"{session}:train:{document['model_seq_id']}", tag_of(server.job.id))
    return reply


def _with_tag(composed: str, tag: str) -> str:
    """The id at its server of the model that a client calls so."""
    session, _, rest = composed.partition(":")
    return f"{session}.{tag}:{rest}"


def _remember(context: GatewayContext, tenant: Tenant, composed: str, tag: str) -> None:
    if len(context.composed) >= _MAX_COMPOSED:
        context.composed.pop(next(iter(context.composed)))
    context.composed[tenant.name, composed] = tag


async def _locate(context: GatewayContext, rows: Sequence[ServerRow], tenant: Tenant, composed: str) -> str:
    """The tag of the server that has this model of the tenant; empty if none has. Sleeping ones are woken for it."""
    known = context.composed.get((tenant.name, composed))
    if known is not None:
        return known
    unsure: StrataError | None = None
    for row in sorted((row for row in rows if not _ended(row)), key=_by_readiness):
        tag = tag_of(row.job.id)
        asking = ForwardedRequest(method="GET", target=f"{BASE}/models/{quote(_with_tag(composed, tag))}", headers={})
        try:
            reply = await _send(context, await _awake(context, row, tenant), asking, tenant)
            await read_whole(reply)
        except StrataError as error:
            if context.stopping.is_set():
                raise
            unsure = error
            continue
        if reply.status == 200:
            _remember(context, tenant, composed, tag)
            return tag
    if unsure is not None:
        # The one that was not reached may have it.
        raise unsure
    return ""


async def complete(call: GatewayCall, body: Upload) -> RawReply:
    """Forward a completion to the training server of its model."""
    context = call.context
    tenant = await _tenant(call)
    async with AsyncExitStack() as stack:
        stack.enter_context(context.proxy.completions.admit(tenant.name))
        async with _read_body(call, body) as content:
            request = replace(_request(call, content), reply_s=COMPLETE_S)
            model = _completed_model(request)
            reply = await until_disconnect(call, context.stopping, _forward_model(context, request, tenant, model))
        if reply.close is not None:
            stack.push_async_callback(reply.close)
        # In flight until its client has the reply, or has left.
        return replace(reply, close=stack.pop_all().aclose)


async def complete_at(call: GatewayCall, server: ServerRow, name: str, body: ServerCompletion) -> RawReply:
    """A completion of this server, whatever its model is called; in one piece."""
    context = call.context
    tenant = await _tenant(call)
    headers = {"content-type": "application/json"}
    request = ForwardedRequest(
        method="POST", target=f"{OPENAI}/{name}", headers=headers, content=body.encode(), reply_s=COMPLETE_S
    )

    async def send() -> RawReply:
        reply = await _send_with_session(context, await _awake(context, server, tenant), request, tenant)
        return replace(reply, content=await read_whole(reply), close=None)

    with context.proxy.completions.admit(tenant.name):
        reply = await until_disconnect(call, context.stopping, send())
    if reply.status != 200:
        raise _completion_error(server, reply)
    return reply


def _completion_error(server: ServerRow, reply: RawReply) -> StrataError:
    """The error in the words of the training server."""
    assert isinstance(reply.content, bytes), "it was read whole"
    codes = {400: Code.INVALID, 403: Code.FORBIDDEN, 404: Code.NOT_FOUND, 429: Code.EXHAUSTED}
    try:
        message = _failed.decode(reply.content).error.message
    except msgspec.DecodeError:
        message = f"the training server {server.job.spec.label} replied with status {reply.status}"
    return StrataError(codes.get(reply.status, Code.UNAVAILABLE), message)


class _FailedReason(msgspec.Struct):
    message: str


class _FailedCompletion(msgspec.Struct):
    error: _FailedReason


_failed: Final = msgspec.json.Decoder(_FailedCompletion)


async def list_models(call: GatewayCall) -> RawReply:
    """The models that can be sampled, of all training servers; of those that sleep only the base models."""
    rows = await call.context.fleet.store.servers()
    replies = await _ask_all(call, "GET", lambda _: (f"{OPENAI}/models", b""))
    cards = [card for reply in replies for card in _listed(reply, "data")]
    asleep = [row.models[0] for row in rows if row.asleep and row.models]
    cards += [{"id": name, "object": "model", "created": 0, "owned_by": "strata", "root": name} for name in asleep]
    return _json({"object": "list", "data": cards})


async def show_model(call: GatewayCall) -> RawReply:
    """One model that can be sampled."""
    model = call.path["model"]
    # A client may have encoded the slashes of the path.
    request = replace(_request(call, b""), target=f"{OPENAI}/models/{quote(model, safe='/:')}")
    return await _forward_model(call.context, request, await _tenant(call), model)


async def _forward_model(context: GatewayContext, request: ForwardedRequest, tenant: Tenant, model: str) -> RawReply:
    """To the server of a base model or of a checkpoint, where a session may have to be opened."""
    rows = await context.fleet.store.servers()
    found = _TAGGED.search(model.encode()) if len(rows) > 1 else None
    server = await _select(context, rows, "" if found is None else found[1].decode(), model)
    return await _send_with_session(context, await _awake(context, server, tenant), request, tenant)


async def _send_with_session(
    context: GatewayContext, server: ServerRow, request: ForwardedRequest, tenant: Tenant
) -> RawReply:
    """With the id for a session that the server may have to open."""
    session = _at_server(Ids(context.clock).new("session"), tag_of(server.job.id))
    request = replace(request, headers={**request.headers, "x-strata-session": session})
    return await _send(context, server, request, tenant)


def _completed_model(request: ForwardedRequest) -> str:
    content = request.content
    if request.headers.get("content-encoding", "").lower() == "zstd":
        content = decompress_frames(content, MAX_COMPLETION)
    try:
        return _named.decode(content).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StrataError(Code.INVALID, f"the body names no model: {error}", path="model") from None


class _NamesModel(msgspec.Struct):
    model: str


_named: Final = msgspec.json.Decoder(_NamesModel)


async def _send(context: GatewayContext, server: ServerRow, request: ForwardedRequest, tenant: Tenant) -> RawReply:
    if tenant.role >= Role.RESEARCHER and context.fleet.now_s() - server.used_at_s > TOUCH_S:
        await context.fleet.touch_server(server)
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
                await context.fleet.touch_server(server)

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


async def _select(context: GatewayContext, rows: Sequence[ServerRow], tag: str, base_model: object) -> ServerRow:
    """The server with this tag, or the one of the base model, or one that can answer; NOT_FOUND if there is none."""
    if tag:
        named = [row for row in rows if tag_of(row.job.id) == tag]
        missing = StrataError(Code.NOT_FOUND, "the training server of this id is no job of this hub any more")
    elif isinstance(base_model, str) and base_model:
        live = [row for row in rows if not _ended(row)]
        # The only one knows best whether it has another name for its model, and says so.
        named = [row for row in live if base_model in row.models] or (live if len(live) == 1 else [])
        missing = StrataError(Code.NOT_FOUND, f"no training server of this hub has the model {base_model[:200]!r}")
        if not named and await _pending_servers(context, base_model.rpartition("/")[2]):
            missing = _starting(base_model)
    else:
        # A question to no server in particular: one that is awake can answer it.
        named = [row for row in rows if not _ended(row)]
        missing = StrataError(Code.NOT_FOUND, "this hub has no training server", hint='kind = "server" in a manifest')
        if not named and await _pending_servers(context, ""):
            missing = _starting("")
    if not named:
        raise missing
    return min(named, key=_by_readiness)


def _by_readiness(row: ServerRow) -> tuple[bool, bool]:
    """Sorts servers that serve before those that start, and those before the ones that have to be woken."""
    return not row.serving, row.asleep


def _ended(row: ServerRow) -> bool:
    """Whether a person, or its failures, ended this server: a request does not start it again."""
    return row.job.status not in UNFINISHED and not row.asleep


async def _pending_servers(context: GatewayContext, model: str) -> bool:
    """Whether a server for this model, or any, waits for a host or starts for the first time."""
    rows = await context.fleet.store.jobs(JobFilter(status=UNFINISHED, model=model, limit=1000))
    return any(row.spec.kind == "server" for row in rows)


async def _awake(context: GatewayContext, server: ServerRow, tenant: Tenant) -> ServerRow:
    """The server when it serves; UNAVAILABLE if that takes long, so that the client tries again.

    FORBIDDEN if it is asleep and the caller only reads, or if the quota of its owner is full.
    """
    until_s = context.fleet.now_s() + WAKE_S
    while not server.serving:
        # Also one that falls asleep while a request waits for it: as it starts, nothing has used it yet.
        if server.asleep:
            await _wake(context, server, tenant)
        if _ended(server) or context.fleet.now_s() > until_s:
            raise _starting(server.models[0] if server.models else "")
        await asyncio.sleep(WAKE_POLL_S)
        rows = await context.fleet.store.servers()
        server = next(row for row in rows if row.job.id == server.job.id)
        await _close_unused(context, rows)
    return server


async def _wake(context: GatewayContext, server: ServerRow, tenant: Tenant) -> None:
    asleep = f"the training server of {server.models[0] if server.models else server.job.spec.label} is asleep"
    if tenant.role < Role.RESEARCHER:
        raise StrataError(Code.FORBIDDEN, asleep, hint="a request of a researcher wakes it")
    owner = server.job.owner
    operators = {key.name for key in await context.identity.keys() if key.role >= Role.OPERATOR}
    submitter = Submitter(owner=owner, operator=owner == OPERATOR.owner or owner in operators)
    try:
        await context.fleet.wake_server(server.job.id, "hub", submitter)
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


async def _with_session(
    context: GatewayContext, server: ServerRow, tenant: Tenant, request: ForwardedRequest, document: Mapping[str, Any]
) -> ForwardedRequest:
    """The request with the id of its session at this server, where the session is opened if it is not yet."""
    session = str(document["session_id"])
    own = _at_server(session, tag_of(server.job.id))
    headers = {"content-type": "application/json", "x-strata-session": own}
    if _opened_by(context, session) not in ("", tenant.name):
        raise StrataError(Code.NOT_FOUND, f"there is no session {session!r}")
    _, content = context.sessions.get(session, ("", b""))
    opening = ForwardedRequest(
        method="POST", target=f"{BASE}/create_session", headers=headers, content=content or b"{}"
    )
    opened = await _send(context, server, opening, tenant)
    if opened.status == _BAD_REQUEST:
        raise _refusal(await read_whole(opened))
    if opened.status != 200:
        message = f"the training server did not open the session: status {opened.status}"
        raise StrataError(Code.UNAVAILABLE, message, hint="try again")
    if own == session:
        return request
    encoded = msgspec.json.encode(dict(document) | {"session_id": own})
    headers = {name: value for name, value in request.headers.items() if name != "content-encoding"}
    return ForwardedRequest(method=request.method, target=request.target, headers=headers, content=encoded)


async def _send_to_all(call: GatewayCall, body: Upload, verb: str) -> None:
    async with _read_body(call, body) as content:
        document = _decode(content)
        session = document.get("session_id")
        if not isinstance(session, str):
            raise StrataError(Code.INVALID, "session_id: expected a session")

        def request(tag: str) -> tuple[str, bytes]:
            return f"{BASE}/{verb}", msgspec.json.encode(document | {"session_id": _at_server(session, tag)})

        await _ask_all(call, "POST", request)


async def _ask_all(call: GatewayCall, method: str, request: Any) -> Sequence[Mapping[str, Any]]:
    """The replies of all servers that serve. `request` makes target and content for the server with a tag."""
    context = call.context
    tenant = await _tenant(call)

    async def ask(server: ServerRow) -> Mapping[str, Any]:
        target, content = request(tag_of(server.job.id))
        headers = {"content-type": "application/json"}
        forwarded = ForwardedRequest(method=method, target=target, headers=headers, content=content)
        key = context.front_key(server.job.id, server.epoch)
        try:
            async with asyncio.timeout(ASK_S):
                reply = await context.proxy.send(server.address, forwarded, key=key, tenant=tenant)
                content = await read_whole(reply)
            replied = _decode(content) if reply.status == 200 else {}
        except (StrataError, TimeoutError):
            # One that has just gone, or replies with what nobody can read, has nothing to say; the others have.
            return {}
        if reply.status == _BAD_REQUEST and method == "POST":
            # Whoever sends a heartbeat that no server takes would lose the session without a word.
            raise _refusal(content)
        if reply.status == 200 and method == "POST":
            await context.fleet.touch_server(server)
        return replied

    rows = [row for row in await context.fleet.store.servers() if row.serving]
    return await asyncio.gather(*map(ask, rows))


@asynccontextmanager
async def _read_body(call: GatewayCall, body: Upload) -> AsyncIterator[bytes]:
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


def _request(call: GatewayCall, content: bytes) -> ForwardedRequest:
    headers = passed_headers(dict(call.headers), tls=call.context.tls)
    return ForwardedRequest(method=call.method, target=call.target, headers=headers, content=content)


async def _tenant(call: GatewayCall) -> Tenant:
    key = await call.context.identity.key(call.caller.id) if call.caller.kind is CallerKind.KEY else None
    if key is None or call.caller.role is None:
        raise StrataError(
            Code.FORBIDDEN,
            "a training server of this hub has tenants, each with an API key; the operator token is no such key",
            hint="strata keys create NAME --role researcher",
        )
    return Tenant(key.name, call.caller.role, key_id=key.id)


async def _find_server(request: ForwardedRequest) -> tuple[str, str]:
    """The tag in the first id of a request, or that id if its client composed it; both empty if there is none."""
    found = _NAMED.search(request.target.replace("%3A", ":").encode())
    if found is None and request.headers.get("content-encoding", "").lower() == "zstd":
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


def _unsigned(query: str) -> bytes:
    """The content of the token of a signed URL. The server checks the signature; here it only names the server."""
    match = TOKEN.fullmatch(query)
    try:
        return b"" if match is None else base64.urlsafe_b64decode(match[1] + "=" * (-len(match[1]) % 4))
    except ValueError:
        return b""


def _document(request: ForwardedRequest) -> dict[str, Any]:
    """The content of a request that opens a model or a sampler; empty for all others."""
    path = request.target.partition("?")[0]
    if path not in _OPENING or len(request.content) > MIB:
        return {}
    content = request.content
    if request.headers.get("content-encoding", "").lower() == "zstd":
        content = decompress_frames(content, MIB)
    return _decode(content)


def _decode(content: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(content or b"{}", type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise StrataError(Code.INVALID, f"the body is not a JSON object: {error}") from None


def _refusal(content: bytes) -> StrataError:
    """The error of a training server that refused a body of the client's, which the hub had taken as it was."""
    try:
        problem = msgspec.json.decode(content, type=ErrorReply).error
    except msgspec.DecodeError:
        return StrataError(Code.INVALID, "the training server refused the body, and did not say why")
    return StrataError(Code.INVALID, problem.message, hint=problem.hint)


def _json(value: Mapping[str, Any]) -> RawReply:
    return RawReply(msgspec.json.encode(value))


ROUTES: Final = (
    Route("POST", f"{BASE}/create_session", RESEARCHER, create_session, 8 * KIB, owner="tenant"),
    Route("POST", f"{BASE}/session_heartbeat", RESEARCHER, session_heartbeat, owner="tenant"),
    Route("POST", f"{BASE}/kill_session", RESEARCHER, kill_session, owner="tenant"),
    Route("POST", f"{BASE}/sessions/{{session_id}}/finish", RESEARCHER, finish_session, owner="tenant"),
    Route("GET", f"{BASE}/sessions/{{session_id}}", VIEWER, show_session),
    *(Route("GET", f"{BASE}/{name}", VIEWER, listed, any_query=True, operation=f"servers.{name}") for name in _LISTS),
    Route("GET", f"{BASE}/get_server_capabilities", VIEWER, capabilities),
    Route("POST", f"{BASE}/telemetry", VIEWER, telemetry, 4 * MIB, owner="none: it is discarded"),
    Route("GET", ARCHIVE, PUBLIC, download, 1 * KIB, any_query=True),
    Route("GET", TOKENIZER, VIEWER, tokenizer_file, KIB, any_query=True),
    Route("HEAD", TOKENIZER, VIEWER, tokenizer_head, KIB, any_query=True),
    Route(
        "POST",
        f"{OPENAI}/chat/completions",
        RESEARCHER,
        complete,
        MAX_COMPLETION,
        owner="tenant",
        operation="servers.chat_completions",
    ),
    Route(
        "POST",
        f"{OPENAI}/completions",
        RESEARCHER,
        complete,
        MAX_COMPLETION,
        owner="tenant",
        operation="servers.completions",
    ),
    Route("GET", f"{OPENAI}/models", VIEWER, list_models),
    Route("GET", f"{OPENAI}/models/{{model:path}}", VIEWER, show_model),
    *(
        Route(
            "POST",
            f"{BASE}/{name}",
            VIEWER,
            forward,
            any_query=True,
            owner=READS,
            operation=f"servers.{name.replace('/', '_')}",
        )
        for name in _READING
    ),
    Route(
        "POST",
        f"{BASE}/{{rest:path}}",
        RESEARCHER,
        forward,
        MAX_BODY,
        any_query=True,
        owner="tenant",
        operation="servers.post",
    ),
    Route("GET", f"{BASE}/{{rest:path}}", VIEWER, forward, any_query=True, operation="servers.get"),
    Route("PUT", f"{BASE}/{{rest:path}}", RESEARCHER, forward, any_query=True, owner="tenant", operation="servers.put"),
    Route(
        "DELETE",
        f"{BASE}/{{rest:path}}",
        RESEARCHER,
        forward,
        any_query=True,
        owner="tenant",
        operation="servers.delete",
    ),
)
