"""Backup, restore and move of a hub: which files a backup folder has, their digests, copies of large data, and the
refusals.

The folder holds what the hub needs to run, and on request the results of jobs.

backup.json        when, by which version, and the digest of each of the next six
hub.db             the database, sealed: jobs, hosts, keys, which chunks make up which artifact
coordinator/coordinator.db   the journal of the coordinator that `strata up` starts: committed checkpoints of gangs
ca/ca.key ca.pem   the authority: with another one every host would have to join again
operator.token
secrets.key        what the secrets in the database were encrypted with; not one that `hub.secrets_key` keeps elsewhere
artifacts/ streams/   chunks and logs, only if asked for: they can be large, and any tool that copies files does

A SQLite file in use is open to one process alone. While a hub runs, a backup is requested by a file in the hub's data
folder, which only the hub's user can write to, and the hub copies the database (`online_backup`); so does its
coordinator. PostgreSQL has `pg_dump`.

The journal is copied before the database: what it calls committed, the database knows. The secret of the coordinator's
tokens is not in a backup. A restored hub makes another one, so the workers from before are refused, who are ahead of
the journal.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal

import msgspec

from strata import __version__
from strata.base.atomic import sync_file, sync_folder, write_file
from strata.base.clock import SystemClock
from strata.base.digest import file_digest
from strata.base.errors import Code, StrataError
from strata.base.private import require_private_folder
from strata.base.progress import ReportProgress, no_progress
from strata.database.address import is_postgres
from strata.database.migrations import SqliteComponents, upgrade_postgres
from strata.database.online_backup import FOLDER, request_backup
from strata.database.sqlite import SqliteThread
from strata.database.transaction import PostgresDatabase
from strata.fleet.store.backup import backup_sqlite, fence, require_absent, restore_sqlite
from strata.fleet.store.migrate import MigratedRows, to_postgres, to_sqlite
from strata.hub.compose import FILES, TOKEN_FILE
from strata.hub.scheduled_backups import NOTE
from strata.hub.secret_store import KEY_FILE
from strata.hub.tables import (
    SQLITE,
    ReadOnlySchema,
    postgres_components,
    postgres_connections,
    upgrade_existing,
)
from strata.journal.sqlite import SqliteJournal

DATABASE: Final = "hub.db"
COORDINATOR: Final = "coordinator"
"""The folder of the coordinator of `strata up`, in the data folder."""
JOURNAL: Final = f"{COORDINATOR}{os.sep}coordinator.db"
TOKEN_SECRET: Final = f"{COORDINATOR}{os.sep}token.secret"
SMALL: Final = (f"ca{os.sep}ca.key", f"ca{os.sep}ca.pem", TOKEN_FILE, KEY_FILE)
LARGE: Final = ("artifacts", "streams")
_PARTIAL: Final = ".partial"


class Note(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: Literal[1] = 1
    strata: str
    taken_at_s: float
    database: Literal["sqlite", "postgresql"]
    sha256: dict[str, str]
    """The digest of each file but those of `artifacts` and `streams`, which have their digests elsewhere or need
    none."""
    large: bool = False


def sqlite_path(data: Path, database: str) -> Path:
    return _file_of(database) if database else data / DATABASE


def _file_of(database: str) -> Path:
    return Path(database.removeprefix("sqlite:"))


def back_up(
    data: Path, database: str, target: Path, now_s: float, *, large: bool, report: ReportProgress = no_progress
) -> Note:
    """Backs up into `target`, which must not exist; it is for its owner only: it holds the keys of authority and
    secrets.

    Progress is reported in bytes of what `large` adds.
    """
    if not data.is_dir():
        raise StrataError(Code.NOT_FOUND, f"there is no hub's data in {data}", hint="name its folder with --data")
    try:
        target.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        raise StrataError(Code.CONFLICT, f"{target} is there already", hint="a backup overwrites nothing") from None
    others = os.umask(0o077)
    try:
        return _fill(target, data, database, now_s, large=large, report=report)
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        raise
    finally:
        os.umask(others)


def _fill(target: Path, data: Path, database: str, now_s: float, *, large: bool, report: ReportProgress) -> Note:
    postgres = is_postgres(database)
    if (data / JOURNAL).exists():
        (target / JOURNAL).parent.mkdir(mode=0o700)
        _copy_in_use(data / COORDINATOR / FOLDER, target / JOURNAL, _copy_journal(data / JOURNAL, target / JOURNAL))
    if not postgres:
        _copy_database(data, sqlite_path(data, database), target / DATABASE, now_s)
    for name in SMALL:
        with suppress(FileNotFoundError):
            content = (data / name).read_bytes()
            (target / name).parent.mkdir(mode=0o700, exist_ok=True)
            write_file(target / name, content)
    if large:
        # After the database: a chunk that it names is there by now.
        _copy_large(data, target, report)
    digests = {name: _digest(target / name) for name in (DATABASE, JOURNAL, *SMALL) if (target / name).exists()}
    note = Note(
        strata=__version__,
        taken_at_s=now_s,
        database="postgresql" if postgres else "sqlite",
        sha256={name.replace(os.sep, "/"): digest for name, digest in digests.items()},
        large=large,
    )
    # Last: a backup without it was not finished.
    write_file(target / NOTE, msgspec.json.format(msgspec.json.encode(note)))
    sync_folder(target)
    return note


def restore(backup: Path, data: Path, database: str, now_s: float, *, report: ReportProgress = no_progress) -> Note:
    """Make `data` a hub's folder again, and the database one that no host from before can write to.

    INVALID if other users could reach the folder, or if the backup has anything but folders and files.
    """
    _refuse_links(backup)
    note = read_note(backup)
    if is_postgres(database) != (note.database == "postgresql"):
        raise StrataError(Code.INVALID, f"this is the backup of a hub on {note.database}", hint="name its --database")
    _refuse_others(backup, data)
    path = sqlite_path(data, database)
    if note.database == "sqlite":
        require_absent(path)
    # One that an interrupted restore wrote stays.
    restores_journal = (backup / JOURNAL).exists() and not _is_same(backup / JOURNAL, data / JOURNAL)
    if restores_journal:
        require_absent(data / JOURNAL)
    others = os.umask(0o077)
    try:
        require_private_folder(data, "the hub's files")
        _restore_files(backup, data, report, journal=restores_journal)
        if note.database == "sqlite":
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            restore_sqlite(backup / DATABASE, path, SQLITE, now_s)
    finally:
        os.umask(others)
    if note.database != "sqlite":
        asyncio.run(_fence(database, now_s))
    return note


def _refuse_links(backup: Path) -> None:
    """INVALID for a link: what it leads to would be copied, and no digest covers it."""
    for parent, folders, names in os.walk(backup):
        for path in (Path(parent) / name for name in (*folders, *names)):
            if not stat.S_ISDIR(mode := path.lstat().st_mode) and not stat.S_ISREG(mode):
                raise StrataError(Code.INVALID, f"{path} is neither a file nor a folder, and no backup has that")


def _restore_files(backup: Path, data: Path, report: ReportProgress, *, journal: bool) -> None:
    for name in SMALL:
        if (backup / name).exists() and not (data / name).exists():
            (data / name).parent.mkdir(mode=0o700, exist_ok=True)
            write_file(data / name, (backup / name).read_bytes())
    _copy_large(backup, data, report)
    if journal:
        (data / JOURNAL).parent.mkdir(mode=0o700, exist_ok=True)
        (data / TOKEN_SECRET).unlink(missing_ok=True)
        write_file(data / JOURNAL, (backup / JOURNAL).read_bytes())


def read_note(backup: Path) -> Note:
    """Returns what a backup says of itself, after its files were compared with it."""
    try:
        note = msgspec.json.decode((backup / NOTE).read_bytes(), type=Note)
    except FileNotFoundError:
        raise StrataError(Code.NOT_FOUND, f"there is no whole backup in {backup}: it has no {NOTE}") from None
    except msgspec.DecodeError as error:
        raise StrataError(Code.CORRUPT, f"{backup / NOTE} cannot be read: {error}") from error
    known = {name.replace(os.sep, "/") for name in (DATABASE, JOURNAL, *SMALL)}
    for name, digest in note.sha256.items():
        if name not in known or not (backup / name).is_file() or _digest(backup / name) != digest:
            raise StrataError(Code.CORRUPT, f"{backup / name} is not what was backed up")
    return note


def size_below(folder: Path) -> int:
    """Bytes of what `large` would copy from there."""
    return sum(path.lstat().st_size for path in _files(folder) if path.exists())


def _copy_database(data: Path, path: Path, target: Path, now_s: float) -> None:
    _copy_in_use(data / FOLDER, target, _copy_unused(path, target, now_s))


def _copy_in_use(backups: Path, target: Path, copying: Coroutine[None, None, None]) -> None:
    """Copy a file; if a process has it open, request the copy from that process."""
    try:
        asyncio.run(copying)
    except StrataError as error:
        if error.code is not Code.CONFLICT or "in use" not in error.message:
            raise
        request_backup(backups, target)
    target.chmod(0o600)


async def _copy_journal(path: Path, target: Path) -> None:
    async with await SqliteJournal.open(path, SystemClock(), create=False) as journal:
        await journal.copy_to(target)


async def _copy_unused(path: Path, target: Path, now_s: float) -> None:
    thread = await SqliteThread.open(path, ReadOnlySchema(), create=False)
    try:
        await backup_sqlite(thread, target, now_s)
    finally:
        await thread.close()


async def _fence(database: str, now_s: float) -> None:
    async with postgres_connections(database) as connections:
        await upgrade_existing(connections)
        restored = PostgresDatabase(connections)
        await restored.run(lambda tx: fence(tx, now_s))
        # The files may be in another folder now.
        await restored.changed("DELETE FROM hub_lease WHERE name = :name", {"name": FILES})


def _refuse_others(backup: Path, data: Path) -> None:
    """CONFLICT if the folder has an authority, a token or a key, and not those of the backup."""
    for name in SMALL:
        here, there = data / name, backup / name
        if not here.exists() or not there.exists() or here.read_bytes() == there.read_bytes():
            continue
        if name == SMALL[0]:
            raise StrataError(
                Code.CONFLICT, f"{here} is the key of another authority", hint="restore into a new data folder"
            )
        raise StrataError(
            Code.CONFLICT,
            f"{here} is there already, and not that of the backup",
            hint="move it away, or restore into a new data folder",
        )


def _copy_large(source: Path, target: Path, report: ReportProgress) -> None:
    done, total = 0, sum(size_below(source / name) for name in LARGE)

    def copied(size: int) -> None:
        nonlocal done
        done += size
        report(done, total)

    for name in LARGE:
        _copy_tree(source / name, target / name, copied)


def _copy_tree(source: Path, target: Path, copied: Callable[[int], None]) -> None:
    """Copies what is there and not yet at the target. What vanishes meanwhile was not wanted any more.

    A file has its name when it is whole: one that is there is not copied again after an interruption.
    """
    folders = set()
    for path in _files(source):
        copy = target / path.relative_to(source)
        if copy.exists():
            continue
        copy.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial = copy.with_name(f".{copy.name}{_PARTIAL}")
        partial.unlink(missing_ok=True)
        with suppress(FileNotFoundError):
            shutil.copyfile(path, partial, follow_symlinks=False)
            if not partial.is_symlink():
                sync_file(partial)
            partial.replace(copy)
            folders.add(copy.parent)
            copied(copy.lstat().st_size)
    for folder in folders:
        sync_folder(folder)


def _files(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        # What is still being written, and what was found damaged.
        folders[:] = [name for name in folders if name not in ("partial", "quarantine")]
        yield from (Path(parent) / name for name in names if not (name.startswith(".") and name.endswith(_PARTIAL)))


def _is_same(path: Path, other: Path) -> bool:
    return other.exists() and _digest(path) == _digest(other)


def _digest(path: Path) -> str:
    return file_digest(path).removeprefix("sha256:")


async def migrate_database(source: str, target: str, now_s: float) -> MigratedRows:
    """`sqlite:PATH` and `postgresql://…`, either way round. No hub may use either meanwhile."""
    if is_postgres(source) == is_postgres(target):
        raise StrataError(Code.INVALID, "a database moves from SQLite to PostgreSQL, or from PostgreSQL to SQLite")
    if is_postgres(target):
        thread = await SqliteThread.open(_file_of(source), SqliteComponents(SQLITE), create=False)
        try:
            async with postgres_connections(target) as connections:
                async with connections.transaction() as connection:
                    await upgrade_postgres(connection, postgres_components())
                return await to_postgres(thread, connections, now_s)
        finally:
            await thread.close()
    path = _file_of(target)
    require_absent(path)
    return await _move_to_sqlite(source, path)


async def _move_to_sqlite(source: str, path: Path) -> MigratedRows:
    """The file gets its name when it is whole."""
    beside = path.with_name(f"{path.name}.partial")
    beside.unlink(missing_ok=True)
    try:
        async with postgres_connections(source) as connections:
            await upgrade_existing(connections)
            thread = await SqliteThread.open(beside, SqliteComponents(SQLITE))
            try:
                moved = await to_sqlite(connections, thread)
            finally:
                # Closing it brings the write-ahead log home, so the one file is all there is.
                await thread.close()
        beside.chmod(0o600)
        beside.rename(path)
    finally:
        for leftover in (beside, Path(f"{beside}-wal")):
            leftover.unlink(missing_ok=True)
    return moved
