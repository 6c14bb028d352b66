"""Every route and method: nobody gets in without credentials, nobody does what the role does not allow."""

from __future__ import annotations

import re
from pathlib import Path

from strata.http.route import Route
from strata.identity.roles import Role
from strata.train.api import archive
from strata.train.api.routes import ROUTES
from tests.shell.train_api.conftest import Reached

METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD")
WRONG = ("tml-0000000000ab-" + "0" * 40, "hst-host_1-" + "1" * 40, "nonsense", "eyJhbGciOiJub25lIn0.e30.", "é")


def url(route: Route) -> str:
    return re.sub(r"\{(\w+)(:\w+)?\}", "x", route.path)


PATHS = sorted({url(route) for route in ROUTES})


async def test_a_method_that_is_not_declared_is_refused(alone: Reached) -> None:
    for path in PATHS:
        declared = {each.method for each in ROUTES if re.fullmatch(re.sub(r"\{\w+(:\w+)?\}", "[^/]+", each.path), path)}
        for method in set(METHODS) - declared:
            assert (await alone.ask(method, path, Role.ADMIN)).status_code in (404, 405), (method, path)


async def test_what_anybody_may_call_says_no_more_than_that_it_is_there(alone: Reached) -> None:
    open_to_all = [each for each in ROUTES if each.access.public]
    assert {each.path for each in open_to_all} == {"/healthz", "/api/v1/healthz", archive.DOWNLOAD}
    for signed in ("", "?token=", "?token=AAAA", f"?token={'A' * 64}"):
        reply = await alone.http.get(archive.DOWNLOAD + signed)
        assert reply.status_code in (400, 403), signed
    for route in open_to_all:
        if route.path == archive.DOWNLOAD:
            continue
        reply = await alone.http.request(route.method, route.path)
        assert (reply.status_code, reply.json()) == (200, {"status": "ok"})


async def test_a_bearer_token_and_the_operators_token_are_as_good_as_a_key(alone: Reached, folder: Path) -> None:
    bearer = {"Authorization": f"Bearer {alone.keys[Role.VIEWER]}"}
    assert (await alone.http.get("/openapi.json", headers=bearer)).status_code == 200
    token = (folder / "data" / "operator.token").read_text().strip()
    assert (await alone.http.get("/v1/keys", headers={"X-Operator-Token": token})).status_code == 200
