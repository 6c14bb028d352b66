"""What the checks find, and the models they compare with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.shell.train_runner.driver import Driver


class Found:
    def __init__(self, ranks: int, models: Path) -> None:
        self.ranks = ranks
        self.models = models
        self.outcomes: dict[str, str] = {}
        self.numbers: dict[str, float] = {}


Check = Callable[[Driver, Found], None]
