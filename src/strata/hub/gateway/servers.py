"""Routes `/api/v1` of the hub: sessions over several training servers, capabilities, lists merged from all,
completions, and which requests wake a server.

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

import re
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Annotated, Final
from urllib.parse import parse_qsl, quote, urlencode

import msgspec

from strata.base.errors import Code, StrataError
from strata.base.ids import Ids
from strata.fleet.records import ServerRow
from strata.fleet.wire.base import Message
from strata.http.disconnect import until_disconnect
from strata.http.route import KIB, MIB, PUBLIC, READS, RESEARCHER, VIEWER, RawReply, Route, Upload
from strata.hub.context import GatewayCall, GatewayContext
from strata.hub.gateway.dispatch import (
    BAD_REQUEST,
    BASE,
    BROKEN,
    JSON,
    ask_all,
    by_readiness,
    find_id,
    forwarded_request,
    has_ended,
    locate,
    named_tag,
    no_server,
    pending_servers,
    read_body,
    refusal,
    remember,
    select_server,
    send,
    send_opening,
    session_at,
    tag_of,
    tenant_of,
    wake_server,
    with_tag,
)
from strata.hub.gateway.proxy import ARCHIVE, MAX_BODY, TOKEN, ForwardedRequest, Tenant, read_whole
from strata.train.api import front
from strata.train.wire.grants import read_grant, token_refused
from strata.train.wire.openai import ModelCard
from strata.train.wire.replies import AcceptedReply, Cursor, SessionHeartbeatReply, SessionReply

OPENAI: Final = "/v1"
MAX_COMPLETION: Final = 4 * MIB
COMPLETE_S: Final = 600.0
"""How long a completion may take before its reply begins, as long as OpenAI's client library waits."""
TOKENIZER: Final = "/hf/{repository:path}/resolve/{revision}/{file}"
MAX_PAGE: Final = 1000
_OPENING: Final = frozenset({f"{BASE}/{name}" for name in ("create_model", "create_sampling_session", "load_weights")})
"""What a client sends with the id of its session at the hub."""
_READING: Final = ("get_info", "weights_info", "list_checkpoints", "client/config", "client/dynamic_config")
"""What is sent with POST and changes nothing."""
_MAX_SESSIONS: Final = 10_000
_MAX_OWN_SESSIONS: Final = 1000
_LISTS: Final = ("training_runs", "checkpoints", "sessions")
_AT_FRONT: Final = re.compile(rf"{front.AT_FRONT}([0-9a-z_]{{4,64}})")
"""The key of this hub that requested a signed URL."""
_FAILURES: Final = {400: Code.INVALID, 403: Code.FORBIDDEN, 404: Code.NOT_FOUND, 429: Code.EXHAUSTED}


class ServerCompletion(Message, frozen=True, kw_only=True, omit_defaults=True):
    """What the playground sends to the OpenAI-compatible endpoints of a training server; that server checks it."""

    model: Annotated[str, msgspec.Meta(max_length=1000)]
    temperature: float
    max_tokens: int
    logprobs: bool | int | None = None
    prompt: str | None = None
    messages: tuple[dict[str, str], ...] | None = None


class _NamedModel(msgspec.Struct):
    model: str


class _Opening(msgspec.Struct):
    """What the hub reads of a request that opens a model or a sampler; the server reads and checks the rest."""

    session_id: str | None = None
    model_seq_id: int | None = None
    base_model: str | None = None


class _Listed(msgspec.Struct):
    """How new an entry of a list is. The ids of sessions say so themselves."""

    last_request_time: str = ""
    time: str = ""


_named: Final = msgspec.json.Decoder(_NamedModel)
_opening: Final = msgspec.json.Decoder(_Opening)
_fields: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_entry: Final = msgspec.json.Decoder(_Listed | str)


async def forward(call: GatewayCall, body: Upload) -> RawReply:
    """Forward a request to the training server that its ids or its base model name."""
    tenant = await tenant_of(call)
    async with read_body(call, body) as content:
        request = forwarded_request(call, content)
        return await until_disconnect(call, call.context.stopping, _forward(call.context, request, tenant))


