"""Servers for the tests. A test that asks for one gets a real one; if there is none, that is an error, never a skip.

One PostgreSQL cluster serves a whole run, started when the first test asks for it. Under pytest-xdist the controller
owns it, since a worker may finish before the others do, and the workers ask the controller for its URL.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import settings

from strata.base.errors import StrataError
from strata.testing.postgres import PostgresDatabases, PostgresServer

# Tests start processes while gRPC has threads here: its handlers of fork() can end the child before it is a program.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # noqa: TID251

# A machine that is busy with other things is no finding; what hangs, pytest-timeout ends.
settings.register_profile("strata", deadline=None)
settings.load_profile("strata")

END_TO_END: Final = Path(__file__).with_name("e2e")
SLOW_LIMIT_S: Final = 120
"""A test that may take longer than this is slow, and so are those from end to end. The default is longer: it ends what
hangs, also on a machine that is busy with other things."""
_until_s: Final = float(os.environ.get("STRATA_TEST_UNTIL", "inf"))  # noqa: TID251
"""In seconds since the epoch: no test is begun after this. `.ci/run` sets it for the slow ones."""
_OFFER: Final = "strata_postgres_offer_port"
_FAILED: Final = "failed: "


class PostgresOffer:
    """Answers each connection on a loopback port with the URL of the one server, which the first one starts."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._server: PostgresServer | None = None
        self._thread = threading.Thread(target=self._serve, name="postgres-offer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        # Shutting a listener down wakes the thread that waits in accept; closing it alone would not.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        if self._server is not None:
            self._server.close()

    def _serve(self) -> None:
        while True:
            try:
                worker, _ = self._listener.accept()
            except OSError:
                return
            with worker:
                worker.sendall(self._answer().encode())

    def _answer(self) -> str:
        try:
            if self._server is None:
                self._server = PostgresServer().__enter__()
        except StrataError as error:
            return f"{_FAILED}{error}"
        return self._server.server_url


_offer_key: Final = pytest.StashKey[PostgresOffer]()


def pytest_configure() -> None:
    # A run that a shell put into the background ignores SIGINT, and so would every process that a test interrupts.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


# First: what is marked here is what `-m` looks at.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _limit_s(item) > SLOW_LIMIT_S or item.path.is_relative_to(END_TO_END):
            item.add_marker(pytest.mark.slow)
    _start_long_files_first(items)


def pytest_collection_finish(session: pytest.Session) -> None:
    # What ends a worker of xdist is shown nowhere: there the controller looks.
    if not hasattr(session.config, "workerinput"):
        _refuse_same_ids([item.nodeid for item in session.items])


def _limit_s(item: pytest.Item) -> int:
    mark = item.get_closest_marker("timeout")
    return int(mark.args[0]) if mark is not None and mark.args else 0


def _start_long_files_first(items: list[pytest.Item]) -> None:
    """With `--dist loadfile --no-loadscope-reorder` the other workers then have files left while a long one runs. How
    long a test may take is the best guess of how long it does. What users do comes first, should time run out."""
    longest_s: Counter[Path] = Counter()
    tests = Counter(item.path for item in items)
    for item in items:
        longest_s[item.path] = max(longest_s[item.path], _limit_s(item))
    items.sort(key=lambda item: (not item.path.is_relative_to(END_TO_END), -longest_s[item.path], -tests[item.path]))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    # Servers make what they write private, also one that an earlier test ran in this process.
    os.umask(0o022)
    if time.time() > _until_s:
        pytest.skip(f"NOT RUN, no time is left: {item.path.name}")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(ids: Sequence[str]) -> None:
    _refuse_same_ids(ids)


def _refuse_same_ids(ids: Sequence[str]) -> None:
    """Of the tests with one id pytest-xdist runs one and leaves the others out without a word."""
    twice = [f"{node_id} ({count} tests)" for node_id, count in Counter(ids).items() if count > 1]
    if twice:
        raise pytest.UsageError(f"several tests have the same id: {', '.join(twice)}")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """In the xdist controller, before each worker starts; `node` is its handle of the worker, which has no types."""
    config: pytest.Config = node.config
    if _offer_key not in config.stash:
        config.stash[_offer_key] = PostgresOffer()
    node.workerinput[_OFFER] = config.stash[_offer_key].port


def pytest_unconfigure(config: pytest.Config) -> None:
    if _offer_key in config.stash:
        config.stash[_offer_key].close()


def _offered_url(port: int) -> str:
    with socket.create_connection(("127.0.0.1", port)) as controller, controller.makefile(encoding="utf-8") as answer:
        url = answer.read()
    if not url or url.startswith(_FAILED):
        pytest.fail(f"no PostgreSQL server for this run: {url or 'the controller is gone'}", pytrace=False)
    return url


@pytest.fixture(scope="session")
def postgres_server(request: pytest.FixtureRequest) -> Iterator[PostgresDatabases]:
    """The databases of the run's server, which must stay up: a test that hurts it takes `own_postgres_server`."""
    # The tests have no settings file; this one variable lets `make services` and a site's own server stand in.
    given_url = os.environ.get("STRATA_TEST_POSTGRES")  # noqa: TID251
    worker: dict[str, Any] | None = getattr(request.config, "workerinput", None)
    if given_url:
        yield PostgresDatabases(given_url)
    elif worker is not None:
        yield PostgresDatabases(_offered_url(worker[_OFFER]))
    else:
        with PostgresServer() as server:
            yield PostgresDatabases(server.server_url)


@pytest.fixture
def postgres_url(postgres_server: PostgresDatabases) -> Iterator[str]:
    """The URL of an empty database for this test alone."""
    url = postgres_server.create_database()
    yield url
    postgres_server.drop_database(url)


@pytest.fixture
def own_postgres_server() -> Iterator[PostgresServer]:
    """A running cluster for this test alone, to kill, stop and start; about a second."""
    with PostgresServer() as server:
        yield server
