"""Routes of commands in running jobs: request, cancel and follow the output for people; start, output and end for
hosts.
"""

from __future__ import annotations

from typing import Final

from strata.base.errors import Code, StrataError
from strata.fleet.core.job import HELD, JobStatus
from strata.fleet.execs import MAX_OPEN, MAX_OUTPUT, ExecRow, RequestedExec
from strata.fleet.http.context import HubCall, resolve_job_id
from strata.fleet.http.jobs import check_may_change
from strata.fleet.wire.execs import ExecEndRequest, ExecGiven, ExecQuery, ExecReply, ExecRequest, ExecStartRequest
from strata.fleet.wire.streams import PieceQuery, PieceReply
from strata.http.disconnect import until_disconnect
from strata.http.route import RawReply, Upload

POLL_S: Final = 2.0
"""How often a reader polls: another hub may have received the output."""


async def request(call: HubCall, body: ExecRequest) -> ExecReply:
    """Run a command beside a running job, in its sandbox and as its user. A researcher: in a job of her own."""
    job_id = await resolve_job_id(call)
    await check_may_change(call, job_id)
    wanted = RequestedExec(job_id=job_id, command=body.command, timeout_s=body.timeout_s, actor=call.actor)
    row = await call.context.execs.request(wanted)
    if row is None:
        job = await call.context.fleet.store.jobs.get(job_id)
        if job.status is not JobStatus.RUNNING:
            raise StrataError(Code.PRECONDITION, f"{job.spec.label} is not running; it is {job.status}")
        raise StrataError(
            Code.EXHAUSTED, f"{MAX_OPEN} commands run in {job.spec.label} already", hint="wait until one has ended"
        )
    return ExecReply(id=row.id, job_id=row.job_id, epoch=row.epoch, host_id=row.host_id)


async def output(call: HubCall, query: ExecQuery) -> RawReply:
    """The output of a command from an offset on; with `wait_s`, as soon as there is more. Read like a log.

    With `X-Strata-Ended` nothing follows: `X-Strata-Status` is the exit status, or `X-Strata-Reason` why there is none.
    """
    row = await _of_a_person(call)
    content = await _read(call, row, query)
    if not content and row.ended_at_s is None and query.wait_s:
        content, row = await until_disconnect(call, call.context.stopping, _follow(call, row, query))
        await call.reauthenticate()
    ended = row.ended_at_s is not None and not content
    headers = {
        "X-Strata-Offset": str(query.offset),
        "X-Strata-Next": str(query.offset + len(content)),
        "X-Strata-Ended": "true" if ended else "false",
    }
    if ended and row.status is not None:
        headers["X-Strata-Status"] = str(row.status)
    elif ended:
        # A header has one line of plain characters.
        headers["X-Strata-Reason"] = " ".join(row.error.encode("ascii", "replace").decode().split()) or "unknown"
    return RawReply(content, media_type="application/octet-stream", headers=headers)


async def cancel(call: HubCall) -> None:
    """End a command; its host stops it within seconds."""
    row = await _of_a_person(call)
    await call.context.execs.end(row, call.actor, error="it was cancelled")
    _notify(call, row)


async def start(call: HubCall, body: ExecStartRequest) -> ExecGiven:
    """The command, for the agent that is to run it, once."""
    row = await _of_this_host(call)
    started = await call.context.execs.start(row, call.caller.require_host(), body.run)
    return ExecGiven(id=started.id, command=started.command, timeout_s=started.timeout_s)


async def put_output(call: HubCall, body: Upload, query: PieceQuery) -> PieceReply:
    """Append a piece to the output of a command. STALE if it is no longer wanted: end the command."""
    row = await _of_this_host(call)
    piece = b"".join([part async for part in body])
    job = await call.context.fleet.store.jobs.get(row.job_id)
    if row.ended_at_s is not None or query.epoch != row.epoch or job.epoch != row.epoch or job.status not in HELD:
        raise StrataError(Code.STALE, f"the exec {row.id} has ended: {row.error or 'the lease of its job has'}")
    if query.offset + len(piece) > MAX_OUTPUT:
        size = await call.context.streams.size(row.job_id, row.epoch, row.stream)
        raise StrataError(Code.EXHAUSTED, f"the output of a command has at most {MAX_OUTPUT} bytes", size=size)
    size = await call.context.streams.append(row.job_id, row.epoch, row.stream, query.offset, piece)
    _notify(call, row)
    return PieceReply(size=size)


async def end(call: HubCall, body: ExecEndRequest) -> None:
    """The command has ended, or could not be run."""
    row = await _of_this_host(call)
    await call.context.execs.end(row, call.actor, run=body.run, status=body.status, error=body.error)
    _notify(call, row)


async def _of_a_person(call: HubCall) -> ExecRow:
    job_id = await resolve_job_id(call)
    await check_may_change(call, job_id)
    return await call.context.execs.find(job_id, call.path["exec"])


async def _of_this_host(call: HubCall) -> ExecRow:
    """One of another host gets the same reply as none."""
    row = await call.context.execs.find(await resolve_job_id(call), call.path["exec"])
    if row.host_id != call.caller.require_host():
        raise StrataError(Code.NOT_FOUND, f"{row.job_id} has no exec {row.id!r}")
    return row


async def _follow(call: HubCall, row: ExecRow, query: ExecQuery) -> tuple[bytes, ExecRow]:
    until_s = call.context.clock.monotonic_s() + query.wait_s
    while True:
        with call.context.appends.subscribe((row.job_id, row.epoch, row.stream)) as appended:
            # The row first: what was sent before its end is there once the end is.
            row = await call.context.execs.find(row.job_id, row.id)
            content = await _read(call, row, query)
            left_s = until_s - call.context.clock.monotonic_s()
            if content or row.ended_at_s is not None or left_s <= 0:
                return content, row
            await appended.wait(min(left_s, POLL_S))


async def _read(call: HubCall, row: ExecRow, query: ExecQuery) -> bytes:
    return await call.context.streams.read(row.job_id, row.epoch, row.stream, query.offset, query.limit)


def _notify(call: HubCall, row: ExecRow) -> None:
    call.context.appends.notify((row.job_id, row.epoch, row.stream), None)