async def download(call: GatewayCall, body: Upload) -> RawReply:
    """The content of a URL that a training server has signed. Anybody may ask, so that wakes no server."""
    context = call.context
    async for _ in body:
        pass
    rows = await context.fleet.store.jobs.servers()
    token = TOKEN.fullmatch(call.target.partition("?")[2])
    grant = None if token is None else read_grant(token[1])
    tag = "" if grant is None else named_tag(grant.subject)
    server = next((row for row in rows if len(rows) == 1 or tag_of(row.job.id) == tag), None)
    if server is None:
        raise StrataError(Code.NOT_FOUND, "no training server of this hub has signed this address")
    if not server.serving:
        raise StrataError(Code.UNAVAILABLE, "the training server that signed this address does not serve now")
    requested_by = None if grant is None else _AT_FRONT.fullmatch(grant.key_id)
    key = None if requested_by is None else await context.identity.key(requested_by[1])
    if key is None or not key.valid(context.clock.wall_s()):
        # In the words of the server, which checks the signature and the time.
        raise token_refused()
    sending = context.proxy.send(server.address, forwarded_request(call, b""), key="", tenant=None)
    return await until_disconnect(call, context.stopping, sending)


async def tokenizer_file(call: GatewayCall, body: Upload) -> RawReply:
    """A file of the tokenizer of a base model, at the address that a Hugging Face Hub has."""
    context = call.context
    tenant = await tenant_of(call)
    async for _ in body:
        pass
    repository = call.path["repository"]
    rows = [row for row in await context.fleet.store.jobs.servers() if not has_ended(row)]
    # A server may know its tokenizer by a name that is none of its base model.
    named = [row for row in rows if repository in row.models] or [row for row in rows if row.serving]
    reply = failure = None
    for row in sorted(named, key=by_readiness):
        try:
            server = await wake_server(context, row, tenant)
            sending = send(context, server, forwarded_request(call, b""), tenant)
            reply = await until_disconnect(call, context.stopping, sending)
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


async def create_session(call: GatewayCall, body: Upload) -> RawReply:
    """Open a session at the hub; servers learn of it when it uses them."""
    context = call.context
    rows = await context.fleet.store.jobs.servers()
    if not rows and not await pending_servers(context, ""):
        raise no_server()
    tenant = await tenant_of(call)
    async with read_body(call, body) as content:
        session = Ids(context.clock).new("session")
        own = [id_ for id_, (owner, _) in context.sessions.items() if owner == tenant.name]
        if len(own) >= _MAX_OWN_SESSIONS or len(context.sessions) >= _MAX_SESSIONS:
            context.sessions.pop(own[0] if len(own) >= _MAX_OWN_SESSIONS else next(iter(context.sessions)))
        context.sessions[session] = (tenant.name, content)
    return _json(SessionReply(session_id=session))


async def session_heartbeat(call: GatewayCall, body: Upload) -> RawReply:
    """Keep a session alive at all servers that have it."""
    await _send_to_all(call, body, "session_heartbeat")
    return _json(SessionHeartbeatReply())


async def kill_session(call: GatewayCall, body: Upload) -> RawReply:
    """End a session at all servers that have it, and unload its models."""
    await _send_to_all(call, body, "kill_session")
    return RawReply(b"", 204)


async def finish_session(call: GatewayCall, body: Upload) -> RawReply:
    """Finish a session at all servers that have it."""
    session = call.path["session_id"]
    async with read_body(call, body) as content:
        await ask_all(call, "POST", lambda tag: (f"{BASE}/sessions/{session_at(session, tag)}/finish", content))
    if _opened_by(call.context, session) == (await tenant_of(call)).name:
        call.context.sessions.pop(session)
    return RawReply(b"", 204)


async def capabilities(call: GatewayCall) -> RawReply:
    """The models that can be trained here, of all servers; those that sleep by their names alone."""
    rows = await call.context.fleet.store.jobs.servers()
    replies = await ask_all(call, "GET", lambda _: (f"{BASE}/get_server_capabilities", b""))
    models: list[object] = [model for reply in replies for model in reply.supported_models]
    models += [{"model_name": row.models[0]} for row in rows if row.asleep and row.models]
    return _json({"supported_models": models})


async def listed(call: GatewayCall, body: Upload) -> RawReply:
    """Training runs, checkpoints or sessions of the caller: of the only server, or of all that are awake."""
    rows = await call.context.fleet.store.jobs.servers()
    if len([row for row in rows if not has_ended(row)]) <= 1:
        return await forward(call, body)
    path, _, query = call.target.partition("?")
    name = path.rpartition("/")[2]
    asked = dict(parse_qsl(query))
    offset, limit = _whole_number(asked, "offset", 0), _whole_number(asked, "limit", 100)
    page = urlencode({"offset": 0, "limit": min(offset + limit, MAX_PAGE)})
    replies = await ask_all(call, "GET", lambda _: (f"{path}?{page}", b""))
    entries: list[msgspec.Raw] = [entry for reply in replies for entry in getattr(reply, name)]
    entries.sort(key=_newness, reverse=True)
    merged: dict[str, object] = {name: entries[offset : offset + limit]}
    totals = [reply.cursor.total_count for reply in replies if reply.cursor is not None]
    if totals:
        merged["cursor"] = Cursor(offset=offset, limit=limit, total_count=sum(totals))
    return _json(merged)


