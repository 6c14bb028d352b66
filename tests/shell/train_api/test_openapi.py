"""Schemathesis against a real server: whatever the document allows, or does not, is answered as the document says.

The examples of a run fit into CI; `STRATA_EXAMPLES` asks for more, as the soak does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from strata.train.api import later
from strata.train.api.app import described_app
from strata.train.api.table import TABLE
from strata.train.wire import native, tinker
from tests.shell.train_api.processes import Processes, serving

EXAMPLES: Final = int(os.environ.get("STRATA_EXAMPLES", "4"))  # noqa: TID251 - the soak asks for more
CHECKS: Final = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
)
SERVED: Final = [each for each in TABLE if each not in later.ENDPOINTS]


@schemathesis.serializer(tinker.MEDIA_TYPE, native.MEDIA_TYPE)
def as_it_is(_: Any, value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


async def nobody() -> None:
    """Answers nothing: only the document is wanted."""


schema = schemathesis.openapi.from_dict(described_app(SERVED, lambda _: nobody).openapi())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    folder = Path(tmp_path_factory.mktemp("t"))
    with serving(folder, Path("pretended"), server="poll_s = 0.05\n", pretended=True) as found:
        yield found
        said = "".join(log.read_text() for log in sorted(found.logs.iterdir()))
        assert "met a defect" not in said
        assert "Traceback" not in said


@schema.parametrize()
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
    database=None,
)
def test_the_server_answers_as_its_document_says(case: Any, server: Processes) -> None:
    token = (server.data / "operator.token").read_text().strip()
    case.headers = {**(case.headers or {}), "X-Operator-Token": token}
    case.call_and_validate(base_url=server.url, checks=CHECKS, timeout=20)
