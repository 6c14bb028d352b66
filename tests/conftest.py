"""Servers for the tests. A test that asks for one gets a real one; if there is none, that is an error, never a skip.

One PostgreSQL cluster serves a whole run: `python -m tests.tiers` starts it for all of its processes, and a pytest that
is started by hand has one of its own.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.support.postgres import PostgresDatabases, PostgresServer

# Tests start processes while gRPC has threads here: its handlers of fork() can end the child before it is a program.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # noqa: TID251

# A machine that is busy with other things is no finding; what hangs, pytest-timeout ends.
settings.register_profile("strata", deadline=None)
settings.load_profile("strata")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--against", metavar="REV", help="the older commit of the upgrade tests, in place of the release")


def pytest_configure() -> None:
    # A run that a shell put into the background ignores SIGINT, and so would every process that a test interrupts.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    # Servers make what they write private, also one that an earlier test ran in this process.
    os.umask(0o022)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresDatabases]:
    """The databases of the run's server, which must stay up: a test that hurts it takes `own_postgres_server`."""
    # The tests have no settings file; this variable lets the pool, `make services` and a site's own server stand in.
    given_url = os.environ.get("STRATA_TEST_POSTGRES")  # noqa: TID251
    if given_url:
        yield PostgresDatabases(given_url)
        return
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
