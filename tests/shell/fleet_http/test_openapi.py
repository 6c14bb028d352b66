"""Schemathesis against a real hub: whatever the document allows, or does not, is answered as the document says.

The examples of a run fit into CI; `STRATA_EXAMPLES` asks for more, as the soak does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
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

from strata.fleet import wire
from strata.fleet.http.openapi import document
from strata.fleet.http.table import TABLE
from tests.shell.fleet_http.running import ok, process

EXAMPLES: Final = int(os.environ.get("STRATA_EXAMPLES", "4"))  # noqa: TID251 - the soak asks for more
CHECKS: Final = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
)

schema = schemathesis.openapi.from_dict(document(TABLE))


OF_HOSTS: Final = {
    # Leaving would end the credentials that the other calls are made with.
    (endpoint.method, endpoint.path)
    for endpoint in TABLE
    if endpoint.need.host and endpoint.path != "/v1/host/leave"
}


@dataclass(frozen=True)
class Callers:
    url: str
    operator: dict[str, str]
    host: dict[str, str]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callers]:
    with process(Path(tmp_path_factory.mktemp("hub"))) as started, started.client() as operator:
        made = ok(operator.post("/v1/hosts/local", json={"name": "anna"}), wire.LocalHostReply)
        yield Callers(started.url, {"X-Operator-Token": started.token}, {"Authorization": f"Bearer {made.secret}"})
        status, said = started.end()
        assert status == 0
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
def test_the_hub_answers_as_its_document_says(case: Any, hub: Callers) -> None:
    for given in (case.query, case.body):
        if isinstance(given, dict):
            given.pop("wait_s", None)
    by_host = (case.method.upper(), case.operation.path) in OF_HOSTS
    case.headers = {**(case.headers or {}), **(hub.host if by_host else hub.operator)}
    case.call_and_validate(base_url=hub.url, checks=CHECKS, timeout=20)
