"""`strata backup`, `restore`, `move`: the data of a hub on this machine, and the refusal of passwords on the command
line.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from strata.base.errors import Code, StrataError
from strata.cli.options import combine, config_option
from strata.cli.output import print_error, redact
from strata.cli.progress import ProgressLine

if TYPE_CHECKING:
    from strata.hub.settings import HubSettings

hub_location_options: Final = combine(
    config_option("hub"),
    click.option(
        "--data", metavar="FOLDER", help="The hub's data folder (default: that of 'strata hub', else of 'strata up')."
    ),
    click.option("--database", metavar="URL", help="The hub's database (default: hub.db in its data folder)."),
)
"""The options that select a hub: `config`, `data` and `database`, as for `strata hub`."""

_SECRET: Final = ("password", "sslpassword")
"""Query parameters of a database URL that hold a password."""


@click.command()
@click.argument("target", required=False, type=click.Path(path_type=Path))
@hub_location_options
@click.option("--all", "large", is_flag=True, help="Also copy logs and artifacts.")
def backup(*, target: Path | None, config: Path | None, data: str | None, database: str | None, large: bool) -> None:
    """Back up the data of a hub to the folder TARGET.

    Copies the database (jobs, hosts, keys, index of artifacts), the certificate authority, the operator's token, the
    key of the secrets and, of 'strata up', the journal of its coordinator: keep TARGET as secret as the hub itself. The
    hub may keep running. With PostgreSQL the
    command prints the pg_dump to run.

    Without TARGET the backup goes into a new folder of hub.backups.folder, named after the time. Then the newest
    hub.backups.keep stay, and older ones are removed.
    """
    settings = load_hub_settings(config, data, database)
    from strata.base.clock import SystemClock
    from strata.cli.fleet.client import format_bytes
    from strata.hub.backup import LARGE, back_up, size_below
    from strata.hub.scheduled_backups import authority_in, choose_target, remove_old

    folder, now_s = settings.files, SystemClock().wall_s()
    scheduled = settings.scheduled_backups if target is None else None
    if scheduled is not None:
        target = choose_target(scheduled.folder.expanduser(), now_s)
    elif target is None:
        raise StrataError(
            Code.INVALID,
            "there is neither a TARGET nor hub.backups",
            hint="name a new folder, or set hub.backups.folder",
        )
    target = target.expanduser().absolute()
    with ProgressLine("backing up", format_bytes) as report:
        note = back_up(folder, settings.database, target, now_s, large=large, report=report)
    print_error(f"strata: the hub of {folder} is backed up in {target}")
    if note.database == "postgresql":
        print_error("strata: the PostgreSQL database is not in the backup; copy it with")
        print_error(f"pg_dump --format=custom --file={target / 'hub.dump'} {without_password(settings.database)}")
    if settings.secrets_key is not None:
        print_error(f"strata: {settings.secrets_key} is not in the backup; without it the secrets cannot be read")
    if scheduled is not None:
        for path in remove_old(target.parent, scheduled.keep, now_s, authority=authority_in(note.sha256)):
            print_error(f"strata: removed {path}")
    left_out = 0 if large else sum(size_below(folder / name) for name in LARGE)
    if left_out:
        print_error(
            f"strata: logs and artifacts ({format_bytes(left_out)}) are not in the backup",
            hint="use --all to copy them too",
        )


@click.command()
@click.argument("source", metavar="BACKUP", type=click.Path(path_type=Path, exists=True, file_okay=False))
@hub_location_options
def restore(*, source: Path, config: Path | None, data: str | None, database: str | None) -> None:
    """Restore the data of a hub from BACKUP.

    Nothing is overwritten, and no hub may run on the data yet. The restored hub rejects what hosts did since the
    backup, and queues those jobs again. With PostgreSQL, first run pg_restore into an empty database.
    """
    settings = load_hub_settings(config, data, database, exists=False)
    from strata.base.clock import SystemClock
    from strata.cli.fleet.client import format_bytes
    from strata.hub.backup import restore as restore_hub

    with ProgressLine("restoring", format_bytes) as report:
        note = restore_hub(source, settings.files, settings.database, SystemClock().wall_s(), report=report)
    print_error(f"strata: the hub of {settings.files} is restored, as it was at {_date(note.taken_at_s)}")
    print_error(
        "strata: keys and hosts revoked since then are valid again; unused invites are not", hint="strata keys list"
    )


@click.command()
@click.argument("target")
@hub_location_options
def move(*, target: str, config: Path | None, data: str | None, database: str | None) -> None:
    """Move the database of a hub to TARGET.

    TARGET is an empty postgresql://USER@HOST/NAME or a new sqlite:PATH. Stop the hub first; hosts continue with their
    jobs meanwhile. Every row is counted and compared. Put a password into ~/.pgpass or PGPASSWORD.
    """
    import asyncio

    # Two parsers, because a raw ? or # in a password ends the URL for one sooner than for the other.
    if redact(target) != target or without_password(target) != target:
        raise StrataError(
            Code.INVALID,
            "every user of this machine can read a password on the command line",
            hint="remove it from the URL, and put it into ~/.pgpass or PGPASSWORD",
        )
    settings = load_hub_settings(config, data, database)
    from strata.base.clock import SystemClock
    from strata.hub.backup import migrate_database

    source = settings.database or f"sqlite:{settings.data.expanduser() / 'hub.db'}"
    moved = asyncio.run(migrate_database(source, target, SystemClock().wall_s()))
    rows, tables = sum(moved.rows.values()), sum(1 for number in moved.rows.values() if number)
    print_error(f"strata: moved {rows} rows of {tables} tables")
    print_error(f'strata: start the hub with --database {target}, or database = "{target}" under [hub]')


def load_hub_settings(
    config: Path | None, data: str | None, database: str | None, *, exists: bool = True
) -> HubSettings:
    """The hub's settings; without options those of `strata up`, if only its data folder exists."""
    from strata.base.settings import load
    from strata.cli.extras import require

    require("uvicorn", extra="hub")
    from strata.hub.settings import SECTION, HubSettings
    from strata.sdk.fleet import client_settings

    flags = {"data": data, "database": database}
    settings = load(HubSettings, section=SECTION, file=config, flags=flags)
    up = client_settings().data / "hub"
    if exists and settings.data == HubSettings().data and not settings.data.is_dir() and up.is_dir():
        return load(HubSettings, section=SECTION, file=config, flags=flags | {"data": str(up)})
    return settings


def without_password(database: str) -> str:
    """The URL of a database without its password."""
    from urllib.parse import unquote, urlsplit

    try:
        at = urlsplit(database)
    except ValueError:
        raise StrataError(
            Code.INVALID, "the URL of the database is malformed", hint="write an IPv6 address in [ and ]"
        ) from None
    parameters = at.query.split("&")
    kept = [each for each in parameters if unquote(each.partition("=")[0]).lower() not in _SECRET]
    if not at.password and kept == parameters:
        return database
    host = at.netloc.rpartition("@")[2]
    netloc = f"{at.username or ''}@{host}" if at.password else at.netloc
    return at._replace(netloc=netloc, query="&".join(kept)).geturl()


def _date(at_s: float) -> str:
    import datetime

    return datetime.datetime.fromtimestamp(at_s, datetime.UTC).isoformat(timespec="seconds")
