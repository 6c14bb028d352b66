"""The rule that each route which changes something declares: whose thing it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from strata.http.app import Router
from strata.http.root import RootApp
from strata.http.route import OWNED, Route
from strata.identity.roles import Role

FREE = "none: "


def changing(routes: Iterable[Route]) -> list[Route]:
    """What people change who are no operators, and what anybody at all does."""
    return [route for route in routes if route.method not in ("GET", "HEAD") and _is_for_people(route)]


def _is_for_people(route: Route) -> bool:
    role = route.access.role
    return route.access.public or (role is not None and role < Role.OPERATOR)


def served_routes(app: RootApp) -> list[Route]:
    """What an application tries, wherever its routes were declared."""
    router = app._app
    assert isinstance(router, Router)
    return [served._route for _, _, methods in router._paths for served in methods.values()]


def free(routes: Iterable[Route]) -> set[str]:
    """The routes of what belongs to nobody."""
    return {named(route) for route in changing(routes) if route.owner.startswith(FREE)}


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
