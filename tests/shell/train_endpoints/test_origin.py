"""Where the server lets itself be sent: what the settings name. The rest is in `tests/abuse/test_outbound.py`."""

from __future__ import annotations

import pytest

from strata.base.errors import StrataError
from strata.train.endpoints.origin import EngineOrigin, check_allowed, parse_origin, resolve_address

ALLOW = ("http://127.0.0.1:8000", "https://engines.example", "http://[::1]:8000/")


def test_what_the_settings_name_is_allowed() -> None:
    assert check_allowed("http://127.0.0.1:8000/", ALLOW) == EngineOrigin("http", "127.0.0.1", 8000)
    assert check_allowed("https://ENGINES.example:443", ALLOW) == EngineOrigin("https", "engines.example", 443)
    assert str(check_allowed("http://[::1]:8000", ALLOW)) == "http://[::1]:8000"
    with pytest.raises(StrataError, match="not in the settings"):
        check_allowed("http://127.0.0.1:8000", ())


async def test_a_name_is_looked_up_once_and_its_address_judged() -> None:
    assert await resolve_address(parse_origin("http://127.0.0.1:8000")) == "127.0.0.1"
    with pytest.raises(StrataError, match="where no inference engine can be"):
        await resolve_address(parse_origin("http://169.254.169.254:80"))
    with pytest.raises(StrataError, match="cannot be resolved"):
        await resolve_address(parse_origin("http://no-such-host.invalid:80"))
