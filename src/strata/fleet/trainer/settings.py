"""The variables that the agent sets for a trainer: STRATA_METRICS, STRATA_HYPER, STRATA_OUTPUT, STRATA_CHECKPOINT…"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

SECTION: Final = "trainer"
VARIABLES: Final = {
    "STRATA_METRICS": "metrics",
    "STRATA_HYPER": "hyper",
    "STRATA_OUTPUT": "output",
    "STRATA_CHECKPOINT": "checkpoint",
    "STRATA_CHECKPOINT_IN": "checkpoint_in",
    "STRATA_MODEL": "model",
    "STRATA_MODE": "mode",
    "STRATA_SEED": "seed",
}
"""The variables of the contract between agent and trainer, and their settings."""


class TrainerSettings(msgspec.Struct, frozen=True, kw_only=True):
    metrics: Annotated[str, msgspec.Meta(pattern=r"\A(?:fd:[0-9]{1,9}|(?!fd:).*)\Z")] = ""
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
