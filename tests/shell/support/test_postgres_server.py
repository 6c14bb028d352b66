from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from strata.base.errors import Code, StrataError
from tests.support.ports import port_of, reserve_port
from tests.support.postgres import PostgresDatabases, PostgresServer, StopMode, find_programs

OWNER = """
import sys
from tests.support.postgres import PostgresServer
server = PostgresServer().__enter__()
print(server.directory, server.port, flush=True)
sys.stdin.read()
"""


def test_a_killed_server_comes_back_at_the_same_address_with_every_committed_row(
    own_postgres_server: PostgresServer,
) -> None:
    url = own_postgres_server.create_database()
    with psycopg.connect(url) as setup:
        setup.execute("CREATE TABLE numbers (number int)")
    for number in range(3):
        with contextlib.closing(psycopg.connect(url)) as writer, contextlib.closing(psycopg.connect(url)) as open_one:
            open_one.execute("INSERT INTO numbers VALUES (-1)")
            writer.execute("INSERT INTO numbers VALUES (%s)", [number])
            writer.commit()
            own_postgres_server.kill()
            with pytest.raises(psycopg.OperationalError):
                writer.execute("SELECT 1")
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(url)
        own_postgres_server.start()
        with psycopg.connect(url) as reader:
            assert reader.execute("SELECT number FROM numbers").fetchall() == [(n,) for n in range(number + 1)]


def test_kill_leaves_none_of_its_processes_alive(own_postgres_server: PostgresServer) -> None:
    with contextlib.closing(psycopg.connect(own_postgres_server.server_url)) as connection:
        backend = connection.info.backend_pid
        postmaster = _postmaster(own_postgres_server.directory)
        assert _alive(backend)
        own_postgres_server.kill()
        assert not _alive(backend)
        assert not _alive(postmaster)


@pytest.mark.parametrize("mode", ["smart", "fast", "immediate"])
def test_a_stopped_server_starts_again(own_postgres_server: PostgresServer, mode: StopMode) -> None:
    own_postgres_server.stop(mode)
    with pytest.raises(StrataError) as caught:
        own_postgres_server.stop()
    assert caught.value.code is Code.PRECONDITION
    own_postgres_server.start()
    psycopg.connect(own_postgres_server.server_url).close()


def test_a_commit_waits_for_the_disk(postgres_server: PostgresDatabases) -> None:
    with psycopg.connect(postgres_server.server_url) as connection:
        for setting in ("fsync", "synchronous_commit", "full_page_writes"):
            assert connection.execute(f"SHOW {setting}".encode()).fetchone() == ("on",)


def test_two_databases_know_nothing_of_each_other(postgres_server: PostgresDatabases) -> None:
    first, second = postgres_server.create_database(), postgres_server.create_database()
    try:
        with psycopg.connect(first) as connection:
            connection.execute("CREATE TABLE only_here (number int)")
        with psycopg.connect(second) as connection, pytest.raises(psycopg.errors.UndefinedTable):
            connection.execute("SELECT * FROM only_here")
    finally:
        postgres_server.drop_database(first)
        postgres_server.drop_database(second)


def test_a_dropped_database_is_gone_although_somebody_was_connected(postgres_server: PostgresDatabases) -> None:
    url = postgres_server.create_database()
    with contextlib.closing(psycopg.connect(url)):
        postgres_server.drop_database(url)
    with pytest.raises(psycopg.OperationalError, match="does not exist"):
        psycopg.connect(url)


def test_terminated_backends_are_those_of_one_database(postgres_server: PostgresDatabases, postgres_url: str) -> None:
    other = postgres_server.create_database()
    with contextlib.closing(psycopg.connect(postgres_url)) as hit, contextlib.closing(psycopg.connect(other)) as spared:
        assert postgres_server.terminate_backends(postgres_url) == 1
        with pytest.raises(psycopg.OperationalError):
            hit.execute("SELECT 1")
        spared.execute("SELECT 1")
    postgres_server.drop_database(other)


