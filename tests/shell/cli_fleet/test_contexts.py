"""Which hub is asked, with whose token, and what is said when that does not work."""

from __future__ import annotations

import io
import socket
import stat
import threading
from pathlib import Path

import pytest

from strata.base.errors import StrataError
from strata.cli.exit_codes import ExitCode
from strata.fleet.client.hub_client import HubClient
from tests.shell.cli_fleet.driving import Person
from tests.shell.fleet_agent.running import HubProcess
from tests.support.ports import port_of, reserve_port


def token(hub: HubProcess) -> str:
    return (hub.data / "operator.token").read_text().strip()


def test_a_login_keeps_the_token_in_a_file_for_its_owner_alone(person: Person, hub: HubProcess) -> None:
    folder = person.home / "config" / "strata"
    kept = folder / "tokens" / "hub"
    assert kept.read_text().strip() == token(hub)
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert token(hub) not in (folder / "contexts.json").read_text()
    assert person.says("contexts", "-o", "json").value == [
        {"name": "hub", "url": hub.address, "current": True, "token_file": str(kept)}
    ]


def test_a_token_may_come_on_stdin_and_a_wrong_one_is_not_kept(
    stranger: Person, hub: HubProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("wrong\n"))
    assert stranger.says("login", hub.address).status == ExitCode.AUTH
    assert not (stranger.home / "config" / "strata" / "contexts.json").exists()
    monkeypatch.setattr("sys.stdin", io.StringIO(token(hub) + "\n"))
    assert stranger.says("login", hub.address, "--name", "mine").status == ExitCode.OK
    assert stranger.says("status").out.startswith("no jobs yet")


def test_the_environment_stands_above_every_context(
    stranger: Person, hub: HubProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("STRATA_URL", hub.address)
    assert stranger.says("status").status == ExitCode.AUTH
    monkeypatch.setenv("STRATA_OPERATOR_TOKEN", token(hub))
    assert stranger.says("status").status == ExitCode.OK
    monkeypatch.delenv("STRATA_OPERATOR_TOKEN")
    monkeypatch.setenv("STRATA_OPERATOR_TOKEN_FILE", str(hub.data / "operator.token"))
    assert stranger.says("status").status == ExitCode.OK
    readable = tmp_path / "readable"
    readable.write_text(token(hub))
    readable.chmod(0o644)
    monkeypatch.setenv("STRATA_OPERATOR_TOKEN_FILE", str(readable))
    done = stranger.says("status")
    assert (done.status, "can be read by group or others" in done.err) == (ExitCode.USAGE, True)


def test_the_token_of_a_context_goes_to_no_other_address(person: Person, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def listen() -> None:
            connection, _ = listener.accept()
            # Nobody would answer a second connection.
            listener.close()
            with connection:
                heard.append(connection.recv(65_536))

        listening = threading.Thread(target=listen)
        listening.start()
        monkeypatch.setenv("STRATA_URL", f"http://127.0.0.1:{listener.getsockname()[1]}")
        assert person.says("status").status == ExitCode.UNREACHABLE
        listening.join()
    assert heard[0].startswith(b"GET /v1/status ")
    assert b"authorization" not in heard[0].lower()


def test_without_a_hub_it_says_how_to_get_one(stranger: Person) -> None:
    done = stranger.says("status")
    assert done.status == ExitCode.USAGE
    assert done.err == "strata: no hub is chosen\nhint: strata up starts one here; strata login URL chooses another\n"


def test_a_hub_that_is_not_there_is_unreachable(stranger: Person, monkeypatch: pytest.MonkeyPatch) -> None:
    with reserve_port() as guard:
        monkeypatch.setenv("STRATA_URL", f"http://127.0.0.1:{port_of(guard)}")
        done = stranger.says("status")
    assert done.status == ExitCode.UNREACHABLE
    assert "cannot be reached: nothing listens on port" in done.err
    assert "hint: check the address, which strata contexts shows, and that strata hub or strata up runs" in done.err


def test_a_connection_that_breaks_says_nothing_about_the_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def refuse() -> None:
            connection, _ = listener.accept()
            connection.close()

        threading.Thread(target=refuse, daemon=True).start()
        with (
            HubClient(f"http://127.0.0.1:{listener.getsockname()[1]}") as client,
            pytest.raises(StrataError, match="cannot be reached") as broken,
        ):
            client.fetch("/v1/health")
    assert broken.value.hint is None


def test_an_unknown_context_is_named_with_those_there_are(person: Person) -> None:
    done = person.says("status", "--context", "moon")
    assert (done.status, done.err) == (ExitCode.USAGE, "strata: there is no context 'moon'\nhint: there are: hub\n")


def test_the_status_of_a_training_server_asked_of_a_hub_says_how_to_name_one(person: Person) -> None:
    done = person.says("serve", "status")
    assert done.status == ExitCode.AUTH
    assert "the operator token is no such key" in done.err
    assert "hint: one that you started yourself: strata serve status CONFIG" in done.err


def test_a_login_says_whether_the_port_or_the_key_is_wrong(
    stranger: Person, hub: HubProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def log_in(url: str, key: str) -> str:
        monkeypatch.setattr("sys.stdin", io.StringIO(f"{key}\n"))
        done = stranger.says("login", url)
        assert done.status != ExitCode.OK
        return done.err

    with reserve_port() as reserved:
        dead = port_of(reserved)
        assert f"cannot be reached: nothing listens on port {dead}" in log_in(f"http://127.0.0.1:{dead}", "KEY")
    assert "this is no key of a viewer or a researcher (tml-…)" in log_in(hub.url, "KEY")
    assert f"the server at {hub.url} does not know this key" in log_in(hub.url, f"tml-{'0' * 12}-{'a' * 43}")
    monkeypatch.setenv("STRATA_URL", hub.url)
    said = stranger.says("status").err
    assert "strata login URL" in said
    assert "Authorization" not in said


def test_a_hub_that_does_not_run_is_started_by_strata_up(
    stranger: Person, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRATA_URL", f"unix:{tmp_path / 'hub.sock'}")
    said = stranger.says("status").err
    assert "it is not running" in said
    assert "strata up" in said
