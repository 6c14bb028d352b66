"""An API server in this process, with real keys, reached through its ASGI root."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from strata.base.clock import SystemClock
from strata.http.auth_failures import AuthFailures
from strata.identity.enroll import make_key
from strata.identity.roles import OPERATOR, Role
from strata.train.api.context import ApiContext
from strata.train.api.routes import application
from strata.train.api.server import APIServer
from strata.train.key_database import open_key_database
from strata.train.link.api import OrchestratorClient
from strata.train.settings import LimitSettings, ModelSettings, RankSettings, ServerSection, ServerSettings


def settings_in(folder: Path, **server: Any) -> ServerSettings:
    return ServerSettings(
        server=ServerSection(data=folder / "data", port=0, **server),
        model=ModelSettings(path="tiny"),
        ranks=RankSettings(),
        limits=LimitSettings(),
    )


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a short path: sockets lie in it."""
    return tmp_path_factory.mktemp("t")


async def keys_in(settings: ServerSettings) -> dict[Role, str]:
    """A key of every role."""
    settings.data.mkdir(parents=True, exist_ok=True, mode=0o700)
    made = {}
    async with open_key_database(settings.identity_database) as store:
        for role in Role:
            _, made[role] = await make_key(store, SystemClock(), OPERATOR, name=role.name.lower(), role=role)
    return made


@dataclass(frozen=True)
class Reached:
    """A server whose orchestrator is away, and keys for it."""

    http: httpx.AsyncClient
    keys: dict[Role, str]
    context: ApiContext

    async def ask(self, method: str, path: str, role: Role | None = Role.RESEARCHER, **more: Any) -> httpx.Response:
        """Bytes are sent as JSON unless the headers say otherwise."""
        kind = {"Content-Type": "application/json"} if "content" in more else {}
        headers = {**kind, **more.pop("headers", {}), **({} if role is None else {"X-API-Key": self.keys[role]})}
        return await self.http.request(method, path, headers=headers, **more)


@asynccontextmanager
async def reach(settings: ServerSettings, reply_timeout_s: float = 10.0) -> AsyncIterator[Reached]:
    keys = await keys_in(settings)
    server = APIServer(settings, SystemClock(), reply_timeout_s=reply_timeout_s)
    async with OrchestratorClient(settings) as orchestrator, server.open_context(orchestrator) as opened:
        context = replace(opened, failures=AuthFailures(1_000_000))
        transport = httpx.ASGITransport(application(context), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="https://server") as http:
            yield Reached(http, keys, context)


@pytest.fixture
async def alone(folder: Path) -> AsyncIterator[Reached]:
    async with reach(settings_in(folder, max_body_bytes=1 << 20, poll_s=0.02), 0.02) as reached:
        yield reached
