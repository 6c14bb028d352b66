"""One suite, two groups of ranks: those that pretend, which tests of the orchestrator rest on, and the real ones."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.conformance.train_ranks.groups import Group, Speaker


@pytest.fixture(scope="module", params=["pretending", "real"])
def group(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    """Started once for the module: real ranks take seconds to start, and a server's ranks live long too."""
    made = Group(request.param, tmp_path_factory.mktemp("r"))
    try:
        yield made
    finally:
        if made.process.poll() is None:
            made.process.terminate()
            made.process.wait(60)


@pytest.fixture
async def speaker(group: Group) -> AsyncIterator[Speaker]:
    """Attached, as the newest generation."""
    made = Speaker(group)
    try:
        await made.attach()
        yield made
    finally:
        made.close()
