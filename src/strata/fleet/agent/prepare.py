"""From a lease to something that can be started: source, folder, checkpoint, environment, command."""

from __future__ import annotations

import os
import shutil
import stat
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from strata.base.errors import Code, StrataError
from strata.fleet.agent import environment, sources, workdir
from strata.fleet.agent.calls import Calls
from strata.fleet.agent.child import Run
from strata.fleet.agent.lease_paths import artifact_id
from strata.fleet.agent.settings import AgentSettings
from strata.fleet.agent.transfer import download
from strata.fleet.agent.unprivileged import feed
from strata.fleet.agent.workdir import Owner, Place
from strata.fleet.core.jobspec import TrainerSpec
from strata.fleet.wire import LeaseGiven

MIB: Final = 1024 * 1024
KEEP_SOURCES_S: Final = 30 * 86_400.0
KEEP_PARTIAL_S: Final = 86_400.0
_NO_LIMIT: Final = 2**63 - 1
"""The manifest of an artifact has been checked against limits of its own."""


@dataclass(frozen=True, slots=True)
class Site:
    """What of this host an attempt needs."""

    settings: AgentSettings
    calls: Calls
    environ: Mapping[str, str]
    """The agent's own variables that jobs may have."""
    owner: Owner | None

    @property
    def uid(self) -> int | None:
        """Whose files results and checkpoints are; None: not looked at."""
        return None if self.owner is None else self.owner.uid

    @property
    def attempts(self) -> Path:
        return self.settings.work_folder / "attempts"

    @property
    def cache(self) -> Path:
        return self.settings.work_folder / "sources"


def make_work(settings: AgentSettings) -> None:
    """Others may pass through, to the folders that belong to them, and see no names."""
    for folder in (settings.work_folder, settings.work_folder / "attempts"):
        folder.mkdir(mode=0o711, parents=True, exist_ok=True)
        if settings.run_as and os.name == "posix":
            status = folder.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
                raise StrataError(
                    Code.INVALID, f"{folder} can be changed by others than the agent", hint="choose another work folder"
                )


def prepare(site: Site, lease: LeaseGiven, place: Place, devices: tuple[int, ...] | None) -> Run:
    trainer = lease.trainer
    if trainer is None:
        raise StrataError(
            Code.PRECONDITION, f"the trainer {lease.spec.trainer!r} was removed since the job was claimed"
        )
    owner = site.owner
    workdir.make(place, lease, trainer, owner)
    cwd = sources.provide(
        trainer,
        place,
        site.cache,
        sources.Fetch(lambda artifact: download(site.calls, artifact), site.calls.source),
        environ=environment.of_user(site.environ, "" if owner is None else owner.home),
        owner=owner,
    )
    if lease.checkpoint:
        resumed = download(site.calls, artifact_id(lease.checkpoint))
        feed(sources.unpacking(place.resume, max_bytes=_NO_LIMIT, max_members=_NO_LIMIT), owner, resumed)
    return _run(site, lease, trainer, place, cwd, devices)


def _run(
    site: Site,
    lease: LeaseGiven,
    trainer: TrainerSpec,
    place: Place,
    cwd: Path,
    devices: tuple[int, ...] | None,
) -> Run:
    settings, owner = site.settings, site.owner
    return Run(
        command=environment.command(trainer, settings.interpreter or sys.executable),
        cwd=str(cwd),
        env=environment.environment(
            lease,
            trainer,
            place,
            inherited=site.environ,
            home="" if owner is None else owner.home,
            devices=devices,
        ),
        max_log_bytes=int(settings.max_log_mib * MIB),
        timeout_s=lease.spec.timeout_s,
        grace_s=settings.grace_s,
        uid=None if owner is None else owner.uid,
        gid=None if owner is None else owner.gid,
        groups=() if owner is None else owner.groups,
    )


def prune(site: Site, keep: set[str], now_s: float) -> None:
    """Folders of attempts that nobody knows any more, and sources that nobody has used for long."""
    for folder in site.attempts.iterdir():
        if folder.name not in keep:
            with suppress(StrataError):
                workdir.remove(folder)
    for kept in site.cache.iterdir() if site.cache.is_dir() else ():
        keep_s = KEEP_PARTIAL_S if kept.name.endswith(".partial") else KEEP_SOURCES_S
        if now_s - kept.lstat().st_mtime > keep_s:
            if kept.is_dir():
                shutil.rmtree(kept, ignore_errors=True)
            else:
                kept.unlink(missing_ok=True)
