"""The training of examples/elastic_sft, held at a step that a file names: a test kills and starts hosts meanwhile."""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "elastic_sft"))
train: Final[Any] = importlib.import_module("train")
learn: Final = train.Training.learn


def _is_held(gate: Path, step: int) -> bool:
    try:
        return step >= int(gate.read_text("utf-8"))
    except FileNotFoundError:
        return False


def learn_below_the_gate(self: Any, batch: Any, learnt: int) -> Any:
    gate = self.given.out / "gate"
    while _is_held(gate, self.step):
        time.sleep(0.05)
    return learn(self, batch, learnt)


if __name__ == "__main__":
    train.Training.learn = learn_below_the_gate
    train.main()
