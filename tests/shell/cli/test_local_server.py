"""The training server of a command: which one that runs already it takes, and that it listens on no port."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import click
import pytest

from strata.base import file_lock
from strata.base.errors import StrataError
from strata.base.file_lock import is_locked
from strata.base.private import require_private_folder
from strata.base.settings import process_environment
from strata.base.unix_socket import is_listening, listen_unix
from strata.cli.local_server import COMMAND_LOCK, NO_PORT, local_server, without_server_settings
from strata.cli.training_server import choose_server
from strata.sdk.fleet import client_settings
from strata.sdk.recipes.run_folder import SERVER, RunFolder
from strata.train.launch.launcher import lock_folder
from strata.train.settings import ADDRESS_FILE, LAUNCHER_LOCK, ServerSettings, load_settings

LISTENING: Final = "0A"
"""Of /proc/net/tcp."""


class StillWaitsError(Exception):
    pass


def refuse_to_wait(_waited: str) -> None:
    raise StillWaitsError


@pytest.fixture
def settings(tmp_path: Path) -> ServerSettings:
    text = f'[server]\ndata = "{tmp_path}/d"\nport = 0\n[model]\npath = "{tmp_path}/m"\n'
    (tmp_path / "server.toml").write_text(text, encoding="utf-8")
    loaded = load_settings(tmp_path / "server.toml", environ={})
    for folder in (loaded.data, loaded.sockets):
        require_private_folder(folder, "files")
    return loaded


def test_a_server_that_runs_is_used_if_it_does_not_end_with_another_command(
    tmp_path: Path, settings: ServerSettings
) -> None:
    config, log = tmp_path / "server.toml", tmp_path / "server.log"
    assert not is_locked(settings.data / LAUNCHER_LOCK)
    with lock_folder(settings.data), listen_unix(settings.api_socket):
        assert is_locked(settings.data / LAUNCHER_LOCK)
        for address in ("", f"unix:{settings.api_socket}"):
            if address:
                (settings.data / ADDRESS_FILE).write_text(address, encoding="utf-8")
            with pytest.raises(StillWaitsError), local_server(config, {}, log, refuse_to_wait):
                pass
        (settings.data / ADDRESS_FILE).write_text("http://127.0.0.1:5555", encoding="utf-8")
        with local_server(config, {}, log, refuse_to_wait) as used:
            assert used == settings
    assert not log.exists(), "it started a server"


def test_one_command_at_a_time_has_the_server_of_a_file_also_without_a_port(
    tmp_path: Path, settings: ServerSettings
) -> None:
    config, log = tmp_path / "server.toml", tmp_path / "server.log"
    config.write_text(config.read_text(encoding="utf-8").replace("port = 0", 'listen = "unix"'), encoding="utf-8")
    (settings.data / ADDRESS_FILE).write_text(f"unix:{settings.api_socket}", encoding="utf-8")
    with file_lock.lock_folder(settings.data, COMMAND_LOCK, taken="", hint=""):
        # Before its server has taken the folder, and after.
        with pytest.raises(StillWaitsError), local_server(config, {}, log, refuse_to_wait):
            pass
        with (
            lock_folder(settings.data),
            listen_unix(settings.api_socket),
            pytest.raises(StillWaitsError),
            local_server(config, {}, log, refuse_to_wait),
        ):
            pass
    with lock_folder(settings.data), listen_unix(settings.api_socket), local_server(config, {}, log, refuse_to_wait):
        pass
    assert not log.exists(), "it started a server"


def test_a_run_that_begins_anew_removes_no_folder_in_which_a_server_runs(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    with run.locked():
        run.open_run({"server.url": ""})
        data = tmp_path / "run" / SERVER / "data-1"
        data.mkdir(parents=True)
        with lock_folder(data), pytest.raises(StrataError, match="a server runs in"):
            run.open_run({"server.url": ""})
        assert data.exists()


def test_a_named_key_file_counts_more_than_a_token_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key").write_text("of-the-file")
    monkeypatch.setenv("STRATA_OPERATOR_TOKEN", "of-a-hub")
    named = client_settings(url="http://127.0.0.1:1", token_path=tmp_path / "key")
    assert named.token is None
    assert client_settings(url="http://127.0.0.1:1").token is not None


def test_what_a_server_that_was_killed_has_left_is_not_used(tmp_path: Path, settings: ServerSettings) -> None:
    """A process listens, and no launcher runs: the next server starts, here as far as the model, which is not there."""
    (settings.data / ADDRESS_FILE).write_text("http://127.0.0.1:5555", encoding="utf-8")
    with (
        listen_unix(settings.api_socket),
        pytest.raises(StrataError, match="there is no model in"),
        local_server(tmp_path / "server.toml", without_server_settings(), tmp_path / "server.log", lambda _: None),
    ):
        pass


def test_its_api_server_listens_on_its_socket_and_on_no_port(tmp_path: Path, settings: ServerSettings) -> None:
    command = [sys.executable, "-m", "strata.train.api", "--settings", str(tmp_path / "server.toml")]
    environment = {**process_environment(), **NO_PORT}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        said = next(line for line in server.stderr if "listening on" in line)
        assert said == f"strata: listening on unix:{settings.api_socket}\n"
        assert is_listening(settings.api_socket)
        assert (settings.data / ADDRESS_FILE).read_text(encoding="utf-8").strip() == f"unix:{settings.api_socket}"
        assert not listening_ports(server.pid)
        server.send_signal(signal.SIGTERM)
        server.stderr.read()


def listening_ports(pid: int) -> list[str]:
    """Addresses of TCP on which a process listens, as the kernel has them."""
    sockets = {str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()}
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{table}").read_text(encoding="ascii").splitlines()[1:]
    ]
    return [row[1] for row in rows if row[3] == LISTENING and f"socket:[{row[9]}]" in sockets]


def test_a_context_beside_a_settings_file_is_refused(tmp_path: Path, settings: ServerSettings) -> None:
    file = str(tmp_path / "server.toml")
    with pytest.raises(click.UsageError, match="--context lab names a server, and so does the settings file"):
        choose_server(file, None, "lab")
    with pytest.raises(StrataError, match="no training server is running with the data folder"):
        choose_server(file, None, None)
    assert choose_server("http://127.0.0.1:1", None, "lab").context == "lab"
