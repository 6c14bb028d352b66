from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.shell.fleet_agent.running import HubProcess


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    """One for all tests of a file; each test has hosts of its own and jobs for those alone."""
    made = HubProcess(tmp_path_factory.mktemp("hub"))
    yield made
    made.close()


@pytest.fixture
def own_hub(tmp_path: Path) -> Iterator[HubProcess]:
    """One to kill."""
    made = HubProcess(tmp_path)
    yield made
    made.close()
