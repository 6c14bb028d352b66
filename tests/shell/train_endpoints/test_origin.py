"""Where the server lets itself be sent: what the settings name, spelled as they spell it, and no other address."""

from __future__ import annotations

import ipaddress

import pytest

from strata.base.errors import Code, StrataError
from strata.train.endpoints.origin import Origin, allowed, judge, look_up, origin_of

ALLOW = ("http://127.0.0.1:8000", "https://engines.example", "http://[::1]:8000/")
REFUSED = (
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
ELSEWHERE = (
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


@pytest.mark.parametrize("url", REFUSED)
def test_what_is_no_plain_origin_is_refused(url: str) -> None:
    with pytest.raises(StrataError) as refused:
        allowed(url, ALLOW)
    assert refused.value.code in (Code.INVALID, Code.FORBIDDEN)


@pytest.mark.parametrize("url", ELSEWHERE)
def test_what_the_settings_do_not_name_in_these_words_is_forbidden(url: str) -> None:
    with pytest.raises(StrataError) as refused:
        allowed(url, ALLOW)
    assert refused.value.code in (Code.FORBIDDEN, Code.INVALID)


def test_what_the_settings_name_is_allowed() -> None:
    assert allowed("http://127.0.0.1:8000/", ALLOW) == Origin("http", "127.0.0.1", 8000)
    assert allowed("https://ENGINES.example:443", ALLOW) == Origin("https", "engines.example", 443)
    assert str(allowed("http://[::1]:8000", ALLOW)) == "http://[::1]:8000"
    with pytest.raises(StrataError, match="not in the settings"):
        allowed("http://127.0.0.1:8000", ())


@pytest.mark.parametrize(
    "address", ["169.254.169.254", "fe80::1", "::ffff:169.254.169.254", "0.0.0.0", "::", "224.0.0.1", "255.255.255.255"]
)
def test_an_address_where_no_engine_can_be_is_forbidden_whatever_its_name(address: str) -> None:
    with pytest.raises(StrataError) as refused:
        judge(origin_of("http://engines.example:8000"), ipaddress.ip_address(address))
    assert refused.value.code is Code.FORBIDDEN


async def test_a_name_is_looked_up_once_and_its_address_judged() -> None:
    assert await look_up(origin_of("http://127.0.0.1:8000")) == "127.0.0.1"
    with pytest.raises(StrataError, match="where no inference engine can be"):
        await look_up(origin_of("http://169.254.169.254:80"))
    with pytest.raises(StrataError, match="cannot be looked up"):
        await look_up(origin_of("http://no-such-host.invalid:80"))
