"""Every route of the training server against every caller that may not use it, from the table that is served."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping

import pytest

from strata.identity.roles import Role
from strata.train.api.routes import ROUTES
from tests.shell.train_api.conftest import Reached, reach, settings_in
from tests.shell.train_api.test_access import METHODS, url

Tries = Callable[[int], None]
AREA = "training server: who calls"
PUBLIC = {(each.method, url(each)) for each in ROUTES if each.access.public}
CLOSED = [each for each in ROUTES if not each.access.public]


@pytest.fixture
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Reached]:
    async with reach(settings_in(tmp_path_factory.mktemp("t"), poll_s=0.02), 0.02) as reached:
        yield reached


async def assert_unknown(server: Reached, headers: Mapping[str, str], tries: Tries, query: str = "") -> None:
    tries(len(CLOSED))
    for route in CLOSED:
        reply = await server.http.request(route.method, url(route) + query, headers=headers)
        assert reply.status_code == 401, (route.path, reply.text)


@pytest.mark.attack(AREA, "no key, every route and method")
async def test_nobody_gets_in_without_a_key(server: Reached, tries: Tries) -> None:
    for path in sorted({url(each) for each in ROUTES} | {"/openapi.json", "/", "/docs", "/api/v1/nothing"}):
        for method in METHODS:
            if (method, path) not in PUBLIC:
                tries(1)
                assert (await server.http.request(method, path)).status_code == 401, (method, path)


@pytest.mark.attack(AREA, "invented key")
async def test_an_invented_key_opens_nothing(server: Reached, tries: Tries) -> None:
    await assert_unknown(server, {"X-API-Key": "tml-0000000000ab-" + "0" * 40}, tries)


@pytest.mark.attack(AREA, "wrong secret")
async def test_the_id_of_a_key_is_not_the_key(server: Reached, tries: Tries) -> None:
    key = server.keys[Role.ADMIN]
    flipped = key[:-1] + ("0" if key[-1] != "0" else "1")
    await assert_unknown(server, {"X-API-Key": flipped}, tries)


@pytest.mark.attack(AREA, "expired key")
async def test_an_expired_key_opens_nothing(server: Reached, tries: Tries) -> None:
    body = {"name": "old", "role": "viewer", "valid_s": 0.001}
    made = (await server.ask("POST", "/v1/keys", Role.ADMIN, json=body)).json()
    await assert_unknown(server, {"X-API-Key": made["secret"]}, tries)


@pytest.mark.attack(AREA, "revoked key")
async def test_a_revoked_key_opens_nothing(server: Reached, tries: Tries) -> None:
    made = (await server.ask("POST", "/v1/keys", Role.ADMIN, json={"name": "k", "role": "viewer"})).json()
    assert (await server.ask("POST", f"/v1/key/{made['key']['id']}/revoke", Role.ADMIN)).status_code == 204
    await assert_unknown(server, {"X-API-Key": made["secret"]}, tries)


@pytest.mark.attack(AREA, "host secret")
async def test_the_secret_of_a_host_opens_nothing(server: Reached, tries: Tries) -> None:
    await assert_unknown(server, {"X-API-Key": "hst-host_1-" + "1" * 40}, tries)


@pytest.mark.attack(AREA, "key in the query")
async def test_a_key_in_the_query_opens_nothing(server: Reached, tries: Tries) -> None:
    key = server.keys[Role.ADMIN]
    await assert_unknown(server, {}, tries, f"?key={key}&X-API-Key={key}&api_key={key}")


@pytest.mark.attack(AREA, "key in a cookie")
async def test_a_key_in_a_cookie_opens_nothing(server: Reached, tries: Tries) -> None:
    await assert_unknown(server, {"Cookie": f"X-API-Key={server.keys[Role.ADMIN]}"}, tries)


@pytest.mark.attack(AREA, "Basic authorization")
async def test_basic_authorization_opens_nothing(server: Reached, tries: Tries) -> None:
    await assert_unknown(server, {"Authorization": "Basic YTpi"}, tries)


@pytest.mark.attack(AREA, "wrong operator token")
async def test_a_wrong_operator_token_opens_nothing(server: Reached, tries: Tries) -> None:
    await assert_unknown(server, {"X-Operator-Token": "0" * 48}, tries)


@pytest.mark.parametrize("role", list(Role), ids=lambda role: role.name)
@pytest.mark.attack(AREA, "a role on every route above it")
async def test_a_role_is_refused_on_every_route_above_it(server: Reached, role: Role, tries: Tries) -> None:
    for route in ROUTES:
        if (route.method, route.path) == ("DELETE", "/api/v1/auth/apikey/me"):
            # Every role may revoke the key that it uses, and the next request would need another.
            continue
        tries(1)
        reply = await server.ask(route.method, url(route), role, content=b"[]")
        allowed = route.access.public or (route.access.role is not None and role >= route.access.role)
        assert (reply.status_code != 403) is allowed, (route.path, role, reply.text)


@pytest.mark.attack(AREA, "a body without the media type of JSON, to every route that reads JSON")
async def test_a_body_that_does_not_say_it_is_json_is_refused(server: Reached, tries: Tries) -> None:
    for route in CLOSED:
        kind = route.signature().body
        if kind is None or not hasattr(kind, "__struct_fields__"):
            continue
        for sent in ("text/plain", "application/x-www-form-urlencoded", ""):
            tries(1)
            headers = {"Content-Type": sent}
            reply = await server.ask(route.method, url(route), Role.ADMIN, content=b"{}", headers=headers)
            assert reply.status_code == 415, (route.path, sent)
