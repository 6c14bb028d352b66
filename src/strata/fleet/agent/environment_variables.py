"""The environment variables of a job: those inherited, those of its trainer and its secrets, and every STRATA_
variable. Python environments are in `environment_cache` and `uv`.

A trainer cannot override a STRATA_ variable.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from strata.base import trace
from strata.fleet.agent.attempt_folder import AttemptPaths
from strata.fleet.agent.data_cache import variable_name
from strata.fleet.agent.gpu import visible_devices
from strata.fleet.core.jobspec import TrainerSpec
from strata.fleet.wire.leases import LeaseGiven


@dataclass(frozen=True, slots=True, kw_only=True)
class JobInputs:
    """What this host has provided for one attempt."""

    devices: tuple[int | str, ...] | None = None
    """GPU numbers; None: all GPUs of the host."""
    venv: str = ""
    """The environment that this host built for the job."""
    secrets: Mapping[str, str] = field(default_factory=dict)
    """Values by the names of variables."""
    data: Mapping[str, str] = field(default_factory=dict)
    """Folders of datasets, by the names that the trainer gives them."""
    server: Mapping[str, str] = field(default_factory=dict)
    """Settings of a job that is a server, by the names of variables."""
    gang: Mapping[str, str] = field(default_factory=dict)
    """Settings of the workers of a gang, by the names of variables."""
    traceparent: str = ""
    """The trace that the trainer may continue; empty: none."""


def job_environment(
    lease: LeaseGiven,
    trainer: TrainerSpec,
    paths: AttemptPaths,
    *,
    inherited: Mapping[str, str],
    home: str = "",
    inputs: JobInputs | None = None,
) -> dict[str, str]:
    """`inherited` comes from `inherited_by_jobs`; `home` is set if the job runs as another user."""
    inputs = inputs or JobInputs()
    environ = for_user(inherited, home)
    environ |= {"TMPDIR": str(paths.tmp), "PYTHONUNBUFFERED": "1"}
    if inputs.traceparent:
        environ[trace.VARIABLE] = inputs.traceparent
    if inputs.devices is not None:
        environ |= visible_devices(inputs.devices)
    if lease.spec.needs.min_cores:
        # A quota of CPU time is not visible to libraries, which would start a thread for each core of the host.
        environ.setdefault("OMP_NUM_THREADS", str(lease.spec.needs.min_cores))
    venv = inputs.venv or trainer.venv
    if venv:
        programs = Path(venv) / ("Scripts" if os.name == "nt" else "bin")
        environ["VIRTUAL_ENV"] = venv
        environ["PATH"] = os.pathsep.join(filter(None, (str(programs), environ.get("PATH", ""))))
    environ |= {name: value for name, value in trainer.env.items() if not name.startswith("STRATA_")}
    environ |= {name: value for name, value in inputs.secrets.items() if not name.startswith("STRATA_")}
    environ |= {variable_name(label): folder for label, folder in inputs.data.items()}
    return environ | strata_variables(lease, paths) | dict(inputs.server) | dict(inputs.gang)


def for_user(inherited: Mapping[str, str], home: str) -> dict[str, str]:
    """The inherited variables; with a `home`, that of another user, without those of the agent's own user."""
    environ = dict(inherited)
    if home:
        for name in ("USER", "LOGNAME", "SHELL", "HF_HOME", "TORCH_HOME"):
            environ.pop(name, None)
        environ["HOME"] = home
    return environ


def strata_variables(lease: LeaseGiven, paths: AttemptPaths) -> dict[str, str]:
    """The STRATA_ variables: the contract with trainers, which `strata.fleet.trainer` reads."""
    environ = {
        "STRATA_JOB": lease.job_id,
        "STRATA_EPOCH": str(lease.epoch),
        "STRATA_MODEL": lease.spec.model,
        "STRATA_MODE": lease.spec.mode,
        "STRATA_SEED": str(lease.spec.seed),
        "STRATA_SPEC": str(paths.spec),
        "STRATA_HYPER": str(paths.hyper),
        "STRATA_OUTPUT": str(paths.output),
        "STRATA_METRICS": str(paths.metrics),
        "STRATA_CHECKPOINT": str(paths.checkpoints),
    }
    if lease.resumed:
        environ["STRATA_CHECKPOINT_IN"] = str(paths.resume)
    return environ
