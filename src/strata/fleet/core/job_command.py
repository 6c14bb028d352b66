"""Lists the environment variables that a job may inherit from the agent (`PASSED`: PATH, HOME, locale …), and makes the
command line of a trainer, also for `--describe`.

A variable that is not on the list may be a credential, so the list names what is passed and not what is withheld.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Final

from strata.fleet.core.jobspec import TrainerSpec

PASSED: Final = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_*", "TZ", "TERM",
    "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES",
    "NVIDIA_DRIVER_CAPABILITIES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MKL_NUM_THREADS",
    "HF_HOME", "HF_HUB_OFFLINE", "TORCH_HOME", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE",
    "SYSTEMROOT", "SYSTEMDRIVE", "WINDIR", "COMSPEC", "PATHEXT", "USERPROFILE", "LOCALAPPDATA", "NUMBER_OF_PROCESSORS",
)  # fmt: skip


def inherited_by_jobs(environ: Mapping[str, str], extra: Sequence[str] = ()) -> dict[str, str]:
    """The variables of the agent that jobs inherit; `extra` are more names or patterns."""
    patterns = (*PASSED, *extra)
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith("STRATA_") and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    }


def job_command(trainer: TrainerSpec, interpreter: str) -> list[str]:
    """`python` becomes the trainer's interpreter, or the host's; any other program is found in the job's PATH."""
    first, *rest = trainer.command
    has_own = trainer.environment is not None or (trainer.venv and not trainer.interpreter)
    if first in ("python", "python3") and not has_own:
        return [trainer.interpreter or interpreter, *rest]
    return [first, *rest]
