"""A hub in front of the server: it names tenants with the front key, and nobody else does."""

from __future__ import annotations

import base64
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import httpx
from starlette.datastructures import Headers

from strata.base.errors import Code
from strata.base.secret import Secret
from strata.identity.roles import CallerKind, Principal, Role
from strata.train.api.front import key_at_front
from strata.train.api.routes import application
from strata.train.link import messages
from strata.train.status import views
from strata.train.wire.grants import ArchiveGrant, TraceGrant, sign_token, verify_token
from tests.shell.train_api.conftest import Reached, reach, settings_in

KEY: Final = "f" * 64
NAMED: Final = {"x-strata-front": KEY, "x-strata-tenant": "alice%20b", "x-strata-role": "researcher"}
ASK: Final = ("POST", "/api/v1/client/config")


async def test_the_holder_of_the_front_key_names_the_tenant_and_no_operator(folder: Path) -> None:
    async with reach(settings_in(folder, front_key=Secret(KEY)), 0.02) as server:
        assert (await server.ask(*ASK, None, headers=NAMED)).status_code == 200
        tenant = await server.context.tenant(Principal(CallerKind.TENANT, "alice b", Role.RESEARCHER))
        assert tenant == "key:alice b", "as if the key were of this server"
        viewer = NAMED | {"x-strata-role": "viewer"}
        assert (await server.ask("POST", "/api/v1/create_session", None, headers=viewer)).status_code == 403
        for role in ("operator", "admin"):
            more = NAMED | {"x-strata-role": role}
            assert (await server.ask("POST", "/sleep", None, headers=more)).status_code == 403
            assert (await server.ask("GET", "/v1/keys", None, headers=more)).status_code == 403
        assert (await server.ask(*ASK, None, headers=NAMED | {"x-strata-role": "king"})).status_code == 400
        nobody = {name: value for name, value in NAMED.items() if name != "x-strata-tenant"}
        assert (await server.ask(*ASK, None, headers=nobody)).status_code == 400


async def test_without_the_front_key_nobody_names_another(folder: Path) -> None:
    async with reach(settings_in(folder, front_key=Secret(KEY)), 0.02) as server:
        for wrong in ("", "e" * 64, KEY[:-1]):
            assert (await server.ask(*ASK, None, headers=NAMED | {"x-strata-front": wrong})).status_code == 401
            # Also with a good key beside it.
            assert (await server.ask(*ASK, headers=NAMED | {"x-strata-front": wrong})).status_code == 401
        without = {name: value for name, value in NAMED.items() if name != "x-strata-front"}
        assert (await server.ask(*ASK, None, headers=without)).status_code == 401


async def test_a_server_without_a_front_key_takes_nobodys_word(alone: Reached) -> None:
    assert (await alone.ask(*ASK, None, headers=NAMED)).status_code == 401
    assert (await alone.ask(*ASK, headers=NAMED)).status_code == 200, "by the key, as ever"


async def test_a_signed_url_names_the_key_at_the_hub_and_ends_with_it(folder: Path) -> None:
    async with reach(settings_in(folder, front_key=Secret(KEY)), 0.02) as server:
        tenant = Principal(CallerKind.TENANT, "alice b", Role.RESEARCHER)
        named = key_at_front(tenant, Headers(NAMED | {"x-strata-key": "0123456789ab"}))
        now_s = server.context.clock.wall_s()
        for grant in (ArchiveGrant("f", "", now_s + 60, named), TraceGrant("s", "t", now_s + 60, named)):
            token = sign_token(grant, server.context.signing_key)
            content = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))
            assert content.endswith(b"hub:0123456789ab"), "where the hub reads it"
            assert verify_token(token, server.context.signing_key, now_s) == grant
        own = Principal(CallerKind.KEY, "k", Role.RESEARCHER)
        assert key_at_front(own, Headers({"x-strata-key": "0123456789ab"})) == "", "only the hub names one"


class Recording:
    """An orchestrator that has nothing, and remembers what it was asked about which model."""

    def __init__(self) -> None:
        self.named: list[str] = []

    async def request(self, request: messages.OrchestratorRequest, *, timeout_s: float) -> messages.Output:
        del timeout_s
        message: Any = request.body
        self.named.append(getattr(message, "operation", message).model_id)
        return views.ErrorResponse(Code.NOT_FOUND, "there is no such model")


async def test_a_model_that_the_hub_names_is_meant_by_the_id_that_its_client_composed(folder: Path) -> None:
    own, composed, other = "session_1.0123456789ab:train:0", "session_1:train:0", "session_1:train:1"
    async with reach(settings_in(folder, front_key=Secret(KEY)), 0.02) as server:
        orchestrator = Recording()
        context = replace(server.context, orchestrator=orchestrator)
        transport = httpx.ASGITransport(application(context), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="https://server") as http:
            for headers, expected in (
                (NAMED | {"x-strata-model": own}, [own, own, own, other]),
                (NAMED, [composed, composed, composed, other]),
                ({"x-api-key": server.keys[Role.RESEARCHER], "x-strata-model": own}, [composed] * 3 + [other]),
            ):
                orchestrator.named.clear()
                await http.post("/api/v1/optim_step", json={"model_id": composed, "seq_id": 1}, headers=headers)
                await http.post("/api/v1/get_info", json={"model_id": composed}, headers=headers)
                await http.get(f"/api/v1/training_runs/{composed}", headers=headers)
                await http.post("/api/v1/get_info", json={"model_id": other}, headers=headers)
                assert orchestrator.named == expected, headers
