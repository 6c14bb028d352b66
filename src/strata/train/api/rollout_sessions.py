"""Routes of rollout sessions: open, list, read and delete them, and OpenAI's completions and models below the path of
one, whose replies are recorded turn by turn.

A harness needs an address, a key and OpenAI's protocol: it calls below the path of its session what it would call below
`/v1`.
"""

from __future__ import annotations

import asyncio

from strata.http.route import KIB, RESEARCHER, VIEWER, RawReply, Route
from strata.train.api import completions as plain
from strata.train.api.context import ApiCall
from strata.train.api.rollout_files import FOLDER, FORMAT, RolloutFiles, SessionHead, StoredSession
from strata.train.api.rollout_turns import RolloutTurns
from strata.train.wire import openai, rollout_sessions
from strata.train.wire.rollout_sessions import PATH, RolloutSessionCard, RolloutSessionCards, RolloutSessionReply


async def open_session(call: ApiCall, body: rollout_sessions.OpenRolloutSession) -> RolloutSessionReply:
    """A new rollout session, with the path for its harness."""
    head = SessionHead(
        format=FORMAT,
        session_id=call.context.ids.new("rollout"),
        prompts=body.prompts,
        created_s=call.context.clock.wall_s(),
    )
    tenant = await call.context.tenant(call.caller)
    return _reply(await asyncio.to_thread(_files(call).open, tenant, head), 0)


async def list_sessions(call: ApiCall) -> RolloutSessionCards:
    """The caller's rollout sessions, the newest first."""
    tenant, now_s = await call.context.tenant(call.caller), call.context.clock.wall_s()
    cards = [
        RolloutSessionCard(
            id=each.session_id,
            base_path=rollout_sessions.base_path(each.session_id),
            size=each.size,
            expires_at=int(each.expires_s),
        )
        for each in await asyncio.to_thread(_files(call).list_files, tenant, now_s)
    ]
    return RolloutSessionCards(data=cards)


async def show(call: ApiCall, query: rollout_sessions.RolloutQuery) -> RolloutSessionReply:
    """The turns of a rollout session, and its branches with their tokens."""
    stored = await _read(call)
    return await asyncio.to_thread(_reply, stored, query.first_branch)


async def delete(call: ApiCall) -> None:
    """Delete a rollout session with what it recorded."""
    tenant = await call.context.tenant(call.caller)
    await asyncio.to_thread(_files(call).remove, tenant, call.path["session_id"])


async def chat_completions(call: ApiCall, body: openai.ChatBody) -> openai.ChatCompletion | RawReply:
    """Reply to a chat, and record the turn → one reply, or a stream of events"""
    plan = await plain.plan_chat(call, body, await _turns(call))
    # It would be held while the samples run, and may be large.
    del body
    return await plain.complete(call, plan)


async def completions(call: ApiCall, body: openai.CompletionBody) -> openai.TextCompletion | RawReply:
    """Continue texts, or tokens, and record the turns → one reply, or a stream of events"""
    plan = await plain.plan_texts(call, body, await _turns(call))
    del body
    return await plain.complete(call, plan)


async def list_models(call: ApiCall) -> openai.ModelCards:
    """The models that can be sampled, for a client that lists them before it starts"""
    await _read(call)
    return await plain.list_models(call)


async def _turns(call: ApiCall) -> RolloutTurns:
    tenant = await call.context.tenant(call.caller)
    return RolloutTurns(call.context, _files(call), tenant, await _read(call))


async def _read(call: ApiCall) -> StoredSession:
    tenant, now_s = await call.context.tenant(call.caller), call.context.clock.wall_s()
    return await asyncio.to_thread(_files(call).read, tenant, call.path["session_id"], now_s)


def _files(call: ApiCall) -> RolloutFiles:
    return RolloutFiles(call.context.settings.data / FOLDER)


def _reply(stored: StoredSession, first_branch: int) -> RolloutSessionReply:
    branches, next_branch = rollout_sessions.branch_page(stored.turns, first_branch)
    head = stored.head
    return RolloutSessionReply(
        id=head.session_id,
        base_path=rollout_sessions.base_path(head.session_id),
        prompts=head.prompts,
        created=int(head.created_s),
        expires_at=int(stored.expires_s),
        turns=rollout_sessions.turn_replies(stored.turns),
        branches=branches,
        next_branch=next_branch,
    )


_SESSION = f"{PATH}/{{session_id}}"
ROUTES = (
    Route("POST", PATH, RESEARCHER, open_session, KIB, owner="caller"),
    Route("GET", PATH, VIEWER, list_sessions, KIB),
    Route("GET", _SESSION, VIEWER, show, KIB),
    Route("DELETE", _SESSION, RESEARCHER, delete, KIB, owner="tenant"),
    Route("POST", f"{_SESSION}/chat/completions", RESEARCHER, chat_completions, plain.MAX_BODY, owner="tenant"),
    Route("POST", f"{_SESSION}/completions", RESEARCHER, completions, plain.MAX_BODY, owner="tenant"),
    Route("GET", f"{_SESSION}/models", VIEWER, list_models, KIB),
)