def test_a_failed_start_tells_what_the_server_said(own_postgres_server: PostgresServer) -> None:
    own_postgres_server.stop()
    with (own_postgres_server.directory / "data" / "postgresql.conf").open("a") as settings:
        settings.write("shared_buffers = nonsense\n")
    with pytest.raises(StrataError, match='invalid value for parameter "shared_buffers"'):
        own_postgres_server.start()


def test_a_missing_server_is_an_error_that_names_the_package(tmp_path: Path) -> None:
    with pytest.raises(StrataError, match="apt-get install postgresql") as caught:
        find_programs(search_path=str(tmp_path), packaged=tmp_path)
    assert caught.value.code is Code.UNSUPPORTED


def test_the_newest_packaged_version_is_taken_when_none_is_on_the_path(tmp_path: Path) -> None:
    for version in ("9.6", "15", "18"):
        (tmp_path / version / "bin").mkdir(parents=True)
        for program in ("initdb", "postgres"):
            (tmp_path / version / "bin" / program).touch()
    (tmp_path / "18" / "bin" / "postgres").unlink()
    assert find_programs(search_path=str(tmp_path), packaged=tmp_path) == tmp_path / "15" / "bin"


def test_a_reserved_port_refuses_until_somebody_listens_on_it() -> None:
    with reserve_port() as guard:
        address = ("127.0.0.1", port_of(guard))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
        with socket.create_server(address), socket.create_connection(address):
            pass
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)


@pytest.mark.parametrize("state", ["running", "killed"])
def test_a_closed_server_leaves_no_directory_and_no_shared_memory(state: str) -> None:
    with PostgresServer() as server:
        segment = _postmaster_file(server.directory)[6].split()[1]
        if state == "killed":
            server.kill()
    assert not server.directory.exists()
    assert segment not in {line.split()[1] for line in Path("/proc/sysvipc/shm").read_text().splitlines()}


def test_nothing_of_a_server_outlives_an_owner_that_was_killed() -> None:
    with _owner() as owner:
        assert owner.stdout is not None
        name, _ = owner.stdout.readline().split()
        directory = Path(name)
        postmaster = _postmaster(directory)
        cleaner = _cleaner(directory)
        with _watched(postmaster) as server_ends, _watched(cleaner) as cleaner_ends:
            owner.kill()
            assert _readable(server_ends, within_s=30)
            assert _readable(cleaner_ends, within_s=30)
    assert not directory.exists()


def test_the_services_command_prints_the_url_and_stops_on_a_signal() -> None:
    command = [sys.executable, "-m", "tests.support.services"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as services:
        assert services.stdout is not None
        url = services.stdout.readline().strip()
        psycopg.connect(url).close()
        services.send_signal(signal.SIGTERM)
        out, err = services.communicate(timeout=60)
        assert services.returncode == 0
    assert out == ""
    assert f"export STRATA_TEST_POSTGRES={url}" in err
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(url)


@contextlib.contextmanager
def _owner() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", OWNER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        try:
            yield owner
        finally:
            owner.kill()


@contextlib.contextmanager
def _watched(pid: int) -> Iterator[int]:
    handle = os.pidfd_open(pid)
    try:
        yield handle
    finally:
        os.close(handle)


def _readable(handle: int, *, within_s: float) -> bool:
    return bool(select.select([handle], [], [], within_s)[0])


def _postmaster_file(directory: Path) -> list[str]:
    return (directory / "data" / "postmaster.pid").read_text().splitlines()


def _postmaster(directory: Path) -> int:
    return int(_postmaster_file(directory)[0])


def _cleaner(directory: Path) -> int:
    for command_line in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = command_line.read_bytes().split(b"\0")
            if b"strata-pg-cleaner" in words and str(directory).encode() in words:
                return int(command_line.parent.name)
    raise AssertionError(f"no cleaner for {directory}")


def _alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"
