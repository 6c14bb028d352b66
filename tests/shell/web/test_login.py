"""Logging in and out: who gets a session, what it may do, and what a foreign page cannot make a browser do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from strata.fleet.core.jobspec import JobSpec
from strata.fleet.wire.identities import CallerReply, HubKeyReply, KeysReply, LoginCodeReply
from strata.fleet.wire.overview import StatusReply
from strata.http.route import Route
from strata.hub.compose import TOKEN_FILE
from strata.hub.settings import HubTlsSettings
from strata.web.pages import login
from strata.web.routes import PAGES
from strata.web.session import local_path
from tests.shell.fleet_http.running import Running, ok, refused, running
from tests.shell.web.browsing import HTML, SAME_ORIGIN, Browser, log_in

DECLARED: list[Route] = [route for module in PAGES for route in module.ROUTES]
ACTIONS = [route for route in DECLARED if route.method == "POST"]


@pytest.fixture
async def secure(tmp_path: Path) -> AsyncIterator[Running]:
    async with running(tmp_path / "secure", tls=HubTlsSettings(enabled=True)) as started:
        yield started


def filled(path: str) -> str:
    return path.replace("{id}", f"job1_{'a' * 64}").replace("{project}", "p").replace("{name}", "n")


async def test_a_browser_without_a_session_is_sent_to_the_login_and_a_program_gets_the_usual_refusal(
    site: Running,
) -> None:
    anybody = await site.client()
    for route in DECLARED:
        path = filled(route.path)
        browser = await anybody.request(route.method, path, headers=HTML)
        assert browser.status_code == 303, route
        assert browser.headers["location"].startswith("/login"), route
        assert refused(await anybody.request(route.method, path)) == (401, "unauthenticated")
    where = await anybody.get("/jobs?status=running", headers=HTML)
    assert where.headers["location"] == "/login?next=%2Fjobs%3Fstatus%3Drunning"
    assert (await anybody.get("/live")).status_code == 401


async def test_a_key_opens_a_session_whose_cookie_scripts_and_other_sites_do_not_get(site: Running) -> None:
    browser = await log_in(site, "viewer", "vera")
    made = ok(await (await site.operator()).post("/v1/keys", json={"name": "x", "role": "viewer"}), HubKeyReply)
    reply = await (await site.client()).post("/login", data={"key": made.secret}, headers={**HTML, **SAME_ORIGIN})
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(reply.headers["set-cookie"].split("; "))
    assert made.secret not in reply.headers["set-cookie"]
    page = await browser.shows("/")
    assert "vera" in page
    assert "viewer" in page
    assert ok(await browser.http.get("/v1/caller"), CallerReply).name == "vera"


async def test_the_cookie_is_for_https_only_where_there_is_tls(tmp_path: Path) -> None:
    async with running(tmp_path / "hub", tls=HubTlsSettings(enabled=True)) as site:
        client = await site.client()
        token = (site.data / TOKEN_FILE).read_text().strip()
        reply = await client.post("/login", data={"key": token}, headers={**HTML, **SAME_ORIGIN})
        assert reply.status_code == 303
        assert reply.headers["set-cookie"].startswith("__Host-strata-")
        assert "Secure" in reply.headers["set-cookie"].split("; ")
        assert ok(await client.get("/v1/caller"), CallerReply).role == "admin"


async def test_a_wrong_key_opens_nothing_and_many_wrong_keys_are_slowed_down(tmp_path: Path) -> None:
    async with running(tmp_path / "hub", max_failures=1) as site:
        client = await site.client()
        sent = [client.post("/login", data={"key": "wrong"}, headers={**HTML, **SAME_ORIGIN}) for _ in range(40)]
        replies = await asyncio.gather(*sent)
        assert {reply.status_code for reply in replies} == {403, 429}
        assert {reply.headers.get("connection") for reply in replies if reply.status_code == 429} == {"close"}
        assert not client.cookies


@pytest.mark.parametrize("origin", ["cross-site", "same-site", "none", ""])
async def test_another_page_cannot_log_a_browser_in(site: Running, origin: str) -> None:
    made = ok(await (await site.operator()).post("/v1/keys", json={"name": "x", "role": "viewer"}), HubKeyReply)
    client = await site.client()
    headers = {**HTML, **({"Sec-Fetch-Site": origin} if origin else {})}
    reply = await client.post("/login", data={"key": made.secret}, headers=headers)
    assert (reply.status_code, "set-cookie" in reply.headers) == (403, False)


async def test_without_tls_operators_log_in_by_a_link_and_get_the_rights_of_a_researcher(site: Running) -> None:
    operator, client = await site.operator(), await site.client()
    token = (site.data / TOKEN_FILE).read_text().strip()
    made = ok(await operator.post("/v1/keys", json={"name": "o", "role": "operator"}), HubKeyReply)
    for secret in (token, made.secret):
        reply = await client.post("/login", data={"key": secret}, headers={**HTML, **SAME_ORIGIN})
        assert (reply.status_code, "set-cookie" in reply.headers) == (403, False)
        assert "strata dashboard" in reply.text
    link = ok(await operator.post("/v1/login/code"), LoginCodeReply)
    assert link.url == site.url
    page = await client.get("/login", params={"code": link.code}, headers=HTML)
    assert link.code in page.text
    reply = await client.post("/login", data={"code": link.code}, headers={**HTML, **SAME_ORIGIN})
    assert reply.status_code == 303
    caller = ok(await client.get("/v1/caller"), CallerReply)
    assert (caller.kind, caller.role) == ("operator", "researcher")
    assert refused(await client.get("/v1/keys")) == (403, "forbidden")
    again = await (await site.client()).post("/login", data={"code": link.code}, headers={**HTML, **SAME_ORIGIN})
    assert (again.status_code, "set-cookie" in again.headers) == (403, False)


async def test_a_cookie_changes_nothing_through_the_api(site: Running) -> None:
    browser = await log_in(site, "researcher")
    assert ok(await browser.http.get("/v1/status"), StatusReply).hosts == 0
    (job_id,) = await site.add(JobSpec(model="m"))
    for path in ("/v1/jobs", f"/v1/job/{job_id}/cancel", "/v1/login/code"):
        assert refused(await browser.http.post(path, json={}, headers=SAME_ORIGIN)) == (401, "unauthenticated")


@pytest.mark.parametrize("route", ACTIONS, ids=lambda route: route.path)
async def test_every_action_needs_the_token_of_its_session_and_a_page_of_this_server(
    secure: Running, route: Route
) -> None:
    # With TLS, because without it a browser has the rights of a researcher at most.
    assert route.access.role is not None
    role = route.access.role.name.lower()
    mine, other = await log_in(secure, role), await log_in(secure, role)
    path, token = filled(route.path), await mine.csrf()
    for fields, headers in (
        ({}, SAME_ORIGIN),
        ({"csrf": ""}, SAME_ORIGIN),
        ({"csrf": await other.csrf()}, SAME_ORIGIN),
        ({"csrf": token}, {}),
        ({"csrf": token}, {"Sec-Fetch-Site": "cross-site"}),
        ({"csrf": token}, {"Sec-Fetch-Site": "same-site"}),
    ):
        reply = await mine.http.post(path, data=fields, headers={**HTML, **headers})
        assert reply.status_code == 403, (fields, headers)
        assert "form" in reply.text
    passed = await mine.http.post(path, data={"csrf": token}, headers={**HTML, **SAME_ORIGIN})
    assert passed.status_code in (200, 303, 400, 404), "what it lacks is not a right"


async def test_who_logs_out_or_loses_the_key_is_out(site: Running) -> None:
    browser = await log_in(site, "viewer")
    reply = await browser.post("/logout")
    assert (reply.status_code, reply.headers["location"]) == (303, "/login")
    assert (await browser.get("/")).headers["location"] == "/login"
    browser = await log_in(site, "viewer", "vera")
    operator = await site.operator()
    (key,) = [each for each in ok(await operator.get("/v1/keys"), KeysReply).keys if each.name == "vera"]
    assert (await operator.post(f"/v1/key/{key.id}/revoke")).status_code == 204
    assert (await browser.get("/")).headers["location"] == "/login"


async def test_an_old_copy_of_a_cookie_is_worth_nothing_after_the_logout(site: Running) -> None:
    browser = await log_in(site, "viewer")
    copy = Browser(await site.client(Cookie="; ".join(f"{n}={v}" for n, v in browser.http.cookies.items())))
    assert (await copy.get("/")).status_code == 200
    await browser.post("/logout")
    assert (await copy.get("/")).status_code == 303


ELSEWHERE = ("https://evil.example/", "//evil.example", "/\\evil.example", "javascript:1", "", "x")


@pytest.mark.parametrize("text", ELSEWHERE)
def test_a_login_continues_on_this_server_only(text: str) -> None:
    assert local_path(text) == "/"
    assert local_path("/jobs?status=running") == "/jobs?status=running"
    assert login.login_path("/jobs?a=b") == "/login?next=%2Fjobs%3Fa%3Db"
