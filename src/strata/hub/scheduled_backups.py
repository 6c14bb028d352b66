"""The folder of `hub.backups`: the names of its backups, which of them are complete, the newest, and which are removed.

A backup there is named after the time at which it was begun, `2026-11-19T040000Z`. It is complete when it has its note,
which is written last. Folders with other names belong to somebody else and stay.
"""

from __future__ import annotations

import datetime
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from strata.base.errors import Code, StrataError
from strata.base.private import require_private_folder
from strata.fleet.core.attention import HubBackups

if TYPE_CHECKING:
    from strata.hub.settings import BackupSettings

NOTE: Final = "backup.json"
"""Written last: a folder without it is no complete backup."""
AUTHORITY_KEY: Final = "ca/ca.key"
"""Its digest in the note says which hub the backup is of."""
ABANDONED_S: Final = 86_400.0
"""An incomplete backup that was begun so long ago is not being written any more."""
_NAME: Final = "%Y-%m-%dT%H%M%SZ"
_HOUR_S: Final = 3600.0


class ScheduledBackup(NamedTuple):
    taken_at_s: float
    path: Path
    complete: bool


def choose_target(folder: Path, now_s: float) -> Path:
    """Returns where a backup of now goes. INVALID if others could reach the folder, or add to it and remove from it."""
    require_private_folder(folder, "the backups of the hub")
    return folder / datetime.datetime.fromtimestamp(now_s, datetime.UTC).strftime(_NAME)


def list_backups(folder: Path, now_s: float) -> list[ScheduledBackup]:
    """Returns the backups of the folder, the oldest first.

    One with a time to come was made with a wrong clock: if it counted, it would be the newest for as long as that.
    """
    found = [ScheduledBackup(at_s, path, (path / NOTE).is_file()) for at_s, path in _named(folder) if at_s <= now_s]
    return sorted(found)


def survey_backups(settings: BackupSettings | None, now_s: float) -> HubBackups | None:
    """Returns how old the newest complete backup is and may be; None if no backups are scheduled."""
    if settings is None:
        return None
    folder, max_age_s = settings.folder.expanduser(), settings.max_age_hours * _HOUR_S
    try:
        complete = [each.taken_at_s for each in list_backups(folder, now_s) if each.complete]
    except OSError as error:
        return HubBackups(None, max_age_s, f"{folder} cannot be read: {error.strerror}")
    return HubBackups(max(complete, default=None), max_age_s, "" if complete else f"{folder} has no complete backup")


def remove_old(folder: Path, keep: int, now_s: float, *, authority: str) -> list[Path]:
    """Removes all but the newest `keep` complete backups, and what interrupted ones left; returns what is gone.

    Only backups with this authority count: those of a hub that was lost stay, though a new one backs up beside them.
    """
    try:
        backups = list_backups(folder, now_s)
        old = [each.path for each in backups if each.complete and _authority_of(each.path) == authority][:-keep]
        old += [each.path for each in backups if not each.complete and each.taken_at_s < now_s - ABANDONED_S]
        for path in old:
            # First: what is left after an interruption must not pass for a complete backup.
            (path / NOTE).unlink(missing_ok=True)
            # Another backup that has just ended may remove it too.
            with suppress(FileNotFoundError):
                shutil.rmtree(path)
    except OSError as error:
        raise StrataError(
            Code.UNAVAILABLE, f"the new backup is complete, but old ones were not removed: {error}"
        ) from error
    return old


def authority_in(digests: Mapping[str, str]) -> str:
    """Returns which hub a backup is of, by the digests of its note; empty: it has no authority."""
    return digests.get(AUTHORITY_KEY, "")


def _authority_of(backup: Path) -> str | None:
    try:
        return authority_in(msgspec.json.decode((backup / NOTE).read_bytes(), type=_Digests).sha256)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


class _Digests(msgspec.Struct):
    """The part of a note that says which hub a backup is of."""

    sha256: dict[str, str] = {}


def _named(folder: Path) -> Iterator[tuple[float, Path]]:
    for path in folder.iterdir():
        try:
            at = datetime.datetime.strptime(path.name, _NAME).replace(tzinfo=datetime.UTC)
        except ValueError:
            continue
        # Numbers with fewer digits are read, too.
        if at.strftime(_NAME) == path.name and path.is_dir() and not path.is_symlink():
            yield at.timestamp(), path
