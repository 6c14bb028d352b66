"""`strata backup`, `restore`, `move`: a hub's data, for whoever has its data folder on this machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import click

from strata.base.errors import Code, StrataError
from strata.cli.output import print_error, redact

if TYPE_CHECKING:
    from strata.hub.settings import HubSettings

_Function = TypeVar("_Function", bound=Callable[..., object])
_OPTIONS: Final = (
    click.option("--config", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Of the hub, TOML."),
    click.option("--data", metavar="FOLDER", help="Of the hub; that of 'strata hub', else of 'strata up', unless set."),
    click.option("--database", metavar="URL", help="Of the hub; hub.db in the data folder unless set."),
)

_SECRET: Final = ("password", "sslpassword")
"""What may stand behind the ? of an address, and is for nobody to see."""


def hub_location_options(function: _Function) -> _Function:
    """Which hub: `config`, `data` and `database`, as for `strata hub`."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


@click.command()
@click.argument("target", type=click.Path(path_type=Path))
@hub_location_options
@click.option("--all", "large", is_flag=True, help="Also logs and artifacts.")
def backup(*, target: Path, config: Path | None, data: str | None, database: str | None, large: bool) -> None:
    """Copy what a hub cannot do without to the folder TARGET.

    The database with jobs, hosts, keys and the index of artifacts, the authority, and the operator's token: TARGET is
    as secret as the hub itself. The hub may run meanwhile. With PostgreSQL it says which pg_dump to run.
    """
    settings = load_hub_settings(config, data, database)
    from strata.base.clock import SystemClock
    from strata.cli.fleet.client import format_bytes
    from strata.hub.backup import LARGE, back_up, size_below

    folder = settings.data.expanduser()
    target = target.expanduser().absolute()
    note = back_up(folder, settings.database, target, SystemClock().wall_s(), large=large)
    print_error(f"strata: the hub of {folder} is backed up in {target}")
    if note.database == "postgresql":
        print_error("strata: its database is not in there; now run")
        print_error(f"pg_dump --format=custom --file={target / 'hub.dump'} {without_password(settings.database)}")
    left_out = 0 if large else sum(size_below(folder / name) for name in LARGE)
    if left_out:
        print_error(
            f"strata: logs and artifacts ({format_bytes(left_out)}) are not in it", hint="--all copies them too"
        )


@click.command()
@click.argument("source", metavar="BACKUP", type=click.Path(path_type=Path, exists=True, file_okay=False))
@hub_location_options
def restore(*, source: Path, config: Path | None, data: str | None, database: str | None) -> None:
    """Make a hub's data out of BACKUP.

    Nothing is overwritten, and no hub may run on it yet. What hosts did since the backup is refused from then on, and
    what they were doing is done again. With PostgreSQL, run pg_restore into an empty database first.
    """
    settings = load_hub_settings(config, data, database, exists=False)
    from strata.base.clock import SystemClock
    from strata.hub.backup import restore as restore_hub

    note = restore_hub(source, settings.data.expanduser(), settings.database, SystemClock().wall_s())
    print_error(f"strata: the hub of {settings.data.expanduser()} is restored, as it was at {_date(note.taken_at_s)}")
    print_error(
        "strata: keys and hosts revoked since then are good again; unused invites are not", hint="strata keys list"
    )


@click.command()
@click.argument("target")
@hub_location_options
def move(*, target: str, config: Path | None, data: str | None, database: str | None) -> None:
    """Move the database of a hub to TARGET.

    TARGET is postgresql://USER@HOST/NAME, empty, or sqlite:PATH, new. No hub may run. Every row is counted and
    compared. Hosts go on working meanwhile. A password belongs into ~/.pgpass or PGPASSWORD.
    """
    import asyncio

    # As it was meant, and as it is read: a raw ? or # in a password ends the one sooner than the other.
    if redact(target) != target or without_password(target) != target:
        raise StrataError(
            Code.INVALID,
            "a password on the command line can be read by every user of this machine",
            hint="leave it out of the URL, and put it into ~/.pgpass or PGPASSWORD",
        )
    settings = load_hub_settings(config, data, database)
    from strata.base.clock import SystemClock
    from strata.hub.migrate import migrate_database

    source = settings.database or f"sqlite:{settings.data.expanduser() / 'hub.db'}"
    moved = asyncio.run(migrate_database(source, target, SystemClock().wall_s()))
    rows, tables = sum(moved.rows.values()), sum(1 for number in moved.rows.values() if number)
    print_error(f"strata: {rows} rows of {tables} tables are at their new place")
    print_error(f'strata: start the hub with --database {target}, or database = "{target}" under [hub]')


def load_hub_settings(
    config: Path | None, data: str | None, database: str | None, *, exists: bool = True
) -> HubSettings:
    """Those of the hub; where nobody says which, `strata up`'s if only that is there."""
    from strata.base.settings import load
    from strata.cli.extras import require

    require("uvicorn", extra="hub")
    from strata.hub.settings import SECTION, HubSettings
    from strata.sdk.fleet import client_settings

    flags = {"data": data, "database": database}
    found = load(HubSettings, section=SECTION, file=config, flags=flags)
    up = client_settings().data / "hub"
    if exists and found.data == HubSettings().data and not found.data.is_dir() and up.is_dir():
        return load(HubSettings, section=SECTION, file=config, flags=flags | {"data": str(up)})
    return found


def without_password(database: str) -> str:
    """The address of a database for others to see."""
    from urllib.parse import unquote, urlsplit

    try:
        at = urlsplit(database)
    except ValueError:
        raise StrataError(
            Code.INVALID, "the address of the database cannot be read", hint="[ and ] belong around an IPv6 address"
        ) from None
    given = at.query.split("&")
    kept = [each for each in given if unquote(each.partition("=")[0]).lower() not in _SECRET]
    if not at.password and kept == given:
        return database
    place = at.netloc.rpartition("@")[2]
    netloc = f"{at.username or ''}@{place}" if at.password else at.netloc
    return at._replace(netloc=netloc, query="&".join(kept)).geturl()


def _date(at_s: float) -> str:
    import datetime

    return datetime.datetime.fromtimestamp(at_s, datetime.UTC).isoformat(timespec="seconds")
