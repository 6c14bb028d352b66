"""The flag that asks a program for its parameters instead of a run. Only the standard library: trainers import this."""

from __future__ import annotations

import sys
from typing import Final

FLAG: Final = "--describe"


def refuse_describe(function: str) -> None:
    """End a program that was started for its parameters and begins to train, before it does."""
    if FLAG in sys.argv[1:]:
        raise SystemExit(
            f"{function}() was called under {FLAG}: call strata.fleet.trainer.handle_describe(…) before it, or leave"
            f" {FLAG} away"
        )
