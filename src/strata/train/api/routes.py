"""The table of all routes of the API server, its limits of JSON bodies (16 MiB), its OpenAPI document, and the
application that serves them.

What a training loop requests all the time stands first, because the router tries the routes in this order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from strata.base.errors import Code
from strata.base.unix_socket import format_unix_address
from strata.http.app import BrowserPages, Serving, build_app
from strata.http.authentication import RequestAuthenticator
from strata.http.body import path_first
from strata.http.errors import ErrorTable
from strata.http.openapi import BINARY, DocumentSpec, with_document
from strata.http.reading import BudgetRules, ReadingRules
from strata.http.root import RootApp, RootLimits
from strata.http.route import KIB, MIB, VIEWER, Access, Route
from strata.train.api import (
    account,
    archive,
    completions,
    futures,
    keys,
    refused,
    rollout_sessions,
    sampling,
    service,
    sessions,
    tokenizer_files,
    training,
    weights,
)
from strata.train.api.context import ApiCall, ApiContext
from strata.train.api.front import identify_behind_front
from strata.train.checkpoints.archive import MEDIA_TYPE
from strata.train.wire import native, tinker
from strata.train.wire.sdk_fields import SdkDecoder

DOCUMENT_PATH: Final = "/openapi.json"
KEY_HEADER: Final = "X-API-Key"
MAX_JSON: Final = 16 * MIB
"""Bytes of a body in JSON, decompressed."""
ERRORS: Final = ErrorTable(
    # Clients of this protocol retry 408, 409, 429 and everything from 500 on by themselves. A failure that would
    # repeat gets another status where that is possible, and `x-should-retry: false` where it is not.
    instead={Code.CONFLICT: 422, Code.PRECONDITION: 422},
    final=frozenset({Code.CONFLICT, Code.PRECONDITION, Code.UNSUPPORTED, Code.CORRUPT}),
)


def _security(access: Access) -> Sequence[str]:
    return () if access.public else ("key", "bearer")


def _operation_id(route: Route) -> str:
    """Names the operation with its path: some handlers serve several."""
    return f"{route.name}.{route.path.strip('/').replace('/', '.')}"


DOCUMENT: Final = DocumentSpec(
    title="Strata training server",
    security_schemes={
        "key": {"type": "apiKey", "in": "header", "name": KEY_HEADER},
        "bearer": {"type": "http", "scheme": "bearer"},
    },
    security=_security,
    raw_body={tinker.MEDIA_TYPE: BINARY, native.MEDIA_TYPE: BINARY, "application/json": {}},
    raw_reply={
        f"{module}.{name}": completions.STREAM
        for module in ("completions", "rollout_sessions")
        for name in ("chat_completions", "completions")
    },
    operation_id=_operation_id,
)
ROUTES: Final = with_document(
    (
        *futures.ROUTES,
        *training.ROUTES,
        *sampling.ROUTES,
        *completions.ROUTES,
        *rollout_sessions.ROUTES,
        *sessions.ROUTES,
        *service.ROUTES,
        *archive.ROUTES,
        *weights.ROUTES,
        *account.ROUTES,
        *refused.ROUTES,
        *tokenizer_files.ROUTES,
        *keys.ROUTES,
    ),
    DOCUMENT_PATH,
    VIEWER,
    DOCUMENT,
    limit=KIB,
)


def reading_rules(context: ApiContext) -> ReadingRules:
    binary = frozenset({tinker.MEDIA_TYPE, native.MEDIA_TYPE, MEDIA_TYPE})
    return ReadingRules(
        pace=context.pace,
        strict=False,
        max_body=context.settings.server.max_body_bytes,
        budget=BudgetRules(budget=context.bodies, owner=context.tenant, max_json=MAX_JSON, binary=binary),
        reword=path_first,
        decoder=SdkDecoder,
    )


def application(context: ApiContext, routes: Sequence[Route] = ROUTES, *, pages: BrowserPages | None = None) -> RootApp:
    """`pages` is the dashboard: its routes come after those of the API."""
    if pages is not None:
        routes = (*routes, *pages.routes)
    authenticator = RequestAuthenticator(
        routes,
        context.authenticator,
        address=format_unix_address(context.settings.api_socket),
        key_header=KEY_HEADER,
        session_cookie="" if pages is None else pages.session_cookie,
    )
    serving = Serving(
        context=context,
        server="server",
        document_path=DOCUMENT_PATH,
        rules=reading_rules(context),
        errors=replace(ERRORS, page=None if pages is None else pages.error_page),
        # A result is one piece and may be large: a client that requests the next one without reading it is not waited
        # for.
        limits=RootLimits(time_every_send=True, failures=context.failures),
        call_type=ApiCall,
        on_reply=context.metrics.requests.count,
    )
    identify = identify_behind_front(authenticator.identify, context.settings.server.front_key)
    return build_app(routes, serving, identify)
