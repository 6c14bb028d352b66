"""Routes of sessions: create, heartbeat, finish, kill, list, search, and the models of one."""

from __future__ import annotations

import datetime

from strata.base.errors import Code, StrataError
from strata.http.route import KIB, READS, RESEARCHER, VIEWER, Route
from strata.train.api import archive
from strata.train.api.context import ApiCall, project_of
from strata.train.api.front import session_from_front
from strata.train.core import client_commands, ops
from strata.train.status import queries, views
from strata.train.wire import bodies, replies


async def create(call: ApiCall, body: bodies.CreateSessionBody) -> replies.SessionReply:
    """A new session."""
    session_id = session_from_front(call.caller, call.headers) or call.context.ids.new("session")
    metadata = dict(bodies.check_metadata(body.user_metadata or {}))
    if body.display_name is not None:
        metadata["display_name"] = body.display_name
    opening = client_commands.OpenSession(session_id, body.tags, metadata, body.sdk_version)
    await call.request(opening, client_commands.Done)
    return replies.SessionReply(session_id=session_id)


async def heartbeat(call: ApiCall, body: bodies.SessionBody) -> replies.SessionHeartbeatReply:
    """The client is still there."""
    await call.request(queries.SessionHeartbeat(body.session_id), client_commands.Done)
    return replies.SessionHeartbeatReply()


async def finish(call: ApiCall, body: bodies.FinishSessionBody) -> None:
    """The client is done."""
    reason = body.reason.type if body.detail is None else f"{body.reason.type}: {body.detail}"
    await call.request(client_commands.FinishSession(call.path["session_id"], reason), client_commands.Done)


async def kill(call: ApiCall, body: bodies.SessionBody) -> None:
    """End a session and unload the models it made."""
    session = await _session(call, body.session_id)
    await call.request(client_commands.FinishSession(body.session_id, "killed"), client_commands.Done)
    for model_id in session.models:
        model = await call.request(queries.DescribeModel(model_id), views.ModelView)
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
    view = await call.request(queries.DescribeModel(call.path["model_id"]), views.ModelView)
    return replies.ModelState(
        model_id=view.model_id,
        session_id=view.session_id,
        base_model=view.base_model,
        next_seq_id=view.wanted,
        taken_seq_ids=view.held,
        done_seq_id=view.next_seq - 1,
        unloaded=view.unloaded,
    )


async def search(call: ApiCall, body: bodies.SearchSessionsBody) -> replies.SessionPage:
    """The caller's sessions that match, the newest first."""
    tenant = await call.context.tenant(call.caller)
    if not body.includes_owner(tenant) or not body.includes_project(project_of(tenant)):
        return replies.SessionPage(sessions=[])
    matching = sorted(filter(body.matches, await _sessions(call)), key=_place, reverse=True)
    if body.cursor is not None:
        last = (body.cursor.last_created_at, body.cursor.last_session_id)
        matching = [each for each in matching if _place(each) < last]
    checkpoints = (await call.request(queries.ListCheckpoints(), views.CheckpointList)).checkpoints
    page = [replies.session_summary(each, checkpoints, tenant, project_of(tenant)) for each in matching[: body.limit]]
    if len(matching) <= body.limit:
        return replies.SessionPage(sessions=page)
    cursor = replies.SessionCursor(last_created_at=page[-1].created_at, last_session_id=page[-1].session_id)
    return replies.SessionPage(sessions=page, next_cursor=cursor)


def _place(session: views.SessionView) -> tuple[datetime.datetime, str]:
    """Returns the place in the order of pages: by the time as a client reads it, which is rounded."""
    return replies.to_datetime(session.opened_at_s), session.session_id


async def set_project(call: ApiCall, body: bodies.ProjectBody) -> None:
    """Nothing changes: a session stays in the one project of its tenant, and no other is accepted."""
    await _session(call, call.path["session_id"])
    own = project_of(await call.context.tenant(call.caller))
    if body.project_id != own:
        raise StrataError(
            Code.INVALID,
            f"this server has one project for each tenant, not {body.project_id!r}",
            hint=f"yours is {own!r}",
        )


async def export_trace(call: ApiCall) -> replies.TraceExport:
    """Returns where the trace of a session can be fetched for a while: its operations as far as their times are
    kept."""
    session = await _session(call, call.path["session_id"])
    return replies.TraceExport(url=await archive.trace_url(call, session.session_id))


async def _sessions(call: ApiCall) -> list[views.SessionView]:
    sessions = (await call.request(queries.ListSessions(), views.SessionList)).sessions
    return sorted(sessions, key=lambda session: session.opened_at_s, reverse=True)


async def _session(call: ApiCall, session_id: str) -> views.SessionView:
    (session,) = (await call.request(queries.ListSessions(session_id), views.SessionList)).sessions
    return session


ROUTES = (
    Route("POST", "/api/v1/create_session", RESEARCHER, create, owner="caller"),
    Route("POST", "/api/v1/session_heartbeat", RESEARCHER, heartbeat, owner="tenant"),
    Route("POST", "/api/v1/sessions/{session_id}/finish", RESEARCHER, finish, owner="tenant"),
    Route("POST", "/api/v1/kill_session", RESEARCHER, kill, owner="tenant"),
    Route("GET", "/api/v1/session_info", VIEWER, state, KIB),
    Route("GET", "/api/v1/sessions", VIEWER, listed, KIB),
    Route("POST", "/api/v1/sessions/search", VIEWER, search, 16 * KIB, owner=READS),
    Route("PUT", "/api/v1/sessions/{session_id}/project", RESEARCHER, set_project, KIB, owner="tenant"),
    Route("GET", "/api/v1/sessions/{session_id}/trace_export", VIEWER, export_trace, KIB),
    Route("GET", "/api/v1/sessions/{session_id}", VIEWER, show, KIB),
    Route("GET", "/api/v1/models/{model_id}", VIEWER, model, KIB),
)
