"""A machine joins a hub it has never seen, by a token that names the hub's authority, and leaves without a trace."""

from __future__ import annotations

import io
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from strata.cli.exits import Exit
from strata.cli.fleet.service import unit_text
from strata.sdk.fleet import fetch_authority, pin_of
from tests.shell.cli_fleet.driving import Person
from tests.shell.fleet_http.running import Process, process


@pytest.fixture
def secure(tmp_path: Path) -> Iterator[Process]:
    with process(tmp_path / "hub", "--tls", "--name", "127.0.0.1") as made:
        yield made


@pytest.fixture
def operator(secure: Process, stranger: Person) -> Person:
    pin = pin_of(fetch_authority(secure.url))
    done = stranger.says("login", secure.url, "--token-file", str(secure.data / "operator.token"), "--ca-pin", pin)
    assert done.status == Exit.OK, done.err
    return stranger


def test_a_pin_that_nobody_compared_or_that_differs_is_refused(
    secure: Process, stranger: Person, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("never-sent\n"))
    token = str(secure.data / "operator.token")
    assert stranger.says("login", secure.url, "--token-file", token).status == Exit.USAGE
    done = stranger.says("login", secure.url, "--token-file", token, "--ca-pin", "0" * 64)
    assert done.status == Exit.AUTH
    assert "another pin" in done.err


def test_a_machine_joins_once_and_leaves_once_however_often_it_is_told(operator: Person, secure: Process) -> None:
    state = operator.home / "agent"
    made = operator.says("invite", "-o", "json").value
    join = ("join", secure.url, made["token"], "--name", "bench", "--state", str(state))
    first = operator.says(*join)
    assert first.status == Exit.OK, first.err
    assert "this machine is the host bench of" in first.err
    assert stat.S_IMODE((state / "identity" / "host.key").stat().st_mode) == 0o600
    assert not (state / "joining").exists()
    again = operator.says(*join)
    assert (again.status, "already" in again.err) == (Exit.OK, True)
    left = operator.says("leave", "--state", str(state))
    assert (left.status, "bench has left" in left.err) == (Exit.OK, True)
    assert not (state / "identity").exists()
    once_more = operator.says("leave", "--state", str(state))
    assert (once_more.status, "the host of no hub" in once_more.err) == (Exit.OK, True)
    used = operator.says(*join)
    assert used.status in (Exit.AUTH, Exit.NOT_FOUND, Exit.FAILED), used.err


def test_a_token_for_another_hub_is_not_sent(operator: Person, secure: Process) -> None:
    token = str(operator.says("invite", "-o", "json").value["token"])
    version, pin, *rest = token.split(".")
    other = ".".join([version, "f" * len(pin), *rest])
    done = operator.says("join", secure.url, other, "--state", str(operator.home / "agent"))
    assert done.status == Exit.AUTH
    assert not (operator.home / "agent" / "identity").exists()
    assert operator.says("join", secure.url, token, "--state", str(operator.home / "agent")).status == Exit.OK


def test_the_unit_of_the_agent_quotes_what_systemd_would_read(tmp_path: Path) -> None:
    text = unit_text(tmp_path / 'a "b" %h $x')
    assert f'agent --state "{tmp_path}/a \\"b\\" %%h $$x" --log-format json\n' in text
