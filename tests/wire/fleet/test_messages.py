"""Every message is frozen and closed, every route is declared, and the document says what is served."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.base.errors import Code, StrataError
from strata.fleet import wire
from strata.fleet.wire.base import HubReply
from strata.fleet.wire.overview import HubHealth
from strata.http.app import Router, Serving
from strata.http.body import MAX_DEPTH, check_depth
from strata.http.errors import PLAIN, STATUS_OF, HttpRefusal
from strata.http.openapi import build_document, messages_of
from strata.http.problem import ErrorReply
from strata.http.reading import QueryReader, ReadingRules, decode_body
from strata.http.route import Access, Route, Upload
from strata.hub.routes import DOCUMENT, ROUTES

MESSAGES = [
    each
    for module in (import_module(f"{wire.__name__}.{info.name}") for info in iter_modules(wire.__path__))
    for _, each in inspect.getmembers(module, inspect.isclass)
    if issubclass(each, msgspec.Struct) and each.__module__ == module.__name__
]
READ = [
    part for route in ROUTES for part in (route.signature().body, route.signature().query) if part not in (None, Upload)
]

REQUIRED = {
    ("POST", "/v1/job/claim"),
    ("POST", "/v1/job/{id}/heartbeat"),
    ("POST", "/v1/job/{id}/complete"),
    ("POST", "/v1/job/{id}/fail"),
    ("PUT", "/v1/model/{id}"),
    ("GET", "/v1/jobs"),
    ("GET", "/v1/workers"),
    ("POST", "/v1/job/{id}/cancel"),
    ("POST", "/v1/job/{id}/requeue"),
    ("POST", "/v1/manifest/reload"),
    ("GET", "/v1/health"),
}


@contextmanager
def allowing_refusal() -> Iterator[None]:
    """It may be INVALID; anything else that is raised goes on."""
    try:
        yield
    except StrataError as error:
        if error.code is not Code.INVALID:
            raise


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.__name__)
def test_a_message_is_frozen_and_only_a_reply_may_say_more_than_is_known(message: type[msgspec.Struct]) -> None:
    assert message.__struct_config__.frozen
    assert message.__struct_config__.forbid_unknown_fields is not issubclass(message, HubReply)


def test_a_reply_of_a_newer_hub_is_read() -> None:
    body = b'{"status": "ok", "version": "9.9", "moon": {"phase": 1}}'
    assert msgspec.json.decode(body, type=HubHealth).version == "9.9"


@pytest.mark.parametrize("message", READ, ids=lambda message: message.__name__)
def test_what_is_read_from_a_client_takes_no_unknown_field(message: Any) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b'{"surely_not_a_field": 1}', type=message)


def test_the_eleven_endpoints_of_the_interface_are_there() -> None:
    assert {(route.method, route.path) for route in ROUTES} >= REQUIRED


def test_only_four_endpoints_are_for_anybody() -> None:
    public = {route.path for route in ROUTES if route.access.public}
    assert public == {"/v1/health", "/v1/join", "/v1/ca", "/api/v1/archive"}


def test_an_endpoint_is_declared_once_and_every_one_has_a_summary() -> None:
    declared = [(route.method, route.path) for route in ROUTES]
    assert len(set(declared)) == len(declared)
    names = [route.name for route in ROUTES]
    assert len(set(names)) == len(names)
    assert all(route.summary for route in ROUTES)
    with pytest.raises(StrataError):
        Router([*ROUTES, ROUTES[0]], Serving(context=None, server="hub", document_path="/", rules=ReadingRules()))


def test_an_endpoint_without_who_may_call_it_cannot_be_written() -> None:
    with pytest.raises(TypeError):
        Route("GET", "/v1/x", handler=test_only_four_endpoints_are_for_anybody)  # type: ignore[call-arg,arg-type]
    everybody = [need for route in ROUTES if (need := route.access) == Access()]
    assert everybody == []


def test_an_endpoint_whose_reply_is_no_message_is_refused() -> None:
    async def wrong(call: Any) -> dict[str, Any]:
        return {}

    with pytest.raises(StrataError):
        Route("GET", "/v1/x", Access(public=True), wrong).signature()


def test_every_path_parameter_is_used_and_no_path_hides_another() -> None:
    seen: list[str] = []
    for path in dict.fromkeys(route.path for route in ROUTES):
        filled = re.sub(r"\{\w+\}", "x", path)
        for earlier in seen:
            pattern = re.sub(r"\{\w+\}", "[^/]+", re.escape(earlier).replace(r"\{", "{").replace(r"\}", "}"))
            assert not re.fullmatch(pattern, filled), f"{earlier} hides {path}"
        seen.append(path)


def test_the_document_has_every_endpoint_and_every_reference_is_there() -> None:
    made = build_document(ROUTES, DOCUMENT)
    listed = {(method.upper(), path) for path, methods in made["paths"].items() for method in methods}
    assert listed == {(route.method, route.path.replace(":path}", "}")) for route in ROUTES}
    text = json.dumps(made)
    references = set(re.findall(r'"#/components/schemas/([^"]+)"', text))
    assert references <= made["components"]["schemas"].keys()
    assert "\\\\A" not in text
    open_to_all = {
        (method.upper(), path)
        for path, methods in made["paths"].items()
        for method, operation in methods.items()
        if not operation["security"]
    }
    assert open_to_all == {(each.method, each.path) for each in ROUTES if each.access.public}


def test_every_code_has_a_status_and_a_body_of_the_one_form() -> None:
    for code in Code:
        reply = PLAIN.render(StrataError(code, "it is so", hint="do that", epoch=3, what={"a": object}))
        assert reply.status_code == STATUS_OF[code]
        problem = msgspec.json.decode(bytes(reply.body), type=ErrorReply).error
        assert (problem.code, problem.message, problem.hint, problem.detail["epoch"]) == (
            code,
            "it is so",
            "do that",
            3,
        )
    assert PLAIN.render(HttpRefusal(413, Code.INVALID, "large")).status_code == 413


@pytest.mark.parametrize("message", dict.fromkeys(READ), ids=lambda message: message.__name__)
@given(raw=st.binary(max_size=200))
def test_no_bytes_do_more_to_a_decoder_than_be_refused(message: Any, raw: bytes) -> None:
    with allowing_refusal():
        decode_body(msgspec.json.Decoder(message), raw, ReadingRules())


@given(
    value=st.recursive(
        st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('[]{}"\\', max_size=4), inner, max_size=3),
        max_leaves=60,
    )
)
def test_the_depth_of_a_body_is_counted_right(value: Any) -> None:
    def depth(here: Any) -> int:
        if isinstance(here, dict):
            return 1 + max(map(depth, here.values()), default=0)
        return 1 + max(map(depth, here), default=0) if isinstance(here, list) else 0

    wrapped = value
    for _ in range(MAX_DEPTH - depth(value)):
        wrapped = [wrapped, []] if depth(wrapped) else [wrapped]
    check_depth(json.dumps(wrapped).encode())
    with pytest.raises(StrataError):
        check_depth(json.dumps([wrapped]).encode())


@given(raw=st.binary(max_size=100) | st.text(max_size=100).map(lambda text: text.encode("utf-8", "replace")))
def test_no_query_does_more_than_be_refused(raw: bytes) -> None:
    for query in {part for route in ROUTES for part in messages_of(route.signature().query)}:
        with allowing_refusal():
            QueryReader(query, ReadingRules()).read(raw)
