"""A hub whose data folder is on this machine: its secrets, disk space, database and certificate authority."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from strata.base.errors import Code, StrataError
from strata.cli.doctor.findings import DoctorFinding, check_disk_space, check_private, ok, problem, warning

if TYPE_CHECKING:
    from strata.hub.settings import HubSettings

YEAR_S: Final = 365 * 86_400.0


def check(config: Path | None, data: str | None, database: str | None) -> Iterator[DoctorFinding]:
    from importlib.util import find_spec

    if find_spec("uvicorn") is None:
        return
    from strata.cli.backup import load_hub_settings

    try:
        settings = load_hub_settings(config, data, database)
    except StrataError as error:
        yield problem("hub's settings", error.message, "correct the file or the variable that it names")
        return
    folder = settings.data.expanduser()
    if not folder.is_dir():
        if data is not None or config is not None:
            yield problem("hub's data", f"there is no folder {folder}", "start the hub once, or pass another --data")
        return
    yield check_private("hub's data", [folder, folder / "operator.token", folder / "ca" / "ca.key"])
    yield check_disk_space("hub's disk", folder)
    if (folder / "ca" / "ca.key").exists():
        yield check_authority(folder / "ca")
    yield check_database(settings, folder)


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
    from strata.hub import tables

    try:
        if tables.is_postgres(settings.database):
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
