"""Saves checkpoint after checkpoint under one name, and prints the number of each when it is told that it is saved.

`save_process FOLDER FIRST LAST [FAILPOINT SKIP]`: dies at the failpoint. Each is recognised by its numbers.
"""

from __future__ import annotations

import sys
from pathlib import Path

from strata.base.failpoint import arm, kill
from strata.train.checkpoints import checkpoint
from strata.train.checkpoints.checkpoint import CheckpointManifest
from strata.train.core import model_options
from tests.shell.train_runner.numbered_checkpoints import contents


def save(folder: Path, number: int) -> None:
    def fill(part: Path) -> None:
        for name, data in contents(number).items():
            (part / name).write_bytes(data)

    manifest = CheckpointManifest(
        model_id="s:train:0",
        seq_id=number,
        kind="weights",
        base_model="b",
        arch="a",
        lora=model_options.LoraConfig(),
        steps=number,
    )
    checkpoint.write(folder, manifest, fill, overwrite=True)


def main(folder: Path, first: int, last: int, *failpoint: str) -> None:
    if failpoint:
        arm(failpoint[0], kill, skip=int(failpoint[1]))
    for number in range(first, last + 1):
        save(folder, number)
        print(number, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
