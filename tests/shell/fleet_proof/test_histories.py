"""Concurrent histories of claims, renewals, ends, cancels, requeues and sweeps, on both databases and under faults."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.shell.fleet_proof.ablation import POSTGRES, SQLITE, removed
from tests.shell.fleet_proof.stores import postgres_history, sqlite_history
from tests.support.postgres import PostgresDatabases

SQLITE_SEEDS = 60
POSTGRES_SEEDS = 30
WITHIN = 200
"""Seeds within which a missing safeguard has to show."""


@pytest.fixture(scope="module")
def shared_url(postgres_server: PostgresDatabases) -> Iterator[str]:
    """One database for all histories of this file: making one takes longer than a history."""
    url = postgres_server.create_database()
    yield url
    postgres_server.drop_database(url)


async def test_one_order_explains_every_answer_of_a_sqlite_store() -> None:
    for seed in range(SQLITE_SEEDS):
        assert await sqlite_history(seed) is None


@pytest.mark.timeout(400)
async def test_one_order_explains_every_answer_of_a_postgres_store(
    postgres_server: PostgresDatabases, shared_url: str
) -> None:
    for seed in range(POSTGRES_SEEDS):
        assert await postgres_history(seed, postgres_server, shared_url) is None


@pytest.mark.parametrize("guard", SQLITE)
async def test_a_sqlite_store_without_this_safeguard_is_found_out(guard: str) -> None:
    with removed(SQLITE[guard]):
        for seed in range(WITHIN):
            if await sqlite_history(seed):
                return
    pytest.fail(f"not noticed in {WITHIN} histories")


@pytest.mark.timeout(400)
@pytest.mark.parametrize("guard", POSTGRES)
async def test_a_postgres_store_without_this_safeguard_is_found_out(
    guard: str, postgres_server: PostgresDatabases, shared_url: str
) -> None:
    with removed(POSTGRES[guard]):
        for seed in range(WITHIN):
            if await postgres_history(seed, postgres_server, shared_url):
                return
    pytest.fail(f"not noticed in {WITHIN} histories")
