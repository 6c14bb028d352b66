"""Throwaway PostgreSQL servers for tests and benchmarks, and the databases in them.

Only what a test needs to run a real server, hurt it and clean up after it; no SQL of Strata lives here.
"""

from __future__ import annotations

import os
import pwd
import select
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, Self
from urllib.parse import urlsplit, urlunsplit

import psycopg
from psycopg import sql

from strata.base.errors import Code, StrataError
from tests.support.ports import port_of, reserve_port

StopMode = Literal["smart", "fast", "immediate"]

_STOP_SIGNAL: Final[dict[StopMode, signal.Signals]] = {
    "smart": signal.SIGTERM,
    "fast": signal.SIGINT,
    "immediate": signal.SIGQUIT,
}

# fsync and synchronous_commit are set explicitly although they are the defaults: durability is what the tests test.
# Dynamic shared memory as files keeps what a killed server leaves behind inside the directory that is removed.
_SETTINGS: Final = """
listen_addresses = '127.0.0.1'
fsync = on
synchronous_commit = on
full_page_writes = on
max_connections = 200
shared_buffers = 128MB
dynamic_shared_memory_type = mmap
timezone = 'UTC'
"""

# Reads the process id to end, one line each time it changes (empty: none), until the owner closes its end of the pipe,
# on purpose or by dying in any way at all; then it ends that process and removes everything. A cluster started in the
# instant before its owner registered it ends itself: a postmaster stops within a minute of losing its directory.
_CLEANER: Final = """
trap '' HUP INT QUIT TERM
directory=$1
child=
while read -r line; do child=$line; done
if [ -n "$child" ]; then
    kill -QUIT "$child" && kill -CONT "$child"
    tries=0
    while grep -q '^State:[[:space:]]*[A-WY]' "/proc/$child/status" && [ "$tries" -lt 200 ]; do
        sleep 0.05
        tries=$((tries + 1))
    done
    kill -KILL "$child"
fi
segment=$(sed -n '7s/.* //p' "$directory/data/postmaster.pid")
[ -z "$segment" ] || ipcrm -m "$segment"
rm -rf "$directory"
"""


class PostgresDatabases:
    """The databases of a running server, started here or elsewhere. `server_url` is that of a superuser."""

    def __init__(self, server_url: str) -> None:
        self.server_url = server_url

    def url(self, database: str) -> str:
        return urlunsplit(urlsplit(self.server_url)._replace(path=f"/{database}"))

    def create_database(self) -> str:
        """A new, empty database under a unique name; its URL."""
        name = f"test_{uuid.uuid4().hex}"
        self._execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        return self.url(name)

    def drop_database(self, database: str) -> None:
        """Remove a database, given by name or URL, and end the connections to it."""
        self._execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(_name(database))))

    def terminate_backends(self, database: str) -> int:
        """End all connections to a database, given by name or URL, and wait for it; how many there were."""
        statement = sql.SQL(
            "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity"
            " WHERE datname = {} AND pid <> pg_backend_pid()"
        )
        return self._execute(statement.format(sql.Literal(_name(database))))

    def _execute(self, statement: sql.Composed) -> int:
        with psycopg.connect(self.url("postgres"), autocommit=True, connect_timeout=10) as connection:
            return connection.execute(statement).rowcount


