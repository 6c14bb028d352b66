"""The rule that each route which changes something declares: whose thing it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from strata.http.route import OWNED, Route
from strata.identity.roles import Role

FREE = "none: "


def changing(routes: Iterable[Route]) -> list[Route]:
    """What people change who are no operators."""
    return [
        route
        for route in routes
        if route.method not in ("GET", "HEAD") and route.access.role is not None and route.access.role < Role.OPERATOR
    ]


def named(route: Route) -> str:
    return f"{route.method} {route.path}"


def check_rules(routes: Iterable[Route], tries: Callable[[int], None]) -> None:
    for route in routes:
        tries(1)
        if changing([route]):
            reason = route.owner.removeprefix(FREE)
            assert route.owner in OWNED or (route.owner != reason and len(reason) > 10), named(route)
        else:
            assert not route.owner, f"{named(route)} is for {route.access}: nobody below an operator may change with it"
