"""The hub that the other commands use: reachable, its clock, its version, and our credentials."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from strata.base.errors import Code, StrataError
from strata.cli.doctor.findings import DoctorFinding, check_clock_skew, ok, problem, warning

if TYPE_CHECKING:
    from strata.fleet.client import HubClient

EXPIRES_SOON_S: Final = 7 * 86_400.0
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
            yield ok("hub", "not logged in to a hub")
        return
    try:
        with connect(settings, timeout_s=10.0) as client:
            yield from check_hub(client, url)
    except StrataError as error:
        yield problem("hub", error.message, error.hint or f"start the hub at {url}, or open the network path to it")


def check_hub(client: HubClient, url: str) -> Iterator[DoctorFinding]:
    from strata import __version__
    from strata.fleet import wire

    health = client.call("GET", "/v1/health", wire.HubHealth)
    why = f"{url} answers, version {health.version}"
    if health.version == __version__:
        yield ok("hub", why)
    else:
        yield warning("hub", f"{why}; this machine has {__version__}", "upgrade to one version, the hub first")
    if client.ahead_s is not None:
        yield check_clock_skew("clock", client.ahead_s, SKEW_S)
    yield check_credentials(client)


def check_credentials(client: HubClient) -> DoctorFinding:
    from strata.base.clock import SystemClock
    from strata.cli.fleet.client import format_duration
    from strata.fleet import wire

    try:
        caller = client.call("GET", "/v1/caller", wire.CallerReply)
    except StrataError as error:
        if error.code not in (Code.UNAUTHENTICATED, Code.FORBIDDEN):
            raise
        return problem("credentials", error.message, "strata login URL, with a valid key")
    why = f"{caller.name or caller.kind}, {caller.role or 'host'}"
    if caller.expires_at_s is None:
        return ok("credentials", f"{why}, never expires")
    left_s = caller.expires_at_s - SystemClock().wall_s()
    if left_s < EXPIRES_SOON_S:
        return warning(
            "credentials",
            f"{why}, expires in {format_duration(left_s)}",
            "ask an admin for a new key (strata keys create)",
        )
    return ok("credentials", f"{why}, expires in {format_duration(left_s)}")
