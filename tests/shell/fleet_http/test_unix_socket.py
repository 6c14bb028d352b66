"""The Unix socket of a server: for its owner alone, in any folder, beside TCP, and again after a kill."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import threading
from pathlib import Path

import pytest

from strata.base.errors import Code, StrataError
from strata.base.secret import read_secret
from strata.base.unix_socket import connect_unix, is_listening, listen_unix
from strata.fleet.client.hub_client import HubClient
from strata.fleet.wire.identities import CallerReply
from strata.fleet.wire.overview import HubHealth
from strata.hub.settings import SOCKET, HubTlsSettings
from tests.shell.fleet_http.running import process, running

OTHER = 65_534


def test_a_socket_is_for_its_owner_and_its_path_may_be_long(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir(mode=0o700)
    others = os.umask(0)
    try:
        listener = listen_unix(folder / "s")
    finally:
        os.umask(others)
    with listener:
        assert stat.S_IMODE((folder / "s").stat().st_mode) == 0o600
        assert is_listening(folder / "s")
        with pytest.raises(StrataError, match="another process listens"):
            listen_unix(folder / "s")
    assert not is_listening(folder / "s")
    listen_unix(folder / "s").close()


def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("mine")
    with pytest.raises(StrataError, match="no socket"):
        listen_unix(tmp_path / "s")
    assert (tmp_path / "s").read_text() == "mine"


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777])
def test_a_folder_that_others_can_write_to_is_refused_by_both_sides(tmp_path: Path, mode: int) -> None:
    with listen_unix(tmp_path / "s"):
        tmp_path.chmod(mode)
        with pytest.raises(StrataError, match="others can write") as refused:
            connect_unix(tmp_path / "s")
        assert refused.value.code is Code.FORBIDDEN
    with pytest.raises(StrataError, match="others can write"):
        listen_unix(tmp_path / "other")


def test_a_socket_of_another_user_gets_no_byte(tmp_path: Path) -> None:
    """In a folder of ours that another user's process listens in, as if it had been handed the socket."""
    path = tmp_path / "s"
    heard: list[bytes] = []
    with listen_unix(path) as listener:
        listener.settimeout(30)
        child = os.fork()
        if child == 0:
            # The kernel notes who called `listen`: the last one does.
            os.setuid(OTHER)
            listener.listen(1)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0

        def hear() -> None:
            connection, _ = listener.accept()
            with connection:
                heard.append(connection.recv(65_536))

        hearing = threading.Thread(target=hear)
        hearing.start()
        with HubClient(f"unix:{path}") as client, pytest.raises(StrataError, match=f"another user .uid {OTHER}."):
            client.call("GET", "/v1/health", HubHealth)
        hearing.join()
    assert heard == [b""]


async def test_the_operator_token_and_the_keys_above_a_researcher_need_the_socket_or_tls(tmp_path: Path) -> None:
    async with running(tmp_path / "hub") as site:
        operator = await site.operator()
        made = await operator.post("/v1/hosts/local", json={"name": "anna"})
        secrets = {"host": made.json()["secret"], "token": operator.headers["X-Operator-Token"]}
        for role in ("viewer", "researcher", "operator", "admin"):
            reply = await operator.post("/v1/keys", json={"name": f"a-{role}", "role": role})
            secrets[role] = reply.json()["secret"]
        for name, secret in secrets.items():
            tcp = await site.client(Authorization=f"Bearer {secret}")
            unix = await site.private_client(Authorization=f"Bearer {secret}")
            assert (await unix.get("/v1/caller")).status_code == 200, name
            reply = await tcp.get("/v1/caller")
            assert (reply.status_code == 200) is (name in ("viewer", "researcher")), name
            if reply.status_code != 200:
                assert reply.status_code == 403
                error = reply.json()["error"]
                assert "not taken over TCP without TLS" in error["message"]
                assert f"unix:{tmp_path / 'hub' / SOCKET}" in error["hint"]
        old_way = await site.client(**{"X-Operator-Token": secrets["token"]})
        assert (await old_way.get("/v1/caller")).status_code == 403


async def test_a_hub_with_tls_has_the_socket_too(tmp_path: Path) -> None:
    def ask(data: Path) -> CallerReply:
        with HubClient(f"unix:{data / SOCKET}", bearer=read_secret(data / "operator.token")) as client:
            return client.call("GET", "/v1/caller", CallerReply)

    async with running(tmp_path / "hub", tls=HubTlsSettings(enabled=True)) as site:
        assert (await asyncio.to_thread(ask, site.data)).kind == "operator"


def test_a_killed_hub_leaves_a_socket_that_the_next_one_takes(tmp_path: Path) -> None:
    with process(tmp_path / "hub") as first:
        first.end(signal.SIGKILL)
    assert (tmp_path / "hub" / SOCKET).is_socket()
    with process(tmp_path / "hub") as second:
        with second.client() as operator:
            assert operator.get("/v1/status").status_code == 200
        assert second.end()[0] == 0
    assert not (tmp_path / "hub" / SOCKET).exists()


def test_a_client_says_that_a_server_is_not_running(tmp_path: Path) -> None:
    with HubClient(f"unix:{tmp_path / 'none' / 's'}") as client, pytest.raises(StrataError) as refused:
        client.call("GET", "/v1/health", HubHealth)
    assert refused.value.code is Code.UNAVAILABLE
    assert "is not running" in refused.value.message
