"""One suite for every worker SDK: a test that asks for `sdk` runs with each, against a real `strata coordinator`."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import pytest
import pytest_asyncio

from strata.coord.pb import coordinator_pb2_grpc as pb_grpc
from tests.conformance.coordinator import drivers
from tests.conformance.coordinator.fleet import Fleet
from tests.shell.coord.running import CoordinatorProcess, connect
from tests.support.ports import port_of, reserve_port

SDKS: Final = ("python", "cpp")
PAIRS: Final = (("python", "python"), ("cpp", "cpp"), ("python", "cpp"))
SETTINGS: Final = {
    "STRATA_COORDINATOR_JOB_HEARTBEAT_INTERVAL_S": "1",
    "STRATA_COORDINATOR_JOB_PARAMETERS": '{ learning_rate = "0.1", name = "größer" }',
}

_jobs = itertools.count()


@pytest.fixture(scope="session")
def commands() -> Mapping[str, Sequence[str]]:
    """How each driver is started. Where the one in C++ cannot be built, its tests fail, never skip."""
    return drivers.DriverCommands(SDKS)


@pytest.fixture(params=SDKS)
def sdk(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(params=PAIRS, ids="+".join)
def pair(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Two workers of one job, in one language and in two."""
    names: tuple[str, str] = request.param
    return names


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def coordinator(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[CoordinatorProcess]:
    """One for all tests that leave it alone; each has a job of its own."""
    guard = reserve_port()
    database = f"sqlite:{tmp_path_factory.mktemp('coordinator') / 'coord.db'}"
    process = CoordinatorProcess(database, port_of(guard), SETTINGS)
    try:
        await process.start()
        await process.serving()
        yield process
    finally:
        await process.close()
        guard.close()


@pytest_asyncio.fixture(loop_scope="session")
async def fleet(
    coordinator: CoordinatorProcess, commands: Mapping[str, Sequence[str]], tmp_path: Path
) -> AsyncIterator[Fleet]:
    """Workers of one job on the shared coordinator."""
    async with connect(coordinator.address) as channel:
        stub: pb_grpc.CoordinatorAsyncStub = pb_grpc.CoordinatorStub(channel)
        found = Fleet(coordinator.address, f"job-{next(_jobs)}", tmp_path, stub, commands)
        try:
            yield found
        finally:
            await found.close()
