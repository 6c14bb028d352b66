"""Addresses of Unix sockets, and what is not one. Sockets themselves: tests/shell/identity and tests/abuse."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata.base.errors import Code, StrataError
from strata.base.unix_socket import format_unix_address, parse_unix_address


def test_an_address_is_read_as_it_was_spelled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert parse_unix_address(format_unix_address(Path("/run/hub.sock"))) == Path("/run/hub.sock")
    monkeypatch.chdir(tmp_path)
    assert format_unix_address(parse_unix_address("unix:data/hub.sock")) == f"unix:{tmp_path / 'data' / 'hub.sock'}"


@pytest.mark.parametrize("text", ["", "unix:", "unix:/", "http://127.0.0.1", "/run/hub.sock", "unix:/a\0b"])
def test_what_is_no_socket_is_refused(text: str) -> None:
    with pytest.raises(StrataError) as refused:
        parse_unix_address(text)
    assert refused.value.code is Code.INVALID