def _newness(entry: msgspec.Raw) -> str:
    try:
        found = _entry.decode(entry)
    except BROKEN:
        return ""
    return found if isinstance(found, str) else found.last_request_time or found.time


async def show_session(call: GatewayCall, body: Upload) -> RawReply:
    """One session with its models and samplers, at all servers that have it."""
    session = call.path["session_id"]
    if named_tag(session):
        return await forward(call, body)
    replies = await ask_all(call, "GET", lambda tag: (f"{BASE}/sessions/{session_at(session, tag)}", b""))
    if not replies and _opened_by(call.context, session) != (await tenant_of(call)).name:
        raise StrataError(Code.NOT_FOUND, f"there is no session {session[:100]!r}")
    return _json(
        {
            "training_run_ids": [run for reply in replies for run in reply.training_run_ids],
            "sampler_ids": [sampler for reply in replies for sampler in reply.sampler_ids],
            "user_metadata": {name: value for reply in replies for name, value in reply.user_metadata.items()},
        }
    )


def _opened_by(context: GatewayContext, session: str) -> str:
    """The tenant that opened this session at this hub; empty if none did since the hub started."""
    return context.sessions[session][0] if session in context.sessions else ""


def _whole_number(query: Mapping[str, str], name: str, default: int) -> int:
    text = query.get(name, "")
    return min(int(text), MAX_PAGE) if text.isdecimal() and len(text) < 10 else default


async def telemetry(call: GatewayCall, body: Upload) -> RawReply:
    """Accepted and discarded."""
    async with read_body(call, body):
        return _json(AcceptedReply())


async def _forward(context: GatewayContext, request: ForwardedRequest, tenant: Tenant) -> RawReply:
    opening = _read_opening(request)
    rows = await context.fleet.store.jobs.servers()
    tag, composed = await find_id(request)
    if composed:
        tag = await locate(context, rows, tenant, composed)
        if tag:
            request = request.with_headers({front.MODEL: with_tag(composed, tag)})
    # The only server is asked whatever the ids say.
    server = await select_server(context, rows, tag if len(rows) > 1 else "", opening.base_model or "")
    server = await wake_server(context, server, tenant)
    session = opening.session_id
    if session is None:
        return await send(context, server, request, tenant)
    reply = await send(context, server, await _with_session(context, server, tenant, request, session), tenant)
    if reply.status == 200 and opening.model_seq_id is not None:
        remember(context, tenant, f"{session}:train:{opening.model_seq_id}", tag_of(server.job.id))
    return reply


async def complete(call: GatewayCall, body: Upload) -> RawReply:
    """Forward a completion to the training server of its model."""
    context = call.context
    tenant = await tenant_of(call)
    async with AsyncExitStack() as stack:
        stack.enter_context(context.proxy.completions.admit(tenant.name))
        async with read_body(call, body) as content:
            request = replace(forwarded_request(call, content), reply_s=COMPLETE_S)
            model = _completed_model(request)
            reply = await until_disconnect(call, context.stopping, _forward_model(context, request, tenant, model))
        if reply.close is not None:
            stack.push_async_callback(reply.close)
        # In flight until its client has the reply, or has left.
        return replace(reply, close=stack.pop_all().aclose)


async def complete_at(call: GatewayCall, server: ServerRow, name: str, body: ServerCompletion) -> RawReply:
    """A completion of this server, whatever its model is called; in one piece."""
    context = call.context
    tenant = await tenant_of(call)
    content = msgspec.json.encode(body)
    request = ForwardedRequest(
        method="POST", target=f"{OPENAI}/{name}", headers=JSON, content=content, reply_s=COMPLETE_S
    )

    async def reply_whole() -> tuple[RawReply, bytes]:
        reply = await send_opening(context, await wake_server(context, server, tenant), request, tenant)
        return reply, await read_whole(reply)

    with context.proxy.completions.admit(tenant.name):
        reply, content = await until_disconnect(call, context.stopping, reply_whole())
    if reply.status != 200:
        unread = f"the training server {server.job.spec.label} replied with status {reply.status}"
        raise refusal(content, _FAILURES.get(reply.status, Code.UNAVAILABLE), unread)
    return replace(reply, content=content, close=None)


