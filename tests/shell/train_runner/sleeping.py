"""A process that holds tensors, sleeps and wakes: `python -m tests.shell.train_runner.sleeping FILE COUNT`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import msgspec
import torch

from strata.train.runner.model.offload import SleepOffload
from strata.train.runner.model.process_memory import process_bytes

HELD: Final = 192 << 20


class Slept(msgspec.Struct):
    held: int
    """Bytes of the tensors."""
    freed: int
    """What was reported."""
    resident_before: int
    resident_asleep: int
    equal: bool
    """Whether the tensors came back as they were."""


def main(file: Path, count: int) -> None:
    numbers = HELD // 4 // count
    tensors = [torch.full((numbers,), float(number)) for number in range(count)]
    # Blocks that are not given back although they are free would hide among small ones.
    kept = [torch.ones(100) for _ in range(count)]
    before = process_bytes("VmRSS")
    slept = SleepOffload(tensors, file)
    asleep = process_bytes("VmRSS")
    slept.restore()
    equal = all(bool((tensor == number).all()) for number, tensor in enumerate(tensors)) and len(kept) == count
    done = Slept(count * numbers * 4, slept.freed, before, asleep, equal)
    sys.stdout.buffer.write(msgspec.json.encode(done))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
