"""From a lease to something that can be started: source, folder, checkpoint, environment, command."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from strata.base.errors import Code, StrataError
from strata.fleet.agent import environment, sources, workdir
from strata.fleet.agent.calls import Calls
from strata.fleet.agent.child import Run
from strata.fleet.agent.settings import AgentSettings
from strata.fleet.agent.transfer import download
from strata.fleet.agent.workdir import Owner, Place
from strata.fleet.core.jobspec import TrainerSpec
from strata.fleet.wire import LeaseGiven

MIB: Final = 1024 * 1024
KEEP_SOURCES_S: Final = 30 * 86_400.0


@dataclass(frozen=True, slots=True)
class Site:
    """What of this host an attempt needs."""

    settings: AgentSettings
    calls: Calls
    environ: Mapping[str, str]
    """The agent's own variables that jobs may have."""
    owner: Owner | None

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


def prepare(site: Site, lease: LeaseGiven, place: Place, devices: tuple[int, ...] | None) -> Run:
    trainer = lease.trainer
    if trainer is None:
        raise StrataError(
            Code.PRECONDITION, f"the trainer {lease.spec.trainer!r} was removed since the job was claimed"
        )
    workdir.make(place, lease, trainer)
    cwd = sources.provide(
        trainer,
        place.source,
        site.cache,
        environ=site.environ,
        fetch_artifact=lambda artifact_id, target: download(site.calls, artifact_id, target),
        fetch_blob=site.calls.source,
    )
    if lease.checkpoint:
        download(site.calls, lease.checkpoint, place.resume)
    if site.owner is not None:
        workdir.hand_over(place, site.owner)
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
            shutil.rmtree(folder, ignore_errors=True)
    for folder in site.cache.iterdir() if site.cache.is_dir() else ():
        if now_s - folder.stat().st_mtime > KEEP_SOURCES_S:
            shutil.rmtree(folder, ignore_errors=True)
