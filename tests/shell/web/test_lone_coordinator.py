"""The dashboard of a coordinator without a hub: open to its machine, or to an operator's token for all jobs."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from strata.base.clock import SystemClock
from strata.base.errors import StrataError
from strata.base.secret import Secret
from strata.coord.server.tokens import ALL_JOBS, Claims, TokenRole, Tokens
from strata.hub.gangs import CoordinatorGangs
from strata.hub.lone_coordinator import TokenSessions, make_app
from strata.identity.authenticate import Credentials
from strata.identity.sessions import IDLE_S, SESSION_S
from strata.web.session import SessionCookie
from tests.shell.coord.running import Running, in_process, register
from tests.shell.web.browsing import HTML, SAME_ORIGIN
from tests.support.manual_clock import ManualClock

STRATA = str(Path(sys.executable).with_name("strata"))


@asynccontextmanager
async def browser(
    coordinator: Running, sessions: TokenSessions, tokens: Tokens | None = None
) -> AsyncIterator[httpx.AsyncClient]:
    clock = SystemClock()
    source = CoordinatorGangs(coordinator.address, clock, tokens=tokens)
    transport = httpx.ASGITransport(make_app(source, sessions, clock, asyncio.Event()))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:7071", headers=HTML) as client:
        yield client
    await source.close()


def token(tokens: Tokens, role: TokenRole = TokenRole.OPERATOR, job: str = ALL_JOBS) -> str:
    return tokens.issue(Claims(job=job, role=role, expires_s=round(SystemClock().wall_s()) + 600, id="t"))


async def test_without_tokens_anybody_on_the_machine_reads_and_no_other_site_does() -> None:
    async with in_process() as coordinator, browser(coordinator, TokenSessions(None, SystemClock())) as client:
        await register(coordinator.stub, "a", "b", job="run")
        assert (await client.get("/")).headers["location"] == "/gangs"
        assert "/gangs/run" in (await client.get("/gangs")).text
        shown = await client.get("/gangs/run")
        assert (shown.status_code, "rank 1" in shown.text) == (200, True)
        assert 'action="/search"' not in shown.text
        assert (await client.get("/gangs/run", headers={"Host": "evil.example"})).status_code == 403


async def test_with_tokens_a_person_logs_in_with_an_operators_token_for_all_jobs() -> None:
    tokens = Tokens(Secret("s" * 32))
    revoked: set[str] = set()
    sessions = TokenSessions(tokens, SystemClock(), revoked)
    async with in_process(tokens=tokens) as coordinator, browser(coordinator, sessions, tokens) as client:
        assert (await client.get("/gangs")).headers["location"].startswith("/login")
        for wrong in (token(tokens, job="run"), token(tokens, TokenRole.WORKER, "run"), "strata1.x.y"):
            refused = await client.post("/login", data={"key": wrong}, headers=SAME_ORIGIN)
            assert refused.status_code == 403
        made = await client.post("/login", data={"key": token(tokens)}, headers=SAME_ORIGIN)
        assert made.status_code == 303
        assert (await client.get("/gangs")).status_code == 200
        revoked.add("t")
        assert (await client.get("/gangs")).status_code == 303


async def test_a_session_lasts_as_long_as_its_cookie_while_it_is_used_and_ends_when_it_is_idle() -> None:
    clock = ManualClock()
    tokens = Tokens(Secret("s" * 32))
    key = tokens.issue(Claims(job=ALL_JOBS, role=TokenRole.OPERATOR, expires_s=round(clock.wall_s() + 10**7), id="t"))
    sessions = TokenSessions(tokens, clock)
    used, idle = [await sessions.open_session(await sessions.identify(Credentials(bearer=key))) for _ in range(2)]
    began_s = clock.wall_s()
    while clock.wall_s() - began_s + IDLE_S < SESSION_S:
        await clock.advance(IDLE_S - 60)
        await sessions.identify(Credentials(session=used))
    with pytest.raises(StrataError, match="operator's token"):
        await sessions.identify(Credentials(session=idle))
    assert f"Max-Age={SESSION_S:.0f};" in SessionCookie("x", tls=False).set(used)
    await clock.advance(IDLE_S + 60)
    with pytest.raises(StrataError, match="operator's token"):
        await sessions.identify(Credentials(session=used))


async def test_the_command_serves_it_on_loopback_alone() -> None:
    async with in_process() as coordinator:
        arguments = ("coordinator", "dashboard", "--address", coordinator.address, "--listen")
        process = await asyncio.create_subprocess_exec(
            STRATA, *arguments, "127.0.0.1:0", stderr=asyncio.subprocess.PIPE
        )
        try:
            assert process.stderr is not None
            async with asyncio.timeout(60):
                line = (await process.stderr.readline()).decode()
                async with httpx.AsyncClient(headers=HTML) as client:
                    reply = await client.get(line.split()[-1])
            assert (reply.status_code, "The coordinator has no job yet." in reply.text) == (200, True)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await process.wait()
        away = await asyncio.create_subprocess_exec(STRATA, *arguments, "0.0.0.0:0", stderr=asyncio.subprocess.PIPE)
        _, error = await away.communicate()
        assert (away.returncode != 0, "other machines" in error.decode()) == (True, True)
