"""Checks of `strata doctor` about the hub: context, reachability, credentials that end within a week, data folder,
authority, database.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from strata.base.errors import Code, StrataError
from strata.cli.doctor.findings import (
    DoctorFinding,
    check_clock_skew,
    check_disk_space,
    check_private,
    ok,
    problem,
    warning,
)

if TYPE_CHECKING:
    from strata.fleet.client.hub_client import HubClient
    from strata.hub.settings import BackupSettings, HubSettings

EXPIRES_SOON_S: Final = 7 * 86_400.0
YEAR_S: Final = 365 * 86_400.0


def check_context(context: str | None) -> Iterator[DoctorFinding]:
    """The hub that the other commands use: reachable, its clock, its version, and our credentials."""
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
    from strata.fleet.wire.overview import HubHealth

    health = client.call("GET", "/v1/health", HubHealth)
    why = f"{url} answers, version {health.version}"
    if health.version == __version__:
        yield ok("hub", why)
    else:
        yield warning("hub", f"{why}; this machine has {__version__}", "upgrade to one version, the hub first")
    if client.ahead_s is not None:
        yield check_clock_skew("clock", client.ahead_s)
    yield check_credentials(client)


def check_credentials(client: HubClient) -> DoctorFinding:
    from strata.base.clock import SystemClock
    from strata.cli.fleet.client import format_duration
    from strata.fleet.wire.identities import CallerReply

    try:
        caller = client.call("GET", "/v1/caller", CallerReply)
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


def check_data(config: Path | None, data: str | None, database: str | None) -> Iterator[DoctorFinding]:
    """A hub whose data folder is on this machine: its secrets, disk space, database and certificate authority."""
    from importlib.util import find_spec

    if find_spec("uvicorn") is None:
        return
    from strata.cli.backup import load_hub_settings

    try:
        settings = load_hub_settings(config, data, database)
    except StrataError as error:
        yield problem("hub's settings", error.message, "correct the file or the variable that it names")
        return
    folder = settings.files
    if not folder.is_dir():
        if data is not None or config is not None:
            yield problem("hub's data", f"there is no folder {folder}", "start the hub once, or pass another --data")
        return
    yield check_private("hub's data", [folder, folder / "operator.token", folder / "ca" / "ca.key"])
    yield check_disk_space("hub's disk", folder)
    if settings.backups is not None:
        yield check_scheduled_backups(settings.backups)
    if (folder / "ca" / "ca.key").exists():
        yield check_authority(folder / "ca")
    yield check_database(settings, folder)


def check_scheduled_backups(settings: BackupSettings) -> DoctorFinding:
    from strata.base.clock import SystemClock
    from strata.fleet.core.attention import check_backups
    from strata.hub.scheduled_backups import survey_backups

    now_s = SystemClock().wall_s()
    for item in check_backups(survey_backups(settings, now_s), now_s):
        return problem("backups", item.why, item.fix)
    return ok("backups", f"the newest in {settings.folder} is no older than {settings.max_age_hours:g} hours")


def check_authority(folder: Path) -> DoctorFinding:
    from strata.base.clock import SystemClock
    from strata.cli.fleet.client import format_duration
    from strata.identity.ca import Authority

    now_s = SystemClock().wall_s()
    try:
        left_s = Authority.read(folder / "ca.key").until_s - now_s
    except (StrataError, OSError) as error:
        return problem("authority", str(error), "restore the file from a backup")
    why = f"expires in {format_duration(left_s)}"
    if left_s < YEAR_S:
        return warning("authority", why, "plan a new one: when it expires, every host has to join again")
    return ok("authority", why)


def check_database(settings: HubSettings, folder: Path) -> DoctorFinding:
    import asyncio

    from strata.cli.output import redact
    from strata.database.address import is_postgres
    from strata.hub import tables

    try:
        if is_postgres(settings.database):
            components = tables.postgres_components()
            versions = asyncio.run(tables.postgres_versions(settings.database))
            where = redact(settings.database)
        else:
            path = Path(settings.database.removeprefix("sqlite:")) if settings.database else folder / "hub.db"
            components, where = tables.SQLITE, str(path)
            versions = asyncio.run(tables.sqlite_versions(path))
        due = tables.outdated_components(versions, components)
    except StrataError as error:
        if error.code is Code.CONFLICT and "in use" in error.message:
            return ok("database", error.message)
        return problem(
            "database", error.message, error.hint or "make sure that the database exists and that this user may open it"
        )
    except ModuleNotFoundError as error:
        return problem("database", str(error), "pip install 'strata-train[postgres]'")
    if due:
        return warning(
            "database",
            f"{where}: {', '.join(due)} will be upgraded by the next start",
            "run 'strata backup', then start the hub",
        )
    return ok("database", f"{where} is up to date")
