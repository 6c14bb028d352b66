"""The folder of one attempt, as the job sees it, and what may be thrown away."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import msgspec

from strata.base.errors import Code, StrataError
from strata.fleet.core.jobspec import TrainerSpec
from strata.fleet.wire import LeaseGiven


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


def make(place: Place, lease: LeaseGiven, trainer: TrainerSpec) -> None:
    """An empty place with what the job is told; an earlier, unfinished one is thrown away."""
    shutil.rmtree(place.folder, ignore_errors=True)
    place.folder.mkdir(mode=0o700, parents=True)
    for folder in (place.output, place.checkpoints, place.tmp):
        folder.mkdir(mode=0o700)
    place.metrics.touch(mode=0o600)
    told = msgspec.to_builtins(lease.spec) | {
        "id": lease.job_id,
        "epoch": lease.epoch,
        "data": msgspec.to_builtins(trainer.data),
    }
    for path, value in ((place.spec, told), (place.hyper, lease.spec.hyper)):
        path.write_bytes(msgspec.json.encode(value))
        path.chmod(0o600)


def hand_over(place: Place, owner: Owner) -> None:
    """What is in the place, and not the place itself: its user cannot put a link where the agent reads a result."""
    place.folder.chmod(0o711)
    for part in place.folder.iterdir():
        give(part, owner)


def give(folder: Path, owner: Owner) -> None:
    """All of it to another user; links themselves and not what they point to."""
    os.lchown(folder, owner.uid, owner.gid)
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            os.lchown(Path(parent) / name, owner.uid, owner.gid)


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
    if os.geteuid() != 0:
        if entry.pw_uid == os.geteuid():
            return None
        raise StrataError(Code.INVALID, f"run_as = {user!r} needs an agent that runs as root")
    groups = tuple(os.getgrouplist(user, entry.pw_gid))
    return Owner(entry.pw_uid, entry.pw_gid, groups, entry.pw_dir)
