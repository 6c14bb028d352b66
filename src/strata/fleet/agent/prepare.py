"""Prepares an attempt: from a lease to the spec of a supervisor (source, data, environment, checkpoint, secrets), and
how long old sources and partial files stay in the work folder.
"""

from __future__ import annotations

import datetime
import os
import shutil
import stat
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from strata.base.errors import Code, StrataError
from strata.fleet.agent import environment_variables, trainer_source
from strata.fleet.agent.attempt_folder import (
    AttemptPaths,
    JobUser,
    create_attempt_folder,
    make_passable,
    remove_folder,
)
from strata.fleet.agent.containers import ContainerView, contain, ensure_image, find_runtime, registry_reference
from strata.fleet.agent.data_cache import provide_data
from strata.fleet.agent.environment_cache import EnvironmentCache, provide_environment
from strata.fleet.agent.gang_member import member_command, prepare_member
from strata.fleet.agent.host_cache import HostCache
from strata.fleet.agent.path_names import artifact_id, attempt_name
from strata.fleet.agent.privsep import run_with_input
from strata.fleet.agent.sandbox import UNCONFINED, HostSandbox, declared_amounts, is_root, job_user_of
from strata.fleet.agent.server_job import StateSource, data_folder, prepare_server
from strata.fleet.agent.settings import AgentSettings
from strata.fleet.agent.supervised import SupervisorSpec
from strata.fleet.agent.uv import find_uv
from strata.fleet.client.artifact_transfer import download_as_tar
from strata.fleet.client.hub_api import HubApi
from strata.fleet.core.job_command import job_command
from strata.fleet.core.jobspec import TrainerSpec, image_problem
from strata.fleet.wire.leases import LeaseGiven

MIB: Final = 1024 * 1024
GIB: Final = 1024 * MIB
SOURCE_TTL_S: Final = 30 * 86_400.0
PARTIAL_TTL_S: Final = 86_400.0
_NO_LIMIT: Final = 2**63 - 1
"""The manifest of an artifact is checked against limits of its own."""


@dataclass(frozen=True, slots=True)
class HostContext:
    """What attempts need of this host: settings, hub, environment, the user whom jobs run as."""

    settings: AgentSettings
    hub: HubApi
    environ: Mapping[str, str]
    """The agent's own variables that jobs inherit."""
    job_user: JobUser | None
    build_environ: Mapping[str, str] = field(default_factory=dict)
    """The agent's own variables that uv gets and jobs do not."""
    sandbox: HostSandbox = UNCONFINED
    is_local: bool = True
    """The hub is on this machine, and the host has a bearer secret instead of certificates."""
    is_ephemeral: bool = False
    """Its agent removes it from the fleet when it stops."""

    @property
    def uid(self) -> int | None:
        """The required owner of results and checkpoints; None: not checked."""
        return None if self.job_user is None else self.job_user.uid

    @property
    def attempts(self) -> Path:
        return self.settings.work_folder / "attempts"

    @property
    def cache(self) -> Path:
        return self.settings.work_folder / "sources"

    @property
    def environments(self) -> EnvironmentCache:
        folder, max_bytes = self.settings.work_folder / "environments", int(self.settings.environments_gib * GIB)
        return EnvironmentCache(
            HostCache(folder, self.attempts, max_bytes),
            find_uv(self.build_environ),
            self.settings.interpreter or sys.executable,
            self.build_environ,
            self.job_user,
            self.sandbox,
            self.settings.environments.allow_builds,
        )

    @property
    def data(self) -> HostCache:
        return HostCache(self.settings.work_folder / "data", self.attempts, int(self.settings.data_gib * GIB))


@dataclass(frozen=True, slots=True)
class PreparedAttempt:
    spec: SupervisorSpec
    facts: dict[str, Any]
    """What the hub keeps with the attempt."""


def create_work_folder(settings: AgentSettings) -> None:
    """Create the work folder: other users can enter their own folders below it, and cannot list it."""
    for folder in (settings.work_folder, settings.work_folder / "attempts"):
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            make_passable(folder)
        if os.name == "posix" and job_user_of(settings) is not None:
            status = folder.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
                raise StrataError(
                    Code.INVALID, f"{folder} can be changed by others than the agent", hint="choose another work folder"
                )


