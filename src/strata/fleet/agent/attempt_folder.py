"""The folder of one attempt as the job sees it: its subfolders, owner and removal, which checkpoint is the newest, and
who `run_as` is.

A trainer writes a checkpoint below STRATA_CHECKPOINT under a name that begins with a dot, or ends in `.tmp` or
`.partial`, then renames the folder. A folder that has its final name never changes again (`strata.fleet.trainer`).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from strata.base.errors import Code, StrataError
from strata.fleet.artifacts.files import Tree, open_folder
from strata.fleet.core.jobspec import TrainerSpec
from strata.fleet.wire.leases import LeaseGiven

_REMOVE_ROUNDS: Final = 5


@dataclass(frozen=True, slots=True)
class JobUser:
    """The user whom jobs run as, if not the agent's own."""

    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str


@dataclass(frozen=True, slots=True)
class AttemptPaths:
    """All paths of an attempt below one folder."""

    folder: Path

    @property
    def source(self) -> Path:
        """A copy of the trainer's source for this attempt alone: jobs write next to their code."""
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
    def server(self) -> Path:
        """Holds files of a server: the hub's key, and the address that it serves at."""
        return self.folder / "server"

    @property
    def gang(self) -> Path:
        """Holds what a member of a gang and the agent need to reach the coordinator."""
        return self.folder / "gang"

    @property
    def parts(self) -> Path:
        """Holds parts of checkpoints that the workers of a gang's member write. Committed ones move up."""
        return self.checkpoints / ".parts"

    @property
    def fetched(self) -> Path:
        """Holds checkpoints with the parts of all members, for a member of a gang."""
        return self.gang / "fetched"

    @property
    def tmp(self) -> Path:
        return self.folder / "tmp"

    @property
    def home(self) -> Path:
        """The home of a job in a sandbox, for this attempt alone."""
        return self.folder / "home"

    @property
    def spec(self) -> Path:
        return self.folder / "job.json"

    @property
    def hyper(self) -> Path:
        return self.folder / "hyper.json"

    @property
    def metrics(self) -> Path:
        return self.folder / "metrics.jsonl"


def make_passable(folder: Path) -> None:
    """Let other users pass through a folder, and not list it: whatever the umask is.

    `tmp` of an attempt is /tmp of its sandbox: root passes through it to an interpreter that lies in the host's /tmp.
    """
    folder.chmod(0o711)


def create_attempt_folder(
    paths: AttemptPaths, lease: LeaseGiven, trainer: TrainerSpec, job_user: JobUser | None = None
) -> None:
    """Create the folder with the job's input files and empty folders for its output; replace an unfinished one.

    With a job user: the content belongs to that user but the folder itself does not, so that the user cannot put a
    link where the agent reads a result. No other user can enter before all of the content has its owner.
    """
    remove_folder(paths.folder)
    paths.folder.mkdir(mode=0o700, parents=True)
    folders = [paths.output, paths.checkpoints, paths.tmp, paths.home]
    folders += [paths.source] if not trainer.directory else []
    folders += [paths.resume] if lease.resumed else []
    for folder in folders:
        folder.mkdir(mode=0o700)
    make_passable(paths.tmp)
    paths.metrics.touch(mode=0o600, exist_ok=False)
    spec = msgspec.to_builtins(lease.spec) | {
        "id": lease.job_id,
        "epoch": lease.epoch,
        "data": msgspec.to_builtins(trainer.data),
    }
    for path, value in ((paths.spec, spec), (paths.hyper, lease.spec.hyper)):
        path.write_bytes(msgspec.json.encode(value))
        path.chmod(0o600)
    if job_user is not None:
        for path in (*folders, paths.metrics, paths.spec, paths.hyper):
            os.lchown(path, job_user.uid, job_user.gid)
        make_passable(paths.folder)


def remove_folder(folder: Path) -> None:
    """Remove a folder and everything in it, however deep. UNAVAILABLE if files reappear each time."""
    for _ in range(_REMOVE_ROUNDS):
        with suppress(FileNotFoundError):
            # Other jobs of the same user can no longer enter.
            folder.chmod(0o700)
        try:
            shutil.rmtree(folder, ignore_errors=True)
        except RecursionError:
            # Deeper than shutil.rmtree can go. Like that one, rm does not follow links.
            subprocess.run(["rm", "-rf", "--", str(folder)], stderr=subprocess.DEVNULL, check=False)
        if not folder.exists():
            return
    raise StrataError(Code.UNAVAILABLE, f"{folder} cannot be removed")


def newest_checkpoint(folder: Tree, sent: Collection[str]) -> str:
    """The name of the newest finished checkpoint; empty if it was sent already, or if there is none."""
    try:
        with open_folder(folder) as entries:
            candidates = [
                (entry.stat(follow_symlinks=False).st_mtime_ns, entry.name)
                for entry in entries
                if entry.is_dir(follow_symlinks=False) and is_final_name(entry.name)
            ]
    except FileNotFoundError:
        return ""
    if not candidates:
        return ""
    name = max(candidates)[1]
    return "" if name in sent else name


def is_final_name(name: str) -> bool:
    return not name.startswith(".") and not name.endswith((".tmp", ".partial"))


def find_job_user(user: str) -> JobUser | None:
    """The user whom jobs run as; None for the agent's own."""
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
    return JobUser(entry.pw_uid, entry.pw_gid, groups, entry.pw_dir)
