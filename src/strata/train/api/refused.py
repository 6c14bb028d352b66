"""The routes of the `tinker` SDK that this server refuses with 501, each with its reason and hint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from strata.base.errors import Code, StrataError
from strata.http.route import KIB, VIEWER, Handler, Method, Route
from strata.train.api.context import ApiCall


@dataclass(frozen=True)
class RefusedRoute:
    method: Method
    path: str
    name: str
    """The name of the route in the OpenAPI document."""
    reason: str
    hint: str


REFUSED: Final = (
    RefusedRoute(
        "POST",
        "/api/v1/auth/token",
        "refused.exchange_token",
        "this server issues no JWTs",
        "send the API key itself with every request",
    ),
    RefusedRoute(
        "GET",
        "/api/v1/audit",
        "refused.audit_log",
        "this server keeps no log of who read which checkpoint",
        "an operator finds the requests in the server's log, and keys in `strata keys list`",
    ),
)


def _refuse(refused: RefusedRoute) -> Handler:
    async def refuse(call: ApiCall) -> None:
        del call
        raise StrataError(Code.UNSUPPORTED, refused.reason, hint=refused.hint)

    refuse.__doc__ = f"Refused with 501: {refused.reason}."
    return refuse


ROUTES = tuple(
    Route(
        each.method,
        each.path,
        VIEWER,
        _refuse(each),
        KIB,
        owner="" if each.method == "GET" else "none: it is refused",
        operation=each.name,
    )
    for each in REFUSED
)
