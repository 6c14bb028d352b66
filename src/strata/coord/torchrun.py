"""The entry point of torchrun's backend `strata`, which torch loads in every process that uses elastic; it imports
nothing before the backend is requested.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def backend() -> Callable[[Any], Any]:
    """Returns the function from `RendezvousParameters` to a `RendezvousHandler`; torch is not imported for their
    types."""
    return _create


def _create(parameters: Any) -> Any:
    from strata.base.describe import refuse_rendezvous

    refuse_rendezvous()
    from strata.coord.worker.torch_rendezvous import StrataRendezvous

    return StrataRendezvous(parameters)
