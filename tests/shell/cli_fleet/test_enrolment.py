"""A machine joins a hub it has never seen, by a token that names the hub's authority, and leaves without a trace."""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from strata.cli.exit_codes import ExitCode
from strata.cli.fleet.agent_service import unit_text
from strata.sdk.fleet import fetch_authority, pin_of
from tests.shell.cli_fleet.driving import Person
from tests.shell.fleet_http.running import Process, process


@pytest.fixture
def secure(tmp_path: Path) -> Iterator[Process]:
    with process(tmp_path / "hub", "--tls", "--name", "127.0.0.1") as made:
        yield made


@pytest.fixture
def operator(secure: Process, stranger: Person) -> Person:
    token, pin = str(secure.data / "operator.token"), told_pin(secure)
    done = stranger.says("login", secure.url, "--token-file", token, "--ca-pin", pin)
    assert done.status == ExitCode.OK, done.err
    return stranger


def told_pin(hub: Process) -> str:
    """As the hub's operator reads it from its first line, and not from the network."""
    return hub.said[0].partition(", pin ")[2].partition(",")[0].strip()


def test_the_pin_that_login_asks_for_is_printed_by_the_hub_and_by_invite(operator: Person, secure: Process) -> None:
    pin = told_pin(secure)
    assert pin == pin_of(fetch_authority(secure.url))
    assert pin in operator.says("invite").err
    assert operator.says("invite", "-o", "json").value["ca_pin"] == pin


def test_a_pin_that_nobody_compared_or_that_differs_is_refused(
    secure: Process, stranger: Person, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("never-sent\n"))
    token = str(secure.data / "operator.token")
    assert stranger.says("login", secure.url, "--token-file", token).status == ExitCode.USAGE
    done = stranger.says("login", secure.url, "--token-file", token, "--ca-pin", "0" * 64)
    assert done.status == ExitCode.AUTH
    assert "another pin" in done.err


def a_token(operator: Person, name: str = "token") -> Path:
    """A join token in a file that only its owner can read."""
    path = operator.home / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    path.write_text(operator.says("invite").out)
    return path


def test_a_machine_joins_once_and_leaves_once_however_often_it_is_told(operator: Person, secure: Process) -> None:
    state = operator.home / "agent"
    join = ("join", secure.url, "--token-file", str(a_token(operator)), "--name", "bench", "--state", str(state))
    first = operator.says(*join)
    assert first.status == ExitCode.OK, first.err
    assert "this machine is the host bench of" in first.err
    assert stat.S_IMODE((state / "identity" / "host.key").stat().st_mode) == 0o600
    assert not (state / "joining").exists()
    again = operator.says(*join)
    assert (again.status, "already" in again.err) == (ExitCode.OK, True)
    left = operator.says("leave", "--state", str(state))
    assert (left.status, "bench has left" in left.err) == (ExitCode.OK, True)
    assert not (state / "identity").exists()
    once_more = operator.says("leave", "--state", str(state))
    assert (once_more.status, "the host of no hub" in once_more.err) == (ExitCode.OK, True)
    used = operator.says(*join)
    assert used.status in (ExitCode.AUTH, ExitCode.NOT_FOUND, ExitCode.FAILED), used.err


def test_a_token_for_another_hub_is_not_sent(operator: Person, secure: Process) -> None:
    file = a_token(operator)
    token = file.read_text()
    version, pin, *rest = token.split(".")
    file.write_text(".".join([version, "f" * len(pin), *rest]))
    join = ("join", secure.url, "--token-file", str(file), "--state", str(operator.home / "agent"))
    assert operator.says(*join).status == ExitCode.AUTH
    assert not (operator.home / "agent" / "identity").exists()
    file.write_text(token)
    assert operator.says(*join).status == ExitCode.OK


def test_a_token_on_the_command_line_is_refused_unread_and_unrepeated(operator: Person, secure: Process) -> None:
    token = operator.says("invite").out.strip()
    state = ("--state", str(operator.home / "agent"))
    done = operator.says("join", secure.url, token, *state)
    assert done.status == ExitCode.USAGE
    assert "--token-file FILE" in done.err
    assert token not in done.err + done.out
    assert not (operator.home / "agent").exists()


def test_a_token_comes_from_stdin_or_from_a_variable_that_is_gone_afterwards(
    operator: Person, secure: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(operator.says("invite").out))
    one = operator.says("join", secure.url, "--name", "one", "--state", str(operator.home / "one"))
    assert one.status == ExitCode.OK, one.err
    monkeypatch.setenv("STRATA_JOIN_TOKEN", operator.says("invite").out.strip())
    two = operator.says("join", secure.url, "--name", "two", "--state", str(operator.home / "two"))
    assert two.status == ExitCode.OK, two.err
    assert "STRATA_JOIN_TOKEN" not in os.environ  # noqa: TID251 - what children would inherit
    nothing = operator.says("join", secure.url, "--name", "three", "--state", str(operator.home / "three"))
    assert (nothing.status, "there is no join token" in nothing.err) == (ExitCode.USAGE, True)


def test_a_token_file_that_others_can_read_is_refused(operator: Person, secure: Process) -> None:
    file = a_token(operator)
    file.chmod(0o644)
    done = operator.says("join", secure.url, "--token-file", str(file), "--state", str(operator.home / "agent"))
    assert (done.status, "can be read by group or others" in done.err) == (ExitCode.USAGE, True)


def test_the_unit_of_the_agent_quotes_what_systemd_would_read(tmp_path: Path) -> None:
    text = unit_text(tmp_path / 'a "b" %h $x')
    assert f'agent --state "{tmp_path}/a \\"b\\" %%h $$x" --log-format json\n' in text