def prepare_attempt(
    host: HostContext,
    lease: LeaseGiven,
    paths: AttemptPaths,
    devices: tuple[int | str, ...] | None,
    wanted: Callable[[], bool] = lambda: True,
    *,
    traceparent: str = "",
) -> PreparedAttempt:
    """`wanted` is called now and then: when the attempt was stopped, its preparation ends with STALE. `traceparent` is
    for the trainer."""
    trainer = lease.trainer
    if trainer is None:
        raise StrataError(
            Code.PRECONDITION, f"the trainer {lease.spec.trainer!r} was removed since the job was claimed"
        )
    if problem := image_problem(trainer):
        raise StrataError(Code.PRECONDITION, problem)
    missing = [name for name in trainer.secrets if name not in lease.secrets]
    if missing:
        raise StrataError(
            Code.PRECONDITION,
            f"the hub has no secret {missing[0]} for this job",
            hint=f"strata secrets set {missing[0]}",
        )
    settings, job_user = host.settings, host.job_user
    create_attempt_folder(paths, lease, trainer, job_user)
    cwd = trainer_source.provide_source(
        trainer,
        paths,
        host.cache,
        trainer_source.SourceFetcher(lambda artifact: download_as_tar(host.hub, artifact), host.hub.source),
        environ=environment_variables.for_user(host.environ, "" if job_user is None else job_user.home),
        job_user=job_user,
    )
    if lease.resumed:
        checkpoint = download_as_tar(host.hub, artifact_id(lease.resumed))
        request = trainer_source.unpack_request(paths.resume, max_bytes=_NO_LIMIT, max_members=_NO_LIMIT)
        run_with_input(request, job_user, checkpoint)
    key = attempt_name(lease.job_id, lease.epoch)
    data = provide_data(host.data, host.hub, trainer.data, key, wanted)
    venv, facts = "", {"data": data.facts} if data.facts else {}
    wanted_environment = trainer.environment
    if wanted_environment is not None and wanted_environment.file:
        built = provide_environment(host.environments, wanted_environment, cwd, key, wanted)
        venv, facts = built.path, facts | {"environment": built.facts}
    server = _prepare_server(host, lease, paths) if lease.spec.kind == "server" else {}
    gang = prepare_member(lease, paths, job_user, settings.sandbox) if lease.spec.gang is not None else {}
    inputs = environment_variables.JobInputs(
        devices=devices,
        venv=venv,
        secrets=lease.secrets,
        data=data.folders,
        server=server,
        gang=gang,
        traceparent=traceparent,
    )
    spec = _supervisor_spec(host, lease, trainer, paths, cwd, inputs)
    readable = [Path(folder) for folder in (*filter(None, [venv]), *data.folders.values())]
    writable = [data_folder(host.settings.work_folder, lease.job_id)] if server else []
    declared = declared_amounts(lease)
    if wanted_environment is not None and wanted_environment.image:
        runtime = find_runtime(settings.containers, host.environ, is_root=is_root())
        image = registry_reference(wanted_environment.image, settings.containers.registries)
        ensure_image(runtime, image, wanted)
        view = ContainerView(
            readable=readable,
            writable=writable,
            devices=devices,
            sandbox=settings.sandbox,
            memory_bytes=host.sandbox.memory_limit(declared.ram_gib)[0],
            cores=declared.cores,
            job_user=job_user,
        )
        facts |= {"environment": {"image": wanted_environment.image, "runtime": runtime.kind}}
        contained = contain(runtime, image, spec, paths, view)
        if runtime.kind == "podman":
            return PreparedAttempt(host.sandbox.limit_disk(contained, paths, writable, declared), facts)
        # Apptainer limits nothing, and its processes are children of the supervisor.
        limits = host.sandbox.limits_of(paths.folder, writable, declared)
        return PreparedAttempt(msgspec.structs.replace(contained, limits=limits), facts)
    confined = host.sandbox.confine(
        spec, paths, readable=readable, writable=writable, gpus=devices != (), declared=declared
    )
    return PreparedAttempt(confined, facts)


def _prepare_server(host: HostContext, lease: LeaseGiven, paths: AttemptPaths) -> dict[str, str]:
    def describe(artifact: str) -> str:
        made = datetime.datetime.fromtimestamp(host.hub.artifact(artifact).committed_at_s, datetime.UTC)
        return f"{made:%Y-%m-%d %H:%M:%S} UTC"

    source = StateSource(lambda artifact: download_as_tar(host.hub, artifact), describe)
    return prepare_server(lease, paths, host.settings.work_folder, host.job_user, source)


def _supervisor_spec(
    host: HostContext,
    lease: LeaseGiven,
    trainer: TrainerSpec,
    paths: AttemptPaths,
    cwd: Path,
    inputs: environment_variables.JobInputs,
) -> SupervisorSpec:
    settings, job_user = host.settings, host.job_user
    command = job_command(trainer, settings.interpreter or sys.executable)
    return SupervisorSpec(
        command=command if lease.spec.gang is None else member_command(lease, paths, command),
        cwd=str(cwd),
        env=environment_variables.job_environment(
            lease,
            trainer,
            paths,
            inherited=host.environ,
            home="" if job_user is None else job_user.home,
            inputs=inputs,
        ),
        max_log_bytes=int(settings.max_log_mib * MIB),
        timeout_s=lease.spec.timeout_s,
        grace_s=settings.grace_s,
        uid=None if job_user is None else job_user.uid,
        gid=None if job_user is None else job_user.gid,
        groups=() if job_user is None else job_user.groups,
    )


def prune_work_folder(host: HostContext, keep: set[str], now_s: float) -> None:
    """Remove folders of attempts that have no record, and cached sources and environments not used for long."""
    for folder in host.attempts.iterdir():
        if folder.name not in keep:
            with suppress(StrataError):
                remove_folder(folder)
    for cached in host.cache.iterdir() if host.cache.is_dir() else ():
        ttl_s = PARTIAL_TTL_S if cached.name.endswith(".partial") else SOURCE_TTL_S
        if now_s - cached.lstat().st_mtime > ttl_s:
            if cached.is_dir():
                shutil.rmtree(cached, ignore_errors=True)
            else:
                cached.unlink(missing_ok=True)
    for caches in (host.environments.entries, host.data):
        caches.evict(now_s)
