"""Routes of sessions: one for each client program, with heartbeats and the models it made."""

from __future__ import annotations

from strata.http.route import KIB, RESEARCHER, VIEWER, Route
from strata.train.api.context import ApiCall
from strata.train.api.front import session_from_front
from strata.train.core import messages, ops
from strata.train.wire import bodies, replies


async def create(call: ApiCall, body: bodies.CreateSessionBody) -> replies.SessionReply:
    """A new session."""
    session_id = session_from_front(call.caller, call.headers) or call.context.ids.new("session")
    metadata = dict(bodies.check_metadata(body.user_metadata or {}))
    if body.display_name is not None:
        metadata["display_name"] = body.display_name
    opening = messages.OpenSession(session_id, body.tags, metadata, body.sdk_version)
    await call.request(opening, messages.Done)
    return replies.SessionReply(session_id=session_id)


async def heartbeat(call: ApiCall, body: bodies.SessionBody) -> replies.SessionHeartbeatReply:
    """The client is still there."""
    await call.request(messages.SessionHeartbeat(body.session_id), messages.Done)
    return replies.SessionHeartbeatReply()


async def finish(call: ApiCall, body: bodies.FinishSessionBody) -> None:
    """The client is done."""
    reason = body.reason.type if body.detail is None else f"{body.reason.type}: {body.detail}"
    await call.request(messages.FinishSession(call.path["session_id"], reason), messages.Done)


async def kill(call: ApiCall, body: bodies.SessionBody) -> None:
    """End a session and unload the models it made."""
    session = await _session(call, body.session_id)
    await call.request(messages.FinishSession(body.session_id, "killed"), messages.Done)
    for model_id in session.models:
        model = await call.request(messages.DescribeModel(model_id), messages.ModelView)
        if not model.unloaded:
            await call.submit(ops.UnloadModel(model_id))


async def listed(call: ApiCall, query: bodies.PageQuery) -> replies.SessionsReply:
    """The caller's sessions, the newest first."""
    sessions = await _sessions(call)
    return replies.SessionsReply(sessions=[each.session_id for each in sessions[query.offset :][: query.limit]])


async def show(call: ApiCall) -> replies.SessionInfo:
    """One session."""
    session = await _session(call, call.path["session_id"])
    return replies.SessionInfo(
        training_run_ids=session.models,
        sampler_ids=session.samplers,
        user_metadata=bodies.metadata_as_text(session.user_metadata),
    )


async def state(call: ApiCall, query: bodies.SessionQuery) -> replies.SessionStates:
    """The caller's sessions, or the one that is named, with their models."""
    sessions = await _sessions(call) if query.session_id is None else [await _session(call, query.session_id)]
    return replies.SessionStates(
        sessions=[
            replies.SessionState(
                session_id=each.session_id,
                opened_at=replies.to_datetime(each.opened_at_s),
                finished=each.finished,
                models=each.models,
            )
            for each in sessions
        ]
    )


async def model(call: ApiCall) -> replies.ModelState:
    """The state of a model: for a client that continues it after the one that made it has ended."""
    view = await call.request(messages.DescribeModel(call.path["model_id"]), messages.ModelView)
    return replies.ModelState(
        model_id=view.model_id,
        session_id=view.session_id,
        base_model=view.base_model,
        next_seq_id=view.wanted,
        taken_seq_ids=view.held,
        done_seq_id=view.next_seq - 1,
        unloaded=view.unloaded,
    )


async def _sessions(call: ApiCall) -> list[messages.SessionView]:
    sessions = (await call.request(messages.ListSessions(), messages.SessionList)).sessions
    return sorted(sessions, key=lambda session: session.opened_at_s, reverse=True)


async def _session(call: ApiCall, session_id: str) -> messages.SessionView:
    (session,) = (await call.request(messages.ListSessions(session_id), messages.SessionList)).sessions
    return session


ROUTES = (
    Route("POST", "/api/v1/create_session", RESEARCHER, create),
    Route("POST", "/api/v1/session_heartbeat", RESEARCHER, heartbeat),
    Route("POST", "/api/v1/sessions/{session_id}/finish", RESEARCHER, finish),
    Route("POST", "/api/v1/kill_session", RESEARCHER, kill),
    Route("GET", "/api/v1/session_info", VIEWER, state, KIB),
    Route("GET", "/api/v1/sessions", VIEWER, listed, KIB),
    Route("GET", "/api/v1/sessions/{session_id}", VIEWER, show, KIB),
    Route("GET", "/api/v1/models/{model_id}", VIEWER, model, KIB),
)
