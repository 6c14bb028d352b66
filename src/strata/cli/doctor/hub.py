"""A hub whose data folder is on this machine: its secrets, its room, its database and the authority's age."""

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
        yield problem("hub's settings", error.message, "mend the file or the variable it names")
        return
    folder = settings.data.expanduser()
    if not folder.is_dir():
        if data is not None or config is not None:
            yield problem("hub's data", f"there is no folder {folder}", "start the hub once, or name another --data")
        return
    yield check_private("hub's data", [folder, folder / "operator.token", folder / "ca" / "ca.key"])
    yield check_disk_space("hub's disk", folder)
    if (folder / "ca" / "ca.key").exists():
        yield authority(folder / "ca")
    yield tables(settings, folder)


def authority(folder: Path) -> DoctorFinding:
    from strata.base.clock import SystemClock
    from strata.cli.fleet.client import format_duration
    from strata.identity.ca import Authority

    now_s = SystemClock().wall_s()
    try:
        left_s = Authority.read(folder / "ca.key").until_s - now_s
    except (StrataError, OSError) as error:
        return problem("authority", str(error), "restore it from a backup")
    told = f"good for {format_duration(left_s)} more"
    if left_s < YEAR_S:
        return warning("authority", told, "plan a new one: every host has to join again when it ends")
    return ok("authority", told)


def tables(settings: HubSettings, folder: Path) -> DoctorFinding:
    import asyncio

    from strata.cli.output import redact
    from strata.hub import tables as known

    try:
        if known.is_postgres(settings.database):
            components = known.postgres_components()
            versions = asyncio.run(known.postgres_versions(settings.database))
            where = redact(settings.database)
        else:
            path = Path(settings.database.removeprefix("sqlite:")) if settings.database else folder / "hub.db"
            components, where = known.SQLITE, str(path)
            versions = asyncio.run(known.sqlite_versions(path))
        due = known.outdated_components(versions, components)
    except StrataError as error:
        if error.code is Code.CONFLICT and "in use" in error.message:
            return ok("database", error.message)
        return problem("database", error.message, error.hint or "is the database there, and may this user open it?")
    except ModuleNotFoundError as error:
        return problem("database", str(error), "pip install 'strata-train[postgres]'")
    if due:
        return warning("database", f"{where}: {', '.join(due)} will be upgraded", "back up, then start the hub")
    return ok("database", f"{where} is up to date")
