"""Schemathesis against a real server, one test per route: what a document allows, or does not, is answered as it says.

Each route is a function of its own. All items that schemathesis makes of one function have one id under pytest 9.2, and
pytest-xdist runs one test per id: of sixty routes it ran one, and said nothing.

The examples of a run fit into CI; `STRATA_EXAMPLES` asks for more, as the soak does.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any, Final

import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS: Final = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
)
EXAMPLES: Final = settings(
    max_examples=int(os.environ.get("STRATA_EXAMPLES", "4")),  # noqa: TID251 - the soak asks for more
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
    database=None,
)


def one_test_per_route(document: dict[str, Any], body: Callable[..., None]) -> dict[str, Callable[..., None]]:
    """For the globals of a file of tests: by its name, a test that calls `body` with the cases of one route."""
    whole = schemathesis.openapi.from_dict(document)
    read = list(whole.get_all_operations())
    operations = [each.ok() for each in read if isinstance(each, Ok)]
    assert len(operations) == len(read), "the document is not valid"
    return {
        f"test_{body.__name__}[{each.label}]": whole.include(method=each.method, path=each.path).parametrize()(
            EXAMPLES(_copy(body))
        )
        for each in operations
    }


def _copy(body: Callable[..., None]) -> Callable[..., None]:
    """Hypothesis and schemathesis write what they know of a test into the function."""

    @functools.wraps(body)
    def call(*args: Any, **fixtures: Any) -> None:
        body(*args, **fixtures)

    return call


def check(case: Any, url: str, headers: Mapping[str, str]) -> None:
    case.headers = {**(case.headers or {}), **headers}
    case.call_and_validate(base_url=url, checks=CHECKS, timeout=60)
