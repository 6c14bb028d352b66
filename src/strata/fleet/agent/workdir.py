"""The folder of one attempt, as the job sees it, and what may be thrown away."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from strata.base.errors import Code, StrataError
from strata.fleet.core.jobspec import TrainerSpec
from strata.fleet.wire import LeaseGiven

_REMOVALS: Final = 5


@dataclass(frozen=True, slots=True)
class Owner:
    """Another user than the agent's, whom jobs run as."""

    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str


@dataclass(frozen=True, slots=True)
class Place:
    """All paths of an attempt below one folder."""

    folder: Path

    @property
    def source(self) -> Path:
        """A copy of the trainer's source of its own: jobs write beside their code."""
        return self.folder / "source"

    @property
    def output(self) -> Path:
        return self.folder / "output"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def resume(self) -> Path:
        return self.folder / "resume"

    @property
    def tmp(self) -> Path:
        return self.folder / "tmp"

    @property
    def spec(self) -> Path:
        return self.folder / "job.json"

    @property
    def hyper(self) -> Path:
        return self.folder / "hyper.json"

    @property
    def metrics(self) -> Path:
        return self.folder / "metrics.jsonl"


def make(place: Place, lease: LeaseGiven, trainer: TrainerSpec, owner: Owner | None = None) -> None:
    """A place with what the job is told and empty folders for the rest; an earlier, unfinished one is thrown away.

    With an owner: what is in the place is the owner's, and not the place itself, so that its user cannot put a link
    where the agent reads a result. Nobody else can enter until all of it, empty or ours, is handed over.
    """
    remove(place.folder)
    place.folder.mkdir(mode=0o700, parents=True)
    folders = [place.output, place.checkpoints, place.tmp]
    folders += [place.source] if not trainer.directory else []
    folders += [place.resume] if lease.checkpoint else []
    for folder in folders:
        folder.mkdir(mode=0o700)
    place.metrics.touch(mode=0o600, exist_ok=False)
    told = msgspec.to_builtins(lease.spec) | {
        "id": lease.job_id,
        "epoch": lease.epoch,
        "data": msgspec.to_builtins(trainer.data),
    }
    for path, value in ((place.spec, told), (place.hyper, lease.spec.hyper)):
        path.write_bytes(msgspec.json.encode(value))
        path.chmod(0o600)
    if owner is not None:
        for path in (*folders, place.metrics, place.spec, place.hyper):
            os.lchown(path, owner.uid, owner.gid)
        place.folder.chmod(0o711)


def remove(folder: Path) -> None:
    """A place and all that its job left in it, however deep. UNAVAILABLE if something of it comes back each time."""
    for _ in range(_REMOVALS):
        with suppress(FileNotFoundError):
            # Other jobs of the same user cannot come in any more.
            folder.chmod(0o700)
        try:
            shutil.rmtree(folder, ignore_errors=True)
        except RecursionError:
            # Deeper than Python's own way goes. Like that one, it does not follow links.
            subprocess.run(["rm", "-rf", "--", str(folder)], stderr=subprocess.DEVNULL, check=False)
        if not folder.exists():
            return
    raise StrataError(Code.UNAVAILABLE, f"{folder} cannot be removed")


def owner_of(user: str) -> Owner | None:
    """The user jobs run as; None for the agent's own."""
    if not user:
        return None
    if os.name != "posix":
        raise StrataError(Code.UNSUPPORTED, "run_as is not possible on this system")
    import pwd

    try:
        entry = pwd.getpwnam(user)
    except KeyError:
        raise StrataError(Code.INVALID, f"run_as: there is no user {user!r}") from None
    if entry.pw_uid == 0:
        raise StrataError(Code.INVALID, "run_as: root is not another user", hint="leave run_as out, or name a user")
    if os.geteuid() != 0:
        if entry.pw_uid == os.geteuid():
            return None
        raise StrataError(Code.INVALID, f"run_as = {user!r} needs an agent that runs as root")
    groups = tuple(os.getgrouplist(user, entry.pw_gid))
    return Owner(entry.pw_uid, entry.pw_gid, groups, entry.pw_dir)
