"""What the suite of whole processes needs of its machine."""

from __future__ import annotations

import pytest

from tests.programs import require_programs


def pytest_collection_finish(session: pytest.Session) -> None:
    require_programs(session.items)
