"""Where a trainer finds what the agent gave it: STRATA_METRICS."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

SECTION: Final = "trainer"
VARIABLES: Final = {"STRATA_METRICS": "metrics"}
"""The names of the contract between agent and trainer, and the settings they are."""


class TrainerSettings(msgspec.Struct, frozen=True, kw_only=True):
    metrics: Annotated[str, msgspec.Meta(pattern=r"\A(?:fd:[0-9]{1,9}|(?!fd:).*)\Z")] = ""
    """Where the JSON lines go: the path of a file, or `fd:N` for an open descriptor. Empty: nowhere."""