async def list_models(call: GatewayCall) -> RawReply:
    """The models that can be sampled, of all training servers; of those that sleep only the base models."""
    rows = await call.context.fleet.store.jobs.servers()
    replies = await ask_all(call, "GET", lambda _: (f"{OPENAI}/models", b""))
    cards: list[object] = [card for reply in replies for card in reply.data]
    asleep = [row.models[0] for row in rows if row.asleep and row.models]
    cards += [ModelCard(id=name, created=0, owned_by="strata", root=name) for name in asleep]
    return _json({"object": "list", "data": cards})


async def show_model(call: GatewayCall) -> RawReply:
    """One model that can be sampled."""
    model = call.path["model"]
    # A client may have encoded the slashes of the path.
    request = replace(forwarded_request(call, b""), target=f"{OPENAI}/models/{quote(model, safe='/:')}")
    return await _forward_model(call.context, request, await tenant_of(call), model)


async def _forward_model(context: GatewayContext, request: ForwardedRequest, tenant: Tenant, model: str) -> RawReply:
    """Forwards to the server of a base model or of a checkpoint, where a session may have to be opened."""
    rows = await context.fleet.store.jobs.servers()
    server = await select_server(context, rows, named_tag(model) if len(rows) > 1 else "", model)
    return await send_opening(context, await wake_server(context, server, tenant), request, tenant)


def _completed_model(request: ForwardedRequest) -> str:
    try:
        return _named.decode(request.unpacked(MAX_COMPLETION)).model
    except BROKEN as error:
        raise StrataError(Code.INVALID, f"the body names no model: {error}", path="model") from None


async def _with_session(
    context: GatewayContext, server: ServerRow, tenant: Tenant, request: ForwardedRequest, session: str
) -> ForwardedRequest:
    """The request with the id of its session at this server, where the session is opened if it is not yet."""
    own = session_at(session, tag_of(server.job.id))
    if _opened_by(context, session) not in ("", tenant.name):
        raise StrataError(Code.NOT_FOUND, f"there is no session {session!r}")
    _, content = context.sessions.get(session, ("", b""))
    headers = {**JSON, front.SESSION: own}
    opening = ForwardedRequest(
        method="POST", target=f"{BASE}/create_session", headers=headers, content=content or b"{}"
    )
    opened = await send(context, server, opening, tenant)
    if opened.status == BAD_REQUEST:
        raise refusal(await read_whole(opened))
    if opened.status != 200:
        message = f"the training server did not open the session: status {opened.status}"
        raise StrataError(Code.UNAVAILABLE, message, hint="try again")
    if own == session:
        return request
    headers = {name: value for name, value in request.headers.items() if name != "content-encoding"}
    return replace(request, headers=headers, content=_in_session(request.unpacked(MIB), own))


def _in_session(content: bytes, session: str) -> bytes:
    """The body with another session. What the hub does not know passes as it came."""
    return msgspec.json.encode(_fields.decode(content) | {"session_id": msgspec.Raw(msgspec.json.encode(session))})


async def _send_to_all(call: GatewayCall, body: Upload, verb: str) -> None:
    async with read_body(call, body) as content:
        session = _decode_opening(content).session_id
        if session is None:
            raise StrataError(Code.INVALID, "session_id: expected a session")
        known = session
        await ask_all(call, "POST", lambda tag: (f"{BASE}/{verb}", _in_session(content, session_at(known, tag))))


def _read_opening(request: ForwardedRequest) -> _Opening:
    """Reads a request that opens a model or a sampler; empty for all others."""
    path = request.target.partition("?")[0]
    if path not in _OPENING or len(request.content) > MIB:
        return _Opening()
    return _decode_opening(request.unpacked(MIB))


def _decode_opening(content: bytes) -> _Opening:
    try:
        return _opening.decode(content or b"{}")
    except BROKEN as error:
        raise StrataError(Code.INVALID, f"the body is not a JSON object of the protocol: {error}") from None


def _json(value: object) -> RawReply:
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
    Route("HEAD", TOKENIZER, VIEWER, tokenizer_file, KIB, any_query=True, operation="servers.tokenizer_head"),
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
