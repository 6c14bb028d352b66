"""Where the servers can be made to connect to: engines beside the training server, and webhooks of the hub."""

from __future__ import annotations

import gzip
import ipaddress
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from strata.base.errors import Code, StrataError
from strata.hub.compose import TOKEN_FILE
from strata.hub.outbound import WebhookTarget
from strata.identity.roles import Role
from strata.train.endpoints import client as client_module
from strata.train.endpoints.origin import check_address, check_allowed, parse_origin
from tests.shell.fleet_http.running import refused, running
from tests.shell.train_api.conftest import Reached, reach, settings_in
from tests.shell.train_endpoints.hostile import drips, hostile, is_silent, never_ends, says
from tests.shell.train_endpoints.test_client import OK, speaking_to

AREA: Final = "outbound"
Tries = Callable[[int], None]
ALLOW: Final = ("http://127.0.0.1:8000", "https://engines.example", "http://[::1]:8000/")
REFUSED: Final = (
    "file:///etc/passwd",
    "gopher://127.0.0.1:8000",
    "ftp://127.0.0.1:8000",
    "unix:///run/docker.sock",
    "127.0.0.1:8000",
    "//127.0.0.1:8000",
    "http://",
    "http://:8000",
    "http://user@127.0.0.1:8000",
    "http://user:secret@127.0.0.1:8000",
    "http://127.0.0.1:8000@evil.example",
    "http://evil.example\\@127.0.0.1:8000",
    "http://127.0.0.1:8000/v1",
    "http://127.0.0.1:8000?x=1",
    "http://127.0.0.1:8000#x",
    "http://127.0.0.1:8000/..",
    "http://127.0.0.1:8000 ",
    "http://127.0.0.1:8000\r\nHost: evil",
    "http://127.0.0.1:0",
    "http://127.0.0.1:99999",
    "http://127.0.0.1:8000:9000",
    "http://[::1",
    "http://\u217cocalhost:8000",
    "http://engines.example\u3002:8000",
    "http://127.0.0.1%00:8000",
    "http://" + "a" * 400,
    "",
)
ELSEWHERE: Final = (
    "http://127.0.0.1:8001",
    "https://127.0.0.1:8000",
    "http://localhost:8000",
    "http://127.1:8000",
    "http://2130706433:8000",
    "http://0x7f000001:8000",
    "http://0177.0.0.1:8000",
    "http://127.0.0.1.:8000",
    "http://[::ffff:127.0.0.1]:8000",
    "http://169.254.169.254",
    "http://engines.example",
    "https://engines.example:8443",
    "https://engines.example.evil.example",
    "https://evil-engines.example",
)


SUBSCRIBED: Final = (
    "slack://T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ",
    "https://hooks.slack.com/services/T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ",
    "discord://4174216298/JHMHI8qBe7bk2ZwO5U711o3d",
    "tgram://123456789:abcdefghijklmnopqrstuvwxyzABCDEFGHI/12345",
)
WEBHOOKS: Final = (
    "http://127.0.0.1/x",
    "https://127.0.0.1/x",
    "https://[::1]/x",
    "https://[::ffff:127.0.0.1]/x",
    "https://169.254.169.254/latest/meta-data",
    "https://10.0.0.1/",
    "https://192.168.1.1/",
    "https://0.0.0.0/",
    "https://[fe80::1]/",
    "https://[fd00::1]/",
    "https://localhost/",
    "http://8.8.8.8/",
    "https://2130706433/",
    "https://0x7f.1/",
    "https://224.0.0.1/",
    "https://100.64.0.1/",
    "https://0177.0.0.1/",
    "https://[::ffff:10.0.0.1]/",
    "https://172.16.0.1/",
    "https://255.255.255.255/",
)
INSIDE: Final = {
    "NAT64": "64:ff9b::7f00:1",
    "NAT64 of a network of its own": "64:ff9b:1::a00:1",
    "6to4": "2002:7f00:1::",
    "IPv4-compatible": "::7f00:1",
    "Teredo": "2001:0:4136:e378:8000:63bf:80ff:fffe",
    "mapped": "::ffff:7f00:1",
}


@pytest.mark.attack(AREA, "an inference endpoint that is no plain origin")
def test_what_is_no_plain_origin_is_refused(tries: Tries) -> None:
    for url in REFUSED:
        with pytest.raises(StrataError) as refused:
            check_allowed(url, ALLOW)
        assert refused.value.code in (Code.INVALID, Code.FORBIDDEN), url
        tries(1)


@pytest.mark.attack(AREA, "an inference endpoint elsewhere, in other spellings of what is allowed")
def test_what_the_settings_do_not_name_in_these_words_is_forbidden(tries: Tries) -> None:
    for url in ELSEWHERE:
        with pytest.raises(StrataError) as refused:
            check_allowed(url, ALLOW)
        assert refused.value.code in (Code.FORBIDDEN, Code.INVALID), url
        tries(1)


@pytest.mark.attack(AREA, "an allowed name that means an address where clouds keep credentials")
def test_an_address_where_no_engine_can_be_is_forbidden_whatever_its_name(tries: Tries) -> None:
    here = ("169.254.169.254", "fe80::1", "::ffff:169.254.169.254", "0.0.0.0", "::", "224.0.0.1", "255.255.255.255")
    for address in (*here, "64:ff9b::a9fe:a9fe", "2002:a9fe:a9fe::"):
        with pytest.raises(StrataError) as refused:
            check_address(parse_origin("http://engines.example:8000"), ipaddress.ip_address(address))
        assert refused.value.code is Code.FORBIDDEN, address
        tries(1)


