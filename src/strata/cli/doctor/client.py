"""The hub that the other commands speak to: reachable, of our time, and does it know us."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from strata.base.errors import Code, StrataError
from strata.cli.doctor.findings import DoctorFinding, check_clock_skew, ok, problem, warning

if TYPE_CHECKING:
    from strata.fleet.client import HubClient

SOON_S: Final = 7 * 86_400.0
SKEW_S: Final = 300.0


def check(context: str | None) -> Iterator[DoctorFinding]:
    from strata.sdk.fleet import client_settings, connect, current_context

    settings = client_settings(context=context)
    try:
        url = current_context(settings).url
    except StrataError as error:
        if context is not None:
            yield problem("hub", error.message, error.hint or "strata contexts")
        else:
            yield ok("hub", "none is chosen")
        return
    try:
        with connect(settings, timeout_s=10.0) as client:
            yield from asked(client, url)
    except StrataError as error:
        yield problem("hub", error.message, error.hint or f"is the hub at {url} running, and the way to it open?")


def asked(client: HubClient, url: str) -> Iterator[DoctorFinding]:
    from strata import __version__
    from strata.fleet import wire

    health = client.call("GET", "/v1/health", wire.HubHealth)
    told = f"{url} answers, version {health.version}"
    if health.version == __version__:
        yield ok("hub", told)
    else:
        yield warning("hub", f"{told}; this is {__version__}", "bring both to the same version, the hub first")
    if client.ahead_s is not None:
        yield check_clock_skew("clock", client.ahead_s, SKEW_S)
    yield credentials(client)


def credentials(client: HubClient) -> DoctorFinding:
    from strata.base.clock import SystemClock
    from strata.cli.fleet.client import format_duration
    from strata.fleet import wire

    try:
        caller = client.call("GET", "/v1/caller", wire.CallerReply)
    except StrataError as error:
        if error.code not in (Code.UNAUTHENTICATED, Code.FORBIDDEN):
            raise
        return problem("credentials", error.message, "strata login URL, with a key that is good")
    told = f"{caller.name or caller.kind}, {caller.role or 'host'}"
    if caller.expires_at_s is None:
        return ok("credentials", f"{told}, without an end")
    left_s = caller.expires_at_s - SystemClock().wall_s()
    if left_s < SOON_S:
        return warning(
            "credentials", f"{told}, for {format_duration(left_s)} more", "have an admin run strata keys create"
        )
    return ok("credentials", f"{told}, for {format_duration(left_s)} more")