class PostgresServer:
    """One cluster of its own in a temporary directory, with real durability, that can be killed and started again.

    Nothing of it outlives the process that made it: a small shell process, in a session of its own, notices the death
    of the owner, ends the server and removes the directory. The address stays the same over restarts.
    """

    def __init__(self) -> None:
        programs = find_programs()
        self._account = _account()
        self._postgres = programs / "postgres"
        self._process: subprocess.Popen[bytes] | None = None
        self._port_guard = reserve_port()
        self.port = port_of(self._port_guard)
        self.directory = Path(tempfile.mkdtemp(prefix="strata-pg-"))
        self.log_path = self.directory / "server.log"
        self._cleaner = subprocess.Popen(
            ["/bin/sh", "-c", _CLEANER, "strata-pg-cleaner", str(self.directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )
        try:
            self._create_cluster(programs / "initdb")
        except BaseException:
            self.close()
            raise
        self._databases = PostgresDatabases(f"postgresql://postgres@127.0.0.1:{self.port}/postgres")

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def server_url(self) -> str:
        return self._databases.server_url

    def url(self, database: str) -> str:
        return self._databases.url(database)

    def create_database(self) -> str:
        return self._databases.create_database()

    def drop_database(self, database: str) -> None:
        self._databases.drop_database(database)

    def terminate_backends(self, database: str) -> int:
        return self._databases.terminate_backends(database)

    def start(self, *, timeout_s: float = 60.0) -> None:
        """Run the server and wait until it accepts connections, after crash recovery if there was a crash."""
        if self._process is not None:
            raise StrataError(Code.PRECONDITION, "the PostgreSQL server was started already")
        self._process = self._spawn([str(self._postgres), "-D", str(self.directory / "data")])
        until_s = time.monotonic() + timeout_s
        while not self._accepts():
            if (status := self._process.poll()) is not None:
                self._forget_process()
                raise self._failure(Code.INTERNAL, f"the PostgreSQL server ended with status {status} while starting")
            if time.monotonic() > until_s:
                self.kill()
                raise self._failure(Code.DEADLINE, f"PostgreSQL accepted no connection within {timeout_s:g} s")
            time.sleep(0.02)

    def stop(self, mode: StopMode = "fast", *, timeout_s: float = 60.0) -> None:
        """Shut the server down as `pg_ctl stop -m MODE` does; `smart` waits for the clients to leave."""
        process = self._running()
        process.send_signal(_STOP_SIGNAL[mode])
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise self._failure(Code.DEADLINE, f"the PostgreSQL server did not stop within {timeout_s:g} s") from None
        self._forget_process()

    def kill(self) -> None:
        """SIGKILL to the postmaster and all its children at one moment; returns when all they held is free again."""
        process = self._running()
        # Backends lead sessions of their own, so there is no group to kill; but only the postmaster makes them, and
        # while it is stopped it neither makes nor reaps any: the list is complete, no id in it can be anybody else's.
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        handles = [os.pidfd_open(pid) for pid in (process.pid, *_children_of(process.pid))]
        try:
            for handle in handles:
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            for handle in handles:
                _wait_for_exit(handle)
        finally:
            for handle in handles:
                os.close(handle)
        process.wait()
        self._forget_process()

    def follow(self, primary: PostgresServer) -> None:
        """Become a standby of another server, in place of all that this one had, and run. Before: stop or kill it."""
        if self._process is not None:
            raise StrataError(Code.PRECONDITION, "a server that runs cannot become a standby")
        data = self.directory / "data"
        shutil.rmtree(data)
        copy = [
            str(self._postgres.with_name("pg_basebackup")),
            "--checkpoint=fast",
            "--no-sync",
            "--write-recovery-conf",
        ]
        self._run_to_end([*copy, "-d", primary.server_url, "-D", str(data)])
        with (data / "postgresql.auto.conf").open("a", encoding="utf-8") as settings:
            # What the primary waits for is in the copy; once promoted, this server has no standby at first.
            settings.write("synchronous_standby_names = ''\n")
        self._configure()
        self.start()

    def wait_for_standby(self, *, timeout_s: float = 60.0) -> None:
        """From now on nothing counts as committed before the standby has it."""
        until_s = time.monotonic() + timeout_s
        with psycopg.connect(self.server_url, autocommit=True, connect_timeout=10) as connection:
            connection.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
            connection.execute("SELECT pg_reload_conf()")
            synchronous = "SELECT 1 FROM pg_stat_replication WHERE sync_state = 'sync' AND state = 'streaming'"
            while connection.execute(synchronous).fetchone() is None:
                if time.monotonic() > until_s:
                    raise self._failure(Code.DEADLINE, f"no standby followed within {timeout_s:g} s")
                time.sleep(0.02)

    def commit_alone(self) -> None:
        """From now on what is committed may be lost with this server."""
        with psycopg.connect(self.server_url, autocommit=True, connect_timeout=10) as connection:
            connection.execute("ALTER SYSTEM SET synchronous_standby_names = ''")
            connection.execute("SELECT pg_reload_conf()")

    def promote(self) -> None:
        """From a standby to a primary."""
        with psycopg.connect(self.server_url, autocommit=True, connect_timeout=10) as connection:
            row = connection.execute("SELECT pg_promote(true, 60)").fetchone()
        if row != (True,):
            raise self._failure(Code.DEADLINE, "the standby was not promoted")

    def close(self) -> None:
        """End the server if it runs and remove the cluster. The object is of no use afterwards."""
        if self._process is not None:
            self.kill()
        assert self._cleaner.stdin is not None
        self._cleaner.stdin.close()
        self._cleaner.wait()
        self._port_guard.close()

    def _create_cluster(self, initdb: Path) -> None:
        if self._account is not None:
            os.chown(self.directory, self._account.pw_uid, self._account.pw_gid)
        data = self.directory / "data"
        options = ["-A", "trust", "-U", "postgres", "-E", "UTF8", "--locale=C", "--no-sync"]
        self._run_to_end([str(initdb), *options, "-D", str(data)])
        self._configure()

    def _configure(self) -> None:
        with (self.directory / "data" / "postgresql.conf").open("a", encoding="utf-8") as settings:
            settings.write(_SETTINGS)
            settings.write(f"port = {self.port}\nunix_socket_directories = '{self.directory}'\n")

    def _run_to_end(self, command: list[str]) -> None:
        self._process = self._spawn(command)
        status = self._process.wait()
        self._forget_process()
        if status != 0:
            raise self._failure(Code.INTERNAL, f"{Path(command[0]).name} ended with status {status}")

    def _spawn(self, command: list[str]) -> subprocess.Popen[bytes]:
        with self.log_path.open("ab") as log:
            process = subprocess.Popen(
                [*_as_account(self._account), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.directory,
                start_new_session=True,
            )
        self._notify_cleaner(str(process.pid))
        return process

    def _forget_process(self) -> None:
        self._process = None
        self._notify_cleaner("")

    def _notify_cleaner(self, process_id: str) -> None:
        assert self._cleaner.stdin is not None
        self._cleaner.stdin.write(f"{process_id}\n".encode())
        self._cleaner.stdin.flush()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise StrataError(Code.PRECONDITION, "the PostgreSQL server is not running", hint="call start() first")
        return self._process

    def _accepts(self) -> bool:
        try:
            psycopg.connect(self.server_url, connect_timeout=10).close()
        except psycopg.OperationalError:
            return False
        return True

    def _failure(self, code: Code, message: str) -> StrataError:
        log = self.log_path.read_text(encoding="utf-8", errors="replace")
        return StrataError(code, f"{message}; the end of its log:\n{log[-2000:]}")


def find_programs(search_path: str | None = None, packaged: Path = Path("/usr/lib/postgresql")) -> Path:
    """The folder with `initdb` and `postgres`: that of the `initdb` on the path, else the newest packaged version."""
    on_path = shutil.which("initdb", path=search_path)
    folders = [] if on_path is None else [Path(on_path).resolve().parent]
    folders += sorted(packaged.glob("*/bin"), key=lambda folder: _version(folder.parent.name), reverse=True)
    for folder in folders:
        if (folder / "initdb").exists() and (folder / "postgres").exists():
            return folder
    raise StrataError(
        Code.UNSUPPORTED,
        "no PostgreSQL server programs (initdb, postgres) on PATH or in /usr/lib/postgresql/*/bin",
        hint="apt-get install postgresql",
    )


def _account() -> pwd.struct_passwd | None:
    """Whom to run as: ourselves (None), or `postgres` when we are root, as whom PostgreSQL refuses to run."""
    if os.geteuid() != 0:
        return None
    try:
        return pwd.getpwnam("postgres")
    except KeyError:
        raise StrataError(
            Code.UNSUPPORTED,
            "PostgreSQL does not run as root and there is no account `postgres` to run it as",
            hint="apt-get install postgresql",
        ) from None


def _as_account(account: pwd.struct_passwd | None) -> list[str]:
    """Not by options of Popen: with these it forks, and gRPC in this process would crash in the child."""
    if account is None:
        return []
    return ["setpriv", f"--reuid={account.pw_uid}", f"--regid={account.pw_gid}", "--init-groups"]


def _wait_for_exit(handle: int) -> None:
    # A handle becomes readable when the process has given back its memory, files and sockets, reaped or not.
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    poll.poll()


def _children_of(parent: int) -> list[int]:
    children = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name in the second field may hold spaces and brackets; what follows its last bracket does not.
            fields = status.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == parent:
            children.append(int(status.parent.name))
    return children


def _name(database: str) -> str:
    return urlsplit(database).path.removeprefix("/") if "://" in database else database


def _version(name: str) -> tuple[int, ...]:
    return tuple(int(part) for part in name.split(".") if part.isdigit())
