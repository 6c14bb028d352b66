"""Schemathesis against a real hub: whatever the document allows, or does not, is answered as the document says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from strata.fleet.wire.identities import LocalHostReply
from strata.http.openapi import build_document
from strata.hub.routes import DOCUMENT, ROUTES
from strata.hub.settings import SOCKET
from tests.shell.fleet_http.running import ok, process
from tests.support import openapi
from tests.support.unix import forwarded

OF_HOSTS: Final = {
    # Leaving would end the credentials that the other calls are made with.
    (route.method, route.path)
    for route in ROUTES
    if route.access.host and route.path != "/v1/host/leave"
}


@dataclass(frozen=True)
class Callers:
    url: str
    operator: dict[str, str]
    host: dict[str, str]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callers]:
    with process(Path(tmp_path_factory.mktemp("hub"))) as started, started.client() as operator:
        made = ok(operator.post("/v1/hosts/local", json={"name": "anna"}), LocalHostReply)
        with forwarded(started.data / SOCKET) as url:
            yield Callers(url, {"X-Operator-Token": started.token}, {"Authorization": f"Bearer {made.secret}"})
        status, said = started.end()
        assert status == 0
        assert "request_crashed" not in said
        assert "Traceback" not in said


def the_hub_answers_as_its_document_says(case: Any, hub: Callers) -> None:
    for given in (case.query, case.body):
        if isinstance(given, dict):
            given.pop("wait_s", None)
    by_host = (case.method.upper(), case.operation.path) in OF_HOSTS
    openapi.check(case, hub.url, hub.host if by_host else hub.operator)


globals().update(openapi.one_test_per_route(build_document(ROUTES, DOCUMENT), the_hub_answers_as_its_document_says))
