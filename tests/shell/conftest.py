"""Servers and programs that only tests of shells need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.programs import require_programs
from tests.support.s3 import S3Server


def pytest_collection_finish(session: pytest.Session) -> None:
    require_programs(session.items)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """One for each process that runs tests, started when the first test asks for it. Each test takes its own bucket."""
    with S3Server() as server:
        yield server
