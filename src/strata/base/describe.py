"""The flag `--describe`, by which a trainer prints its parameters, and the refusal to train under it."""

from __future__ import annotations

import sys
from typing import Final

FLAG: Final = "--describe"


def refuse_describe(function: str) -> None:
    """End a program that was started for its parameters and begins to train, before it does."""
    if _is_given():
        raise SystemExit(
            f"{function}() was called under {FLAG}: call strata.fleet.trainer.handle_describe(…) before it, or leave"
            f" {FLAG} away"
        )


def refuse_rendezvous() -> None:
    """End a torchrun whose program is to print its parameters: its nodes would wait for each other before that."""
    if _is_given():
        raise SystemExit(
            f"torchrun was started under {FLAG}, and would join the job before its program can answer: put the schema"
            f" into the file that params of the trainer names, or leave {FLAG} away"
        )


def _is_given() -> bool:
    return FLAG in sys.argv[1:]
