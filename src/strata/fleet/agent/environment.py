"""The environment of a job: what is on a list, what the trainer declares, and our own variables. Nothing else.

A variable that is not on the list may be a credential, so the list says what goes and not what stays. Our variables
cannot be overridden by a trainer.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from strata.fleet.agent.workdir import Place
from strata.fleet.core.jobspec import TrainerSpec
from strata.fleet.wire import LeaseGiven

USUAL: Final = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_*", "TZ", "TERM",
    "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES",
    "NVIDIA_DRIVER_CAPABILITIES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MKL_NUM_THREADS",
    "HF_HOME", "HF_HUB_OFFLINE", "TORCH_HOME", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE",
    "SYSTEMROOT", "SYSTEMDRIVE", "WINDIR", "COMSPEC", "PATHEXT", "USERPROFILE", "LOCALAPPDATA", "NUMBER_OF_PROCESSORS",
)  # fmt: skip


def allowed(given: Mapping[str, str], more: Sequence[str] = ()) -> dict[str, str]:
    """Of these variables, those that a job may have."""
    patterns = (*USUAL, *more)
    return {
        name: value
        for name, value in given.items()
        if not name.startswith("STRATA_") and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    }


def environment(
    lease: LeaseGiven,
    trainer: TrainerSpec,
    place: Place,
    *,
    inherited: Mapping[str, str],
    home: str = "",
    devices: Sequence[int] | None = None,
) -> dict[str, str]:
    """`inherited` is what `allowed` let through; `home` that of another user, if the job runs as one."""
    made = of_user(inherited, home)
    made |= {"TMPDIR": str(place.tmp), "PYTHONUNBUFFERED": "1"}
    if devices is not None:
        made["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))
    if trainer.venv:
        programs = Path(trainer.venv) / ("Scripts" if os.name == "nt" else "bin")
        made["VIRTUAL_ENV"] = trainer.venv
        made["PATH"] = os.pathsep.join(filter(None, (str(programs), made.get("PATH", ""))))
    made |= {name: value for name, value in trainer.env.items() if not name.startswith("STRATA_")}
    return made | ours(lease, place)


def of_user(inherited: Mapping[str, str], home: str) -> dict[str, str]:
    """What was inherited, without what belongs to the agent's own user if `home` is that of another one."""
    made = dict(inherited)
    if home:
        for name in ("USER", "LOGNAME", "SHELL", "HF_HOME", "TORCH_HOME"):
            made.pop(name, None)
        made["HOME"] = home
    return made


def ours(lease: LeaseGiven, place: Place) -> dict[str, str]:
    """The contract with trainers; `strata.fleet.trainer` reads it."""
    made = {
        "STRATA_JOB": lease.job_id,
        "STRATA_EPOCH": str(lease.epoch),
        "STRATA_MODEL": lease.spec.model,
        "STRATA_MODE": lease.spec.mode,
        "STRATA_SEED": str(lease.spec.seed),
        "STRATA_SPEC": str(place.spec),
        "STRATA_HYPER": str(place.hyper),
        "STRATA_OUTPUT": str(place.output),
        "STRATA_METRICS": str(place.metrics),
        "STRATA_CHECKPOINT": str(place.checkpoints),
    }
    if lease.checkpoint:
        made["STRATA_CHECKPOINT_IN"] = str(place.resume)
    return made


def command(trainer: TrainerSpec, interpreter: str) -> list[str]:
    """`python` is the trainer's interpreter, or the host's; every other program is looked for in its PATH."""
    first, *rest = trainer.command
    if first in ("python", "python3") and not (trainer.venv and not trainer.interpreter):
        return [trainer.interpreter or interpreter, *rest]
    return [first, *rest]
