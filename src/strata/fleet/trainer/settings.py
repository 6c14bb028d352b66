"""The STRATA_ variables that a trainer reads: STRATA_METRICS, STRATA_HYPER, STRATA_OUTPUT, STRATA_CHECKPOINT ….

The standard library alone: the environment of a job has the packages that its file lists, and not those of the agent.
"""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    metrics: str = ""
    """Where the JSON lines are written: the path of a file, or `fd:N` for an open descriptor. Empty: nowhere."""
    hyper: str = ""
    """The JSON file of the hyper-parameters."""
    output: str = ""
    """The folder of the result."""
    checkpoint: str = ""
    """The folder of checkpoints, each a folder that is renamed when it is complete."""
    checkpoint_in: str = ""
    """The checkpoint to resume from. Empty: start from the beginning."""
    model: str = ""
    mode: str = ""
    seed: int = 0


def read_settings() -> TrainerSettings:
    """The contract between agent and trainer."""
    variables = os.environ  # noqa: TID251 - strata.base.settings needs packages that this process may not have
    return TrainerSettings(
        metrics=variables.get("STRATA_METRICS", ""),
        hyper=variables.get("STRATA_HYPER", ""),
        output=variables.get("STRATA_OUTPUT", ""),
        checkpoint=variables.get("STRATA_CHECKPOINT", ""),
        checkpoint_in=variables.get("STRATA_CHECKPOINT_IN", ""),
        model=variables.get("STRATA_MODEL", ""),
        mode=variables.get("STRATA_MODE", ""),
        seed=int(variables.get("STRATA_SEED", "0")),
    )
