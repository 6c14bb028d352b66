"""Addresses of Unix sockets, and what is not one. Sockets themselves: tests/shell/identity and tests/abuse."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata.base.errors import Code, StrataError
from strata.base.unix_socket import read_address, spell_address


def test_an_address_is_read_as_it_was_spelled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert read_address(spell_address(Path("/run/hub.sock"))) == Path("/run/hub.sock")
    monkeypatch.chdir(tmp_path)
    assert spell_address(read_address("unix:data/hub.sock")) == f"unix:{tmp_path / 'data' / 'hub.sock'}"


@pytest.mark.parametrize("text", ["", "unix:", "unix:/", "http://127.0.0.1", "/run/hub.sock", "unix:/a\0b"])
def test_what_is_no_socket_is_refused(text: str) -> None:
    with pytest.raises(StrataError) as refused:
        read_address(text)
    assert refused.value.code is Code.INVALID
