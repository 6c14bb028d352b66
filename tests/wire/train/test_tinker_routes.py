"""Every route that the installed `tinker` SDK can call is served, or refused with a reason that one table holds.

The routes are read from the source of the SDK: every string that begins with `/api/` must be the path of a call.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
import tinker
from tinker import types
from tinker.types.optimizer import OptimizerConfigBase, OptimParamsBase

from strata.base.errors import StrataError
from strata.train.api.refused import REFUSED
from strata.train.api.routes import ROUTES
from strata.train.core import model_options, ops
from strata.train.wire import bodies
from strata.train.wire.pass_request import OperationKey, validate_pass

SDK: Final = Path(tinker.__file__).parent
METHODS: Final = {"get": "GET", "post": "POST", "put": "PUT", "delete": "DELETE", "patch": "PATCH"}
KNOWN: Final = 40
"""How many the version 0.36.0 has: fewer would mean that they are not found any more."""


def sources() -> Iterator[ast.Module]:
    for path in sorted(SDK.rglob("*.py")):
        if not path.name.endswith("_test.py"):
            yield ast.parse(path.read_text(encoding="utf-8"), str(path))


def path_of(node: ast.AST) -> str | None:
    """The path that a literal or an f-string has, with `{}` for what is filled in; None if it is no path of the API."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        text = node.value
    elif isinstance(node, ast.JoinedStr):
        text = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    else:
        return None
    return text if text.startswith("/api/") else None


def called(node: ast.Call) -> tuple[str, str] | None:
    """Method and path of a call of the SDK's HTTP client: `client.get(PATH, …)`, or `self._request("GET", PATH, …)`."""
    if not isinstance(node.func, ast.Attribute) or not node.args:
        return None
    name = node.func.attr.lstrip("_")
    first = path_of(node.args[0])
    if first is not None and name in METHODS:
        return METHODS[name], first
    if name == "request" and len(node.args) > 1 and isinstance(node.args[0], ast.Constant):
        second = path_of(node.args[1])
        return None if second is None else (str(node.args[0].value), second)
    return None


def routes_of_the_sdk() -> set[tuple[str, str]]:
    calls = (called(node) for tree in sources() for node in ast.walk(tree) if isinstance(node, ast.Call))
    return {call for call in calls if call is not None}


def shape(path: str) -> str:
    return re.sub(r"\{[^}]*\}", "{}", path)


def test_every_path_in_the_source_of_the_sdk_is_that_of_a_call() -> None:
    written = {path for tree in sources() for node in ast.walk(tree) if (path := path_of(node)) is not None}
    # An f-string's pieces are literals of their own in the tree.
    whole = {path for path in written if not any(path != other and other.startswith(path) for other in written)}
    assert whole <= {path for _, path in routes_of_the_sdk()}
    assert len(routes_of_the_sdk()) >= KNOWN


def test_every_route_of_the_sdk_is_served_or_refused_with_a_reason() -> None:
    ours = {(route.method, shape(route.path)) for route in ROUTES}
    assert sorted(routes_of_the_sdk() - ours) == []


def test_every_refusal_is_of_a_route_that_the_sdk_calls_and_says_why() -> None:
    called = routes_of_the_sdk()
    for refused in REFUSED:
        assert (refused.method, shape(refused.path)) in called
        assert refused.reason
        assert refused.hint
        (route,) = [each for each in ROUTES if (each.method, each.path) == (refused.method, refused.path)]
        assert refused.reason in route.summary


def test_a_loss_and_an_optimizer_without_a_published_formula_are_refused_with_that_reason() -> None:
    with pytest.raises(StrataError, match="not published"):
        validate_pass(OperationKey("m", 1), "stable_reinforce", {}, [], forward_only=False)
    request = types.CreateModelRequest(
        session_id="s", model_seq_id=0, base_model="tiny", optimizer_config=types.DimuonOptimizerConfig()
    )
    body = msgspec.json.decode(request.model_dump_json(exclude_none=True), type=bodies.CreateModelBody)
    with pytest.raises(StrataError, match="not published"):
        body.operation()


def test_the_sdk_can_name_muon_as_it_can_any_optimizer() -> None:
    config: Any = OptimizerConfigBase(type="muon")
    request = types.CreateModelRequest(session_id="s", model_seq_id=0, base_model="tiny", optimizer_config=config)
    created = msgspec.json.decode(request.model_dump_json(exclude_none=True), type=bodies.CreateModelBody)
    assert created.operation().optimizer == "muon"
    params: Any = OptimParamsBase(type="muon", learning_rate=0.02, momentum=0.9, nesterov=False)  # type: ignore[call-arg]
    step = types.OptimStepRequest(optim_params=params, model_id="m", seq_id=3)
    body = msgspec.json.decode(step.model_dump_json(exclude_none=True), type=bodies.OptimStepBody)
    assert body.operation() == ops.OptimStep("m", 3, None, model_options.MuonParams(0.02, momentum=0.9, nesterov=False))