@pytest.fixture
async def alone(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Reached]:
    async with reach(settings_in(tmp_path_factory.mktemp("t")), 0.02) as reached:
        yield reached


@pytest.mark.attack(AREA, "an inference endpoint named by a researcher")
async def test_only_operators_name_endpoints(alone: Reached, tries: Tries) -> None:
    for role in (Role.VIEWER, Role.RESEARCHER):
        for path in ("/add_inference_endpoint", "/remove_inference_endpoint"):
            reply = await alone.ask("POST", path, role, json={"url": "http://127.0.0.1:8000", "name": "x"})
            assert reply.status_code == 403
            tries(1)


@pytest.mark.attack(AREA, "an engine that redirects")
async def test_a_redirect_is_not_followed() -> None:
    async with hostile(says(OK)) as inside:
        head = f"HTTP/1.1 307 Temporary Redirect\nLocation: {inside.url}/secret\nConnection: close"
        async with hostile(says(head)) as evil, speaking_to(evil.url) as client:
            with pytest.raises(StrataError, match="replies with a redirect"):
                await client.post("/v1/load_lora_adapter", {}, timeout_s=5)
        assert inside.heard == []


@pytest.mark.parametrize(
    ("say", "complaint"),
    [
        (never_ends, "replies with more than"),
        (drips, "did not reply within"),
        (is_silent, "did not reply within"),
        (says(f"{OK}\nContent-Encoding: gzip", gzip.compress(b" " * 1000, mtime=0)), "compresses its reply"),
        (says("SSH-2.0-OpenSSH_9.7"), "cannot be reached"),
    ],
)
@pytest.mark.attack(AREA, "an engine whose answer has no end, or that is none")
async def test_an_answer_without_an_end_or_that_is_none_is_an_error(
    say: Callable[..., Any], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "MAX_REPLY", 4 << 20)
    async with hostile(say) as evil, speaking_to(evil.url) as client:
        with pytest.raises(StrataError, match=complaint):
            await client.get("/v1/models", timeout_s=0.3 if "within" in complaint else 10)


@pytest.mark.attack(AREA, "an engine that sends escapes and far too much")
async def test_what_it_says_is_cut_and_cleaned() -> None:
    body = b"\x1b[31mno\n" + "é".encode() * 100_000
    async with hostile(says("HTTP/1.1 500 No\nConnection: close", body)) as evil, speaking_to(evil.url) as client:
        words = (await client.get("/v1/models", timeout_s=5)).excerpt
        assert len(words) <= client_module.MAX_EXCERPT
        assert words.isprintable()
        with pytest.raises(StrataError, match="did not reply as an engine does"):
            (await client.get("/v1/models", timeout_s=5)).read(msgspec.Struct)


@pytest.mark.attack(AREA, "a webhook to loopback, private, link-local, CGNAT, mapped, decimal, octal or multicast")
def test_a_webhook_does_not_reach_inside(tries: Tries) -> None:
    for url in WEBHOOKS:
        with pytest.raises(StrataError) as error:
            WebhookTarget(url).resolve()
        assert error.value.code in (Code.FORBIDDEN, Code.UNAVAILABLE), url
        tries(1)


@pytest.mark.attack(AREA, "a webhook to no plain address")
def test_a_webhook_goes_to_a_plain_address(tries: Tries) -> None:
    for url in ("ftp://x/", "file:///etc/passwd", "https://user:pw@example.org/", "https:///x", "x"):
        with pytest.raises(StrataError) as error:
            WebhookTarget(url)
        assert error.value.code is Code.INVALID, url
        tries(1)


@pytest.mark.proves(
    "Never again: webhooks to NAT64, 6to4 and IPv4-compatible addresses were judged public; archive "
    "addresses outlived their key"
)
@pytest.mark.parametrize("form", INSIDE)
@pytest.mark.attack(AREA, "a webhook to an IPv6 address that carries a private IPv4 address")
def test_an_address_is_judged_by_the_one_inside_it(form: str) -> None:
    with pytest.raises(StrataError) as error:
        WebhookTarget("https://hook.example.org/").judge(ipaddress.ip_address(INSIDE[form]))
    assert error.value.code is Code.FORBIDDEN


@pytest.mark.attack(AREA, "a webhook that plain HTTP would show to anybody")
def test_a_webhook_is_encrypted() -> None:
    with pytest.raises(StrataError) as error:
        WebhookTarget("http://hook.example.org/").judge(ipaddress.ip_address("93.184.216.34"))
    assert error.value.code is Code.FORBIDDEN


@pytest.mark.filterwarnings("ignore:'imghdr' is deprecated:DeprecationWarning")
@pytest.mark.attack(AREA, "a subscription whose template lies on the hub's disk or at an address inside")
async def test_a_subscription_makes_the_hub_read_no_file_and_no_other_address(tmp_path: Path, tries: Tries) -> None:
    async with running(tmp_path / "hub") as site:
        researcher, operator = await site.with_role("researcher"), await site.operator()
        for service in SUBSCRIBED:
            for query in ("", *(f"?template={each}" for each in (site.data / TOKEN_FILE, "http://127.0.0.1:9/x"))):
                for client in (researcher, operator):
                    reply = await client.put("/v1/subscription/x", json={"url": f"{service}{query}"})
                    assert reply.status_code == (403 if query else 200), (service, query)
                    tries(1)
        for query in ("?format=text", "?rto=9999", "?verify=no", "?", "#?mode=private", "?%74emplate=/etc/passwd"):
            for service in (*SUBSCRIBED, "ntfy://topic"):
                reply = await researcher.put("/v1/subscription/x", json={"url": f"{service}{query}"})
                assert refused(reply) == (403, "forbidden"), (service, query)
                tries(1)
