"""Schemathesis against a real server: whatever the document allows, or does not, is answered as the document says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import schemathesis

from strata.http.openapi import build_document
from strata.train.api.refused import REFUSED
from strata.train.api.routes import DOCUMENT, ROUTES
from strata.train.wire import native, tinker
from tests.shell.train_api.processes import serving
from tests.support import openapi
from tests.support.unix import forwarded


@schemathesis.serializer(tinker.MEDIA_TYPE, native.MEDIA_TYPE)
def as_it_is(_: Any, value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Where an operator reaches it, and the operator token."""
    folder = Path(tmp_path_factory.mktemp("t"))
    with serving(folder, Path("pretended"), server="poll_s = 0.05\n", pretended=True) as found:
        with forwarded(found.data / "run" / "api") as url:
            yield url, (found.data / "operator.token").read_text().strip()
        said = "".join(log.read_text() for log in sorted(found.logs.iterdir()))
        assert "request_crashed" not in said
        assert "Traceback" not in said


REASONS: Final = {(each.method, each.path): each.reason for each in REFUSED}


def the_server_answers_as_its_document_says(case: Any, server: tuple[str, str]) -> None:
    url, token = server
    refused = REASONS.get((case.method, case.path))
    if refused is not None:
        case.headers = {"X-Operator-Token": token}
        reply = case.call(base_url=url, timeout=60)
        assert (reply.status_code, reply.json()["error"]["message"]) == (501, refused)
        return
    openapi.check(case, url, {"X-Operator-Token": token})


globals().update(openapi.one_test_per_route(build_document(ROUTES, DOCUMENT), the_server_answers_as_its_document_says))
